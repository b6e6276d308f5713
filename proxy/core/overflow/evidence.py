"""Checks whether a claimed overflow can be true of its request.

A *claim* is the overflow that an error seems to report. The *prior* are the facts known without the error: our own
count of the request, the output that it wants, and the window that it was made for.

    the claim is made by           it is accepted
    a machine-readable code        always
    figures                        if they agree with our count; never if they cannot be about this request and a
                                   window is known
    a sentence alone               unless the request is tiny; unsure below half of the window
    a sentence about an image      only if the window is nearly full

A request is *tiny* by its share of a stated window, or of a prompt that the same route answered in the last minutes.

Before that, the parts of an error that only repeat the request are removed (``EchoFilter``): a validation error may
quote a whole conversation, and with it the error of an earlier request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.learned_window import is_credible
from proxy.core.overflow.figures import is_round
from proxy.core.overflow.kinds import Overflow
from proxy.core.overflow.lexicon import LONGEST_TEXT

PROBE = 4
"""Words of an error that are searched in the request at a time; every echo of 2 * ``PROBE`` - 1 words is found."""

SHORTEST_ECHO = 28
"""Characters of the shortest echo: shorter phrases occur by chance."""

PIECE = 65_536
"""Characters of the request that one search splits into words: for megabytes it would stop all other threads."""

_UNICODE = lazy_pattern(r"\\+u([0-9a-fA-F]{4})")
_ESCAPE = lazy_pattern(r"\\+[nrtbf]")
_WORD = lazy_pattern(r"[\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff]|[^\W_\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff]+")


class EchoFilter:
    """Finds the parts of an error that repeat words of one request."""

    def __init__(self, body: bytes) -> None:
        self._words = f" {' '.join(_words(body.decode('utf-8', 'replace')))} "

    def without_echoes(self, texts: Sequence[str]) -> list[str]:
        """Return *texts* with a bar in place of each echo; unchanged if they hold nothing but echoes.

        In that case the conversation contains the provider's error of an earlier request, and this one is equal.
        """
        cut = [self._cut(text) for text in texts]
        if not any(_WORD.search(text) for text in cut):
            return list(texts)
        return cut

    def _cut(self, text: str) -> str:
        plain = _unescaped(text[:LONGEST_TEXT])
        words = list(_WORD.finditer(plain))
        pieces, at = [], 0
        for start, end in self._echoes([word.group().lower() for word in words]):
            pieces.append(plain[at : words[start].start()])
            at = words[end - 1].end()
        if not pieces:
            return text
        return " | ".join([*pieces, plain[at:]])

    def _echoes(self, words: Sequence[str]) -> list[tuple[int, int]]:
        """Return the ranges of *words* that the request contains as well, in order."""
        spans: list[tuple[int, int]] = []
        # Every fourth word only, and each match is widened: a long text costs a quarter of the searches.
        last = len(words) - PROBE
        done = 0
        for at in sorted({*range(0, last, PROBE), max(0, last)}):
            if at < done or not self._holds(words, at, at + PROBE):
                continue
            start, done = self._widened(words, at, done)
            if len(" ".join(words[start:done])) >= SHORTEST_ECHO:
                spans.append((start, done))
        return spans

    def _widened(self, words: Sequence[str], at: int, least: int) -> tuple[int, int]:
        start, end = at, at + PROBE
        while start > least and self._holds(words, start - 1, end):
            start -= 1
        while end < len(words) and self._holds(words, start, end + 1):
            end += 1
        return start, end

    def _holds(self, words: Sequence[str], start: int, end: int) -> bool:
        return f" {' '.join(words[start:end])} " in self._words


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(" ", _UNICODE.sub(lambda match: chr(int(match[1], 16)), text))


def _words(text: str) -> list[str]:
    words: list[str] = []
    at = 0
    while at < len(text):
        end = text.find(" ", at + PIECE)
        if end < 0:
            end = len(text)
        words += _WORD.findall(_unescaped(text[at:end]).lower())
        at = end
    return words


UNCORROBORATED = 0.6
"""Share of the stated limit below which, by our count, a request cannot exceed it, unless a code states it."""

ALIKE = 1 / 3
"""Share by which a stated prompt may differ from our count; calibrated counts differ less."""

WITHIN_TWICE = 1 / 2
"""The same share for a prompt that is worked out from a sum with a known output figure: twice our count, or half."""

ALIKE_BESIDE_MEDIA = ALIKE / 2
"""The same share for an error that names an image or a file, whose own tokens may be near our count by chance."""

TINY = 0.1
"""Share of a window stated by a person or the server, or of a prompt answered lately, below which a sentence alone
proves no overflow."""

LIKELY = 0.5
"""Share of the window from which an overflow is likely, so that its limit may be learned at once."""

NEARLY_FULL = 0.9
"""Share of the window from which an error about an image or a file may mean the whole request."""

MOST_WINDOWS = 50
"""Times that a request may be longer than its window: a smaller figure counts something else."""

MOST_COUNTED = 8
"""Times that our count of a prompt can be the provider's."""

