"""Ranks sentences, and writes the steps of a block: a line for each round, then further sentences that say most.

A sentence ranks high if it constrains or concludes; words in a dozen languages hint at that. It says much if it has
words that few others have, for each token that it takes: "Let me look at that." stands in every session and tells
nothing. Words that the block shows already count for nothing, so that two lines rarely say the same. Rounds without
words are shown by their calls.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, filterfalse, repeat
from math import log2

from proxy.core.compaction.truncate import OMITTED, shorten
from proxy.core.conversation import Count, ItemText
from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.tool_calls import Arguments
from proxy.core.tool_table import TalkRules

# Ranks of sentences.

_NO_END = (
    r"(?<!\s\d\.)(?<!\s\d\d\.)(?<!\A\d\.)"  # "am 12. Oktober", "1. Open the file"
    r"(?<!\s[^\W\dI]\.)(?<!\.[^\W\d]\.)"  # "J. Doe", "z. B.", "e.g."; but "So do I."
    r"(?<!\b(?:Dr|Mr|St|Nr)\.)(?<!\bMrs\.)"
)
"""Not behind a full stop that ends no sentence, but an ordinal, an initial or a title."""

SENTENCE_END = lazy_pattern(rf"(?<=[.!?;]){_NO_END}\s+|(?<=[。！？；])|\n+")
"""Between two sentences."""

_CONSTRAINS = (
    # Single words, in languages that put spaces between words.
    "must|never|always|only|don'?t|do not|cannot|may not|shall not|should not|required?|forbidden|no longer|important"
    "|at (?:most|least)|make sure|ensure|avoid|without|instead"
    "|muss|müssen|darf|dürfen|niemals|immer|nur|nicht|keine?n?|verboten|wichtig"
    "|debes?|deben|nunca|jamás|siempre|solo|sólo|solamente|prohibido|importante"
    "|doit|doivent|devez|jamais|toujours|seulement|uniquement|interdit|ne pas"
    "|devem?|sempre|apenas|somente|não|proibido|devono|mai|soltanto|vietato"
    "|moet|moeten|nooit|altijd|alleen|niet|musi|nigdy|zawsze|tylko|måste|aldrig|alltid|endast"
    "|должен|должна|должны|нельзя|никогда|всегда|только|обязательно|запрещено"
    "|asla|daima|sadece|yalnızca|mutlaka|phải|không|luôn|chỉ|harus|jangan|selalu|hanya"
    "|يجب|أبدا|دائما|فقط|ممنوع|हमेशा|केवल|कभी|मत|ज़रूर"
)
_CONSTRAINS_WIDE = (
    # Not "能不能", "要不要" or "可不可以", which ask, nor "不得不", "舍不得" or "不可能", which forbid nothing.
    "必须|必須|务必|務必|(?<!要)不要|(?<!能)不能|(?<![不舍捨])不得(?!不|了)|(?<!可)不可(?!能)|只能|禁止|一定要|切勿|始终"
    # Not "三千万", a number, nor "不准确" (not exact) or "不准备" (not planning to).
    "|(?<![0-9一二三四五六七八九十几数两上])千万|永远|不再|不[许許]|不准(?![确確时時备備])|一律|凡是|避免|避开|避開"
    # "别" forbids, but not inside "特别", "区别", "别的", "别人" and the like.
    "|(?<![特区个分级类告差识辨离性派鉴判甄送])别(?![的人墅名处说克致样称家国具扭于])"
    # Any verb that is forbidden, or that is a duty. Not "非常に" (very), "正常に" (without errors), an absolute path,
    # "꼭대기" (top) or "현금지급" (payment in cash), in which 금지 (prohibition) only seems to stand.
    "|必ず|絶対(?!パス|値|座標|位置|温度)|決して|(?<![非日通正異平])常に|のみ|だけ(?!ど)|ないで(?:くだ|下さ|ほし|欲し)"
    "|[てで]は(?:いけ|なら|だめ|ダメ)|な(?:けれ|く)[ばて]は?(?:なら|いけ)"
    "|반드시|절대(?! ?(?:경로|값|좌표|위치|온도))|항상|꼭(?![대두지짓])|금지(?!급|불|원(?!칙))"
    "|지 ?(?:마[세십라]|말[고아라])|면 안 ?[돼되된됩]|야 ?(?:합니|해요|한다|하고|돼|됩니)"
)
_ASKS = (
    "should|shall|need to|keep|use|prefer|remember|please|stop|before|after|want|add|fix|change"
    "|bitte|soll|sollte|por favor|usa|s'il (?:te|vous) plait|s'il (?:te|vous) plaît|utilise[rz]?|per favore"
    "|alsjeblieft|proszę|пожалуйста|lütfen"
)
_ASKS_WIDE = (
    "请|請|需要|希望|应[该当]|應[該當]|帮我|幫我|(?<![我不还還])[记記][得住]"
    "|ください|下さい|お願い|[てで](?:ほしい|欲しい)|べき(?![るれらっりま])|주(?:세요|십시오|시기|실)|줘(?!서|도)|부탁"
    "|바랍니다"
)

_ALTERNATIVE = lazy_pattern(r"(?:[^|(]|\([^)]*\))+")

_DOTLESS = str.maketrans("ı", "i")
"""The one letter here that equals an ASCII letter if case is ignored: https://docs.python.org/3/library/re.html#re.I"""


