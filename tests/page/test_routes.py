"""The page over HTTP: who may see it, what its answers forbid, and the stream of what changed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import proxy.page
from proxy.page import routes
from proxy.page.board import Board
from proxy.page.hub import Hub
from proxy.page.routes import FILES, POLICY, open_page
from proxy.server import ServerConfig
from tests.page.test_board import report
from tests.support.server_fixture import RawMessage, RunningServer, eventually, running_server

KEYED = ServerConfig("up", admin_key="boss-key", access_keys=("client-key",))
JSON = "Content-Type: application/json"
STATIC = Path(proxy.page.__file__).parent / "static"


@contextlib.asynccontextmanager
async def shown(
    config: ServerConfig | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[RunningServer, Hub]]:
    """A server with the page, over a board with one conversation."""
    board = Board(10, now=lambda: 0.0)
    board.reports.append((1.0, report("a")))
    hub = Hub(board, (), lambda: {"version": "test", "models": []}, lambda models: {})
    async with running_server(config, open_page=open_page(hub), host=host) as at:
        yield at, hub


def status(answer: RawMessage) -> int:
    return int(answer.line.split(" ")[1])


async def log_in(at: RunningServer, key: str = "boss-key", *headers: str) -> RawMessage:
    return await at.ask("POST", "/ullage/login", json.dumps({"key": key}).encode(), JSON, *headers)


def cookie_of(answer: RawMessage) -> str:
    (cookie,) = answer.all("set-cookie")
    return f"Cookie: {cookie.partition(';')[0]}"


async def access(at: RunningServer, *headers: str) -> str:
    answer = await at.ask("GET", "/ullage/session", b"", *headers)
    return str(json.loads(answer.body)["access"])


@pytest.mark.parametrize("name", FILES)
async def test_the_files_need_no_key_and_forbid_what_they_do_not_need(name: str) -> None:
    """They hold nothing of this proxy; no inline script or style, no other host, no frame around them."""
    async with shown(KEYED) as (at, _):
        answer = await at.ask("GET", f"/ullage/{name}")
        assert status(answer) == 200
        assert answer.body == (STATIC / FILES[name][0]).read_bytes()
        assert answer.all("content-type") == [FILES[name][1]]
        assert answer.all("content-security-policy") == [POLICY]
        assert "unsafe" not in POLICY
        assert answer.all("x-content-type-options") == ["nosniff"]
        assert answer.all("cache-control") == ["no-store"]


def test_the_files_name_no_other_host_and_hold_nothing_inline() -> None:
    """The policy would stop it; it must not be needed."""
    for name, _ in FILES.values():
        text = (STATIC / name).read_text()
        foreign = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
        assert not foreign
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page)
    for script in STATIC.glob("*.js"):
        assert "innerHTML" not in script.read_text()


async def test_on_loopback_without_an_admin_key_the_page_is_open() -> None:
    """The page is as open as the status, and as closed to requests that were forwarded from elsewhere."""
    async with shown() as (at, _):
        assert await access(at) == "open"
        detail = await at.ask("GET", "/ullage/conversations/a")
        assert json.loads(detail.body)["row"]["tokens"] == 600
        assert await access(at, "X-Forwarded-For: 192.0.2.7") == "closed"
        assert status(await at.ask("GET", "/ullage/conversations/a", b"", "X-Forwarded-For: 192.0.2.7")) == 403


async def test_elsewhere_without_an_admin_key_it_is_closed() -> None:
    """Others could reach it."""
    async with shown(host="0.0.0.0") as (at, _):
        assert await access(at) == "closed"
        for path in ("events", "conversations/a"):
            assert status(await at.ask("GET", f"/ullage/{path}")) == 403


async def test_the_admin_key_opens_a_session() -> None:
    """The cookie is not the key, no script reads it, no other site sends it, and it is valid for the page alone."""
    async with shown(KEYED) as (at, _):
        assert await access(at) == "login"
        assert status(await at.ask("GET", "/ullage/conversations/a")) == 401
        answer = await log_in(at)
        assert status(answer) == 204
        (cookie,) = answer.all("set-cookie")
        assert "boss-key" not in cookie
        for part in ("HttpOnly", "SameSite=Strict", "Path=/ullage/", "Max-Age=43200"):
            assert part in cookie
        assert await access(at, cookie_of(answer)) == "session"
        assert status(await at.ask("GET", "/ullage/conversations/a", b"", cookie_of(answer))) == 200
        assert status(await at.ask("GET", "/ullage/conversations/a", b"", "Authorization: Bearer boss-key")) == 200
        assert status(await at.ask("GET", "/ullage/api/status", b"", cookie_of(answer))) == 401


async def test_behind_tls_the_cookie_is_secure() -> None:
    """A browser says which it is by the origin of the login."""
    async with shown(KEYED) as (at, _):
        assert "Secure" not in (await log_in(at)).all("set-cookie")[0]
        answer = await log_in(at, "boss-key", "Origin: https://proxy.test")
        assert answer.all("set-cookie")[0].endswith("; Secure")


@pytest.mark.parametrize("key", ["", "boss", "boss-key ", "client-key", "bøss"])
async def test_another_key_opens_nothing(key: str) -> None:
    """A wrong key, and even a client's access key, is refused."""
    async with shown(KEYED) as (at, _):
        answer = await log_in(at, key)
        assert (status(answer), answer.all("set-cookie")) == (401, [])