MOST_BYTES = 8
"""Bytes that a token stands for at most, over a whole request."""


@dataclass(frozen=True, slots=True)
class Prior:
    """The facts of a request that are known without its error; None for an unknown one.

    ``counted`` are the tokens of its input by our own count, converted to the provider's; ``output`` is the output
    figure. ``window`` is the one that it was made for; ``stated``: a person or the server states it, not a table.
    ``served`` are the tokens of the largest prompt that its route answered lately.
    ``plain``: the request holds only text. ``body`` are its bytes: parts of an error that repeat them are no evidence.
    ``pending``: the request was not counted yet. It is counted only if there is a claim, so unlikely claims pass this
    check and are checked again.
    """

    counted: int | None = None
    output: int | None = None
    window: int | None = None
    stated: bool = False
    plain: bool = False
    body: bytes = b""
    pending: bool = False
    served: int | None = None

    @property
    def is_tiny(self) -> bool:
        """True if the request is tiny for its stated window, or beside a prompt that its route answered lately.

        Such a prompt is a lower bound of the window, and may be one where no window is known at all.
        """
        if self.counted is None:
            return False
        largest = self.served or 0
        if self.stated:
            largest = max(largest, self.window or 0)
        return self.counted < TINY * largest

    @property
    def pressure(self) -> float | None:
        """The share of the window that the request takes; None if either is unknown."""
        if self.counted is None or not self.window:
            return None
        return self.counted / self.window


NO_PRIOR = Prior()
NOT_COUNTED_YET = Prior(pending=True)


def check_claim(claim: Overflow | None, prior: Prior) -> Overflow | None:
    """Return *claim* if it can be true of the request that *prior* describes; None if it cannot.

    A claim about the output figure becomes an ``output_cap``. A claim by a sentence alone is not ``sure``: its limit is
    learned only when a smaller view succeeds.
    """
    if claim is None or not claim.too_long:
        return claim
    if prior.counted is not None:
        claim = _divided(claim, prior.counted, prior)
    if claim.unlikely:
        return _confirmed(claim, prior)
    if prior.counted is None:
        return claim
    claim = _with_pair(_with_sum(claim, prior.counted, prior), prior.counted, prior)
    if is_about_the_output(claim, prior):
        return replace(claim, kind="output_cap", prompt=None, output=prior.output, decisive=False)
    if claim.decisive or agrees(claim, prior):
        return claim
    if prior.is_tiny:
        return None
    if (prior.pressure is not None or _is_size_of_a_part(claim, prior)) and contradicts(claim, prior):
        return None
    return _by_pressure(_with_credible_figures(claim, prior.counted), prior.pressure)


def _with_credible_figures(claim: Overflow, counted: int) -> Overflow:
    """Return *claim* without its figures if they are something else's, so that nothing is learned from them.

    Without a known window they are no reason to doubt the rest of it.
    """
    if is_far_below(claim, counted):
        return replace(claim, limit=None, prompt=None)
    return claim


def is_far_below(claim: Overflow, counted: int) -> bool:
    """True if *claim* states a prompt, and it is far below what we *counted*: something else has that many tokens.

    "Input length 617 longer than allowed 512" is about what an embedder was sent, if the chat has thousands. A prompt
    far above our count may be true: a server can add to it. A round one may be another limit.
    """
    if claim.limit is None or claim.prompt is None or is_round(claim.prompt):
        return False
    return claim.prompt * MOST_COUNTED < counted


def _is_size_of_a_part(claim: Overflow, prior: Prior) -> bool:
    """True if *claim* states bytes or characters, and not those of the whole body: ours has no fewer than its parts.

    If no window is known, nothing else shows that figures are about something else than this request.
    """
    return claim.kind == "payload" and not claim.names_body and bool(prior.body)


def _divided(claim: Overflow, counted: int, prior: Prior) -> Overflow:
    """*claim* with its undivided figure as prompt and output, if that is what we count and the prompt alone is not.

    "Your request needs 34679 tokens" says nothing of the output figure, which providers add all the same.
    """
    whole, output = claim.requested, prior.output
    if not whole or not output or claim.output is not None or claim.prompt not in (None, whole):
        return claim
    prompt = whole - output
    is_above = claim.limit is None or claim.limit <= whole
    is_nearer = abs(prompt - counted) < abs(whole - counted)
    if not is_above or not is_nearer or not _is_alike(prompt, counted, WITHIN_TWICE):
        return claim
    return replace(claim, kind="input_plus_output", prompt=prompt, output=output)


