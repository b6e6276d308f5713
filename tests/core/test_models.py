"""Models are resolved to their upstream and their limits."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from msgspec import structs

from proxy.core.errors import InvalidRequest, NotFound
from proxy.core.models import (
    COMPRESS,
    LONGEST_NAME,
    MOST_ROUTES,
    Catalogue,
    LazyTable,
    ModelLimits,
    ModelRule,
    Route,
    ServerWindow,
    WindowSource,
    read_published_table,
    series,
)
from proxy.settings import model_table

TABLE = {
    "gpt-4o": ModelLimits(128_000, None, 16_384),
    "mystery": ModelLimits(None, None, 4_096),
    "azure/eu/gpt-4o": ModelLimits(100_000),
}


def resolve(model: str, *rules: ModelRule, default: str = "main") -> Route:
    return Catalogue(rules, TABLE, default).resolve(model)


def test_the_first_rule_that_matches_holds() -> None:
    """Rules are tried in order, as globs, letter for letter."""
    rules = (
        ModelRule("gpt-5*", "a"),
        ModelRule("gpt-*", "b", window=5),
        ModelRule("[qQ]wen?", "c"),
        ModelRule("*", "d"),
    )
    named = {m: resolve(m, *rules).upstream for m in ("gpt-5-mini", "gpt-4o", "Qwen3", "qwen33", "GPT-5", "", "x/y")}
    assert named == {"gpt-5-mini": "a", "gpt-4o": "b", "Qwen3": "c", "qwen33": "d", "GPT-5": "d", "": "d", "x/y": "d"}


def test_no_rule_and_no_default() -> None:
    """The error names a model without an upstream; with a default upstream the model goes there."""
    assert resolve("foo", ModelRule("bar", "a")) == Route(
        "main", "foo", None, None, "o200k_base", "unknown", requested_model="foo"
    )
    with pytest.raises(NotFound, match="'foo'"):
        resolve("foo", ModelRule("bar", "a"), default="")


def test_a_configured_window_wins() -> None:
    """Figures of the configuration win over the table's; what it leaves out comes from there."""
    found = resolve("gpt-4o", ModelRule("*", "a", window=8_192))
    assert (found.window, found.max_output, found.source) == (8_192, 16_384, "configured")
    found = resolve("gpt-4o", ModelRule("*", "a", max_output=100, unknown_window=5))
    assert (found.window, found.max_output, found.source) == (128_000, 100, "table")


@pytest.mark.parametrize(
    ("model", "window"),
    [
        ("gpt-4o", 128_000),
        ("openai/gpt-4o", 128_000),
        ("azure/eu/gpt-4o", 100_000),
        ("azure/us/gpt-4o", 128_000),
        ("gpt-4o-new", None),
        ("mystery", None),
    ],
)
def test_the_table_is_searched_with_and_without_prefix(model: str, window: int | None) -> None:
    """A name is looked up as it is, then without its provider's prefix."""
    found = resolve(model)
    assert (found.window, found.source) == (window, "table" if window else "unknown")


def test_an_unknown_window_is_not_guessed() -> None:
    """Nobody knows: no window, unless the configuration assumes one."""
    assert resolve("mystery").max_output == 4_096
    assumed = resolve("mystery", ModelRule("*", "a", unknown_window=131_072))
    assert (assumed.window, assumed.source) == (131_072, "assumed")
    unknown = resolve("mystery", ModelRule("*", "a"))
    assert (unknown.window, unknown.source) == (None, "unknown")


@pytest.mark.parametrize(
    ("encoding", "models"),
    [
        ("o200k_base", "gpt-4o gpt-4o-mini-2024-07-18 chatgpt-4o-latest gpt-4.1 gpt-4.1-nano gpt-4.5-preview"),
        ("o200k_base", "gpt-5 gpt-5-mini gpt-5.1 o1 o1-mini o3 o3-pro o4-mini gpt-oss-120b openai/gpt-4o"),
        ("o200k_base", "azure/eu/gpt-5 ft:gpt-4o-mini:me:x:1 qwen3 claude-sonnet-4-5 llama local"),
        ("cl100k_base", "gpt-4 gpt-4-0613 gpt-4-32k gpt-4-turbo gpt-4-turbo-preview gpt-4-1106-preview openai/gpt-4"),
        ("cl100k_base", "gpt-3.5-turbo gpt-3.5-turbo-16k gpt-35-turbo azure/gpt-35-turbo ft:gpt-3.5-turbo:me::1"),
        ("cl100k_base", "ft:gpt-4-0613:me::1 text-embedding-3-small"),
    ],
)
def test_encodings(encoding: str, models: str) -> None:
    """OpenAI's older families have the older vocabulary; everybody else's nearest is the newer one."""
    assert {resolve(model).encoding for model in models.split()} == {encoding}


