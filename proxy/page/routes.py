"""Answers the paths below ``/ullage/`` that are no API: the page's files, its login, and its figures.

The files are the same for every proxy, so everybody may read them; figures need a session or the admin key. The content
security policy allows the page's own files only: no inline script or style, no other host, no frame around it.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec.structs import replace

from proxy.core.errors import NotFound, TooManyRequests
from proxy.page.board import Row
from proxy.page.hub import Hub, Snapshot
from proxy.page.sessions import Sessions
from proxy.server.access import Access
from proxy.server.admin import Page
from proxy.server.config import Limits
from proxy.server.incoming import BodyBytes, BodyReader, IncomingRequest
from proxy.server.own_api import decoded, json_body
from proxy.server.request import read_headers
from proxy.server.response import ClientLeft, ResponseWriter

ROOT: Final = "/ullage/"

FILES: Final = {
    "": ("index.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "conversation.js": ("conversation.js", "text/javascript; charset=utf-8"),
    "elements.js": ("elements.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
"""The page's files and their types, by the path below ``ROOT``."""

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""https://developer.mozilla.org/en-US/docs/Web/HTTP/Reference/Headers/Content-Security-Policy"""

HEADERS: Final = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
)

MOST_WATCHERS: Final = 16
"""Open pages that one worker updates. A browser has at most six to one host over HTTP/1.1.

https://developer.mozilla.org/en-US/docs/Web/API/EventSource
"""

MAX_LOGIN: Final = 4096
"""Most bytes of a login's body: more than any key has, and too few to fill the memory."""


class Update(msgspec.Struct):
    """An event for an open page: the rows that changed, the names of those that are gone, and all other figures."""

    rows: list[Row]
    gone: list[str]  # page.js reads this name
    snapshot: Snapshot


class Login(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a login."""

    key: str


_LOGIN: Final = msgspec.json.Decoder(Login)


def open_page(hub: Hub) -> Callable[[Access, Limits], Page]:
    """Return a function that opens the page's routes over *hub*."""

    def opened(access: Access, limits: Limits) -> Page:
        return PageRoutes(hub, Sessions(access), limits).answer

    return opened


class PageRoutes:
    """Answers the page's requests. Raises ``UllageError`` for a request that is refused."""

    def __init__(self, hub: Hub, sessions: Sessions, limits: Limits) -> None:
        self._hub = hub
        self._sessions = sessions
        self._limits = replace(limits, body=MAX_LOGIN)
        self._body_bytes = BodyBytes(MAX_LOGIN * MOST_WATCHERS)
        folder = importlib.resources.files("proxy.page").joinpath("static")
        self._files = {path: (folder.joinpath(name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    async def answer(self, request: IncomingRequest, path: str, out: ResponseWriter) -> None:
        """Write the answer to *request* for *path*, which is below ``ROOT``."""
        name = path.removeprefix(ROOT)
        if request.method == "POST" and name in ("login", "logout"):
            await self._change_session(request, name, out)
            return
        if request.method not in ("GET", "HEAD"):
            raise NotFound("There is no such route: the page is read with GET.")
        if name in self._files:
            _write(out, *self._files[name])
            return
        headers = read_headers(request.raw_headers)
        if name == "session":
            access = {"access": self._sessions.access(request, headers)}
            _write(out, msgspec.json.encode(access), "application/json")
            return
        self._sessions.admit(request, headers)
        if name == "events":
            await self._stream(out)
        elif name.startswith("conversations/"):
            await self._conversation(name.removeprefix("conversations/"), out)
        else:
            raise NotFound("There is no such page here.")

    async def _conversation(self, name: str, out: ResponseWriter) -> None:
        detail = await self._hub.detail(name)
        if detail is None:
            raise NotFound("There is no such conversation any more: it was idle for an hour, or others came.")
        _write(out, msgspec.json.encode(detail), "application/json")

    async def _change_session(self, request: IncomingRequest, name: str, out: ResponseWriter) -> None:
        """Log in or out. Both take JSON, which no page of another site can send."""
        headers = read_headers(request.raw_headers)
        body = await json_body(request, headers, BodyReader(request.content, self._limits, self._body_bytes, b""))
        if name == "logout":
            cookie = self._sessions.log_out(headers)
        else:
            login = decoded(body, _LOGIN, 'Send {"key": KEY}, with the admin key.')
            cookie = self._sessions.log_in(request, headers, login.key)
        out.start(204, [*HEADERS, ("set-cookie", cookie)], sized=True)
        out.finish()

    async def _stream(self, out: ResponseWriter) -> None:
        """Send the changes as server-sent events, every second, until the page is closed."""
        hub = self._hub
        if hub.watchers >= MOST_WATCHERS:
            raise TooManyRequests(f"This worker updates {MOST_WATCHERS} open pages already.")
        hub.watchers += 1
        try:
            await hub.refresh()
            # nginx would buffer the events: https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_buffering
            out.start(200, [*HEADERS, ("content-type", "text/event-stream"), ("x-accel-buffering", "no")], sized=False)
            sent: dict[str, Row] = {}
            while not hub.closing and not out.bodyless:
                changed = [row for name, row in hub.rows.items() if sent.get(name) is not row]
                update = Update(changed, [name for name in sent if name not in hub.rows], hub.snapshot())
                sent = hub.rows  # replaced at each refresh, never changed
                if out.write(b"data: %b\n\n" % msgspec.json.encode(update)):
                    await out.drain()
                await hub.next_tick()
            out.finish()
        except ClientLeft:
            pass
        finally:
            hub.watchers -= 1


def _write(out: ResponseWriter, body: bytes, kind: str) -> None:
    out.start(200, [*HEADERS, ("content-type", kind), ("content-length", str(len(body)))], sized=True)
    out.write(body)
    out.finish()
