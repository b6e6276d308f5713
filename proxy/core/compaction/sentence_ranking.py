"""Ranks sentences and rounds, to show the best in full if not everything fits.

A sentence ranks high if it constrains, a round if it concludes. Words in a dozen languages hint at that. Without such
words newer text ranks higher, and so does a round right before the user speaks again: in every language that is likely
to be a conclusion.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.conversation import ItemText

SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])|\n+")
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
    "必须|必須|务必|務必|不要|不能|不得|不可|只能|禁止|一定要|千万|切勿|始终|永远|不再"
    "|必ず|絶対|しないで|してはいけない|禁止|のみ|だけ|ください|반드시|하지 ?마|절대|항상"
)
_ASKS = (
    "should|shall|need to|keep|use|prefer|remember|please|stop|before|after|want|add|fix|change"
    "|bitte|soll|sollte|por favor|usa|s'il (?:te|vous) pla[iî]t|utilise[rz]?|per favore"
    "|alsjeblieft|proszę|пожалуйста|lütfen"
)
_ASKS_WIDE = "请|請|需要|希望|应该|應該|帮我|幫我|해 ?주세요|お願い"


_ALTERNATIVE = re.compile(r"(?:[^|(]|\([^)]*\))+")


def _words(narrow: str, wide: str) -> re.Pattern[str]:
    """A pattern of any of the *narrow* words, each on its own, or of the *wide* ones anywhere.

    The narrow ones are grouped by their first letters: the matcher tries each group once at every character, which
    takes a quarter of the time that a hundred words do.
    """
    groups: dict[str, list[str]] = {}
    for word in _ALTERNATIVE.findall(narrow):
        groups.setdefault(word[0], []).append(word[1:])
    grouped = "|".join(f"{first}(?:{'|'.join(rest)})" for first, rest in groups.items())
    return re.compile(rf"(?<!\w)(?:{grouped})(?!\w)|{wide}", re.IGNORECASE)


_CONSTRAINT, _REQUEST = _words(_CONSTRAINS, _CONSTRAINS_WIDE), _words(_ASKS, _ASKS_WIDE)
_CONCLUSION = _words(
    "conclusions?|in summary|root cause|therefore|found that|turns out|the (?:issue|problem|cause|fix) (?:is|was)"
    "|fixed|done|decided|fazit|daher|ursache|por (?:lo )?tanto|donc|en résumé|quindi|итог|вывод|поэтому|причина",
    "结论|結論|因此|原因|所以|总结|已完成|まとめ|따라서|결론",
)

_READ = 4096
"""Characters of a sentence, or of a round's text, that are searched for such words."""

NEWEST = 5
"""Rounds at the end that rank nearly as high as the first."""


def sentence_rank(sentence: str) -> int:
    """2 for a sentence that constrains what may be done, 1 for one that asks for something, else 0."""
    if _CONSTRAINT.search(sentence, 0, _READ):
        return 2
    if _REQUEST.search(sentence, 0, _READ):
        return 1
    return 0


def has_conclusion(sentence: str) -> bool:
    """True if *sentence* draws a conclusion."""
    return _CONCLUSION.search(sentence, 0, _READ) is not None


@dataclass(frozen=True, slots=True)
class Round:
    """A text of the model with its calls. ``answered``: it has no calls, and a user item follows."""

    spoken: ItemText
    answered: bool


def rounds_of(entries: Sequence[ItemText]) -> list[Round]:
    """The rounds of *entries*, in order."""
    following = [*(entry.role for entry in entries[1:]), None]
    return [
        Round(entry, role == "user" and not entry.calls)
        for entry, role in zip(entries, following, strict=False)
        if entry.role == "assistant"
    ]


def round_scores(rounds: Sequence[Round]) -> list[float]:
    """The score of each round, 0 to 100: highest for the first and the newest, lowest for many calls without a word."""
    return [_score(each, at, len(rounds)) for at, each in enumerate(rounds)]


def _score(each: Round, at: int, count: int) -> float:
    text, calls = each.spoken.text[:_READ], len(each.spoken.calls)
    score = 50.0 + 30.0 * at / count
    score += 10 * (sentence_rank(text) == 2)
    score += 10 * bool(_CONCLUSION.search(text))
    score += 10 * each.answered
    score -= 20 * (calls > 3 and not text.strip())
    if at == 0:
        score = max(score, 90.0)
    if at >= count - NEWEST:
        score = max(score, 85.0)
    return min(score, 100.0)
