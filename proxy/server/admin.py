"""The routes that are the proxy's own: health, metrics, status. Never counted, never relayed."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Annotated, Any, Final, Protocol
from urllib.parse import parse_qs

import msgspec
from aiohttp import web
from cachetools import LRUCache

from proxy.core.errors import InvalidRequest, NotFound, Overloaded, TooManyRequests, UllageError, error_body
from proxy.features.history.pages import Page, read_page
from proxy.server.access import Access
from proxy.server.admission import Drain
from proxy.server.config import Limits, Metrics, Status
from proxy.server.request import LIVE, READY, BodyBytes, BodyReader, RequestHeaders, check_declared, read_headers
from proxy.server.response import ResponseWriter

_STATUS: Final = "/ullage/api/status"


class Conversations(Protocol):
    """What is told of conversations, of one tenant's at a time. Raises ``StoreUnavailable``."""

    async def list(self, tenant: bytes) -> Mapping[str, object]:
        """The tenant's newest conversations."""

    async def show(self, tenant: bytes, conversation: str) -> Mapping[str, object] | None:
        """What became of one conversation; ``None`` where the tenant has none of that name."""

    async def compact(
        self, tenant: bytes, conversation: str, share: float | None = None
    ) -> Mapping[str, object] | None:
        """Have its next request compact it; ``None`` where the tenant has none of that name. Raises ``Conflict``."""

    async def original(self, tenant: bytes, ref: str, page: Page) -> Mapping[str, object] | None:
        """One page of what was archived as *ref*; ``None`` where the tenant has no such thing."""


class OwnRoutes:
    """Answers what ``routes.is_local`` names."""

    def __init__(
        self,
        version: str,
        access: Access,
        gate: Drain,
        metrics: Metrics | None,
        status: Status,
        api: ConversationRoutes,
    ) -> None:
        self._version = version
        self._access = access
        self._gate = gate
        self._metrics = metrics
        self._status = status
        self._api = api

    async def answer(self, request: web.BaseRequest, path: str, out: ResponseWriter) -> None:
        """Write the whole answer."""
        more: list[tuple[str, str]] = []
        try:
            status, body, kind = await self._respond(request, path)
        except UllageError as error:
            status, body, kind = error.status, error_body(error, "chat"), "application/json"
            if isinstance(error, Overloaded | TooManyRequests):
                more = [("retry-after", str(error.retry_after))]
            if not request.content.is_eof():
                out.keep_alive = False
        headers = [("content-type", kind), ("content-length", str(len(body))), ("cache-control", "no-store"), *more]
        out.start(status, headers, sized=True)
        out.write(body)
        out.finish()

    async def _respond(self, request: web.BaseRequest, path: str) -> tuple[int, bytes, str]:
        if self._api.serves(path):
            status, value = await self._api.respond(request, path)
            return status, as_json(value), "application/json"
        if request.method not in ("GET", "HEAD"):
            raise NotFound(f"There is no such route: {request.method} on this path.")
        if path in LIVE:
            return _json(200, {"status": "ok"})
        if path in READY:
            return self._ready()
        if path == "/metrics" and self._metrics is not None:
            self._access.check_metrics(read_headers(request.raw_headers), request.headers.keys())
            body, kind = await asyncio.to_thread(self._metrics)
            return 200, body, kind
        if path == "/":
            return _json(200, {"service": "ullage", "version": self._version, "health": "/health/ready"})
        if path == _STATUS:
            intake = read_headers(request.raw_headers)
            self._access.check_origin(intake)
            self._access.check_admin(intake, request.headers.keys())
            return _json(200, dict(self._status()))
        raise NotFound("There is no such page here: base URLs of the API end in /v1.")

    def _ready(self) -> tuple[int, bytes, str]:
        if self._gate.draining:
            return _json(503, {"status": "draining"})
        return _json(200, {"status": "ready"}) if self._gate.ready else _json(503, {"status": "starting"})


def _json(status: int, value: dict[str, object]) -> tuple[int, bytes, str]:
    return status, json.dumps(value).encode(), "application/json"


