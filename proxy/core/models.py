"""Resolves models to routes: the upstream of each model, its window, and the source of that figure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Generic, Literal, TypeVar

import msgspec
from msgspec import structs

from proxy.core.errors import InvalidRequest, NotFound

WindowSource = Literal["configured", "server", "learned", "table", "assumed", "unknown"]
"""The source of a window's size, the most trusted first."""

Failure = Literal["rate_limit", "unavailable"]
"""Reasons beside an overflow to ask another model: 429; or 5xx, no connection, no answer in time."""

_SERIES = re.compile(r"(?:^|[./-])(gpt-\d+)(?![a-z\d])")
"""The series in an OpenAI model's name, with or without a reseller's prefix."""


class ModelLimits(msgspec.Struct, frozen=True):
    """The limits of a model in tokens, by one source; None for limits that it does not state.

    ``window`` is input and output together, ``max_input`` a limit of the input beside it. Each token of an input above
    ``price_tier`` costs more.
    """

    window: int | None = None
    max_input: int | None = None
    max_output: int | None = None
    price_tier: int | None = None


class ServerWindow(msgspec.Struct, frozen=True):
    """The window that a server reports for a model, in tokens.

    ``since`` is the monotonic second since when it has reported this window. ``origin`` names the route and the member
    that it was read from.
    """

    context_window: int
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    source: WindowSource = "server"
    since: float = 0.0
    origin: str = ""


WindowLookup = Callable[[str, str, bool], ServerWindow | None]
"""Takes the names of an upstream and a model; returns the window that the upstream reports, None if it is unknown.

It never waits. If the last argument is True and the window is unknown or old, it starts a query in the background.
"""


Row = TypeVar("Row")
Value = TypeVar("Value")


class LazyTable(Mapping[str, Value], Generic[Row, Value]):
    """A table whose values are computed from *rows* when they are read: few of its thousands ever are."""

    def __init__(self, rows: Mapping[str, Row], read: Callable[[str, Row], Value]) -> None:
        self._rows = rows
        self._read = read

    def __getitem__(self, name: str) -> Value:
        return self._read(name, self._rows[name])

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def read_published_table(rows: Mapping[str, ModelLimits]) -> Mapping[str, ModelLimits]:
    """Return the limits of a published table by model; of each row only input, output and price tier are used.

    A row's input figure is mostly the shared window (gpt-4o: 128,000; Claude: 200,000 or 1,000,000), so it is used as
    the window. If it is in fact the limit of the input alone, the window is too small, which is harmless.

    For OpenAI's numbered series the table mixes both readings: 272,000 + 128,000 in the rows of gpt-5 and 400,000 with
    the same output in those of gpt-5.1-codex; 922,000 and 1,050,000; 111,616 + 16,384 and 128,000. If the inputs of two
    rows of one series differ by exactly their common output figure, both describe one window: the larger figure is the
    window, the smaller one the limit of its input. Outside these series such a pair is chance (131,072 and 163,840 with
    32,768, of two hosts of one DeepSeek model) and is ignored.

    https://github.com/BerriAI/litellm/blob/main/model_prices_and_context_window.json
    """
    numbered = [(series(name), rows[name]) for name in rows if series(name)]
    pairs = {(name, row.max_input, row.max_output) for name, row in numbered}
    return LazyTable(rows, lambda name, row: _read_row(row, series(name), pairs))


def series(model: str) -> str:
    """Return the numbered OpenAI series that *model* belongs to, such as ``gpt-5``; empty for every other model."""
    if "gpt-" not in model:
        return ""
    match = _SERIES.search(model)
    if match is None:
        return ""
    return match[1]


def _read_row(row: ModelLimits, name: str, pairs: set[tuple[str, int | None, int | None]]) -> ModelLimits:
    """Return the limits of *row*; *pairs* are the series, input and output of every row of a series."""
    figure, output, tier = row.max_input, row.max_output, row.price_tier
    if not name or figure is None or output is None:
        return ModelLimits(figure, None, output, tier)
    if (name, figure + output, output) in pairs:
        return ModelLimits(figure + output, figure, output, tier)
    if (name, figure - output, output) in pairs:
        return ModelLimits(figure, figure - output, output, tier)
    return ModelLimits(figure, None, output, tier)


OPENAI_ENCODINGS = (
    ("gpt-3.5*", "cl100k_base"),
    ("gpt-35*", "cl100k_base"),
    ("gpt-4o*", "o200k_base"),
    ("gpt-4.1*", "o200k_base"),
    ("gpt-4.5*", "o200k_base"),
    ("gpt-4*", "cl100k_base"),
    ("text-embedding-*", "cl100k_base"),
)
"""Encodings of OpenAI's older models. Newer ones use o200k_base, which is also the nearest to those of other makers.
https://github.com/openai/tiktoken/blob/main/tiktoken/model.py"""

DEFAULT_ENCODING = "o200k_base"
"""The encoding of every other model."""

COMPRESS = ""
"""The step of an overflow policy that makes the view smaller; every other step is the name of a fallback model."""

