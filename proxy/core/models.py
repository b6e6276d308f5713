"""Which upstream serves a model, how large its window is, and who says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from proxy.core.errors import NotFound

WindowSource = Literal["configured", "server", "learned", "table", "assumed", "unknown"]
"""Who says how large a window is, most believed first."""

_SERIES = re.compile(r"(?:^|[./-])(gpt-\d+)(?![a-z\d])")
"""The series of an OpenAI model's name, with or without the prefixes that resellers put before it."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What somebody says of a model, in tokens; ``None`` where nothing is said.

    ``window`` is input and output together, ``max_input`` a limit of the input beside it; inputs above ``tier`` cost
    more for each token.
    """

    window: int | None = None
    max_input: int | None = None
    max_output: int | None = None
    tier: int | None = None


@dataclass(frozen=True, slots=True)
class ServerWindow:
    """What a server says of itself, in tokens; ``at`` is the monotonic second since when it has said just that.

    ``how`` names the route and the member it was read from.
    """

    context_window: int
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    source: WindowSource = "server"
    at: float = 0.0
    how: str = ""


WindowLookup = Callable[[str, str, bool], ServerWindow | None]
"""What the named upstream says of the named model, as far as it is known this instant; never waits.

The last argument says whether it is worth asking the upstream where that is unknown or old.
"""


def published(rows: Mapping[str, ModelLimits]) -> dict[str, ModelLimits]:
    """What a published table says, read safely; in each row only ``max_input`` and ``max_output`` are looked at.

    A row's input figure is mostly the shared window (gpt-4o: 128,000; Claude: 200,000 or 1,000,000), so it is taken
    for the window: where it is only the input's, the window comes out too small and never too large. For OpenAI's
    numbered series the table holds both readings side by side: 272,000 + 128,000 in the rows of gpt-5 and 400,000
    with the same output in those of gpt-5.1-codex; 922,000 against 1,050,000; 111,616 + 16,384 against 128,000. Two
    rows of one series whose inputs differ by exactly their common output figure speak of one window: the larger
    figure is the window, the smaller the limit of its input. Elsewhere such a pair is chance (131,072 and 163,840
    with 32,768, of two hosts of one DeepSeek model) and says nothing.
    """
    pairs = {(series(name), row.max_input, row.max_output) for name, row in rows.items() if series(name)}
    return {name: _read(row, series(name), pairs) for name, row in rows.items()}


def series(model: str) -> str:
    """The numbered OpenAI series *model* belongs to, such as ``gpt-5``; empty for every other model."""
    found = _SERIES.search(model)
    return found[1] if found else ""


def _read(row: ModelLimits, name: str, pairs: set[tuple[str, int | None, int | None]]) -> ModelLimits:
    taken, output, tier = row.max_input, row.max_output, row.tier
    if not name or taken is None or output is None:
        return ModelLimits(taken, None, output, tier)
    if (name, taken + output, output) in pairs:
        return ModelLimits(taken + output, taken, output, tier)
    return ModelLimits(taken, taken - output if (name, taken - output, output) in pairs else None, output, tier)


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

COMPRESS = ""
"""The step of an overflow policy that makes the view smaller; every other one is the name of a fallback model."""

SMALLEST_WINDOW = 2_048
"""Tokens that every model in use takes; a token is at least one byte."""

REMEMBERED = 1_000
"""Model names whose route is remembered."""


@dataclass(frozen=True, slots=True)
class ModelRule:
    """One line of the configuration: models matching the glob *pattern* go to *upstream* with these limits.

    An empty upstream is the default one. With a ``model`` the line is about other names for it, and what it leaves open
    is said by that model's own line.
    """

    pattern: str
    upstream: str
    window: int | None = None
    max_output: int | None = None
    encoding: str | None = None
    unknown_window: int | None = None
    max_input: int | None = None
    steps: tuple[str, ...] = (COMPRESS,)
    model: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes and what it may use. ``window`` is ``None`` when nobody knows; ``source`` says who does.

    ``max_input`` limits the input beside the window; ``how`` names where a server says so, ``at`` the monotonic second
    since when. ``exact``: the configuration names the encoding, so our count is taken for the provider's. Inputs above
    ``tier`` cost more.

    ``steps`` are what to try, in order, when a conversation does not fit. ``variant`` names what a request asked for
    that changes the window, so that nothing learned with it holds without it.

    ``model`` is what the upstream calls it, ``asked`` what the client did.
    """

    upstream: str
    model: str
    window: int | None
    max_output: int | None
    encoding: str
    source: WindowSource
    exact: bool = False
    max_input: int | None = None
    how: str = ""
    tier: int | None = None
    at: float | None = None
    steps: tuple[str, ...] = (COMPRESS,)
    variant: str = ""

    asked: str = ""

    @property
    def lesson(self) -> str:
        """What this route teaches is filed under it."""
        return f"{self.name};{self.variant}" if self.variant else self.name

    @property
    def name(self) -> str:
        """Upstream and model: what records and learned figures of this route are filed under."""
        return f"{self.upstream},{self.model}"

    def after(self, stated: int | None, beside: int | None) -> int | None:
        """The window in tokens, given that an overflow has *stated* one while the server told of *beside*.

        A configured window is only ever lowered. So is what a server tells of itself, until it tells something else
        than what the overflow contradicted. Tables and assumptions give way. An error that states just the known
        limit of the input says nothing of the window.
        """
        if stated is None or stated == self.max_input or (self.source == "server" and beside != self.window):
            return self.window
        if self.window is None or self.source in ("table", "assumed"):
            return stated
        return min(self.window, stated)

    @property
    def told(self) -> int | None:
        """The window the server tells of itself, if it is that which holds."""
        return self.window if self.source == "server" else None


