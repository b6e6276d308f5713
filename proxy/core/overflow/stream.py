"""What an answer turns out to be while its bytes pass: at its beginning, and behind its first content. Incremental."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.coding import Plain
from proxy.core.overflow.envelope import is_error
from proxy.core.overflow.kinds import Overflow

Verdict = Literal["undecided", "content", "overflow"]
Headers = Iterable[tuple[str, str]]

PREAMBLE_TYPES = frozenset(
    {"response.created", "response.queued", "response.in_progress", "message_start", "ping", "keepalive"}
)
"""Events that come before any content, by their ``type``."""

LONGEST = 262_144
"""Bytes of one event, and of an answer that is no stream, that are held to be looked at."""

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINES: Final = (b"data", b"event", b"id:", b"retry", b":")
_ANSWERS: Final = re.compile(rb'"(?:choices|content|output|candidates|completion|data)"\s*:')
_KEY: Final = 64
"""Bytes that a key and its colon may take, so that one cut in two by chunks is still found."""
_REASON = re.compile(rb'"(?:native_)?(?:stop_reason|finish_reason|reason)"\s*:\s*"([A-Za-z_]{4,64})"')
_ENDING_EVENT: Final = 65_536
_WATCHED: Final = 2**26
_TAIL: Final = 128


class Opening:
    """Watches the beginning of an answer with status 200 until it is clear what it is, streamed or not.

    Feed it bytes as they arrive, in any chunking. Once it says ``content`` it stays so.
    """

    def __init__(self, classifier: Classifier, headers: Headers = (), counted: int | None = None) -> None:
        """*counted* is our own count of the input in tokens."""
        self.verdict: Verdict = "undecided"
        self.overflow: Overflow | None = None
        self._classifier = classifier
        self._counted = counted
        self._events = _header(headers, "content-type").startswith("text/event-stream")
        self._plain = Plain(_header(headers, "content-encoding"), 2 * LONGEST)
        self._buffer = b""
        self._streamed: bool | None = None
        self._is_unclear = False  # an object that speaks of an error before its content: only its end tells

    def feed(self, chunk: bytes) -> Verdict:
        """What is known after *chunk*."""
        if self.verdict != "undecided":
            return self.verdict
        before = len(self._buffer) if self._streamed is not None else 0
        self._buffer += self._plain.feed(chunk)
        if self._streamed is None:
            self._streamed = self._recognised()
        if self._streamed is False:
            if len(self._buffer) > LONGEST or self._shows_answer(before):
                self.verdict = "content"
            return self.verdict
        # Only what is new can complete an event, but its end may have begun before.
        near = max(0, before - 3)
        while self.verdict == "undecided" and self._streamed and (end := _END.search(self._buffer, near)):
            event, self._buffer, near = self._buffer[: end.start()], self._buffer[end.end() :], 0
            self._look(event)
        if self.verdict == "undecided" and len(self._buffer) > LONGEST + 3:  # three: most of an event's end
            self._look(self._buffer)
        return self.verdict

    def finish(self) -> Verdict:
        """What is known at the end of the answer, when the last event may lack its blank line."""
        if self.verdict == "undecided" and self._buffer.strip():
            event, self._buffer = self._buffer, b""
            if self._streamed is False:
                self._judge(self._classifier.answer(200, (), event, self._counted))
            else:
                self._look(event)
        return self.verdict

    def _shows_answer(self, before: int) -> bool:
        """Return True if the JSON object shows its content and nothing of an error; *before* bytes were looked at."""
        if self._is_unclear:
            return False
        answer = _ANSWERS.search(self._buffer, max(0, before - _KEY))
        if answer is None:
            return False
        begun = self._buffer[: answer.start()]
        self._is_unclear = b'"error"' in begun or b'"errors"' in begun
        return not self._is_unclear

    def _recognised(self) -> bool | None:
        """Whether this is a stream of events; ``None`` while too little came to tell."""
        begun = self._buffer.lstrip(b"\xef\xbb\xbf \t\r\n")[:5]
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
            self._judge(self._classifier.event(value, self._counted) if is_error(value) else None)

    def _judge(self, found: Overflow | None) -> None:
        self.overflow = found if found is not None and found.too_long else None
        self.verdict = "overflow" if self.overflow else "content"


class Ending:
    """Watches what passes behind the first content: errors in the midst of a stream, and why generation stopped.

    ``overflow`` holds what was found. Nothing it finds can be retried: the client has part of the answer.
    """

    def __init__(self, classifier: Classifier, headers: Headers = ()) -> None:
        self.overflow: Overflow | None = None
        self._classifier = classifier
        encoding = _header(headers, "content-encoding")
        self._plain = Plain(encoding, _WATCHED) if encoding else None
        self._event = b""
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """Look at *chunk*; never raises."""
        if self.overflow is not None:
            return
        data = chunk if self._plain is None else self._plain.feed(chunk)
        if not data:
            return
        held = self._event + data
        end = max(held.rfind(b"\n\n"), held.rfind(b"\r\n\r\n"), held.rfind(b"\r\r"))
        if b'"error"' in held or b"event: error" in held:
            self._errors(held)
        if self.overflow is None and b"exceeded" in (self._tail + data):
            self._stops(self._tail + data)
        self._tail = data[-_TAIL:] if len(data) >= _TAIL else (self._tail + data)[-_TAIL:]
        rest = held[end:] if end >= 0 else held
        self._event = rest if len(rest) <= _ENDING_EVENT else b""

    def _errors(self, held: bytes) -> None:
        for event in _END.split(held)[:-1]:
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
    """The data of an event, and the object in it; an error in plain text becomes one. ``None``: no object."""
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
    """Whether an event carries no content yet: a start-up event, or a delta with nothing but a role."""
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
