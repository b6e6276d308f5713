"""Counts tokens with tiktoken, offline: the vocabularies come from an installed package.

Only this module imports tokenizers. tiktoken downloads a vocabulary that is not in its cache folder, where a file's
name is the SHA-1 of its address (https://github.com/openai/tiktoken/blob/main/tiktoken/load.py). The litellm package
holds the files under these names, so that its folder can be used as the cache.

If gigatoken is installed (``pip install 'ullage[fast]'``), it counts instead, some fifteen times as fast and the same:
it is compared with tiktoken when it is loaded, and on a sample of all texts. tiktoken counts what it cannot.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sized
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import tiktoken
from tiktoken import registry

from proxy.long_texts import RUN, Count, encoded_length, pieces

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

_LOG: Final = logging.getLogger(__name__)

MOST_RUNS: Final = 256
"""Runs of blanks whose tokens are cached."""

Encode = Callable[[str], Sized]
"""Encodes a text: its tokens, in a collection whose length is their number."""

UNUSABLE: Final = (ImportError, AttributeError, TypeError, ValueError, OSError)
"""Errors of a version of gigatoken that cannot be loaded here, or has another interface."""

_SCHEMES: Final[Mapping[str, str]] = MappingProxyType({"o200k_base": "o200k", "cl100k_base": "gpt4"})
"""Names in gigatoken for the ways in which encodings split text into words."""

COMPARE_EVERY: Final = 512
"""Of so many texts that gigatoken counts, tiktoken counts one too."""

ENCODER_SECONDS: Final = 1.0
"""Seconds of counting after which gigatoken's encoder is built anew, to bound its memory.