def _with_pair(claim: Overflow, counted: int, prior: Prior) -> Overflow:
    """*claim* with the only two figures of its text as prompt and limit, if the larger one is alike to our count.

    What an unknown language or order of words calls them is not known then, but what they are is.
    """
    figures = sorted({figure for figure in claim.stated if figure * MOST_WINDOWS >= counted} - {prior.output})
    if claim.size is not None or len(figures) != 2:
        return claim
    if agrees(claim, prior) and claim.limit != prior.output:
        return claim
    limit, prompt = figures
    if not _is_alike(prompt, counted):
        return claim
    return replace(claim, kind="input", limit=limit, prompt=prompt, output=None, requested=None)


def _with_sum(claim: Overflow, counted: int, prior: Prior) -> Overflow:
    """*claim* about input and output together, if its figures are our count, the output, and a limit that both exceed.

    The whole may be stated, too. Whatever the words are, nothing else has these three figures.
    """
    output = prior.output
    if not output or output not in claim.stated or agrees(claim, prior):
        return claim
    others = {*claim.stated} - {output}
    figures = sorted(figure for figure in others if figure - output not in others)
    if len(figures) != 2:
        return claim
    prompt, limit = figures
    if not _is_alike(prompt, counted) or limit >= prompt + output:
        return claim
    if abs(limit - counted) < abs(prompt - counted):
        return claim  # the prompt is the figure that is nearer to our count
    return replace(claim, kind="input_plus_output", limit=limit, prompt=prompt, output=output, requested=None)


def _confirmed(claim: Overflow, prior: Prior) -> Overflow | None:
    """Return an unlikely *claim* if its figures agree with our count, or if the request is not counted yet.

    If no window is known, it is enough that they look like a count and a limit.
    """
    if prior.pending:
        return claim
    if agrees(claim, prior) and not is_about_the_output(claim, prior):
        return replace(claim, unlikely=False)
    if claim.plausible and prior.counted is not None and prior.window is None and not prior.is_tiny:
        return replace(claim, unlikely=False, sure=False)
    return None


def _by_pressure(claim: Overflow, pressure: float | None) -> Overflow | None:
    """Return *claim*, which neither a code nor a figure confirms, if the request is large enough for its window."""
    if pressure is None:
        if claim.names_media:
            return None
        return claim
    if claim.names_media and pressure < NEARLY_FULL:
        return None
    if claim.names_media or pressure < LIKELY:
        return replace(claim, sure=False)
    return claim


def is_about_the_output(claim: Overflow, prior: Prior) -> bool:
    """True if the figure of the complaint is the output that the request wants, and the input is not at fault.

    It is not if it fits the limit, or if the only figures are what was wanted and less, and none is alike to our count.
    (Input and output together are never less than the output, so such a figure is a cap.)
    """
    if not prior.output or prior.counted is None:
        return False
    others = {*claim.stated} - {prior.output}
    if prior.output in claim.stated and others and max(others) < prior.output:
        return not any(_is_alike(figure, prior.counted) for figure in others)
    if claim.limit is None:
        return False
    figure = claim.prompt
    if figure is None:
        figure = claim.requested
    return figure == prior.output and prior.counted < UNCORROBORATED * claim.limit


def agrees(claim: Overflow, prior: Prior) -> bool:
    """True if the stated figures are those of this request: a prompt near our count, and a limit below it.

    A limit that is stated alone has to be below our count.
    """
    if claim.limit is None or prior.counted is None or claim.kind == "payload":
        return False
    output = claim.output or 0
    if claim.prompt is not None:
        share = ALIKE
        if claim.names_media:
            share = ALIKE_BESIDE_MEDIA
        return _is_alike(claim.prompt, prior.counted, share) and claim.limit <= claim.prompt + output
    if claim.requested is not None:
        requested = prior.counted + (prior.output or output)
        return _is_alike(claim.requested, requested) and claim.limit <= claim.requested
    if claim.kind == "input_plus_output":
        output = output or prior.output or 0
    return claim.limit <= prior.counted + output and not claim.names_media


def states_size_of(claim: Overflow, prior: Prior) -> bool:
    """True if the figures agree and include the size of this request, which the request itself does not state.

    Then they are no quotation of another error.
    """
    size = claim.requested
    if claim.prompt is not None:
        size = claim.prompt
    if size is None or not agrees(claim, prior):
        return False
    return not any(figure.encode() in prior.body for figure in (f"{size}", f"{size:,}"))


def contradicts(claim: Overflow, prior: Prior) -> bool:
    """True if the stated figures cannot be about this request, whatever vocabulary the provider counts with."""
    if prior.counted is None:
        return False
    tokens = prior.counted
    if claim.kind == "payload":
        return (claim.size or 0) > max(len(prior.body), prior.counted * MOST_BYTES)
    if claim.kind == "input_plus_output":
        tokens += claim.output or 0
    if is_far_below(claim, prior.counted) or (claim.limit is not None and tokens < UNCORROBORATED * claim.limit):
        return True
    return claim.prompt is not None and not is_credible(prior.counted, claim.prompt, plain=prior.plain)


def _is_alike(stated: int, counted: int, share: float = ALIKE) -> bool:
    return abs(stated - counted) <= share * max(stated, counted)
