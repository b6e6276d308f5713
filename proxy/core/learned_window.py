"""Learns from traffic a route's window, and the ratio between the provider's count of tokens and ours.

The ratio (``Calibration``) starts at a figure for the model's family; the ``usage`` of answers and the figures in
overflow errors correct it. The window (``LearnedWindow``) has two figures, and each event changes them like this:

    event                                    stated                     inferred
    an error states a limit                  that limit                 -
    a refusal without a figure               -                          - (it may have been a short disturbance)
    a second one within REPEATED_SECONDS     -                          STEP_DOWN of what was refused
    two similar silent cuts, or one just     -                          what the provider counted
    below a power of two
    PROBE_SECONDS without a refusal          -                          STEP_UP of it, to probe for a larger window
    a larger prompt was answered             forgotten                  that prompt's size, or forgotten if too old
    STATED_SECONDS, or MOST_STEPS probes     forgotten                  forgotten

Windows are in the provider's tokens, times in seconds since the epoch: replicas share both.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import msgspec
from msgspec import structs

STEP = 0.05
"""The step between factors. The factor decides where a compaction cuts, so it must not follow every small change."""

TOLERANCE = 0.02
"""How far a ratio may exceed a factor before the next step is used: frames around messages differ by a few tokens."""

LOWEST_RATIO, HIGHEST_RATIO = 0.5, 4.0
"""Ratios of real vocabularies are between these; a report outside is wrong, or not about the prompt."""

FASTEST_RISE = 2.0
"""The largest multiple by which one report raises the factor, so that a wrong report does not make views tiny."""

PATIENCE = 5
"""Lower reports in a row after which the factor falls by a step."""

SMALLEST_SAMPLE = 256
"""Tokens from which a count is used; of a smaller one the provider's frame is too large a part."""

HIGHEST_WITH_MEDIA = 16.0
"""The largest ratio of a prompt with media: providers' prices of images differ most."""

TRUNCATED_BELOW = 0.6
"""A report below this share of the expected tokens means that the provider silently cut the prompt.

Ollama does so: https://docs.ollama.com/context-length
"""

TRUNCATED_FROM = 2048
"""Tokens of our count from which so small a report can only be a cut: Ollama's smallest default window was 2,048."""

OWN_VOCABULARY = ("gpt-*", "chatgpt-*", "o1*", "o3*", "o4*", "text-embedding-*")
"""Models that we count with their own vocabulary (https://github.com/openai/tiktoken/blob/main/tiktoken/model.py)."""