def test_a_configured_encoding_wins() -> None:
    """A configured encoding is used."""
    assert resolve("gpt-4o", ModelRule("*", "a", encoding="cl100k_base")).encoding == "cl100k_base"


def test_a_routes_name() -> None:
    """Records of one model behind two upstreams, or of two behind one, are kept apart."""
    assert resolve("m", ModelRule("m", "a")).name == "a,m"


def test_many_names_are_still_resolved_right() -> None:
    """More names than are remembered, in any order, resolve as they did."""
    catalogue = Catalogue([ModelRule("a*", "a", window=1), ModelRule("b*", "b", window=2)], TABLE, "main")
    names = [f"{letter}{at}" for at in range(MOST_ROUTES) for letter in "abc"]
    first = [catalogue.resolve(name) for name in names]
    assert [catalogue.resolve(name) for name in names] == first
    assert {route.upstream for route in first if route.model.startswith("b")} == {"b"}


def test_a_name_that_would_fill_the_memory_is_refused() -> None:
    """Names are remembered in several places: a client that sends megabytes of them must not end the process."""
    catalogue = Catalogue([ModelRule("*", "a", window=1)], TABLE, "main")
    assert catalogue.resolve("m" * LONGEST_NAME).upstream == "a"
    with pytest.raises(InvalidRequest, match="at most 2,048 characters"):
        catalogue.resolve("m" * (LONGEST_NAME + 1))
    assert [len(route.requested_model) for route in catalogue.cached_routes()] == [LONGEST_NAME]


def test_what_the_server_tells_comes_between_configuration_and_table() -> None:
    """A configured window wins over the server's word, that over the table; each figure is looked up for itself."""
    windows = {
        "gpt-4o": ServerWindow(32_768),
        "other": ServerWindow(8_192, 8_000, 512, origin="/v1/models max_model_len"),
    }
    rules = [ModelRule("gpt-4o", "a", max_output=99), ModelRule("other", "a"), ModelRule("fixed", "a", window=5_000)]
    queried: list[tuple[str, str, bool]] = []

    def server_window(upstream: str, model: str, ask: bool) -> ServerWindow | None:
        queried.append((upstream, model, ask))
        return windows.get(model)

    catalogue = Catalogue(rules, TABLE, "main", server_window)
    route = catalogue.resolve("gpt-4o")
    assert (route.window, route.max_input, route.max_output, route.source) == (32_768, None, 99, "server")
    route = catalogue.resolve("other", 4_096)
    assert (route.window, route.max_input, route.max_output, route.window_origin) == (
        8_192,
        8_000,
        512,
        windows["other"].origin,
    )
    assert catalogue.resolve("fixed").source == "configured"
    assert queried == [("a", "gpt-4o", False), ("a", "other", True)], "only a body of some size is worth asking for"
    windows["gpt-4o"] = ServerWindow(16_384)
    assert catalogue.resolve("gpt-4o").window == 16_384
    del windows["gpt-4o"]
    assert (catalogue.resolve("gpt-4o").window, catalogue.resolve("gpt-4o").source) == (128_000, "table")


def test_an_input_limit_goes_with_its_window() -> None:
    """The table's limit of the input holds for its own window and smaller ones, not for a larger one somebody set."""
    table = {"gpt-5": ModelLimits(400_000, 272_000, 128_000)}
    limits = {
        window: Catalogue([ModelRule("*", "a", window=window)], table, "").resolve("gpt-5").max_input
        for window in (None, 300_000, 400_000, 1_000_000)
    }
    assert limits == {None: 272_000, 300_000: 272_000, 400_000: 272_000, 1_000_000: None}
    configured = Catalogue([ModelRule("*", "a", max_input=9_000)], table, "").resolve("gpt-5")
    assert (configured.window, configured.max_input) == (400_000, 9_000)


def route(source: WindowSource, window: int | None, max_input: int | None = None) -> Route:
    return Route("a", "m", window, None, "o200k_base", source, max_input=max_input)


