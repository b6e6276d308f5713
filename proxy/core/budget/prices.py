"""What media cost in tokens, by family of model: the providers' published formulas, as data.

Sources: OpenAI's guide "Images and vision" (tiles, patches, multipliers) and "Audio" (ten tokens a second), Anthropic's
"Vision" (28-pixel patches, about width x height / 750) and "PDF support", Google's "Understand and count tokens" and
"Media resolution". Where a provider bills less than it publishes, the published figure stands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

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
