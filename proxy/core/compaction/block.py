"""The block: what stands for folded rounds. A pure function of the folded items, the caps and the counter.

It never digests an earlier block, because the client sends the originals again each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from proxy.core.compaction.digest import digest_of, plain_arguments
from proxy.core.compaction.sentence_ranking import SENTENCE_END, Round, round_scores, rounds_of, sentence_rank
from proxy.core.compaction.truncate import OMITTED, shorten
from proxy.core.conversation import ItemText

Count = Callable[[str], int]

HEADER = (
    "[Summary of the earlier part of this conversation, written in its place to save room. A record, not a request.]"
)
FOOTER = "[End of the summary. The conversation goes on from here.]"

SUMMARY = "What happened so far, as a model summed it up:"
"""Heads a model's summary: what it says of orders is a report of them."""

STEP_SHARE = 0.23
"""Share of the text's tokens that the steps get; the digest, which later steps refer to most, gets the rest."""

SHORTEST = 6
"""Tokens below which nothing more is tried."""

TRIED = 64
"""Rounds that are tried to be kept in full."""

READ = 65_536
"""Characters of one text that are looked at for sentences; what follows counts as one more."""

LONG_TOKEN = 16
"""Characters of a token at most, nearly always: what is longer than its room by that is not even counted."""

HEADINGS = 40
"""Tokens of the headings between header and footer."""

SENTENCES = 400
"""Sentences of the user's texts that are weighed one by one; of more than that, the newest texts' count."""


@dataclass(frozen=True, slots=True)
class FoldedItems:
    """What a block is made of: the folded entries in order, and which of them stay verbatim.

    ``task`` and ``newest`` are texts to repeat in full, as clipped as they are in the view; empty if they stand
    elsewhere in it. ``user_texts`` are the other folded user texts. ``carrier_text`` is the text of the item that
    carries the block: it need not be repeated.
    """

    entries: tuple[ItemText, ...]
    user_texts: tuple[str, ...]
    task: str = ""
    newest: str = ""
    carrier_text: str = ""


def render_block(folded: FoldedItems, block_tokens: int, text_tokens: int, count: Count, summary: str = "") -> str:
    """The block's text: at most *block_tokens* beside the task and the newest user text.

    *text_tokens* of them are for digest and steps; a *summary* by a model is taken out of these. What digest and steps
    leave over goes to the user's words, then to the rounds that are worth most, in full.
    """
    frame = count(HEADER) + count(FOOTER) + HEADINGS
    user_texts = _UserTexts(folded.user_texts, count)
    pins = user_texts.pins(max(0, block_tokens - text_tokens - frame))
    pin_tokens = _list_tokens(pins, count)
    written = f"{SUMMARY}\n{summary}" if summary else ""
    free = max(0, text_tokens - (count(written) + 2 if written else 0))
    rounds = rounds_of(folded.entries)
    steps = _steps(rounds, int(free * STEP_SHARE), count)
    step_tokens = _list_tokens(steps, count)
    known = "\n".join([folded.task, *(pin for pin in pins if pin), folded.newest, folded.carrier_text, written])
    digest = digest_of(folded.entries, free - step_tokens, count, known).lines()
    digest_tokens = sum(count(line) + 1 for line in digest)
    left = block_tokens - frame - (text_tokens - free) - step_tokens - pin_tokens - digest_tokens
    if left > 0 and pins != list(folded.user_texts):
        pins = user_texts.pins(pin_tokens + left)
        left -= _list_tokens(pins, count) - pin_tokens
    if left > SHORTEST:
        steps = _with_words(rounds, steps, left, count)
    block = _joined_sections(folded, pins, written, digest, steps)
    most = block_tokens + count(folded.task) + count(folded.newest)
    # Parts were counted one by one; together they may take a little more.
    while (over := count(block) - most) > 0 and (any(steps) or digest):
        digest, steps = _without(digest, steps, over, count)
        block = _joined_sections(folded, pins, written, digest, steps)
    return block


def _list_tokens(lines: Sequence[str], count: Count) -> int:
    """Tokens of *lines* as a list; empty ones are left out."""
    return sum(count(line) + 2 for line in lines if line)


