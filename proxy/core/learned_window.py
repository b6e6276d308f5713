"""What traffic teaches of a route: its window, and how the provider's count relates to ours.

The window is learned from the limits that errors state, from refusals, and from prompts that were cut silently. The
ratio of the two counts starts from the model family's prior, until the ``usage`` of answers or the figures of
overflows say better. Windows are in the provider's tokens, times in seconds since the epoch: replicas share both.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import msgspec
from msgspec import structs

STEP = 0.05
"""Factors come in steps, so that a count that is a little off moves nothing."""

TOLERANCE = 0.02
"""What a ratio may be above a step without taking the next one: exact vocabularies differ by a few tokens of frame."""

LOWEST, HIGHEST = 0.5, 4.0
"""No real vocabulary is further from ours; a report beyond is a lie, or not about the prompt."""

FASTEST_RISE = 2.0
"""The most one report may raise the factor by: quick, but no single lie makes every view tiny."""

PATIENCE = 5
"""Reports in a row that must be lower before the factor falls by a step."""

SMALLEST = 256
"""Tokens from which a count says something: below, the provider's frame weighs too much."""

PRICIEST = 16.0
"""How many times our count a prompt with media may be reported as: images are where providers differ most."""

TRUNCATED = 0.6
"""A report under this share of what the factor expects means that the provider cut the prompt without a word."""

TRUNCATED_FROM = 2048
"""Tokens from which a report that small can only be a cut."""

OWN = ("gpt-*", "chatgpt-*", "o1*", "o3*", "o4*", "text-embedding-*")
"""Models whose own vocabulary we count with."""

PRIORS: tuple[tuple[str, float], ...] = (
    ("claude-3*", 1.2),
    ("claude*", 1.5),
    ("gemini*", 1.05),
    ("*gemma*", 1.05),
    ("*llama-2*", 1.3),
    ("*llama*", 1.05),
    ("*mistral*", 1.2),
    ("*mixtral*", 1.3),
    ("*phi*", 1.15),
    ("*deepseek*", 1.1),
    ("*qwen*", 1.1),
    ("*glm*", 1.1),
    ("*kimi*", 1.1),
    ("*minimax*", 1.1),
    ("*grok*", 1.1),
    ("*command*", 1.15),
)
"""Tokens of a family's own vocabulary per token of o200k_base on mixed agent text, rounded up; everything else 1."""


class Calibration(msgspec.Struct, frozen=True):
    """What was learned. ``factor``: the provider's tokens per token of ours, in steps; ``ratio``: the last one seen.

    ``lower`` counts reports in a row that were lower than the factor by more than a step.
    """

    factor: float
    ratio: float
    lower: int = 0


def prior(model: str, *, exact: bool = False) -> Calibration:
    """Where to begin: 1 for a model whose own vocabulary we count with (or *exact*), else its family's prior."""
    name = model.rpartition("/")[2].lower()
    own = exact or any(fnmatchcase(name, family) for family in OWN)
    factor = 1.0 if own else next((value for family, value in PRIORS if fnmatchcase(name, family)), 1.0)
    return Calibration(factor, factor)


def stepped(ratio: float) -> float:
    """*ratio* up to the next step, unless it is within the tolerance of the one below."""
    return round(-(-(ratio - TOLERANCE) // STEP) * STEP, 4)


def is_truncated(calibration: Calibration, counted: int, reported: int) -> bool:
    """Whether *reported* prompt tokens for a prompt of *counted* of ours can only mean that some were cut away."""
    return counted >= TRUNCATED_FROM and reported < TRUNCATED * calibration.ratio * counted


def is_credible(counted: int, reported: int, *, plain: bool) -> bool:
    """Whether a prompt of *counted* tokens of ours can have been *reported* tokens; *plain*: it holds text only."""
    return 0 < reported <= (HIGHEST if plain else PRICIEST) * counted + SMALLEST


def learn(calibration: Calibration, counted: int, reported: int) -> Calibration:
    """What is known after a prompt of *counted* tokens of ours was reported as *reported* of the provider's.

    Quick to rise and slow to fall: counting too little costs an overflow, counting too much a little room.
    """
    if counted < SMALLEST or is_truncated(calibration, counted, reported):
        return calibration
    ratio = reported / counted
    if not LOWEST <= ratio <= HIGHEST:
        return calibration
    wanted = stepped(ratio)
    if wanted > calibration.factor:
        return Calibration(min(wanted, calibration.factor * FASTEST_RISE), ratio)
    if wanted == calibration.factor:
        return Calibration(calibration.factor, ratio)
    lower = calibration.lower + 1
    if lower < PATIENCE:
        return Calibration(calibration.factor, ratio, lower)
    return Calibration(round(calibration.factor - STEP, 4), ratio)


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
