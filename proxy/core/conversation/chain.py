"""The chain: the keyed rolling hash of a conversation's items, so that a prefix has a name only its tenant can form."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.core.conversation.items import Item

LINK = 16
"""Bytes of a link: 128 bits of HMAC-SHA256."""

IGNORED = frozenset({"cache_control", "annotations", "provider_specific_fields"})
"""Members clients add, move or drop when they echo an item; an item means the same with and without them."""


def digest(item: dict[str, Any]) -> bytes:
    """16 bytes equal for items that mean the same: key order, spacing, nulls and re-serialised arguments aside."""
    plain = _canonical(item)
    if isinstance(plain.get("content"), str):
        plain["content"] = [{"text": plain["content"], "type": "text"}]
    try:
        text = msgspec.json.encode(plain, order="deterministic")
    except UnicodeError:  # lone surrogates
        text = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(text).digest()[:LINK]


def chain(key: bytes, label: str, items: Sequence[Item], known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
    """The links after each item; ``links[i]`` names ``items[:i + 1]``. System items do not change the link.

    *known* are links of a prefix computed before. *label* (``x-ullage-conversation``) separates equal openings.
    """
    links = list(known)
    link = links[-1] if links else hmac.digest(key, b"ullage1\0" + label.encode(), "sha256")[:LINK]
    for item in items[len(links) :]:
        if item.role != "system":
            link = hmac.digest(key, link + item.digest, "sha256")[:LINK]
        links.append(link)
    return tuple(links)


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: _member(k, v) for k, v in value.items() if k not in IGNORED}
        return {k: v for k, v in kept.items() if not _is_empty(v)}
    if isinstance(value, list):
        return [_canonical(part) for part in value]
    return value


def _member(key: str, value: Any) -> Any:
    if key == "arguments" and isinstance(value, str):
        try:
            return ["json", json.loads(value)]
        except (ValueError, RecursionError):
            return value
    return _canonical(value)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)
