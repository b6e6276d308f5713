"""The token budget, with its reserve and its marks for compactions; and what uses it, by role and by region.

All figures are tokens of our own count.

    0                quantised_fixed        low            soft          high      ceiling   window
    |  fixed part    |      history (system text and tools are the fixed part)        |  reserve  |

A compaction starts when the view is above ``high`` and goes down to ``low``; above ``soft`` its summary is prepared.
Marks are shares of the budget beside the fixed part. A buffer, a price cap or a history cap can only lower a level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import msgspec

from proxy.core.conversation import Injected, Item, Role
from proxy.core.tokens.counting import INJECTED

DEFAULT_RESERVE = 16_384
"""Tokens reserved for an answer if neither the request nor the model's own output limit states less."""

MOST_SUMMED = 8_192
"""Tokens of output in which any conversation can be summarised; our own summaries have no more, either."""

LEAST_LOWERED = 1_024
"""Tokens of output below which an answer is worth less than what is cut from the input instead."""

CHAT_SHARE = 0.2
"""The low mark of a chat: this share of the way from the low mark to the high one."""


class Marks(msgspec.Struct, frozen=True):
    """Shares of the budget beside the fixed part.

    A compaction starts above ``high`` and goes down to ``low``, or to ``chat_low`` in a conversation without tool
    results. Above ``soft`` the next summary is prepared.
    """

    high: float = 0.90
    soft: float = 0.60
    low: float = 0.40
    chat_low: float | None = None
    """None: a fifth of the way from ``low`` to ``high`` (decision 25), and more if rounds are small (decision 33)."""

    def __post_init__(self) -> None:
        if not 0 < self.low < self.soft < self.high <= 1:
            raise ValueError(f"marks must rise from low to soft to high within 0..1, not {self}")
        if self.chat_low is not None and not self.low <= self.chat_low <= self.soft:
            raise ValueError(f"the mark of chats must be between low and soft, not {self}")

    @property
    def of_chats(self) -> Marks:
        """The marks for a conversation without tool results."""
        low = self.chat_low
        if low is None:
            low = min(self.soft, self.low + CHAT_SHARE * (self.high - self.low))
        if low == self.low or low == self.soft:
            return self
        return Marks(self.high, self.soft, low, low)


class Shares(msgspec.Struct, frozen=True):
    """Caps of the parts of a block: ``pins`` as a share of the budget, the others of its room beside the fixed part.

    All parts together take at most ``block``. A model's ``summary`` takes its tokens from steps and digest.
    """

    pins: float = 0.20
    digest: float = 0.14
    steps: float = 0.06
    block: float = 0.40
    summary: float = 0.05


SCALED_BELOW = 65_536
"""Tokens beside the fixed part below which buffers shrink in proportion: people set them for large windows."""


class Buffers(msgspec.Struct, frozen=True):
    """Thresholds as distances from the window's end, in tokens; None if only the mark applies.

    ``reserve`` is for an answer. In addition ``warning`` tokens are free at the soft mark, ``auto_compact`` at the high
    mark, and ``blocking`` in every view. Of a mark and its buffer, the lower threshold applies.
    """

    reserve: int | None = None
    warning: int | None = None
    auto_compact: int | None = None
    blocking: int | None = None

    def __post_init__(self) -> None:
        rising = [level for level in (self.blocking, self.auto_compact, self.warning) if level is not None]
        if rising != sorted(set(rising)):
            raise ValueError(f"buffers must shrink from warning to auto_compact to blocking, not {self}")


NO_BUFFERS = Buffers()

ECONOMY_SHARE, ECONOMY_MOST, BELOW_TIER = 0.5, 120_000, 0.9
"""The price cap of an input: this share of the window, so many tokens, and this share of the provider's price tier.

Gemini's tier, for example: https://ai.google.dev/gemini-api/docs/pricing
"""

LEAST_ROOM = 0.25
"""Share of the budget beside the fixed part that the price cap leaves at least: large tools could exceed the cap."""


