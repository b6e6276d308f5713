"""Where the tokens of a view are: by region, so that everybody sees what fills a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.core.conversation.items import Item, Role

REGIONS = ("system", "tools", "format", "memory", "summary", "user", "assistant", "tool", "reserve")
"""Every region: no two of them overlap. ``system`` are system items and the members ``system`` and ``instructions``,
``memory`` what an agent injected into those or into a user item, ``format`` the response format and the frame of the
answer, ``summary`` what stands for folded rounds."""

HISTORY: tuple[Role, ...] = ("user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Totals:
    """Tokens of the first ``count`` items by role; ``remembered`` are those of injected memories, ``media`` of images.

    ``remembered`` are part of a role's tokens, the first of them of system items, the second of users'.
    """

    count: int = 0
    system: int = 0
    user: int = 0
    assistant: int = 0
    tool: int = 0
    media: int = 0
    remembered: tuple[int, int] = (0, 0)

    @property
    def history(self) -> int:
        """Tokens of all items that are no system items."""
        return self.user + self.assistant + self.tool


NOTHING = Totals()


def add_up(items: Sequence[Item], known: Totals = NOTHING) -> Totals:
    """The totals of *items*, continued from those of a prefix of them; costs O(new)."""
    roles: dict[Role, int] = {"system": known.system, "user": known.user, "assistant": known.assistant}
    roles["tool"], media = known.tool, known.media
    system, user = known.remembered
    for item in items[known.count :]:
        roles[item.role] += item.tokens
        media += item.media
        if item.memory:
            system, user = (system + item.memory, user) if item.role == "system" else (system, user + item.memory)
    return Totals(len(items), roles["system"], roles["user"], roles["assistant"], roles["tool"], media, (system, user))


@dataclass(frozen=True, slots=True)
class Members:
    """Tokens of the members beside the items: ``system`` those of system text, of which ``remembered`` are memories."""

    tools: int = 0
    system: int = 0
    remembered: int = 0


def regions(kept: Totals, members: Members, *, fixed: int, summary: int, reserve: int) -> dict[str, int]:
    """Tokens by region of a view that keeps *kept*; *fixed* is all beside the history, *members* and system included.

    Without the reserve they add up to the view's tokens. Regions that are empty are left out.
    """
    system, user = kept.remembered
    system += members.remembered
    found = {
        "system": kept.system + members.system - system,
        "tools": members.tools,
        "format": fixed - kept.system - members.system - members.tools,
        "memory": system + user,
        "summary": summary,
        "user": kept.user - user,
        "assistant": kept.assistant,
        "tool": kept.tool,
        "reserve": reserve,
    }
    return {name: tokens for name, tokens in found.items() if tokens > 0}


def scaled_up(found: Mapping[str, int], factor: float) -> dict[str, int]:
    """The regions *found* in tokens of a provider that counts *factor* times what we count."""
    return dict(found) if factor == 1.0 else {name: int(tokens * factor) for name, tokens in found.items()}
