"""Compaction items of our own: a text that a client sends with every request and does not read.

An item contains its whole text, compressed, and a message authentication code (HMAC) of it. So any replica can open it
after any restart, for any caller, and nothing is stored. An item with a wrong code comes from somebody else: it counts
as a user's message, which has less authority than a block.

https://developers.openai.com/api/docs/guides/compaction describes the items of providers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import zlib

import msgspec

from proxy.core.apis import responses
from proxy.core.apis.json_scan import MOST_ITEMS, scan
from proxy.core.apis.json_steps import decode
from proxy.core.compaction.block import FOOTER, HEADER
from proxy.core.errors import InvalidRequest

PREFIX = "ullage-1."
"""The prefix of our items' content. Items without it are a provider's, which alone can read them."""

MOST_BYTES = 4 * 2**20
"""Most bytes that the items of one request may inflate to together: deflate can inflate a thousandfold.

https://zlib.net/zlib_tech.html
"""

_CODE = 16
"""Bytes of the code: half of the hash, the least that RFC 2104 recommends.

https://www.rfc-editor.org/rfc/rfc2104#section-5
"""


class OpenedBody(msgspec.Struct, frozen=True):
    """A body without items of ours; ``ours`` are the indexes of those whose code was right."""

    body: bytes
    ours: tuple[int, ...] = ()


def pack(text: str, key: bytes) -> str:
    """Return the content of an item that holds *text*, a block. Its code needs *key* (32 bytes)."""
    inner = text.removeprefix(HEADER + "\n\n").removesuffix("\n\n" + FOOTER)
    packed = zlib.compress(inner.encode(), 9)
    return PREFIX + base64.urlsafe_b64encode(_code(packed, key) + packed).decode()


def unpack(value: str, key: bytes, most: int = MOST_BYTES) -> tuple[str, bool] | None:
    """Return the text in *value*, and True if its code is right; None if nothing can be read.

    The text of an item of ours is a block. A text of more than *most* bytes is not read.
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
    if not hmac.compare_digest(raw[:_CODE], _code(raw[_CODE:], key)):
        return text, False
    return f"{HEADER}\n\n{text}\n\n{FOOTER}", True


def open_items(body: bytes, key: bytes, items: int = MOST_ITEMS) -> OpenedBody:
    """Return *body* of a Responses request with a user message in place of every item of ours.

    Items of providers stay. A body with more than so many *items* stays as it is: it is refused when it is read.
    """
    if PREFIX.encode() not in body:
        return OpenedBody(body)
    try:
        spans = scan(body, responses.LIST, items).spans
    except InvalidRequest:
        return OpenedBody(body)
    pieces: list[bytes] = []
    ours: list[int] = []
    copied, bytes_left = 0, MOST_BYTES
    for index, (start, end) in enumerate(spans):
        if body.find(PREFIX.encode(), start, end) < 0:
            continue
        content = _read(body[start:end], key, bytes_left)
        if content is None:
            continue
        text, is_ours = content
        pieces += [body[copied:start], responses.user_message(text)]
        if is_ours:
            ours.append(index)
        copied, bytes_left = end, max(0, bytes_left - len(text.encode()))
    return OpenedBody(b"".join([*pieces, body[copied:]]), tuple(ours))


def _read(raw: bytes, key: bytes, most: int) -> tuple[str, bool] | None:
    try:
        value = decode(raw)
    except InvalidRequest:
        return None
    if not isinstance(value, dict) or value.get("type") not in responses.PROVIDER_COMPACTIONS:
        return None
    content = value.get("encrypted_content")
    if not isinstance(content, str):
        return None
    return unpack(content, key, most)


def _code(packed: bytes, key: bytes) -> bytes:
    return hmac.digest(key, b"ullage item\0" + packed, hashlib.sha256)[:_CODE]