def economy_cap(window: int, price_tier: int | None) -> int:
    """Return the tokens of input above which a compaction costs less than none.

    Each token of an input above *price_tier* costs more.
    """
    cap = min(int(ECONOMY_SHARE * window), ECONOMY_MOST)
    if not price_tier:
        return cap
    return min(cap, int(BELOW_TIER * price_tier))


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The tokens that one request may use, by our own count.

    ``window`` is for input and output, ``reserve`` for the answer; ``fixed`` is the part that no compaction of
    the history changes (system, tools, response format). ``default_reserve`` is the reserve of a request that names no
    output figure; ``max_input`` limits the input however short the answer. Above ``price_cap`` the input becomes
    expensive; ``history_cap`` is the most that the history should take. Both only lower the marks: no request is
    refused for them. ``buffers`` are further thresholds.
    """

    window: int
    reserve: int
    fixed: int
    default_reserve: int = 0
    max_input: int | None = None
    price_cap: int | None = None
    buffers: Buffers = NO_BUFFERS
    history_cap: int | None = None
    # Computed once, when the budget is built:
    quantised_fixed: int = field(init=False, compare=False)
    """``fixed`` rounded up to a 64th of window or history cap, so that a clock in the system text moves no cut."""
    warning: int = field(init=False, compare=False)
    auto_compact: int = field(init=False, compare=False)
    """The levels at which the buffers of these names are left free; the window if there are no buffers."""
    input: int = field(init=False, compare=False)
    """Tokens that the input of this very request may use."""
    baseline: int = field(init=False, compare=False)
    """The input budget at past boundaries. It does not depend on this request's output figure, or cuts would move."""
    ceiling: int = field(init=False, compare=False)
    """Tokens that a view may take at any boundary: a request that names no output figure has to fit there.

    It applies to past boundaries, too: such a request may have been compacted there for its default reserve.
    """
    view_limit: int = field(init=False, compare=False)
    """Tokens that the view of this very request may take. It is above the ceiling for a short answer."""

    def __post_init__(self) -> None:
        step = max(1, min(self.window, self.history_cap or self.window) // 64)
        derive = partial(object.__setattr__, self)  # the class is frozen
        derive("quantised_fixed", -(-self.fixed // step) * step)
        input_, baseline = max(0, self.input_budget(self.reserve)), self.input_budget(self.window // 32)
        warning = auto_compact = blocking = self.window
        if self.buffers != NO_BUFFERS:
            buffers = self.buffers
            levels = map(self._level_with_free, (buffers.warning, buffers.auto_compact, buffers.blocking))
            warning, auto_compact, blocking = levels
        derive("warning", warning)
        derive("auto_compact", auto_compact)
        derive("input", input_)
        derive("baseline", baseline)
        derive("ceiling", min(baseline, self.window - self.default_reserve, blocking))
        derive("view_limit", min(baseline, input_, blocking))

    def input_budget(self, reserve: int) -> int:
        """Return the tokens of input beside an answer of *reserve*; below zero if the answer alone is too large."""
        # ``input_limit`` without its call: this runs several times for each request.
        left = self.window - reserve
        if self.max_input is None:
            return left
        return min(left, self.max_input)

    def output_beside(self, used: int) -> int:
        """Return the output figure that the window leaves beside *used* tokens of input; below zero if it has no room.

        A 64th of the window stays free, since the provider's count of the input may be a little higher than ours.
        """
        return self.window - used - self.window // 64

    def mark(self, share: float, budget: int) -> int:
        """Return the level above the fixed part at which *share* of the affordable *budget* is used."""
        if self.price_cap is not None or self.history_cap is not None:
            budget = self.affordable(budget)
        return self.quantised_fixed + int(share * max(0, budget - self.quantised_fixed))

    def affordable(self, budget: int) -> int:
        """Return *budget* lowered to the history cap and the price cap, which leaves ``LEAST_ROOM`` at least."""
        if self.history_cap is not None:
            budget = min(budget, self.quantised_fixed + self.history_cap)
        if self.price_cap is None:
            return budget
        least = self.quantised_fixed + int(LEAST_ROOM * max(0, budget - self.quantised_fixed))
        return min(budget, max(self.price_cap, least))

    def high(self, marks: Marks, budget: int) -> int:
        """Return the level above which a compaction starts: the smaller one of mark and buffer."""
        return min(self.mark(marks.high, budget), self.auto_compact)

    def soft(self, marks: Marks, budget: int) -> int:
        """Return the level above which a summary is prepared and a warning given: the smaller of mark and buffer."""
        return min(self._below_high(marks, marks.soft, budget), self.warning)

    def low(self, marks: Marks, budget: int) -> int:
        """Return the level that a compaction goes down to. If a buffer lowers the high level, it falls with it."""
        return self._below_high(marks, marks.low, budget)

    def quiet(self, marks: Marks, budget: int) -> int:
        """Return the level that a requested compaction goes down to; no conversation is compacted below it."""
        return self._below_high(marks, marks.low / 2, budget)

    def _below_high(self, marks: Marks, share: float, budget: int) -> int:
        """Return the level of *share*, lowered with the high level if a buffer lowers that."""
        high = self.high(marks, budget)
        return min(
            self.mark(share, budget),
            self.quantised_fixed + int(share / marks.high * max(0, high - self.quantised_fixed)),
        )

    def _level_with_free(self, buffer: int | None) -> int:
        """Return the level that leaves *buffer* and the buffers' reserve free; the window if neither is set."""
        reserve = self.buffers.reserve
        if buffer is None and reserve is None:
            return self.window
        scale = min(1.0, max(0, self.window - self.quantised_fixed) / SCALED_BELOW)
        return self.window - int(scale * ((reserve or 0) + (buffer or 0)))


token_budget = lru_cache(1_024)(TokenBudget)
"""Returns a budget, cached: all requests of a conversation need an equal one."""


def answer_reserve(requested: int | None, max_output: int | None, window: int) -> int:
    """Return the tokens reserved for the answer: the request's figure as it is, else a default by model and window."""
    if requested is not None and requested > 0:
        return requested
    return min(max_output or DEFAULT_RESERVE, window // 8, DEFAULT_RESERVE)


def smallest_lowered(window: int) -> int:
    """Return the least output figure that a request's own one is lowered to before a part of its input is lost."""
    return min(LEAST_LOWERED, window // 4)


def summary_output(window: int, least: int) -> int:
    """Return the tokens of output in which a conversation can be summarised, however many were requested.

    They are at least *least*.
    """
    return max(least, min(MOST_SUMMED, window // 8))


def input_limit(window: int, reserve: int, max_input: int | None) -> int:
    """Return the tokens of input that a *window* takes beside an answer of *reserve*, at most *max_input*.

    The figure is below zero if the answer alone is too large.
    """
    left = window - reserve
    if max_input is None:
        return left
    return min(left, max_input)


def rounded_down(tokens: int) -> int:
    """Return the largest power of two, or 1.5 times one, not above *tokens*: small changes do not change the result."""
    if tokens < 1:
        return min(tokens, 1)
    power = 1 << (tokens.bit_length() - 1)
    larger = power + power // 2
    if larger <= tokens:
        return larger
    return power


def to_our_tokens(tokens: int, factor: float) -> int:
    """Return a provider's figure in tokens of our own count, if the provider counts *factor* times our count."""
    return int(tokens / factor)


# What uses the budget.

REGIONS = ("system", "tools", "format", *INJECTED, "summary", "user", "assistant", "tool", "reserve")
"""Every region; no two of them overlap.

``system``: system items and the members ``system`` and ``instructions``. ``format``: the response format and the frame
of the answer. ``summary``: the block.
"""


class RoleTotals(msgspec.Struct, frozen=True):
    """Tokens of the first ``count`` items by role; ``media`` are those of images, sound and files.

    ``injected`` are those of injected texts by role and region; they are part of the role's.
    """

    count: int = 0
    system: int = 0
    user: int = 0
    assistant: int = 0
    tool: int = 0
    media: int = 0
    injected: Mapping[tuple[Role, str], int] = {}

    @property
    def history(self) -> int:
        """Tokens of all items but system ones."""
        return self.user + self.assistant + self.tool


NOTHING = RoleTotals()


def add_up(items: Sequence[Item], prefix: RoleTotals = NOTHING) -> RoleTotals:
    """Return the totals of *items*, continued from those of a prefix of them; costs O(new)."""
    roles: dict[Role, int] = {"system": prefix.system, "user": prefix.user, "assistant": prefix.assistant}
    roles["tool"], media, injected = prefix.tool, prefix.media, prefix.injected
    for item in items[prefix.count :]:
        roles[item.role] += item.tokens
        media += item.media
        if item.injected:
            injected = _with_parts(injected, item)
    return RoleTotals(len(items), roles["system"], roles["user"], roles["assistant"], roles["tool"], media, injected)


def _with_parts(injected: Mapping[tuple[Role, str], int], item: Item) -> Mapping[tuple[Role, str], int]:
    """Return *injected* with the injected parts of *item*."""
    sums = dict(injected)
    for part in item.injected:
        key = (item.role, part.region)
        sums[key] = sums.get(key, 0) + part.tokens
    return sums


class Members(msgspec.Struct, frozen=True):
    """Tokens of the members beside the items; ``injected`` are the injected parts of ``system``."""

    tools: int = 0
    system: int = 0
    injected: tuple[Injected, ...] = ()


def regions(items: RoleTotals, members: Members, *, fixed: int, summary: int, reserve: int) -> dict[str, int]:
    """Return the tokens of a view with *items* by region; empty regions are left out.

    *fixed* are the tokens of all but the history: *members*, system items, the frame of the answer. Without the
    reserve, the regions add up to the view's tokens.
    """
    tokens = {
        "system": items.system + members.system,
        "tools": members.tools,
        "format": fixed - items.system - members.system - members.tools,
        **dict.fromkeys(INJECTED, 0),
        "summary": summary,
        "user": items.user,
        "assistant": items.assistant,
        "tool": items.tool,
        "reserve": reserve,
    }
    for (role, region), size in items.injected.items():
        tokens[role] -= size
        tokens[region] += size
    for part in members.injected:
        tokens["system"] -= part.tokens
        tokens[part.region] += part.tokens
    return {name: count for name, count in tokens.items() if count > 0}


def to_provider_tokens(regions: Mapping[str, int], factor: float) -> dict[str, int]:
    """Return *regions* in the tokens of a provider that counts *factor* times our count."""
    if factor == 1.0:
        return dict(regions)
    return {name: int(tokens * factor) for name, tokens in regions.items()}