async def test_without_an_admin_key_nobody_logs_in() -> None:
    """There is nothing to prove."""
    async with shown() as (at, _):
        assert status(await log_in(at, "")) == 401


@pytest.mark.parametrize("name", ["login", "logout"])
async def test_other_sites_cannot_change_a_session(name: str) -> None:
    """Neither by a form, whose type is no JSON, nor with an origin of their own."""
    body = b'{"key": "boss-key"}'
    async with shown(KEYED) as (at, _):
        form = await at.ask("POST", f"/ullage/{name}", body, "Content-Type: text/plain")
        assert (status(form), form.all("set-cookie")) == (400, [])
        for header in ("Origin: https://evil.test", "Sec-Fetch-Site: cross-site"):
            answer = await at.ask("POST", f"/ullage/{name}", body, JSON, header)
            assert (status(answer), answer.all("set-cookie")) == (403, [])


async def test_other_sites_cannot_read_the_figures() -> None:
    """On loopback a page of any site could otherwise ask for them."""
    async with shown() as (at, _):
        for path in ("events", "conversations/a"):
            assert status(await at.ask("GET", f"/ullage/{path}", b"", "Origin: https://evil.test")) == 403
        assert await access(at, "Sec-Fetch-Site: cross-site") == "closed"
        assert status(await at.ask("GET", "/ullage/", b"", "Host: evil.test")) == 403


async def test_logging_out_ends_the_session_in_its_browser() -> None:
    """Its cookie is taken back."""
    async with shown(KEYED) as (at, _):
        answer = await at.ask("POST", "/ullage/logout", b"{}", JSON)
        assert "Max-Age=0" in answer.all("set-cookie")[0]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"key": 7}', b'{"key": "a", "more": 1}', b"x" * 10_000])
async def test_a_login_that_cannot_be_read_is_refused(body: bytes) -> None:
    """A malformed body and one that is too long are refused."""
    async with shown(KEYED) as (at, _):
        assert status(await at.ask("POST", "/ullage/login", body, JSON, f"Content-Length: {len(body)}")) in (400, 413)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [("GET", "nothing", 404), ("PUT", "", 404), ("POST", "", 404), ("GET", "conversations/b", 404), ("HEAD", "", 200)],
)
async def test_there_is_no_other_page(method: str, path: str, expected: int) -> None:
    """Nor another way to read it."""
    async with shown() as (at, _):
        reader, writer = await at.connect()
        writer.write(f"{method} /ullage/{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        head = (await reader.read()).decode()
        assert int(head.split(" ")[1]) == expected
        assert at.stage.heard == []


class Stream:
    """The server-sent events of one open page."""

    def __init__(self, at: RunningServer) -> None:
        self.at = at

    async def __aenter__(self) -> Stream:
        self.reader, self.writer = await self.at.connect()
        self.writer.write(b"GET /ullage/events HTTP/1.1\r\nHost: x\r\n\r\n")
        self.head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def event(self) -> dict[str, Any]:
        size = int(await self.reader.readline(), 16)
        chunk = await self.reader.readexactly(size + 2)
        assert chunk.startswith(b"data: ")
        assert chunk.endswith(b"\n\n\r\n")
        return dict(json.loads(chunk[6:]))


async def test_an_open_page_gets_everything_and_then_what_changed() -> None:
    """Rows by name; those that went are named, those that stay are not sent again."""
    async with shown() as (at, hub), Stream(at) as stream:
        assert "text/event-stream" in stream.head
        assert "x-accel-buffering: no" in stream.head
        first = await stream.event()
        assert [row["name"] for row in first["rows"]] == ["a"]
        assert first["snapshot"]["status"] == {"version": "test", "models": []}
        hub._board.reports.append((2.0, report("b")))
        await hub.refresh()
        hub._tick()
        second = await stream.event()
        assert ([row["name"] for row in second["rows"]], second["gone"]) == (["b"], [])
        del hub._board._conversations["a"]
        await hub.refresh()
        hub._tick()
        assert (await stream.event())["gone"] == ["a"]


async def test_nobody_is_counted_after_leaving() -> None:
    """Else the process would go on working for a closed page."""
    async with shown() as (at, hub):
        async with Stream(at) as stream:
            await stream.event()
            assert hub.watchers == 1
        assert await eventually(lambda: hub.watchers == 0)


async def test_the_end_of_the_process_ends_the_stream() -> None:
    """In good order, so that the browser asks again, and another worker answers."""
    async with shown() as (at, hub), Stream(at) as stream:
        await stream.event()
        hub.close()
        assert await asyncio.wait_for(stream.reader.readline(), 60) == b"0\r\n"


async def test_only_so_many_pages_are_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs something every second."""
    monkeypatch.setattr(routes, "MOST_WATCHERS", 1)
    async with shown() as (at, _), Stream(at) as first, Stream(at) as second:
        await first.event()
        assert "429" in second.head


async def test_a_head_request_does_not_open_a_stream() -> None:
    """It gets the head, and its connection is free again."""
    async with shown() as (at, hub):
        reader, writer = await at.connect()
        writer.write(b"HEAD /ullage/events HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"\r\n\r\n")
        assert hub.watchers == 0