SMALLEST_WINDOW = 2_048
"""Tokens of the smallest window of any model in use. A token has at least one byte, so a body of so many bytes fits."""

MOST_ROUTES = 1_000
"""Model names whose route is cached: names come from clients and must not fill the memory."""


LONGEST_NAME = 2_048
"""Characters of the longest model name. Amazon's are the longest ones:
https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_InvokeModel.html
"""


class ModelRule(msgspec.Struct, frozen=True):
    """One rule of the configuration: models that match the glob *pattern* go to *upstream* with these limits.

    An empty upstream is the default one. With a ``model`` the rule defines an alias of it (``name_at_upstream``); unset
    limits are those of that model's own rule. ``failovers`` take its place after a failure in ``fail_over_on``.
    ``task_size`` is the size of its tasks and ``conversation_budget`` the tokens that a conversation may use in all (0:
    none), unless a request states others.
    """

    pattern: str
    upstream: str
    window: int | None = None
    max_output: int | None = None
    encoding: str | None = None
    unknown_window: int | None = None
    max_input: int | None = None
    steps: tuple[str, ...] = (COMPRESS,)
    failovers: tuple[str, ...] = ()
    fail_over_on: frozenset[Failure] = frozenset()
    model: str = ""
    task_size: str = ""
    conversation_budget: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """The upstream and model of a request, and their limits in the provider's tokens.

    ``model`` is the upstream's name of the model, ``requested_model`` the client's. ``window`` is None if no source
    states it; ``source`` names the source. ``max_input`` limits the input beside the window. Each token of an input
    above ``price_tier`` costs more.

    ``window_origin`` names the server's route and member that the window was read from, ``window_since`` the monotonic
    second since when it has been reported. With a ``configured_encoding`` our count is assumed to be the provider's.

    ``steps`` are tried in order if a conversation does not fit, ``failovers`` after a failure in ``fail_over_on``.
    ``variant`` names an option of the request that changes the window; figures learned with it apply to it alone.
    ``task_size`` is the size of tasks that state none, and ``conversation_budget`` the tokens that a conversation may
    use in all whose requests state none, 0 for any number.
    """

    upstream: str
    model: str
    window: int | None
    max_output: int | None
    encoding: str
    source: WindowSource
    configured_encoding: bool = False
    max_input: int | None = None
    window_origin: str = ""
    price_tier: int | None = None
    window_since: float | None = None
    steps: tuple[str, ...] = (COMPRESS,)
    failovers: tuple[str, ...] = ()
    fail_over_on: frozenset[Failure] = frozenset()
    variant: str = ""
    requested_model: str = ""
    task_size: str = ""
    conversation_budget: int = 0

    # Computed once, when the route is built:
    name: str = field(init=False, compare=False)
    """Upstream and model: the key of this route's records."""
    learned_key: str = field(init=False, compare=False)
    """The key of the figures that are learned for this route."""

    def __post_init__(self) -> None:
        name = learned_key = f"{self.upstream},{self.model}"
        if self.variant:
            learned_key = f"{name};{self.variant}"
        object.__setattr__(self, "name", name)  # the class is frozen
        object.__setattr__(self, "learned_key", learned_key)

    @property
    def reported_window(self) -> int | None:
        """The window if the server reports it, else None."""
        if self.source != "server":
            return None
        return self.window

    def window_after(self, stated: int | None, reported: int | None) -> int | None:
        """Return the window in tokens after an overflow *stated* one while the server *reported* another one.

        A configured window is only ever lowered, and so is a reported one until the server reports another one than the
        overflow contradicted. A window from a table or an assumption is replaced. An error that states the known limit
        of the input does not change the window.
        """
        if stated is None or stated == self.max_input:
            return self.window
        if self.source == "server" and reported != self.window:
            return self.window
        if self.window is None or self.source in ("table", "assumed"):
            return stated
        return min(self.window, stated)


class _CachedRoute(msgspec.Struct, frozen=True):
    """A model's route without what its server reports, with the rule and the published limits behind it."""

    rule: ModelRule
    published: ModelLimits
    route: Route


