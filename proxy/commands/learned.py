"""What traffic taught of models' windows and counts, read from the store for people."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.core.budget import beliefs
from proxy.core.budget.catalogue import Route
from proxy.engine.learned_routes import LearnedRoute, believed, load
from proxy.server.access import client_tenant, proxy_tenant
from proxy.settings import Settings
from proxy.store import Store, StoreMisconfigured, StoreUnsupported, is_running, open_store
from proxy.tasks import Tasks


@dataclass(frozen=True, slots=True)
class Learned:
    """What holds of a route: its window in tokens if traffic taught one, how, and the count factor."""

    window: int | None
    how: str
    factor: float
    age_seconds: float | None = None


async def learned(settings: Settings, routes: Iterable[Route], key: str = "") -> Mapping[str, Learned]:
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
        found = {route.lesson: await _of(store, route, tenants(settings, key)) for route in routes}
    finally:
        await store.close()
        await tasks.finish(1.0)
    return {name: taught for name, taught in found.items() if taught is not None}


def _unsaid(event: str, facts: Mapping[str, object]) -> None:
    """Whoever only looks has no log; what cannot be read is not shown."""
    del event, facts


def tenants(settings: Settings, key: str) -> list[bytes]:
    """The tenants whose lessons an operator of *settings*, or a client with *key*, may see."""
    if settings.server.access_keys:
        return [proxy_tenant(each.get_secret_value()) for each in settings.server.access_keys]
    if not key:
        return [client_tenant({})]
    return [client_tenant({"authorization": f"Bearer {key}"}), client_tenant({"x-api-key": key})]


async def _of(store: Store, route: Route, callers: Iterable[bytes]) -> Learned | None:
    """Of several callers' lessons the one with the smallest window."""
    lessons = [lesson for tenant in callers if (lesson := load(await store.records.read_route(tenant, route.lesson)))]
    now = time.time()
    told = [_told(route, lesson, now) for lesson in lessons]
    return min(told, key=lambda each: each.window or beliefs.MOST, default=None)


def _told(route: Route, lesson: LearnedRoute, now: float) -> Learned:
    window = believed(route, lesson.belief, now)
    factor = lesson.calibration.factor
    if window is None or window == route.window:
        return Learned(None, "", factor)
    stated = window == lesson.belief.stated
    at = lesson.belief.stated_at if stated else lesson.belief.lowered_at
    return Learned(window, "stated by an error" if stated else "worked out", factor, round(max(0.0, now - at), 1))
