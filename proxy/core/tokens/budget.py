"""How much room there is: the window, the reserve, the marks between which a view lives, and shares of the window.

All figures are tokens of our own count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial

DEFAULT_RESERVE = 16_384
"""Room kept for an answer when neither the request nor the model's own output limit says less."""


MOST_SUMMED = 8_192
"""Tokens of output in which any conversation can be summed up; a summary of our own has no more either."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Shares of the room: a compaction starts above ``high``, goes down to ``low``; ``soft`` only starts a summary."""

    high: float = 0.90
    soft: float = 0.60
    low: float = 0.40

    def __post_init__(self) -> None:
        if not 0 < self.low < self.soft < self.high <= 1:
            raise ValueError(f"marks must rise from low to soft to high within 0..1, not {self}")


@dataclass(frozen=True, slots=True)
class Shares:
    """Caps of what stands for folded rounds, as shares of the budget; together at most ``block`` of the room.

    A model's ``summary``, where there is one, is taken out of steps and digest.
    """

    pins: float = 0.20
    digest: float = 0.10
    steps: float = 0.03
    block: float = 0.40
    summary: float = 0.05


SCALED_BELOW = 65_536
"""Buffers are meant for a room of at least so many tokens; in a smaller one they shrink with it."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Thresholds as distances from the window's end, in tokens; ``None``: only the mark holds.

    ``reserve`` is kept for an answer; of what is left, ``warning``, ``auto_compact`` and ``blocking`` are free at the
    soft mark, at the high mark, and in every view. Where a mark and a buffer differ, the smaller threshold wins.
    """

    reserve: int | None = None
    warning: int | None = None
    auto_compact: int | None = None
    blocking: int | None = None

    def __post_init__(self) -> None:
        rising = [each for each in (self.blocking, self.auto_compact, self.warning) if each is not None]
        if rising != sorted(set(rising)):
            raise ValueError(f"buffers must shrink from warning to auto_compact to blocking, not {self}")


NO_BUFFERS = Buffers()

ECONOMY_SHARE, ECONOMY_MOST, BELOW_TIER = 0.5, 120_000, 0.9
"""What a long session may grow to cheaply: a share of the window, a number of tokens, and of a dearer price's start."""

LEAST_ROOM = 0.25
"""Share of the room that a cap on what is spent always leaves: beside large tools it would leave none."""


