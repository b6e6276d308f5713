"""Answers the proxy's own routes: health, metrics, status. They are neither counted nor relayed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from proxy.core.errors import NotFound, Overloaded, TooManyRequests, UllageError, error_body
from proxy.server.access import Access
from proxy.server.admission import Drain
from proxy.server.config import Limits, Metrics, Status
from proxy.server.incoming import IncomingRequest
from proxy.server.request import LIVE, READY, RETRIEVE, read_headers
from proxy.server.response import ResponseWriter

_PAGES: Final = "/ullage/"
_LOG: Final = logging.getLogger(__name__)
_ROOT: Final = "/ullage/api/"
_STATUS: Final = "/ullage/api/status"

Route = Callable[[IncomingRequest, str], Awaitable[tuple[int, Mapping[str, object]]]]
"""A route below ``/ullage/api/``: from a request and the rest of its path to the status and the body."""

OpenRoutes = Callable[[Access, Limits], Mapping[str, Route]]
"""Opens the routes that a feature adds, by the name that follows ``/ullage/api/``."""


def no_routes(access: Access, limits: Limits) -> Mapping[str, Route]:
    """Open no routes."""
    del access, limits
    return {}


Page = Callable[[IncomingRequest, str, ResponseWriter], Awaitable[None]]
"""Answers a path below ``/ullage/`` outside the API: writes the answer or raises ``UllageError``."""

OpenPage = Callable[[Access, Limits], Page]


class OwnRoutes:
    """Answers the paths of ``request.is_local``; *added* are the routes that features add, by name.

    ``page`` answers the other paths below ``/ullage/``; None if there is no page.
    """

    def __init__(
        self,
        version: str,
        access: Access,
        drain: Drain,
        metrics: Metrics | None,
        status: Status,
        added: Mapping[str, Route],
    ) -> None:
        self._version = version
        self._access = access
        self._drain = drain
        self._metrics = metrics
        self._status = status
        self._added = added
        self.page: Page | None = None

    async def answer(self, request: IncomingRequest, path: str, out: ResponseWriter) -> None:
        """Write the whole answer."""
        retry_after: list[tuple[str, str]] = []
        try:
            if self.page is not None and path.startswith(_PAGES) and not path.startswith(_ROOT):
                await self.page(request, path, out)
                return
            status, body, kind = await self._respond(request, path)
        except UllageError as error:
            status, body, kind = error.status, error_body(error, "chat"), "application/json"
            if isinstance(error, Overloaded | TooManyRequests):
                retry_after = [("retry-after", str(error.retry_after))]
        except Exception as fault:  # noqa: BLE001 - a bug costs one request, never the connection
            _LOG.error("own route failed", exc_info=fault)
            if out.status:
                out.abort()
                return
            status, body, kind = UllageError.status, error_body(UllageError(), "chat"), "application/json"
        if not request.content.is_eof():
            out.keep_alive = False
        headers = [("content-type", kind), ("content-length", str(len(body))), ("cache-control", "no-store")]
        out.start(status, [*headers, *retry_after], sized=True)
        out.write(body)
        out.finish()

    async def _respond(self, request: IncomingRequest, path: str) -> tuple[int, bytes, str]:
        name, _, rest = path.removeprefix(_ROOT).partition("/")
        if path.startswith(RETRIEVE):
            name, rest = "retrieve", path.removeprefix(RETRIEVE)
        if path.startswith((_ROOT, RETRIEVE)) and name in self._added:
            status, value = await self._added[name](request, rest)
            return status, as_json(value), "application/json"
        if request.method not in ("GET", "HEAD"):
            raise NotFound(f"There is no such route: {request.method} on this path.")
        if path in LIVE:
            return _json(200, {"status": "ok"})
        if path in READY:
            if self._drain.draining:
                return _json(503, {"status": "draining"})
            return _json(200, {"status": "ready"})
        if path == "/metrics" and self._metrics is not None:
            self._access.check_metrics(read_headers(request.raw_headers), request.headers.keys())
            body, kind = await asyncio.to_thread(self._metrics)
            return 200, body, kind
        if path == "/":
            return _json(200, {"service": "ullage", "version": self._version, "health": "/health/ready"})
        if path == _STATUS:
            headers = read_headers(request.raw_headers)
            self._access.check_origin(headers)
            self._access.check_admin(headers, request.headers.keys())
            return _json(200, dict(self._status()))
        raise NotFound(
            "There is no such page here: base URLs of the API end in /v1, and a feature that is off has no pages."
        )


def _json(status: int, value: dict[str, object]) -> tuple[int, bytes, str]:
    return status, json.dumps(value).encode(), "application/json"


def as_json(value: Mapping[str, Any]) -> bytes:
    """Return *value* as JSON, with the letters of all languages as they are."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
