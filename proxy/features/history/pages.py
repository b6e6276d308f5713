"""Archived originals as callers read them, a page at a time: lists of items, and the texts of items."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from typing import Final

import msgspec

from proxy.core.errors import InvalidRequest

DEFAULT_ITEMS: Final = 3
MAX_ITEMS: Final = 10
"""Items on a page of a list."""

DEFAULT_CHARACTERS: Final = 20_000
MAX_CHARACTERS: Final = 100_000
"""Characters on a page of an item."""

PREVIEW_CHARACTERS: Final = 2_000
"""Characters of each item in a list."""

LIST: Final = b"L"
ITEM: Final = b"I"
"""The first byte of an archived value, which states its kind."""

MAX_ENTRIES: Final = 20_000
"""Entries of a list: as many as a request may have items by default (``server.limits.items``)."""

VERSION: Final = 1

_NAME_BYTES: Final = 16
_REFERENCE_CHARACTERS: Final = 43
"""Bytes of a root hash and of a name, and the characters of both together in base64."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One item that left a view: its index in the client's list, its role, its name and its size in bytes.

    The name is empty if the item was too big for the archive.
    """

    index: int
    role: str
    name: bytes
    size: int


class _StoredList(msgspec.Struct, frozen=True, array_like=True):
    version: int
    entries: tuple[Entry, ...]


class Page(msgspec.Struct, frozen=True):
    """The part that a caller requests; if ``limit`` is None its length is the default."""

    offset: int = 0
    limit: int | None = None

    def span(self, total: int, default: int, maximum: int) -> tuple[int, int]:
        """Return where this page starts and ends in *total*. It has *default* elements, at most *maximum*."""
        limit = min(self.limit or default, maximum)
        return min(self.offset, total), min(self.offset + limit, total)


def read_page(offset: str | None, limit: str | None) -> Page:
    """Return the page that the parameters of a request name. Raises ``InvalidRequest``."""
    start = _number("offset", offset or "0", 0)
    if limit is None:
        return Page(start)
    return Page(start, _number("limit", limit, 1))


def reference(root_hash: bytes, name: bytes) -> str:
    """Return the reference under which callers read the original *name* of a conversation."""
    return urlsafe_b64encode(root_hash + name).rstrip(b"=").decode("ascii")


def parse_reference(text: str) -> tuple[bytes, bytes] | None:
    """Return the root hash and the name in a reference; None if *text* is not one in its only valid spelling."""
    if len(text) != _REFERENCE_CHARACTERS:
        return None
    try:
        value = urlsafe_b64decode(text + "=")
    except ValueError:
        return None
    root_hash, name = value[:_NAME_BYTES], value[_NAME_BYTES:]
    # 43 characters have two bits more than 32 bytes, which decoders ignore: four spellings decode to the same bytes.
    if len(name) != _NAME_BYTES or reference(root_hash, name) != text:
        return None
    return root_hash, name


def encode_list(entries: Sequence[Entry]) -> bytes:
    """Return the archived value of a list; entries beyond ``MAX_ENTRIES`` are left out."""
    return LIST + msgspec.msgpack.encode(_StoredList(VERSION, tuple(entries[:MAX_ENTRIES])))


def decode_list(value: bytes) -> tuple[Entry, ...] | None:
    """Return the entries of an archived list; None if *value* is none of this version."""
    if value[:1] != LIST:
        return None
    try:
        stored = msgspec.msgpack.decode(value[1:], type=_StoredList)
    except (msgspec.DecodeError, UnicodeError):
        return None
    if stored.version != VERSION:
        return None
    return stored.entries


def item_page(ref: str, value: bytes, page: Page) -> dict[str, object]:
    """Return one page of an archived item: the client's own JSON, as text."""
    text = _text_of(value)
    start, stop = page.span(len(text), DEFAULT_CHARACTERS, MAX_CHARACTERS)
    return {
        "ref": ref,
        "kind": "item",
        "total": len(text),
        "offset": start,
        "content": text[start:stop],
        "next_offset": _next_offset(stop, len(text)),
    }


def entries_on(page: Page, entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return those of a list's *entries* that stand on *page*."""
    return entries[slice(*page.span(len(entries), DEFAULT_ITEMS, MAX_ITEMS))]


def list_page(
    ref: str, root_hash: bytes, entries: Sequence[Entry], values: Sequence[bytes | None], page: Page
) -> dict[str, object]:
    """Return one page of an archived list, with the beginning of each item.

    *values* are the archived values of ``entries_on(page, entries)``; None for each that is missing.
    """
    start, stop = page.span(len(entries), DEFAULT_ITEMS, MAX_ITEMS)
    listed = zip(entries_on(page, entries), values, strict=True)
    return {
        "ref": ref,
        "kind": "list",
        "total": len(entries),
        "offset": start,
        "items": [_listed_item(root_hash, entry, value) for entry, value in listed],
        "next_offset": _next_offset(stop, len(entries)),
    }


def _listed_item(root_hash: bytes, entry: Entry, value: bytes | None) -> dict[str, object]:
    item: dict[str, object] = {"index": entry.index, "role": entry.role, "bytes": entry.size}
    if not entry.name:
        return {**item, "ref": None, "state": "too_big", "content": None, "more": False}
    item["ref"] = reference(root_hash, entry.name)
    if value is None:
        return {**item, "state": "missing", "content": None, "more": False}
    text = _text_of(value)
    more = len(text) > PREVIEW_CHARACTERS
    return {**item, "state": "kept", "content": text[:PREVIEW_CHARACTERS], "more": more}


def _text_of(value: bytes) -> str:
    return value[1:].decode("utf-8", "replace")


def _next_offset(stop: int, total: int) -> int | None:
    if stop < total:
        return stop
    return None


def _number(name: str, value: str, least: int) -> int:
    # ``int`` raises for 4,300 digits: https://docs.python.org/3/library/stdtypes.html#int-max-str-digits
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value) >= least):
        raise InvalidRequest(f"The parameter {name} must be a whole number, {least} or more.")
    return int(value)
