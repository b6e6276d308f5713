"""Routes below ``/ullage/api/`` by which callers read their own conversations, with their own credential."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, cast

import msgspec

from proxy.core.errors import NotFound
from proxy.features.history.history import History
from proxy.features.history.pages import MAX_CHARACTERS, Page, read_page
from proxy.server.access import Access
from proxy.server.admin import Route
from proxy.server.config import Limits
from proxy.server.incoming import IncomingRequest
from proxy.server.own_api import OwnApi, decoded, query

WHOLE: Final = Page(0, MAX_CHARACTERS)
"""As much as one answer may hold."""

_NAME: Final = re.compile(r"[\w-]{16}", re.ASCII)
"""Matches the public name of a conversation: twelve bytes in base64."""

_NO_CONVERSATION: Final = (
    "There is no such conversation of yours. One is known from its first request above half of the low mark on."
)
_NOT_ARCHIVED: Final = "Nothing of yours is archived here, or not any more. Items are, if archive.enabled is set."
_NO_REQUEST: Final = (
    'Send {"conversation": ID}, with the ID that answers carry in x-ullage-conversation, and if you like a "share" '
    "between 0 and 1."
)


class _CompactRequest(msgspec.Struct, forbid_unknown_fields=True):
    conversation: str
    share: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None


_COMPACT_REQUEST: Final = msgspec.json.Decoder(_CompactRequest)


class HistoryRoutes:
    """Answers requests about the caller's own conversations.

    Every route takes the request and the rest of the path after the route's name. It returns the status and the body,
    which is sent as JSON. All raise ``UllageError``.
    """

    def __init__(self, access: Access, history: History, limits: Limits) -> None:
        self._api = OwnApi(access, limits, "requests about conversations")
        self._history = history

    def by_name(self) -> Mapping[str, Route]:
        """Return the routes by the name that follows ``/ullage/api/`` in the path."""
        return {
            "conversations": self.conversations,
            "compact": self.compact,
            "archive": self.archive,
            "retrieve": self.retrieve,
            "state": self.state,
        }

    async def conversations(self, request: IncomingRequest, name: str) -> tuple[int, Mapping[str, object]]:
        """Return the conversation called *name*, or a list of all if that is empty."""
        tenant, _ = self._api.caller(request)
        _check_reads(request)
        if not name:
            return 200, await self._history.conversations(tenant)
        return 200, _existing(await self._history.conversation(tenant, _checked_name(name)))

    async def archive(self, request: IncomingRequest, reference: str) -> tuple[int, Mapping[str, object]]:
        """Return one page of the list or item that was archived under *reference*."""
        tenant, _ = self._api.caller(request)
        _check_reads(request)
        parameters = query(request.raw_path)
        page = read_page(parameters.get("offset"), parameters.get("limit"))
        return 200, _existing(await self._history.archived(tenant, reference, page), _NOT_ARCHIVED)

    async def retrieve(self, request: IncomingRequest, reference: str) -> tuple[int, Mapping[str, object]]:
        """Return the text that was archived under *reference*, with the members that gateways read.

        The text is the item's JSON, or the beginnings of a list's items, a line each; ``next_offset`` is the offset at
        which the route ``archive`` continues.
        """
        tenant, _ = self._api.caller(request)
        _check_reads(request)
        page = _existing(await self._history.archived(tenant, reference, WHOLE), _NOT_ARCHIVED)
        items = cast("list[dict[str, str | None]]", page.get("items", ()))
        text = page.get("content") or "\n".join(item["content"] or "" for item in items)
        return 200, {"hash": reference, "original_content": text, "next_offset": page["next_offset"]}

    async def compact(self, request: IncomingRequest, name: str) -> tuple[int, Mapping[str, object]]:
        """Request that the next request of a conversation compacts it."""
        tenant, headers = self._api.caller(request)
        if request.method != "POST" or name:
            raise NotFound("Compactions are requested with POST to /ullage/api/compact.")
        compaction = decoded(await self._api.body(request, tenant, headers), _COMPACT_REQUEST, _NO_REQUEST)
        name = _checked_name(compaction.conversation)
        return 202, _existing(await self._history.request_compaction(tenant, name, compaction.share))

    async def state(self, request: IncomingRequest, name: str) -> tuple[int, Mapping[str, object]]:
        """Return the state of the conversation called *name*; with PUT replace it by that of the body."""
        tenant, headers = self._api.caller(request)
        conversation = _checked_name(name)
        if request.method != "PUT":
            _check_reads(request)
            return 200, _existing(await self._history.exported(tenant, conversation))
        body = await self._api.body(request, tenant, headers)
        return 200, await self._history.imported(tenant, conversation, body)


def _check_reads(request: IncomingRequest) -> None:
    if request.method not in ("GET", "HEAD"):
        raise NotFound("Conversations are read with GET.")


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise NotFound(_NO_CONVERSATION)
    return name


def _existing(value: Mapping[str, object] | None, message: str = _NO_CONVERSATION) -> Mapping[str, object]:
    if value is None:
        raise NotFound(message)
    return value
