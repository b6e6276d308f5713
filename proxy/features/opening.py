"""Builds the features whose folders exist. A folder can be deleted, and nothing else has to change.

A folder has a module ``feature`` with a function ``open_features``, which takes ``FeatureParts`` and returns features
and server tools; one ``ServerTools`` answers the calls of all tools. It may have ``open_routes``, for routes below
``/ullage/api/``. The folder ``history`` has ``open_history`` instead, because summaries and the server use it, too. The
folders are imported by name when the process starts (``features.settings.FOLDERS``); no other module imports them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from itertools import chain
from types import ModuleType

import msgspec

from proxy.core.conversation import ItemText
from proxy.core.models import Route
from proxy.core.tokens.budget import Shares
from proxy.engine.features import Feature
from proxy.engine.reading import Reader
from proxy.engine.records import CompactionRecords
from proxy.features.settings import FOLDERS, HISTORY, feature_module
from proxy.server.access import Access
from proxy.server.admin import OpenRoutes, no_routes
from proxy.server.admin import Route as OwnRoute
from proxy.server.config import Limits
from proxy.server_tools.answer import ServerTools
from proxy.server_tools.tool import ServerTool
from proxy.settings import Settings
from proxy.store import Store
from proxy.summaries import OnNote, ignore_note
from proxy.tasks import Faults, Spawn, Tasks, Warn


class FeatureParts(msgspec.Struct, frozen=True):
    """The parts that features are built from. ``resolve`` returns the route of a model, ``spawn`` starts a task."""

    settings: Settings
    store: Store
    reader: Reader
    records: CompactionRecords
    resolve: Callable[[str], Route]
    shares: Shares
    faults: Faults
    spawn: Spawn


class EarlierItem(msgspec.Struct, frozen=True):
    """An item of the earlier conversation ``session``: its ``number`` counts from 1. A summary has that of its last
    item.

    ``written_at`` is the Unix time at which it was stored.
    """

    session: str
    written_at: int
    number: int
    text: ItemText
    is_summary: bool = False

    @property
    def day(self) -> str:
        """The day on which it was stored, in UTC, as in ``2026-01-31``."""
        return datetime.fromtimestamp(self.written_at, UTC).date().isoformat()


ReadEarlier = Callable[[bytes, str, bytes], Awaitable[list[EarlierItem]]]
"""Reads the stored items of a tenant's conversations of one project, except the one with the given root hash."""


async def read_no_earlier(tenant: bytes, project: str, without: bytes) -> list[EarlierItem]:
    """Return no items: without the folder of the history none are stored."""
    del tenant, project, without
    return []


async def _finish_nothing(seconds: float) -> None:
    del seconds


class OpenHistory(msgspec.Struct, frozen=True):
    """The history of conversations as the rest of the process uses it. By default there is none.

    ``note_summary`` notes the state of a summary. ``open_routes`` opens the routes by which callers read the history.
    ``finish`` waits until everything is written, at most for the seconds in its argument.
    """

    features: tuple[Feature, ...] = ()
    note_summary: OnNote = ignore_note
    open_routes: OpenRoutes = no_routes
    finish: Callable[[float], Awaitable[None]] = _finish_nothing


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return the features that the settings switch on, in the order in which they prepare a request."""
    features: list[Feature] = []
    tools: list[ServerTool] = []
    for opened in chain.from_iterable(module.open_features(parts) for module in _modules()):
        if isinstance(opened, ServerTool):
            tools.append(opened)
        else:
            features.append(opened)
    if tools:
        features.append(ServerTools(parts.reader, tools, parts.faults))
    return features


def open_history(
    settings: Settings,
    store: Store,
    tasks: Tasks,
    observe: Callable[[str, int], None],
    warn: Warn,
) -> OpenHistory:
    """Return the history of conversations. *observe* counts the outcomes of archived items, *warn* logs warnings."""
    module = feature_module(HISTORY, "feature")
    if module is None:
        return OpenHistory()
    history: OpenHistory = module.open_history(settings, store, tasks, observe, warn)
    return history


def open_all_routes(settings: Settings, store: Store, history: OpenHistory) -> OpenRoutes:
    """Return a function that opens the routes of all features below ``/ullage/api/``, those of *history* included."""
    opened: list[OpenRoutes] = [history.open_routes]
    opened += [module.open_routes(settings, store) for module in _modules() if hasattr(module, "open_routes")]

    def open_routes(access: Access, limits: Limits) -> Mapping[str, OwnRoute]:
        routes: dict[str, OwnRoute] = {}
        for open_some in opened:
            routes |= open_some(access, limits)
        return routes

    return open_routes


def open_earlier(store: Store) -> ReadEarlier:
    """Return the function that reads earlier conversations; it reads none if the folder of the history was deleted."""
    module = feature_module(HISTORY, "feature")
    if module is None:
        return read_no_earlier
    read: ReadEarlier = module.open_earlier(store)
    return read


def _modules() -> list[ModuleType]:
    """Return the module ``feature`` of each folder that exists, in the order of ``FOLDERS``."""
    modules = (feature_module(name, "feature") for name in FOLDERS)
    return [module for module in modules if module is not None]
