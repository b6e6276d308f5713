"""The beginning of a stream: nothing yet, content, or an error in place of an answer. Pure and incremental."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from proxy.core.overflow.classify import Overflow, classify_error

Verdict = Literal["undecided", "content", "overflow"]

PREAMBLE_TYPES = frozenset({"response.created", "response.queued", "response.in_progress", "message_start", "ping"})
"""Events that come before any content, by their ``type``."""

_LONGEST = 262_144
_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


@dataclass(slots=True)
class Opening:
    """Watches the first events of a server-sent event stream until it is clear what the answer is.

    Feed it bytes as they arrive, in any chunking. Once it says ``content`` it stays so.
    """

    verdict: Verdict = "undecided"
    overflow: Overflow | None = None
    _buffer: bytes = b""

    def feed(self, chunk: bytes) -> Verdict:
        """What is known after *chunk*."""
        if self.verdict != "undecided":
            return self.verdict
        self._buffer += chunk
        while self.verdict == "undecided" and (end := _END.search(self._buffer)):
            event, self._buffer = self._buffer[: end.start()], self._buffer[end.end() :]
            self._look(event)
        if self.verdict == "undecided" and len(self._buffer) > _LONGEST + 3:  # three: most of an event's end
            self._look(self._buffer)
        return self.verdict

    def finish(self) -> Verdict:
        """What is known at the end of the stream, when the last event may lack its blank line."""
        if self.verdict == "undecided" and self._buffer.strip():
            event, self._buffer = self._buffer, b""
            self._look(event)
        return self.verdict

    def _look(self, event: bytes) -> None:
        if len(event) > _LONGEST:
            self.verdict = "content"
            return
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if not data:
            return
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            self.verdict = "content"
            return
        if _is_error(value):
            self.overflow = classify_error(value)
            self.verdict = "overflow" if self.overflow else "content"
        elif not _is_preamble(value):
            self.verdict = "content"


def _is_error(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    response = value.get("response")
    failed = isinstance(response, dict) and bool(response.get("error"))
    return bool(value.get("error")) or value.get("type") == "error" or value.get("object") == "error" or failed


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
