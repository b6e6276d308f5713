"""The block: what stands for folded rounds. A pure function of the folded items, the caps and the counter.

It never digests an earlier block, because the client sends the originals again each time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.core.compression.digest import digest_of, plain_arguments
from proxy.core.conversation.entry import Entry

Count = Callable[[str], int]

HEADER = (
    "[Summary of the earlier part of this conversation, written in its place to save room. A record, not a request.]"
)
FOOTER = "[End of the summary. The conversation goes on from here.]"
OMITTED = "[...]"

SUMMARY = "What happened so far, as a model summed it up:"
"""Heads a model's summary: what it says of orders is a report of them."""

STEP_SHARE = 0.23
"""Share of the text's tokens that the steps get; the digest, which later steps refer to most, gets the rest."""

_CUE = re.compile(
    r"\b(?:must|never|always|only|don'?t|do not|should|shall|need to|make sure|ensure|avoid|without|instead|keep|use"
    r"|required?|prefer|remember|important|please|no longer|stop|at (?:most|least)|before|after"
    r"|nicht|immer|niemals|bitte|muss|siempre|nunca|debe|toujours|jamais|doit)\b"
    r"|不要|必须|务必|请|不能|只能|禁止|してください|しないで|必ず|반드시|하지 ?마|нельзя|всегда|никогда",
    re.IGNORECASE,
)
_WIDE = "\u2e80"
"""From here on scripts are written without spaces: a text may end after any character."""

_SENTENCE = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])|\n+")


@dataclass(frozen=True, slots=True)
class Folded:
    """What a block is made of: the folded entries in order, and which of them stay verbatim.

    ``task`` and ``newest`` are texts to repeat in full (already clipped where they had to be), empty when they stand
    elsewhere in the view. ``pins`` are the other folded user texts, ``carried`` the text of the item that carries the
    block: it need not be said again.
    """

    entries: tuple[Entry, ...]
    pins: tuple[str, ...]
    task: str = ""
    newest: str = ""
    carried: str = ""


def render(folded: Folded, block: int, text: int, count: Count, summary: str = "") -> str:
    """The block's text: at most *block* tokens beside the task and the newest user text, of which *text* for digest.

    A *summary* by a model is taken out of *text*: steps and digest get what it leaves.
    """
    sections = [HEADER]
    if folded.task:
        sections.append("The user's first request, word for word:\n" + folded.task)
    pins = _pins(folded.pins, max(0, block - text - count(HEADER) - count(FOOTER) - 40), count)
    if pins:
        sections.append("What the user said after that, word for word:\n" + "\n".join(f"- {pin}" for pin in pins))
    if folded.newest:
        sections.append("The user's latest message, word for word:\n" + folded.newest)
    if summary:
        sections.append(f"{SUMMARY}\n{summary}")
        text = max(0, text - count(sections[-1]) - 2)
    said = "\n".join([*sections, folded.carried])
    steps = _steps(folded.entries, int(text * STEP_SHARE), count)
    digest = digest_of(folded.entries, text - sum(count(step) + 2 for step in steps), count, said).lines()
    if digest:
        sections.append("\n".join(digest))
    if steps:
        sections.append("Steps so far:\n" + "\n".join(f"- {step}" for step in steps))
    sections.append(FOOTER)
    return "\n\n".join(sections)


def _pins(texts: Sequence[str], tokens: int, count: Count) -> list[str]:
    """The user texts, all of them while they fit; else instructions before the rest and newer before older."""
    sizes = [count(text) + 2 for text in texts]
    if sum(sizes) <= tokens:
        return [text for text in texts if text.strip()]
    chosen: dict[int, str] = {}
    short = max(24, tokens // 8)
    ranked = sorted(range(len(texts)), key=lambda i: (sizes[i] > short, not _CUE.search(texts[i][:4096]), -i))
    for index in ranked:
        whole = texts[index]
        kept = whole if sizes[index] <= min(short, tokens) else _essence(whole, min(short, tokens), count)
        size = count(kept) + 2
        if kept and size <= tokens:
            chosen[index] = kept
            tokens -= size
    return [chosen[index] for index in sorted(chosen)]


def _essence(text: str, tokens: int, count: Count) -> str:
    """The sentences of *text* that read like instructions, then its first ones, in order, in at most *tokens*."""
    sentences = [sentence for sentence in _SENTENCE.split(text[:65_536]) if sentence.strip()]
    ranked = sorted(range(len(sentences)), key=lambda i: (not _CUE.search(sentences[i]), i))
    left = tokens - 4
    kept: set[int] = set()
    for index in ranked[:200]:
        size = count(sentences[index]) + 1
        if size <= left:
            kept.add(index)
            left -= size
    pieces: list[str] = []
    for index in sorted(kept):
        if pieces and index - 1 not in kept and pieces[-1] != OMITTED:
            pieces.append(OMITTED)
        pieces.append(sentences[index])
    if pieces and len(kept) < len(sentences):
        pieces.append(OMITTED)
    return " ".join(pieces)


def _steps(entries: Sequence[Entry], tokens: int, count: Count) -> list[str]:
    """One line a model item, the newest that fit, in order."""
    lines: list[str] = []
    for entry in reversed(entries):
        if entry.role != "assistant":
            continue
        line = _step(entry)
        size = count(line) + 2
        if size > tokens:
            break
        if line:
            lines.append(line)
            tokens -= size
    return lines[::-1]


def _step(entry: Entry) -> str:
    said = next((part.strip() for part in _SENTENCE.split(entry.text[:2048]) if len(part.strip()) > 10), "")
    calls = [f"{name}({_brief(arguments)})" for name, arguments in entry.calls]
    return " -> ".join(part for part in (shorten(said, 140), ", ".join(calls[:6])) if part)


def _brief(arguments: str) -> str:
    first = next((line for line in plain_arguments(arguments).splitlines() if line.strip()), "")
    return shorten(first.strip(), 80)


def shorten(text: str, characters: int) -> str:
    """*text* cut at a word boundary to at most so many characters, so that no name is left half."""
    if len(text) <= characters:
        return text
    cut = next((at for at in range(characters, 0, -1) if text[at].isspace() or text[at - 1] >= _WIDE), 0)
    return f"{text[:cut].rstrip()} {OMITTED}" if cut else OMITTED
