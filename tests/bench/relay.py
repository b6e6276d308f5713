"""The yardstick: the shortest aiohttp pass-through that streams both status, headers and body."""

from __future__ import annotations

import asyncio
import sys

import aiohttp
from aiohttp import web
from uvloop import run

HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
SKIP = ("user-agent", "accept-encoding", "accept")


async def serve(port: int, upstream: str) -> None:
    """Relay every request to *upstream* until the process is ended."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False, skip_auto_headers=SKIP) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            headers = {key: value for key, value in request.headers.items() if key.lower() not in HOP}
            url, body = upstream + request.path_qs, await request.read()
            async with session.request(request.method, url, data=body, headers=headers) as answer:
                kept = {key: value for key, value in answer.headers.items() if key.lower() not in HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                response.content_length = answer.content_length
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{tail:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    run(serve(int(sys.argv[1]), sys.argv[2]))
