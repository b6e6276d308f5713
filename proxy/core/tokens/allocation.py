"""Soft shares of the window by part, and the tokens by which a view exceeds them.

All figures are tokens of our own count.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from proxy.core.tokens.counting import INJECTED

TOLERANCE = 1e-9
"""The rounding error that a sum of decimal shares may have."""


class Allocation(msgspec.Struct, frozen=True):
    """Soft shares of the window, together at most one; tokens that a part does not use are lent to the others.

    It is optional and only chooses between views that would fit without it: how deep a compaction goes, how large a
    block may be, whether a large tools array is shrunk before rounds are folded. No request is refused for it, and a
    compaction that was made stays as it is.
    """

    system: float = 0.0
    tools: float = 0.0
    memory: float = 0.0
    skills: float = 0.0
    knowledge: float = 0.0
    related: float = 0.0
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
        return {part: getattr(self, part) for part in PARTS}

    def tokens(self, part: str, window: int) -> int:
        """Return the own share of *part*, in whole tokens."""
        return int(getattr(self, part) * window + TOLERANCE)

    def spare(self, window: int) -> int:
        """Return the tokens that are no part's share."""
        return window - sum(self.tokens(part, window) for part in PARTS)

    def for_tools(self, window: int, others: int) -> int:
        """Return the tokens for tools if the history lends nothing, beside *others* (system, injected, format)."""
        lent = sum(self.tokens(part, window) for part in ("system", *INJECTED)) - others
        return self.tokens("tools", window) + max(0, lent) + self.spare(window)

    def for_block(self, window: int, fixed: int) -> int:
        """Return the tokens for the block at a compaction, beside *fixed* tokens that no compaction changes."""
        return self.tokens("summary", window) + self._lent(window, fixed)

    def for_history(self, window: int, fixed: int) -> int:
        """Return the tokens of messages that a compaction may leave, with the block; the answer lends nothing."""
        own = sum(self.tokens(part, window) for part in ("summary", "recent", "older"))
        return own + self._lent(window, fixed)

    def _lent(self, window: int, fixed: int) -> int:
        """Return the tokens that the fixed parts do not use and the spare ones, which the history may use."""
        own = sum(self.tokens(part, window) for part in ("system", "tools", *INJECTED))
        return max(0, own - fixed) + self.spare(window)


PARTS = Allocation.__struct_fields__


def used(regions: Mapping[str, int], allocation: Allocation, window: int) -> dict[str, int]:
    """Return the tokens by part of a view whose tokens by region are *regions*.

    The newest messages up to their share are ``recent``, the others ``older``.
    """
    history = sum(regions.get(name, 0) for name in ("user", "assistant", "tool"))
    recent = min(history, allocation.tokens("recent", window))
    return {
        "system": regions.get("system", 0) + regions.get("format", 0),
        "tools": regions.get("tools", 0),
        **{name: regions.get(name, 0) for name in INJECTED},
        "summary": regions.get("summary", 0),
        "recent": recent,
        "older": history - recent,
        "reserve": regions.get("reserve", 0),
    }


def borrowed(regions: Mapping[str, int], allocation: Allocation, window: int) -> dict[str, int]:
    """Return by how many tokens each part of a view exceeds its own share; parts that do not are left out."""
    parts = used(regions, allocation, window)
    excess = {part: tokens - allocation.tokens(part, window) for part, tokens in parts.items()}
    return {part: tokens for part, tokens in excess.items() if tokens > 0}
