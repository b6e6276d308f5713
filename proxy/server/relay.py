"""The body of an answer on its way to the client."""

from __future__ import annotations

from proxy.engine import ports
from proxy.server import answers
from proxy.server.observer import ReplyObserver
from proxy.server.outgoing import Outgoing


class BodyRelay:
    """Passes the body of *reply* on to *out*, as *observer* has it.

    ``close_delimited``: the body ends with its connection, and the client's does likewise.
    """

    def __init__(self, out: Outgoing, reply: ports.Reply, observer: ReplyObserver) -> None:
        self._out = out
        self._reply = reply
        self._observer = observer
        streamed = reply.header("content-type").startswith("text/event-stream")
        self._readable = streamed and not reply.header("content-encoding")
        # A client sees that a stream lacks its end only if the stream is chunked. Other bodies end as they came.
        self.close_delimited = reply.close_delimited and not self._readable
        if reply.close_delimited and self._readable:
            observer.watch_end()

    async def run(self, first: bytes) -> bool:
        """Pass on *first* and all that follows. Return False if a stream ended that never said that it was done."""
        out, observer = self._out, self._observer
        chunk = first or await self._reply.next_chunk()
        while chunk:
            out.write(observer.feed(chunk))
            if out.paused:
                await out.drain()
            chunk = await self._reply.next_chunk()
        out.write(observer.rest())
        if observer.saw_end:
            out.finish()
            return True
        out.break_off()
        return False

    def break_off(self, api: str) -> None:
        """End a body that broke so that the client sees it: a stream with an event in the words of *api*."""
        self._out.write(self._observer.rest())
        self._out.break_off(answers.last_event(answers.StreamBroken(), api) if self._readable else b"")