def economy_cap(window: int, tier: int | None) -> int:
    """Tokens of input from which compacting costs less than going on; *tier* is where a dearer price starts."""
    cap = min(int(ECONOMY_SHARE * window), ECONOMY_MOST)
    return min(cap, int(BELOW_TIER * tier)) if tier else cap


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """What one request may use, in tokens of our own count.

    ``window`` holds input and output; ``reserve`` is kept for the answer; ``fixed`` is what no compaction of the
    history changes (system, tools, response format). ``default_reserve`` is kept if a request names
    no output figure; ``max_input`` limits the input however short the answer. ``price_cap`` is where it becomes dear,
    which moves the marks and refuses nothing; ``buffers`` are thresholds beside the marks.
    """

    window: int
    reserve: int
    fixed: int
    default_reserve: int = 0
    max_input: int | None = None
    price_cap: int | None = None
    buffers: Buffers = NO_BUFFERS
    # Computed once, when the budget is built:
    quantised_fixed: int = field(init=False, compare=False)
    """``fixed`` in steps of window/64, so that a clock in the system text moves no cut."""
    input: int = field(init=False, compare=False)
    """What the input of this very request may use."""
    baseline: int = field(init=False, compare=False)
    """The budget of past boundaries: it must not follow a request's output figure, or every cut would move with it."""
    ceiling: int = field(init=False, compare=False)
    """What a view may take at any boundary, so that a request that names no output figure fits there as it is.

    Past boundaries go by it too: else they would miss the compactions that such a request brought about when it came.
    """
    view_limit: int = field(init=False, compare=False)
    """What the view of this very request may take: less than the ceiling or, for a short answer, more."""

    def __post_init__(self) -> None:
        step = max(1, self.window // 64)
        derive = partial(object.__setattr__, self)  # the class is frozen
        derive("quantised_fixed", -(-self.fixed // step) * step)
        budget, baseline = max(0, self.input_budget(self.reserve)), self.input_budget(self.window // 32)
        blocking = self._short_of(self.buffers.blocking)
        derive("input", budget)
        derive("baseline", baseline)
        derive("ceiling", min(baseline, self.window - self.default_reserve, blocking))
        derive("view_limit", min(baseline, budget, blocking))

    def input_budget(self, reserve: int) -> int:
        """What the input may use beside an answer of *reserve* tokens; below zero where the answer alone is too big."""
        return input_limit(self.window, reserve, self.max_input)

    def mark(self, share: float, budget: int) -> int:
        """The level at which *share* of the room inside *budget*, as far as it is to be used, is used."""
        return self.quantised_fixed + int(share * max(0, self.spendable(budget) - self.quantised_fixed))

    def spendable(self, budget: int) -> int:
        """What is to be used of *budget*: all of it, or what stays cheap, at least a quarter of the room."""
        if self.price_cap is None:
            return budget
        least = self.quantised_fixed + int(LEAST_ROOM * max(0, budget - self.quantised_fixed))
        return min(budget, max(self.price_cap, least))

    def high(self, marks: Marks, budget: int) -> int:
        """The level above which a compaction starts: of mark and buffer the smaller."""
        return min(self.mark(marks.high, budget), self._short_of(self.buffers.auto_compact))

    def soft(self, marks: Marks, budget: int) -> int:
        """The level above which one is prepared and warned of: of mark and buffer the smaller, below the high one."""
        return min(self._beneath(marks, marks.soft, budget), self._short_of(self.buffers.warning))

    def low(self, marks: Marks, budget: int) -> int:
        """The level a compaction goes down to; as far below the high one as the marks say."""
        return self._beneath(marks, marks.low, budget)

    def quiet(self, marks: Marks, budget: int) -> int:
        """The level below which nothing ever happens to a conversation: what one that is asked for goes down to."""
        return self._beneath(marks, marks.low / 2, budget)

    def _beneath(self, marks: Marks, share: float, budget: int) -> int:
        high = self.high(marks, budget)
        return min(
            self.mark(share, budget),
            self.quantised_fixed + int(share / marks.high * max(0, high - self.quantised_fixed)),
        )

    def _short_of(self, buffer: int | None) -> int:
        """The level that leaves *buffer* free before the answer's reserve; the window where neither is set."""
        held = self.buffers.reserve
        if buffer is None and held is None:
            return self.window
        scale = min(1.0, max(0, self.window - self.quantised_fixed) / SCALED_BELOW)
        return self.window - int(scale * ((held or 0) + (buffer or 0)))


def answer_reserve(requested: int | None, max_output: int | None, window: int) -> int:
    """Tokens kept for the answer: what the request asks for, unclamped; else a share of the window."""
    if requested is not None and requested > 0:
        return requested
    return min(max_output or DEFAULT_RESERVE, window // 8, DEFAULT_RESERVE)


def summary_output(window: int, least: int = 0) -> int:
    """Tokens of output in which a conversation can be summed up, however many were asked for; at least *least*."""
    return max(least, min(MOST_SUMMED, window // 8))


def input_limit(window: int, reserve: int, max_input: int | None) -> int:
    """Tokens of input that a *window* takes beside an answer of *reserve*, when inputs are limited to *max_input*."""
    room = window - reserve
    return room if max_input is None else min(room, max_input)


def rounded_down(tokens: int) -> int:
    """The largest power of two, or one and a half of it, that is not above *tokens*: no small change moves it."""
    power = 1 << max(0, tokens.bit_length() - 1)
    return min(tokens, power + power // 2 if power + power // 2 <= tokens else power)


def to_our_tokens(tokens: int, factor: float) -> int:
    """A provider's figure in tokens of our own count, when the provider counts *factor* times what we count."""
    return int(tokens / factor)


TOLERANCE = 1e-9
"""By how much a sum of decimal shares may miss one."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Soft shares of the window, together at most one; what a part does not use is lent to the others.

    It is optional, and only ever chooses between views that would fit without it: how deep a compaction goes, how large
    a block may be, whether a large tools array is shrunk before rounds are folded. It refuses nothing, and what was
    decided for a conversation stays as it is.
    """

    system: float = 0.0
    tools: float = 0.0
    memory: float = 0.0
    summary: float = 0.0
    recent: float = 0.0
    older: float = 0.0
    reserve: float = 0.0

    def __post_init__(self) -> None:
        if any(not 0 <= share <= 1 for share in self.shares.values()) or sum(self.shares.values()) > 1 + TOLERANCE:
            raise ValueError(f"shares must lie within 0..1 and add up to at most 1, not {self}")

    @property
    def shares(self) -> dict[str, float]:
        """The shares by part."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def tokens(self, part: str, window: int) -> int:
        """The own share of *part*, in whole tokens."""
        return int(getattr(self, part) * window + TOLERANCE)

    def spare(self, window: int) -> int:
        """Tokens that are nobody's share."""
        return window - sum(self.tokens(part, window) for part in PARTS)

    def for_tools(self, window: int, others: int) -> int:
        """What tools may take once the history lends nothing, beside *others*: system text, memories and format."""
        lent = self.tokens("system", window) + self.tokens("memory", window) - others
        return self.tokens("tools", window) + max(0, lent) + self.spare(window)

    def for_block(self, window: int, fixed: int) -> int:
        """What may stand for folded rounds at an event, beside *fixed* tokens that no event changes."""
        return self.tokens("summary", window) + self._lent(window, fixed)

    def for_history(self, window: int, fixed: int) -> int:
        """What an event may leave of messages, the block included. The answer's share is not lent to them."""
        own = sum(self.tokens(part, window) for part in ("summary", "recent", "older"))
        return own + self._lent(window, fixed)

    def _lent(self, window: int, fixed: int) -> int:
        own = sum(self.tokens(part, window) for part in ("system", "tools", "memory"))
        return max(0, own - fixed) + self.spare(window)


PARTS = tuple(field.name for field in fields(Allocation))


def used(regions: Mapping[str, int], allocation: Allocation, window: int) -> dict[str, int]:
    """Tokens by part of a view whose tokens by region are *regions*.

    The newest messages up to their share are ``recent``, the others ``older``.
    """
    history = sum(regions.get(name, 0) for name in ("user", "assistant", "tool"))
    recent = min(history, allocation.tokens("recent", window))
    return {
        "system": regions.get("system", 0) + regions.get("format", 0),
        "tools": regions.get("tools", 0),
        "memory": regions.get("memory", 0),
        "summary": regions.get("summary", 0),
        "recent": recent,
        "older": history - recent,
        "reserve": regions.get("reserve", 0),
    }


def borrowed(regions: Mapping[str, int], allocation: Allocation, window: int) -> dict[str, int]:
    """By how many tokens parts of a view exceed their own share; those that do not are left out."""
    excess = {part: took - allocation.tokens(part, window) for part, took in used(regions, allocation, window).items()}
    return {part: tokens for part, tokens in excess.items() if tokens > 0}
