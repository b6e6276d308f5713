"""Chooses what a block quotes of a conversation without tools: sentences of both sides, by what they tell.

A chat has no results that a digest could name things from: what happened stands in its sentences, and in those of
either side. A text tells much if it has words and figures that few others have, for each token that it takes. What is
quoted already counts for little, so "That sounds great!" and everything said twice give way. Sentences of the user that
constrain or ask for something come first, but in a talk of equals in half of the room only. A short text is quoted
whole, so that an answer keeps its sense.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import log2

import msgspec

from proxy.core.compaction.steps import BULLET, LEAST_ROOM, LONG_SENTENCE, SENTENCE_END, overtaken, sentence_rank
from proxy.core.compaction.truncate import OMITTED
from proxy.core.conversation import Count
from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.tool_table import NO_TALK, TalkRules

READ = 65_536
"""Characters of one text that are split into sentences; the rest of it counts as one more sentence."""

SHORT, SHORTEST = 240, 160
"""Characters of a text that is quoted whole or not at all; above the second what directs is quoted on its own."""

MOST_TEXTS, MOST_SENTENCES = 1_024, 4_096
"""Texts, the newest of each side, and sentences of them that are looked through."""

SMOOTH = 6.0
"""Tokens added to the size of a text, so that the shortest do not always win."""

OLDEST = 0.8
"""The worth of the oldest text, as a share of that of the newest: in a chat old facts come up nearly as often."""

AGAIN = 0.3
"""What is left of a word's weight each time that it is quoted."""

LEAST_WEIGHT = 0.001
"""The weight of a word below which it counts as none: one that few others have weighs 5 to 11."""

QUESTION = 0.3
"""The worth of a text that only asks, as a share of that of others: what is known stands in its answer."""

OVERTAKEN = 0.5
"""The worth of a sentence that a later one overtakes, as a share of that of others."""

SAMPLED = 256
"""Texts of each side, the newest, by which it is decided if both talk as equals."""

MOST_LENGTHS, MOST_ORDERS = 2.0, 1.5
"""What equals stay below: how many times as long as the other's one side's texts are, and as often hold orders.

In generated talks of two people, the texts of one are up to 1.1 times as long, and have words of orders up to 1.5 times
as often. An assistant's answers are 2 times as long and more, or have them a fifth as often (decision 32).
"""

EQUALS_SHARE = 0.5
"""Share of the room in which what constrains or asks for something comes first in a talk of equals."""

COUNTED_WHOLE = 2_048
"""Characters of a text whose line is counted anew for each sentence that is added to it.

Of a longer one the sentence alone is counted: thousands of lines of thousands of characters would take seconds.
"""

MOST_MISSES = 40
"""Texts in all that may be too long for the room before no further one is tried."""

_PIECE = lazy_pattern(
    r"[^\W\d_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]{3,}|\d[\d.,:/-]*|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]{2,}"
)
"""A word, a figure, or a run of characters of a script that is written without spaces."""

_ASKS = lazy_pattern(r"(?:[?？]|[吗嗎呢か])\W*\Z")
"""The end of a question. Chinese and Japanese also ask without a mark."""

_ASKING_END = 8
"""Characters at the end of a sentence in which that is looked for."""

_WIDE = "\u3040"
"""The first of the characters that are written without spaces. Its pairs count as words."""


class Sentence(msgspec.Struct, frozen=True, gc=False):
    """Sentence ``index`` of the text ``at``: its words, and their start and end in that text."""

    at: int
    index: int
    start: int
    end: int
    text: str


def sentences_of(text: str, at: int, *, whole: bool = False) -> list[Sentence]:
    """The sentences of *text*, whose index among all texts is *at*; with *whole* it counts as one."""
    if not text.strip():
        return []
    if whole:
        return [Sentence(at, 0, 0, len(text), text)]
    sentences: list[Sentence] = []
    start = 0
    for end in [*(match.end() for match in SENTENCE_END.finditer(text, 0, READ)), len(text)]:
        if words := text[start:end].strip():
            sentences.append(Sentence(at, len(sentences), start, end, words))
        start = end
    return sentences


