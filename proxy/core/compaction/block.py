"""Writes the block, the text that stands for folded rounds: a pure function of the folded items, caps and counter.

A block has up to eight sections between its header and its footer: the user's first request, the pins (later words of
the user), the user's latest message, a model's summary, the digest, the steps (one line for each round), parts of
results if room is left, and the state of the work. It is never made from an earlier block, because the client sends the
originals again each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from proxy.core.compaction.digest import digest_of, quoted
from proxy.core.compaction.excerpts import (
    READ,
    Excerpts,
    Sentence,
    excerpt,
    mark_tokens,
    overtaken_reports,
    sentences_of,
)
from proxy.core.compaction.names import without_line_numbers
from proxy.core.compaction.steps import BULLET, LEAST_ROOM, Steps, rounds_of, sentence_rank, shown_call
from proxy.core.compaction.truncate import truncate, truncate_to
from proxy.core.compaction.work_state import NO_STATE, STATE, FoldedCall, WorkState
from proxy.core.conversation import Count, ItemText
from proxy.core.tokens.counting import unremembered
from proxy.core.tool_calls import Arguments, read_all_arguments
from proxy.core.tool_table import NO_TALK, TalkRules

HEADER = (
    "[Summary of the earlier part of this conversation, written in its place to save room. A record, not a request.]"
)
FOOTER = "[End of the summary. The conversation goes on from here.]"

SUMMARY = "What happened so far, as a model summed it up:"
"""The heading of a model's summary. It says that a model reports here, so that no order in it reads as the user's."""

TASK = "The user's first request, word for word"
PINS = "What the user said after that, word for word"
NEWEST = "The user's latest message, word for word"
STEPS = "Steps so far"
"""The beginnings of the headings of the other sections; the digest has none."""

HEADING_END = {True: ":", False: " (some left out for want of room):"}
"""The end of a heading, by whether all its lines are shown."""

RESULTS = "What tools answered at the time, in part:"
"""The heading of the results."""

RESULTS_FRAME, LEAST_RESULTS = 16, 64
"""Tokens of that heading, and those below which no result is quoted: they would hold hardly a line."""

RESULT_FRAME, LEAST_OF_RESULT, MOST_OF_RESULT = 8, 32, 400
"""Tokens of a result's quotation marks and bullet; tokens that are quoted of a result at least and at most."""

BYTES_OF_RESULT = 2_048
"""Bytes of a result from which those tokens are taken."""

STEP_SHARE = 0.25
"""Share of the text's tokens for the steps; the digest, which later steps refer to most, gets the rest."""

QUOTED_SHARE = 0.5
"""Share of the text's tokens for the digest of a chat in which the user's texts do not all fit (decision 31)."""

MOST_ERROR_LINES = 3
"""Line ends in the answer of a tool that shows files and failed, at most."""

_SHOWING = ("file_read", "shell_read", "grep", "glob", "list")
"""Kinds of tools that show what stands in files, or which there are."""

_WRITING = ("file_edit", "file_write")
"""Kinds of tools that answer with what they were given."""

STATE_FRAME = 10
"""Tokens of the heading of the state of the work."""

MOST_TOKENS = 4
"""Tokens of a character at most: one for each of its bytes. A text that is so surely short is not even counted."""

HEADINGS = 40
"""Tokens of the headings between header and footer."""

MOST_MISSES = 20
"""Sentences in all that may be too long for the room before no further one is tried."""

SENTENCES = 400
"""Sentences of the user's texts that are ranked. If there are more, those of the newest texts are."""


@dataclass(frozen=True, slots=True)
class FoldedItems:
    """The material for a block: the folded entries in order, and the texts that it repeats in full.

    ``task`` and ``newest`` are the first and the latest user text, as clipped as they are in the view; empty if the
    carrier holds them. ``user_texts`` are the other folded user texts. ``carrier_text`` is the text of the carrier,
    which need not be repeated. ``state`` is the state of the work after them, ``calls`` are their calls with the
    results. ``talk`` tells which sentences later ones overtake. ``arguments`` are those of their calls if they
    were read before.
    """

    entries: tuple[ItemText, ...]
    user_texts: tuple[str, ...]
    task: str = ""
    newest: str = ""
    carrier_text: str = ""
    state: WorkState = NO_STATE
    calls: tuple[FoldedCall, ...] = ()
    talk: TalkRules = NO_TALK
    arguments: Mapping[str, Arguments] = field(default_factory=dict)


