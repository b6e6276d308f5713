"""Which upstream serves a model, and how large its window is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from proxy.core.budget.windows import Facts, Source, Told, Window
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

COMPRESS = ""
"""The step of an overflow policy that makes the view smaller; every other one is the name of a fallback model."""

SMALLEST_WINDOW = 2_048
"""Tokens that every model in use takes; a token is at least one byte."""

REMEMBERED = 1_000
"""Model names whose route is remembered."""


@dataclass(frozen=True, slots=True)
class Rule:
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
    source: Source
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

    rule: Rule
    facts: Facts
    route: Route


class Catalogue:
    """Resolves model names to routes: configured figures first, then what the server *told*, then a published table.

    ``default_upstream`` serves what no rule says more of; it may be empty.
    """

    def __init__(
        self, rules: Sequence[Rule], table: Mapping[str, Facts], default_upstream: str, told: Told | None = None
    ) -> None:
        self._rules = tuple(rules)
        self._table = table
        self.default_upstream = default_upstream
        self._told = told
        self._known: dict[str, _Known] = {}
        self._informed: dict[str, tuple[Window, Route]] = {}

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
        facts = self._table.get(model) or self._table.get(model.rpartition("/")[2]) or Facts()
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

    def _rule(self, model: str) -> Rule:
        return next(
            (rule for rule in self._rules if fnmatchcase(model, rule.pattern)), Rule("*", self.default_upstream)
        )


def _completed(alias: Rule, own: Rule) -> Rule:
    """*alias* with what the model's *own* line says where it says nothing itself."""
    said = ("upstream", "window", "max_output", "encoding", "unknown_window", "max_input")
    missing = {name: getattr(own, name) for name in said if getattr(alias, name) in (None, "")}
    return replace(alias, **missing, steps=own.steps if alias.steps == (COMPRESS,) else alias.steps)


def _first(rule: Rule, facts: Facts) -> tuple[int | None, Source]:
    if rule.window is not None:
        return rule.window, "configured"
    if facts.window is not None:
        return facts.window, "table"
    return rule.unknown_window, "unknown" if rule.unknown_window is None else "assumed"


def _informed(known: _Known, told: Window) -> Route:
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


def _input_limit(facts: Facts, window: int | None) -> int | None:
    """The table's limit of the input, which says nothing of a window larger than the one it goes with."""
    return facts.max_input if window and facts.window and window <= facts.window else None


def _encoding(model: str) -> str:
    name = model.rpartition("/")[2].removeprefix("ft:")
    return next((encoding for pattern, encoding in OPENAI_ENCODINGS if fnmatchcase(name, pattern)), DEFAULT_ENCODING)
