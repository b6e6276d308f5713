"""Texts for a summariser: prompts from the templates beside this module, and transcripts of conversations.

A transcript has one text per item, of limited length. It has no encoded data, and no text that looks like a role or
like the end of the tags around it: the conversation may quote strangers, who must not speak to the summariser.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Final

import msgspec

from proxy.core.conversation import Count, ItemText, Role
from proxy.core.lazy_pattern import UNSPACED, lazy_pattern

WORDS_PER_TOKEN: Final = 0.5
"""Words that the prompt allows per token of the cap: identifiers take several tokens each, and models overshoot."""

OF_MEASURED: Final = 2 / 3
"""Share of the words per token of a conversation that its summary may have: for the same reasons."""

SAMPLE: Final = 8_192
"""Characters of the newest texts by which the words per token of a language are measured."""

FOREIGN: Final = 0.02
"""Share of letters beyond ASCII from which on a language is not English, and its words are measured."""

_MIN_WORDS: Final = 40
"""Words that the prompt allows at least: a summary in fewer words is of no use."""

_TEMPLATES: Final = ("summary", "request", "previous", "aligned")

USER, ASSISTANT, RESULT, ARGUMENTS = 16_000, 6_000, 2_000, 1_000
"""Most characters of a text, by its kind; the middle of a longer one is left out."""

OPAQUE: Final = 20_000
"""Characters without a space from which on a run is encoded data, not text."""

RUN: Final = 1_200
"""Characters of base64 from which on a run is encoded data, not a name."""

_DATA_URL = lazy_pattern(r"data:[\w.+/-]{0,100};base64,[A-Za-z0-9+/=_-]{256,}")
# The look-behind keeps these two linear: a match starts only at the beginning of a run. Scripts without spaces between
# words (U+2E80 and up) are text.
_BASE64 = lazy_pattern(rf"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{{{RUN},}}={{0,2}}")
_OPAQUE = lazy_pattern(rf"(?<![^\s\u2e80-\uffff])[^\s\u2e80-\uffff]{{{OPAQUE},}}")
# Special tokens and tags of chat templates: a server may read them as the beginning of another role.
_SPECIAL = lazy_pattern(r"<\|([^|<>\n]{0,64})\|>")
_TAG = lazy_pattern(
    r"<(/?\s*(?:system|user|assistant|human|tool|developer|transcript|conversation|summary|instructions?|prompt"
    r"|function\w*|invoke|tool_\w+|s|bos|eos)\b)",
    re.IGNORECASE,
)
_BRACKETED = lazy_pattern(r"\[(/?INST)\]|<<(/?SYS)>>")
_SPEAKERS: Final = {"user": "user", "assistant": "assistant", "tool": "tool result"}
_BREAK = lazy_pattern(r"\s+")
_LETTERS = lazy_pattern(r"[^\W\d_]+")
_WITHOUT_SPACES = lazy_pattern(f"[{UNSPACED}]")

NEAR_CUT: Final = 120
"""Characters around a cut within which it may be moved to the end of a word."""

MIDDLE: Final = "[... middle left out ...]"

_JOIN: Final = 2
"""Most tokens that the line break between two texts adds."""


class Prompts(msgspec.Struct, frozen=True):
    """The texts sent to a summariser. ``version`` (8 bytes) changes with any of them.

    *nonce* is a part of the tags around the transcript, so that no text inside can end it.
    """

    templates: Mapping[str, Template]
    version: bytes

    def system(self, nonce: str, words: int) -> str:
        """Return the instructions for a summary of at most so many *words*."""
        return self.templates["summary"].substitute(nonce=nonce, words=words)

    def request(self, nonce: str, transcript: str, previous: str) -> str:
        """Return the *transcript* as data, behind the *previous* summary if there is one."""
        section = ""
        if previous:
            section = self.templates["previous"].substitute(nonce=nonce, summary=previous)
        return self.templates["request"].substitute(nonce=nonce, transcript=transcript, previous=section)

    def aligned(self, words: int) -> str:
        """Return the instruction behind a conversation that is sent as it is, for at most so many *words*."""
        return self.templates["aligned"].substitute(words=words)


def load_prompts() -> Prompts:
    """Return the prompts of this package."""
    folder = files("proxy.summaries") / "prompts"
    texts = {name: (folder / f"{name}.md").read_text("utf-8") for name in _TEMPLATES}
    version = hashlib.sha256("\0".join(texts[name] for name in _TEMPLATES).encode()).digest()[:8]
    return Prompts({name: Template(text) for name, text in texts.items()}, version)


def most_words(entries: Sequence[ItemText], cap: int, count: Count) -> int:
    """Return the words that the prompt allows a summary of *entries* in at most *cap* tokens by *count*.

    An English word takes little more than a token, a Russian, Finnish or Arabic one three or four of some vocabularies.
    """
    share = min(WORDS_PER_TOKEN, OF_MEASURED * _words_per_token(entries, count))
    return max(_MIN_WORDS, int(cap * share))


def _words_per_token(entries: Sequence[ItemText], count: Count) -> float:
    """Return the words per token of what is spoken in *entries*; 1 for English and for scripts without spaces.

    Of the latter, models count the characters.
    """
    sample = ""
    for entry in reversed(entries):
        if entry.role in ("user", "assistant"):
            sample += f"{entry.text[:SAMPLE]}\n"
        if len(sample) >= SAMPLE:
            break
    letters = sum(map(str.isalpha, sample))
    foreign = sum(letter.isalpha() and not letter.isascii() for letter in sample)
    if foreign <= FOREIGN * letters or len(_WITHOUT_SPACES.findall(sample)) * 3 > letters:
        return 1.0
    return len(_LETTERS.findall(sample)) / max(1, count(sample))


def omit_data(text: str) -> str:
    """Return *text* with encoded data replaced by its size and a short digest."""
    if ";base64," in text:
        text = _DATA_URL.sub(_omitted, text)
    if _has_long_run(text):
        text = _OPAQUE.sub(_omitted, _BASE64.sub(_omitted, text))
    return text


def _has_long_run(text: str) -> bool:
    """False if *text* has no run of ``RUN`` characters without a blank."""
    # The patterns of data take fifty times as long. Wherever such a run begins, it holds one of these blocks.
    block = RUN // 2
    pieces = (text[at : at + block] for at in range(0, len(text) - block + 1, block))
    return any(" " not in piece and "\n" not in piece for piece in pieces)


def _omitted(match: re.Match[str]) -> str:
    run = match.group()
    if not run.startswith("data:") and len(run) < OPAQUE and not any(map(str.isdigit, run)):
        return run  # a line of dashes, or one letter repeated
    size = len(run) * 3 // 4
    digest = hashlib.sha256(run.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"[... data left out: about {size} bytes, digest {digest} ...]"


def neutralised(text: str) -> str:
    """Return *text* without anything that looks like a role, a special token or the end of the tags around it."""
    text = _SPECIAL.sub(r"‹\1›", text)
    text = _TAG.sub(r"‹\1", text)
    return _BRACKETED.sub(lambda match: f"({match[1] or match[2]})", text)


def quotation(text: str, characters: int) -> str:
    """Return the two ends of *text* in at most *characters*, without data and roles; each line begins with a bar."""
    text = omit_data(text).encode("utf-8", "replace").decode()
    if len(text) > characters:
        head, tail = head_and_tail(text, characters // 2)
        text = f"{head}\n{MIDDLE}\n{tail}"
    return "\n".join(f"| {line}" for line in neutralised(text).splitlines())


def head_and_tail(text: str, characters: int) -> tuple[str, str]:
    """Return the first and the last *characters* of *text*, cut between words: half a name would be a wrong name."""
    head, tail = text[:characters], text[-characters:]
    first_break = _BREAK.search(tail, 0, NEAR_CUT)
    if first_break:
        tail = tail[first_break.end() :]
    return head[: _last_break(head)].rstrip(), tail


def _last_break(head: str) -> int:
    """Return the index behind the last word break in *head*; its length if there is none near the end."""
    for at in range(len(head), max(0, len(head) - NEAR_CUT), -1):
        if head[at - 1].isspace():
            return at
    return len(head)


def item_texts(entries: Sequence[ItemText], detail: float) -> Iterator[str]:
    """Yield one text per item, without system items: role, text, tool calls, kinds of media.

    *detail* scales how many characters are shown, except of the user's.
    """
    for entry in entries:
        if entry.role == "system":
            continue
        limit = _limit(entry.role, detail)
        lines = [f"{_SPEAKERS[entry.role]}:"]
        if entry.text:
            lines.append(quotation(entry.text, limit))
        if entry.user_text:
            lines += ["user:", quotation(entry.user_text, USER)]
        for name, arguments in entry.calls:
            lines += [f"calls {neutralised(name)}:", quotation(arguments, int(detail * ARGUMENTS))]
        lines += [f"({neutralised(kind)}, not shown)" for kind in entry.media]
        yield "\n".join(line for line in lines if line)


def _limit(role: Role, detail: float) -> int:
    """Return the characters of an item's own text that are shown."""
    if role == "user":
        return USER
    if role == "assistant":
        return int(detail * ASSISTANT)
    return int(detail * RESULT)


def split_transcript(entries: Sequence[ItemText], tokens: int, count: Count, detail: float) -> tuple[list[str], int]:
    """Return the transcript of *entries* in chunks of at most *tokens* each, in order, and the tokens of all, about.

    A larger item loses its middle.
    """
    chunks: list[str] = []
    chunk: list[str] = []
    size = total = 0
    for text in item_texts(entries, detail):
        text, weight = _within(text, tokens, count)
        total += weight
        if chunk and size + weight > tokens:
            chunks.append("\n".join(chunk))
            chunk, size = [], 0
        chunk.append(text)
        size += weight
    if chunk:
        chunks.append("\n".join(chunk))
    return chunks, total


def _within(text: str, tokens: int, count: Count) -> tuple[str, int]:
    """Return *text* in at most *tokens*, and its tokens; a text of 200 characters or less stays as it is."""
    weight = count(text) + _JOIN
    while weight > tokens and len(text) > 200:
        # 0.45 for each end leaves a tenth for characters that take more tokens than the average.
        head, tail = head_and_tail(text, max(90, int(len(text) * tokens / weight * 0.45)))
        text = f"{head}\n| {MIDDLE}\n| {tail}"
        weight = count(text) + _JOIN
    return text, weight
