"""Archived originals as people read them, a page at a time: lists of items, and the texts of items."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from proxy.core.errors import InvalidRequest

ITEMS, MOST_ITEMS = 3, 10
"""Items on a page of a list: without a wish, and at most."""

TEXT, MOST_TEXT = 20_000, 100_000
"""Characters of an item on a page: without a wish, and at most."""

OPENING = 2_000
"""Characters of each item in a list."""

LIST, ITEM = b"L", b"I"
"""The first byte of an original tells what it is."""

MOST_ENTRIES = 20_000
VERSION = 1


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One item that left a view: its place in the client's list, its role, its name (empty: too big), its bytes."""

    index: int
    role: str
    name: bytes
    size: int


class Listing(msgspec.Struct, frozen=True, array_like=True):
    """What left a view at one compaction."""

    version: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """Which part is wanted: from where, and how much; ``None``: as much as is usual."""

    offset: int = 0
    limit: int | None = None

    def span(self, total: int, usual: int, most: int) -> tuple[int, int, int | None]:
        """From where to where in *total*, and where the next page begins, if there is one."""
        limit = min(self.limit or usual, most)
        start, stop = min(self.offset, total), min(self.offset + limit, total)
        return start, stop, stop if stop < total else None


def read_page(offset: str | None, limit: str | None) -> Page:
    """The page that a caller asks for. Raises ``InvalidRequest``."""
    return Page(_number("offset", offset or "0", 0), None if limit is None else _number("limit", limit, 1))


def reference(root: bytes, name: bytes) -> str:
    """How an original of conversation *root* is asked for."""
    return urlsafe_b64encode(root + name).rstrip(b"=").decode("ascii")


def read_reference(ref: str) -> tuple[bytes, bytes] | None:
    """The root and the name in *ref*; ``None`` where it is no reference."""
    try:
        found = urlsafe_b64decode(ref + "=") if len(ref) == 43 else b""
    except ValueError:
        return None
    return (found[:16], found[16:]) if len(found) == 32 and reference(found[:16], found[16:]) == ref else None


def dump(entries: Sequence[Entry]) -> bytes:
    """The bytes of a list."""
    return LIST + msgspec.msgpack.encode(Listing(VERSION, tuple(entries[:MOST_ENTRIES])))


def load(value: bytes) -> tuple[Entry, ...] | None:
    """The entries of the list in *value*; ``None`` where it is none of this version."""
    try:
        found = msgspec.msgpack.decode(value[1:], type=Listing) if value[:1] == LIST else None
    except (msgspec.DecodeError, UnicodeError):
        return None
    return found.entries if found is not None and found.version == VERSION else None


def show_item(ref: str, value: bytes, page: Page) -> dict[str, object]:
    """One page of an item: the client's own JSON, as text."""
    text = value[1:].decode("utf-8", "replace")
    start, stop, following = page.span(len(text), TEXT, MOST_TEXT)
    return {
        "ref": ref,
        "kind": "item",
        "total": len(text),
        "offset": start,
        "content": text[start:stop],
        "next_offset": following,
    }


def show_list(
    ref: str, root: bytes, entries: Sequence[Entry], values: Sequence[bytes | None], page: Page
) -> dict[str, object]:
    """One page of a list, each item with how it begins; *values* are the originals on it, where they are there."""
    start, stop, following = page.span(len(entries), ITEMS, MOST_ITEMS)
    items = []
    for entry, value in zip(entries[start:stop], values, strict=True):
        text = None if value is None else value[1:].decode("utf-8", "replace")
        items.append(
            {
                "index": entry.index,
                "role": entry.role,
                "bytes": entry.size,
                "ref": reference(root, entry.name) if entry.name else None,
                "state": _state(entry, there=text is not None),
                "content": None if text is None else text[:OPENING],
                "more": len(text or "") > OPENING,
            }
        )
    return {
        "ref": ref,
        "kind": "list",
        "total": len(entries),
        "offset": start,
        "items": items,
        "next_offset": following,
    }


def _state(entry: Entry, *, there: bool) -> str:
    if there:
        return "kept"
    return "missing" if entry.name else "too_big"


def _number(name: str, value: str, least: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value) >= least):
        raise InvalidRequest(f"The parameter {name} must be a whole number, {least} or more.")
    return int(value)