def excerpt(text: str, sentences: Sequence[Sentence], chosen: set[int]) -> str:
    """The chosen sentences of *text* in runs of neighbours, each followed by a sign that a part is left out."""
    if len(chosen) == len(sentences):
        return text.strip("\n")
    runs: list[tuple[int, int]] = []
    for sentence in sentences:
        if sentence.index not in chosen:
            continue
        if sentence.index - 1 in chosen:
            runs[-1] = (runs[-1][0], sentence.end)
        else:
            runs.append((sentence.start, sentence.end))
    return " ".join(f"{text[start:end].strip()} {OMITTED}" for start, end in runs)


def overtaken_reports(sentences: Sequence[Sentence], talk: TalkRules) -> set[tuple[int, int]]:
    """Text and index of each of the user's *sentences* that says how far something is, as a later one says anew."""
    if not talk.progress:
        return set()
    ordered = sorted(sentences, key=lambda each: (each.at, each.index))
    gone = overtaken([[each.text] for each in ordered], [False] * len(ordered), talk)
    return {(each.at, each.index) for each, indexes in zip(ordered, gone, strict=True) if indexes}


def mark_tokens(sentences: Sequence[Sentence], has_bullet: bool) -> int:
    """Tokens beside one more sentence: for the bullet of its text, and for a sign that a part is left out."""
    tokens = 0
    if not has_bullet:
        tokens += 2
    if len(sentences) > 1:
        tokens += 3
    return tokens


def talk_as_equals(user_texts: Sequence[str], model_texts: Sequence[str]) -> bool:
    """True if neither side directs the other: both write about as much at a time, and use words of orders alike.

    Two people say "you should see it" and "thank you for always listening" to each other, which are no orders.
    """
    sides = user_texts[-SAMPLED:], model_texts[-SAMPLED:]
    shorter, longer = sorted(map(_mean_length, sides))
    if longer >= MOST_LENGTHS * shorter:
        return False
    fewer, more = sorted(map(_share_with_orders, sides))
    return more < MOST_ORDERS * fewer


def _mean_length(texts: Sequence[str]) -> float:
    return sum(map(len, texts)) / max(1, len(texts))


def _share_with_orders(texts: Sequence[str]) -> float:
    """The share of *texts* that have words by which something is constrained or asked for."""
    return sum([sentence_rank(text) > 0 for text in texts]) / max(1, len(texts))


class _Candidate(msgspec.Struct, frozen=True):
    """Sentences of the text ``at`` that are quoted together: their words, each once, and their worth for each token."""

    at: int
    sentences: tuple[Sentence, ...]
    words: tuple[str, ...]
    worth: float
    rank: int = 0


