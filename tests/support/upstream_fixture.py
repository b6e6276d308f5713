"""An upstream of this process and the client that talks to it."""

from proxy.upstream import Target, Timeouts, Upstreams
from tests.support.server_fixture import ScriptedServer, listening


class ScriptedConnection:
    """A stage and an upstream that points at it, for one test."""

    def __init__(self, timeouts=None, **target):
        self.stage = ScriptedServer()
        self.target = {"timeouts": timeouts or Timeouts(), **target}

    async def __aenter__(self):
        self.listening = listening(self.stage)
        port = await self.listening.__aenter__()
        self.upstream = Upstreams([Target("up", f"http://127.0.0.1:{port}", **self.target)])
        return self

    async def __aexit__(self, *failure):
        await self.upstream.close()
        await self.listening.__aexit__(*failure)

    async def send(self, body=b"{}", method="POST", path="/v1/x", headers=()):
        return await self.upstream.send("up", method, path, headers, body)


async def read_into(parts, reply):
    while chunk := await reply.next_chunk():
        parts.append(chunk)


async def read_body(reply):
    parts = []
    await read_into(parts, reply)
    return b"".join(parts)