FAMILY_RATIOS: tuple[tuple[str, float], ...] = (
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
"""Tokens of a family's own vocabulary per token of o200k_base, rounded up; 1 for other models. The first match holds.

Measured on mixed agent text (code, JSON, English). They only serve until the first answers report their usage.
"""


class Calibration(msgspec.Struct, frozen=True):
    """The learned ratio of the two counts.

    ``factor`` are the provider's tokens per token of ours, in steps; ``ratio`` is the last one observed. ``lower`` is
    the number of reports in a row that were lower than the factor by more than a step.
    """

    factor: float
    ratio: float
    lower: int = 0


def prior_calibration(model: str, *, configured_encoding: bool) -> Calibration:
    """Return the calibration before the first report: the factor of the model's family.

    It is 1 for a model that we count with its own vocabulary or with a *configured_encoding*.
    """
    name = model.rpartition("/")[2].lower()
    if configured_encoding or any(fnmatchcase(name, family) for family in OWN_VOCABULARY):
        return Calibration(1.0, 1.0)
    factor = next((value for family, value in FAMILY_RATIOS if fnmatchcase(name, family)), 1.0)
    return Calibration(factor, factor)


def rounded_up(ratio: float) -> float:
    """Return the step above *ratio*, or the one below if it is within the tolerance."""
    return round(-(-(ratio - TOLERANCE) // STEP) * STEP, 4)


def is_truncated(calibration: Calibration, counted: int, reported: int) -> bool:
    """Return True if only a cut explains *reported* tokens for a prompt of *counted* tokens of ours."""
    return counted >= TRUNCATED_FROM and reported < TRUNCATED_BELOW * calibration.ratio * counted


def is_credible(counted: int, reported: int, *, plain: bool) -> bool:
    """Return True if a prompt of *counted* tokens of ours can have *reported* tokens; a *plain* one is all text."""
    highest = HIGHEST_WITH_MEDIA
    if plain:
        highest = HIGHEST_RATIO
    return 0 < reported <= highest * counted + SMALLEST_SAMPLE


def with_report(calibration: Calibration, counted: int, reported: int) -> Calibration:
    """Return the calibration after a prompt of *counted* tokens (our count) was *reported* in the provider's tokens.

    The factor rises at once and falls slowly: counting too little costs an overflow, counting too much a little room.
    """
    if counted < SMALLEST_SAMPLE or is_truncated(calibration, counted, reported):
        return calibration
    ratio = reported / counted
    if not LOWEST_RATIO <= ratio <= HIGHEST_RATIO:
        return calibration
    factor = rounded_up(ratio)
    if factor > calibration.factor:
        return Calibration(min(factor, calibration.factor * FASTEST_RISE), ratio)
    if factor == calibration.factor:
        return Calibration(calibration.factor, ratio)
    lower = calibration.lower + 1
    if lower < PATIENCE:
        return Calibration(calibration.factor, ratio, lower)
    return Calibration(round(calibration.factor - STEP, 4), ratio)


LEAST_PLAUSIBLE, MOST_PLAUSIBLE = 256, 100_000_000
"""Plausible windows in tokens: a smaller one would refuse every request, a larger one does not exist."""

STATED_SECONDS = 3_600.0
"""Seconds for which a stated limit is used. A server may restart with a larger window, and learning the limit again
costs one refused request."""

REPEATED_SECONDS = 3_600.0
"""Seconds within which a refusal without a figure has to be repeated: a single one may be a short disturbance."""

STEP_DOWN = 0.9
"""The inferred window as a share of the tokens that were refused without a figure."""

PROBE_SECONDS = 600.0
"""Seconds for which an inferred window is used before a larger one is tried."""

STEP_UP = 1.1
"""The multiple of the window that is tried then: a wrong step costs one refused request."""

MOST_STEPS = 16
"""Steps up after which the inferred window is dropped: 4.6 times the figure, nearly three hours without a refusal."""

SIMILAR_CUTS = 0.1
"""Two silent cuts within this share of each other show a window; a server that omits cached tokens varies more."""

SMALLEST_CUT = 1_024
"""Tokens below which a report shows no window, but a server that does not count: no chat window is smaller."""

NEAR_POWER_OF_TWO = 0.02
"""A cut within this share below a power of two shows a window by itself.

Windows of local servers are powers of two: https://docs.ollama.com/context-length. Other figures are rarely there by
chance.
"""


class LearnedWindow(msgspec.Struct, frozen=True):
    """A window as learned from traffic.

    ``stated`` is from an error, ``inferred`` from refusals and silent cuts, each with its time. ``reported`` is the
    window that the server reported when an error contradicted it. ``refused_at`` is the time of the last refusal
    without a figure, ``cut_to`` the last report for a prompt that was cut.
    """

    # ``name=`` keeps the field names of earlier versions, so that stored values stay readable.

    stated: int | None = None
    stated_at: float = 0.0
    reported: int | None = msgspec.field(default=None, name="beside")
    inferred: int | None = msgspec.field(default=None, name="lowered")
    inferred_at: float = msgspec.field(default=0.0, name="lowered_at")
    refused_at: float = msgspec.field(default=0.0, name="refused")
    cut_to: int = msgspec.field(default=0, name="cut")


NOTHING_LEARNED = LearnedWindow()


def is_plausible(limit: int, weight: int | None, output: int) -> bool:
    """Return True if *limit* can explain a refusal of *weight* tokens of ours and *output* tokens of answer."""
    if not LEAST_PLAUSIBLE <= limit <= MOST_PLAUSIBLE:
        return False
    return weight is None or limit <= HIGHEST_RATIO * weight + output


def stated_limit(learned: LearnedWindow, now: float) -> int | None:
    """Return the stated limit, or None if it is too old."""
    if now - learned.stated_at >= STATED_SECONDS:
        return None
    return learned.stated


def inferred_window(learned: LearnedWindow, now: float) -> int | None:
    """Return the inferred window, a step larger for each ``PROBE_SECONDS`` without a refusal; None if it is too old."""
    if learned.inferred is None:
        return None
    steps = int(max(0.0, now - learned.inferred_at) / PROBE_SECONDS)
    if steps > MOST_STEPS:
        return None
    return int(learned.inferred * STEP_UP**steps)


def with_stated_limit(learned: LearnedWindow, limit: int, reported: int | None, now: float) -> LearnedWindow:
    """Return *learned* after an error stated *limit* while the server *reported* a window; the lowest limit holds."""
    if learned.reported == reported:
        earlier = stated_limit(learned, now)
        if earlier is not None and earlier < limit:
            return learned
    return structs.replace(learned, stated=limit, stated_at=now, reported=reported)


def with_refusal(learned: LearnedWindow, weight: int, now: float) -> LearnedWindow:
    """Return *learned* after *weight* tokens, answer included, were refused without a figure.

    A repeated refusal lowers the inferred window by a step.
    """
    is_repeated = learned.refused_at > 0 and now - learned.refused_at < REPEATED_SECONDS
    refused = structs.replace(learned, refused_at=now)
    if not is_repeated:
        return refused
    lower = max(LEAST_PLAUSIBLE, int(STEP_DOWN * weight))
    return with_inferred_window(refused, min(inferred_window(learned, now) or lower, lower), now)


def with_inferred_window(learned: LearnedWindow, window: int, now: float) -> LearnedWindow:
    """Return *learned* after traffic showed that the window is about *window* tokens."""
    return structs.replace(learned, inferred=max(LEAST_PLAUSIBLE, window), inferred_at=now)


def with_silent_cut(learned: LearnedWindow, reported: int, now: float) -> LearnedWindow:
    """Return *learned* after a prompt was silently cut to *reported* tokens.

    One such report may come from a server that counts only tokens outside its cache. So a window is inferred from two
    similar reports, or from a figure just below a power of two.
    """
    if reported < SMALLEST_CUT:
        return learned
    cut = structs.replace(learned, cut_to=reported)
    if abs(reported - learned.cut_to) <= SIMILAR_CUTS * learned.cut_to:
        return with_inferred_window(cut, max(reported, learned.cut_to), now)
    power = 1 << max(0, reported - 1).bit_length()
    if reported >= (1 - NEAR_POWER_OF_TWO) * power:
        return with_inferred_window(cut, reported, now)
    return cut


def with_answer(learned: LearnedWindow, tokens: int, now: float) -> LearnedWindow:
    """Return *learned* after a prompt of *tokens* was answered: smaller figures are wrong."""
    if learned.stated is not None and tokens > learned.stated:
        learned = structs.replace(learned, stated=None)
    if learned.inferred is not None and tokens > learned.inferred:
        inferred = None
        if inferred_window(learned, now):
            inferred = tokens  # a probe succeeded: the next one starts from here
        learned = structs.replace(learned, inferred=inferred, inferred_at=now)
    return learned
