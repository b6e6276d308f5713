"""The block: what stands for folded rounds. A pure function of the folded items, the caps and the counter.

It never digests an earlier block, because the client sends the originals again each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

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

    ``task`` and ``newest`` are texts to repeat in full (already clipped where they had to be), empty when they stand
    elsewhere in the view. ``user_texts`` are the other folded user texts. ``carrier_text`` is the text of the item that
    carries the block: it need not be repeated.
    """

    entries: tuple[ItemText, ...]
    user_texts: tuple[str, ...]
    task: str = ""
    newest: str = ""
    carrier_text: str = ""


def render_block(folded: FoldedItems, block: int, text: int, count: Count, summary: str = "") -> str:
    """The block's text: at most *block* tokens beside the task and the newest user text, of which *text* for digest.

    A *summary* by a model is taken out of *text*. What digest and steps leave over goes to the user's words, then to
    the rounds that are worth most, in full.
    """
    frame = count(HEADER) + count(FOOTER) + HEADINGS
    pins = choose_pins(folded.user_texts, max(0, block - text - frame), count)
    written = f"{SUMMARY}\n{summary}" if summary else ""
    own = max(0, text - (count(written) + 2 if written else 0))
    said = "\n".join([folded.task, *(pin for pin in pins if pin), folded.newest, folded.carrier_text, written])
    rounds = rounds_of(folded.entries)
    lines = _steps(rounds, int(own * STEP_SHARE), count)
    used = sum(count(line) + 2 for line in lines if line)
    digest = digest_of(folded.entries, own - used, count, said).lines()
    spent = _size(pins, count)
    left = block - frame - (text - own) - used - spent - sum(count(line) + 1 for line in digest)
    if left > 0 and pins != list(folded.user_texts):
        pins = choose_pins(folded.user_texts, spent + left, count)
        left -= _size(pins, count) - spent
    if left > SHORTEST:
        lines = _with_words(rounds, lines, left, count)
    made = _assembled(folded, pins, written, digest, lines)
    most = block + count(folded.task) + count(folded.newest)
    # Parts were counted one by one; together they may take a little more.
    while (over := count(made) - most) > 0 and (any(lines) or digest):
        digest, lines = _without(digest, lines, over, count)
        made = _assembled(folded, pins, written, digest, lines)
    return made


def _size(pins: Sequence[str], count: Count) -> int:
    return sum(count(pin) + 2 for pin in pins if pin)


def _without(digest: list[str], lines: list[str], tokens: int, count: Count) -> tuple[list[str], list[str]]:
    """Digest and steps less about so many *tokens*: the oldest steps go, then the digest's last line."""
    if not any(lines):
        return digest[:-1], lines
    kept = list(lines)
    for index, line in enumerate(lines):
        if line and tokens > 0:
            tokens -= count(line)
            kept[index] = ""
    return digest, kept


def _assembled(
    folded: FoldedItems, pins: Sequence[str], written: str, digest: Sequence[str], lines: Sequence[str]
) -> str:
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
    if any(lines):
        sections.append("\n".join(["Steps so far" + _gaps(lines), *(f"- {line}" for line in lines if line)]))
    sections.append(FOOTER)
    return "\n\n".join(sections)


def _gaps(lines: Sequence[str]) -> str:
    """The end of a heading: nothing vanishes without a word."""
    return ":" if all(lines) else " (some left out for want of room):"


