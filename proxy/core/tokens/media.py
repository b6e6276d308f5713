"""Tokens of images, sound and files, by the formulas that providers publish; never by the length of the base64.

Sources: OpenAI's guide "Images and vision" (tiles, patches, multipliers) and "Audio" (ten tokens a second), Anthropic's
"Vision" (28-pixel patches, about width x height / 750) and "PDF support", Google's "Understand and count tokens" and
"Media resolution". If a provider bills less than it publishes, the published figure stands.
"""

from __future__ import annotations

import base64
import functools
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

Size = tuple[int, int]


class Picture(Protocol):
    """How one image is priced."""

    def tokens(self, size: Size | None, detail: str) -> int:
        """Tokens of an image of *size* (pixels; ``None``: as many as an image can take) at *detail*."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """So many tokens for an image and so many for each 512-pixel tile of it, once scaled into 2048 x 768."""

    base: int
    tile: int

    def tokens(self, size: Size | None, detail: str) -> int:
        """See ``Picture``."""
        if detail == "low":
            return self.base
        width, height = size or (2048, 768)
        width, height = _within(width, height, 2048 / max(width, height, 1))
        width, height = _within(width, height, 768 / max(min(width, height), 1))
        return self.base + self.tile * _cells(width, height, 512)


@dataclass(frozen=True, slots=True)
class Patches:
    """*multiplier* tokens for each square of *side* pixels, in an image scaled down to at most *most* of them.

    ``original`` is the limit at that detail. Low detail changes nothing: these models were measured to ignore it.
    """

    multiplier: float
    most: int = 1536
    original: int = 1536
    side: int = 32

    def tokens(self, size: Size | None, detail: str) -> int:
        """See ``Picture``."""
        most = self.original if detail == "original" else self.most
        patches = most if size is None else self._patches(max(1, size[0]), max(1, size[1]), most)
        return math.ceil(round(patches * self.multiplier, 6))

    def _patches(self, width: int, height: int, most: int) -> int:
        found = _cells(width, height, self.side)
        if found <= most:
            return found
        shrink = math.sqrt(self.side**2 * most / (width * height))
        across, down = width * shrink / self.side, height * shrink / self.side
        # Scaled once more, so that one of the two directions holds whole patches.
        shrink *= min(max(1, math.floor(across)) / across, max(1, math.floor(down)) / down)
        scaled = math.ceil(round(width * shrink / self.side, 6)) * math.ceil(round(height * shrink / self.side, 6))
        return max(1, min(most, scaled))


@dataclass(frozen=True, slots=True)
class Area:
    """A token for 750 pixels or for each 28-pixel square, whichever is more, up to *most*; *edge* bounds the size."""

    edge: int
    most: int

    def tokens(self, size: Size | None, detail: str) -> int:
        """See ``Picture``."""
        del detail
        if size is None:
            return self.most
        width, height = _within(*size, self.edge / max(*size, 1))
        return min(self.most, max(-(-width * height // 750), _cells(width, height, 28)))


@dataclass(frozen=True, slots=True)
class Crops:
    """*each* for an image up to 384 pixels, else for each crop of two thirds of its shorter side (256 to 768)."""

    each: int = 258
    most: int = 16

    def tokens(self, size: Size | None, detail: str) -> int:
        """See ``Picture``."""
        del detail
        if size is None:
            return self.each * 6
        width, height = size
        if max(width, height) <= 384:
            return self.each
        unit = min(768, max(256, int(min(width, height) / 1.5)))
        return self.each * min(self.most, _cells(width, height, unit))


@dataclass(frozen=True, slots=True)
class Flat:
    """The same for every image, by detail alone."""

    high: int
    low: int

    def tokens(self, size: Size | None, detail: str) -> int:
        """See ``Picture``."""
        del size
        return self.low if detail == "low" else self.high


@dataclass(frozen=True, slots=True)
class Prices:
    """What media cost. ``name`` is equal for equal prices; ``second`` of sound and ``page`` of a PDF are in tokens."""

    name: str
    picture: Picture
    second: float = 10.0
    page: int = 2000


USUAL = Prices("tiles", Tiles(85, 170))
"""GPT-4o's; for every model nobody publishes a formula of."""

FAMILIES: tuple[tuple[str, Prices], ...] = (
    ("gpt-4o-mini*", Prices("4o-mini", Tiles(2833, 5667))),
    ("gpt-4.1-mini*", Prices("patches-1.62", Patches(1.62))),
    ("gpt-4.1-nano*", Prices("patches-2.46", Patches(2.46))),
    ("gpt-5*-mini*", Prices("patches-1.62", Patches(1.62))),
    ("gpt-5*-nano*", Prices("patches-2.46", Patches(2.46))),
    ("gpt-5.[23]*", Prices("patches-1.2", Patches(1.2))),
    ("gpt-5.[4-9]*", Prices("patches-1.2-large", Patches(1.2, 2500, 10_000))),
    ("gpt-[6-9]*", Prices("patches-1.2-large", Patches(1.2, 2500, 10_000))),
    ("gpt-5*", Prices("5", Tiles(70, 140))),
    ("o4-mini*", Prices("patches-1.72", Patches(1.72))),
    ("codex-mini*", Prices("patches-1.72", Patches(1.72))),
    ("o[13]*", Prices("o1", Tiles(75, 150))),
    ("computer-use-preview*", Prices("computer-use", Tiles(65, 129))),
    ("claude-opus-4[-.][7-9]*", Prices("claude-large", Area(2576, 4784), page=6000)),
    *((f"claude-{kind}-[5-9]*", Prices("claude-large", Area(2576, 4784), page=6000)) for kind in ("opus", "sonnet")),
    ("claude*", Prices("claude", Area(1568, 1600), page=3000)),
    ("gemini-[3-9]*", Prices("gemini-3", Flat(1120, 280), 32.0, 560)),
    ("gemini*", Prices("gemini", Crops(), 32.0, 258)),
    ("*qwen*vl*", Prices("qwen-vl", Patches(1.0, 16_384, 16_384, side=28))),
)
"""The first pattern that matches a model's name (without its provider's prefix, in small letters) counts."""


@functools.lru_cache(maxsize=512)
def prices(model: str) -> Prices:
    """What media cost with *model*."""
    name = model.rpartition("/")[2].lower().removeprefix("ft:")
    return next((found for pattern, found in FAMILIES if fnmatchcase(name, pattern)), USUAL)


@dataclass(frozen=True, slots=True)
class Meter:
    """Counts text like the function it holds, and knows what media cost beside it."""

    text: Callable[[str], int]
    prices: Prices

    def __call__(self, text: str) -> int:
        """Tokens of *text*."""
        return self.text(text)


def prices_of(count: Callable[[str], int]) -> Prices:
    """What media cost where text is counted with *count*: the usual prices unless it is a ``Meter``."""
    return count.prices if isinstance(count, Meter) else USUAL


def _within(width: int, height: int, scale: float) -> Size:
    """The size scaled down, never up."""
    return (int(width * scale), int(height * scale)) if scale < 1 else (width, height)


def _cells(width: int, height: int, side: int) -> int:
    """Squares of *side* that cover the area, at least one."""
    return max(1, -(-width // side)) * max(1, -(-height // side))


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
