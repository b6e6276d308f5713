"""Makes one stream for the client out of the streams of several generations, without the calls of a server tool.

Theory of operation
===================

A *generation* is what the model writes in answer to one request. A generation that calls a server tool is never shown
to its end: the calls are answered here, the model is asked again, and its next generation goes on where this one
stopped. The client sees one answer. A ``StreamMerger`` reads the events of each generation in turn and returns the
bytes that can go to the client by now. It sends nothing and waits for nothing; ``answer.MergedReply`` does that.

Text must not wait: a person reads it while it is written. A tool call must wait, because the rest of the generation
decides what becomes of it. If a server tool is called anywhere in the generation, the model has not read the results
yet, so no call of that generation reaches the client. So text passes at once, and everything from the first tool
call on is buffered until the generation ends. Thoughts are buffered too, in the APIs that have them as blocks or items:
a provider takes them back only beside what they led to, so they stand if text follows and go if only calls do that are
answered here (https://docs.anthropic.com/en/docs/build-with-claude/extended-thinking#preserving-thinking-blocks,
https://github.com/vercel/ai/issues/7099).

The states of one generation, and what brings it from one to the next:

    state      event                                   output                         next state
    ---------  --------------------------------------  -----------------------------  ----------
    passing    text, an opening, usage                 the event                      passing
    passing    a tool call begins                      nothing                        buffering
    passing    a thought begins (messages, responses)  nothing                        buffering
    buffering  more of it, another call                nothing                        buffering
    buffering  text after thoughts only                the buffer, then the event     passing
    buffering  the end, after thoughts only            the buffer, then the event     passing
    any        an error event                          the buffer, then the event     released
    any        a comment, a ping, an event without     the event, at once             the same
               data
    any        ``release()``: no generation follows    the buffer, without calls of   released
                                                       a server tool
    released   anything                                the event, without calls of    released
                                                       a server tool
    any        ``next_generation()``                   nothing; the buffer is void    passing

``ended`` is true once the generation's last event was read. The caller then looks at ``calls()`` and does one of two
things. It answers them, sends the next request and calls ``next_generation()``. Or it calls ``release()`` and feeds the
rest of the stream, because bytes behind the last event belong to the client.

How an event is written:

- In the first generation, as it came, byte for byte, unless a call of a server tool has to be taken out of it. An
  answer without such a call is therefore the provider's own answer to the last byte.
- In later ones it is rewritten, since a client expects one message or one response: it opens once, ids are the first
  generation's, indexes and sequence numbers run on, and texts of a chat answer are a blank line apart. What the
  subclasses note of each event that passes (``_passed``) is what the numbering goes on from.
- Once calls are taken out (``_without_server_calls``), the calls that are left are numbered anew, and the reason why
  the answer stopped is that of an answer without them.

What fails: ``failed`` is true after an error event. More than ``MOST_BUFFERED`` bytes in the buffer, or an event longer
than ``LONGEST_EVENT``, raise ``TooMuchBuffered``. After a fault of ours in the first generation, ``unsent()`` returns
every byte that was fed and not passed on, so that the stream can go on as it comes and the client misses nothing:
that is why an event is removed from ``_incoming`` only after it was read, and from the buffer only once it was written.

All of this costs time in proportion to the bytes of a stream: the text of a call is put together from its pieces only
when it is needed (``pieces.add_piece``), and which calls are left is worked out once, at the end of a generation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec

from proxy.core.apis.sse import EventCutter, data_of
from proxy.server_tools.events import value_of

MOST_BUFFERED: Final = 2**25
"""Bytes of one generation that are buffered at most; a call of a tool is never near that."""

LONGEST_EVENT: Final = 2**26
"""Bytes of one event at most; an event that is longer has no end."""

NOT_RUN: Final = (
    "[Not run, because of another call beside it whose result comes first. Call it again if it is still needed.]"
)
"""The result of a call of a client's tool beside one of a server tool. The client never sees the call."""

Names = frozenset[str]
"""Names of the server tools that a request offers."""


class Call(msgspec.Struct, frozen=True):
    """One call of a server tool: its id, the tool's name, and the arguments as the model wrote them."""

    id: str
    name: str
    arguments: str