class _Words:
    """Finds any of the *narrow* words, each on its own, or of the *wide* ones anywhere. Case is ignored."""

    def __init__(self, narrow: str, wide: str) -> None:
        words = _ALTERNATIVE.findall(narrow)
        self._any = lazy_pattern(rf"(?<!\w){_grouped(words)}(?!\w)|{wide}", re.IGNORECASE)
        ascii_words = filter(str.isascii, (word.translate(_DOTLESS) for word in words))
        self._ascii = lazy_pattern(rf"(?<!\w){_grouped(ascii_words)}(?!\w)")

    def are_in(self, text: str) -> bool:
        """True if one of the words is in *text*. No wide one is ASCII; without them it takes a fifth of the time."""
        if text.isascii():
            return self._ascii.search(text.lower()) is not None
        return self._any.search(text) is not None


def _grouped(words: Iterable[str]) -> str:
    """A pattern of any of *words*.

    They are grouped by their first letters: the matcher tries each group once at every character, which takes a quarter
    of the time that a hundred words do.
    """
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(word[0], []).append(word[1:])
    alternatives = [f"{first}(?:{'|'.join(rest)})" for first, rest in groups.items()]
    return f"(?:{'|'.join(alternatives)})"


_CONSTRAINT, _REQUEST = _Words(_CONSTRAINS, _CONSTRAINS_WIDE), _Words(_ASKS, _ASKS_WIDE)
_CONCLUSION = _Words(
    "conclusions?|in summary|root cause|therefore|found that|turns out|the (?:issue|problem|cause|fix) (?:is|was)"
    "|fixed|done|decided|fazit|daher|ursache|por (?:lo )?tanto|donc|en résumé|quindi|итог|вывод|поэтому|причина",
    "结论|結論|因此|原因|所以|总结|已完成|まとめ|따라서|결론",
)

READ = 4_096
"""Characters of a sentence, or of a round's text, that are looked through; longer ones are mostly documents."""


def sentence_rank(sentence: str) -> int:
    """2 for a sentence that constrains what may be done, 1 for one that asks for something, else 0."""
    text = sentence[:READ]
    if _CONSTRAINT.are_in(text):
        return 2
    if _REQUEST.are_in(text):
        return 1
    return 0


def has_conclusion(sentence: str) -> bool:
    """True if *sentence* draws a conclusion."""
    return _CONCLUSION.are_in(sentence[:READ])


# Rounds.

_REPORT, _INTENT = 200, 32
"""Characters of a sentence about how far the work is, and about what is next: a longer one says more than that.

Of agents' intents those above 32 characters name what they are about, and the model comes back to it.
"""


@dataclass(frozen=True, slots=True)
class Round:
    """A text of the model with its calls. ``answered``: it has no calls, and a user item follows.

    ``outcomes`` are a word or two for each call; "" if nothing is known.
    """

    spoken: ItemText
    answered: bool
    outcomes: tuple[str, ...]


def overtaken(texts: Sequence[Sequence[str]], acted: Sequence[bool], rules: TalkRules) -> list[frozenset[int]]:
    """The indexes of the sentences of each of *texts* that what came later overtakes.

    An intent is overtaken if its text *acted*, by calls that show what was done, and is not the last. How far the work
    was is overtaken by a later sentence that says how far it is. A sentence that constrains holds, and an intent with a
    conclusion.
    """
    found: list[frozenset[int]] = []
    is_reported = False
    for at in range(len(texts) - 1, -1, -1):
        is_done = acted[at] and at < len(texts) - 1
        gone: set[int] = set()
        for index in range(len(texts[at]) - 1, -1, -1):
            kind = _talk(texts[at][index], rules)
            if (kind == "intent" and is_done) or (kind == "progress" and is_reported):
                gone.add(index)
            is_reported = is_reported or kind == "progress"
        found.append(frozenset(gone))
    return found[::-1]


def _talk(sentence: str, rules: TalkRules) -> str:
    """``progress`` or ``intent`` for a sentence that says nothing else; else empty."""
    kind = ""
    if len(sentence) <= _REPORT and any(pattern.match(sentence) for pattern in rules.progress):
        kind = "progress"
    elif len(sentence) <= _INTENT and any(pattern.match(sentence) for pattern in rules.intents):
        kind = "intent"
    if kind and _CONSTRAINT.are_in(sentence):
        return ""
    if kind == "intent" and has_conclusion(sentence):
        return ""
    return kind


