"""The scripted upstream leaves nothing behind, however its connections ended."""

from __future__ import annotations

import asyncio

from tests.support.server_fixture import ScriptedServer, listening


async def test_a_connection_that_ended_late_can_be_left():
    """A connection that was closed with bytes still to send, and has sent them since, is no error at the end."""

    async def script(heard, reader, writer):
        writer.write(b"x" * 2**25)  # more than the kernel takes at once
        writer.close()

    async with listening(ScriptedServer(script=script)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert len(await asyncio.wait_for(reader.read(), 60)) == 2**25
        writer.close()
