"""Merges the generations of an answer into one for the client: as a whole, or as one stream.

Theory of operation
===================

``ServerTools`` sees the reply to a view that offers a tool. The reply is the first *generation*. If a generation calls
a tool of ours, ``ToolSession`` writes the result and sends the prompt again with both behind it, which gives the next
generation: ``session.MOST_GENERATIONS`` in all. The client gets one answer without these calls.

An answer that is no stream is read whole, generation after generation (``rewritten_reply``). A stream passes while it
is written: ``StreamMerger`` says which bytes may go to the client by now; ``MergedReply`` waits, reads and asks again.
Its states, and what leads from one to the next:

    state     event                                      next state   bytes for the client
    --------  -----------------------------------------  -----------  ------------------------------------------------
    MERGING   bytes of the generation                    MERGING      what may pass by now
    MERGING   its last event, or the stream's end        DECIDING     what may pass by now
    DECIDING  it calls no tool of ours, was cut short    LAST         all that was buffered, without such calls
              or failed, or no further one is allowed
    DECIDING  it calls a tool of ours                    ASKING       none
    ASKING    the next generation begins                 MERGING      none
    LAST      bytes behind the last event                LAST         the same
    LAST      the stream's end                           ENDED        an event without an end

An upstream's error ends the stream, as does the refusal of a later generation (``ServerToolFailed``). After a fault of
ours nothing of the first generation is lost: the bytes that were not passed on follow, then the rest as it comes. The
state is PLAIN then, or ENDED if the generation was read to its end (ASKING). A fault in a later generation ends the
stream, since the client has its beginning in another form.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, Final

from cachetools import TTLCache
from msgspec import structs

from proxy.core.apis.envelope import Envelope
from proxy.core.apis.json_edit import json_bytes
from proxy.core.content_encoding import ContentDecoder
from proxy.core.decisions import NO_ADDITION, Addition, CountedView
from proxy.core.errors import UllageError, UpstreamTimeout, UpstreamUnreachable
from proxy.core.models import Route
from proxy.core.report import Usage
from proxy.core.request import Request
from proxy.core.views import view_without_addition
from proxy.engine.features import Feature, Planning
from proxy.engine.ports import Answer, Reply
from proxy.engine.reading import Reader
from proxy.engine.replies import LocalReply, header_in, read_up_to
from proxy.server_tools.events import value_of
from proxy.server_tools.merger import StreamMerger, TooMuchBuffered
from proxy.server_tools.session import ToolSession
from proxy.server_tools.tool import ServerTool, has_tools
from proxy.tasks import Faults

MOST_BYTES: Final = 2**26
"""Bytes of an answer that is no stream, and of a compressed stream after decoding, that are read."""

END_SECONDS: Final = 0.1
"""Seconds to wait for the end of a stream after its last event, so that its connection can be reused."""

NOT_CODED: Final = frozenset({"", "identity"})
"""Values of ``Content-Encoding`` of bytes that are not encoded."""

READABLE: Final = NOT_CODED | {"gzip", "x-gzip", "deflate", "br", "zstd"}
"""Content codings that can be read; an answer in another one passes as it came."""

ERROR_BYTES: Final = 65_536
"""Bytes of a refusal that are read: more than any provider sends."""

UNSUPPORTED_STATUSES: Final = frozenset({400, 404, 422, 500, 501})
UNSUPPORTED: Final = re.compile(rb"tool|function", re.IGNORECASE)
"""Statuses and words with which servers and models without tools refuse a request that has some.

