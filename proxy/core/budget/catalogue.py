"""Which upstream serves a model, and how large its window is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from proxy.core.errors import NotFound

OPENAI_ENCODINGS = (
    ("gpt-3.5*", "cl100k_base"),
    ("gpt-35*", "cl100k_base"),
    ("gpt-4o*", "o200k_base"),
    ("gpt-4.1*", "o200k_base"),
    ("gpt-4.5*", "o200k_base"),
    ("gpt-4*", "cl100k_base"),
    ("text-embedding-*", "cl100k_base"),
)
"""Encodings of OpenAI's older models; everything newer, and everybody else's nearest, is o200k_base."""

DEFAULT_ENCODING = "o200k_base"


REMEMBERED = 1_000
"""Model names whose route is remembered."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the configuration: models matching the glob *pattern* go to *upstream* with these limits."""

    pattern: str
    upstream: str
    window: int | None = None
    max_output: int | None = None
    encoding: str | None = None
    unknown_window: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a published table says of a model, in tokens."""

    max_input: int | None
    max_output: int | None


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes and what it may use. ``window`` is ``None`` when nobody knows; ``source`` says who does.

    ``exact``: the configuration names the encoding, so our count is taken for the provider's.
    """

    upstream: str
    model: str
    window: int | None
    max_output: int | None
    encoding: str
    source: str
    exact: bool = False

    @property
    def name(self) -> str:
        """Upstream and model: what records and learned figures of this route are filed under."""
        return f"{self.upstream},{self.model}"


class Catalogue:
    """Resolves model names to routes: configured rules first, then a published table, else unknown."""

    def __init__(self, rules: Sequence[Rule], table: Mapping[str, Facts], default_upstream: str) -> None:
        self._rules = tuple(rules)
        self._table = table
        self._default = default_upstream
        self._routes: dict[str, Route] = {}

    def resolve(self, model: str) -> Route:
        """The route of *model*. Raises ``NotFound`` where no rule matches and there is no default upstream."""
        route = self._routes.get(model)
        if route is None:
            if len(self._routes) >= REMEMBERED:  # names come from clients: never let them fill the memory
                self._routes.clear()
            route = self._routes[model] = self._resolve(model)
        return route

    def _resolve(self, model: str) -> Route:
        rule = next((rule for rule in self._rules if fnmatchcase(model, rule.pattern)), None)
        if rule is None:
            if not self._default:
                raise NotFound(f"No upstream serves the model {model!r}; add a rule for it under 'models'.")
            rule = Rule("*", self._default)
        facts = self._facts(model)
        window, source = rule.window, "configured"
        if window is None and facts is not None and facts.max_input:
            window, source = facts.max_input, "table"
        if window is None:
            window, source = rule.unknown_window, "assumed" if rule.unknown_window else "unknown"
        output = rule.max_output or (facts.max_output if facts else None)
        return Route(
            rule.upstream, model, window, output, rule.encoding or _encoding(model), source, rule.encoding is not None
        )

    def _facts(self, model: str) -> Facts | None:
        """The table's entry under the model's name, or under the name without its provider prefix."""
        return self._table.get(model) or self._table.get(model.rpartition("/")[2])


def _encoding(model: str) -> str:
    name = model.rpartition("/")[2].removeprefix("ft:")
    return next((encoding for pattern, encoding in OPENAI_ENCODINGS if fnmatchcase(name, pattern)), DEFAULT_ENCODING)