@dataclass(frozen=True, slots=True)
class _Known:
    """A model's rule and what the table says of it."""

    rule: ModelRule
    facts: ModelLimits
    route: Route


class Catalogue:
    """Resolves model names to routes: configured figures first, then what the server *told*, then a published table.

    ``default_upstream`` serves what no rule says more of; it may be empty.
    """

    def __init__(
        self,
        rules: Sequence[ModelRule],
        table: Mapping[str, ModelLimits],
        default_upstream: str,
        told: WindowLookup | None = None,
    ) -> None:
        self._rules = tuple(rules)
        self._table = table
        self.default_upstream = default_upstream
        self._told = told
        self._known: dict[str, _Known] = {}
        self._informed: dict[str, tuple[ServerWindow, Route]] = {}

    def resolve(self, model: str, size: int = 0) -> Route:
        """The route of *model* for a body of *size* bytes.

        A body that no window could refuse is no reason to ask a server for its window. Raises ``NotFound`` where no
        rule matches and there is no default upstream.
        """
        known = self._known.get(model)
        if known is None:
            if len(self._known) >= REMEMBERED:  # names come from clients: never let them fill the memory
                self._known.clear()
                self._informed.clear()
            known = self._known[model] = self._look_up(model)
        if self._told is None or known.route.source == "configured":
            return known.route
        window = self._told(known.route.upstream, known.route.model, size > SMALLEST_WINDOW)
        if window is None:
            return known.route
        told, route = self._informed.get(model, (None, known.route))
        if told is not window:
            route = _informed(known, window)
            self._informed[model] = (window, route)
        return route

    def known(self) -> list[Route]:
        """The routes of models that were asked for, as they hold this instant; asks nobody."""
        found = []
        for known in list(self._known.values()):
            told = None
            if self._told is not None and known.route.source != "configured":
                told = self._told(known.route.upstream, known.route.model, False)
            found.append(known.route if told is None else _informed(known, told))
        return found

    @property
    def names(self) -> Iterable[str]:
        """The models that the published table knows."""
        return self._table.keys()

    def _look_up(self, asked: str) -> _Known:
        rule = self._rule(asked)
        model = rule.model or asked
        if model != asked:
            rule = _completed(rule, self._rule(model))
        upstream = rule.upstream or self.default_upstream
        if not upstream:
            raise NotFound(f"No upstream serves the model {asked!r}; add a rule for it under 'models'.")
        # The table's entry under the model's name, or under the name without its provider prefix.
        facts = self._table.get(model) or self._table.get(model.rpartition("/")[2]) or ModelLimits()
        window, source = _first(rule, facts)
        route = Route(
            upstream,
            model,
            window,
            rule.max_output or facts.max_output,
            rule.encoding or _encoding(model),
            source,
            rule.encoding is not None,
            rule.max_input or _input_limit(facts, window),
            steps=rule.steps,
            tier=facts.tier,
            asked=asked,
        )
        return _Known(rule, facts, route)

    def _rule(self, model: str) -> ModelRule:
        return next(
            (rule for rule in self._rules if fnmatchcase(model, rule.pattern)), ModelRule("*", self.default_upstream)
        )


def _completed(alias: ModelRule, own: ModelRule) -> ModelRule:
    """*alias* with what the model's *own* line says where it says nothing itself."""
    said = ("upstream", "window", "max_output", "encoding", "unknown_window", "max_input")
    missing = {name: getattr(own, name) for name in said if getattr(alias, name) in (None, "")}
    return replace(alias, **missing, steps=own.steps if alias.steps == (COMPRESS,) else alias.steps)


def _first(rule: ModelRule, facts: ModelLimits) -> tuple[int | None, WindowSource]:
    if rule.window is not None:
        return rule.window, "configured"
    if facts.window is not None:
        return facts.window, "table"
    return rule.unknown_window, "unknown" if rule.unknown_window is None else "assumed"


def _informed(known: _Known, told: ServerWindow) -> Route:
    rule, facts = known.rule, known.facts
    return replace(
        known.route,
        window=told.context_window,
        max_input=rule.max_input or told.max_input_tokens or _input_limit(facts, told.context_window),
        max_output=rule.max_output or told.max_output_tokens or facts.max_output,
        source=told.source,
        how=told.how,
        at=told.at,
    )


def _input_limit(facts: ModelLimits, window: int | None) -> int | None:
    """The table's limit of the input, which says nothing of a window larger than the one it goes with."""
    return facts.max_input if window and facts.window and window <= facts.window else None


def _encoding(model: str) -> str:
    name = model.rpartition("/")[2].removeprefix("ft:")
    return next((encoding for pattern, encoding in OPENAI_ENCODINGS if fnmatchcase(name, pattern)), DEFAULT_ENCODING)