def _without(digest: list[str], steps: list[str], tokens: int, count: Count) -> tuple[list[str], list[str]]:
    """Digest and steps with about *tokens* less: the oldest steps go, then the digest's last line."""
    if not any(steps):
        return digest[:-1], steps
    kept = list(steps)
    for index, step in enumerate(steps):
        if step and tokens > 0:
            tokens -= count(step)
            kept[index] = ""
    return digest, kept


def _joined_sections(
    folded: FoldedItems, pins: Sequence[str], written: str, digest: Sequence[str], steps: Sequence[str]
) -> str:
    """The block: all its sections that are not empty, between header and footer."""
    sections = [HEADER]
    if folded.task:
        sections.append("The user's first request, word for word:\n" + folded.task)
    if any(pins):
        heading = "What the user said after that, word for word" + _gaps(pins)
        sections.append("\n".join([heading, *(f"- {pin}" for pin in pins if pin)]))
    if folded.newest:
        sections.append("The user's latest message, word for word:\n" + folded.newest)
    if written:
        sections.append(written)
    if digest:
        sections.append("\n".join(digest))
    if any(steps):
        sections.append("\n".join(["Steps so far" + _gaps(steps), *(f"- {step}" for step in steps if step)]))
    sections.append(FOOTER)
    return "\n\n".join(sections)


def _gaps(lines: Sequence[str]) -> str:
    """The end of a heading, which says if some of *lines* are left out."""
    return ":" if all(lines) else " (some left out for want of room):"


# What users wrote.


