"""Findings from requests to a server: what each observation means for keeping conversations inside its window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from proxy.core.learned_window import TOLERANCE
from proxy.core.overflow.kinds import Overflow

Level = Literal["ok", "info", "warning", "error"]

AGREEMENT: Final = 0.02
"""Relative difference up to which a stated limit and the known window are the same figure.

128,000 and 131,072, which are easily confused, differ by 0.023 of the larger one.
"""

TRUNCATED: Final = 0.85
"""A prompt was cut silently if its usage is less than this share of the tokens that its size predicts.

The share is higher than ``TRUNCATED_BELOW`` for traffic: the factor was measured on a request with text of this kind
just before. Ollama cuts silently: https://docs.ollama.com/context-length
"""

TEMPLATE_TOKENS: Final = 40
"""Tokens that a chat template may add to a short request, whatever the vocabulary.

Llama 3.1's writes a system message with two dates: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/
"""

USUAL_FACTORS: Final = (0.8, 1.6)
"""The lowest and the highest usual ratio of a provider's tokens to ours, on plain English.

``FAMILY_RATIOS`` are from 1 to 1.5.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One observation; ``remedy`` is what to do about it, empty if there is nothing to do."""

    topic: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """The window that the proxy would use, in tokens, and the source of this figure; None if it has none."""

    tokens: int | None = None
    source: str = ""
    remedy: str = "Raise the server's context, or set context_window to what it has."


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request: our count of its input, and how it was answered.

    ``prompt`` are the input tokens that the answer's usage reports, ``error`` is the beginning of an error's text.
    """

    counted: int
    status: int
    prompt: int | None = None
    overflow: Overflow | None = None
    error: str = ""


def window_finding(usable: Window) -> Finding:
    """Return the finding on the window that the proxy would use."""
    if usable.tokens is None:
        remedy = "Set context_window; otherwise it is learned from the first overflow."
        return Finding("window", "warning", "its size is not known", remedy)
    return Finding("window", "ok", f"{usable.tokens:,} tokens, by {usable.source}")


def smaller_window_findings(configured: int, stated: int, origin: str) -> Iterator[Finding]:
    """Yield a finding if the server states a window smaller than the configured one."""
    if stated < configured:
        text = f"the server itself states {stated:,} ({origin}), less than the {configured:,} configured"
        yield Finding("window", "warning", text, f"Set context_window: {stated}, or leave it out.")


def usage_findings(short: Attempt, expected: float) -> Iterator[Finding]:
    """Yield the finding on the usage of a short request; *expected* is the factor that the model's family has."""
    if short.prompt is None:
        remedy = "Nothing to do: windows are kept by our own count, with a family's usual factor."
        yield Finding("usage", "warning", "answers carry no usage, so the count cannot be corrected by it", remedy)
        return
    factor = short.prompt / max(1, short.counted)
    text = f"{short.prompt:,} tokens for {short.counted:,} of our count: factor {factor:.2f}"
    lowest, highest = USUAL_FACTORS
    if not lowest <= factor <= highest:
        remedy = "Check what it counts: the factor is learned, but one like this may leave cached or system tokens out."
        yield Finding("usage", "warning", text, remedy)
    elif short.prompt > (expected + TOLERANCE) * short.counted + TEMPLATE_TOKENS:
        remedy = f"Nothing to do: it is learned from the first answers (assumed until then: {expected:.2f})."
        yield Finding("usage", "info", text, remedy)
    else:
        yield Finding("usage", "ok", text)


def stream_finding(status: int, prompt: int | None) -> Finding:
    """Return the finding on a streamed request with ``include_usage``."""
    if status != 200:
        return Finding("stream", "error", f"a streamed request is answered {status}", "Check that it can stream.")
    if prompt is None:
        remedy = "The count is then corrected by whole answers and by errors only."
        return Finding("stream", "warning", "no usage, although stream_options.include_usage asked for it", remedy)
    return Finding("stream", "ok", "streamed answers carry usage when a client asks for it")


