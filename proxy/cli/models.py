"""What is known of models, as rows for people: windows, limits, encodings, factors, and where each comes from."""

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
from proxy.core.learned_window import prior
from proxy.core.models import Catalogue, Route, ServerWindow
from proxy.engine.learned_routes import LearnedRoute, believed, load
from proxy.server.access import client_tenant, proxy_tenant
from proxy.settings import Settings
from proxy.store import Store, StoreMisconfigured, StoreUnsupported, is_running, open_store
from proxy.tasks import Tasks
from proxy.upstream import find
from proxy.upstream_wiring import open_catalogue, open_probes, open_upstream

MOST_TOLD: Final = 50
"""Models of one server that are listed without being asked for by name."""

EVERY: Final = "*"

VARIANTS: Final = ("context-1m-2025-08-07",)
"""Values of ``anthropic-beta`` that change a window, and with which lessons are of their own."""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model. Figures in tokens, ``None`` where nobody knows; each ``from`` says where a figure comes from.

    ``age_seconds`` is how long ago a server said its window, or traffic taught it; ``None`` where neither did.
    ``sent_as`` is what the upstream calls it, where ``model`` is another name; ``variant`` the beta flag that a request
    must carry for the row to hold.
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
    """The rows, and what stood in the way at each upstream that did not tell."""

    rows: tuple[ModelRow, ...]
    troubles: Mapping[str, str]


async def list_models(settings: Settings, pattern: str | None, key: str = "") -> ModelListing:
    """The models of *settings* whose names match the glob *pattern*; without one, those configured and those told of.

    What traffic taught is what holds for clients with *key*, or of every access key. Asks each upstream once, for a few
    seconds at most; one that cannot be reached is left out.
    """
    names = [rule.name for rule in settings.models if not _is_glob(rule.name)]
    if pattern and not _is_glob(pattern):
        names.append(pattern)
    told, troubles = await _survey(settings, names)

    def known(name: str, model: str, _ask: bool) -> ServerWindow | None:
        return find(told.get(name, {}), model)

    catalogue = await asyncio.to_thread(open_catalogue, settings, known)
    routes = list(_routes(settings, catalogue, told, pattern))
    varied = [replace(route, variant=flag) for route in routes if "claude" in route.model for flag in VARIANTS]
    taught = await learned_windows(settings, [*routes, *varied], key)
    # What a flag changes is known only where traffic taught it.
    changed = [route for route in varied if _has_window(taught.get(route.lesson))]
    shown = [*routes, *changed]
    rows = [_row(settings, route, told, taught.get(route.lesson)) for route in shown]
    return ModelListing(tuple(rows), troubles)


async def _survey(
    settings: Settings, names: Sequence[str]
) -> tuple[dict[str, Mapping[str, ServerWindow]], dict[str, str]]:
    """Ask each upstream for the windows of *names*; return them by upstream, and what stood in the way."""
    failures: list[BaseException] = []
    tasks = Tasks(lambda _, error: failures.append(error))
    upstream = open_upstream(settings)
    try:
        probes = open_probes(settings, upstream, tasks)
        await asyncio.gather(*(probes.survey(each.name, names) for each in settings.upstreams))
        windows = {each.name: probes.windows(each.name) for each in settings.upstreams}
        states = probes.surveys().items()
        return windows, {name: str(state["trouble"]) for name, state in states if state["trouble"]}
    finally:
        await upstream.close()
        await tasks.finish(0.0)


def _has_window(taught: LearnedFacts | None) -> bool:
    return taught is not None and bool(taught.window)


def _names(
    settings: Settings, catalogue: Catalogue, told: Mapping[str, Mapping[str, ServerWindow]], pattern: str | None
) -> list[str]:
    """Return every name that matches *pattern*, sorted; without one the rules in their order, then servers' models."""
    configured = [rule.name for rule in settings.models] or ([EVERY] if settings.upstreams else [])
    if pattern is None:
        return [*configured, *_told_names(told, MOST_TOLD)]
    every = {name for name in (*configured, *_told_names(told, None), *catalogue.names) if not _is_glob(name)}
    matching = sorted(name for name in every if fnmatchcase(name, pattern))
    return matching or ([] if _is_glob(pattern) else [pattern])


def _routes(
    settings: Settings, catalogue: Catalogue, told: Mapping[str, Mapping[str, ServerWindow]], pattern: str | None
) -> Iterable[Route]:
    for name in dict.fromkeys(_names(settings, catalogue, told, pattern)):
        try:
            yield catalogue.resolve(name)
        except NotFound:  # no rule is about it: a request for it would be refused, so there is nothing to tell
            continue


def _told_names(told: Mapping[str, Mapping[str, ServerWindow]], most: int | None) -> Sequence[str]:
    return [name for windows in told.values() for name in sorted(windows)[:most]]


