"""``ullage models``: windows, limits, encodings and count factors of models, and the source of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final, Literal

from rich.table import Table

from proxy.cli.clients import ClientFacts
from proxy.cli.output import PIPE_WIDTH, fitting_columns, table_console, window_source
from proxy.core import learned_window
from proxy.core.errors import NotFound
from proxy.core.learned_window import prior_calibration
from proxy.core.models import Catalogue, Route, ServerWindow
from proxy.core.tool_table import is_glob
from proxy.engine.learned_routes import LearnedRoute, load, window_now
from proxy.server.access import client_tenant, proxy_tenant
from proxy.settings import Settings
from proxy.store import Store, StoreMisconfigured, StoreUnsupported, has_data
from proxy.tasks import Tasks, ignore_failure, ignore_warning
from proxy.tokenizers import library
from proxy.upstream import find_window
from proxy.upstream_wiring import open_catalogue, open_probes, open_upstream
from proxy.wiring import open_configured_store

MAX_PER_SERVER: Final = 50
"""Models of one server that are listed if no pattern is given."""

ANY_MODEL: Final = "*"

VARIANTS: Final = ("context-1m-2025-08-07",)
"""Values of ``anthropic-beta`` that change a window; learned limits are stored for each of them separately.

https://platform.claude.com/docs/en/build-with-claude/context-windows
"""

ServerWindows = Mapping[str, Mapping[str, ServerWindow]]
"""Windows that servers state, by upstream and model."""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model. Figures are in tokens, None if unknown; each ``from`` names the source of a figure.

    ``age_seconds`` is the time since a server stated the window or traffic taught it, None if neither did. ``sent_as``
    is the model's name at its upstream if ``model`` is another one. ``variant`` is the beta flag that the row is for.
    ``counted_by`` is the library that counts tokens.
    """

    model: str
    upstream: str
    context_window: int | None
    max_input_tokens: int | None
    max_output_tokens: int | None
    encoding: str
    factor: float
    window_from: str
    age_seconds: float | None
    output_from: str
    encoding_from: str
    factor_from: str
    sent_as: str = ""
    variant: str = ""
    counted_by: str = "tiktoken"


@dataclass(frozen=True, slots=True)
class ModelListing:
    """The rows, and for each upstream that gave no windows the reason."""

    rows: tuple[ModelRow, ...]
    problems: Mapping[str, str]


async def list_models(settings: Settings, pattern: str | None, key: str = "") -> ModelListing:
    """Return the models whose names match the glob *pattern*; without one, configured models and those of servers.

    Learned limits are those of clients with *key*, or of all holders of access keys. Each upstream is probed once,
    for a few seconds at most; one that cannot be reached is left out.
    """
    names = [rule.name for rule in settings.models if not is_glob(rule.name)]
    if pattern and not is_glob(pattern):
        names.append(pattern)
    server_windows, problems = await _ask_servers(settings, names)

    def window_of(upstream: str, model: str, _ask: bool) -> ServerWindow | None:
        return find_window(server_windows.get(upstream, {}), model)

    catalogue = await asyncio.to_thread(open_catalogue, settings, window_of)
    routes = list(_routes(settings, catalogue, server_windows, pattern))
    variants = [replace(route, variant=flag) for route in routes if "claude" in route.model for flag in VARIANTS]
    learned = await learned_windows(settings, [*routes, *variants], key)
    # No server states a window for a beta flag: without one that traffic taught, its row would say nothing.
    with_window = {route_key for route_key, facts in learned.items() if facts.window}
    listed = [*routes, *(route for route in variants if route.learned_key in with_window)]
    rows = [_row(settings, route, server_windows, learned.get(route.learned_key)) for route in listed]
    return ModelListing(tuple(rows), problems)


async def _ask_servers(settings: Settings, names: Sequence[str]) -> tuple[ServerWindows, dict[str, str]]:
    """Ask each upstream for the windows of *names*; return them, and the problems, by upstream."""
    tasks = Tasks(ignore_failure)
    upstream = open_upstream(settings)
    try:
        probes = open_probes(settings, upstream, tasks)
        await asyncio.gather(*(probes.probe_now(target.name, names) for target in settings.upstreams))
        windows = {target.name: probes.windows(target.name) for target in settings.upstreams}
        states = probes.last_probes().items()
        return windows, {name: str(state["trouble"]) for name, state in states if state["trouble"]}
    finally:
        await upstream.close()
        await tasks.finish(0.0)


