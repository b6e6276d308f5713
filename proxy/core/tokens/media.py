"""Tokens of images, sound and files, by the formulas that providers publish; never by the length of the base64.

If a provider bills less than it publishes, the published figure is used. Sources:

- OpenAI, images: https://platform.openai.com/docs/guides/images-vision#calculating-costs (tiles, patches, multipliers)
- OpenAI, sound: https://developers.openai.com/api/docs/guides/realtime-costs (a token for 100 ms of the user's speech)
- Anthropic, images: https://platform.claude.com/docs/en/build-with-claude/vision (about width x height / 750)
- Anthropic, PDF: https://platform.claude.com/docs/en/build-with-claude/pdf-support (each page as text and as an image)
- Google, images and sound: https://ai.google.dev/gemini-api/docs/tokens (258 a crop, 32 a second)
- Google, Gemini 3: https://ai.google.dev/gemini-api/docs/media-resolution (1,120 an image, 560 a page of a PDF)
- Qwen-VL: https://github.com/vllm-project/vllm/issues/20123 (one for 28 x 28 pixels, up to 16,384 an image)
"""

from __future__ import annotations

import base64
import functools
import math
import re
import struct
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol

import msgspec

Size = tuple[int, int]


class ImagePrice(Protocol):
    """The formula by which one family of models counts images."""

    def tokens(self, size: Size | None, detail: str) -> int:
        """Return the tokens of an image of *size* in pixels (None: as many as an image can take) at *detail*."""


class Tiles(msgspec.Struct, frozen=True):
    """*base* tokens for an image and *tile* for each of its 512-pixel tiles, after it is scaled into 2048 x 768."""

    base: int
    tile: int

    def tokens(self, size: Size | None, detail: str) -> int:
        """See ``ImagePrice``."""
        if detail == "low":
            return self.base
        width, height = size or (2048, 768)
        width, height = _scaled_down(width, height, 2048 / max(width, height, 1))
        width, height = _scaled_down(width, height, 768 / max(min(width, height), 1))
        return self.base + self.tile * _squares(width, height, 512)


class Patches(msgspec.Struct, frozen=True):
    """*multiplier* tokens for each square of *side* pixels, after the image is scaled down to at most *most* squares.

    ``original`` is the limit at the detail of that name. Low detail changes nothing: measured models ignored it.
    """

    multiplier: float
    most: int = 1536
    original: int = 1536
    side: int = 32

    def tokens(self, size: Size | None, detail: str) -> int:
        """See ``ImagePrice``."""
        most = self.most
        if detail == "original":
            most = self.original
        patches = most
        if size is not None:
            patches = self._patches(max(1, size[0]), max(1, size[1]), most)
        return math.ceil(round(patches * self.multiplier, 6))

    def _patches(self, width: int, height: int, most: int) -> int:
        patches = _squares(width, height, self.side)
        if patches <= most:
            return patches
        shrink = math.sqrt(self.side**2 * most / (width * height))
        across, down = width * shrink / self.side, height * shrink / self.side
        # Scaled once more, so that one of the two sides is a whole number of patches.
        shrink *= min(max(1, math.floor(across)) / across, max(1, math.floor(down)) / down)
        scaled = math.ceil(round(width * shrink / self.side, 6)) * math.ceil(round(height * shrink / self.side, 6))
        return max(1, min(most, scaled))


