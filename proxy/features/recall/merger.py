"""What every API's side of recall offers, and what their streams have in common.

A *generation* is what the model wrote in answer to one request. A generation that calls the tool is followed by
another; what the client sees is one answer, without the tool's calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from proxy.core.apis.sse import EventCutter
from proxy.core.report import Usage
from proxy.features.recall.events import data_of, value_of
from proxy.features.recall.tool import NAME

MOST_BUFFERED: Final = 2**25
"""Bytes of one generation that are held at most; a call of a tool is never near that."""

LONGEST_EVENT: Final = 2**26
"""Bytes of one event at most; what ends later has no end."""

NOT_RUN: Final = f"[Not run, because {NAME} was called beside it. Call it again if it is still needed.]"
"""What answers a call of a client's tool that the client never sees: what the model said goes back unchanged."""


Part = TypeVar("Part")


def without_calls(
    parts: Sequence[Part], gone: Callable[[Part], bool], is_call: Callable[[Part], bool], thinks: Callable[[Part], bool]
) -> list[Part]:
    """*parts* of a generation without the calls that are *gone*, and without thoughts that led to nothing but those.

    Thoughts may not come back to a provider without what they led to, nor beside thoughts of another generation.
    """
    kept: list[Part] = []
    thoughts: list[Part] = []
    calls: list[Part] = []

    def settle() -> None:
        left = [call for call in calls if not gone(call)]
        kept.extend([*thoughts, *left] if left or not calls else [])
        thoughts.clear()
        calls.clear()

    for part in parts:
        if is_call(part):
            calls.append(part)
            continue
        if calls or not thinks(part):
            settle()
        (thoughts if thinks(part) else kept).append(part)
    settle()
    return kept


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the tool: its id and its arguments, as the model wrote them."""

    id: str
    arguments: str


class RecallApi(Protocol):
    """One API's side of recall: a module with these names.

    *said* is what one generation says, as plain JSON: a message, its blocks, or items.
    """

    def stream(self) -> StreamMerger:
        """The stream of a new answer."""

    def said(self, answer: Mapping[str, Any]) -> Any:
        """What a whole answer says; ``None`` where it is no answer of this API."""

    def is_cut(self, answer: Mapping[str, Any]) -> bool:
        """Whether a whole answer was broken off, by its output figure or a filter: its last call may be half."""

    def calls(self, said: Any) -> list[Call]:
        """The calls of the tool in it."""

    def asked(self, said: Any, body: bytes) -> list[Any]:
        """The elements with which it goes back to the model of the request *body*: as the model said it."""

    def answered(self, said: Any, texts: Sequence[str]) -> list[Any]:
        """The elements that answer its calls: those of the tool with *texts*, others with ``NOT_RUN``."""

    def whole(self, answer: Mapping[str, Any], earlier: Sequence[Any]) -> dict[str, Any]:
        """The last generation as the client gets it: behind what *earlier* ones said, without calls of the tool."""

    def used(self, usage: Any) -> Usage:
        """The tokens in an answer's usage: all of its input, cached or not, and its output."""


class TooMuchBuffered(Exception):
    """A generation's calls, or one event, are larger than what may be held."""


