"""The routes below ``/ullage/api/memories`` by which callers read and write the memories of their projects.

The caller has the credential of its model calls, and the project is that of the header ``x-ullage-project``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

import msgspec

from proxy.core.errors import NotFound
from proxy.core.request import options_in
from proxy.features.memories.book import ID, MemoryBook, NewMemory
from proxy.features.memories.memory import MOST_WORKING_DAYS, Class, Memory
from proxy.server.access import Access
from proxy.server.admin import Route
from proxy.server.config import Limits
from proxy.server.incoming import IncomingRequest
from proxy.server.own_api import OwnApi, decoded, query

_NO_MEMORY: Final = "There is no such memory of yours in this project, which is that of the header x-ullage-project."
_NO_NEW_MEMORY: Final = (
    'Send {"type": "project" or "user" or "decision", "title": TEXT, "content": TEXT}, and if you like "class" '
    f'(priority, durable, working), "expires_days" (1 to {MOST_WORKING_DAYS}, for working) and "pinned".'
)
_NO_PIN: Final = 'Send {"pinned": true} or {"pinned": false}.'


class _NewMemory(msgspec.Struct, forbid_unknown_fields=True, rename={"class_": "class"}):
    type: Literal["project", "user", "decision"]
    title: str
    content: str
    class_: Class = "durable"
    expires_days: Annotated[int, msgspec.Meta(ge=1, le=MOST_WORKING_DAYS)] | None = None
    pinned: bool = False


class _Pin(msgspec.Struct, forbid_unknown_fields=True):
    pinned: bool


_NEW_MEMORY: Final = msgspec.json.Decoder(_NewMemory)
_PIN: Final = msgspec.json.Decoder(_Pin)


class MemoryRoutes:
    """Answers requests about memories of *book*. Every route raises ``UllageError``."""

    def __init__(self, access: Access, book: MemoryBook, limits: Limits) -> None:
        self._api = OwnApi(access, limits, "requests about memories")
        self._book = book

    def by_name(self) -> Mapping[str, Route]:
        """Return the routes by the name that follows ``/ullage/api/`` in the path."""
        return {"memories": self.memories}

    async def memories(self, request: IncomingRequest, name: str) -> tuple[int, Mapping[str, object]]:
        """List or search the project's memories, add one, or pin or forget the one called *name*."""
        tenant, headers = self._api.caller(request)
        project = options_in(headers.own).project
        if not name and request.method in ("GET", "HEAD"):
            return 200, await self._listed(tenant, project, query(request.raw_path).get("q", ""))
        if not name and request.method == "POST":
            new = decoded(await self._api.body(request, tenant, headers), _NEW_MEMORY, _NO_NEW_MEMORY)
            memory = NewMemory(new.type, new.title, new.content, new.class_, new.expires_days, new.pinned)
            return 201, memory_json(await self._book.add(tenant, project, memory))
        if not ID.fullmatch(name) or request.method not in ("PUT", "DELETE"):
            raise NotFound(f"{_NO_MEMORY} GET and POST go to /ullage/api/memories, PUT and DELETE to one of them.")
        if request.method == "DELETE":
            return await self._forgotten(tenant, project, name)
        pin = decoded(await self._api.body(request, tenant, headers), _PIN, _NO_PIN)
        pinned = await self._book.pin(tenant, project, name, pinned=pin.pinned)
        if pinned is None:
            raise NotFound(_NO_MEMORY)
        return 200, memory_json(pinned)

    async def _listed(self, tenant: bytes, project: str, search: str) -> Mapping[str, object]:
        if search.strip():
            memories = await self._book.search(tenant, project, search)
        else:
            memories = await self._book.valid(tenant, project)
        return {"project": project, "memories": [memory_json(memory) for memory in memories]}

    async def _forgotten(self, tenant: bytes, project: str, name: str) -> tuple[int, Mapping[str, object]]:
        if not await self._book.forget(tenant, project, [name]):
            raise NotFound(_NO_MEMORY)
        return 200, {"id": name, "forgotten": True}


def memory_json(memory: Memory) -> dict[str, object]:
    """Return *memory* as callers see it."""
    expires_at = None
    if memory.expires_at and not memory.pinned:
        expires_at = _time(memory.expires_at)
    return {
        "id": memory.id,
        "type": memory.type,
        "title": memory.title,
        "content": memory.content,
        "class": memory.class_,
        "pinned": memory.pinned,
        "origin": memory.origin,
        "created_at": _time(memory.created_at),
        "expires_at": expires_at,
    }


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