Its cache of words has no bound in the released version (https://github.com/marcelroed/gigatoken/issues/36). New words
take most of its time, so a second bounds the cache: by 60 MB for source code (125 MB of text), by 150 MB for random
words. After twice the time tiktoken counts until the encoder is new.
"""

BATCH_FROM: Final = 1_024
"""Characters from which gigatoken encodes a text as a batch of one, during which other threads run.

Its cache of words grows once in some MB of text, which takes 45 ms. A batch costs 3 us more.
"""

IDLE_SECONDS, MOST_SECONDS = 1.0, 30.0
"""Seconds without a count before an encoder is built, and the most to wait for them.

Building it holds the interpreter's lock for 0.3 s, or half a second on a slow machine.
"""

_PROBES: Final = (
    "def main(argv: list[str]) -> int:\n    return 0 if argv[1:] == ['--help'] else sum(map(len, argv))\n",
    '{"role": "tool", "content": "2026-11-23T04:15:42.031Z ERROR [worker-7] 0x7ffe: timed out after 30000ms\\n"}',
    "I'll look; they've said we'd DON'T 'S 'Ll  three   spaces\t\ttabs \r\n\r\n \n  end  ",
    "<|endoftext|><|fim_prefix|> are words here, not marks <|endofprompt|>",
    "1 12 123 1234 12345 3.14159 1e-9 0xDEADBEEF 192.168.0.1 ½ ² ٣٤٥",
    "Größe, Übergrößenträger, naïve Ångström, ΑΒΓ αβγ, Привет, мир! שלום مرحبا नमस्ते ไทย",
    "今天的天气很好。東京は雨です。한국어 문장입니다。",
    "🙂👍🏽👨‍👩‍👧‍👦🇩🇪 e\u0301 \u200b\ufeff\u00a0\u2028\u3000 end",
    "aGVsbG8gd29ybGQsIHRoaXMgaXMgYmFzZTY0IHRleHQ+Lw== d41d8cd98f00b204e9800998ecf8427e",
    "camelCaseWords HTTPServerError snake_case_name SCREAMING_CASE iPhone15ProMax",
    " " * 300 + "x" + "\n" * 200 + "=" * 500 + "-" * 99 + "a" * 700 + "!?" * 150,
    "https://example.org/a/b?c=d&e=f#g //// //\\n /* ** */ <!-- --> </div></div>\n\n\n}});",
)
"""Texts that both tokenizers must count alike before gigatoken is used."""

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

_LOOKAHEAD: Final = r"|\s+(?!\S)"
"""An alternative in the patterns of both encodings: white space, but for the last blank before a word."""

_POSSESSIVE: Final = r"(?<=[?*+])\+|(?<=\d\})\+"
"""The sign that makes a repeat possessive."""

_OTHER_BLANKS: Final = "\t\v\f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space in the patterns of the encodings, as a set in a pattern, without spaces, ``\\r`` and ``\\n``.

https://docs.rs/regex/latest/regex/#perl-character-classes-unicode-friendly
"""

_BEFORE: Final = rf"(?=([^ {_OTHER_BLANKS}\r\n]?))"
"""The sign or letter before which blanks stand, as a group that is empty at the end of a line."""

_OTHER_BLANK: Final = re.compile(f"[{_OTHER_BLANKS}]")
_SPACES: Final = re.compile(f"(  ++){_BEFORE}")
_ASCII_BLANKS: Final = re.compile(f"([ \t\v\f][ \t\v\f]++){_BEFORE}")
_BLANKS: Final = re.compile(f"([ {_OTHER_BLANKS}][ {_OTHER_BLANKS}]++){_BEFORE}")
"""Several blanks: the fewer characters a pattern looks for, the less time it takes. Spaces take a fifth."""

_LONG_WORD: Final = r"[A-Za-z0-9+/=_-]{24,}"
_DIGIT: Final = "[0-9]"


def nothing() -> None:
    """Do nothing."""


class FastCounter:
    """Counts the tokens of short texts with gigatoken, in bounded memory; safe to use from many threads.

    *build* makes an encoder, *exact* is tiktoken's count: for texts that gigatoken cannot read, while its encoder has
    to be built, and of all texts once it is ``rejected``: it differed, or could not be built. *release* gives free
    memory back to the system. The first encoder is built at once, or *later*, as all others: when nothing has been
    counted for a second.
    """

    def __init__(
        self,
        build: Callable[[], Encode],
        exact: Count,
        release: Callable[[], None] = nothing,
        *,
        later: bool = False,
    ) -> None:
        self._build = build
        self._exact = exact
        self._release = release
        self._seconds = 0.0
        self._texts = 0
        self._last = time.monotonic()
        self._lock = threading.Lock()
        self._builder: threading.Thread | None = None
        self.rejected = self.is_built = False
        self._encode: Encode | None = None
        if later:
            self._build_soon()
        else:
            self._build_now()

    def count(self, text: str) -> int:
        """Return the tokens of *text*, of at most ``CHUNK`` characters: it is counted in one call that waits for none.

        Such a call takes up to 6 ms; while the encoder's cache of words grows, 50 ms.
        """
        encode = self._encode
        if encode is None or self._seconds > 2 * ENCODER_SECONDS:
            self._last = time.monotonic()
            return self._exact(text)
        began = time.monotonic()
        try:
            tokens = len(encode(text))
        except TypeError:  # a lone surrogate: such text has no UTF-8
            return self._exact(text)
        except RuntimeError:  # "Already borrowed": another thread counts a long text without the interpreter's lock
            return self._exact(text)
        self._last = time.monotonic()
        self._seconds += self._last - began
        self._texts += 1
        if not self._texts % COMPARE_EVERY:
            self._compare(text)
        if self._seconds > ENCODER_SECONDS:
            self._build_soon()
        return tokens

    def _compare(self, text: str) -> None:
        """Leave the counting to tiktoken if it counts *text* differently."""
        encode = self._encode
        try:
            if encode is None or len(encode(text)) == self._exact(text):
                return
        except RuntimeError:  # in use by another thread, as in ``count``: the next text is compared
            return
        self._reject()

    def _reject(self) -> None:
        self.rejected, self._encode = True, None
        _LOG.error("gigatoken counts otherwise than tiktoken, which counts from here on")

    def _build_now(self) -> None:
        self._encode = self._new_encoder()
        self.is_built = True

    def _new_encoder(self) -> Encode | None:
        """Return a new encoder; None if the two libraries differ, or the installed version cannot make one.

        An encoder initialises itself at its first short and its first long text, which takes 0.3 s: that is done here.
        """
        try:
            encode = self._build()
            counts = [len(encode(text)) for text in _PROBES]
        except UNUSABLE as error:
            self.rejected = True
            _LOG.error("gigatoken cannot be used (%s): tiktoken counts", type(error).__name__)
            return None
        if counts != list(map(self._exact, _PROBES)):
            self._reject()
        if self.rejected:
            return None
        return encode

    def _build_soon(self) -> None:
        """Start a thread that builds a new encoder after ``IDLE_SECONDS`` without a count; one at a time."""
        with self._lock:
            if self._builder is None:
                self._builder = threading.Thread(target=self._build_when_idle, name="build the tokenizer", daemon=True)
                self._builder.start()

    def _build_when_idle(self) -> None:
        latest = time.monotonic() + MOST_SECONDS
        while (remaining := min(self._last + IDLE_SECONDS, latest) - time.monotonic()) > 0:
            time.sleep(remaining)
        self._encode = None  # before the new one is built: both would be in memory
        self._release()
        self._build_now()
        self._seconds = 0.0
        self._release()
        with self._lock:
            self._builder = None


class Tokenizers:
    """Counts tokens by encoding; safe to use from many threads. Nothing is ever downloaded.

    If the vocabulary of an encoding is missing, or has another hash, its tokens are estimated from the text's scripts.
    ``estimated`` names these encodings. With *fast*, gigatoken counts if it is installed, with *fast_later* from when
    nothing has been counted for a second. *release* is called after a vocabulary was loaded, to give the memory that
    this needed back to the system.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        fast: bool = True,
        fast_later: bool = False,
        release: Callable[[], None] = nothing,
    ) -> None:
        self._folder = folder or packaged_vocabularies()
        self._release = release
        self._is_fast = fast and _has_gigatoken()
        self._fast_later = fast_later
        self._lock = threading.Lock()
        self.loaded: dict[str, Count] = {}
        """The counting functions by encoding, once their vocabulary is in memory."""

        self._fast: dict[str, FastCounter] = {}
        self.estimated: set[str] = set()

    def counted_by(self) -> dict[str, str]:
        """Return the library that counts each loaded encoding: ``tiktoken``, ``gigatoken`` or ``estimate``."""
        return {encoding: self._library(encoding) for encoding in sorted(self.loaded)}

    def _library(self, encoding: str) -> str:
        if encoding in self.estimated:
            return "estimate"
        fast = self._fast.get(encoding)
        if fast is None or fast.rejected or not fast.is_built:
            return "tiktoken"
        return "gigatoken"

    def count(self, encoding: str, text: str) -> int:
        """Return the tokens of *text* in *encoding*; text that spells a special token counts as text."""
        return self.counter(encoding)(text)

    def counter(self, encoding: str) -> Count:
        """Return the counting function of *encoding*; loads its vocabulary the first time (about half a second)."""
        loaded = self.loaded.get(encoding)
        if loaded is not None:
            return loaded
        with self._lock:
            if encoding not in self.loaded:
                self.loaded[encoding] = self._load(encoding)
                self._release()
            return self.loaded[encoding]

    def _load(self, encoding: str) -> Count:
        """Return the counting function of *encoding* with its vocabulary in memory; without the file, ``estimate``."""
        if self._folder is None or not _is_intact(self._folder, encoding):
            self.estimated.add(encoding)
            return estimate
        before = os.environ.get("TIKTOKEN_CACHE_DIR")
        os.environ["TIKTOKEN_CACHE_DIR"] = str(self._folder)  # the hash was just checked: nothing is downloaded
        try:
            loaded = _registered(encoding)
        finally:
            if before is None:
                del os.environ["TIKTOKEN_CACHE_DIR"]
            else:
                os.environ["TIKTOKEN_CACHE_DIR"] = before
        # The encoder, which is compiled code, has copied this table. No method of a registered encoding reads it again
        # (https://github.com/openai/tiktoken/blob/main/tiktoken/core.py), and it takes 30 MB.
        loaded._mergeable_ranks.clear()

        exact = _exact_count(loaded)
        if not self._is_fast:
            return _counting(exact)
        build = partial(_fast_encoder, self._folder, encoding)
        fast = self._fast[encoding] = FastCounter(build, exact, self._release, later=self._fast_later)
        if fast.rejected:
            return _counting(exact)
        return _counting(fast.count)


class FastEncoding(tiktoken.Encoding):
    """An encoding of tiktoken whose pattern is one of ``without_lookahead``, with the same tokens for every text.

    The lookahead parts a run of blanks before its last one if a sign or a letter follows: four spaces and a word are
    three spaces, and the word with one before it. Here the text is parted there instead, in the methods that the proxy
    and LiteLLM call; the others of tiktoken do not.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._blanks = lru_cache(MOST_RUNS)(partial(self._length, super().encode_ordinary))

    @staticmethod
    def _length(encode: Encode, text: str) -> int:
        return len(encode(text))

    def count(self, text: str) -> int:
        """Return the number of tokens of ``encode_ordinary(text)``."""
        runs = _SPACES
        if not text.isascii():
            if _OTHER_BLANK.search(text):
                runs = _BLANKS
        elif "\t" in text or "\v" in text or "\f" in text:
            runs = _ASCII_BLANKS
        if runs is _SPACES and "  " not in text:
            return len(super().encode_ordinary(text))
        parts = runs.split(text)
        found = [*zip(parts[1::3], parts[2::3], strict=True)]
        # All but the last blank of a run are counted by themselves, and the rest of the text without them.
        parts[1::3] = [run[-1] if after else run for run, after in found]
        parts[2::3] = [""] * len(found)
        alone = sum([self._blanks(run[:-1]) for run, after in found if after])
        return alone + len(super().encode_ordinary("".join(parts)))

    def encode_ordinary(self, text: str) -> list[int]:
        """As that of tiktoken."""
        return _encoded_in_parts(super().encode_ordinary, text)

    def encode(self, text: str, **options: Any) -> list[int]:
        """As that of tiktoken."""
        return _encoded_in_parts(partial(super().encode, **options), text)


def _encoded_in_parts(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Return the tokens of *text* by *encode*, parted before the last one of several blanks."""
    tokens: list[int] = []
    at = 0
    for run in _BLANKS.finditer(text):
        if run[2]:
            last = run.end() - 1
            tokens += encode(text[at : run.start()]) + encode(text[run.start() : last])
            at = last
    return tokens + encode(text[at:])


def _registered(encoding: str) -> tiktoken.Encoding:
    """Return tiktoken's *encoding* with a faster pattern, and register it, so that its vocabulary is in memory once."""
    loaded = registry.ENCODINGS.get(encoding)
    if loaded is not None:
        return loaded
    tiktoken.list_encoding_names()  # finds the constructors
    constructors = registry.ENCODING_CONSTRUCTORS or {}
    arguments = constructors[encoding]()
    pattern = without_lookahead(arguments["pat_str"])
    loaded = tiktoken.Encoding(**arguments) if pattern is None else FastEncoding(**{**arguments, "pat_str": pattern})
    registry.ENCODINGS[encoding] = loaded
    return loaded


def without_lookahead(pattern: str) -> str | None:
    """Return *pattern*, by which an encoding splits text into words, without its lookahead; None if it has none.

    Beside a lookahead tiktoken's regex library (https://docs.rs/fancy-regex) runs a machine of its own for each word,
    and all threads share its memory. A pattern without one is an automaton, of which each thread has its own: it takes
    two thirds of the time. No possessive repeat may be in it. Those of cl100k_base take what no part behind them can
    match, so a greedy repeat takes the same.
    """
    before, ahead, rest = pattern.partition(_LOOKAHEAD)
    if not ahead or rest not in (r"|\s", r"|\s+"):
        return None
    return re.sub(_POSSESSIVE, "", before) + r"|\s+"


def library(encoding: str) -> str:
    """Return the installed library for *encoding*: ``tiktoken``, ``gigatoken`` or ``estimate``. Loads nothing."""
    if encoding not in VOCABULARIES:
        return "estimate"
    if _has_gigatoken():
        return "gigatoken"
    return "tiktoken"


def _exact_count(loaded: tiktoken.Encoding) -> Count:
    """Return the counting function of an encoding; other users of tiktoken may have loaded it as it is published."""
    if isinstance(loaded, FastEncoding):
        return loaded.count
    return lambda text: len(loaded.encode_ordinary(text))


def _has_gigatoken() -> bool:
    return importlib.util.find_spec("gigatoken") is not None


def _fast_encoder(folder: Path, encoding: str) -> Encode:
    """Return gigatoken's encoding function, which knows no special tokens: text that spells one counts as text."""
    from gigatoken import Tokenizer  # optional, and imports numpy: 20 MB that the rest of the proxy does without
    from gigatoken.gigatoken_rs import PadTruncate

    tokenizer = Tokenizer.from_tiktoken(folder / VOCABULARIES[encoding][0], _SCHEMES[encoding], {}).backend
    as_it_is = PadTruncate(0)

    def encode(text: str) -> Sized:
        if len(text) < BATCH_FROM:
            short: Sized = tokenizer.encode(text)
            return short
        [tokens], _ = tokenizer.encode_batch_padded([text], as_it_is, parallel=False)
        long: Sized = tokens
        return long

    return encode


def _is_intact(folder: Path, encoding: str) -> bool:
    """True if *folder* holds the vocabulary of *encoding*, with the published hash."""
    if encoding not in VOCABULARIES:
        return False
    name, expected = VOCABULARIES[encoding]
    file = folder / name
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == expected


def _counting(count: Count) -> Count:
    """Return a count of texts of any length by *count*, which counts short ones."""

    def counted(text: str) -> int:
        if len(text) <= 2 * RUN:
            return count(text)
        return encoded_length(count, text)

    return counted


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
    if not folder.is_dir():
        return None
    return folder