class StreamMerger(ABC):
    """One stream for the client, out of one or more generations. Feed it bytes as they arrive, in any chunking.

    From the first call of any tool on, a generation's events are held: only its end tells whether they stand. Where
    thoughts may not be shown without what they lead to, they are held until that begins. All others pass at once, the
    first generation's as they came. ``over``: the generation's last event was seen. ``unread`` is what is
    about to be fed: it is not lost if that fails.
    """

    def __init__(self) -> None:
        self.over = False
        self.failed = False
        self.cut = False
        self.first = True
        self.usage: dict[str, Any] = {}
        self._events = EventCutter()
        self._held: list[tuple[bytes, dict[str, Any] | None]] = []
        self._found: list[bytes] = []
        self._new: deque[bytes] = deque()
        self.unread = b""
        self._size = 0
        self._open = False
        self._strip = False

    def feed(self, chunk: bytes) -> bytes:
        """What of the stream may go to the client after *chunk*. Raises ``TooMuchBuffered``."""
        self._new = deque(self._events.feed(chunk))
        self.unread = b""
        if self._events.pending_size > LONGEST_EVENT:
            raise TooMuchBuffered
        while self._new:
            self._read(self._new[0])
            self._new.popleft()
        found, self._found = self._found, []
        return b"".join(found)

    def _read(self, event: bytes) -> None:
        """Note what *event* says, and let pass what may."""
        data = data_of(event)
        value = value_of(data) if data else None
        if not data or (value is not None and value.get("type") == "ping"):
            self._found.append(event)  # what keeps the connection alive says nothing, and waits for nothing
            return
        if value is not None:
            self._note(value)
        elif data.strip() == b"[DONE]":
            self.over = True
        self._pass(event, value)

    def untouched(self) -> bytes:
        """What was fed and not passed on, as it came: for a first generation that is to pass without recall."""
        held = (event for event, _ in self._held)
        return b"".join([*self._found, *held, *self._new, self._events.flush(), self.unread])

    def rest(self) -> bytes:
        """What is left of the stream behind its last event."""
        return self._events.flush()

    def flush(self) -> bytes:
        """What was held, now that it stands: without calls of the tool, if there are any. All that follows passes."""
        self._open, self._strip = True, bool(self.calls())
        flushed = b"".join(written for event, value in self._held for written in self._written(event, value))
        self._held, self._size = [], 0
        return flushed

    def go_on(self) -> None:
        """Another generation follows: what was held of this one is void."""
        self._begin()
        self._events.flush()
        self._held, self._size = [], 0
        self.over, self.cut, self.first, self.usage = False, False, False, {}

    @abstractmethod
    def calls(self) -> list[Call]:
        """The calls of the tool in this generation so far."""

    @property
    @abstractmethod
    def said(self) -> Any:
        """What this generation says."""

    @abstractmethod
    def _note(self, value: dict[str, Any]) -> None:
        """Take notice of an event."""

    @abstractmethod
    def _begins_hold(self, value: dict[str, Any]) -> bool:
        """Whether nothing from this event on may pass before the generation's end."""

    @abstractmethod
    def _rewritten(self, value: dict[str, Any]) -> bytes:
        """The event as it stands in the client's stream; empty where it has no place there."""

    @abstractmethod
    def _begin(self) -> None:
        """Forget this generation, and keep what the next one has to go on from."""

    def _release(self, value: dict[str, Any]) -> bool:
        """Whether *value* tells that what was held stands, before the generation's end."""
        del value
        return False

    def _pass(self, event: bytes, value: dict[str, Any] | None) -> None:
        """Add to ``_found`` what may go on after an event; nothing is let go of before it is there."""
        if self.failed and not self._open:
            self._found.append(self.flush())
        elif value is not None and self._held and self._release(value):
            self._found += [out for held, known in self._held for out in self._written(held, known)]
            self._held, self._size = [], 0
        if not self._must_wait(value):
            self._found += self._written(event, value)
            return
        self._held.append((event, value))
        self._size += len(event)
        if self._size > MOST_BUFFERED:
            raise TooMuchBuffered

    def _must_wait(self, value: dict[str, Any] | None) -> bool:
        """Return whether the event of *value* has to wait for the generation's end."""
        if self._open:
            return False
        return bool(self._held) or (value is not None and self._begins_hold(value))

    def _written(self, event: bytes, value: dict[str, Any] | None) -> list[bytes]:
        if value is None or (self.first and not self._strip):
            if value is not None:
                self._seen(value)
            return [event]
        made = self._rewritten(value)
        return [made] if made else []

    @abstractmethod
    def _seen(self, value: dict[str, Any]) -> None:
        """Take notice of an event that passes as it came."""
