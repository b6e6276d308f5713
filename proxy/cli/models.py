"""``ullage models``: windows, limits, encodings and count factors of models, and where each comes from."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final

from proxy.core import learned_window
from proxy.core.errors import NotFound
from proxy.core.learned_window import prior_calibration
from proxy.core.models import Catalogue, Route, ServerWindow
from proxy.engine.learned_routes import LearnedRoute, believed, load
from proxy.server.access import client_tenant, proxy_tenant
from proxy.settings import Settings
from proxy.store import Store, StoreMisconfigured, StoreUnsupported, is_running, open_store
from proxy.tasks import Tasks
from proxy.upstream import find
from proxy.upstream_wiring import open_catalogue, open_probes, open_upstream

MAX_PER_SERVER: Final = 50
"""Models of one server that are listed if no pattern is given."""

ANY_MODEL: Final = "*"

VARIANTS: Final = ("context-1m-2025-08-07",)
"""Values of ``anthropic-beta`` that change a window; what traffic taught is kept apart for each.

https://docs.claude.com/en/docs/build-with-claude/context-windows
"""


ServerWindows = Mapping[str, Mapping[str, ServerWindow]]
"""Windows that servers state, by upstream and model."""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model. Figures are in tokens, None if unknown; each ``from`` names the source of a figure.

    ``age_seconds``: since a server stated the window or traffic taught it; None if neither did. ``sent_as``: the
    model's name at its upstream if ``model`` is another name. ``variant``: the beta flag for which the row holds.
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


@dataclass(frozen=True, slots=True)
class ModelListing:
    """The rows, and by upstream why its models are not known."""

    rows: tuple[ModelRow, ...]
    problems: Mapping[str, str]


async def list_models(settings: Settings, pattern: str | None, key: str = "") -> ModelListing:
    """Return the models whose names match the glob *pattern*; without one, configured ones and those that servers list.

    What traffic taught is taken from clients with *key*, or with any access key. Each upstream is asked once, for
    a few seconds at most; one that cannot be reached is left out.
    """
    names = [rule.name for rule in settings.models if not _is_glob(rule.name)]
    if pattern and not _is_glob(pattern):
        names.append(pattern)
    server_windows, problems = await _ask_servers(settings, names)

    def known(name: str, model: str, _ask: bool) -> ServerWindow | None:
        return find(server_windows.get(name, {}), model)

    catalogue = await asyncio.to_thread(open_catalogue, settings, known)
    routes = list(_routes(settings, catalogue, server_windows, pattern))
    variants = [replace(route, variant=flag) for route in routes if "claude" in route.model for flag in VARIANTS]
    learned = await learned_windows(settings, [*routes, *variants], key)
    # A flag's window is known only from traffic.
    changed = [route for route in variants if _has_window(learned.get(route.learned_key))]
    shown = [*routes, *changed]
    rows = [_row(settings, route, server_windows, learned.get(route.learned_key)) for route in shown]
    return ModelListing(tuple(rows), problems)


async def _ask_servers(settings: Settings, names: Sequence[str]) -> tuple[ServerWindows, dict[str, str]]:
    """Ask each upstream for the windows of *names*; return them, and the problems, by upstream."""
    failures: list[BaseException] = []
    tasks = Tasks(lambda _, error: failures.append(error))
    upstream = open_upstream(settings)
    try:
        probes = open_probes(settings, upstream, tasks)
        await asyncio.gather(*(probes.probe_now(each.name, names) for each in settings.upstreams))
        windows = {each.name: probes.windows(each.name) for each in settings.upstreams}
        states = probes.last_probes().items()
        return windows, {name: str(state["trouble"]) for name, state in states if state["trouble"]}
    finally:
        await upstream.close()
        await tasks.finish(0.0)


def _has_window(learned: LearnedFacts | None) -> bool:
    return learned is not None and bool(learned.window)


def _names(
    settings: Settings,
    catalogue: Catalogue,
    server_windows: ServerWindows,
    pattern: str | None,
) -> list[str]:
    """Return every name that matches *pattern*, sorted; without one the rules in their order, then servers' models."""
    configured = [rule.name for rule in settings.models] or ([ANY_MODEL] if settings.upstreams else [])
    if pattern is None:
        return [*configured, *_server_model_names(server_windows, MAX_PER_SERVER)]
    every = {*configured, *_server_model_names(server_windows, None), *catalogue.published_names}
    matching = sorted(name for name in every if not _is_glob(name) and fnmatchcase(name, pattern))
    return matching or ([] if _is_glob(pattern) else [pattern])


def _routes(
    settings: Settings,
    catalogue: Catalogue,
    server_windows: ServerWindows,
    pattern: str | None,
) -> Iterable[Route]:
    for name in dict.fromkeys(_names(settings, catalogue, server_windows, pattern)):
        try:
            yield catalogue.resolve(name)
        except NotFound:  # no rule matches it, so a request for it would be refused
            continue


def _server_model_names(server_windows: ServerWindows, most: int | None) -> Sequence[str]:
    return [name for windows in server_windows.values() for name in sorted(windows)[:most]]


def _row(
    settings: Settings,
    route: Route,
    server_windows: ServerWindows,
    learned: LearnedFacts | None,
) -> ModelRow:
    rule = settings.model(route.model)
    stated = find(server_windows.get(route.upstream, {}), route.model) if route.source == "server" else None
    window = route.window
    origin = f"{route.source}: {route.window_origin}" if route.window_origin else route.source
    age = None if route.window_since is None else round(max(0.0, time.perf_counter() - route.window_since), 1)
    factor, factor_from = _factor(route, learned)
    if learned is not None and learned.window is not None:
        window, origin, age = learned.window, f"learned: {learned.how}", learned.age_seconds
    return ModelRow(
        route.requested_model or route.model,
        route.upstream,
        window,
        route.max_input,
        route.max_output,
        route.encoding,
        factor,
        origin,
        age,
        _output_from(route, rule.max_output_tokens, stated),
        "configured" if route.configured_encoding else "family",
        factor_from,
        route.model if route.requested_model not in ("", route.model) else "",
        route.variant,
    )


