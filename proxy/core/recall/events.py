"""Server-sent events as bytes: cut apart however they arrive, read, and written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class Events:
    """Cuts a stream into its events, each with the blank line that ends it."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that *chunk* completes."""
        data = self._rest + chunk
        # Only what is new can complete an event, but its end may have begun before.
        found, at, near = [], 0, max(0, len(self._rest) - 3)
        for end in _END.finditer(data, near):
            found.append(data[at : end.end()])
            at = end.end()
        self._rest = data[at:]
        return found

    @property
    def begun(self) -> int:
        """Bytes that came of an event that has not ended."""
        return len(self._rest)

    def rest(self) -> bytes:
        """What came of an event that never ended."""
        rest, self._rest = self._rest, b""
        return rest


def data_of(event: bytes) -> bytes:
    """The data of an event; empty where it has none, as a comment has."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def value_of(data: bytes) -> dict[str, Any] | None:
    """The JSON object in an event's data; ``None`` where there is none."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def kind_of(value: Mapping[str, Any]) -> str:
    """The type that an event names; that of an error also where it names none."""
    kind = value.get("type")
    return kind if isinstance(kind, str) else "error" if value.get("error") else ""


def written(value: Any, name: str = "") -> bytes:
    """An event that holds *value*, under *name* if there is one."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dumped(value) + b"\n\n"


def dumped(value: Any) -> bytes:
    """*value* as JSON that is valid UTF-8, whatever its texts hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:  # lone surrogates
        return json.dumps(value, separators=(",", ":")).encode()
