"""Compaction items of our own: a text that a client carries from call to call without reading it.

An item holds all there is to it, compressed and with a code that tells it for ours, so that any replica can open it
after any restart, whoever asks. What has the wrong code was written by somebody else and says no more than a user can.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import zlib
from dataclasses import dataclass

from proxy.core.apis import responses
from proxy.core.apis.json_scan import MOST_ITEMS, scan
from proxy.core.apis.json_steps import decode
from proxy.core.compaction.block import FOOTER, HEADER
from proxy.core.errors import InvalidRequest

PREFIX = "ullage-1."
"""What tells an item of ours from those that only a provider can read."""

MOST_BYTES = 4 * 2**20
"""Bytes that the items of one request may unfold to together: anybody can write some that unfold a thousandfold."""

_CODE = 16


@dataclass(frozen=True, slots=True)
class OpenedBody:
    """A body that holds no item of ours any more; ``ours`` are the indexes where one stood that is truly ours."""

    body: bytes
    ours: tuple[int, ...] = ()


def pack(text: str, key: bytes) -> str:
    """What a client carries for *text*, a block; only who holds *key* (32 bytes) can make one that counts as ours."""
    inner = text.removeprefix(HEADER + "\n\n").removesuffix("\n\n" + FOOTER)
    packed = zlib.compress(inner.encode(), 9)
    return PREFIX + base64.urlsafe_b64encode(_code(packed, key) + packed).decode()


def unpack(value: str, key: bytes, most: int = MOST_BYTES) -> tuple[str, bool] | None:
    """The text in *value* and whether it is truly ours: then as a block; ``None`` where nothing can be read.

    A text of more than *most* bytes is not read.
    """
    if not value.startswith(PREFIX):
        return None
    try:
        raw = base64.b64decode(value[len(PREFIX) :], altchars=b"-_", validate=True)
        inflate = zlib.decompressobj()
        inner = inflate.decompress(raw[_CODE:], most + 1)
        text = inner.decode()
    except (binascii.Error, ValueError, zlib.error):
        return None
    if len(inner) > most or not inflate.eof or not text.strip():
        return None
    ours = hmac.compare_digest(raw[:_CODE], _code(raw[_CODE:], key))
    return (f"{HEADER}\n\n{text}\n\n{FOOTER}" if ours else text), ours


def open_items(body: bytes, key: bytes, items: int = MOST_ITEMS) -> OpenedBody:
    """*body* of a Responses request with every item of ours as a user message; items of other makers stay.

    A body of more than so many *items* is left alone: whoever reads it next refuses it.
    """
    if PREFIX.encode() not in body:
        return OpenedBody(body)
    try:
        spans = scan(body, responses.LIST, items).spans
    except InvalidRequest:
        return OpenedBody(body)
    pieces: list[bytes] = []
    ours: list[int] = []
    done, left = 0, MOST_BYTES
    for index, (start, end) in enumerate(spans):
        found = _read(body[start:end], key, left) if body.find(PREFIX.encode(), start, end) >= 0 else None
        if found is not None:
            pieces += [body[done:start], responses.user_message(found[0])]
            ours += [index] if found[1] else []
            done, left = end, max(0, left - len(found[0].encode()))
    return OpenedBody(b"".join([*pieces, body[done:]]), tuple(ours))


def _read(raw: bytes, key: bytes, most: int) -> tuple[str, bool] | None:
    try:
        value = decode(raw)
    except InvalidRequest:
        return None
    if not isinstance(value, dict) or value.get("type") not in responses.KEPT:
        return None
    held = value.get("encrypted_content")
    return unpack(held, key, most) if isinstance(held, str) else None


def _code(packed: bytes, key: bytes) -> bytes:
    return hmac.digest(key, b"ullage item\0" + packed, hashlib.sha256)[:_CODE]