class Catalogue:
    """Resolves model names to routes, by configured figures first, then reported ones, then a published table.

    ``default_upstream`` serves the models that no rule names; it may be empty.
    """

    def __init__(
        self,
        rules: Sequence[ModelRule],
        table: Mapping[str, ModelLimits],
        default_upstream: str,
        reported: WindowLookup | None = None,
    ) -> None:
        self._rules = tuple(rules)
        self._table = table
        self.default_upstream = default_upstream
        self._reported = reported
        self._cached: dict[str, _CachedRoute] = {}
        self._with_reports: dict[str, tuple[ServerWindow, Route]] = {}

    def resolve(self, model: str, size: int = 0) -> Route:
        """Return the route of *model* for a body of *size* bytes.

        For a body that fits every window, no server is queried for its window. Raises ``NotFound`` if no rule matches
        and there is no default upstream, and ``InvalidRequest`` for a longer name than any model has.
        """
        cached = self._cached.get(model)
        if cached is None:
            if len(model) > LONGEST_NAME:
                raise InvalidRequest(f"A model's name has at most {LONGEST_NAME:,} characters.")
            if len(self._cached) >= MOST_ROUTES:
                self._cached.clear()
                self._with_reports.clear()
            cached = self._cached[model] = self._look_up(model)
        if self._reported is None or cached.route.source == "configured":
            return cached.route
        window = self._reported(cached.route.upstream, cached.route.model, size > SMALLEST_WINDOW)
        if window is None:
            return cached.route
        last, route = self._with_reports.get(model, (None, cached.route))
        # The same object is returned until the server reports another window, so the route is built once for each.
        if last is not window:
            route = _with_report(cached, window)
            self._with_reports[model] = (window, route)
        return route

    def cached_routes(self) -> list[Route]:
        """Return the present routes of the models that were requested; queries no server."""
        routes = []
        for cached in list(self._cached.values()):
            route = cached.route
            if self._reported is not None and route.source != "configured":
                window = self._reported(route.upstream, route.model, False)
                if window is not None:
                    route = _with_report(cached, window)
            routes.append(route)
        return routes

    @property
    def published_names(self) -> Iterable[str]:
        """The models in the published table."""
        return self._table.keys()

    def _look_up(self, requested: str) -> _CachedRoute:
        rule = self._rule(requested)
        model = name_at_upstream(rule.pattern, rule.model, requested)
        if model != requested:
            rule = _completed(rule, self._rule(model))
        upstream = rule.upstream or self.default_upstream
        if not upstream:
            raise NotFound(f"No upstream serves the model {requested!r}; add a rule for it under 'models'.")
        # The table lists a model under its full name, or without its provider's prefix.
        published = self._table.get(model) or self._table.get(model.rpartition("/")[2]) or ModelLimits()
        window, source = _window(rule, published)
        route = Route(
            upstream,
            model,
            window,
            rule.max_output or published.max_output,
            rule.encoding or _encoding(model),
            source,
            configured_encoding=rule.encoding is not None,
            max_input=rule.max_input or _input_limit(published, window),
            price_tier=published.price_tier,
            steps=rule.steps,
            failovers=rule.failovers,
            fail_over_on=rule.fail_over_on,
            requested_model=requested,
            task_size=rule.task_size,
            conversation_budget=rule.conversation_budget,
        )
        return _CachedRoute(rule, published, route)

    def _rule(self, model: str) -> ModelRule:
        """Return the first rule that matches *model*; else one that sets nothing but the default upstream."""
        for rule in self._rules:
            if fnmatchcase(model, rule.pattern):
                return rule
        return ModelRule("*", self.default_upstream)


def name_at_upstream(pattern: str, model: str, requested: str) -> str:
    """Return the upstream's name of the model *requested*, by a rule for *pattern* with the alias target *model*.

    A ``*`` in *model* stands for what the one in *pattern* matched.
    """
    if "*" not in model:
        return model or requested
    start, _, end = pattern.partition("*")
    return model.replace("*", requested[len(start) : len(requested) - len(end)])


_INHERITED = (
    "upstream",
    "window",
    "max_output",
    "encoding",
    "unknown_window",
    "max_input",
    "task_size",
    "conversation_budget",
)
"""Members that an alias takes from its model's own rule if it does not set them."""


def _completed(alias: ModelRule, own: ModelRule) -> ModelRule:
    """Return *alias*, with figures of the model's *own* rule in place of unset ones."""
    missing = {name: getattr(own, name) for name in _INHERITED if getattr(alias, name) in (None, "", 0)}
    if alias.steps == (COMPRESS,) and not alias.failovers:
        missing |= {"steps": own.steps, "failovers": own.failovers, "fail_over_on": own.fail_over_on}
    return structs.replace(alias, **missing)


def _window(rule: ModelRule, published: ModelLimits) -> tuple[int | None, WindowSource]:
    """Return the window without what a server reports, and its source."""
    if rule.window is not None:
        return rule.window, "configured"
    if published.window is not None:
        return published.window, "table"
    if rule.unknown_window is not None:
        return rule.unknown_window, "assumed"
    return None, "unknown"


def _with_report(cached: _CachedRoute, window: ServerWindow) -> Route:
    """Return the route with the *window* that its server reports; configured limits stay."""
    rule, published = cached.rule, cached.published
    return replace(
        cached.route,
        window=window.context_window,
        max_input=rule.max_input or window.max_input_tokens or _input_limit(published, window.context_window),
        max_output=rule.max_output or window.max_output_tokens or published.max_output,
        source=window.source,
        window_origin=window.origin,
        window_since=window.since,
    )


def _input_limit(published: ModelLimits, window: int | None) -> int | None:
    """Return the table's limit of the input; None if *window* is larger than the table's window."""
    if not window or not published.window or window > published.window:
        return None
    return published.max_input


def _encoding(model: str) -> str:
    """Return the name of the encoding that *model* is counted with."""
    name = model.rpartition("/")[2].removeprefix("ft:")
    for pattern, encoding in OPENAI_ENCODINGS:
        if fnmatchcase(name, pattern):
            return encoding
    return DEFAULT_ENCODING