Ollama: 400, https://github.com/ollama/ollama/issues/14795; vLLM: 400, https://github.com/vllm-project/vllm/issues/9986;
llama.cpp: 500, https://github.com/ggml-org/llama.cpp/issues/10920; OpenRouter: 404,
https://github.com/mastra-ai/mastra/issues/2839.
"""

UNSUPPORTED_SECONDS: Final = 3_600.0
"""Seconds for which a model that refused the tool is not offered it again."""

MOST_UNSUPPORTED: Final = 1_000
"""Such models that are remembered: their names come from clients."""


class ServerToolFailed(UllageError):
    """An answer could not be continued after a server tool was called; ``status`` is the upstream's, if it had one."""

    code = "server_tool_failed"

    def __init__(self, status: int, message: str) -> None:
        reason = "."
        if message:
            reason = f": {message}"
        super().__init__(f"The upstream could not go on after a tool of the proxy was called{reason}")
        self.status = status


class ServerTools(Feature):
    """Answers the calls of server tools. The client never sees them."""

    def __init__(self, reader: Reader, tools: Sequence[ServerTool], faults: Faults) -> None:
        self._reader = reader
        self.tools = tools
        self._faults = faults
        self._unsupported: TTLCache[tuple[str, str], bool] = TTLCache(MOST_UNSUPPORTED, UNSUPPORTED_SECONDS)

    def addition(self, request: Request, envelope: Envelope, route: Route, window: int) -> Addition:
        """Return the tool for compacted views, and the note on it; nothing if none may be offered."""
        if (route.upstream, route.model) in self._unsupported and not has_tools(envelope):
            return NO_ADDITION
        additions = (tool.addition(request, envelope, route, window) for tool in self.tools)
        return next((addition for addition in additions if addition.tokens), NO_ADDITION)

    async def continue_answer(self, answer: Answer, view: CountedView, engine: Planning) -> Answer:
        """Return *answer*, whose reply is the first generation's, with calls of server tools answered as they come.

        If a model without tools refuses the request only for a tool of ours, it is sent again without that.
        """
        if answer.reply.status != 200:
            return await self._after_refusal(answer, view, engine)
        tools = [tool for tool in self.tools if tool.is_offered(view)]
        if not tools or _coding(answer.reply) not in READABLE:
            return answer
        session = ToolSession(self._reader, tools, view, answer.report.stream, engine)
        learn = partial(_learn, answer, session)
        reply, report = answer.reply, answer.report
        if session.is_stream(reply.header("content-type")):
            on_fault = partial(self._faults.report, "answer", report.request_id)
            merged = MergedReply(session, reply, answer.head, engine, on_fault)
            return structs.replace(answer, reply=merged, head=b"", learn=learn, at_end=session.complete)
        reply, head = await rewritten_reply(session, reply, engine)
        return structs.replace(answer, reply=reply, head=head, learn=learn, report=session.complete(report))

    async def _after_refusal(self, answer: Answer, view: CountedView, engine: Planning) -> Answer:
        """Return the answer to *view* without the tool, if *answer* refuses tools and all are ours; else *answer*."""
        if answer.reply.status not in UNSUPPORTED_STATUSES or has_tools(view.measured.parsed.envelope):
            return answer
        await read_up_to(answer.reply, engine.run.chunks, ERROR_BYTES)
        body = b"".join(engine.run.chunks)
        decoded = ContentDecoder(_coding(answer.reply), ERROR_BYTES).feed(body)
        if not UNSUPPORTED.search(decoded):
            return structs.replace(answer, head=body)
        self._unsupported[view.known.route.upstream, view.known.route.model] = True
        engine.run.set_aside()

        async def bare(smaller: CountedView, most: int | None) -> CountedView:
            del most
            return view_without_addition(smaller)

        continued = await engine.resend(view, bare)
        report = answer.report
        stages = tuple(stage for stage in report.stages if stage != "recall")
        retries = report.retries + 1 + continued.retries
        report = report.with_(stages=stages, retries=retries, overflows=report.overflows + continued.overflows)
        return structs.replace(answer, reply=continued.reply, head=continued.head, report=report)


def _learn(answer: Answer, session: ToolSession, usage: Usage) -> bool:
    """Learn from the *usage* of the first generation, the only one whose prompt was measured.

    An answer that ended at the window teaches nothing about the prompt.
    """
    if not session.recalls:
        return answer.learn(usage)
    if answer.ending is not None and answer.ending.overflow is not None:
        return False
    return answer.learn(session.first_usage)