@pytest.mark.parametrize(
    ("known", "stated", "beside", "holds"),
    [
        (route("configured", 8_000), 4_000, None, 4_000),
        (route("configured", 8_000), 16_000, None, 8_000),
        (route("server", 8_000), 4_000, 8_000, 4_000),
        (route("server", 8_000), 4_000, 6_000, 8_000),
        (route("server", 8_000), 4_000, None, 8_000),
        (route("server", 8_000), 16_000, 8_000, 8_000),
        (route("table", 8_000), 16_000, None, 16_000),
        (route("table", 8_000), 4_000, None, 4_000),
        (route("assumed", 8_000), 16_000, None, 16_000),
        (route("unknown", None), 4_000, None, 4_000),
        (route("table", 400_000, 272_000), 272_000, None, 400_000),
        (route("server", 8_000), None, None, 8_000),
        (route("unknown", None), None, None, None),
    ],
)
def test_what_an_overflow_teaches(known: Route, stated: int | None, beside: int | None, holds: int | None) -> None:
    """A stated window lowers a configured or reported one and replaces a table's; a new report ends it."""
    assert known.window_after(stated, beside) == holds


def test_steps_and_variants() -> None:
    """A route has its rule's steps; what it teaches is filed under its variant, its records are not."""
    found = resolve("m", ModelRule("*", "a", steps=("big", COMPRESS)))
    assert found.steps == ("big", COMPRESS)
    assert resolve("m").steps == (COMPRESS,)
    wide = replace(found, variant="context-1m")
    assert (found.learned_key, wide.learned_key, wide.name) == ("a,m", "a,m;context-1m", "a,m")


def test_cached_routes_are_those_of_requested_models() -> None:
    """The cached routes are those of requested models, with the server's latest report; no server is queried."""
    queried: list[bool] = []
    windows = {"b": ServerWindow(9_000, origin="/props")}

    def server_window(upstream: str, model: str, ask: bool) -> ServerWindow | None:
        queried.append(ask)
        return windows.get(model)

    catalogue = Catalogue([ModelRule("a*", "up", 5_000), ModelRule("*", "up")], {}, "up", server_window)
    assert catalogue.cached_routes() == []
    for model in ("a1", "b", "c"):
        catalogue.resolve(model, 10**6)
    assert queried == [True, True], "what is configured is asked of nobody"
    found = {route.model: (route.window, route.source) for route in catalogue.cached_routes()}
    assert found == {"a1": (5_000, "configured"), "b": (9_000, "server"), "c": (None, "unknown")}
    assert queried[2:] == [False, False]


def test_another_name_has_the_models_own_figures() -> None:
    """An alias's own limits win, then those of the model's rule, then the table's."""
    own = ModelRule("gpt-4o", "openai", max_output=700, encoding="cl100k_base")
    fast = resolve("fast", ModelRule("fast", "", model="gpt-4o"), own)
    assert (fast.upstream, fast.model, fast.requested_model, fast.name) == ("openai", "gpt-4o", "fast", "openai,gpt-4o")
    assert (fast.window, fast.source, fast.max_output, fast.encoding) == (128_000, "table", 700, "cl100k_base")
    small = resolve("small", ModelRule("small", "other", window=9_000, model="gpt-4o"), own)
    assert (small.upstream, small.window, small.max_output) == ("other", 9_000, 700)
    whichever = resolve("anything", ModelRule("*", "", model="gpt-4o"))
    assert (whichever.upstream, whichever.model) == ("main", "gpt-4o")


@pytest.mark.parametrize(
    ("pattern", "model", "requested", "expected"),
    [
        ("openai/*", "*", "openai/gpt-4o", "gpt-4o"),
        ("openai/*", "*", "openai/a/b*c", "a/b*c"),
        ("*-eu", "azure-*", "gpt-4o-eu", "azure-gpt-4o"),
        ("*", "*", "gpt-4o", "gpt-4o"),
        ("openai/*", "", "openai/gpt-4o", "openai/gpt-4o"),
    ],
)
def test_a_star_stands_for_what_the_names_star_matched(pattern: str, model: str, requested: str, expected: str) -> None:
    """The rest of both is literal; the model's own figures hold."""
    route = resolve(requested, ModelRule(pattern, "up", model=model), ModelRule("gpt-4o", "", window=9_000))
    assert (route.upstream, route.model, route.requested_model) == ("up", expected, requested)
    if model and expected == "gpt-4o" and pattern != "*":
        assert route.window == 9_000


def test_servers_are_queried_by_the_models_own_name() -> None:
    """A server's report on a model applies to its aliases."""
    queried: list[tuple[str, str]] = []

    def server_window(upstream: str, model: str, _ask: bool) -> ServerWindow | None:
        queried.append((upstream, model))
        return ServerWindow(5_000)

    catalogue = Catalogue([ModelRule("fast", "", model="mine")], TABLE, "main", server_window)
    assert catalogue.resolve("fast").window == 5_000
    assert [route.window for route in catalogue.cached_routes()] == [5_000]
    assert set(queried) == {("main", "mine")}


