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
"""Factors come in steps, so that a small change of the ratio moves nothing."""

TOLERANCE = 0.02
"""How far a ratio may be above a step without taking the next one: exact vocabularies differ by a few frame tokens."""

LOWEST, HIGHEST = 0.5, 4.0
"""No real vocabulary is further from ours; a report beyond is a lie, or not about the prompt."""

FASTEST_RISE = 2.0
"""The most that one report may raise the factor by: quick, but no single lie makes every view tiny."""

PATIENCE = 5
"""Reports in a row that must be lower before the factor falls by a step."""

SMALLEST = 256
"""Tokens from which a count is used: below, the provider's frame weighs too much."""

PRICIEST = 16.0
"""How many times our count a prompt with media may be reported as: images are where providers differ most."""

TRUNCATED = 0.6
"""A report below this share of what the factor expects means that the provider cut the prompt silently."""

TRUNCATED_FROM = 2048
"""Tokens from which a report that small can only be a cut."""

OWN = ("gpt-*", "chatgpt-*", "o1*", "o3*", "o4*", "text-embedding-*")
"""Models whose own vocabulary we count with (https://github.com/openai/tiktoken/blob/main/tiktoken/model.py)."""

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
"""Tokens of a family's own vocabulary per token of o200k_base on mixed agent text, rounded up; 1 for other models."""


class Calibration(msgspec.Struct, frozen=True):
    """The learned ratio of the two counts.

    ``factor`` is the provider's tokens per token of ours, in steps; ``ratio`` the last one observed. ``lower`` counts
    the reports in a row that were lower than the factor by more than a step.
    """

    factor: float
    ratio: float
    lower: int = 0


def prior_calibration(model: str, *, configured_encoding: bool = False) -> Calibration:
    """Return the calibration to begin with.

    Its factor is 1 for a model whose own vocabulary we count with, or with a *configured_encoding*; else its family's.
    """
    name = model.rpartition("/")[2].lower()
    if configured_encoding or any(fnmatchcase(name, family) for family in OWN):
        return Calibration(1.0, 1.0)
    factor = next((value for family, value in PRIORS if fnmatchcase(name, family)), 1.0)
    return Calibration(factor, factor)


