"""Counts tokens with tiktoken, whose only importer this is, with vocabularies from an installed package: offline.

tiktoken downloads a vocabulary that is not in its cache folder. litellm's package holds these files under the names
that the cache gives them (the SHA-1 of their address), so it can serve as that folder:
https://github.com/openai/tiktoken/blob/main/tiktoken/load.py
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import tiktoken

CHUNK = 16_384
"""Characters encoded at once, at most: the encoder takes more than proportionally long for a longer word.

A longer text is cut before a space after a word, which changes nothing: no token reaches over that edge. If there is
none within ``SEARCHED`` characters, the ``SEAM`` characters on both sides are counted again to correct for the cut.
"""

SEARCHED, SEAM = 4_096, 512

RUN = 3_072
"""Characters by which a longer run of one character is shortened: a multiple of every token (3 digits, 2^n)."""

_BLOCK = 1_024

VOCABULARIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "o200k_base": (
            "fb374d419588a4632f3f557e76b4b70aebbca790",
            "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        ),
        "cl100k_base": (
            "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
            "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        ),
    }
)
"""File name in tiktoken's cache folder, and SHA-256 of the file, by encoding.

The hashes are those of https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
"""

_SCRIPTS = tuple(
    (re.compile(f"[{kind}]"), weight)
    for kind, weight in {
        r"A-Za-z0-9\x00-\x20\x7f": 0.35,
        r"!-/:-@\[-`{-~": 0.9,
        "\u0080-\u07ff": 1.15,  # Latin with marks, Greek, Cyrillic, Hebrew, Arabic
        "\u0800-\u2e7f": 1.6,  # scripts of India and South-East Asia, symbols
        "\u2e80-\uffff": 1.25,  # Chinese, Japanese, Korean
        "\U00010000-\U0010ffff": 3.0,  # emoji
    }.items()
)
"""Tokens of one character, by its script: a little above what the older vocabularies give for plain text."""

_RUN = re.compile(r"[A-Za-z0-9+/=_-]{24,}")
_DIGIT = re.compile("[0-9]")


class Tokenizers:
    """Counts tokens by encoding; safe to use from many threads. Nothing is ever downloaded.

    If the vocabulary of an encoding is missing, or has another hash, its tokens are estimated from the text's scripts
    with a margin; ``estimated`` names such encodings.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder if folder is not None else packaged_vocabularies()
        self._lock = threading.Lock()
        self._counts: dict[str, Callable[[str], int]] = {}
        self.estimated: set[str] = set()

    def count(self, encoding: str, text: str) -> int:
        """Return the tokens of *text* in *encoding*; text that spells a special token counts as text."""
        return (self._counts.get(encoding) or self.counter(encoding))(text)

    def counter(self, encoding: str) -> Callable[[str], int]:
        """Return the counting function of *encoding*; loads its vocabulary the first time (about half a second)."""
        with self._lock:
            if encoding not in self._counts:
                self._counts[encoding] = self._load(encoding)
            return self._counts[encoding]

    def _load(self, encoding: str) -> Callable[[str], int]:
        name, expected = VOCABULARIES.get(encoding, ("", ""))
        file = self._folder / name if self._folder and name else None
        if file is None or not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != expected:
            self.estimated.add(encoding)
            return estimate
        before = os.environ.get("TIKTOKEN_CACHE_DIR")
        os.environ["TIKTOKEN_CACHE_DIR"] = str(file.parent)  # the hash was just checked: nothing is downloaded
        try:
            loaded = tiktoken.get_encoding(encoding)
        finally:
            if before is None:
                del os.environ["TIKTOKEN_CACHE_DIR"]
            else:
                os.environ["TIKTOKEN_CACHE_DIR"] = before
        return lambda text: _encode(loaded, text)


def _encode(encoding: tiktoken.Encoding, text: str) -> int:
    known = 0
    if len(text) > 2 * RUN:
        # A megabyte of one character is a single word to the encoder, which takes it most of a second.
        text, cut = shortened(text)
        known = sum(times * len(encoding.encode_ordinary(letter * RUN)) for letter, times in cut.items())
    if len(text) <= CHUNK:
        return known + len(encoding.encode_ordinary(text))
    return known + _joint(text, lambda piece: len(encoding.encode_ordinary(piece)))


def _joint(text: str, count: Callable[[str], int]) -> int:
    """Return the count of *text* as a whole, from the counts of its pieces."""
    total = at = 0
    for piece in pieces(text):
        if at and not piece.startswith(" "):
            left, right = text[at - SEAM : at], text[at : at + SEAM]
            total += count(left + right) - count(left) - count(right)
        total += count(piece)
        at += len(piece)
    return total


def pieces(text: str) -> Iterator[str]:
    """Yield *text* in pieces of at most ``CHUNK`` characters, cut between words if it has any."""
    at = 0
    while len(text) - at > CHUNK:
        end = _edge(text, at + CHUNK - SEARCHED, at + CHUNK)
        yield text[at:end]
        at = end
    yield text[at:]


def _edge(text: str, start: int, end: int) -> int:
    """Return the position of the last space between *start* and *end* that follows no white space; else *end*."""
    at = text.rfind(" ", start, end)
    while at > start and text[at - 1].isspace():
        at = text.rfind(" ", start, at)
    return at if at > start else end


def shortened(text: str) -> tuple[str, dict[str, int]]:
    """Return *text* with long runs of a character cut by multiples of ``RUN``, and the multiples by character."""
    pieces: list[str] = []
    cut: dict[str, int] = {}
    done = at = 0
    while at < len(text):
        letter, end = text[at], at
        while text[end : end + _BLOCK] == letter * _BLOCK:
            end += _BLOCK
        times = (end - at) // RUN - 1
        if times > 0:
            pieces.append(text[done:at])
            done = at + times * RUN
            cut[letter] = cut.get(letter, 0) + times
        at = max(end, at + _BLOCK)
    return ("".join([*pieces, text[done:]]), cut) if cut else (text, cut)


def estimate(text: str) -> int:
    """Return the tokens of *text* estimated from its scripts, without a vocabulary: rather too many than too few.

    Long runs with digits in them (hashes, base64) hold no words: most pairs of their characters are a token.
    """
    return int(sum(map(_estimate, pieces(text)))) + bool(text)


def _estimate(text: str) -> float:
    dense = sum(len(run) for run in _RUN.findall(text) if _DIGIT.search(run))
    scripts = sum(weight * len(kind.findall(text)) for kind, weight in _SCRIPTS)
    return scripts + 0.5 * dense


def packaged_vocabularies() -> Path | None:
    """Return the folder of vocabulary files in the litellm package, found without importing it; None without one."""
    spec = importlib.util.find_spec("litellm")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "litellm_core_utils" / "tokenizers"
    return folder if folder.is_dir() else None
