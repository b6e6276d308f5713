"""Digests of items: equal for items that mean the same, however a client serialises them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from proxy.core.apis.json_steps import dismantle, encode_in_steps
from proxy.core.conversation import HASH_BYTES

DEEPEST = 250
"""Levels that an item may nest; a deeper one is refused before it reaches the interpreter's own limit."""

LONGEST_ARGUMENTS = 262_144
"""Characters of a call's arguments that are read as JSON; longer ones are equal only if their spelling is."""

IGNORED = frozenset({"cache_control", "annotations", "provider_specific_fields"})
"""Members that clients add, move or drop when they send an item again; its meaning does not depend on them."""

_CONTAINERS = frozenset({dict, list})
_FIGURES = frozenset({int, float, bool})

_SORTED = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def digest(item: dict[str, Any], *, large: bool = False) -> bytes:
    """Return 16 bytes that are equal for items of equal meaning.

    Key order, spacing, nulls and the spelling of arguments do not change them. A *large* item is encoded in steps.
    """
    plain = _canonical(item)
    if isinstance(plain.get("content"), str):
        plain["content"] = [{"text": plain["content"], "type": "text"}]
    try:
        if large:
            text = encode_in_steps(plain, _encode, ordered=True).encode()
        else:
            text = msgspec.json.encode(plain, order="deterministic")
    except UnicodeError:  # lone surrogates
        text = encode_in_steps(plain, _SORTED.encode, ordered=True).encode()
    if large:
        dismantle(plain)
    return hashlib.sha256(text).digest()[:HASH_BYTES]


def _encode(value: Any) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def _canonical(value: Any, depth: int = 0) -> Any:
    """Return *value* without ignored and empty members; zero and ``false`` are not empty."""
    if depth > DEEPEST:
        raise RecursionError
    # Called for every object of a body: hence plain loops, and exact types, because parsed JSON has no others.
    if type(value) is list:
        return [_canonical(part, depth + 1) for part in value]
    if type(value) is not dict:
        return value
    canonical = {}
    for key, member in value.items():
        if key in IGNORED:
            continue
        if type(member) in _CONTAINERS:
            member = _canonical(member, depth + 1)
        elif key == "arguments":
            member = _arguments(member)
        if member or type(member) in _FIGURES:
            canonical[key] = member
    return canonical


def _arguments(text: Any) -> Any:
    """Return the value of a call's arguments, so that their spelling does not matter; *text* itself if it is no JSON.

    Some clients send ``arguments`` as an object, or as ``null``: these are returned as they are.
    """
    if type(text) is not str or len(text) > LONGEST_ARGUMENTS:
        return text
    try:
        return ["json", json.loads(text)]
    except (ValueError, RecursionError):
        return text
