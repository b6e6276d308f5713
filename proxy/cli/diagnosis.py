"""What observations of a server mean for keeping conversations inside its window, and what to do about each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from proxy.core.learned_window import TOLERANCE
from proxy.core.overflow.kinds import Overflow

Level = Literal["ok", "info", "warning", "error"]

AGREES = 0.02
"""A stated limit this near to the window that is gone by is the same figure."""

CUT = 0.85
"""Less than this share of the same text, by the factor its beginning had, can only mean that the rest was cut away."""

FRAME = 40
"""Tokens that a chat template may add to a short request without saying anything of the vocabulary."""

USUAL_FACTORS = (0.8, 1.6)
"""Tokens of a provider per token of our count on plain English; outside of it something else is wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``remedy`` is what to do, where something is to be done."""

    topic: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """The window that is gone by, in tokens, and who says so; ``None``: nobody."""

    tokens: int | None = None
    source: str = ""
    remedy: str = "Raise the server's context, or set context_window to what it has."


@dataclass(frozen=True, slots=True)
class Tried:
    """One request that was sent: our count of its input, and how it was answered.

    ``prompt`` is what the answer's usage says of the input; ``said`` the beginning of an error's text.
    """

    counted: int
    status: int
    prompt: int | None = None
    overflow: Overflow | None = None
    said: str = ""


def window(known: Window) -> Finding:
    """Whether anybody knows the window."""
    if known.tokens is None:
        remedy = "Set context_window, or the first overflow has to teach it."
        return Finding("window", "warning", "nobody says how large it is", remedy)
    return Finding("window", "ok", f"{known.tokens:,} tokens, by {known.source}")


def count(small: Tried, expected: float) -> Iterator[Finding]:
    """What the usage of a short request says, when our count was *expected* to be off by that factor."""
    if small.prompt is None:
        remedy = "Nothing to do: windows are kept by our own count, with a family's usual factor."
        yield Finding("usage", "warning", "answers carry no usage, so the count cannot be corrected by it", remedy)
        return
    factor = small.prompt / max(1, small.counted)
    text = f"{small.prompt:,} tokens for {small.counted:,} of our count: factor {factor:.2f}"
    least, most = USUAL_FACTORS
    if not least <= factor <= most:
        remedy = "Check what it counts: the factor is learned, but one like this may leave cached or system tokens out."
        yield Finding("usage", "warning", text, remedy)
    elif small.prompt > (expected + TOLERANCE) * small.counted + FRAME:
        remedy = f"Nothing to do: it is learned from the first answers (assumed until then: {expected:.2f})."
        yield Finding("usage", "info", text, remedy)
    else:
        yield Finding("usage", "ok", text)


def stream(status: int, prompt: int | None) -> Finding:
    """Whether a streamed answer that was asked for its usage told it."""
    if status != 200:
        return Finding("stream", "error", f"a streamed request is answered {status}", "Check that it can stream.")
    if prompt is None:
        remedy = "The count is then corrected by whole answers and by errors only."
        return Finding("stream", "warning", "no usage, although stream_options.include_usage asked for it", remedy)
    return Finding("stream", "ok", "streamed answers carry usage when a client asks for it")


def overflow(large: Tried, known: Window, factor: float) -> Iterator[Finding]:
    """What the answer to a request above the window says; *factor*: the provider's tokens for one of ours."""
    sent = int(large.counted * factor)
    if large.status == 200:
        yield from _accepted(large, known, sent)
    elif large.overflow is not None and large.overflow.too_long:
        yield from _refused(large, large.overflow, known)
    elif large.status == 429 or (large.overflow is not None and large.overflow.kind == "rate_limit"):
        remedy = "Try again later, or with a key that may spend more per minute."
        yield Finding("overflow", "warning", "a rate limit answered first; not known how it reports overflow", remedy)
    elif large.status >= 500:
        text = f"{sent:,} tokens are answered {large.status}, which says nothing of length: {large.said or '(empty)'}"
        yield Finding("overflow", "error", text, "Set context_window: a request above it must never get there.")
    else:
        text = f"{sent:,} tokens are refused with an error nobody recognises: {large.status} {large.said or '(empty)'}"
        yield Finding("overflow", "error", text, "Set context_window, and report this error so that it is recognised.")


def was_cut(tried: Tried, known: Window, factor: float) -> bool:
    """Whether the usage of an accepted request says that not all of it was read."""
    if tried.prompt is None:
        return False
    expected = factor * tried.counted
    return tried.prompt < CUT * expected or (known.tokens is not None and tried.prompt <= known.tokens < CUT * expected)


def _accepted(large: Tried, known: Window, sent: int) -> Iterator[Finding]:
    above = f"the window of {known.tokens:,}" if known.tokens else "what was tried"
    if large.prompt is None:
        remedy = "Set context_window to what is certain: a cut prompt could not be told from a whole one."
        yield Finding("overflow", "warning", f"{sent:,} tokens are accepted without usage, above {above}", remedy)
    elif was_cut(large, known, sent / max(1, large.counted)):
        text = f"it cuts prompts without a word: {large.prompt:,} of {sent:,} tokens were read"
        yield Finding("overflow", "error", text, known.remedy)
    elif known.tokens:
        text = f"{large.prompt:,} tokens are accepted: the window is larger than {known.tokens:,}"
        yield Finding("overflow", "warning", text, "Set context_window to what the server really has, to use it.")
    else:
        text = f"up to {large.prompt:,} tokens are accepted, and no limit was met"
        yield Finding("overflow", "info", text, "Set context_window if it is known.")


def _refused(large: Tried, said: Overflow, known: Window) -> Iterator[Finding]:
    if said.kind == "payload":
        remedy = "Set context_window small enough that no request grows to that many bytes."
        yield Finding("overflow", "warning", "refused for its bytes, before its tokens were looked at", remedy)
        return
    yield Finding("overflow", "ok", f"refused with {large.status}, and recognised as too long")
    if said.window is None:
        remedy = "" if known.tokens else "Set context_window: it can only be worked out from repeated refusals."
        level: Level = "info" if known.tokens else "warning"
        yield Finding("limit", level, "the error states no limit", remedy)
    elif known.tokens is None or abs(said.window - known.tokens) <= AGREES * known.tokens:
        yield Finding("limit", "ok", f"the error states {said.window:,} tokens")
    else:
        text = f"the error states {said.window:,} tokens, and {known.source} {known.tokens:,}"
        smaller = said.window < known.tokens
        remedy = f"Set context_window: {said.window}." if smaller else "Set context_window to use all of it."
        yield Finding("limit", "warning", text, remedy)