def _names(
    settings: Settings,
    catalogue: Catalogue,
    server_windows: ServerWindows,
    pattern: str | None,
) -> list[str]:
    """Return every name that matches *pattern*, sorted; without one the rules in their order, then servers' models."""
    configured = [rule.name for rule in settings.models]
    if not configured and settings.upstreams:
        configured = [ANY_MODEL]
    if pattern is None:
        return [*configured, *_server_model_names(server_windows, MAX_PER_SERVER)]
    every = {*configured, *_server_model_names(server_windows, None), *catalogue.published_names}
    matching = sorted(name for name in every if not is_glob(name) and fnmatchcase(name, pattern))
    if not matching and not is_glob(pattern):
        return [pattern]
    return matching


def _routes(
    settings: Settings,
    catalogue: Catalogue,
    server_windows: ServerWindows,
    pattern: str | None,
) -> Iterable[Route]:
    """Yield the routes of all names, without those for which no rule is configured."""
    for name in dict.fromkeys(_names(settings, catalogue, server_windows, pattern)):
        try:
            yield catalogue.resolve(name)
        except NotFound:  # a request for it would be refused
            continue


def _server_model_names(server_windows: ServerWindows, most: int | None) -> Sequence[str]:
    return [name for windows in server_windows.values() for name in sorted(windows)[:most]]


def _row(
    settings: Settings,
    route: Route,
    server_windows: ServerWindows,
    learned: LearnedFacts | None,
) -> ModelRow:
    stated = None
    if route.source == "server":
        stated = find_window(server_windows.get(route.upstream, {}), route.model)
    window = route.window
    window_from, age = window_source(route), None
    if route.window_since is not None:
        age = round(max(0.0, time.perf_counter() - route.window_since), 1)
    if learned is not None and learned.window is not None:
        window, window_from, age = learned.window, f"learned: {learned.how}", learned.age_seconds
    factor, factor_from = _factor(route, learned)
    encoding_from, sent_as = "family", ""
    if route.configured_encoding:
        encoding_from = "configured"
    if route.requested_model not in ("", route.model):
        sent_as = route.model
    return ModelRow(
        model=route.requested_model or route.model,
        upstream=route.upstream,
        context_window=window,
        max_input_tokens=route.max_input,
        max_output_tokens=route.max_output,
        encoding=route.encoding,
        factor=factor,
        window_from=window_from,
        age_seconds=age,
        output_from=_output_from(route, settings.model(route.model).max_output_tokens, stated),
        encoding_from=encoding_from,
        factor_from=factor_from,
        sent_as=sent_as,
        variant=route.variant,
        counted_by=library(route.encoding),
    )


def _factor(route: Route, learned: LearnedFacts | None) -> tuple[float, str]:
    """Return the provider's tokens for each of our own, and the source of this figure."""
    prior = prior_calibration(route.model, configured_encoding=route.configured_encoding).factor
    if learned is not None and learned.factor != prior:
        return learned.factor, "learned"
    if route.configured_encoding:
        return prior, "configured"
    if prior == 1.0:
        return prior, "default"
    return prior, "family"


def _output_from(route: Route, configured: int | None, stated: ServerWindow | None) -> str:
    if route.max_output is None:
        return "unknown"
    if configured is not None:
        return "configured"
    if stated is not None and stated.max_output_tokens is not None:
        return "server"
    return "table"


def client_facts(settings: Settings, key: str, model: str | None, window: int | None) -> ClientFacts:
    """Return the facts of the configuration of a client that requests *model*, without the proxy's address.

    *key* is the variable with its key. Without a *window* it is the model's.
    """
    output: int | None = None
    rows: Sequence[ModelRow] = ()
    if model is not None:
        rows = asyncio.run(list_models(settings, model)).rows
    if rows:
        window, output = window or rows[0].context_window, rows[0].max_output_tokens
    return ClientFacts("", key, model, window, output, window)


@dataclass(frozen=True, slots=True)
class LearnedFacts:
    """A route as traffic taught it: its window in tokens, the source of that figure, and the count factor.

    ``window`` is None if traffic taught none, or the one that is known anyway.
    """

    window: int | None
    how: str
    factor: float
    age_seconds: float | None = None


async def learned_windows(settings: Settings, routes: Iterable[Route], key: str = "") -> Mapping[str, LearnedFacts]:
    """Return the learned limits of *routes* in the store, by ``learned_key``; empty if it cannot be read.

    Without access keys each client key has learned for itself: then *key* is looked up, or callers without a key. An
    embedded store is read if there is one; it is never created.
    """
    url, path = settings.store.url, settings.store.path
    if url == "memory" or (url == "embedded" and not has_data(path)):
        return {}
    tasks = Tasks(ignore_failure)
    try:
        store = await open_configured_store(settings, tasks, ignore_warning, is_fallback=False)
    except (StoreMisconfigured, StoreUnsupported):
        return {}
    tenants = visible_tenants(settings, key)
    try:
        learned = {route.learned_key: await _smallest_learned(store, route, tenants) for route in routes}
    finally:
        await store.close()
        await tasks.finish(1.0)
    return {route_key: facts for route_key, facts in learned.items() if facts is not None}


