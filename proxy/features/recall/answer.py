"""One answer for the client out of the generations that it took: whole, or as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from proxy.core.apis.envelope import Envelope
from proxy.core.content_encoding import ContentDecoder
from proxy.core.decisions import Addition, CountedView
from proxy.core.errors import UllageError, UpstreamTimeout, UpstreamUnreachable
from proxy.core.models import Route
from proxy.core.report import Usage
from proxy.core.request import Request
from proxy.engine.features import Feature, Resend
from proxy.engine.ports import Answer, Reply
from proxy.engine.reading import Reader
from proxy.features.recall.events import dumped, value_of
from proxy.features.recall.merger import StreamMerger, TooMuchBuffered
from proxy.features.recall.session import Limits, RecallSession
from proxy.features.recall.tool import addition
from proxy.tasks import Faults

WHOLE: Final = 2**26
"""Bytes of an answer that is no stream, and of what a compressed stream swells to, that are looked at."""

ENDING_SECONDS: Final = 0.1
"""How long a connection is read on behind an answer's last event, so that it can be used again."""

PLAIN: Final = frozenset({"", "identity"})

READABLE: Final = PLAIN | {"gzip", "x-gzip", "deflate", "br", "zstd"}
"""Content codings that can be read; an answer in another one passes as it came."""

ERROR_BYTES: Final = 65_536


class RecallFailed(UllageError):
    """An answer could not go on after the tool was called; ``status`` is the upstream's, if it had one."""

    code = "recall_failed"

    def __init__(self, status: int, told: str = "") -> None:
        super().__init__(f"The upstream could not go on after a recall{': ' + told if told else '.'}")
        self.status = status


class Recall(Feature):
    """Offers a tool with which the model reads what left its view, and answers its calls behind the client's back."""

    def __init__(self, reader: Reader, limits: Limits, faults: Faults) -> None:
        self._reader = reader
        self._limits = limits
        self._faults = faults

    def addition(self, request: Request, envelope: Envelope, route: Route, window: int) -> Addition:
        """The tool and the note on it; nothing if it may not be offered."""
        return addition(self._reader, request.api, envelope, route, window)

    async def continue_answer(self, answer: Answer, view: CountedView, resend: Resend) -> Answer:
        """*answer*, whose reply is that of the first generation, with the tool's calls answered on the way."""
        turn = RecallSession(self._reader, self._limits, view, answer.report.stream, resend)
        reply, report = answer.reply, answer.report
        if reply.header("content-encoding").strip().lower() not in READABLE:
            return answer

        def learn(usage: Usage) -> bool:
            if not turn.recalls:
                return answer.learn(usage)
            # Only the first generation's prompt was measured; after an overflow the later ones teach nothing.
            ended = answer.ending is not None and answer.ending.overflow is not None
            return not ended and answer.learn(turn.first)

        if turn.is_stream(reply.header("content-type")):
            noticed = partial(self._faults.report, "answer", report.request_id)
            streamed = MergedReply(turn, reply, answer.head, resend, noticed)
            return replace(answer, reply=streamed, head=b"", learn=learn, at_end=turn.told)
        reply, head = await rewritten_reply(turn, reply, resend)
        return replace(answer, reply=reply, head=head, learn=learn, report=turn.told(report))


async def rewritten_reply(turn: RecallSession, reply: Reply, resend: Resend) -> tuple[Reply, bytes]:
    """An answer that is no stream, as the client gets it once its last generation is here: a reply, and bytes of it.

    A generation that is no answer ends it, and is passed as it came.
    """
    earlier: list[Any] = []
    while True:
        value, taken = await _value(reply, resend.taken)
        said = turn.wire.said(value) if value is not None and reply.status == 200 else None
        if value is None or said is None:
            return reply, taken
        calls = turn.wire.calls(said)
        if turn.recalls or calls:
            turn.note(value.get("usage"))
        if not calls or not turn.may_go_on() or turn.wire.is_cut(value):
            if not earlier and not calls:
                return reply, taken
            return RewrittenReply(reply, dumped(turn.wire.whole(value, earlier))), b""
        resend.set_aside()
        reply, _ = await turn.go_on(said, calls)
        earlier.append(said)


async def _value(reply: Reply, taken: list[bytes]) -> tuple[dict[str, Any] | None, bytes]:
    """The object that a reply holds, and all bytes taken from it; ``None`` where there is none, or too much of it.

    *taken* are those that were read before, and grows.
    """
    size = sum(map(len, taken))
    while size <= WHOLE and (chunk := await reply.next_chunk()):
        taken.append(chunk)
        size += len(chunk)
    body = b"".join(taken)
    if size > WHOLE:
        return None, body
    return value_of(ContentDecoder(reply.header("content-encoding"), WHOLE).feed(body)), body


class RewrittenReply:
    """An answer with a body of its own and the head of the reply it was made of."""

    close_delimited = False

    def __init__(self, reply: Reply, body: bytes) -> None:
        self._reply = reply
        self._body = body
        gone = ("content-length", "content-encoding", "transfer-encoding")
        kept = [pair for pair in reply.headers if pair[0].lower() not in gone]
        self.headers: Sequence[tuple[str, str]] = [*kept, ("content-length", str(len(body)))]

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._reply.status

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")

    async def next_chunk(self) -> bytes:
        """All of it, then nothing."""
        body, self._body = self._body, b""
        return body

    def close(self) -> None:
        """End the reply it was made of."""
        self._reply.close()


