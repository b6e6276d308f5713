"""The body of an answer on its way to the client, and what a stream says of its own end."""

from __future__ import annotations

import re
from typing import Final

from proxy import ports
from proxy.server import answers
from proxy.server.observer import ReplyObserver
from proxy.server.outgoing import Outgoing

# What each API sends last: https://platform.openai.com/docs/api-reference/chat-streaming (``[DONE]``, which some
# servers leave out behind the ``finish_reason``), https://docs.anthropic.com/en/docs/build-with-claude/streaming
# (``message_stop``), https://platform.openai.com/docs/api-reference/responses-streaming. Inside a JSON string quotes
# and line ends are escaped, so no text that a model writes looks like this.
_LAST: Final = rb"(?:message_stop|response\.(?:completed|incomplete|failed|cancelled)|error)"
_COLON: Final = rb"\s{0,8}:\s{0,8}"
_DONE: Final = re.compile(
    rb"[\r\n](?:data: ?\[DONE\]|event: ?" + _LAST + rb"[\r\n]"
    rb'|data: ?\{\s{0,8}"(?:type"' + _COLON + rb'"' + _LAST + rb'"|error"' + _COLON + rb"))"
    rb'|"finish_?[rR]eason"' + _COLON + rb'"'
)
_LONGEST: Final = 96
"""More bytes than any match has."""


class StreamEnd:
    """Watches a stream of events for what says that it is done. Feed it bytes in any chunking."""

    __slots__ = ("_tail", "done")

    def __init__(self) -> None:
        self.done = False
        self._tail = b"\n"  # the first line has none before it

    def feed(self, chunk: bytes) -> None:
        """Look at *chunk*."""
        if self.done:
            return
        data = self._tail + chunk
        self.done = _DONE.search(data) is not None
        self._tail = data[-_LONGEST:]


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
        self._end = StreamEnd() if self._readable and reply.close_delimited else None
        self.close_delimited = reply.close_delimited and self._end is None

    async def run(self, first: bytes) -> bool:
        """Pass on *first* and all that follows. Return False if a stream ended that never said that it was done."""
        out, observer = self._out, self._observer
        chunk = first or await self._reply.next_chunk()
        while chunk:
            out.write(observer.feed(chunk))
            if self._end is not None:
                self._end.feed(chunk)
            if out.paused:
                await out.drain()
            chunk = await self._reply.next_chunk()
        out.write(observer.rest())
        if self._end is None or self._end.done:
            out.finish()
            return True
        out.break_off()
        return False

    def break_off(self, api: str) -> None:
        """End a body that broke so that the client sees it: a stream with an event in the words of *api*."""
        self._out.write(self._observer.rest())
        self._out.break_off(answers.last_event(answers.StreamBroken(), api) if self._readable else b"")
