"""Ranks sentences, to show the best if not everything fits, and divides a conversation into rounds.

A sentence ranks high if it constrains or concludes. Words in a dozen languages hint at that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.core.conversation import ItemText
from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.tool_table import TalkRules

SENTENCE_END = lazy_pattern(r"(?<=[.!?;])\s+|(?<=[。！？；])|\n+")
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
    "必须|必須|务必|務必|(?<!要)不要|(?<!能)不能|(?<![不舍捨])不得(?!不|了)|(?<!可)不可(?!能)|只能|禁止|一定要|千万|切勿|始终"
    "|永远|不再"
    "|必ず|絶対|しないで|してはいけない|禁止|のみ|だけ|ください|반드시|하지 ?마|절대|항상"
)
_ASKS = (
    "should|shall|need to|keep|use|prefer|remember|please|stop|before|after|want|add|fix|change"
    "|bitte|soll|sollte|por favor|usa|s'il (?:te|vous) plait|s'il (?:te|vous) plaît|utilise[rz]?|per favore"
    "|alsjeblieft|proszę|пожалуйста|lütfen"
)
_ASKS_WIDE = "请|請|需要|希望|应该|應該|帮我|幫我|해 ?주세요|お願い"


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

_READ = 4096
"""Characters of a sentence, or of a round's text, that are searched for such words."""


_REPORT, _INTENT = 200, 32
"""Characters of a sentence about how far the work is, and about what is next: a longer one says more than that.

Of agents' intents those above 32 characters name what they are about, and the model comes back to it.
"""


def sentence_rank(sentence: str) -> int:
    """2 for a sentence that constrains what may be done, 1 for one that asks for something, else 0."""
    text = sentence[:_READ]
    if _CONSTRAINT.are_in(text):
        return 2
    if _REQUEST.are_in(text):
        return 1
    return 0


def has_conclusion(sentence: str) -> bool:
    """True if *sentence* draws a conclusion."""
    return _CONCLUSION.are_in(sentence[:_READ])


@dataclass(frozen=True, slots=True)
class Round:
    """A text of the model with its calls. ``answered``: it has no calls, and a user item follows.

    ``outcomes`` are a word or two for each call; "" if nothing is known.
    """

    spoken: ItemText
    answered: bool
    outcomes: tuple[str, ...] = ()


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
    if len(sentence) <= _REPORT and any(pattern.match(sentence) for pattern in rules.progress):
        return "progress" if sentence_rank(sentence) < 2 else ""
    if len(sentence) <= _INTENT and any(pattern.match(sentence) for pattern in rules.intents):
        return "intent" if sentence_rank(sentence) < 2 and not has_conclusion(sentence) else ""
    return ""


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