def _factor(route: Route, taught: LearnedFacts | None) -> tuple[float, str]:
    """Return the provider's tokens for each of our own, and where the figure comes from."""
    factor = prior_calibration(route.model, configured_encoding=route.configured_encoding).factor
    if taught is not None and taught.factor != factor:
        return taught.factor, "learned"
    if route.configured_encoding:
        return factor, "configured"
    return factor, "family" if factor != 1.0 else "default"


def _output_from(route: Route, configured: int | None, server_windows: ServerWindow | None) -> str:
    if route.max_output is None:
        return "unknown"
    if configured is not None:
        return "configured"
    return "server" if server_windows is not None and server_windows.max_output_tokens is not None else "table"


def _is_glob(name: str) -> bool:
    return not {"*", "?", "["}.isdisjoint(name)


async def limits(settings: Settings, model: str) -> tuple[int | None, int | None]:
    """Return the window and the longest answer of *model* in tokens; None for what is not known."""
    rows = (await list_models(settings, model)).rows
    if not rows:
        return None, None
    return rows[0].context_window, rows[0].max_output_tokens


@dataclass(frozen=True, slots=True)
class LearnedFacts:
    """What traffic taught of a route: its window in tokens, if any, how it is known, and the count factor."""

    window: int | None
    how: str
    factor: float
    age_seconds: float | None = None


async def learned_windows(settings: Settings, routes: Iterable[Route], key: str = "") -> Mapping[str, LearnedFacts]:
    """Return what the store has of *routes*, by ``learned_key``; empty if it cannot be read.

    Without access keys each client key has learned for itself: then *key* is looked up, or callers without a key. A
    private server is asked if it runs and never started.
    """
    url, path = settings.store.url, settings.store.path
    if url == "memory" or (url == "embedded" and not await is_running(path)):
        return {}
    problems: list[BaseException] = []
    tasks = Tasks(lambda _, error: problems.append(error))
    secret = settings.store.key.get_secret_value().encode() if settings.store.key else None
    try:
        others = [key.get_secret_value().encode() for key in settings.store.other_keys]
        store = await open_store(
            url, directory=path, key=secret, others=others, spawn=tasks.spawn, warn=_ignore_warning
        )
    except (StoreMisconfigured, StoreUnsupported):
        return {}
    try:
        found = {
            route.learned_key: await _smallest_learned(store, route, visible_tenants(settings, key)) for route in routes
        }
    finally:
        await store.close()
        await tasks.finish(1.0)
    return {name: learned for name, learned in found.items() if learned is not None}


def _ignore_warning(event: str, facts: Mapping[str, object]) -> None:
    """Drop a warning of the store: a command has no log, and it shows what can be read."""
    del event, facts


def visible_tenants(settings: Settings, key: str) -> list[bytes]:
    """Return the tenants whose learned windows an operator of *settings*, or a client with *key*, may see."""
    if settings.server.access_keys:
        return [proxy_tenant(each.get_secret_value()) for each in settings.server.access_keys]
    if not key:
        return [client_tenant({})]
    return [client_tenant({"authorization": f"Bearer {key}"}), client_tenant({"x-api-key": key})]


async def _smallest_learned(store: Store, route: Route, callers: Iterable[bytes]) -> LearnedFacts | None:
    """Return what was learned of *route* for *callers*; of several windows the smallest."""
    now = time.time()
    found = []
    for tenant in callers:
        learned_route = load(await store.records.read_route(tenant, route.learned_key))
        if learned_route is not None:
            found.append(_learned_facts(route, learned_route, now))
    return min(found, key=lambda each: each.window or learned_window.MOST, default=None)


def _learned_facts(route: Route, learned_route: LearnedRoute, now: float) -> LearnedFacts:
    window = believed(route, learned_route.learned_window, now)
    factor = learned_route.calibration.factor
    if window is None or window == route.window:
        return LearnedFacts(None, "", factor)
    stated = window == learned_route.learned_window.stated
    at = learned_route.learned_window.stated_at if stated else learned_route.learned_window.inferred_at
    return LearnedFacts(window, "stated by an error" if stated else "worked out", factor, round(max(0.0, now - at), 1))


def show_models(rows: list[dict[str, object]]) -> None:
    """Print a table of the rows of ``ullage models --json``."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("model", "upstream"):
        table.add_column(title, overflow="fold")
    for title in ("window", "input", "output"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("encoding", no_wrap=True)
    table.add_column("factor", justify="right", no_wrap=True)
    table.add_column("window from", overflow="fold")
    table.add_column("age", justify="right", no_wrap=True)
    for title in ("output from", "encoding from", "factor from"):
        table.add_column(title)
    for row in rows:
        age = row["age_seconds"]
        cells = {**row, "model": _model(row), "age_seconds": None if age is None else f"{age:g} s"}
        cells.pop("sent_as", None)
        cells.pop("variant", None)
        table.add_row(*map(_cell, cells.values()))
    # A pipe has no width: nothing is folded in it.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 10_000)
    console.print(table)


def _model(row: Mapping[str, object]) -> str:
    own = f" ({row['sent_as']})" if row.get("sent_as") else ""
    variant = f" with {row['variant']}" if row.get("variant") else ""
    return f"{row['model']}{own}{variant}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)
