"""What has happened so far to one request, the only mutable object of its way; and what sending can come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from proxy.core.attempts import Attempts
from proxy.core.decisions import Reject, View
from proxy.core.overflow.kinds import Overflow
from proxy.core.request import Request
from proxy.engine.ports import Clock, Reply
from proxy.engine.replies import DrainedReply


class Unreachable(Exception):
    """The engine is in a state that cannot be: a fault of ours."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nothing is left to send: the client sees the provider's own first error."""


GIVE_UP: Final = GiveUp()


@dataclass(frozen=True, slots=True)
class Delivered:
    """A reply to *view* that can be passed on, and the bytes already read from it."""

    view: View
    reply: Reply
    head: bytes
    hides_usage: bool


@dataclass(frozen=True, slots=True)
class Undelivered:
    """Why no reply was passed on: the request was refused, or the first overflow stands."""

    refused: Reject | None = None


@dataclass(frozen=True, slots=True)
class FirstOverflow:
    """The first refusal of a request: the view that was refused, and every byte of the provider's own error."""

    view: View
    reply: Reply
    head: bytes


class Run:
    """One request under way.

    ``sent`` counts the bodies that were sent, ``overflows`` the refusals, ``overhead`` the seconds that planning took.
    ``reply`` is in hand and ``taken`` are the bytes read from it so far. ``instead`` is what the client gets if none is
    in hand: the reply to the first body that was too long, or the generation before the one under way.
    ``unsure`` is a view and a refusal of it that teaches only once something smaller was answered.
    """

    def __init__(self, request: Request, clock: Clock) -> None:
        self.request = request
        self.sent = 0
        self.overflows = 0
        self.overhead = 0.0
        self.attempts: Attempts | None = None
        self.first_overflow: FirstOverflow | None = None
        self.unsure: tuple[View, Overflow] | None = None
        self.upstream = ""
        self.reply: Reply | None = None
        self.taken: list[bytes] = []
        self.instead: tuple[Reply, bytes] | None = None
        self._clock = clock
        self._began = clock()

    def resume_planning(self) -> None:
        """Count the time from now on as overhead."""
        self._began = self._clock()

    def pause_planning(self) -> None:
        """Stop counting time as overhead."""
        self.overhead += self._clock() - self._began

    def begin_generation(self) -> None:
        """Count anew what is sent and refused; the reply in hand stays what the client gets if none follows."""
        self.sent = 0
        self.overflows = 0
        self.first_overflow = None
        self.unsure = None

    def sending(self, upstream: str) -> None:
        """Note that a body goes to *upstream*; the reply in hand is what the client gets if none follows."""
        if self.reply is not None:
            self.instead = self.reply, b"".join(self.taken)
        self.upstream, self.reply, self.taken = upstream, None, []

    def set_aside(self) -> None:
        """Close the reply in hand: all that matters of it was read."""
        if self.reply is not None:
            self.reply.close()
            self.reply = DrainedReply(self.reply)

    def overflowed(self, view: View) -> None:
        """Put the reply in hand aside: it says that *view* is too long, and all of it was read."""
        self.overflows += 1
        self.set_aside()
        if self.reply is None:
            return
        head = b"".join(self.taken)
        if self.first_overflow is None:
            self.first_overflow = FirstOverflow(view, self.reply, head)
        if self.instead is None:
            self.instead = self.reply, head
        self.reply = None

    def drop(self) -> None:
        """Close the reply in hand: the client is not to see it."""
        if self.reply is not None:
            self.reply.close()
        self.reply = None
