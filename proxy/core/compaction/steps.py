"""Writes the steps of a block: a line for each round, then further sentences of the rounds that say most.

A sentence says much if it has words that few others have, for each token that it takes: "Let me look at that." stands
in every session and tells nothing. Words that the block shows already count for nothing, so that two lines rarely say
the same. Rounds without words are shown by their calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import log2

from proxy.core.compaction.sentence_ranking import SENTENCE_END, Round, has_conclusion, overtaken, sentence_rank
from proxy.core.compaction.truncate import OMITTED, shorten
from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.tool_table import NO_TALK, TalkRules, plain_arguments

Count = Callable[[str], int]

LINE = 140
"""Characters of a sentence that a round's own line shows at most."""

MOST_ROUNDS = 256
"""Rounds whose sentences are looked through: the newest and the first. Older ones have no room in any block."""

READ = 4_096
"""Characters of a round's text that are looked through; longer ones are mostly documents, not steps."""

LEAST_ROOM = 6
"""Tokens of room below which no further sentence is tried."""

MOST_MISSES = 20
"""Sentences in all that may be too long for the room before no further one is tried."""

SMOOTH = 6.0
"""Tokens added to the size of a sentence, so that the shortest do not always win."""

OLDEST = 0.5
"""The worth of a word in the oldest round, as a share of the worth of one in the newest."""

CONCLUDES = 1.5
"""The worth of a sentence that draws a conclusion or constrains, as a multiple of others."""

ANSWERED = 1.25
"""The worth of a sentence after which the user speaks: in every language that is likely to be a conclusion."""

OVERTAKEN = 0.5
"""The worth of a sentence that a later one overtakes, as a multiple of others."""

LONG_SENTENCE = 1_200
"""Characters of a sentence at most. Longer ones are code or data."""

MOST_CALLS = 6
"""Calls of one round that its line shows."""

_WORD = lazy_pattern(r"[^\W\d_]{4,}|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]{2}")
"""A plain word, or two characters of a script that is written without spaces."""


@dataclass(slots=True)
class _Sentence:
    """A sentence of the round ``at``, the ``index``-th of it: its words, and the distinct ones among them."""

    at: int
    index: int
    text: str
    words: frozenset[str]
    worth: float = 1.0
    """A factor for its place and its cues."""

    @property
    def size(self) -> float:
        """About its tokens."""
        if self.text.isascii():
            return len(self.text) / 4 + SMOOTH
        return len(self.text.encode("utf-8", "replace")) / 4 + SMOOTH


