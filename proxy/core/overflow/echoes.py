"""Leaves out of an error's text what it only repeats of the request: a validation error may quote a conversation.

The text is probed by a few words at a time, so that the cost is some searches of the request and no index of it. Case,
punctuation and the escapes of JSON or of a printed string make no difference. Whoever quotes may cut in the middle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from proxy.core.overflow.words import LONGEST_TEXT

PROBE = 4
"""Words looked for at a time; an echo of twice as many less one is always found."""

SHORTEST = 28
"""Characters of an echo: what is shorter may be said by anybody."""

PIECE = 65_536
"""Characters of the request split into words at a time: one step over megabytes would stop all other threads."""

_UNICODE = re.compile(r"\\+u([0-9a-fA-F]{4})")
_ESCAPE = re.compile(r"\\+[nrtbf]")
_WORD = re.compile(r"[\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff]|[^\W_\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff]+")


class Echoes:
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