def rounds_of(entries: Sequence[ItemText], outcomes: Sequence[str] = ()) -> list[Round]:
    """The rounds of *entries*, in order; *outcomes* are those of all their calls, in order."""
    following = [*(entry.role for entry in entries[1:]), None]
    rounds: list[Round] = []
    done = 0
    for entry, role in zip(entries, following, strict=False):
        if entry.role == "assistant":
            end = done + len(entry.calls)
            rounds.append(Round(entry, role == "user" and not entry.calls, tuple(outcomes[done:end])))
            done = end
    return rounds


# Steps.

LINE = 140
"""Characters of a sentence that a round's own line shows at most."""

RECENT = 3
"""Rounds, the newest, that get a line before the others are ranked by what they say."""

MOST_ROUNDS = 256
"""Rounds whose sentences are looked through: the newest and the first. Older ones have no room in any block."""

MOST_LINES = 1_024
"""Rounds, the newest, that get a line if there is room left: of thousands of calls alike only one is shown."""

BULLET = 2
"""Tokens of a list's mark before a line."""

LEAST_ROOM = 6
"""Tokens of room below which no further sentence or text is tried."""

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

SUBJECT = 80
"""Characters of a call's first argument that its line shows."""

_IN_PARTS = lazy_pattern(r'"(?:commands?|cmds?|code|script)"\s*:\s*\[')
"""Arguments with a command that is a list: its first part alone is the name of a shell, or one command of several."""

_SHELL = lazy_pattern(r"\A(?:\S*/)?(?:ba|z|da|k)?sh -l?c ")
"""The shell at the beginning of a command in parts, as Codex calls it: ``["bash", "-lc", "make all"]``."""

_EXCLAMATION = lazy_pattern(r"[A-Za-zÀ-ɏ]+\W*")
"""One word of a script with spaces: "Perfect!" tells nothing of the round."""

_WORD = lazy_pattern(r"[^\W\d_]{4,}|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]{2}")
"""A plain word, or two characters of a script that is written without spaces."""


@dataclass(slots=True)
class _Sentence:
    """A sentence of the round ``at``, the ``index``-th of it.

    ``words`` are the distinct words in it, sorted, because the order of a sum of fractions decides its last digit.
    ``size`` is about its tokens, ``worth`` a factor for its place and its cues.
    """

    at: int
    index: int
    text: str
    words: list[str]
    size: float
    worth: float