class MergedReply:
    """A reply whose stream goes on where the model is asked again. Closing it ends whatever is under way.

    After a fault of ours the first generation passes as it came, without recall; a later one, of which the client has
    the beginning in another form, ends the stream.
    """

    def __init__(
        self, turn: RecallSession, reply: Reply, head: bytes, resend: Resend, report: Callable[[Exception], None]
    ) -> None:
        gone = ("content-length", "content-encoding")
        self.status = reply.status
        self.headers: Sequence[tuple[str, str]] = [pair for pair in reply.headers if pair[0].lower() not in gone]
        self._turn = turn
        self._resend = resend
        self._report = report
        self._splice: StreamMerger = turn.wire.stream()
        self._take(reply, head)
        self._ended = self._final = self._due = self._read = self._plainly = False

    @property
    def close_delimited(self) -> bool:
        """True if only the end of the connection says where the generation that is read ends."""
        return self._reply.close_delimited

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")

    async def next_chunk(self) -> bytes:
        """The next bytes for the client; empty at the end. Raises ``RecallFailed`` and what the upstream raises."""
        while not self._ended:
            try:
                made = await self._next()
            except UllageError:
                raise
            except Exception as fault:  # noqa: BLE001 - a fault in recall costs recall, not the stream
                self._report(fault)
                made = self._without_recall(fault)
            if made:
                return made
        return b""

    def close(self) -> None:
        """Abort what is still under way."""
        self._reply.close()
        self._resend.drop()

    async def _next(self) -> bytes:
        if self._plainly:
            return await self._passed()
        if self._due:
            self._due = False
            return await self._turned()
        return await self._fed()

    def _without_recall(self, fault: Exception) -> bytes:
        """What of the first generation was not passed on yet; the rest of it follows as it comes."""
        if self._plainly or not self._splice.first:
            raise RecallFailed(500, "internal error.") from fault
        self._plainly, self._ended = True, self._read
        if self._resend.reply is not self._reply:
            self._resend.drop()
        try:
            return self._splice.untouched()
        except Exception as another:
            raise RecallFailed(500, "internal error.") from another

    async def _passed(self) -> bytes:
        chunk = await self._reply.next_chunk()
        self._ended = not chunk
        return self._decoded(chunk)

    def _take(self, reply: Reply, head: bytes) -> None:
        self._reply = reply
        self._head = head
        coding = reply.header("content-encoding").strip().lower()
        self._plain = None if coding in PLAIN else ContentDecoder(coding, WHOLE)

    def _decoded(self, chunk: bytes) -> bytes:
        if self._plain is None:
            return chunk
        made = self._plain.feed(chunk)
        if self._plain.lost:
            raise RecallFailed(502, "its stream cannot be decoded to the end.")
        return made

    async def _fed(self) -> bytes:
        """What the next bytes of this generation add."""
        chunk, self._head = self._head or await self._reply.next_chunk(), b""
        try:
            self._splice.unread = self._decoded(chunk)
            made = self._splice.feed(self._splice.unread) if chunk else b""
        except TooMuchBuffered:
            raise RecallFailed(502, "what it says is too large to be held back.") from None
        if not self._final:
            self._due = self._splice.over or not chunk
        elif not chunk:
            self._ended = True
            made += self._splice.rest()
        return made

    async def _turned(self) -> bytes:
        """What comes behind a generation: the rest of it, or nothing, and another generation after it."""
        splice, turn = self._splice, self._turn
        calls = splice.calls()
        if turn.recalls or calls:
            turn.note(splice.usage)
        if not calls or not turn.may_go_on() or splice.cut or splice.failed:
            self._final = True
            return splice.flush()
        self._read = True
        await self._finish()
        reply, head = await turn.go_on(splice.said, calls)
        if reply.status != 200 or not turn.is_stream(reply.header("content-type")):
            self._reply = reply
            raise await _failure(reply, head)
        splice.go_on()
        self._take(reply, head)
        self._read = False
        return b""

    async def _finish(self) -> None:
        """Read a generation's reply to its end, if that is near: its connection can be used again."""
        try:
            async with asyncio.timeout(ENDING_SECONDS):
                while await self._reply.next_chunk():
                    pass
        except (TimeoutError, UpstreamUnreachable, UpstreamTimeout):
            self._reply.close()  # all that matters of it is here


async def _failure(reply: Reply, head: bytes) -> RecallFailed:
    """What a refusal of the next generation comes to: the upstream's own words, in the middle of a stream."""
    taken, size = [head], len(head)
    while size <= ERROR_BYTES and (chunk := await reply.next_chunk()):
        taken.append(chunk)
        size += len(chunk)
    value = value_of(ContentDecoder(reply.header("content-encoding"), ERROR_BYTES).feed(b"".join(taken))) or {}
    error = value.get("error", value)
    told = error.get("message") if isinstance(error, dict) else error
    return RecallFailed(reply.status if reply.status >= 400 else 502, told if isinstance(told, str) else "")
