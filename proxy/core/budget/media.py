"""Tokens of media parts, by what providers publish. Never by the length of the base64."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from typing import Any

TILE_BASE, TILE = 85, 170
"""OpenAI's tile models: 85 for the image and 170 for each 512-pixel tile of the scaled image."""

UNKNOWN_IMAGE = TILE_BASE + 8 * TILE
"""An image whose size cannot be read counts as the largest the tile formula gives (2048 x 768: eight tiles)."""

AUDIO_BYTES_PER_TOKEN = 1600
"""About ten tokens a second of 16 kHz 16-bit mono audio; compressed formats count as more seconds than they hold."""

PDF_BYTES_PER_TOKEN = 25
"""A page of a PDF is some 1,500 tokens of text and image in about 40 KB."""

TEXT_BYTES_PER_TOKEN = 3
"""Any other file is read as text."""

_HEADER = 4096


def image_tokens(url: str, detail: str = "auto") -> int:
    """Tokens of an image given by (data) URL and detail, by the tile formula."""
    if detail == "low":
        return TILE_BASE
    size = image_size(_head(url)) if url.startswith("data:") else None
    if size is None:
        return UNKNOWN_IMAGE
    width, height = size
    scale = min(1.0, 2048 / max(width, height, 1))
    width, height = int(width * scale), int(height * scale)
    scale = min(1.0, 768 / max(min(width, height), 1))
    width, height = int(width * scale), int(height * scale)
    tiles = max(1, -(-width // 512)) * max(1, -(-height // 512))
    return TILE_BASE + TILE * tiles


def part_tokens(part: Mapping[str, Any]) -> int | None:
    """Tokens of a media part of a message; ``None`` when *part* is not media."""
    kind = part.get("type")
    value = part.get(kind) if isinstance(kind, str) else None
    if kind in ("image_url", "input_image", "image", "computer_screenshot"):
        detail = _text(value, "detail") or _text(part, "detail") or "auto"
        return image_tokens(_text(value, "url") or _text(part, "image_url"), detail)
    if kind in ("input_audio", "audio"):
        return 32 + len(_text(value, "data")) * 3 // 4 // AUDIO_BYTES_PER_TOKEN
    if kind in ("file", "input_file", "document", "video", "video_url"):
        return file_tokens(_text(value, "file_data") or _text(part, "file_data") or _text(value, "url"))
    return None


def is_guess(part: Mapping[str, Any]) -> bool:
    """Whether a media part's tokens are no more than a guess: everything but an image whose size could be read."""
    value = part.get("image_url")
    url = _text(value, "url") or _text(part, "image_url")
    detail = _text(value, "detail") or _text(part, "detail")
    return detail != "low" and (not url.startswith("data:") or image_size(_head(url)) is None)


def file_tokens(url: str) -> int:
    """Tokens of a file given as a data URL; one given by name or address counts as an image of unknown size."""
    if not url.startswith("data:"):
        return UNKNOWN_IMAGE
    size = (len(url) - url.find(",")) * 3 // 4
    per = PDF_BYTES_PER_TOKEN if url.startswith("data:application/pdf") else TEXT_BYTES_PER_TOKEN
    return 16 + size // per


def image_size(head: bytes) -> tuple[int, int] | None:
    """Width and height in pixels from the first bytes of a PNG, GIF, WebP or JPEG file; ``None`` if unreadable."""
    if head[:8] == b"\x89PNG\r\n\x1a\n" and len(head) >= 24:
        width, height = struct.unpack(">II", head[16:24])
        return width, height
    if head[:4] == b"GIF8" and len(head) >= 10:
        width, height = struct.unpack("<HH", head[6:10])
        return width, height
    if head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and len(head) >= 30:
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return _webp_size(head)
    if head[:2] == b"\xff\xd8":
        return _jpeg_size(head)
    return None


def _webp_size(head: bytes) -> tuple[int, int] | None:
    """The size a key frame of a simple WebP file states: 14 bits each, lossless ones less one."""
    if head[12:16] == b"VP8 " and head[23:26] == b"\x9d\x01\x2a" and len(head) >= 30:
        width, height = struct.unpack("<HH", head[26:30])
        return width & 0x3FFF, height & 0x3FFF
    if head[12:16] == b"VP8L" and head[20:21] == b"\x2f" and len(head) >= 25:
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return None


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 < len(head) and head[at] == 0xFF:
        marker = head[at + 1]
        if marker == 0xFF:  # any number of these may fill the space before a marker
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a start-of-frame segment holds the size
            height, width = struct.unpack(">HH", head[at + 5 : at + 9])
            return width, height
        at += 2 + int.from_bytes(head[at + 2 : at + 4], "big")
    return None


def _head(url: str) -> bytes:
    data = url.partition(",")[2][: _HEADER * 4]
    data = "".join(data.split())
    try:
        return base64.b64decode(data[: len(data) // 4 * 4])
    except ValueError:
        return b""


def _text(value: Any, key: str) -> str:
    found = value.get(key) if isinstance(value, dict) else value if key in ("url", "image_url") else None
    return found if isinstance(found, str) else ""


BLOCK_PIXELS_PER_TOKEN, BLOCK_EDGE, BLOCK_IMAGE = 750, 1568, 1600
"""Anthropic's rule: an image is scaled to this longest edge, costs a token for so many pixels, and at most so many."""


def block_tokens(block: Mapping[str, Any]) -> tuple[int, bool] | None:
    """Tokens of an image or document block with a ``source``, and whether they are a guess; ``None`` for other blocks.

    A document whose source is text or blocks is no media: its words are counted as words.
    """
    source = block.get("source")
    if block.get("type") not in ("image", "document") or not isinstance(source, dict):
        return None
    data = source.get("data") if source.get("type") == "base64" else None
    if block["type"] == "image":
        size = image_size(_head(f"data:,{data[: _HEADER * 2]}")) if isinstance(data, str) else None
        return (BLOCK_IMAGE, True) if size is None else (_block_image(*size), False)
    if source.get("type") in ("text", "content"):
        return None
    if not isinstance(data, str):
        return UNKNOWN_IMAGE, True
    return 16 + len(data) * 3 // 4 // PDF_BYTES_PER_TOKEN, True


def _block_image(width: int, height: int) -> int:
    scale = min(1.0, BLOCK_EDGE / max(width, height, 1))
    return min(BLOCK_IMAGE, int(width * scale) * int(height * scale) // BLOCK_PIXELS_PER_TOKEN + 1)


def opaque_tokens(size: int) -> int:
    """A guess at what *size* characters of base64 stand for, when they are text that only the provider can read."""
    return size * 3 // 16