@dataclass(slots=True)
class Steps:
    """The steps of a block: one line for each of *rounds*, "" for one that is left out.

    ``arguments`` are those of their calls, by their text. ``sizes`` are the tokens that each line takes in the list,
    with its mark.
    """

    rounds: Sequence[Round]
    count: Count
    arguments: Mapping[str, Arguments]
    known: str
    """Text that the block shows anyway."""

    talk: TalkRules
    """How sentences begin that later ones overtake."""

    sizes: list[int] = field(default_factory=list)
    _lines: list[str] = field(default_factory=list)
    _sentences: dict[int, list[_Sentence]] = field(default_factory=dict)
    _weights: dict[str, float] = field(default_factory=dict)
    _chosen: dict[int, set[int]] = field(default_factory=dict)
    _calls: dict[int, str] = field(default_factory=dict)
    _shown: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        total = len(self.rounds)
        self._lines, self.sizes = [""] * total, [0] * total
        indexes = {0, *range(max(0, total - MOST_ROUNDS), total)} & {*range(total)}
        for index in sorted(indexes):
            self._sentences[index] = _sentences_of(self.rounds[index], index, (index + 1) / total)
        patterns = (*self.talk.intents, *self.talk.progress)
        texts = [each.text for sentences in self._sentences.values() for each in sentences]
        if any(pattern.match(text) for text in texts for pattern in patterns):
            self._mark_overtaken()
        rounds_with: Counter[str] = Counter()
        for sentences in self._sentences.values():
            rounds_with.update(set[str]().union(*[each.words for each in sentences]))
        shown = {*_WORD.findall(self.known.lower())}
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
        """A line for each round that gets one in *tokens*, "" for the others. The list changes if it is extended.

        First come the newest rounds and the first, then the sentences that say most, and then the newest of the other
        rounds, most of which have calls and no words.
        """
        newest_first = range(len(self.rounds) - 1, -1, -1)
        tokens = self._add_lines([*newest_first[:1], *newest_first[-1:], *newest_first[:RECENT]], tokens)
        tokens = self.extend(tokens)
        self._add_lines(newest_first[:MOST_LINES], tokens)
        return self._lines

    def _add_lines(self, indexes: Iterable[int], tokens: int) -> int:
        """Add a line for each round at *indexes* without one, until *tokens* are used; return how many are left."""
        for index in filterfalse(self._lines.__getitem__, indexes):
            best = self._best(index)
            line = self._line(index, {sentence.index for sentence in best}, LINE)
            if line.endswith("()") and line in self._shown:
                continue  # the same call again, of which nothing is known
            size = self.count(line) + BULLET
            if size > tokens:
                break
            if line:
                self._lines[index], self.sizes[index] = line, size
            self._shown.add(line)
            for sentence in best:
                self._choose(sentence)
            tokens -= size
        return tokens

    def extend(self, tokens: int) -> int:
        """Add the sentences that say most to the lines until *tokens* are used; return how many are left."""
        heap = [(-self._value(each), each.at, each.index) for all_ in self._sentences.values() for each in all_]
        heapify(heap)
        misses = 0
        while heap and tokens > LEAST_ROOM and misses <= MOST_MISSES:
            value, at, index = heappop(heap)
            sentence = self._sentences[at][index]
            if not value or sentence.text in self._lines[at]:
                continue
            present = -self._value(sentence)
            if heap and present > heap[0][0]:
                heappush(heap, (present, at, index))
                continue
            line = self._line(at, {*self._chosen.get(at, ()), index})
            size = self.count(line) + BULLET
            cost = size - self.sizes[at]
            if cost > tokens:
                misses += 1
                continue
            self._lines[at], self.sizes[at] = line, size
            self._choose(sentence)
            tokens -= cost
        return tokens

    def _choose(self, sentence: _Sentence) -> None:
        """Take *sentence* in: from now on its words say nothing new."""
        self._chosen.setdefault(sentence.at, set()).add(sentence.index)
        for word in sentence.words:
            self._weights.pop(word, None)

    def _value(self, sentence: _Sentence) -> float:
        """The information in *sentence* for each of its tokens."""
        weights = self._weights
        return sum([weights.get(word, 0.0) for word in sentence.words]) * sentence.worth / sentence.size

    def _best(self, index: int) -> list[_Sentence]:
        """The one sentence of a round that says most; none if all of it is shown already, or not looked through."""
        best = sorted(self._sentences.get(index, ()), key=self._value, reverse=True)[:1]
        return [sentence for sentence in best if self._value(sentence)]

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
            if 0 < characters < len(text):
                text = shorten(text, characters)
            parts.append(text)
            last = sentence.index
        return " -> ".join(filter(None, [" ".join(parts), self._calls_of(index)]))

    def _calls_of(self, index: int) -> str:
        """The calls of a round, each with its main argument on one short line, and what is known of its outcome."""
        if index in self._calls:  # a line is written anew for each of its sentences, and arguments may be long
            return self._calls[index]
        each = self.rounds[index]
        calls: list[str] = []
        outcomes = chain(each.outcomes, repeat(""))
        for (name, text), outcome in zip(each.spoken.calls[:MOST_CALLS], outcomes, strict=False):
            call = shown_call(name, text, self.arguments[text])
            if outcome:
                call += f": {outcome}"
            calls.append(call)
        self._calls[index] = ", ".join(calls)
        return self._calls[index]


def shown_call(name: str, text: str, called: Arguments) -> str:
    """A call on one short line: its tool, and the first of its arguments *called*, which are written as *text*."""
    argument = next(filter(None, map(str.strip, called.plain.splitlines())), "")
    if called.command and _IN_PARTS.search(text):
        argument = _SHELL.sub("", called.command)
    if len(argument) > SUBJECT:
        shortened = shorten(argument, SUBJECT)
        if shortened == OMITTED:
            shortened += _file_name(argument)
        argument = shortened
    return f"{name}({argument})"


def _file_name(argument: str) -> str:
    """The last part of a long path, with a slash before it; "" if *argument* is none."""
    name = argument[argument.rfind("/") :]
    if 1 < len(name) <= SUBJECT:
        return name
    return ""


def _sentences_of(each: Round, at: int, position: float) -> list[_Sentence]:
    """The sentences of some length in the text of a round."""
    recent = OLDEST + (1 - OLDEST) * position
    if each.answered:
        recent *= ANSWERED
    sentences: list[_Sentence] = []
    for part in SENTENCE_END.split(each.spoken.text[:READ]):
        text = part.strip()
        if 3 < len(text) <= LONG_SENTENCE and not _EXCLAMATION.fullmatch(text):
            worth = recent
            if _CONSTRAINT.are_in(text) or _CONCLUSION.are_in(text):
                worth *= CONCLUDES
            words = sorted({*_WORD.findall(text.lower())})
            size = len(text.encode("utf-8", "replace")) / 4 + SMOOTH
            sentences.append(_Sentence(at, len(sentences), text, words, size, worth))
    return sentences