class Excerpts:
    """The quoted sentences of what the user and the model said, chosen one after the other.

    *known* is what the block shows anyway. *talk* tells which sentences of the user a later one overtakes.
    """

    def __init__(
        self,
        user_texts: Sequence[str],
        model_texts: Sequence[str],
        count: Count,
        known: str,
        talk: TalkRules = NO_TALK,
    ) -> None:
        self._count = count
        self._sign_tokens = count(f" {OMITTED}")
        self._texts = (*user_texts, *model_texts)
        self._users = len(user_texts)
        self._sentences: dict[int, list[Sentence]] = {}
        self._chosen: dict[int, set[int]] = {}
        self._directing: list[_Candidate] = []
        self._others: list[_Candidate] = []
        self._texts_with: Counter[str] = Counter()
        self.are_equals = talk_as_equals(user_texts, model_texts)
        places = self._split(_newest_first(user_texts, len(model_texts)))
        self._overtaken = overtaken_reports(
            [each for at in self._sentences if at < self._users for each in self._sentences[at]], talk
        )
        seen: set[str] = set()
        for at, position in places:
            self._add_text(self._sentences[at], OLDEST + (1 - OLDEST) * position, seen)
        texts = len(self._sentences)
        self._weights = {word: log2(1 + texts / number) for word, number in self._texts_with.items()}
        self._lower(_words(known))

    def _split(self, places: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
        """Split the texts at *places*, the newest first, into sentences; return the places of those that were split."""
        split: list[tuple[int, float]] = []
        left = MOST_SENTENCES
        for at, position in places:
            if left <= 0:
                break
            sentences = self._sentences[at] = sentences_of(self._texts[at], at)
            left -= len(sentences)
            split.append((at, position))
        return split

    def _add_text(self, sentences: Sequence[Sentence], worth: float, seen: set[str]) -> None:
        """Add one text: its words, and as candidates those of its *sentences* that no newer text has (*seen*)."""
        words = {each.index: _words(each.text) for each in sentences if len(each.text) <= LONG_SENTENCE}
        self._texts_with.update(set[str]().union(*words.values()))
        fresh = [each for each in sentences if each.index in words and each.text not in seen]
        if not fresh:
            return
        if len(self._texts[fresh[0].at]) > SHORT:
            fresh = _first_of_each(fresh)
        seen.update([each.text for each in fresh])
        if fresh[0].at < self._users:
            self._add_directing(fresh, words, worth)
        self._add(fresh, words, worth)

    def _add_directing(self, sentences: Sequence[Sentence], words: dict[int, set[str]], worth: float) -> None:
        """Add what constrains or asks for something in *sentences* of one text of the user."""
        at = sentences[0].at
        for group in _groups(sentences, whole=len(self._texts[at]) <= SHORTEST):
            held = [each for each in group if (at, each.index) not in self._overtaken]
            rank = max([sentence_rank(each.text) for each in held], default=0)
            if rank:
                self._directing.append(_Candidate(at, group, _joined(words, group), worth / _size(group), rank))

    def _add(self, sentences: Sequence[Sentence], words: dict[int, set[str]], worth: float) -> None:
        """Add the *sentences* of one text as candidates: together if it is short, else each on its own."""
        at = sentences[0].at
        for group in _groups(sentences, whole=len(self._texts[at]) <= SHORT):
            factor = worth
            if all(_ASKS.search(each.text[-_ASKING_END:]) for each in group):
                factor *= QUESTION
            if all((at, each.index) in self._overtaken for each in group):
                factor *= OVERTAKEN
            self._others.append(_Candidate(at, group, _joined(words, group), factor / _size(group)))

    def choose_directing(self, tokens: int) -> int:
        """Quote what the user constrains, then what the user asks for, in *tokens*; return how many are left.

        In a talk of equals only a part of them is for that: most of what sounds like an order is none.
        """
        left = tokens
        if self.are_equals:
            left = int(tokens * EQUALS_SHARE)
        reserved = tokens - left
        for rank in (2, 1):
            left = self._choose([each for each in self._directing if each.rank == rank], left)
        return left + reserved

    def choose(self, tokens: int) -> int:
        """Quote what tells most, of either side, in *tokens*; return how many are left."""
        return self._choose(self._others, tokens)

    def user_lines(self) -> list[str]:
        """What is quoted of each of the user's texts, "" for nothing."""
        return self._lines(0, self._users)

    def model_lines(self) -> list[str]:
        """What is quoted of each of the model's texts, "" for nothing."""
        return self._lines(self._users, len(self._texts))

    def _lines(self, start: int, end: int) -> list[str]:
        lines = [""] * (end - start)
        for at, chosen in self._chosen.items():  # of thousands of texts hardly any is quoted
            if start <= at < end:
                lines[at - start] = self._line_of(at, chosen)
        return lines

    def _line_of(self, at: int, chosen: set[int]) -> str:
        if not chosen:
            return ""
        return excerpt(self._texts[at], self._sentences[at], chosen)

    def _choose(self, candidates: Sequence[_Candidate], tokens: int) -> int:
        """Choose of *candidates* by their value until *tokens* are used; return how many are left."""
        heap = [(-self._value(each), index) for index, each in enumerate(candidates)]
        heapify(heap)
        misses = 0
        while heap and tokens > LEAST_ROOM and misses <= MOST_MISSES:
            _, index = heappop(heap)
            candidate = candidates[index]
            present = -self._value(candidate)
            if heap and present > heap[0][0]:
                heappush(heap, (present, index))  # its words were quoted since
                continue
            cost = self._cost(candidate)
            if cost > tokens:
                misses += 1
                continue
            tokens -= cost
            self._quote(candidate)
        return tokens

    def _value(self, candidate: _Candidate) -> float:
        """The information in *candidate* for each of its tokens."""
        weights = self._weights
        return sum([weights[word] for word in candidate.words]) * candidate.worth

    def _cost(self, candidate: _Candidate) -> int:
        """Tokens that the line of a text grows by with *candidate*; zero if all of it is quoted already."""
        at = candidate.at
        before = self._chosen.get(at, set())
        after = before | {each.index for each in candidate.sentences}
        if before == after:
            return 0
        if len(self._texts[at]) > COUNTED_WHOLE:
            return self._cost_alone(candidate, before)
        if not before:
            return self._count(self._line_of(at, after)) + BULLET
        return max(0, self._count(self._line_of(at, after)) - self._count(self._line_of(at, before)))

    def _cost_alone(self, candidate: _Candidate, before: set[int]) -> int:
        """About the same as ``_cost``: the sentence of *candidate* is counted alone, and no more than it.

        It brings a sign that a part is left out; of two runs of neighbours that it joins, one sign goes.
        """
        [sentence] = candidate.sentences
        runs = 1 - (sentence.index - 1 in before) - (sentence.index + 1 in before)
        cost = self._count(sentence.text) + runs * self._sign_tokens
        if not before:
            cost += BULLET
        return max(0, cost)

    def _quote(self, candidate: _Candidate) -> None:
        chosen = self._chosen.setdefault(candidate.at, set())
        indexes = {each.index for each in candidate.sentences}
        if not indexes <= chosen:
            chosen |= indexes
            self._lower(candidate.words)

    def _lower(self, words: Iterable[str]) -> None:
        """Let *words* tell less from now on."""
        for word in words:
            weight = self._weights.get(word, 0.0)
            if weight:
                weight *= AGAIN
                if weight < LEAST_WEIGHT:
                    weight = 0.0  # candidates with it need no new value each time that it is quoted
                self._weights[word] = weight


def _first_of_each(sentences: Sequence[Sentence]) -> list[Sentence]:
    """The *sentences* without those that say the same as one before."""
    first: dict[str, Sentence] = {}
    for sentence in sentences:
        first.setdefault(sentence.text, sentence)
    return list(first.values())


def _groups(sentences: Sequence[Sentence], *, whole: bool) -> list[tuple[Sentence, ...]]:
    """The sentences that are quoted together: all of a *whole* text, else each on its own."""
    if whole:
        return [tuple(sentences)]
    return [(each,) for each in sentences]


def _size(group: Sequence[Sentence]) -> float:
    """About the tokens of a group."""
    return sum([len(each.text.encode("utf-8", "replace")) for each in group]) / 4 + SMOOTH


def _joined(words: dict[int, set[str]], group: Sequence[Sentence]) -> tuple[str, ...]:
    """The words of a group, in order: sums of their weights are the same everywhere."""
    return tuple(sorted(set[str]().union(*(words[each.index] for each in group))))


def _newest_first(user_texts: Sequence[str], others: int) -> list[tuple[int, float]]:
    """Indexes of the texts that are looked through, by their place from 0 to 1 among those of their side.

    They are the newest of each side, and all of the user's that constrain or ask for something.
    """
    users = len(user_texts)
    newest = max(0, users - MOST_TEXTS)
    places = [(at, (at + 1) / users) for at, text in enumerate(user_texts) if at >= newest or sentence_rank(text)]
    places += [(users + at, (at + 1) / others) for at in range(max(0, others - MOST_TEXTS), others)]
    return sorted(places, key=lambda each: (-each[1], each[0]))


def _words(text: str) -> set[str]:
    """The words and figures of *text*; of scripts without spaces all pairs of characters."""
    words: set[str] = set()
    for piece in _PIECE.findall(text.lower()):
        if piece[0] < _WIDE:
            words.add(piece)
        else:
            words.update([piece[at : at + 2] for at in range(len(piece) - 1)])
    return words
