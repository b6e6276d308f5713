"""A compaction as a plain value, what a request asks of the schedule, and the rules it goes by."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.core.compression.mild import Mild
from proxy.core.compression.swap import Placeholder
from proxy.core.compression.truncate import Truncate
from proxy.core.tokens.budget import Allocation, Marks, Shares


@dataclass(frozen=True, slots=True)
class Compaction:
    """A compaction at ``place`` (a length of the conversation); items before ``cut`` are folded.

    ``anchors`` are the folded user items that stay verbatim all the same: the task and what was then the newest one.

    ``block`` are the tokens charged for what stands for them, of which ``text`` are meant for digest and steps;
    ``swaps`` are the kept items whose results gave way to a line, ``trims`` and ``clips`` the tokens that truncated and
    clipped items may keep, by index; ``after`` is the weight of the view at the event without the fixed part.
    ``stages`` names the rungs that were taken.
    """

    place: int
    cut: int
    block: int
    text: int = 0
    anchors: tuple[int, ...] = ()
    clips: tuple[tuple[int, int], ...] = ()
    after: int = 0
    stages: tuple[str, ...] = ()
    swaps: tuple[Placeholder, ...] = ()
    trims: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """What the present request asks of the schedule beside its figures.

    ``force`` compacts now whatever the pressure; ``limit`` replaces the budget by something smaller (an overflow told).
    ``peek`` asks what would be sent, and makes it no fact. ``wait``: the caller asked for it and waits for a summary;
    ``share`` is the share of the room it named, ``None`` for half of the low mark.
    """

    force: bool = False
    limit: int | None = None
    peek: bool = False
    wait: bool = False
    share: float | None = None


@dataclass(frozen=True, slots=True)
class EnabledStages:
    """Which rungs of the ladder may be taken."""

    fold: bool = True
    drop: bool = True
    clip: bool = True
    tools: bool = True


@dataclass(frozen=True, slots=True)
class Rules:
    """What the schedule goes by beside a request's own figures: the marks, the caps of a block, the rungs.

    ``allocation``, if there is one, makes an event go deeper than the low mark and its block smaller than the caps.
    """

    marks: Marks
    shares: Shares
    rungs: EnabledStages
    allocation: Allocation | None = None
    mild: Mild = field(default_factory=Mild)
    truncate: Truncate | None = field(default_factory=Truncate)