def _row(
    settings: Settings, route: Route, told: Mapping[str, Mapping[str, ServerWindow]], taught: LearnedFacts | None
) -> ModelRow:
    rule = settings.model(route.model)
    window = find(told.get(route.upstream, {}), route.model) if route.source == "server" else None
    holds, origin = route.window, f"{route.source}: {route.how}" if route.how else route.source
    age = None if route.at is None else round(max(0.0, time.perf_counter() - route.at), 1)
    factor, factor_from = _factor(route, taught)
    if taught is not None and taught.window is not None:
        holds, origin, age = taught.window, f"learned: {taught.how}", taught.age_seconds
    return ModelRow(
        route.asked or route.model,
        route.upstream,
        holds,
        route.max_input,
        route.max_output,
        route.encoding,
        factor,
        origin,
        age,
        _output_from(route, rule.max_output_tokens, window),
        "configured" if route.exact else "family",
        factor_from,
        route.model if route.asked not in ("", route.model) else "",
        route.variant,
    )


def _factor(route: Route, taught: LearnedFacts | None) -> tuple[float, str]:
    """Return the provider's tokens for each of our own, and where the figure comes from."""
    factor = prior(route.model, exact=route.exact).factor
    if taught is not None and taught.factor != factor:
        return taught.factor, "learned"
    if route.exact:
        return factor, "configured"
    return factor, "family" if factor != 1.0 else "default"


def _output_from(route: Route, configured: int | None, told: ServerWindow | None) -> str:
    if route.max_output is None:
        return "unknown"
    if configured is not None:
        return "configured"
    return "server" if told is not None and told.max_output_tokens is not None else "table"


def _is_glob(name: str) -> bool:
    return not {"*", "?", "["}.isdisjoint(name)


async def limits(settings: Settings, model: str) -> tuple[int | None, int | None]:
    """Window and longest answer of *model* in tokens, where they are known."""
    rows = (await list_models(settings, model)).rows
    return (rows[0].context_window, rows[0].max_output_tokens) if rows else (None, None)


@dataclass(frozen=True, slots=True)
class LearnedFacts:
    """What holds of a route: its window in tokens if traffic taught one, how, and the count factor."""

    window: int | None
    how: str
    factor: float
    age_seconds: float | None = None


async def learned_windows(settings: Settings, routes: Iterable[Route], key: str = "") -> Mapping[str, LearnedFacts]:
    """What the store knows of *routes*, by their lessons, of every holder of an access key; nothing where none is open.

    Without access keys lessons belong to the clients' own keys: those of *key* are told, or of callers without one. A
    private server is asked while it runs and never started.
    """
    url, path = settings.store.url, settings.store.path
    if url == "memory" or (url == "embedded" and not await is_running(path)):
        return {}
    troubles: list[BaseException] = []
    tasks = Tasks(lambda _, error: troubles.append(error))
    secret = settings.store.key.get_secret_value().encode() if settings.store.key else None
    try:
        others = [key.get_secret_value().encode() for key in settings.store.other_keys]
        store = await open_store(url, directory=path, key=secret, others=others, spawn=tasks.spawn, warn=_unsaid)
    except (StoreMisconfigured, StoreUnsupported):
        return {}
    try:
        found = {route.lesson: await _of(store, route, visible_tenants(settings, key)) for route in routes}
    finally:
        await store.close()
        await tasks.finish(1.0)
    return {name: taught for name, taught in found.items() if taught is not None}


def _unsaid(event: str, facts: Mapping[str, object]) -> None:
    """Whoever only looks has no log; what cannot be read is not shown."""
    del event, facts


def visible_tenants(settings: Settings, key: str) -> list[bytes]:
    """The tenants whose lessons an operator of *settings*, or a client with *key*, may see."""
    if settings.server.access_keys:
        return [proxy_tenant(each.get_secret_value()) for each in settings.server.access_keys]
    if not key:
        return [client_tenant({})]
    return [client_tenant({"authorization": f"Bearer {key}"}), client_tenant({"x-api-key": key})]


async def _of(store: Store, route: Route, callers: Iterable[bytes]) -> LearnedFacts | None:
    """Of several callers' lessons the one with the smallest window."""
    lessons = [lesson for tenant in callers if (lesson := load(await store.records.read_route(tenant, route.lesson)))]
    now = time.time()
    told = [_told(route, lesson, now) for lesson in lessons]
    return min(told, key=lambda each: each.window or learned_window.MOST, default=None)


def _told(route: Route, lesson: LearnedRoute, now: float) -> LearnedFacts:
    window = believed(route, lesson.belief, now)
    factor = lesson.calibration.factor
    if window is None or window == route.window:
        return LearnedFacts(None, "", factor)
    stated = window == lesson.belief.stated
    at = lesson.belief.stated_at if stated else lesson.belief.lowered_at
    return LearnedFacts(window, "stated by an error" if stated else "worked out", factor, round(max(0.0, now - at), 1))


def show_models(rows: list[dict[str, object]]) -> None:
    """Print what is known of models, a row each: those that ``ullage models --json`` gives."""
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
    # A pipe has no width: there nothing is folded.
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