def render_block(folded: FoldedItems, block_tokens: int, text_tokens: int, count: Count, summary: str = "") -> str:
    """The block's text: at most *block_tokens* beside the task and the newest user text.

    *text_tokens* of them are for digest and steps, less what a *summary* by a model takes. The tokens that digest and
    steps leave go to the user's words first, then to the words of the best rounds, then to parts of results.
    """
    section = ""
    free = text_tokens
    if summary:
        section = f"{SUMMARY}\n{summary}"
        free -= count(section) + 2
    free = max(0, free)
    room = block_tokens - count(HEADER) - count(FOOTER) - HEADINGS - (text_tokens - free)
    user_texts = _UserTexts(folded.user_texts, count, folded.talk)
    write = _work_lists
    if folded.entries and not any(entry.calls or entry.role == "tool" for entry in folded.entries):
        write = _chat_lists  # no tool was used
    lists = write(folded, user_texts, room, free, unremembered(count), section)
    block = _joined_sections(folded, section, lists)
    most = block_tokens + sum(map(count, filter(None, (folded.task, folded.newest))))
    # The parts were counted one by one; together they may take a little more.
    while (excess := count(block) - most) > 0 and (lists.results or any(lists.steps) or lists.digest):
        lists = _shortened(lists, excess, count)
        block = _joined_sections(folded, section, lists)
    return block


@dataclass(frozen=True, slots=True)
class _Lists:
    """The sections of a block that are lists of lines; "" stands for a line that is left out."""

    pins: list[str]
    digest: list[str]
    steps: list[str]
    state: list[str]
    results: list[str]


def _work_lists(
    folded: FoldedItems, user_texts: _UserTexts, room: int, free: int, count: Count, section: str
) -> _Lists:
    """The lists of a block in *room* tokens, of which *free* are for digest, steps and state."""
    pins = user_texts.pins(max(0, room - free))
    pin_tokens = user_texts.tokens(pins)
    shown = "\n".join([folded.task, *filter(None, pins), folded.newest, folded.carrier_text, section])
    step_room = int(free * STEP_SHARE)
    state: list[str] = []
    state_tokens = 0
    if folded.state != NO_STATE:
        state = folded.state.lines(step_room - STATE_FRAME, count)
    if state:
        state_tokens = sum([count(line) + BULLET for line in state]) + STATE_FRAME
        shown = "\n".join([shown, *state])
    arguments = folded.arguments or read_all_arguments(folded.entries)
    writer = Steps(
        rounds_of(folded.entries, [call.outcome for call in folded.calls]), count, arguments, shown, folded.talk
    )
    steps = writer.lines(step_room - state_tokens)
    digest_room = free
    if are_whole := pins == list(folded.user_texts):
        writer.extend(room - free - pin_tokens)
        digest_room = room - pin_tokens
    step_tokens = sum(writer.sizes) + state_tokens
    known = "\n".join([shown, *filter(None, steps)])
    digest = digest_of(folded.entries, digest_room - step_tokens, count, known, arguments, _shown_files(folded.calls))
    left = room - step_tokens - pin_tokens - digest.tokens
    if left > 0 and not are_whole:
        pins = user_texts.pins(pin_tokens + left)
        left -= user_texts.tokens(pins) - pin_tokens
    if left > LEAST_ROOM:
        left = writer.extend(left)
    results: list[str] = []
    if left > LEAST_RESULTS:
        results = _quoted_results(folded.calls, arguments, left - RESULTS_FRAME, count)
    return _Lists(pins, digest.lines(), steps, state, results)


def _shown_files(calls: Sequence[FoldedCall]) -> set[str]:
    """The results of *calls* that show what stands in files: a call that fails answers with few lines."""
    return {call.result for call in calls if call.kind in _SHOWING and call.result.count("\n") > MOST_ERROR_LINES}