@dataclass(slots=True)
class Steps:
    """The steps of a block: one line for each of *rounds*, "" for one that is left out."""

    rounds: Sequence[Round]
    count: Count
    known: str = ""
    """Text that the block shows anyway."""

    talk: TalkRules = NO_TALK
    """How sentences begin that later ones overtake."""

    _sentences: dict[int, list[_Sentence]] = field(default_factory=dict)
    _weights: dict[str, float] = field(default_factory=dict)
    _chosen: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = len(self.rounds)
        indexes = {0, *range(max(0, total - MOST_ROUNDS), total)} & {*range(total)}
        for index in sorted(indexes):
            self._sentences[index] = _sentences_of(self.rounds[index], index, (index + 1) / total)
        patterns = (*self.talk.intents, *self.talk.progress)
        texts = [each.text for sentences in self._sentences.values() for each in sentences]
        if any(pattern.match(text) for text in texts for pattern in patterns):
            self._mark_overtaken()
        rounds_with: Counter[str] = Counter()
        for sentences in self._sentences.values():
            rounds_with.update(frozenset[str]().union(*(each.words for each in sentences)))
        shown = set(_words(self.known))
        self._weights = {
            word: log2(1 + len(self._sentences) / number) for word, number in rounds_with.items() if word not in shown
        }

    def _mark_overtaken(self) -> None:
        """Lower the worth of sentences that later ones overtake."""
        texts = [[each.text for each in sentences] for sentences in self._sentences.values()]
        acted = [bool(self.rounds[index].spoken.calls) for index in self._sentences]
        for sentences, gone in zip(self._sentences.values(), overtaken(texts, acted, self.talk), strict=True):
            for index in gone:
                sentences[index].worth *= OVERTAKEN

    def lines(self, tokens: int) -> list[str]:
        """A line for each round: the newest and the first that fit in *tokens*, "" for the others."""
        steps = [""] * len(self.rounds)
        newest_first = range(len(self.rounds) - 1, -1, -1)
        for index in dict.fromkeys([*newest_first[:1], *newest_first[-1:], *newest_first]):
            best = self._best(index)
            chosen: set[int] = set()
            if best is not None:
                chosen.add(best.index)
            step = self._line(index, chosen, LINE)
            size = self.count(step) + 2
            if size > tokens:
                break
            steps[index] = step
            self._choose(index, best)
            tokens -= size
        return steps

    def extended(self, steps: Sequence[str], tokens: int) -> list[str]:
        """*steps* with the sentences that say most in about *tokens* more."""
        longer = list(steps)
        heap = [(-self._value(each), each.at, each.index) for all_ in self._sentences.values() for each in all_]
        heapify(heap)
        misses = 0
        while heap and tokens > LEAST_ROOM and misses <= MOST_MISSES:
            value, at, index = heappop(heap)
            sentence = self._sentences[at][index]
            if not value or sentence.text in longer[at]:
                continue
            present = -self._value(sentence)
            if heap and present > heap[0][0]:
                heappush(heap, (present, at, index))
                continue
            line = self._line(at, {*self._chosen.get(at, ()), index})
            cost = self._cost(longer[at], line)
            if cost > tokens:
                misses += 1
                continue
            longer[at] = line
            self._choose(at, sentence)
            tokens -= cost
        return longer

    def _cost(self, present: str, line: str) -> int:
        """Tokens that *line* takes beyond the *present* one in its place."""
        if not present:
            return self.count(line) + 2
        return self.count(line) - self.count(present)

    def _choose(self, at: int, sentence: _Sentence | None) -> None:
        """Take *sentence* in: from now on its words say nothing new."""
        if sentence is None:
            return
        self._chosen.setdefault(at, set()).add(sentence.index)
        for word in sentence.words:
            self._weights.pop(word, None)

    def _value(self, sentence: _Sentence) -> float:
        """The information in *sentence* for each of its tokens."""
        weights = self._weights
        return sum([weights.get(word, 0.0) for word in sorted(sentence.words)]) * sentence.worth / sentence.size

    def _best(self, index: int) -> _Sentence | None:
        """The sentence of a round that says most; None if it has none."""
        sentences = self._sentences.get(index)
        if sentences is None:
            sentences = _sentences_of(self.rounds[index], index, 1.0)
        return max(sentences, key=lambda each: (self._value(each), -each.index), default=None)

    def _line(self, index: int, chosen: set[int], characters: int = 0) -> str:
        """The line of a round: its *chosen* sentences, each cut to *characters* if these are not 0, and its calls."""
        parts: list[str] = []
        last = -1
        for sentence in self._sentences.get(index, ()):
            if sentence.index not in chosen:
                continue
            if parts and sentence.index != last + 1:
                parts.append(OMITTED)
            text = sentence.text
            if characters:
                text = shorten(text, characters)
            parts.append(text)
            last = sentence.index
        return with_calls(" ".join(parts), self.rounds[index])


def _sentences_of(each: Round, at: int, position: float) -> list[_Sentence]:
    """The sentences of some length in the text of a round."""
    recent = OLDEST + (1 - OLDEST) * position
    if each.answered:
        recent *= ANSWERED
    sentences: list[_Sentence] = []
    for part in SENTENCE_END.split(each.spoken.text[:READ]):
        text = part.strip()
        if 3 < len(text) <= LONG_SENTENCE:
            worth = recent
            if sentence_rank(text) == 2 or has_conclusion(text):
                worth *= CONCLUDES
            sentences.append(_Sentence(at, len(sentences), text, frozenset(_words(text)), worth))
    return sentences


def _words(text: str) -> list[str]:
    """The plain words of *text*."""
    return _WORD.findall(text.lower())


def with_calls(words: str, each: Round) -> str:
    """*words* and the calls of a round, each with its first argument and what is known of its outcome."""
    calls = [f"{name}({_first_argument(arguments)})" for name, arguments in each.spoken.calls[:MOST_CALLS]]
    for at, outcome in enumerate(each.outcomes[:MOST_CALLS]):
        if outcome:
            calls[at] += f": {outcome}"
    return " -> ".join(part for part in (words, ", ".join(calls)) if part)


def _first_argument(arguments: str) -> str:
    """The first argument of a call that is not empty, on one short line."""
    first = next((line for line in plain_arguments(arguments).splitlines() if line.strip()), "")
    return shorten(first.strip(), 80)