class Area(msgspec.Struct, frozen=True):
    """A token for 750 pixels or for each 28-pixel square, whichever is more, up to *most*.

    The image is scaled down until no side is longer than *edge*.
    """

    edge: int
    most: int

    def tokens(self, size: Size | None, detail: str) -> int:
        """See ``ImagePrice``."""
        del detail
        if size is None:
            return self.most
        width, height = _scaled_down(*size, self.edge / max(*size, 1))
        return min(self.most, max(-(-width * height // 750), _squares(width, height, 28)))


class Crops(msgspec.Struct, frozen=True):
    """*each* for an image up to 384 pixels, else for each crop of two thirds of its shorter side (256 to 768)."""

    each: int = 258
    most: int = 16

    def tokens(self, size: Size | None, detail: str) -> int:
        """See ``ImagePrice``."""
        del detail
        if size is None:
            return self.each * 6
        width, height = size
        if max(width, height) <= 384:
            return self.each
        unit = min(768, max(256, int(min(width, height) / 1.5)))
        return self.each * min(self.most, _squares(width, height, unit))


class Flat(msgspec.Struct, frozen=True):
    """The same tokens for every image, by detail alone."""

    high: int
    low: int

    def tokens(self, size: Size | None, detail: str) -> int:
        """See ``ImagePrice``."""
        del size
        if detail == "low":
            return self.low
        return self.high


class Prices(msgspec.Struct, frozen=True):
    """The tokens of media. ``name`` is equal for equal prices; ``second`` is of sound, ``page`` of a PDF."""

    name: str
    image: ImagePrice
    second: float = 10.0
    page: int = 2000


TILE_BASE, TILE = 85, 170
"""Tokens of an image and of each of its tiles, with GPT-4o."""

DEFAULT_PRICES = Prices("tiles", Tiles(TILE_BASE, TILE))
"""GPT-4o's prices, for every model without a published formula."""

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
"""Prices by pattern of the model's name, in lower case and without the provider's prefix; the first match decides."""


@functools.lru_cache(maxsize=512)
def prices(model: str) -> Prices:
    """Return the prices of media with *model*."""
    name = model.rpartition("/")[2].lower().removeprefix("ft:")
    for pattern, family_prices in FAMILIES:
        if fnmatchcase(name, pattern):
            return family_prices
    return DEFAULT_PRICES


def _scaled_down(width: int, height: int, scale: float) -> Size:
    """Return the size scaled down, never up."""
    if scale >= 1:
        return width, height
    return int(width * scale), int(height * scale)


def _squares(width: int, height: int, side: int) -> int:
    """Return the number of squares of *side* that cover the area, at least one."""
    return max(1, -(-width // side)) * max(1, -(-height // side))


SOUND_BYTES_PER_SECOND = 4000
"""Bytes of a second of sound whose header states no length: speech at 32 kbit/s, the lowest rate in common use."""

PCM_BYTES_PER_SECOND = 48_000
"""Bytes a second of raw sound (``pcm16``): 24 kHz, 16 bits, one channel.
https://github.com/openai/openai-python/blob/575ff60/src/openai/types/beta/realtime/session_create_params.py"""

SOUND_FRAME = 32
"""Tokens added to each piece of sound."""

PDF_BYTES_PER_PAGE = 60_000
"""Bytes assumed for a page of a PDF whose pages cannot be counted: newer files compress the objects that name them."""

TEXT_BYTES_PER_TOKEN = 3
"""Bytes per token of any other file, which providers read as text."""

IMAGES = frozenset({"image_url", "input_image", "image", "computer_screenshot"})
"""Types of parts that are images, in any API."""

SOUND = frozenset({"input_audio", "audio"})
"""Types of parts that are sound."""

FILES = frozenset({"file", "input_file", "document", "video", "video_url"})
"""Types of parts that are files or videos."""

_HEADER = 4096
"""Bytes at the beginning of a file that are searched for its header."""

_PAGE = re.compile(rb"/Type\s*/Page(?![A-Za-z])")
"""The entry of a page in a PDF."""

_MP3_KBITS = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MP3_KBITS_LOW = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
"""Bit rates in kbit/s by the index in a frame's header: layer III of MPEG 1, and of MPEG 2."""


def image_tokens(url: str, detail: str, prices: Prices) -> int:
    """Return the tokens of the image at *url*, a data URL or another one, at *detail*."""
    return prices.image.tokens(_url_size(url), detail)


def part_tokens(part: Mapping[str, Any], prices: Prices = DEFAULT_PRICES) -> int | None:
    """Return the tokens of a media part of a message; None if *part* is not media."""
    kind = _kind(part)
    value = part.get(kind)
    if kind in IMAGES:
        return image_tokens(_image_url(part), _detail(part), prices)
    if kind in SOUND:
        seconds, _ = _sound_length(value)
        return SOUND_FRAME + int(prices.second * seconds)
    if kind in FILES:
        return file_tokens(_file_url(part, value), prices)
    return None


def is_media(part: Mapping[str, Any]) -> bool:
    """Return True if *part* is an image, sound or a file."""
    kind = _kind(part)
    return kind in IMAGES or kind in SOUND or kind in FILES


def is_guess(part: Mapping[str, Any]) -> bool:
    """Return True if the tokens of a media part are a guess: its header does not state its size or length."""
    kind = _kind(part)
    if kind in SOUND:
        _, is_stated = _sound_length(part.get(kind))
        return not is_stated
    if kind in FILES:
        return True
    return _detail(part) != "low" and _url_size(_image_url(part)) is None


def file_tokens(url: str, prices: Prices) -> int:
    """Return the tokens of the file in the data URL *url*; a file at another URL counts as an image of unknown size."""
    if not url.startswith("data:"):
        return prices.image.tokens(None, "high")
    size = (len(url) - url.find(",")) * 3 // 4
    if url.startswith("data:application/pdf"):
        pages = len(_PAGE.findall(_decoded(url.partition(",")[2]))) or -(-size // PDF_BYTES_PER_PAGE)
        return 16 + pages * prices.page
    return 16 + size // TEXT_BYTES_PER_TOKEN


def opaque_tokens(size: int) -> int:
    """Return a guess at the tokens behind *size* characters of base64 that only the provider can read."""
    return size * 3 // 16  # three bytes for four characters, four bytes for a token


def _kind(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if isinstance(kind, str):
        return kind
    return ""


def _detail(part: Mapping[str, Any]) -> str:
    return _text(part.get("image_url"), "detail") or _text(part, "detail") or "auto"


def _image_url(part: Mapping[str, Any]) -> str:
    value = part.get(_kind(part))
    return _text(value, "url") or _text(part.get("image_url"), "url") or _text(part, "image_url") or _source_url(part)


def _file_url(part: Mapping[str, Any], value: Any) -> str:
    url = _text(value, "file_data") or _text(part, "file_data") or _text(value, "url") or _source_url(part)
    if not url or url.startswith(("data:", "http:", "https:")):
        return url
    # Some clients send base64 without ``data:...;base64,`` before it.
    name = part.get("filename")
    if not name and isinstance(value, dict):
        name = value.get("filename")
    if str(name).lower().endswith(".pdf"):
        return f"data:application/pdf;base64,{url}"
    return f"data:application/octet-stream;base64,{url}"


def _source_url(part: Mapping[str, Any]) -> str:
    """Return the URL of a part with a ``source``, as Anthropic's API has it; a data URL for one with data."""
    source = part.get("source")
    if not isinstance(source, dict):
        return ""
    if source.get("type") == "text":
        return "data:text/plain," + _text(source, "data")
    data = _text(source, "data")
    if not data:
        return _text(source, "url")
    return f"data:{_text(source, 'media_type')};base64,{data}"


def _url_size(url: str) -> Size | None:
    """Return the size in pixels of the image in a data URL; None if it cannot be read."""
    if not url.startswith("data:"):
        return None
    return image_size(_decoded(url.partition(",")[2][: _HEADER * 4]))


def _sound_length(value: Any) -> tuple[float, bool]:
    """Return the seconds of a piece of sound, and True if its header or format states them; 0 and False if it is empty.

    *value* is an object with the base64 under ``data`` and a ``format``.
    """
    data = _text(value, "data")
    size = len(data) * 3 // 4
    rate = _sound_rate(_decoded(data[: _HEADER * 4]))
    if rate:
        return size / rate, True
    if data and _text(value, "format") == "pcm16":
        return size / PCM_BYTES_PER_SECOND, True
    return size / SOUND_BYTES_PER_SECOND, False


def _sound_rate(head: bytes) -> float:
    """Return the bytes a second that the header of a WAV or MP3 file states; zero if it cannot be read."""
    if head[:4] == b"RIFF" and head[8:16] == b"WAVEfmt " and len(head) >= 32:
        return float(int.from_bytes(head[28:32], "little"))
    at = 0
    if head[:3] == b"ID3" and len(head) >= 10:  # a tag whose length is written in seven bits a byte
        at = 10 + sum((byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))
    frame = head[at : at + 4]
    if len(frame) == 4 and frame[0] == 0xFF and frame[1] & 0xE6 == 0xE2:  # layer III
        rates = _MP3_KBITS_LOW
        if frame[1] & 0x18 == 0x18:  # MPEG 1
            rates = _MP3_KBITS
        return rates[min(frame[2] >> 4, 14)] * 125.0
    return 0.0


def image_size(head: bytes) -> Size | None:
    """Return width and height in pixels from the first bytes of a PNG, GIF, WebP or JPEG file; None if unreadable."""
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


def _webp_size(head: bytes) -> Size | None:
    """Return the size that a key frame of a simple WebP file states: 14 bits each, less one in lossless files.

    https://www.rfc-editor.org/rfc/rfc9649
    """
    if head[12:16] == b"VP8 " and head[23:26] == b"\x9d\x01\x2a" and len(head) >= 30:
        width, height = struct.unpack("<HH", head[26:30])
        return width & 0x3FFF, height & 0x3FFF
    if head[12:16] == b"VP8L" and head[20:21] == b"\x2f" and len(head) >= 25:
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return None


def _jpeg_size(head: bytes) -> Size | None:
    """Return the size in a JPEG file's start-of-frame segment (https://www.w3.org/Graphics/JPEG/itu-t81.pdf, B.2.2)."""
    at = 2
    while at + 9 < len(head) and head[at] == 0xFF:
        marker = head[at + 1]
        if marker == 0xFF:  # any number of these fill bytes may precede a marker
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", head[at + 5 : at + 9])
            return width, height
        at += 2 + int.from_bytes(head[at + 2 : at + 4], "big")
    return None


def _decoded(data: str) -> bytes:
    """Return the bytes of the base64 in *data* up to its last whole group; none if it is no base64."""
    data = "".join(data.split())
    try:
        return base64.b64decode(data[: len(data) // 4 * 4])
    except ValueError:
        return b""


def _text(value: Any, key: str) -> str:
    """Return the text under *key* of an object; a text in place of the object is its URL."""
    text = value
    if isinstance(value, dict):
        text = value.get(key)
    elif key not in ("url", "image_url"):
        return ""
    if isinstance(text, str):
        return text
    return ""
