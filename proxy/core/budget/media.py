"""Tokens of media parts, by what providers publish. Never by the length of the base64."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Mapping
from typing import Any

from proxy.core.budget.prices import USUAL, Prices

TILE_BASE, TILE = 85, 170
"""The usual tile formula: 85 for the image and 170 for each 512-pixel tile of the scaled image."""

UNKNOWN_IMAGE = TILE_BASE + 8 * TILE
"""By that formula, an image whose size cannot be read counts as the largest there is (2048 x 768: eight tiles)."""

SOUND_BYTES_PER_SECOND = 4000
"""Sound whose header does not tell its length is taken for speech at 32 kbit/s: few use less."""

PCM_BYTES_PER_SECOND = 48_000
"""Raw sound is 24 kHz, 16 bits, mono."""

SOUND_FRAME = 32
"""Tokens around a piece of sound."""

PDF_BYTES_PER_PAGE = 60_000
"""Where the pages of a PDF cannot be counted (newer ones compress what names them)."""

TEXT_BYTES_PER_TOKEN = 3
"""Any other file is read as text."""

PICTURES = frozenset({"image_url", "input_image", "image", "computer_screenshot"})
SOUND = frozenset({"input_audio", "audio"})
FILES = frozenset({"file", "input_file", "document", "video", "video_url"})

_HEADER = 4096
_PAGE = re.compile(rb"/Type\s*/Page(?![A-Za-z])")
_MP3_KBITS = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MP3_KBITS_LOW = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)


def image_tokens(url: str, detail: str = "auto", prices: Prices = USUAL) -> int:
    """Tokens of an image given by (data) URL and detail, as a model with *prices* counts them."""
    return prices.picture.tokens(_url_size(url), detail)


def part_tokens(part: Mapping[str, Any], prices: Prices = USUAL) -> int | None:
    """Tokens of a media part of a message; ``None`` when *part* is not media."""
    kind = _kind(part)
    value = part.get(kind)
    if kind in PICTURES:
        return image_tokens(_picture_url(part), _detail(part), prices)
    if kind in SOUND:
        seconds = _seconds(_text(value, "data"), _text(value, "format"))
        return SOUND_FRAME + int(prices.second * (seconds[0] if seconds else 0))
    if kind in FILES:
        return file_tokens(_file_url(part, value), prices)
    return None


def is_media(part: Mapping[str, Any]) -> bool:
    """Whether *part* is a picture, sound or a file."""
    kind = _kind(part)
    return kind in PICTURES or kind in SOUND or kind in FILES


def is_guess(part: Mapping[str, Any]) -> bool:
    """Whether a media part's tokens are no more than a guess: its header does not tell its size or length."""
    kind = _kind(part)
    if kind in SOUND:
        value = part.get(kind)
        seconds = _seconds(_text(value, "data"), _text(value, "format"))
        return seconds is None or not seconds[1]
    if kind in FILES:
        return True
    return _detail(part) != "low" and _url_size(_picture_url(part)) is None


def file_tokens(url: str, prices: Prices = USUAL) -> int:
    """Tokens of a file given as a data URL; one given by name or address counts as an image of unknown size."""
    if not url.startswith("data:"):
        return prices.picture.tokens(None, "high")
    size = (len(url) - url.find(",")) * 3 // 4
    if url.startswith("data:application/pdf"):
        pages = len(_PAGE.findall(_decoded(url.partition(",")[2]))) or -(-size // PDF_BYTES_PER_PAGE)
        return 16 + pages * prices.page
    return 16 + size // TEXT_BYTES_PER_TOKEN


def _kind(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    return kind if isinstance(kind, str) else ""


def _detail(part: Mapping[str, Any]) -> str:
    return _text(part.get("image_url"), "detail") or _text(part, "detail") or "auto"


def _picture_url(part: Mapping[str, Any]) -> str:
    value = part.get(_kind(part))
    return _text(value, "url") or _text(part.get("image_url"), "url") or _text(part, "image_url") or _source_url(part)


def _file_url(part: Mapping[str, Any], value: Any) -> str:
    found = _text(value, "file_data") or _text(part, "file_data") or _text(value, "url") or _source_url(part)
    named = part.get("filename") or (value.get("filename") if isinstance(value, dict) else None)
    if found and not found.startswith(("data:", "http:", "https:")):  # some send the bare base64
        kind = "application/pdf" if str(named).lower().endswith(".pdf") else "application/octet-stream"
        return f"data:{kind};base64,{found}"
    return found


def _source_url(part: Mapping[str, Any]) -> str:
    """The (data) URL of a part that says its source as Anthropic's API has it."""
    source = part.get("source")
    if not isinstance(source, dict):
        return ""
    if source.get("type") == "text":
        return "data:text/plain," + _text(source, "data")
    data = _text(source, "data")
    return f"data:{_text(source, 'media_type')};base64,{data}" if data else _text(source, "url")


def _url_size(url: str) -> tuple[int, int] | None:
    return image_size(_head(url)) if url.startswith("data:") else None


def _seconds(data: str, kind: str) -> tuple[float, bool] | None:
    """The length of a piece of sound given in base64, and whether its header says so; ``None`` where there is none."""
    if not data:
        return None
    size = len(data) * 3 // 4
    head = _decoded(data[: _HEADER * 4])
    rate = _sound_rate(head)
    if not rate and kind == "pcm16":
        return size / PCM_BYTES_PER_SECOND, True
    return (size / rate, True) if rate else (size / SOUND_BYTES_PER_SECOND, False)


def _sound_rate(head: bytes) -> float:
    """Bytes a second of a WAV or MP3 file, by its header; zero if unreadable."""
    if head[:4] == b"RIFF" and head[8:16] == b"WAVEfmt " and len(head) >= 32:
        return float(int.from_bytes(head[28:32], "little"))
    at = 0
    if head[:3] == b"ID3" and len(head) >= 10:  # a tag whose length is written in seven bits a byte
        at = 10 + sum((byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))
    frame = head[at : at + 4]
    if len(frame) == 4 and frame[0] == 0xFF and frame[1] & 0xE6 == 0xE2:  # layer III
        kbits = (_MP3_KBITS if frame[1] & 0x18 == 0x18 else _MP3_KBITS_LOW)[min(frame[2] >> 4, 14)]
        return kbits * 125.0
    return 0.0


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
    return _decoded(url.partition(",")[2][: _HEADER * 4])


def _decoded(data: str) -> bytes:
    """What the base64 of *data* stands for, as far as it goes; nothing where it is none."""
    data = "".join(data.split())
    try:
        return base64.b64decode(data[: len(data) // 4 * 4])
    except ValueError:
        return b""


def _text(value: Any, key: str) -> str:
    if isinstance(value, dict):
        value = value.get(key)
    elif key not in ("url", "image_url"):
        return ""
    return value if isinstance(value, str) else ""


def opaque_tokens(size: int) -> int:
    """A guess at what *size* characters of base64 stand for, when they are text that only the provider can read."""
    return size * 3 // 16