def visible_tenants(settings: Settings, key: str) -> list[bytes]:
    """Return the tenants whose learned windows an operator of *settings*, or a client with *key*, may see."""
    if settings.server.access_keys:
        return [proxy_tenant(access_key.get_secret_value()) for access_key in settings.server.access_keys]
    if not key:
        return [client_tenant({})]
    return [client_tenant({"authorization": f"Bearer {key}"}), client_tenant({"x-api-key": key})]


async def _smallest_learned(store: Store, route: Route, tenants: Iterable[bytes]) -> LearnedFacts | None:
    """Return the learned limits of *route* for *tenants*: those with the smallest window."""
    now = time.time()
    facts = []
    for tenant in tenants:
        learned_route = load(await store.records.read_route(tenant, route.learned_key))
        if learned_route is not None:
            facts.append(_learned_facts(route, learned_route, now))
    return min(facts, key=lambda learned: learned.window or learned_window.MOST_PLAUSIBLE, default=None)


def _learned_facts(route: Route, learned_route: LearnedRoute, now: float) -> LearnedFacts:
    learned, factor = learned_route.learned_window, learned_route.calibration.factor
    window = window_now(route, learned, now)
    if window is None or window == route.window:
        return LearnedFacts(None, "", factor)
    how, since = "worked out", learned.inferred_at
    if window == learned.stated:
        how, since = "stated by an error", learned.stated_at
    return LearnedFacts(window, how, factor, round(max(0.0, now - since), 1))


WIDE: Final = ("max_input_tokens", "age_seconds", "output_from", "encoding_from", "factor_from", "counted_by")
"""Members of a row that are only shown in a wide table: with them it has some 140 columns."""

TITLES: Final = {"context_window": "window", "max_input_tokens": "input", "max_output_tokens": "output",
                 "age_seconds": "age"}  # fmt: skip
"""Titles of columns. All others are called as the members of a row are, with spaces."""

FIGURES: Final = ("context_window", "max_input_tokens", "max_output_tokens", "factor", "age_seconds")
FOLDED: Final = ("model", "upstream", "window_from")
"""Columns whose texts are folded on a narrow terminal."""

EXPENDABLE: Final = ("factor", "encoding", "max_output_tokens", "upstream", "window_from")
"""Members of a row that a narrow terminal does without, the first ones first."""


def show_models(rows: list[dict[str, object]], *, wide: bool) -> None:
    """Print a table of the rows of ``ullage models --json``: to fit the terminal, or with all sources if *wide*.

    A terminal wraps the lines of a *wide* table, which would have no room for the names of models otherwise.
    """
    names = _shown_names(rows, wide=wide)
    titles = [TITLES.get(name, name.replace("_", " ")) for name in names]
    texts = [_row_cells(row, names) for row in rows]
    console = table_console()
    if wide:
        console.width = PIPE_WIDTH
    expendable = [names.index(name) for name in EXPENDABLE if name in names]
    folded = [names.index(name) for name in FOLDED if name in names]
    shown = fitting_columns([titles, *texts], console.width, expendable, folded)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place in shown:
        justify: Literal["left", "right"] = "left"
        if names[place] in FIGURES:
            justify = "right"
        table.add_column(titles[place], justify=justify, overflow="fold", no_wrap=place not in folded)
    for cells in texts:
        table.add_row(*[cells[place] for place in shown])
    console.print(table)


def _shown_names(rows: Sequence[Mapping[str, object]], *, wide: bool) -> list[str]:
    """Return the members of the rows that are columns of the table: the upstream only if there is one."""
    hidden = {"sent_as", "variant"}
    if not wide:
        hidden.update(WIDE)
    if all(row["upstream"] == "-" for row in rows):
        hidden.add("upstream")
    return [name for name in rows[0] if name not in hidden]


def _row_cells(row: Mapping[str, object], names: Sequence[str]) -> list[str]:
    """Return the texts of the members *names* of a row."""
    cells = {**row, "model": _model_cell(row)}
    if row["age_seconds"] is not None:
        cells["age_seconds"] = f"{row['age_seconds']:g} s"
    return [_cell(cells[name]) for name in names]


def _model_cell(row: Mapping[str, object]) -> str:
    text = str(row["model"])
    if row.get("sent_as"):
        text += f" ({row['sent_as']})"
    if row.get("variant"):
        text += f" with {row['variant']}"
    return text


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
