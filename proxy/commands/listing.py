"""What is known of models, as rows for people: windows, limits, encodings, factors, and where each comes from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final

from proxy.commands.learned import Learned, learned
from proxy.core.errors import NotFound
from proxy.core.learned_window import prior
from proxy.core.models import Catalogue, Route, Window
from proxy.routing import open_catalogue, open_probes, open_upstream
from proxy.settings import Settings
from proxy.tasks import Tasks
from proxy.upstream import find

MOST_TOLD: Final = 50
"""Models of one server that are listed without being asked for by name."""

EVERY: Final = "*"

VARIANTS: Final = ("context-1m-2025-08-07",)
"""Values of ``anthropic-beta`` that change a window, and with which lessons are of their own."""


@dataclass(frozen=True, slots=True)
class Row:
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
class Listing:
    """The rows, and what stood in the way at each upstream that did not tell."""

    rows: tuple[Row, ...]
    troubles: Mapping[str, str]


async def listing(settings: Settings, pattern: str | None, key: str = "") -> Listing:
    """The models of *settings* whose names match the glob *pattern*; without one, those configured and those told of.

    What traffic taught is what holds for clients with *key*, or of every access key. Asks each upstream once, for a few
    seconds at most; one that cannot be reached is left out.
    """
    names = [rule.name for rule in settings.models if not _is_glob(rule.name)]
    if pattern and not _is_glob(pattern):
        names.append(pattern)
    told, troubles = await _survey(settings, names)

    def known(name: str, model: str, _ask: bool) -> Window | None:
        return find(told.get(name, {}), model)

    catalogue = await asyncio.to_thread(open_catalogue, settings, known)
    routes = list(_routes(settings, catalogue, told, pattern))
    varied = [replace(route, variant=flag) for route in routes if "claude" in route.model for flag in VARIANTS]
    taught = await learned(settings, [*routes, *varied], key)
    # What a flag changes is known only where traffic taught it.
    changed = [route for route in varied if _has_window(taught.get(route.lesson))]
    shown = [*routes, *changed]
    rows = [_row(settings, route, told, taught.get(route.lesson)) for route in shown]
    return Listing(tuple(rows), troubles)


async def _survey(settings: Settings, names: Sequence[str]) -> tuple[dict[str, Mapping[str, Window]], dict[str, str]]:
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


def _has_window(taught: Learned | None) -> bool:
    return taught is not None and bool(taught.window)


def _names(
    settings: Settings, catalogue: Catalogue, told: Mapping[str, Mapping[str, Window]], pattern: str | None
) -> list[str]:
    """Return every name that matches *pattern*, sorted; without one the rules in their order, then servers' models."""
    configured = [rule.name for rule in settings.models] or ([EVERY] if settings.upstreams else [])
    if pattern is None:
        return [*configured, *_told_names(told, MOST_TOLD)]
    every = {name for name in (*configured, *_told_names(told, None), *catalogue.names) if not _is_glob(name)}
    matching = sorted(name for name in every if fnmatchcase(name, pattern))
    return matching or ([] if _is_glob(pattern) else [pattern])


def _routes(
    settings: Settings, catalogue: Catalogue, told: Mapping[str, Mapping[str, Window]], pattern: str | None
) -> Iterable[Route]:
    for name in dict.fromkeys(_names(settings, catalogue, told, pattern)):
        try:
            yield catalogue.resolve(name)
        except NotFound:  # no rule is about it: a request for it would be refused, so there is nothing to tell
            continue


def _told_names(told: Mapping[str, Mapping[str, Window]], most: int | None) -> Sequence[str]:
    return [name for windows in told.values() for name in sorted(windows)[:most]]


def _row(settings: Settings, route: Route, told: Mapping[str, Mapping[str, Window]], taught: Learned | None) -> Row:
    rule = settings.model(route.model)
    window = find(told.get(route.upstream, {}), route.model) if route.source == "server" else None
    holds, origin = route.window, f"{route.source}: {route.how}" if route.how else route.source
    age = None if route.at is None else round(max(0.0, time.perf_counter() - route.at), 1)
    factor, factor_from = _factor(route, taught)
    if taught is not None and taught.window is not None:
        holds, origin, age = taught.window, f"learned: {taught.how}", taught.age_seconds
    return Row(
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


def _factor(route: Route, taught: Learned | None) -> tuple[float, str]:
    """Return the provider's tokens for each of our own, and where the figure comes from."""
    factor = prior(route.model, exact=route.exact).factor
    if taught is not None and taught.factor != factor:
        return taught.factor, "learned"
    if route.exact:
        return factor, "configured"
    return factor, "family" if factor != 1.0 else "default"


def _output_from(route: Route, configured: int | None, told: Window | None) -> str:
    if route.max_output is None:
        return "unknown"
    if configured is not None:
        return "configured"
    return "server" if told is not None and told.max_output_tokens is not None else "table"


def _is_glob(name: str) -> bool:
    return not {"*", "?", "["}.isdisjoint(name)


async def limits(settings: Settings, model: str) -> tuple[int | None, int | None]:
    """Window and longest answer of *model* in tokens, where they are known."""
    rows = (await listing(settings, model)).rows
    return (rows[0].context_window, rows[0].max_output_tokens) if rows else (None, None)
