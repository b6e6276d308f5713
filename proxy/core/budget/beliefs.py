"""What traffic teaches of a window: what errors state, what refusals and silent cuts imply, and for how long it holds.

All figures are the provider's tokens, all times seconds since the epoch: replicas share beliefs.
"""

from __future__ import annotations

import msgspec
from msgspec import structs

from proxy.core.budget.calibration import HIGHEST

LEAST, MOST = 256, 100_000_000
"""Windows outside of this are misread: a smaller one would refuse every request, a larger one does not exist."""

STATED_SECONDS = 3_600.0
"""How long a stated limit holds. It costs one refused request to be told again, and servers are restarted larger."""

REPEATED_SECONDS = 3_600.0
"""A refusal that states nothing teaches when another one was this recent: one alone may be a provider's bad moment."""

STEP_DOWN = 0.9
"""What the believed window goes down to, of the weight that was refused without a figure."""

PROBE_SECONDS = 600.0
"""How long a window that was only worked out stays before more of it is tried."""

STEP_UP = 1.1
"""How much more is tried then: a wrong step costs one refused request."""

MOST_STEPS = 16
"""Steps up after which it is forgotten (4.6 times the figure, after nearly three hours without a refusal)."""

ALIKE = 0.1
"""Two silent cuts within this share of each other show a window; a server that leaves cached tokens out varies more."""

LEAST_CUT = 1_024
"""Tokens below which a report shows no window but a server that does not count: no chat is served in less."""

NEAR = 0.02
"""A cut this little under a power of two shows a window by itself: nobody sets another one by chance."""


class LearnedWindow(msgspec.Struct, frozen=True):
    """What is believed. ``stated`` came from an error, ``lowered`` was worked out; each with when.

    ``beside`` is what the server told of its window when an error contradicted it. ``refused`` is when it last refused
    without a figure, ``cut`` what it last reported for a prompt that it had cut.
    """

    stated: int | None = None
    stated_at: float = 0.0
    beside: int | None = None
    lowered: int | None = None
    lowered_at: float = 0.0
    refused: float = 0.0
    cut: int = 0


NOTHING = LearnedWindow()


def plausible(limit: int, weight: int | None, output: int) -> bool:
    """Whether a refusal of *weight* tokens of our count and *output* of answer can be about a window of *limit*."""
    if not LEAST <= limit <= MOST:
        return False
    return weight is None or limit <= HIGHEST * weight + output


def fresh(belief: LearnedWindow, now: float) -> int | None:
    """The stated limit while it holds."""
    return belief.stated if now - belief.stated_at < STATED_SECONDS else None


def level(belief: LearnedWindow, now: float) -> int | None:
    """The window that was worked out, a step larger for each while without a refusal; ``None`` when forgotten."""
    if belief.lowered is None:
        return None
    steps = int(max(0.0, now - belief.lowered_at) / PROBE_SECONDS)
    return None if steps > MOST_STEPS else int(belief.lowered * STEP_UP**steps)


def told(belief: LearnedWindow, limit: int, beside: int | None, now: float) -> LearnedWindow:
    """After an error that stated *limit*, while the server told of *beside* itself: the smallest that still holds."""
    still = fresh(belief, now) if belief.beside == beside else None
    if still is not None and still < limit:
        return belief
    return structs.replace(belief, stated=limit, stated_at=now, beside=beside)


def refused(belief: LearnedWindow, weight: int, now: float) -> LearnedWindow:
    """After *weight* tokens (answer included) were refused without a figure; repeated, a step less is believed."""
    repeated = belief.refused > 0 and now - belief.refused < REPEATED_SECONDS
    noted = structs.replace(belief, refused=now)
    if not repeated:
        return noted
    lower = max(LEAST, int(STEP_DOWN * weight))
    return lowered(noted, min(level(belief, now) or lower, lower), now)


def lowered(belief: LearnedWindow, window: int, now: float) -> LearnedWindow:
    """After traffic showed that *window* is about all there is."""
    return structs.replace(belief, lowered=max(LEAST, window), lowered_at=now)


def cut(belief: LearnedWindow, reported: int, now: float) -> LearnedWindow:
    """After a prompt was cut to *reported* tokens without a word.

    One such report may be a server that counts only what its cache did not hold, so it takes a second one like it, or
    a figure just under a power of two.
    """
    if reported < LEAST_CUT:
        return belief
    alike = abs(reported - belief.cut) <= ALIKE * belief.cut
    power = 1 << max(0, reported - 1).bit_length()
    shown = alike or reported >= (1 - NEAR) * power
    noted = structs.replace(belief, cut=reported)
    if not shown:
        return noted
    return lowered(noted, max(reported, belief.cut) if alike else reported, now)


def answered(belief: LearnedWindow, tokens: int, now: float) -> LearnedWindow:
    """After a prompt of *tokens* was answered: whatever is believed to be smaller is wrong."""
    if belief.stated is not None and tokens > belief.stated:
        belief = structs.replace(belief, stated=None)
    if belief.lowered is not None and tokens > belief.lowered:
        most = level(belief, now)
        # Where it was probed with success the search goes on from there.
        belief = structs.replace(belief, lowered=tokens if most else None, lowered_at=now)
    return belief
