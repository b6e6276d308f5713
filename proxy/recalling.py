"""Answering the tool with which a model reads what left its view, and asking it again: one answer for the client.

Nothing is stored: what the tool shows is the request's own history, which is held until its answer has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeVar

from proxy.answering import Answer
from proxy.core.conversation.entry import Entry
from proxy.core.conversation.scan import scan
from proxy.core.errors import UllageError, UpstreamTimeout, UpstreamUnreachable
from proxy.core.overflow.coding import Plain
from proxy.core.recall import chat, messages, responses
from proxy.core.recall.events import dumped, value_of
from proxy.core.recall.search import LAST, Piece, answer
from proxy.core.recall.splice import Call, Splice, TooMuchHeld, Wire
from proxy.core.report import Report, Usage
from proxy.plans import DIALECTS, Plan
from proxy.ports import Reply, Request
from proxy.reading import Reader

WIRES: Mapping[str, Wire] = MappingProxyType({"chat": chat, "messages": messages, "responses": responses})

GENERATIONS: Final = 3
"""How often a model is asked for one answer at most, the first time included."""

WHOLE: Final = 2**26
"""Bytes of an answer that is no stream, and of a stream's plain bytes, that are looked at."""

ENDING_SECONDS: Final = 0.1
"""How long a connection is read on behind an answer's last event, so that it can be used again."""

INLINE: Final = 65_536
"""Bytes of a history that is searched on the event loop; more goes to a thread."""

RESULT: Final = 16
"""Tokens around one answer of the tool."""

READABLE: Final = frozenset({"", "identity", "gzip", "x-gzip", "deflate", "br", "zstd"})
"""Content codings that can be read; an answer in another one passes as it came."""

ERROR_BYTES: Final = 65_536
LABEL: Final = 120
"""Characters of a call that are shown as the heading of its result."""