def choose_pins(texts: Sequence[str], tokens: int, count: Count) -> list[str]:
    """The user texts in at most *tokens*, empty where nothing of one is kept: all of them while they fit.

    Else sentences: what constrains before what asks before the rest, newer before older, each word for word.
    """
    known = {text: count(text) + 2 for text in dict.fromkeys(texts)}
    sizes = [known[text] for text in texts]
    if sum(sizes) <= tokens:
        return list(texts)
    short = max(24, tokens // 8)
    pieces = _Pieces(texts, [size <= short for size in sizes])
    ranked = sorted(_newest(pieces), key=lambda piece: (-sentence_rank(piece.text), -piece.at))
    kept: list[set[int]] = [set() for _ in texts]
    misses = 0
    for piece in ranked:
        cost = count(piece.text) + _marks(pieces[piece.at], kept[piece.at])
        if cost <= tokens:
            kept[piece.at].add(piece.index)
            tokens -= cost
        else:
            misses += 1
        if tokens < SHORTEST or misses > 20:
            break
    return [_joined(text, pieces[at], kept[at]) if kept[at] else "" for at, text in enumerate(texts)]


@dataclass(frozen=True, slots=True)
class _Sentence:
    """Sentence *index* of the text *at*: its words, and where they stand in that text."""

    at: int
    index: int
    start: int
    end: int
    text: str


def _marks(pieces: Sequence[_Sentence], kept: Set[int]) -> int:
    """Return the tokens around one more piece: the bullet of its text, and a sign of what went at every gap."""
    bullet = 0 if kept else 2
    return bullet + (3 if len(pieces) > 1 else 0)


def _sentences(text: str, at: int, *, whole: bool) -> list[_Sentence]:
    if whole:
        return [_Sentence(at, 0, 0, len(text), text)] if text.strip() else []
    found: list[_Sentence] = []
    start = 0
    for end in [*(match.end() for match in SENTENCE_END.finditer(text, 0, READ)), len(text)]:
        if words := text[start:end].strip():
            found.append(_Sentence(at, len(found), start, end, words))
        start = end
    return found


class _Pieces(dict[int, list[_Sentence]]):
    """The sentences of each of *texts*, by its index, taken apart when they are first looked at.

    Those of which *whole* says so are one sentence each.
    """

    def __init__(self, texts: Sequence[str], whole: Sequence[bool]) -> None:
        self.texts = texts
        self.whole = whole

    def __missing__(self, at: int) -> list[_Sentence]:
        """Take the text *at* apart."""
        found = self[at] = _sentences(self.texts[at], at, whole=self.whole[at])
        return found


def _newest(pieces: _Pieces) -> list[_Sentence]:
    """Sentences of the newest texts first, as many as are looked at one by one; first those that constrain or ask."""
    telling: list[_Sentence] = []
    others: list[_Sentence] = []
    for at in range(len(pieces.texts) - 1, -1, -1):
        if len(others) >= SENTENCES and pieces.whole[at] and not sentence_rank(pieces.texts[at]):
            continue  # thousands of short texts: only one that asks for something can still be chosen
        for piece in pieces[at]:
            if len(piece.text) <= READ:
                (telling if sentence_rank(piece.text) else others).append(piece)
            if len(telling) == SENTENCES:
                return telling
    return [*telling, *others][:SENTENCES]


def _joined(text: str, pieces: Sequence[_Sentence], kept: set[int]) -> str:
    """The kept sentences of *text*, neighbours as they stood, with a sign for what is between and around them."""
    if not kept or len(kept) == len(pieces):
        return text.strip("\n") if kept else ""
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        if piece.index in kept:
            joins = runs and piece.index - 1 in kept
            runs[-1:] = [(runs[-1][0], piece.end)] if joins else [*runs[-1:], (piece.start, piece.end)]
    return " ".join(f"{text[start:end].strip()} {OMITTED}" for start, end in runs)


def _steps(rounds: Sequence[Round], tokens: int, count: Count) -> list[str]:
    """One line a round: the newest that fit; empty for the others."""
    lines = [""] * len(rounds)
    for index in range(len(rounds) - 1, -1, -1):
        line = _step(rounds[index].spoken)
        size = count(line) + 2
        if size > tokens:
            break
        lines[index] = line
        tokens -= size
    return lines


def _with_words(rounds: Sequence[Round], lines: Sequence[str], tokens: int, count: Count) -> list[str]:
    """*lines* with the words of the rounds that are worth most in full, while *tokens* last."""
    found, worth = list(lines), round_scores(rounds)
    for index in sorted(range(len(rounds)), key=lambda i: (-worth[i], -i))[:TRIED]:
        words = rounds[index].spoken.text.strip()
        if not words or words in found[index] or len(words) > tokens * LONG_TOKEN:
            continue
        whole = " -> ".join(part for part in (words, _called(rounds[index].spoken)) if part)
        cost = count(whole) + 2 - count(found[index])
        if cost <= tokens:
            found[index] = whole
            tokens -= cost
    return found


def _step(entry: ItemText) -> str:
    said = next((part.strip() for part in SENTENCE_END.split(entry.text[:2048]) if len(part.strip()) > 10), "")
    return " -> ".join(part for part in (shorten(said, 140), _called(entry)) if part)


def _called(entry: ItemText) -> str:
    calls = [f"{name}({_brief(arguments)})" for name, arguments in entry.calls]
    return ", ".join(calls[:6])


def _brief(arguments: str) -> str:
    first = next((line for line in plain_arguments(arguments).splitlines() if line.strip()), "")
    return shorten(first.strip(), 80)
