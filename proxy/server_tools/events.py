"""Reads and writes server-sent events as bytes.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.core.apis.json_edit import json_bytes
from proxy.core.apis.json_steps import decode
from proxy.core.errors import InvalidRequest


def value_of(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object in an event's data; None if there is none."""
    try:
        value = decode(data)
    except InvalidRequest:
        return None
    if isinstance(value, dict):
        return value
    return None


def without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of *value* that are not null: providers send some nulls that they do not accept back."""
    return {name: member for name, member in value.items() if member is not None}


def kind_of(value: Mapping[str, Any]) -> str:
    """Return the type that an event names; ``error`` for an error that names none, else an empty text."""
    kind = value.get("type")
    if isinstance(kind, str):
        return kind
    if value.get("error"):
        return "error"
    return ""


def written(value: Any, name: str = "") -> bytes:
    """Return an event that holds *value*, under *name* if that is not empty."""
    event = b"data: " + json_bytes(value) + b"\n\n"
    if name:
        return f"event: {name}\n".encode() + event
    return event