def rounded_up(ratio: float) -> float:
    """Return the step above *ratio*, or the one below if it is within the tolerance."""
    return round(-(-(ratio - TOLERANCE) // STEP) * STEP, 4)


def is_truncated(calibration: Calibration, counted: int, reported: int) -> bool:
    """Return True if *reported* tokens for a prompt of *counted* tokens of ours can only mean that some were cut."""
    return counted >= TRUNCATED_FROM and reported < TRUNCATED * calibration.ratio * counted


def is_credible(counted: int, reported: int, *, plain: bool) -> bool:
    """Return True if a prompt of *counted* tokens of ours can have *reported* tokens; *plain*: it holds only text."""
    return 0 < reported <= (HIGHEST if plain else PRICIEST) * counted + SMALLEST


def with_report(calibration: Calibration, counted: int, reported: int) -> Calibration:
    """Return the calibration after a prompt of *counted* tokens of ours was *reported* in the provider's.

    The factor rises quickly and falls slowly: counting too little costs an overflow, counting too much a little room.
    """
    if counted < SMALLEST or is_truncated(calibration, counted, reported):
        return calibration
    ratio = reported / counted
    if not LOWEST <= ratio <= HIGHEST:
        return calibration
    wanted = rounded_up(ratio)
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
"""How long a stated limit holds. Learning it again costs one refused request, and servers restart with larger ones."""

REPEATED_SECONDS = 3_600.0
"""A refusal without a figure teaches only if another one was this recent: one alone may be a provider's bad moment."""

STEP_DOWN = 0.9
"""The share of a weight that was refused without a figure to which the inferred window goes down."""

PROBE_SECONDS = 600.0
"""How long an inferred window holds before more of it is tried."""

STEP_UP = 1.1
"""How much more is tried then: a wrong step costs one refused request."""

MOST_STEPS = 16
"""Steps up after which it is forgotten (4.6 times the figure, after nearly three hours without a refusal)."""

ALIKE = 0.1
"""Two silent cuts within this share of each other show a window; a server that leaves cached tokens out varies more."""

LEAST_CUT = 1_024
"""Tokens below which a report shows no window but a server that does not count: no chat is served in less."""

NEAR = 0.02
"""A cut this little below a power of two shows a window by itself: no other window is there by chance."""


class LearnedWindow(msgspec.Struct, frozen=True):
    """What traffic taught of a window. The names of the stored fields are those of earlier versions.

    ``stated`` came from an error, ``inferred`` from refusals and silent cuts, each with when. ``reported`` is the
    window that the server reported when an error contradicted it. ``refused_at`` is when it last refused without a
    figure, ``cut_to`` what it last reported for a prompt that it had cut.
    """

    stated: int | None = None
    stated_at: float = 0.0
    reported: int | None = msgspec.field(default=None, name="beside")
    inferred: int | None = msgspec.field(default=None, name="lowered")
    inferred_at: float = msgspec.field(default=0.0, name="lowered_at")
    refused_at: float = msgspec.field(default=0.0, name="refused")
    cut_to: int = msgspec.field(default=0, name="cut")


NOTHING = LearnedWindow()


def is_plausible(limit: int, weight: int | None, output: int) -> bool:
    """Return True if a refusal of *weight* tokens of our count and *output* of answer can be about a *limit*."""
    if not LEAST <= limit <= MOST:
        return False
    return weight is None or limit <= HIGHEST * weight + output


def stated_limit(learned: LearnedWindow, now: float) -> int | None:
    """Return the stated limit while it holds, else None."""
    return learned.stated if now - learned.stated_at < STATED_SECONDS else None


def inferred_window(learned: LearnedWindow, now: float) -> int | None:
    """Return the inferred window, a step larger for each while without a refusal; None once it is forgotten."""
    if learned.inferred is None:
        return None
    steps = int(max(0.0, now - learned.inferred_at) / PROBE_SECONDS)
    return None if steps > MOST_STEPS else int(learned.inferred * STEP_UP**steps)


def with_stated_limit(learned: LearnedWindow, limit: int, reported: int | None, now: float) -> LearnedWindow:
    """Return *learned* after an error stated *limit* while the server *reported* a window: the smallest one holds."""
    still = stated_limit(learned, now) if learned.reported == reported else None
    if still is not None and still < limit:
        return learned
    return structs.replace(learned, stated=limit, stated_at=now, reported=reported)


def with_refusal(learned: LearnedWindow, weight: int, now: float) -> LearnedWindow:
    """Return *learned* after *weight* tokens, answer included, were refused without a figure.

    A repeated refusal lowers the inferred window by a step.
    """
    repeated = learned.refused_at > 0 and now - learned.refused_at < REPEATED_SECONDS
    noted = structs.replace(learned, refused_at=now)
    if not repeated:
        return noted
    lower = max(LEAST, int(STEP_DOWN * weight))
    return with_inferred_window(noted, min(inferred_window(learned, now) or lower, lower), now)


def with_inferred_window(learned: LearnedWindow, window: int, now: float) -> LearnedWindow:
    """Return *learned* after traffic showed that *window* is about all there is."""
    return structs.replace(learned, inferred=max(LEAST, window), inferred_at=now)


def with_silent_cut(learned: LearnedWindow, reported: int, now: float) -> LearnedWindow:
    """Return *learned* after a prompt was silently cut to *reported* tokens.

    One such report may come from a server that counts only what its cache did not hold, so it takes a second one like
    it, or a figure just below a power of two.
    """
    if reported < LEAST_CUT:
        return learned
    alike = abs(reported - learned.cut_to) <= ALIKE * learned.cut_to
    power = 1 << max(0, reported - 1).bit_length()
    shown = alike or reported >= (1 - NEAR) * power
    noted = structs.replace(learned, cut_to=reported)
    if not shown:
        return noted
    return with_inferred_window(noted, max(reported, learned.cut_to) if alike else reported, now)


def with_answer(learned: LearnedWindow, tokens: int, now: float) -> LearnedWindow:
    """Return *learned* after a prompt of *tokens* was answered: every smaller figure is wrong."""
    if learned.stated is not None and tokens > learned.stated:
        learned = structs.replace(learned, stated=None)
    if learned.inferred is not None and tokens > learned.inferred:
        most = inferred_window(learned, now)
        # A window that was probed with success is searched for from there.
        learned = structs.replace(learned, inferred=tokens if most else None, inferred_at=now)
    return learned