@functools.cache
def raw() -> dict[str, ModelLimits]:
    return dict(model_table())


@functools.cache
def table() -> dict[str, ModelLimits]:
    return read_published_table({name: structs.replace(row, price_tier=None) for name, row in raw().items()})


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        ("gpt-4o", ModelLimits(128_000, None, 16_384)),
        ("gpt-4.1", ModelLimits(1_047_576, None, 32_768)),
        ("o3", ModelLimits(200_000, None, 100_000)),
        ("gpt-5", ModelLimits(400_000, 272_000, 128_000)),
        ("gpt-5-mini", ModelLimits(400_000, 272_000, 128_000)),
        ("azure/eu/gpt-5-2025-08-07", ModelLimits(400_000, 272_000, 128_000)),
        ("gpt-5.1-codex", ModelLimits(400_000, 272_000, 128_000)),
        ("gpt-5.4", ModelLimits(1_050_000, 922_000, 128_000)),
        ("azure/gpt-5.4", ModelLimits(1_050_000, 922_000, 128_000)),
        ("claude-sonnet-4-5", ModelLimits(200_000, None, 64_000)),
        ("gemini-2.5-pro", ModelLimits(1_048_576, None, 65_535)),
        ("novita/deepseek/deepseek-v3.1", ModelLimits(131_072, None, 32_768)),
    ],
)
def test_the_installed_table(model: str, facts: ModelLimits) -> None:
    """Known models come out with the figures their makers publish, or with smaller ones."""
    assert table()[model] == facts


def test_only_openai_rows_are_raised() -> None:
    """No window comes out larger than its row's input figure, except of OpenAI's series, by exactly the output."""
    raised = {name: facts for name, facts in table().items() if (facts.window or 0) > (raw()[name].max_input or 0)}
    assert raised
    assert {series(name) for name in raised} <= {"gpt-5", "gpt-6"}
    sums = {(facts.max_input, facts.max_output, facts.window) for facts in raised.values()}
    assert sums <= {
        (272_000, 128_000, 400_000),
        (922_000, 128_000, 1_050_000),
        (111_616, 16_384, 128_000),
    }, "a new pair: check it against what the maker says"
    for facts in table().values():
        assert facts.max_input is None or facts.window is None or facts.max_input < facts.window


def test_a_lazy_table_computes_what_is_read() -> None:
    """Names are those of the rows; a value is computed only when it is read."""
    read: list[str] = []

    def double(name: str, row: int) -> int:
        read.append(name)
        return 2 * row

    lazy = LazyTable({"one": 1, "two": 2}, double)
    assert (len(lazy), list(lazy), "one" in lazy, "three" in lazy) == (2, ["one", "two"], True, False)
    assert not read
    assert (lazy["two"], lazy.get("three")) == (4, None)
    assert read == ["two"]


def test_a_pair_needs_one_series() -> None:
    """Figures that differ by their output speak of one window only within one numbered series."""
    rows = {
        "gpt-5": ModelLimits(None, 272, 128),
        "openai.gpt-5.1-codex": ModelLimits(None, 400, 128),
        "gpt-6": ModelLimits(None, 272, 128),
        "gpt-5o": ModelLimits(None, 272, 128),
        "other": ModelLimits(None, 400, 128),
        "gpt-5-nano": ModelLimits(None, None, 128),
        "gpt-5-x": ModelLimits(None, 272, None),
    }
    read = read_published_table(rows)
    assert read["gpt-5"] == ModelLimits(400, 272, 128)
    assert read["openai.gpt-5.1-codex"] == ModelLimits(400, 272, 128)
    assert read["gpt-6"] == read["gpt-5o"] == ModelLimits(272, None, 128)
    assert read["other"] == ModelLimits(400, None, 128)
    assert read["gpt-5-nano"] == ModelLimits(None, None, 128)
    assert read["gpt-5-x"] == ModelLimits(272, None, None)


@pytest.mark.parametrize(
    ("expected", "models"),
    [
        ("gpt-5", "gpt-5 azure/us/gpt-5.1-chat databricks-gpt-5 gpt-5-mini"),
        ("gpt-6", "us.openai.gpt-6-sol"),
        ("", "gpt-4o o3 gpt-oss-20b claude-3 gpt kimi-k2"),
    ],
)
def test_series(expected: str, models: str) -> None:
    """The series is read from the name, with any reseller's prefix."""
    assert {series(model) for model in models.split()} == {expected}
