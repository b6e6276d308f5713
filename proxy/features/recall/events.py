"""Server-sent events as bytes: read, and written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec


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
    if isinstance(kind, str):
        return kind
    return "error" if value.get("error") else ""


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
