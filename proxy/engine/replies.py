"""What goes back: an upstream's reply, looked at before it is passed on, or an answer of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from proxy.core.errors import UllageError
from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.evidence import NOTHING_KNOWN, Prior
from proxy.core.overflow.kinds import Overflow
from proxy.core.overflow.stream import EarlyOverflowDetector, LateOverflowDetector
from proxy.core.report import Report, Usage
from proxy.core.request import Request
from proxy.engine.plans import Plan
from proxy.engine.ports import Reply
from proxy.engine.recovery import Recovery

HOLD_SECONDS = 5.0
"""How long the head of a stream is held after its first byte while it is unclear whether it is an overflow."""

JUDGED_INLINE = 16_384
"""Bytes of a request above which a claim about it is judged in a thread: its words are searched."""

ERROR_BYTES = 1_048_576
"""An error answer larger than this is passed on without being looked at."""


Judged = Callable[[Prior], Overflow | None]
"""Returns the overflow that an answer reports, given what is known of its request."""


def learn_nothing(usage: Usage) -> bool:
    """What an answer of our own teaches."""
    del usage
    return False


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes to the client: the upstream's ``reply`` (``head`` first: bytes already taken from it), or ``error``.

    ``learn`` takes the usage of an answer that came to its end, and says whether it shows that the provider silently
    cut the prompt instead of refusing it. ``told``, if set, adds to the report what happens until the answer's end:
    such an answer needs its request until then.
    """

    report: Report
    reply: Reply | None = None
    head: bytes = b""
    error: UllageError | None = None
    learn: Callable[[Usage], bool] = learn_nothing
    ending: LateOverflowDetector | None = None
    told: Callable[[Report], Report] | None = None


class DrainedReply:
    """What is left of a reply whose body was read to its end: its head, to be given back verbatim."""

    close_delimited = False

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._reply.status

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """The end-to-end headers as they came."""
        return self._reply.headers

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""
        return self._reply.header(name)

    async def next_chunk(self) -> bytes:
        """Nothing: the body was taken."""
        return b""

    def close(self) -> None:
        """Nothing is under way any more."""


class LocalReply:
    """An answer of our own, with status 200."""

    close_delimited = False
    status = 200
    headers: Sequence[tuple[str, str]]

    def __init__(self, body: bytes, kind: str = "application/json") -> None:
        self._body = body
        self.headers = (("content-type", kind), ("content-length", str(len(body))))

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""
        return dict(self.headers).get(name.lower(), "")

    async def next_chunk(self) -> bytes:
        """All of it, then nothing."""
        body, self._body = self._body, b""
        return body

    def close(self) -> None:
        """Nothing is under way."""


class OverflowDetector:
    """Tells an overflow by an answer's head and opening bytes."""

    def __init__(self, classifier: Classifier, recovery: Recovery) -> None:
        self._classifier = classifier
        self._recovery = recovery

    async def look(
        self, reply: Reply, request: Request, plan: Plan, taken: list[bytes], *, again: bool
    ) -> tuple[bytes, Overflow | None]:
        """The bytes read from *reply* to find out, and the overflow if it is one: then they are all there is.

        They are added to *taken* as they come, so that none is lost if this fails. A claim is held against what is
        known of *request*, which was sent as *plan* has it; that costs a count, so only a claim does. A provider that
        was believed once is believed *again*.
        """
        found = await self._judge(reply, request, plan, taken, again)
        return b"".join(taken), found

    async def _judge(
        self, reply: Reply, request: Request, plan: Plan, taken: list[bytes], again: bool
    ) -> Overflow | None:
        if reply.status >= 400:
            if not await _read(reply, taken, ERROR_BYTES):
                return None
            read: Judged = partial(self._classifier.answer, reply.status, reply.headers, b"".join(taken))
            claim = read(NOTHING_KNOWN)
        elif reply.status == 200:
            opening = EarlyOverflowDetector(self._classifier, reply.headers)
            claim = await _watch(reply, taken, opening)
            read = opening.judged
        else:
            return None
        if not self._recovery.concerns(claim):
            return None
        if not again:
            prior = await self._recovery.prior(request, plan)
            large = len(plan.body) > JUDGED_INLINE
            claim = await asyncio.to_thread(read, prior) if large else read(prior)
        return claim if self._recovery.concerns(claim) else None


async def _watch(reply: Reply, taken: list[bytes], opening: EarlyOverflowDetector) -> Overflow | None:
    """Hold the opening of an answer until it is clear what it is; all of it, if it is an overflow.

    However small the request is by our count: a window that is believed too large makes every request look small.
    """
    taken.append(await reply.next_chunk())
    loop = asyncio.get_running_loop()
    deadline = loop.time() + HOLD_SECONDS
    while taken[-1] and opening.feed(taken[-1]) == "undecided":
        chunk = await _before(deadline, reply.next_chunk())
        if chunk is None:
            return None
        taken.append(chunk)
    if opening.finish() != "overflow":
        return None
    return opening.overflow if await _read(reply, taken, ERROR_BYTES, deadline) else None


async def _read(reply: Reply, taken: list[bytes], limit: int, deadline: float | None = None) -> bool:
    """Add the rest of a reply to *taken*, up to *limit* bytes; return True if that was all of it."""
    size = 0
    while size <= limit:
        chunk = await (reply.next_chunk() if deadline is None else _before(deadline, reply.next_chunk()))
        if not chunk:
            return chunk is not None
        taken.append(chunk)
        size += len(chunk)
    return False


async def _before(deadline: float, chunk: Awaitable[bytes]) -> bytes | None:
    try:
        async with asyncio.timeout_at(deadline):
            return await chunk
    except TimeoutError:
        return None