def _quoted_results(
    calls: Sequence[FoldedCall], arguments: Mapping[str, Arguments], tokens: int, count: Count
) -> list[str]:
    """Lines in at most *tokens* with the head and the end of what the newest of *calls* answered, in order.

    Of calls that are alike only the newest is quoted, and none that wrote a file.
    """
    lines: list[str] = []
    done: set[tuple[str, str]] = set()
    for call in reversed(calls):
        # A result that holds the end of a block would end this one for a reader.
        if call.kind in _WRITING or not call.result or FOOTER in call.result or call[:2] in done:
            continue
        done.add(call[:2])
        name = shown_call(call.name, call.arguments, arguments[call.arguments])
        room = min(tokens - count(name) - RESULT_FRAME, MOST_OF_RESULT)
        if room < LEAST_OF_RESULT:
            break
        # So many lines that only the bytes, and then the tokens, decide.
        lines_allowed = size = BYTES_OF_RESULT
        text = without_line_numbers(truncate(call.result, lines_allowed, size, tail=True)).strip()
        line = f"{name}: {quoted(truncate_to(text, lines_allowed, size, room, count))}"
        tokens -= count(line) + BULLET
        lines.append(line)
    return lines[::-1]


def _chat_lists(
    folded: FoldedItems, user_texts: _UserTexts, room: int, free: int, count: Count, section: str
) -> _Lists:
    """The lists of a chat's block: what tells most of either side, and a digest of what is not quoted.

    All texts of the user stay if they fit. If not, a third of the digest's room is for quotes, and of a talk of equals
    all of it: a sentence holds its names and figures, and says what they are about.
    """
    digest_room = free - int(free * STEP_SHARE)
    left = room - digest_room
    model_texts = [each.spoken.text for each in rounds_of(folded.entries)]
    if user_texts.fit(left):
        pins = list(folded.user_texts)
        excerpts = Excerpts((), model_texts, count, _shown(folded, pins, section))
        left -= user_texts.tokens(pins)
    else:
        pins = []
        excerpts = Excerpts(folded.user_texts, model_texts, count, _shown(folded, (), section), folded.talk)
        digest_room = 0 if excerpts.are_equals else int(free * QUOTED_SHARE)
        left = room - digest_room
        left = excerpts.choose_directing(left)
    left = digest_room + excerpts.choose(left)
    known = _shown(folded, [*pins, *excerpts.user_lines(), *excerpts.model_lines()], section)
    digest = digest_of(folded.entries, left, count, known)
    excerpts.choose(left - digest.tokens)
    # Lines were counted one by one. Joined they take 3 to 6 % less, which is room for more (decision 33).
    lines = [*(pins or excerpts.user_lines()), *digest.lines(), *excerpts.model_lines()]
    excerpts.choose(room - count("\n".join([f"- {line}" for line in lines if line])))
    return _Lists(pins or excerpts.user_lines(), digest.lines(), excerpts.model_lines(), [], [])


def _shown(folded: FoldedItems, lines: Iterable[str], section: str) -> str:
    """What a block with these *lines* and the *section* of a model's summary shows."""
    return "\n".join([folded.task, *filter(None, lines), folded.newest, folded.carrier_text, section])


def _shortened(lists: _Lists, tokens: int, count: Count) -> _Lists:
    """*lists* with about *tokens* less: the oldest result goes first, then steps, then the last line of the digest."""
    if lists.results:
        return replace(lists, results=lists.results[1:])
    if not any(lists.steps):
        return replace(lists, digest=lists.digest[:-1])
    remaining = list(lists.steps)
    for index, step in enumerate(remaining):
        if step and tokens > 0:
            tokens -= count(step)
            remaining[index] = ""
    return replace(lists, steps=remaining)


def _joined_sections(folded: FoldedItems, summary: str, lists: _Lists) -> str:
    """The block: all sections that are not empty, between header and footer."""
    sections = [HEADER]
    if folded.task:
        sections.append(f"{TASK}:\n{folded.task}")
    if any(lists.pins):
        heading = PINS + HEADING_END[all(lists.pins)]
        sections.append("\n".join([heading, *(f"- {pin}" for pin in lists.pins if pin)]))
    if folded.newest:
        sections.append(f"{NEWEST}:\n{folded.newest}")
    if summary:
        sections.append(summary)
    if lists.digest:
        sections.append("\n".join(lists.digest))
    if any(lists.steps):
        sections.append(
            "\n".join([STEPS + HEADING_END[all(lists.steps)], *(f"- {step}" for step in lists.steps if step)])
        )
    if lists.results:
        sections.append("\n".join([RESULTS, *(f"- {line}" for line in lists.results)]))
    if lists.state:
        sections.append("\n".join([STATE + ":", *(f"- {line}" for line in lists.state)]))
    sections.append(FOOTER)
    return "\n\n".join(sections)


