"""How much room there is: the window, the reserve, and the marks between which a view lives. All figures in tokens."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_RESERVE = 16_384
"""Room kept for an answer when neither the request nor the model's own output limit says less."""


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


@dataclass(frozen=True, slots=True)
class Figures:
    """What one request may use, in tokens of our own count.

    ``window`` holds input and output; ``reserve`` is kept for the answer; ``fixed`` is what no compaction of the
    history changes (system, tools, response format). ``usual`` is what is kept where a request asks for nothing;
    ``max_input`` limits the input however short the answer.
    """

    window: int
    reserve: int
    fixed: int
    usual: int = 0
    max_input: int | None = None

    @property
    def budget(self) -> int:
        """What the input of this very request may use."""
        return max(0, self.inside(self.reserve))

    @property
    def lasting(self) -> int:
        """The budget of past places: it must not follow a request's output figure, or every cut would move with it."""
        return self.inside(self.window // 32)

    def inside(self, reserve: int) -> int:
        """What the input may use beside an answer of *reserve* tokens; below zero where the answer alone is too big."""
        return input_room(self.window, reserve, self.max_input)

    @property
    def ceiling(self) -> int:
        """What a view may take at any place, so that a request that asks for no output figure fits there as it is.

        Past places go by it too: else they would miss the events that such a request brought about when it came.
        """
        return min(self.lasting, self.window - self.usual)

    @property
    def stepped(self) -> int:
        """``fixed`` in steps of window/64, so that a clock in the system text moves no cut."""
        step = max(1, self.window // 64)
        return -(-self.fixed // step) * step

    def mark(self, share: float, budget: int) -> int:
        """The level at which *share* of the room inside *budget* is used."""
        return self.stepped + int(share * max(0, budget - self.stepped))


def reserve(requested: int | None, max_output: int | None, window: int) -> int:
    """Tokens kept for the answer: what the request asks for, unclamped; else a share of the window."""
    if requested is not None and requested > 0:
        return requested
    return min(max_output or DEFAULT_RESERVE, window // 8, DEFAULT_RESERVE)


def input_room(window: int, reserve: int, max_input: int | None) -> int:
    """Tokens of input that a *window* takes beside an answer of *reserve*, when inputs are limited to *max_input*."""
    room = window - reserve
    return room if max_input is None else min(room, max_input)


def scaled(tokens: int, factor: float) -> int:
    """A provider's figure in tokens of our own count, when the provider counts *factor* times what we count."""
    return int(tokens / factor)
