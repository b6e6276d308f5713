"""An allocation of the window over its uses: soft shares, of which those not used are lent to the others.

It is optional, and only ever chooses between views that would fit without it: how deep an event goes, how large a
block may be, whether a large array of tools is shrunk before messages are folded. It refuses nothing, and what was
decided for a conversation stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

TOLERANCE = 1e-9
"""By how much a sum of decimal shares may miss one."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Shares of the window, together at most one. What is left over is lent to whoever needs it."""

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