# The words of users.


class _UserTexts:
    """The user's texts, from which pins are chosen. Tokens and ranks of equal texts are computed once."""

    def __init__(self, texts: Sequence[str], count: Count, talk: TalkRules) -> None:
        self._texts = texts
        self._talk = talk
        self._count = count
        self._size = functools.cache(lambda text: count(text) + BULLET)
        self._rank = functools.cache(sentence_rank)

    def pins(self, tokens: int) -> list[str]:
        """The user texts in at most *tokens*: all of them if they fit, "" for one of which nothing stays.

        Otherwise the best sentences stay, each word for word. Those that constrain come first, then those that ask for
        something, then the rest, and last what a later one overtakes; of equal ones the newer first.
        """
        if self.fit(tokens):
            return list(self._texts)
        short = max(24, tokens // 8)
        sentences = _Sentences(self._texts, [self._is_short(text, short) for text in self._texts], self._rank)
        chosen = _best_sentences(sentences, tokens, self._count, self._talk)
        pins = [""] * len(self._texts)
        for at, indexes in chosen.items():
            pins[at] = excerpt(self._texts[at], sentences.in_text(at), indexes)
        return pins

    def fit(self, tokens: int) -> bool:
        """True if all texts together take at most *tokens*. No more of them are counted than it takes to know."""
        tokens -= BULLET * len(self._texts)
        for text in self._texts:
            if tokens < 0:
                return False
            tokens -= self._size(text) - BULLET
        return tokens >= 0

    def tokens(self, pins: Sequence[str]) -> int:
        """Tokens of *pins* as a list; empty ones are left out."""
        return sum([self._size(pin) for pin in pins if pin])

    def _is_short(self, text: str, tokens: int) -> bool:
        """True if *text* takes at most *tokens*."""
        return len(text) * MOST_TOKENS + BULLET <= tokens or self._size(text) <= tokens


class _Sentences:
    """The sentences of each of *texts*. A text is split when its sentences are first needed.

    A text for which *whole* is true counts as one sentence.
    """

    def __init__(self, texts: Sequence[str], whole: Sequence[bool], rank: Callable[[str], int]) -> None:
        self.texts = texts
        self.whole = whole
        self.rank = rank
        self._split: dict[int, list[Sentence]] = {}

    def in_text(self, at: int) -> list[Sentence]:
        """The sentences of text *at*, in order."""
        sentences = self._split.get(at)
        if sentences is None:
            sentences = self._split[at] = sentences_of(self.texts[at], at, whole=self.whole[at])
        return sentences

    def newest(self) -> list[Sentence]:
        """The sentences that are ranked: first those that constrain or ask for something; newest text first."""
        directing: list[Sentence] = []
        others: list[Sentence] = []
        for at in range(len(self.texts) - 1, -1, -1):
            if len(others) >= SENTENCES and self.whole[at] and not self.rank(self.texts[at]):
                continue  # thousands of short texts: only one that asks for something can still be chosen
            for sentence in self._rankable(at):
                ranked = directing if self.rank(sentence.text) else others
                ranked.append(sentence)
                if len(directing) == SENTENCES:
                    return directing
        return [*directing, *others][:SENTENCES]

    def _rankable(self, at: int) -> list[Sentence]:
        """The sentences of text *at* that are not too long to be ranked."""
        return [sentence for sentence in self.in_text(at) if len(sentence.text) <= READ]


def _best_sentences(sentences: _Sentences, tokens: int, count: Count, talk: TalkRules) -> dict[int, set[int]]:
    """The best sentences that together take at most *tokens*: their indexes by text."""
    chosen: dict[int, set[int]] = {}
    misses = 0
    newest = sentences.newest()
    last = overtaken_reports(newest, talk)

    def order(sentence: Sentence) -> tuple[bool, int, int]:
        return (sentence.at, sentence.index) in last, -sentences.rank(sentence.text), -sentence.at

    for sentence in sorted(newest, key=order):
        cost = count(sentence.text) + mark_tokens(sentences.in_text(sentence.at), sentence.at in chosen)
        if cost <= tokens:
            chosen.setdefault(sentence.at, set()).add(sentence.index)
            tokens -= cost
        else:
            misses += 1
        if tokens < LEAST_ROOM or misses > MOST_MISSES:
            break
    return chosen