async def rewritten_reply(session: ToolSession, reply: Reply, engine: Planning) -> tuple[Reply, bytes]:
    """Return the reply after the last generation of an answer that is no stream, and the bytes already read from it.

    A reply that is no answer of the API ends the loop and is passed on unchanged.
    """
    earlier: list[Any] = []
    while True:
        value, chunks = await _read_object(reply, engine.run.chunks)
        if value is None:
            return reply, chunks
        output = session.api.output_of(value)
        if output is None:
            return reply, chunks
        calls = session.api.calls(output, session.names)
        if not earlier and not calls:
            return reply, chunks
        session.add_usage(value.get("usage"))
        if not calls or not session.may_ask_again() or session.api.is_truncated(value):
            return RewrittenReply(reply, json_bytes(session.api.merged(value, earlier, session.names))), b""
        engine.run.set_aside()
        reply, _ = await session.ask_again(output, calls)
        earlier.append(output)


async def _read_object(reply: Reply, chunks: list[bytes]) -> tuple[dict[str, Any] | None, bytes]:
    """Return the object in the body of a 200, and all bytes read of it; None if there is none, or if it is too large.

    *chunks* holds the bytes that were read before, and grows.
    """
    is_whole = await read_up_to(reply, chunks, MOST_BYTES)
    body = b"".join(chunks)
    if reply.status != 200 or not is_whole:
        return None, body
    return value_of(ContentDecoder(reply.header("content-encoding"), MOST_BYTES).feed(body)), body


class RewrittenReply(LocalReply):
    """A 200 with a merged body, and the headers of the last generation's reply."""

    def __init__(self, reply: Reply, body: bytes) -> None:
        super().__init__(body)
        self._reply = reply
        removed = ("content-length", "content-encoding", "transfer-encoding")
        remaining = [pair for pair in reply.headers if pair[0].lower() not in removed]
        self.headers = [*remaining, ("content-length", str(len(body)))]

    def close(self) -> None:
        """Close the last generation's reply."""
        self._reply.close()


class _State(Enum):
    """The states of a ``MergedReply``; the table at the top of this module has the transitions."""

    MERGING = auto()
    DECIDING = auto()
    ASKING = auto()
    LAST = auto()
    PLAIN = auto()
    ENDED = auto()