class ServerToolApi(Protocol):
    """The part of answering that differs from API to API: a module with these names.

    The *output* of a generation is plain JSON: an assistant message (chat), its content blocks (messages), or output
    items (responses).
    """

    def new_stream(self, names: Names) -> StreamMerger:
        """Return the merger for the stream of a new answer."""

    def output_of(self, answer: Mapping[str, Any]) -> Any:
        """Return the output in a whole answer; None if it is no answer of this API."""

    def is_truncated(self, answer: Mapping[str, Any]) -> bool:
        """True if a whole answer was broken off, by its output figure or a filter: its last call may be half."""

    def calls(self, output: Any, names: Names) -> list[Call]:
        """Return the calls of a server tool in an output."""

    def input_of(self, output: Any, body: bytes) -> list[Any]:
        """Return the elements with which an output goes back to the model, in a request like the one of *body*."""

    def results(self, output: Any, names: Names, texts: Sequence[str]) -> list[Any]:
        """Return the elements that answer the calls in an output.

        Those of server tools get *texts*, others ``NOT_RUN``.
        """

    def merged(self, answer: Mapping[str, Any], earlier: Sequence[Any], names: Names) -> dict[str, Any]:
        """Return the last answer as the client gets it: after the *earlier* outputs, without calls of server tools."""


class TooMuchBuffered(Exception):
    """A generation's calls, or one event, are larger than what may be buffered."""


class StreamMerger(ABC):
    """One stream for the client, out of one or more generations. Feed it bytes as they arrive, in any chunking.

    ``ended``: the generation's last event was read. ``failed``: the stream held an error. ``truncated``: the generation
    was broken off. ``is_first``: it is the first one. ``usage`` is its reported usage. ``unread`` are bytes that are
    about to be fed; the caller sets them, so that they are not lost if decoding or reading them fails. ``calls_in`` is
    ``ServerToolApi.calls`` of the API.
    """

    calls_in: Callable[[Any, Names], list[Call]]

    def __init__(self, names: Names) -> None:
        self.names = names
        self.ended = False
        self.failed = False
        self.truncated = False
        self.is_first = True
        self.usage: dict[str, Any] = {}
        self.unread = b""
        self._events = EventCutter()
        self._incoming: deque[bytes] = deque()
        self._buffer: list[tuple[bytes, dict[str, Any] | None]] = []
        self._buffered_bytes = 0
        self._ready: list[bytes] = []
        self._released = False
        self._without_server_calls = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that can go to the client after *chunk*. Raises ``TooMuchBuffered``."""
        self._incoming = deque(self._events.feed(chunk))
        self.unread = b""
        if self._events.pending_size > LONGEST_EVENT:
            raise TooMuchBuffered
        while self._incoming:
            self._read(self._incoming[0])
            self._incoming.popleft()
        ready, self._ready = self._ready, []
        return b"".join(ready)

    def unsent(self) -> bytes:
        """Return the bytes of a first generation that were fed and not passed on, as they came."""
        buffered = (event for event, _ in self._buffer)
        return b"".join([*self._ready, *buffered, *self._incoming, self._events.pending, self.unread])

    def rest(self) -> bytes:
        """Return the bytes behind the last complete event."""
        return self._events.flush()

    def release(self) -> bytes:
        """Return the buffer, without calls of a server tool if there are any. From now on everything passes."""
        self._released = True
        self._without_server_calls = bool(self.calls())
        return b"".join(self._empty_buffer())

    def next_generation(self) -> None:
        """Go on with another generation; drop what is buffered of this one."""
        self._reset()
        self._events.flush()
        self._buffer, self._buffered_bytes = [], 0
        self.ended, self.truncated, self.is_first, self.usage = False, False, False, {}

    def calls(self) -> list[Call]:
        """Return the calls of a server tool in this generation so far."""
        return self.calls_in(self.output, self.names)

    @property
    @abstractmethod
    def output(self) -> Any:
        """The output of this generation so far, see ``ServerToolApi``."""

    @abstractmethod
    def _note(self, value: dict[str, Any]) -> None:
        """Add an event to the generation's output, and note its end, its usage and its errors."""

    @abstractmethod
    def _starts_buffering(self, value: dict[str, Any]) -> bool:
        """True if nothing from this event on may pass before it is known what follows."""

    @abstractmethod
    def _rewritten(self, value: dict[str, Any]) -> bytes:
        """Return the event as the client gets it; empty if the client does not get it."""

    @abstractmethod
    def _passed(self, value: dict[str, Any]) -> None:
        """Note an event that passes as it came."""

    @abstractmethod
    def _reset(self) -> None:
        """Forget this generation; keep what the next one is numbered from."""

    def _proves_buffer(self, value: dict[str, Any]) -> bool:
        """True if *value* proves that the buffered events can be released before the generation's end."""
        del value
        return False

    def _read(self, event: bytes) -> None:
        """Note one event, and pass on or buffer it."""
        data = data_of(event)
        value = None
        if data:
            value = value_of(data)
        if not data or (value is not None and value.get("type") == "ping"):
            self._ready.append(event)  # it keeps the connection alive, so it must not wait
            return
        if value is not None:
            self._note(value)
        elif data.strip() == b"[DONE]":
            self.ended = True
        self._pass_or_buffer(event, value)

    def _pass_or_buffer(self, event: bytes, value: dict[str, Any] | None) -> None:
        """Add an event to ``_ready`` or to the buffer; nothing leaves the buffer before it is in ``_ready``."""
        if self.failed and not self._released:
            self._ready.append(self.release())
        elif value is not None and self._buffer and self._proves_buffer(value):
            self._ready += self._empty_buffer()
        if not self._must_wait(value):
            self._ready += self._written(event, value)
            return
        self._buffer.append((event, value))
        self._buffered_bytes += len(event)
        if self._buffered_bytes > MOST_BUFFERED:
            raise TooMuchBuffered

    def _must_wait(self, value: dict[str, Any] | None) -> bool:
        if self._released:
            return False
        return bool(self._buffer) or (value is not None and self._starts_buffering(value))

    def _empty_buffer(self) -> list[bytes]:
        written = [part for event, value in self._buffer for part in self._written(event, value)]
        self._buffer, self._buffered_bytes = [], 0
        return written

    def _written(self, event: bytes, value: dict[str, Any] | None) -> list[bytes]:
        """Return the event as the client gets it; an empty list if the client does not get it."""
        if value is None:
            return [event]
        if self.is_first and not self._without_server_calls:
            self._passed(value)
            return [event]
        rewritten = self._rewritten(value)
        if not rewritten:
            return []
        return [rewritten]