ROOT: Final = "/ullage/api/"
BODY: Final = 16 * 2**10
"""Bytes of a request's body at most."""
RATE: Final = 5.0
BURST: Final = 30.0
"""Requests that one caller may make: a second in the long run, and at once."""
CALLERS: Final = 10_000
"""Callers that are remembered."""
_KINDS: Final = ("conversations", "compact", "archive")
_NAME: Final = re.compile(r"[\w-]{16}", re.ASCII)
_NOBODYS: Final = (
    "There is no such conversation of yours. One is known from its first request above half of the low mark on."
)

_GONE: Final = "Nothing of yours is archived under this reference, or not any more."


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    conversation: str
    share: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None


_WANTED: Final = msgspec.json.Decoder(_Wanted)


class Pace:
    """Bounds how often each caller asks: a bucket of ``BURST`` requests that fills again at ``RATE`` a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: MutableMapping[bytes, tuple[float, float]] = LRUCache(CALLERS)

    def admit(self, caller: bytes) -> None:
        """Count one request of *caller*. Raises ``TooManyRequests``."""
        now = self._clock()
        left, at = self._left.get(caller, (BURST, now))
        left = min(BURST, left + (now - at) * RATE)
        if left < 1.0:
            raise TooManyRequests(f"At most {RATE:.0f} requests a second about conversations, please.")
        self._left[caller] = (left - 1.0, now)


class ConversationRoutes:
    """Answers for conversations."""

    def __init__(self, access: Access, conversations: Conversations, limits: Limits) -> None:
        self._access = access
        self._conversations = conversations
        self._limits = replace(limits, body=BODY)
        self._body_bytes = BodyBytes(BODY * 64)
        self._pace = Pace()

    @staticmethod
    def serves(path: str) -> bool:
        """Whether *path* is one of these routes."""
        return path.startswith(ROOT) and path.removeprefix(ROOT).partition("/")[0] in _KINDS

    async def respond(self, request: web.BaseRequest, path: str) -> tuple[int, Mapping[str, object]]:
        """The status and the body, to be written as JSON. Raises ``UllageError``."""
        intake = read_headers(request.raw_headers)
        self._access.check_origin(intake)
        tenant = self._access.owner(intake, request.headers.keys())
        self._pace.admit(tenant)
        kind, _, name = path.removeprefix(ROOT).partition("/")
        if kind == "compact":
            if request.method != "POST" or name:
                raise NotFound("Wishes are sent with POST to /ullage/api/compact.")
            return 202, await self._compact(request, intake, tenant)
        if request.method not in ("GET", "HEAD"):
            raise NotFound("Conversations are read with GET.")
        if kind == "archive":
            asked = query(request.raw_path)
            page = read_page(asked.get("offset"), asked.get("limit"))
            return 200, _found(await self._conversations.original(tenant, name, page), _GONE)
        if not name:
            return 200, await self._conversations.list(tenant)
        return 200, _found(await self._conversations.show(tenant, _named(name)))

    async def _compact(self, request: web.BaseRequest, intake: RequestHeaders, tenant: bytes) -> Mapping[str, object]:
        # A page of another site can send no JSON without being asked first.
        if not intake.seen.get("content-type", "").lower().startswith("application/json"):
            raise InvalidRequest("Send the body as application/json.")
        reader = BodyReader(request.content, self._limits, self._body_bytes, tenant)
        try:
            check_declared(request.content_length, self._limits)
            body = await reader.whole()
        finally:
            reader.release()
        try:
            wanted = _WANTED.decode(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            text = (
                'Send {"conversation": ID}, with the ID that answers carry in x-ullage-conversation, and if you like a '
                '"share" between 0 and 1.'
            )
            raise InvalidRequest(text) from None
        return _found(await self._conversations.compact(tenant, _named(wanted.conversation), wanted.share))


def query(path_qs: str) -> dict[str, str]:
    """The parameters of a request's target, each one's last value."""
    return {name: values[-1] for name, values in parse_qs(path_qs.partition("?")[2]).items()}


def as_json(value: Mapping[str, Any]) -> bytes:
    """*value* as people and programs read it."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _named(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise NotFound(_NOBODYS)
    return name


def _found(value: Mapping[str, object] | None, text: str = _NOBODYS) -> Mapping[str, object]:
    if value is None:
        raise NotFound(text)
    return value