class MergedReply:
    """A reply whose stream continues with the next generation. Closing it ends the generation that is under way."""

    pour = None

    def __init__(
        self,
        session: ToolSession,
        reply: Reply,
        head: bytes,
        engine: Planning,
        on_fault: Callable[[Exception], None],
    ) -> None:
        removed = ("content-length", "content-encoding")
        self.status = reply.status
        self.headers: Sequence[tuple[str, str]] = [pair for pair in reply.headers if pair[0].lower() not in removed]
        self._session = session
        self._engine = engine
        self._on_fault = on_fault
        self._merger: StreamMerger = session.api.new_stream(session.names)
        self._state = _State.MERGING
        self._read_from(reply, head)

    @property
    def close_delimited(self) -> bool:
        """True if the current generation ends with its connection, without another mark of its end."""
        return self._reply.close_delimited

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""
        return header_in(self.headers, name)

    async def next_chunk(self) -> bytes:
        """Return the next bytes for the client; empty at the end.

        Raises ``ServerToolFailed`` and the upstream's errors.
        """
        while self._state is not _State.ENDED:
            try:
                chunk = await self._next()
            except UllageError:
                raise
            except Exception as fault:  # noqa: BLE001 - a fault of ours costs the tool, not the stream
                self._on_fault(fault)
                chunk = self._unanswered(fault)
            if chunk:
                return chunk
        return b""

    def close(self) -> None:
        """Abort the generation that is under way."""
        self._reply.close()
        self._engine.run.drop()

    async def _next(self) -> bytes:
        if self._state is _State.PLAIN:
            return await self._next_plain()
        if self._state is _State.DECIDING:
            return await self._end_generation()
        return await self._next_merged()

    def _unanswered(self, fault: Exception) -> bytes:
        """Return the bytes of the first generation that were not passed on; the rest of it follows unchanged."""
        if self._state is _State.PLAIN or not self._merger.is_first:
            raise ServerToolFailed(500, "internal error.") from fault
        if self._state is _State.ASKING:
            self._state = _State.ENDED
        else:
            self._state = _State.PLAIN
        if self._engine.run.reply is not self._reply:
            self._engine.run.drop()
        try:
            return self._merger.unsent()
        except Exception as another:
            raise ServerToolFailed(500, "internal error.") from another

    async def _next_plain(self) -> bytes:
        chunk = await self._reply.next_chunk()
        if not chunk:
            self._state = _State.ENDED
        return self._decoded(chunk)

    def _read_from(self, reply: Reply, head: bytes) -> None:
        """Read the next bytes from *reply*, of which *head* was read already."""
        self._reply = reply
        self._head = head
        self._decoder: ContentDecoder | None = None
        coding = _coding(reply)
        if coding not in NOT_CODED:
            self._decoder = ContentDecoder(coding, MOST_BYTES)

    def _decoded(self, chunk: bytes) -> bytes:
        if self._decoder is None:
            return chunk
        decoded = self._decoder.feed(chunk)
        if self._decoder.is_full:
            raise ServerToolFailed(502, "its stream cannot be decoded to the end.")
        return decoded

    async def _next_merged(self) -> bytes:
        """Return what the next bytes of this generation add to the client's stream."""
        chunk, self._head = self._head or await self._reply.next_chunk(), b""
        merged = b""
        try:
            self._merger.unread = self._decoded(chunk)
            if chunk:
                merged = self._merger.feed(self._merger.unread)
        except TooMuchBuffered:
            raise ServerToolFailed(502, "what it says is too large to be held back.") from None
        if self._state is _State.MERGING and (self._merger.ended or not chunk):
            self._state = _State.DECIDING
        elif self._state is _State.LAST and not chunk:
            self._state = _State.ENDED
            merged += self._merger.rest()
        return merged

    async def _end_generation(self) -> bytes:
        """Return the rest of the last generation; or send the next request and return no bytes."""
        merger, session = self._merger, self._session
        calls = merger.calls()
        if session.recalls or calls:
            session.add_usage(merger.usage)
        if not calls or not session.may_ask_again() or merger.truncated or merger.failed:
            self._state = _State.LAST
            return merger.release()
        self._state = _State.ASKING
        await self._read_to_end()
        reply, head = await session.ask_again(merger.output, calls)
        if reply.status != 200 or not session.is_stream(reply.header("content-type")):
            self._reply = reply
            raise await _failure(reply, head)
        merger.next_generation()
        self._read_from(reply, head)
        self._state = _State.MERGING
        return b""

    async def _read_to_end(self) -> None:
        """Read a generation's reply to its end, if that comes soon, so that its connection can be reused."""
        try:
            async with asyncio.timeout(END_SECONDS):
                while await self._reply.next_chunk():
                    pass
        except (TimeoutError, UpstreamUnreachable, UpstreamTimeout):
            self._reply.close()  # its last event was read, so nothing is lost


async def _failure(reply: Reply, head: bytes) -> ServerToolFailed:
    """Return the error with which the next generation was refused, in the upstream's own words."""
    chunks = [head]
    await read_up_to(reply, chunks, ERROR_BYTES)
    value = value_of(ContentDecoder(reply.header("content-encoding"), ERROR_BYTES).feed(b"".join(chunks))) or {}
    message = value.get("error", value)
    if isinstance(message, dict):
        message = message.get("message")
    if not isinstance(message, str):
        message = ""
    status = 502
    if reply.status >= 400:
        status = reply.status
    return ServerToolFailed(status, message)


def _coding(reply: Reply) -> str:
    return reply.header("content-encoding").strip().lower()