def overflow_findings(long: Attempt, usable: Window, factor: float) -> Iterator[Finding]:
    """Yield the findings on a request longer than the window; *factor* is the provider's tokens for each of ours."""
    tokens = int(long.counted * factor)
    if long.status == 200:
        yield from _findings_if_accepted(long, usable, tokens)
    elif long.overflow is not None and long.overflow.too_long:
        yield from _findings_if_refused(long.status, long.overflow, usable)
    elif long.status == 429 or (long.overflow is not None and long.overflow.kind == "rate_limit"):
        remedy = "Try again later, or with a key that may spend more per minute."
        yield Finding("overflow", "warning", "a rate limit answered first; not known how it reports overflow", remedy)
    elif long.status >= 500:
        text = f"{tokens:,} tokens are answered {long.status}, which does not mention length: {long.error or '(empty)'}"
        yield Finding("overflow", "error", text, "Set context_window: a request above it must never get there.")
    else:
        text = f"{tokens:,} tokens are refused with an unknown error: {long.status} {long.error or '(empty)'}"
        yield Finding("overflow", "error", text, "Set context_window, and report this error so that it is recognised.")


def was_truncated(attempt: Attempt, usable: Window, factor: float) -> bool:
    """True if the usage of an accepted request proves that part of its prompt was not read."""
    if attempt.prompt is None:
        return False
    expected = TRUNCATED * factor * attempt.counted
    if attempt.prompt < expected:
        return True
    return usable.tokens is not None and attempt.prompt <= usable.tokens < expected


def _findings_if_accepted(long: Attempt, usable: Window, tokens: int) -> Iterator[Finding]:
    if long.prompt is None:
        above = "every size that was tried"
        if usable.tokens:
            above = f"the window of {usable.tokens:,}"
        remedy = "Set context_window to what is certain: without usage a cut prompt looks like a whole one."
        yield Finding("overflow", "warning", f"{tokens:,} tokens are accepted without usage, above {above}", remedy)
    elif was_truncated(long, usable, tokens / max(1, long.counted)):
        text = f"it cuts prompts without a word: {long.prompt:,} of {tokens:,} tokens were read"
        yield Finding("overflow", "error", text, usable.remedy)
    elif usable.tokens:
        text = f"{long.prompt:,} tokens are accepted: the window is larger than {usable.tokens:,}"
        yield Finding("overflow", "warning", text, "Set context_window to what the server really has, to use it.")
    else:
        text = f"up to {long.prompt:,} tokens are accepted, and no limit was met"
        yield Finding("overflow", "info", text, "Set context_window if it is known.")


def _findings_if_refused(status: int, error: Overflow, usable: Window) -> Iterator[Finding]:
    if error.kind == "payload":
        remedy = "Set context_window small enough that no request grows to that many bytes."
        yield Finding("overflow", "warning", "refused for its bytes, before its tokens were looked at", remedy)
        return
    yield Finding("overflow", "ok", f"refused with {status}, and recognised as too long")
    if error.window is not None:
        yield _limit_finding(error.window, usable)
    elif usable.tokens:
        yield Finding("limit", "info", "the error states no limit")
    else:
        remedy = "Set context_window: it can only be worked out from repeated refusals."
        yield Finding("limit", "warning", "the error states no limit", remedy)


def _limit_finding(stated: int, usable: Window) -> Finding:
    """Return the finding on the window that an error states."""
    if usable.tokens is None or abs(stated - usable.tokens) <= AGREEMENT * usable.tokens:
        return Finding("limit", "ok", f"the error states {stated:,} tokens")
    text = f"the error states {stated:,} tokens, and {usable.source} {usable.tokens:,}"
    remedy = "Set context_window to use all of it."
    if stated < usable.tokens:
        remedy = f"Set context_window: {stated}."
    return Finding("limit", "warning", text, remedy)