Part = TypeVar("Part")


def with_texts(
    calls: Iterable[Part], is_server_call: Callable[[Part], bool], texts: Sequence[str]
) -> Iterator[tuple[Part, str]]:
    """Yield each of *calls* with its result: those of server tools with *texts* in order, others with ``NOT_RUN``."""
    remaining = iter(texts)
    for call in calls:
        text = NOT_RUN
        if is_server_call(call):
            text = next(remaining)
        yield call, text


def without_calls(
    parts: Sequence[Part],
    is_removed: Callable[[Part], bool],
    is_call: Callable[[Part], bool],
    is_thought: Callable[[Part], bool],
) -> list[Part]:
    """Return *parts* of an output without the calls that are removed and the thoughts that led only to those.

    A provider takes thoughts back only with what they led to, and not beside thoughts of another generation.
    """
    remaining: list[Part] = []
    for before, calls in _groups(parts, is_call, is_thought):
        remaining_calls = [call for call in calls if not is_removed(call)]
        if remaining_calls or not calls:
            remaining += [*before, *remaining_calls]
    return remaining


def _groups(
    parts: Sequence[Part], is_call: Callable[[Part], bool], is_thought: Callable[[Part], bool]
) -> list[tuple[list[Part], list[Part]]]:
    """Return *parts* as pairs of thoughts and the calls that they led to. Any other part is a pair without calls."""
    groups: list[tuple[list[Part], list[Part]]] = [([], [])]
    for part in parts:
        thoughts, calls = groups[-1]
        if is_call(part):
            calls.append(part)
        elif not is_thought(part):
            groups += [([part], []), ([], [])]
        elif calls:
            groups.append(([part], []))
        else:
            thoughts.append(part)
    return groups
