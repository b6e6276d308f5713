"""Checks if a claim of overflow can be true: what an error says, compared with what is known of the request.

An error's words are evidence. The prior is our own count of the request, the output that it asks for, and the window
it was fitted into. A code that a machine can read is believed. Figures are believed if they agree with our count, and
not if they cannot be about this request. A sentence alone is believed unless the request is tiny for its window. What
an error only repeats of the request is left out first: a validation error may quote a whole conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from proxy.core.learned_window import is_credible
from proxy.core.overflow.kinds import Overflow
from proxy.core.overflow.rules import LONGEST_TEXT

PROBE = 4
"""Words looked for at a time; an echo of twice as many less one is always found."""

SHORTEST = 28
"""Characters of an echo: what is shorter may be said by anybody."""

PIECE = 65_536
"""Characters of the request split into words at a time: one step over megabytes would stop all other threads."""

_UNICODE = re.compile(r"\\+u([0-9a-fA-F]{4})")
_ESCAPE = re.compile(r"\\+[nrtbf]")
_WORD = re.compile(r"[\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff]|[^\W_\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff]+")


class EchoFilter:
    """Knows the words of one request."""

    def __init__(self, body: bytes) -> None:
        self._words = f" {' '.join(_words(body.decode('utf-8', 'replace')))} "

    def without(self, texts: Sequence[str]) -> list[str]:
        """*texts* with a bar in place of what they repeat; as they are if they say nothing else.

        An error that is one of the conversation's sentences from end to end is the provider's own, met before.
        """
        cut = [self._cut(text) for text in texts]
        return cut if any(_WORD.search(text) for text in cut) else list(texts)

    def _cut(self, text: str) -> str:
        shown = _unescaped(text[:LONGEST_TEXT])
        found = list(_WORD.finditer(shown))
        pieces, at = [], 0
        for start, end in self._spans([word.group().lower() for word in found]):
            pieces.append(shown[at : found[start].start()])
            at = found[end - 1].end()
        return " | ".join([*pieces, shown[at:]]) if pieces else text

    def _spans(self, words: Sequence[str]) -> list[tuple[int, int]]:
        """Which words are repeated, as ranges in order."""
        spans: list[tuple[int, int]] = []
        last = len(words) - PROBE
        done = 0
        for at in sorted({*range(0, last, PROBE), max(0, last)}):
            if at < done or not self._says(words, at, at + PROBE):
                continue
            start, done = self._widened(words, at, done)
            if len(" ".join(words[start:done])) >= SHORTEST:
                spans.append((start, done))
        return spans

    def _widened(self, words: Sequence[str], at: int, least: int) -> tuple[int, int]:
        start, end = at, at + PROBE
        while start > least and self._says(words, start - 1, end):
            start -= 1
        while end < len(words) and self._says(words, start, end + 1):
            end += 1
        return start, end

    def _says(self, words: Sequence[str], start: int, end: int) -> bool:
        return f" {' '.join(words[start:end])} " in self._words


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(" ", _UNICODE.sub(lambda found: chr(int(found[1], 16)), text))


def _words(text: str) -> list[str]:
    found: list[str] = []
    at = 0
    while at < len(text):
        end = text.find(" ", at + PIECE)
        end = len(text) if end < 0 else end
        found += _WORD.findall(_unescaped(text[at:end]).lower())
        at = end
    return found


UNCORROBORATED = 0.6
"""A claim about a request we count at under this share of the stated limit is not believed without a decisive code."""

ALIKE = 1 / 3
"""A stated prompt this near our own count is about the same request: vocabularies differ less once calibrated."""

TINY = 0.1
"""A request under this share of a window that a person or the server stated does not overflow it by a sentence."""

LIKELY = 0.5
"""From this share of the believed window on an overflow is likely, and what it states may be learned at once."""

NEARLY_FULL = 0.9
"""From this share on even a complaint that names an image or a file may mean the whole request."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a request before its error is read; None for what is unknown.

    ``counted`` are the tokens of its input by our own count, in the provider's tokens; ``output`` is the most output it
    asks for. ``window`` is what it was fitted into, ``stated`` if a person or the server says so (and no table).
    ``plain``: it holds text only. ``body`` are its bytes: what an error repeats of them is no evidence.
    """

    counted: int | None = None
    output: int | None = None
    window: int | None = None
    stated: bool = False
    plain: bool = False
    body: bytes = b""

    @property
    def pressure(self) -> float | None:
        """The share of the window that the request takes; None if either is unknown."""
        if self.counted is None or not self.window:
            return None
        return self.counted / self.window


NOTHING_KNOWN = Prior()


def check_claim(claim: Overflow | None, prior: Prior) -> Overflow | None:
    """*claim* if it can be true of the request that *prior* describes, else what it means instead, None if nothing.

    ``sure`` is cleared if nothing but a sentence speaks for it: what it states waits for a smaller view's success.
    """
    if claim is None or not claim.too_long or prior.counted is None:
        return claim
    if is_about_the_output(claim, prior):
        return replace(claim, kind="output_cap", prompt=None, output=prior.output, decisive=False)
    if claim.decisive or agrees(claim, prior):
        return claim
    if prior.pressure is None:
        return None if claim.names_media else claim
    return _by_pressure(claim, prior, prior.pressure)


def _by_pressure(claim: Overflow, prior: Prior, pressure: float) -> Overflow | None:
    """Return a claim for which no code and no figure speaks, if the request is large enough for its window."""
    if contradicts(claim, prior):
        return None
    if claim.names_media:
        return replace(claim, sure=False) if pressure >= NEARLY_FULL else None
    if pressure >= LIKELY:
        return claim
    return None if prior.stated and pressure < TINY else replace(claim, sure=False)


def is_about_the_output(claim: Overflow, prior: Prior) -> bool:
    """True if the figure complained of is the output that was asked for, and the input fits what is stated."""
    if not prior.output or claim.limit is None or prior.counted is None:
        return False
    complained = claim.requested if claim.prompt is None else claim.prompt
    return complained == prior.output and prior.counted < UNCORROBORATED * claim.limit


def agrees(claim: Overflow, prior: Prior) -> bool:
    """True if the stated figures are those of this request: a prompt near our count, and a limit below it.

    If an error states a limit alone, it has to be below what we count.
    """
    if claim.limit is None or prior.counted is None or claim.kind == "payload":
        return False
    output = claim.output or 0
    if claim.prompt is not None:
        return _is_alike(claim.prompt, prior.counted) and claim.limit <= claim.prompt + output
    if claim.requested is not None:
        asked = prior.counted + (prior.output or output)
        return _is_alike(claim.requested, asked) and claim.limit <= claim.requested
    if claim.kind == "input_plus_output":
        output = output or prior.output or 0
    return claim.limit <= prior.counted + output and not claim.names_media


def contradicts(claim: Overflow, prior: Prior) -> bool:
    """True if the stated figures cannot be about this request, in whatever vocabulary the provider counts."""
    if prior.counted is None:
        return False
    output = claim.output or 0 if claim.kind == "input_plus_output" else 0
    if claim.limit is not None and prior.counted + output < UNCORROBORATED * claim.limit:
        return True
    return claim.prompt is not None and not is_credible(prior.counted, claim.prompt, plain=prior.plain)


def _is_alike(stated: int, counted: int) -> bool:
    return abs(stated - counted) <= ALIKE * max(stated, counted)
