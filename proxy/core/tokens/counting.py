"""Counts texts, and sums up tokens by role and by region."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from proxy.core.conversation import Count, Injected, Item, Role
from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.tokens.injected import INJECTED, NO_RULES, InjectedRules, injected_parts
from proxy.core.tokens.media import DEFAULT_PRICES, Prices

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


# Counting a text.

SHORT, MOST_SHORT = 32, 40_000
"""Characters of the longest text (such as a tool's name) whose count a meter remembers, and how many it remembers."""


_PARAGRAPH = lazy_pattern(r"\n\n(?=[^\s/])")
"""The end of a paragraph, after which a token begins: no vocabulary joins a line's end with what follows it, but for
white space and slashes. See the patterns in https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
"""


def long_paragraphs(text: str, least: int) -> list[str]:
    """Return *text* in pieces whose tokens add up: a paragraph of *least* characters alone, those between together."""
    pieces: list[str] = []
    start = at = 0
    borders = [border.end() for border in _PARAGRAPH.finditer(text)]
    for end in (*borders, len(text)):
        if end - at >= least:
            pieces += [text[start:at], text[at:end]]
            start = end
        at = end
    return [piece for piece in (*pieces, text[start:]) if piece]


class Meter(msgspec.Struct, frozen=True, eq=False):
    """A function that counts text, together with the prices of media and the marks of injected texts.

    ``text`` counts any text; ``again`` counts one of ``again_from`` characters or more, which later requests repeat: by
    itself, or as a paragraph of another one. ``short`` are the tokens of short texts that were counted.
    """

    text: Count
    prices: Prices
    injected: InjectedRules = NO_RULES
    again: Count | None = None
    again_from: int = 0
    short: dict[str, int] = {}

    def __repr__(self) -> str:
        """Leave out the texts."""
        return f"Meter({self.prices.name})"

    def __call__(self, text: str) -> int:
        """Return the tokens of *text*."""
        if len(text) > SHORT:
            if self.again is None or len(text) < self.again_from:
                return self.text(text)
            total = 0
            for piece in long_paragraphs(text, self.again_from):
                count = self.text
                if len(piece) >= self.again_from:
                    count = self.again
                total += count(piece)
            return total
        size = self.short.get(text)
        if size is None:
            size = self.text(text)
            if len(self.short) < MOST_SHORT:
                self.short[text] = size
        return size


def total_tokens(texts: Iterable[str], count: Count) -> int:
    """Return the tokens of all *texts*; a meter is not called for those that it remembers."""
    if not isinstance(count, Meter):
        return sum(map(count, texts))
    total, remembered = 0, count.short
    for text in texts:
        size = None
        if len(text) <= SHORT:  # a longer one is not there, and its hash would take time
            size = remembered.get(text)
        elif len(text) < count.again_from:
            size = count.text(text)
        if size is None:
            size = count(text)
        total += size
    return total


def unremembered(count: Count) -> Count:
    """Return *count* without the memory of a meter: for lines and names that are counted once."""
    if isinstance(count, Meter):
        return count.text
    return count


def prices_of(count: Count) -> Prices:
    """Return the prices of media that belong to *count*: the default ones unless it is a ``Meter``."""
    if isinstance(count, Meter):
        return count.prices
    return DEFAULT_PRICES


def injected_in(text: str, count: Count) -> tuple[Injected, ...]:
    """Return the injected parts of *text* by the rules that belong to *count*: none unless it is a ``Meter``."""
    if not isinstance(count, Meter):
        return ()
    if count.injected.may_match(text):
        return injected_parts(text, count.injected, count)
    return ()