class _UserTexts:
    """The user's texts, from which pins are chosen. Tokens and ranks of equal texts are computed once."""

    def __init__(self, texts: Sequence[str], count: Count) -> None:
        self._texts = texts
        self._count = count
        sizes = {text: count(text) + 2 for text in dict.fromkeys(texts)}
        self._sizes = [sizes[text] for text in texts]
        self._tokens = sum(self._sizes)
        self._rank = functools.cache(sentence_rank)

    def pins(self, tokens: int) -> list[str]:
        """The user texts in at most *tokens*: all of them if they fit, "" for one of which nothing is kept.

        Otherwise sentences are kept, each word for word: those that constrain before those that ask before the rest,
        and newer before older.
        """
        if self._tokens <= tokens:
            return list(self._texts)
        short = max(24, tokens // 8)
        sentences = _Sentences(self._texts, [size <= short for size in self._sizes], self._rank)
        kept = _affordable(sentences, tokens, self._count)
        pins = [""] * len(self._texts)
        for at, indexes in kept.items():
            pins[at] = _excerpt(self._texts[at], sentences.of(at), indexes)
        return pins


class _Sentence(msgspec.Struct, frozen=True, gc=False):
    """Sentence ``index`` of the text ``at``: its words, and their start and end in that text."""

    at: int
    index: int
    start: int
    end: int
    text: str


class _Sentences:
    """The sentences of each of *texts*, which are taken apart when they are first needed.

    A text for which *whole* is true counts as one sentence.
    """

    def __init__(self, texts: Sequence[str], whole: Sequence[bool], rank: Callable[[str], int]) -> None:
        self.texts = texts
        self.whole = whole
        self.rank = rank
        self._found: dict[int, list[_Sentence]] = {}

    def of(self, at: int) -> list[_Sentence]:
        """The sentences of text *at*, in order."""
        found = self._found.get(at)
        if found is None:
            found = self._found[at] = _taken_apart(self.texts[at], at, whole=self.whole[at])
        return found

    def newest(self) -> list[_Sentence]:
        """The sentences that are weighed one by one: those that constrain or ask, then others, newest text first."""
        telling: list[_Sentence] = []
        others: list[_Sentence] = []
        for at in range(len(self.texts) - 1, -1, -1):
            if len(others) >= SENTENCES and self.whole[at] and not self.rank(self.texts[at]):
                continue  # thousands of short texts: only one that asks for something can still be chosen
            for sentence in self.of(at):
                if len(sentence.text) <= READ:
                    (telling if self.rank(sentence.text) else others).append(sentence)
                if len(telling) == SENTENCES:
                    return telling
        return [*telling, *others][:SENTENCES]


def _taken_apart(text: str, at: int, *, whole: bool) -> list[_Sentence]:
    """The sentences of *text*, the text *at* of all."""
    if whole:
        return [_Sentence(at, 0, 0, len(text), text)] if text.strip() else []
    found: list[_Sentence] = []
    start = 0
    for end in [*(match.end() for match in SENTENCE_END.finditer(text, 0, READ)), len(text)]:
        if words := text[start:end].strip():
            found.append(_Sentence(at, len(found), start, end, words))
        start = end
    return found


def _affordable(sentences: _Sentences, tokens: int, count: Count) -> dict[int, set[int]]:
    """The best sentences that together take at most *tokens*: their indexes by text."""
    kept: dict[int, set[int]] = {}
    misses = 0
    for sentence in sorted(sentences.newest(), key=lambda each: (-sentences.rank(each.text), -each.at)):
        cost = count(sentence.text) + _mark_tokens(sentences.of(sentence.at), sentence.at in kept)
        if cost <= tokens:
            kept.setdefault(sentence.at, set()).add(sentence.index)
            tokens -= cost
        else:
            misses += 1
        if tokens < SHORTEST or misses > 20:
            break
    return kept


def _mark_tokens(sentences: Sequence[_Sentence], has_bullet: bool) -> int:
    """Tokens around one more sentence: the bullet of its text, and a sign for what is left out beside it."""
    bullet = 0 if has_bullet else 2
    return bullet + (3 if len(sentences) > 1 else 0)


def _excerpt(text: str, sentences: Sequence[_Sentence], kept: set[int]) -> str:
    """The kept sentences of *text*, neighbours as they stood, with a sign for what is left out after each run."""
    if len(kept) == len(sentences):
        return text.strip("\n")
    runs: list[tuple[int, int]] = []
    for sentence in sentences:
        if sentence.index not in kept:
            continue
        if sentence.index - 1 in kept:
            runs[-1] = (runs[-1][0], sentence.end)
        else:
            runs.append((sentence.start, sentence.end))
    return " ".join(f"{text[start:end].strip()} {OMITTED}" for start, end in runs)


# What the model did.


def _steps(rounds: Sequence[Round], tokens: int, count: Count) -> list[str]:
    """One line for each round: the newest that fit, "" for the others."""
    steps = [""] * len(rounds)
    for index in range(len(rounds) - 1, -1, -1):
        step = _step(rounds[index].spoken)
        size = count(step) + 2
        if size > tokens:
            break
        steps[index] = step
        tokens -= size
    return steps


def _with_words(rounds: Sequence[Round], steps: Sequence[str], tokens: int, count: Count) -> list[str]:
    """*steps* with the words of the rounds that are worth most in full, while *tokens* last."""
    longer, scores = list(steps), round_scores(rounds)
    for index in sorted(range(len(rounds)), key=lambda i: (-scores[i], -i))[:TRIED]:
        words = rounds[index].spoken.text.strip()
        if not words or words in longer[index] or len(words) > tokens * LONG_TOKEN:
            continue
        whole = _with_calls(words, rounds[index].spoken)
        cost = count(whole) + 2 - count(longer[index])
        if cost <= tokens:
            longer[index] = whole
            tokens -= cost
    return longer


def _step(entry: ItemText) -> str:
    """One line for a round: its first sentence of some length, and its calls."""
    sentences = (part.strip() for part in SENTENCE_END.split(entry.text[:2048]))
    first = next((sentence for sentence in sentences if len(sentence) > 10), "")
    return _with_calls(shorten(first, 140), entry)


def _with_calls(words: str, entry: ItemText) -> str:
    """*words* and the calls of *entry*, each with its first argument."""
    calls = ", ".join([f"{name}({_first_argument(arguments)})" for name, arguments in entry.calls][:6])
    return " -> ".join(part for part in (words, calls) if part)


def _first_argument(arguments: str) -> str:
    """The first argument of a call that is not empty, on one short line."""
    first = next((line for line in plain_arguments(arguments).splitlines() if line.strip()), "")
    return shorten(first.strip(), 80)
