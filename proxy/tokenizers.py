"""Counts tokens with tiktoken, offline: the vocabularies come from an installed package. Only this module imports it.

tiktoken downloads a vocabulary that is not in its cache folder, where a file's name is the SHA-1 of its address
(https://github.com/openai/tiktoken/blob/main/tiktoken/load.py). The litellm package holds the files under these names,
so that its folder can be used as the cache.
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
from typing import Final

import tiktoken

CHUNK: Final = 16_384
"""Most characters encoded at once: the encoder's time for one word grows faster than the word.

A longer text is cut before a space that follows a word. This changes no count, because no token reaches across such an
edge. If there is none within ``SEARCHED`` characters, the ``SEAM`` characters on both sides of the cut are counted
again, together and apart, to correct for it.
"""

SEARCHED: Final = 4_096
SEAM: Final = 512

RUN: Final = 3_072
"""A longer run of one character is shortened by multiples of this length, which is a whole number of its tokens.

Tokens of one character are 3 digits or a power of two long.
"""

_BLOCK: Final = 1_024
"""Step in characters in which runs are searched; ``RUN`` is a multiple of it."""

VOCABULARIES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
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

_SCRIPTS: Final = (
    (r"[A-Za-z0-9\x00-\x20\x7f]", 0.35),
    (r"[!-/:-@\[-`{-~]", 0.9),
    ("[\u0080-\u07ff]", 1.15),  # Latin with marks, Greek, Cyrillic, Hebrew, Arabic
    ("[\u0800-\u2e7f]", 1.6),  # scripts of India and South-East Asia, symbols
    ("[\u2e80-\uffff]", 1.25),  # Chinese, Japanese, Korean
    ("[\U00010000-\U0010ffff]", 3.0),  # emoji
)
"""Tokens of one character by its script: a little above what older vocabularies need for plain text.

``re`` compiles and caches these patterns at the first estimate: few processes make one, and it takes 6 ms of a start.
"""

_LONG_WORD: Final = r"[A-Za-z0-9+/=_-]{24,}"
_DIGIT: Final = "[0-9]"


class Tokenizers:
    """Counts tokens by encoding; safe to use from many threads. Nothing is ever downloaded.

    If the vocabulary of an encoding is missing, or has another hash, its tokens are estimated from the text's scripts.
    ``estimated`` names these encodings.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or packaged_vocabularies()
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
        if self._folder is None or not _is_intact(self._folder, encoding):
            self.estimated.add(encoding)
            return estimate
        before = os.environ.get("TIKTOKEN_CACHE_DIR")
        os.environ["TIKTOKEN_CACHE_DIR"] = str(self._folder)  # the hash was just checked: nothing is downloaded
        try:
            loaded = tiktoken.get_encoding(encoding)
        finally:
            if before is None:
                del os.environ["TIKTOKEN_CACHE_DIR"]
            else:
                os.environ["TIKTOKEN_CACHE_DIR"] = before
        # The encoder, which is compiled code, has copied this table. No method of a registered encoding reads it again
        # (https://github.com/openai/tiktoken/blob/main/tiktoken/core.py), and it takes 30 MB.
        loaded._mergeable_ranks.clear()
        return lambda text: _encoded_length(loaded, text)


def _is_intact(folder: Path, encoding: str) -> bool:
    """True if *folder* holds the vocabulary of *encoding*, with the published hash."""
    if encoding not in VOCABULARIES:
        return False
    name, expected = VOCABULARIES[encoding]
    file = folder / name
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == expected


def _encoded_length(encoding: tiktoken.Encoding, text: str) -> int:
    """Return the tokens of *text*; long runs of one character and long texts are counted in parts."""
    runs = 0
    if len(text) > 2 * RUN:
        # A megabyte of one character is a single word to the encoder, which takes most of a second for it.
        text, removed = shortened(text)
        runs = sum(times * len(encoding.encode_ordinary(letter * RUN)) for letter, times in removed.items())
    if len(text) <= CHUNK:
        return runs + len(encoding.encode_ordinary(text))
    return runs + _count_in_pieces(text, lambda piece: len(encoding.encode_ordinary(piece)))


def _count_in_pieces(text: str, count: Callable[[str], int]) -> int:
    """Return the count of *text* as a whole from the counts of its pieces, corrected where a cut split a word."""
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
    """Return the last position from *start* to *end* of a space that follows a word; *end* if there is none."""
    at = text.rfind(" ", start, end)
    while at > start and text[at - 1].isspace():
        at = text.rfind(" ", start, at)
    return at if at > start else end


def shortened(text: str) -> tuple[str, dict[str, int]]:
    """Return *text* with long runs of a character cut by multiples of ``RUN``, and the multiples by character."""
    parts: list[str] = []
    removed: dict[str, int] = {}
    copied = at = 0
    while at < len(text):
        letter, end = text[at], at
        while text[end : end + _BLOCK] == letter * _BLOCK:
            end += _BLOCK
        times = (end - at) // RUN - 1
        if times > 0:
            parts.append(text[copied:at])
            copied = at + times * RUN
            removed[letter] = removed.get(letter, 0) + times
        at = max(end, at + _BLOCK)
    if not removed:
        return text, removed
    return "".join([*parts, text[copied:]]), removed


def estimate(text: str) -> int:
    """Return an estimate of the tokens of *text* by its scripts, without a vocabulary: rather too high than too low."""
    return int(sum(map(_estimate_piece, pieces(text)))) + bool(text)


def _estimate_piece(text: str) -> float:
    scripts = sum(weight * len(re.findall(kind, text)) for kind, weight in _SCRIPTS)
    # Hashes and base64 hold no words: two of their characters are about a token.
    dense = sum(len(word) for word in re.findall(_LONG_WORD, text) if re.search(_DIGIT, word))
    return scripts + 0.5 * dense


def packaged_vocabularies() -> Path | None:
    """Return the folder of vocabulary files in the litellm package, without importing it; None if there is none."""
    spec = importlib.util.find_spec("litellm")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "litellm_core_utils" / "tokenizers"
    return folder if folder.is_dir() else None
