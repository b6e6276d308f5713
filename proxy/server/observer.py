"""What watches an answer while its bytes pass: one object, one call a chunk."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.apis.sse import StreamEnd
from proxy.core.apis.usage import UsageTap
from proxy.core.overflow.stream import LateOverflowDetector
from proxy.core.report import NO_USAGE, Usage
from proxy.engine.include_usage import UsageHider


class ReplyObserver:
    """Notes the usage and late overflows of one answer, and keeps from it the usage that its client did not ask for.

    A fault in it is *reported* once and turns it off; the bytes go on.
    """

    __slots__ = ("_end", "_ending", "_hider", "_report", "_tap", "watches")

    def __init__(
        self,
        encoding: str,
        hider: UsageHider | None,
        ending: LateOverflowDetector | None,
        report: Callable[[Exception], None],
    ) -> None:
        """*encoding* is the answer's content-encoding."""
        self._hider = hider
        self._ending = ending
        self._report = report
        self._tap: UsageTap | None = None
        self._end: StreamEnd | None = None
        self.watches = True
        try:
            self._tap = UsageTap(encoding)
        except Exception as fault:  # noqa: BLE001 - whatever watches an answer must not cost it
            self._turn_off(fault)

    def watch_end(self) -> None:
        """Watch for what says that the stream is done."""
        self._end = StreamEnd()

    @property
    def saw_end(self) -> bool:
        """False if the stream's end was watched for and did not come."""
        return self._end is None or self._end.done or not self.watches

    @property
    def usage(self) -> Usage:
        """The newest figures of each kind; none after a fault."""
        if not self.watches or self._tap is None:
            return NO_USAGE
        try:
            return self._tap.usage
        except Exception as fault:  # noqa: BLE001 - whatever watches an answer must not cost it
            self._turn_off(fault)
            return NO_USAGE

    def feed(self, chunk: bytes) -> bytes:
        """What goes to the client for *chunk*: *chunk* itself, or what is left of it without the usage."""
        if not self.watches or self._tap is None:
            return chunk
        pending: bytes | None = None
        try:
            if self._hider is not None:
                pending = self._hider.pending  # what a fault in the middle of its work must not lose
            self._tap.feed(chunk)
            if self._ending is not None:
                self._ending.feed(chunk)
            if self._end is not None:
                self._end.feed(chunk)
            return self._hider.feed(chunk) if self._hider is not None else chunk
        except Exception as fault:  # noqa: BLE001 - whatever watches an answer must not cost it
            self._turn_off(fault)
            return (self._withheld() if pending is None else pending) + chunk

    def rest(self) -> bytes:
        """What is left when the answer ends."""
        return self._withheld() if self.watches else b""

    def _withheld(self) -> bytes:
        if self._hider is None:
            return b""
        try:
            return self._hider.rest()
        except Exception as fault:  # noqa: BLE001 - whatever watches an answer must not cost it
            self._turn_off(fault)
            return b""

    def _turn_off(self, fault: Exception) -> None:
        if self.watches:
            self._report(fault)
        self.watches = False