class RecallFailed(UllageError):
    """An answer could not go on after the tool was called; ``status`` is the upstream's, if it had one."""

    code = "recall_failed"

    def __init__(self, status: int, told: str = "") -> None:
        super().__init__(f"The upstream could not go on after a recall{': ' + told if told else '.'}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call of the tool shows: *results* unless it asks for more or fewer, in at most so many *tokens*."""

    results: int = 3
    tokens: int = 4_000


@dataclass(frozen=True, slots=True)
class Asked:
    """A plan that was sent again with more behind its view, and what came of it."""

    plan: Plan
    reply: Reply
    head: bytes
    retries: int = 0
    overflows: int = 0


T = TypeVar("T")
Grow = Callable[[Plan], Awaitable[Plan]]
Again = Callable[[Plan, Grow], Awaitable[Asked]]
"""Sends a plan, or after an overflow a smaller one, each as the function makes it grow."""


class Recalling:
    """Makes answers of requests that offer the tool."""

    def __init__(self, reader: Reader, limits: Limits) -> None:
        self._reader = reader
        self._limits = limits

    def turn(self, request: Request, plan: Plan, again: Again) -> Turn:
        """The answer to *request* that begins with what *plan* is answered."""
        return Turn(self._reader, self._limits, request, plan, again)


class Turn:
    """One answer to a client, of one or more generations. Keeps the request while it is under way.

    ``recalls`` are the generations but the first, ``tokens`` what all of them took, once there was more than one.
    """

    def __init__(self, reader: Reader, limits: Limits, request: Request, plan: Plan, again: Again) -> None:
        assert plan.subject is not None
        self.wire = WIRES[request.api]
        self.recalls = 0
        self.tokens = 0
        self._dialect = DIALECTS[request.api]
        self._count = reader.count(plan.subject.route.encoding, plan.subject.route.model)
        self._limits = limits
        self._request = request
        self._plan = plan
        self._again = again
        self._behind: list[bytes] = []
        self._retries = 0
        self._overflows = 0
        self._added = 0

    def told(self, report: Report) -> Report:
        """*report* with what happened since it was made."""
        if not self.recalls:
            return report
        return report.but(
            recalls=self.recalls,
            recall_tokens=self.tokens,
            retries=report.retries + self._retries,
            overflows=report.overflows + self._overflows,
        )

    def may_go_on(self) -> bool:
        """Whether the model may be asked once more."""
        return self.recalls + 1 < GENERATIONS

    def note(self, usage: Any) -> None:
        """Add up what a generation took: as its *usage* says, else our count of its prompt."""
        factor = self._plan.subject.factor if self._plan.subject else 1.0
        counted = int(((self._plan.tokens or 0) + self._added) * factor)
        told = self.wire.spent(usage)
        self.tokens += counted if told is None else told

    async def go_on(self, said: Any, calls: Sequence[Call]) -> tuple[Reply, bytes]:
        """The reply to the next generation's request, in which *calls* are answered, and the bytes taken from it."""
        body = self._plan.body
        asked = [dumped(element) for element in self.wire.asked(said, body)]
        pieces = await self._off(self._pieces)
        made: list[bytes] = []

        async def grown(plan: Plan) -> Plan:
            made[:] = await self._off(lambda: [*asked, *self._answered(plan, asked, calls, pieces)])
            return self._grown(plan, made)

        found = await self._again(self._plan, grown)
        self._plan = found.plan
        self._behind += made
        self._added = self._weight(self._behind)
        self.recalls += 1
        self._retries += found.retries
        self._overflows += found.overflows
        return found.reply, found.head

    async def _off(self, work: Callable[[], T]) -> T:
        return work() if len(self._request.body) <= INLINE else await asyncio.to_thread(work)

    def _grown(self, plan: Plan, made: Sequence[bytes]) -> Plan:
        where = scan(plan.body, self._dialect.LIST)
        end = where.spans[-1][1]
        behind = [*self._behind, *made]
        body = b"%b,%b%b" % (plan.body[:end], b",".join(behind), plan.body[end:])
        return replace(plan, body=body, tokens=(plan.tokens or 0) + self._weight(behind))

    def _weight(self, elements: Sequence[bytes]) -> int:
        return sum(self._dialect.read_item(raw, self._count).tokens for raw in elements)

    def _answered(
        self, plan: Plan, asked: Sequence[bytes], calls: Sequence[Call], pieces: Sequence[Piece]
    ) -> Iterator[bytes]:
        """The elements that answer *calls* in what *plan* leaves free."""
        assert plan.subject is not None
        figures = plan.subject.figures
        last = "" if self.recalls + 2 < GENERATIONS else "\n" + LAST
        taken = (plan.tokens or 0) + self._weight([*self._behind, *asked])
        room = figures.inside(plan.output or figures.reserve) - taken
        share = min(self._limits.tokens, room // len(calls)) - RESULT - (self._count(last) if last else 0)
        usual, count = self._limits.results, self._count
        texts = [answer(call.arguments, pieces, usual, share, count) + last for call in calls]
        return map(dumped, self.wire.answered(calls, texts))

    def _pieces(self) -> list[Piece]:
        """Every item of the client's history as it is shown."""
        subject, record = self._plan.subject, self._plan.record
        assert subject is not None
        body = (self._plan.request or self._request).body
        body = body if (listed := self._dialect.listed(body)) is None else listed
        raws = [body[start:end] for start, end in scan(body, self._dialect.LIST).spans]
        items, reading = subject.reading.items, subject.reading
        sent = [reading.body[start:end] for start, end in reading.scan.spans]
        same = len(sent) == len(raws)
        hidden = {i for i, raw in enumerate(raws) if not same or sent[i] != raw}
        if record is not None:
            hidden |= {i for i in range(record.event.cut) if i not in record.event.anchors} | record.edits.keys()
        callers: dict[str, str] = {}
        pieces: list[Piece] = []
        for at, raw in enumerate(raws):
            entry = self._dialect.read_entry(raw)
            if same and len(items[at].calls) == len(entry.calls):
                shown = (_shown(name, arguments) for name, arguments in entry.calls)
                callers |= dict(zip(items[at].calls, shown, strict=True))
            answers = [callers[name] for name in (items[at].answers if same else ()) if name in callers]
            label = f"result of {', '.join(answers)}" if answers else entry.role
            if entry.role != "system":
                pieces.append(Piece(at + 1, label, _text(entry), at in hidden))
        return pieces


def _shown(name: str, arguments: str) -> str:
    text = f"{name}({' '.join(arguments.split())})"
    return text if len(text) <= LABEL else text[: LABEL - 4] + "...)"


def _text(entry: Entry) -> str:
    calls = (f"{name}({arguments})" for name, arguments in entry.calls)
    media = (f"[{kind}, not shown]" for kind in entry.media)
    return "\n".join(part for part in (entry.text, *calls, *media) if part)


async def recalled(turn: Turn, answer: Answer) -> Answer:
    """*answer*, whose reply is that of the first generation, with the tool's calls answered on the way."""
    reply, report = answer.reply, answer.report
    if reply is None or reply.status != 200 or reply.header("content-encoding").strip().lower() not in READABLE:
        return answer

    def learn(usage: Usage) -> bool:
        # The last generation's usage says nothing of what was counted for the first.
        return answer.learn(usage) if not turn.recalls else False

    if reply.header("content-type").startswith("text/event-stream"):
        return replace(answer, reply=Streamed(turn, reply, answer.head), head=b"", learn=learn, told=turn.told)
    reply, head = await settled(turn, reply, answer.head)
    return replace(answer, reply=reply, head=head, learn=learn, report=turn.told(report))


async def settled(turn: Turn, reply: Reply, head: bytes) -> tuple[Reply, bytes]:
    """An answer that is no stream, as the client gets it once its last generation is here: a reply, and bytes of it.

    A generation that is no answer ends it, and is passed as it came.
    """
    earlier: list[Any] = []
    while True:
        value, taken = await _value(reply, head)
        said = turn.wire.said(value) if value is not None and reply.status == 200 else None
        if value is None or said is None:
            return reply, taken
        calls = turn.wire.calls(said)
        if turn.recalls or calls:
            turn.note(value.get("usage"))
        if not calls or not turn.may_go_on() or turn.wire.is_cut(value):
            if not earlier and not calls:
                turn.tokens = 0
                return reply, taken
            return Settled(reply, dumped(turn.wire.whole(value, earlier))), b""
        reply.close()
        reply, head = await turn.go_on(said, calls)
        earlier.append(said)


async def _value(reply: Reply, head: bytes) -> tuple[dict[str, Any] | None, bytes]:
    """The object that a reply holds, and all bytes taken from it; ``None`` where there is none, or too much of it."""
    taken, size = [head], len(head)
    while size <= WHOLE and (chunk := await reply.next_chunk()):
        taken.append(chunk)
        size += len(chunk)
    body = b"".join(taken)
    if size > WHOLE:
        return None, body
    return value_of(Plain(reply.header("content-encoding"), WHOLE).feed(body)), body


class Settled:
    """An answer with a body of its own and the head of the reply it was made of."""

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


class Streamed:
    """A reply whose stream goes on where the model is asked again. Closing it ends whatever is under way."""

    def __init__(self, turn: Turn, reply: Reply, head: bytes) -> None:
        gone = ("content-length", "content-encoding")
        self.status = reply.status
        self.headers: Sequence[tuple[str, str]] = [pair for pair in reply.headers if pair[0].lower() not in gone]
        self._turn = turn
        self._splice: Splice = turn.wire.stream()
        self._take(reply, head)
        self._ended = self._final = self._due = False

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")

    async def next_chunk(self) -> bytes:
        """The next bytes for the client; empty at the end. Raises ``RecallFailed`` and what the upstream raises."""
        while not self._ended:
            if self._due:
                self._due = False
                made = await self._turned()
            else:
                made = await self._fed()
            if made:
                return made
        return b""

    def close(self) -> None:
        """Abort what is still under way."""
        self._reply.close()

    def _take(self, reply: Reply, head: bytes) -> None:
        self._reply = reply
        self._head = head
        self._plain = Plain(reply.header("content-encoding"), WHOLE)

    async def _fed(self) -> bytes:
        """What the next bytes of this generation add."""
        chunk, self._head = self._head or await self._reply.next_chunk(), b""
        try:
            made = self._splice.feed(self._plain.feed(chunk)) if chunk else b""
        except TooMuchHeld:
            raise RecallFailed(502, "its tool calls are too large to be held back.") from None
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
        await self._finish()
        reply, head = await turn.go_on(splice.said, calls)
        if reply.status != 200 or not reply.header("content-type").startswith("text/event-stream"):
            self._reply = reply
            raise await _failure(reply, head)
        self._take(reply, head)
        splice.go_on()
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
    value = value_of(Plain(reply.header("content-encoding"), ERROR_BYTES).feed(b"".join(taken))) or {}
    error = value.get("error", value)
    told = error.get("message") if isinstance(error, dict) else error
    return RecallFailed(reply.status if reply.status >= 400 else 502, told if isinstance(told, str) else "")
