"""How a provider's count relates to ours: one factor per route and tenant, learned from what it reports.

The factor is the shipped prior of the model's family until an answer's ``usage`` or an overflow's figures say better.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import msgspec

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
