"""Finds overflows in an answer while its bytes pass: at its beginning, and behind its first content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, Literal

from proxy.core.apis.sse import EventCutter
from proxy.core.content_encoding import ContentDecoder
from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.error_body import is_error
from proxy.core.overflow.evidence import NOTHING_KNOWN, Prior
from proxy.core.overflow.kinds import Overflow

Verdict = Literal["undecided", "content", "overflow"]
Headers = Iterable[tuple[str, str]]

PREAMBLE_TYPES = frozenset(
    {"response.created", "response.queued", "response.in_progress", "message_start", "ping", "keepalive"}
)
"""Events that come before any content, by their ``type``."""

LONGEST = 262_144
"""The most bytes of one event, and of an answer that is no stream, that are kept to be read."""

_LINES: Final = (b"data", b"event", b"id:", b"retry", b":")
_ANSWERS: Final = re.compile(rb'"(?:choices|content|output|candidates|completion|data)"\s{0,32}:')
_LONGEST_ANSWERS: Final = 64
"""More bytes than such a name, its blanks and its colon have."""

_REASON = re.compile(rb'"(?:native_)?(?:stop_reason|finish_reason|reason)"\s*:\s*"([A-Za-z_]{4,64})"')
_ENDING_EVENT: Final = 65_536
_WATCHED: Final = 2**25
_TAIL: Final = 128
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
"""What may stand before an answer, a byte order mark included."""


class EarlyOverflowDetector:
    """Watches the beginning of an answer with status 200 until it is clear what it is, streamed or not.

    Feed it bytes as they arrive, in any chunking. Once it says ``content`` it stays so.
    """

    def __init__(self, classifier: Classifier, headers: Headers = (), prior: Prior = NOTHING_KNOWN) -> None:
        """*prior* is what is known of the request."""
        self.verdict: Verdict = "undecided"
        self.overflow: Overflow | None = None
        self._classifier = classifier
        self._prior = prior
        self._events = _header(headers, "content-type").startswith("text/event-stream")
        self._plain = ContentDecoder(_header(headers, "content-encoding"), 2 * LONGEST)
        self._buffer = bytearray()
        self._streamed: bool | None = None
        self._cutter = EventCutter()
        self._looked = 0
        self._claim: Callable[[Prior], Overflow | None] | None = None

    def feed(self, chunk: bytes) -> Verdict:
        """The verdict after *chunk*."""
        if self.verdict != "undecided":
            return self.verdict
        data = self._plain.feed(chunk)
        if self._streamed is None:
            self._buffer += data
            self._streamed = self._recognised()
            data = bytes(self._buffer)
        elif not self._streamed:
            self._buffer += data
        if self._streamed:
            self._feed_events(data)
        elif self._streamed is False and (len(self._buffer) > LONGEST or self._is_answer()):
            self.verdict = "content"
        return self.verdict

    def finish(self) -> Verdict:
        """The verdict at the end of the answer, whose last event may lack its blank line."""
        if self.verdict != "undecided":
            return self.verdict
        rest = self._cutter.flush() if self._streamed else bytes(self._buffer)
        if not rest.strip():
            return self.verdict
        if self._streamed is False:
            self._judge(partial(self._classifier.answer, 200, (), rest))
        else:
            self._look(rest)
        return self.verdict

    def overflow_for(self, prior: Prior) -> Overflow | None:
        """Return the overflow that was found if it can be true of the request that *prior* describes."""
        found = self._claim(prior) if self._claim and self.overflow else None
        return found if found is not None and found.too_long else None

    def _feed_events(self, data: bytes) -> None:
        for event in self._cutter.feed(data):
            self._look(event.rstrip(b"\r\n"))
            if self.verdict != "undecided":
                return
        if self._cutter.pending_size > LONGEST + 3:  # three: most of an event's end
            self.verdict = "content"

    def _is_answer(self) -> bool:
        """True if an answer that is no stream shows content before any error. Looks at new bytes only."""
        if self._looked < 0:
            return False
        answer = _ANSWERS.search(self._buffer, self._looked)
        self._looked = max(0, len(self._buffer) - _LONGEST_ANSWERS)
        if answer is None:
            return False
        before = bytes(self._buffer[: answer.start()])
        if b'"error"' in before or b'"errors"' in before:
            self._looked = -1  # an error came first: only all of it tells what it is
            return False
        return True

    def _recognised(self) -> bool | None:
        """True if this is a stream of events, False if not; None while too few bytes came to know."""
        # Blanks that keep a connection alive are dropped as they come: no walk over all of them for each of them.
        self._buffer = self._buffer.lstrip(_BLANK)
        begun = bytes(self._buffer[:5])
        if not begun:
            return None
        if begun[:1] in (b"{", b"["):
            return False
        if self._events or begun.startswith(_LINES):
            return True
        if len(begun) == 5:
            self.verdict = "content"  # neither events nor JSON
        return None

    def _look(self, event: bytes) -> None:
        if len(event) > LONGEST:
            self.verdict = "content"
            return
        data, value = _event(event)
        if not data:
            return
        if value is None or is_error(value) or not _is_preamble(value):
            self._judge(partial(self._classifier.event, value) if is_error(value) else None)

    def _judge(self, claim: Callable[[Prior], Overflow | None] | None) -> None:
        self._claim = claim
        found = claim(self._prior) if claim else None
        self.overflow = found if found is not None and found.too_long else None
        self.verdict = "overflow" if self.overflow else "content"


class LateOverflowDetector:
    """Watches what passes behind the first content: errors in the midst of a stream, and why generation stopped.

    ``overflow`` holds what was found. Nothing it finds can be retried: the client has part of the answer.
    """

    def __init__(self, classifier: Classifier, headers: Headers = ()) -> None:
        self.overflow: Overflow | None = None
        self._classifier = classifier
        encoding = _header(headers, "content-encoding")
        self._plain = ContentDecoder(encoding, _WATCHED) if encoding else None
        self._event = bytearray()
        self._suspect = False
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """Look at *chunk*; never raises."""
        if self.overflow is not None:
            return
        data = chunk if self._plain is None else self._plain.feed(chunk)
        if not data:
            return
        near = self._tail + data
        self._suspect = self._suspect or b'"error"' in near or b"event: error" in near
        self._cut(data)
        if self.overflow is None and b"exceeded" in near:
            self._stops(near)
        self._tail = near[-_TAIL:]

    def _cut(self, data: bytes) -> None:
        """Look for errors in the events that *data* completes, and keep what it begins."""
        edge = self._event[-3:] + data
        end = max(edge.rfind(b"\n\n"), edge.rfind(b"\r\n\r\n"), edge.rfind(b"\r\r"))
        self._event += data
        if end >= 0:
            at = len(self._event) - len(edge) + end
            if self._suspect:
                self._errors(bytes(self._event))
            del self._event[:at]
            self._suspect = b'"error"' in self._event or b"event: error" in self._event
        if len(self._event) > _ENDING_EVENT:
            self._event.clear()
            self._suspect = False

    def _errors(self, held: bytes) -> None:
        for event in EventCutter().feed(held):
            _, value = _event(event)
            if value is not None and is_error(value) and (found := self._classifier.event(value)):
                self.overflow = found
                return

    def _stops(self, data: bytes) -> None:
        for reason in _REASON.finditer(data):
            if found := self._classifier.stop({"stop_reason": reason[1].decode()}):
                self.overflow = found
                return


def _header(headers: Headers, wanted: str) -> str:
    return next((value for name, value in headers if name.lower() == wanted), "")


def _fields(event: bytes) -> Iterator[tuple[bytes, bytes]]:
    for line in event.splitlines():
        name, colon, value = line.partition(b":")
        if colon:
            yield name, value.strip()


def _event(event: bytes) -> tuple[bytes, Any]:
    """The data of an event, and the object in it or None. An error in plain text becomes an object."""
    named = list(_fields(event))
    data = b"\n".join(value for name, value in named if name == b"data")
    failed = any(name == b"event" and value == b"error" for name, value in named)
    try:
        value = json.loads(data) if data else None
    except (ValueError, RecursionError):
        value = data.decode("utf-8", "replace")
    if failed and data and not is_error(value):
        return data, {"error": value}
    return data, value if isinstance(value, dict | list) else None


def _is_preamble(value: Any) -> bool:
    """True if an event carries no content yet: a start-up event, or a delta with nothing but a role."""
    if not isinstance(value, dict):
        return False
    if value.get("type") in PREAMBLE_TYPES:
        return True
    choices = value.get("choices")
    if not isinstance(choices, list) or value.get("usage"):
        return False
    deltas = [choice.get("delta") for choice in choices if isinstance(choice, dict)]
    ended = any(choice.get("finish_reason") for choice in choices if isinstance(choice, dict))
    return not ended and all(isinstance(delta, dict) and not _says(delta) for delta in deltas)


def _says(delta: dict[str, Any]) -> bool:
    return any(value for key, value in delta.items() if key != "role")
