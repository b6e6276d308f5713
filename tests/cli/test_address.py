"""The address of a proxy on this machine, and what is no address."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.cli.address import configured_address, first_event, readiness_status


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        (None, None, "http://127.0.0.1:8484"),
        ("0.0.0.0", "80", "http://127.0.0.1:80"),
        ("::", None, "http://[::1]:8484"),
        ("proxy.example.org", "9000", "http://proxy.example.org:9000"),
    ],
)
def test_the_configured_address(host: str | None, port: str | None, address: str) -> None:
    """A proxy that listens on every address is reached on this machine's own."""
    given = {"ULLAGE_SERVER__HOST": host, "ULLAGE_SERVER__PORT": port}
    assert configured_address({name: value for name, value in given.items() if value is not None}) == address


@pytest.mark.parametrize("address", ["127.0.0.1:8484", "ftp://h", "http://"])
def test_what_is_no_address(address: str) -> None:
    """An address without a usable scheme is an error of its own, unlike a proxy that does not answer."""
    with pytest.raises(ValueError, match="give scheme and host"):
        readiness_status(address)


async def test_the_first_event_of_a_stream_is_enough() -> None:
    """The stream goes on, and is left; a page that is closed, and a stream without an event, have none."""
    done = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == "Bearer key"
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b': hello\n\ndata: {"rows":[]}\n\n')
        await done.wait()
        return response

    async def empty(request: web.Request) -> web.Response:
        return web.Response(text=": nothing\n\n")

    app = web.Application()
    app.router.add_get("/stream", stream)
    app.router.add_get("/empty", empty)
    async with TestServer(app) as server:
        address = str(server.make_url("")).rstrip("/")
        assert await asyncio.to_thread(first_event, address, "/stream", "key") == b'{"rows":[]}\n'
        done.set()
        assert await asyncio.to_thread(first_event, address, "/empty", "") == b""
        assert await asyncio.to_thread(first_event, address, "/gone", "") == b""


async def test_the_base_url_of_clients_is_an_address() -> None:
    """What ``OPENAI_BASE_URL`` holds, and an address below a path."""
    paths = []

    async def answer(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response()

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        root = str(server.make_url("")).rstrip("/")
        for address in (root, f"{root}/v1", f"{root}/v1/", f"{root}/llm", f"{root}/llm/v1"):
            await asyncio.to_thread(readiness_status, address)
    assert paths == [*["/health/ready"] * 3, *["/llm/health/ready"] * 2]
