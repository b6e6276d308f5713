"""Whether a text asks a model for what is needed to go on with a conversation elsewhere, whatever its words.

Such a request names three things close together: something to be written (a summary, a handoff, a snapshot), what it is
of (the conversation), and that work goes on from it (another agent, a new context, lost history). What is about such
texts (code that makes them, a question on a prompt) names the same things; what it wants done first tells it apart.
"""

from __future__ import annotations

import re
from typing import Final

HEAD, TAIL = 900, 1_600
"""Characters at each end of a text in which it says what it wants: a conversation may stand before or behind that."""

_OPENING: Final = 400
"""Characters of a system text in which it says what the model is."""

_NEAR: Final = 120
"""Characters around the first word of a wish in which another deed is looked for."""

_MADE: Final = re.compile(
    r"\b(?:summar(?:y|ies|i[sz]e[ds]?|i[sz]ing|i[sz]ation)|condens\w+|compact\w*|compress\w*|distil\w*|memento"
    r"|hand-?(?:off|over)|checkpoint|state_snapshot)\b|\bprompt for continuing|\bextract\b[^.\n]{0,60}\bcontext\b"
    r"|总结|摘要|压缩|概括|交接|要約",
    re.IGNORECASE,
)
_OF: Final = re.compile(
    r"\b(?:conversations?|chats?|dialog(?:ue)?s?|discussion|history|(?<!next )session|transcripts?|context|messages"
    r"|events|memory|progress|so far|task described above)\b|what you (?:have )?(?:finished|did)"
    r"|对话|会话|历史|上下文|到目前为止|会話",
    re.IGNORECASE,
)
_READER = r"(?:\w+ )?(?:agent|llm|language model|model|ai|assistant|instance|session|context|conversation)\b"
_ON: Final = re.compile(
    r"\bcontinu\w+|\bresum(?:e|es|ed|ing|ption)\b|\bcarry on\b|\b(?:pick|tak)(?:e|es|s|ing)? ?(?:up|over)\b"
    r"|\bhand-?(?:off|over)\b|\bout of (?:context|room)\b|\bonly (?:memory|context|record)\b"
    r"|\b(?:replace|overwrit)\w*\b|\bcompact(?:ion|ed|ing|s)?\b|\bmaximum number of tokens\b"
    r"|\b(?:without|not?) los(?:e|ing)\b|\bpreserv\w+\b|\bstate[_ ](?:snapshot|summary)\b|\breturning later\b"
    r"|\bcontext (?:window|limit|checkpoint|summari[sz]ation|extraction|compaction)\b"
    rf"|\b(?:another|next|other|future|new|fresh) {_READER}"
    r"|继续|接手|后续|続け",
    re.IGNORECASE,
)
_ELSEWHERE: Final = re.compile(
    rf"\b(?:another|next|other|future|new) {_READER}|\bcontext (?:checkpoint|window)\b|\bout of context\b"
    r"|\bmaximum number of tokens\b|\breplace\w* (?:\w+ ){0,3}(?:conversation|history|context|messages)\b"
    r"|\b(?:history|conversation) (?:\w+ ){0,3}replaced\b|\bonly (?:memory|context|record)\b"
    r"|(?:do not|don't|never|without) call(?:ing)? (?:a|any) tools?\b|\btext only\b",
    re.IGNORECASE,
)
"""What a request that may call tools must say: its answer is read where this conversation is not, or calls nothing."""

_DEED: Final = re.compile(
    r"\b(?:function|script|class|method|endpoint|tests?|command|feature|implement\w*|refactor\w*|fix|bug|add|docs?"
    r"|documentation|readme|commit|translat\w+|explain|review|article|essay|e-?mail|boss|manager|tweet|blog|images?"
    r"|paragraph|judge|score|evaluate|classify|titles?|headline|follow-?up|tags?|branch name|prompt of|this prompt"
    r"|this code)\b|\b(?:how|why) (?:do|does|did|can|is|are|to)\b|\bwhat (?:do|does|is|are) th|\bhere is\b"
    r"|[\w/-]+\.(?:md|txt|json)\b|函数|代码|翻译|解释|文章",
    re.IGNORECASE,
)
"""What is wanted if a summary is not: code, a question on such texts, something for other people."""

_QUESTION: Final = re.compile(r"[^.!\n]{0,200}\?")
_REQUEST: Final = re.compile(r"\b(?:can|could|would|will) you\b", re.IGNORECASE)
"""A sentence that ends in a question mark asks about a summary, unless it asks somebody to write one."""

_RECEIVED: Final = re.compile(
    r"^\W*(?:this (?:session|conversation) is being continued|another language model|here is|i (?:have )?pasted"
    r"|continue\b|the previous|(?:is|are|was|were|does|did|do|has|have) (?:the|this|that|my|our|your)\b)",
    re.IGNORECASE,
)
"""How a message begins that hands a summary on to the model, or has a question on one, instead of asking for it."""

_RECAP: Final = re.compile(
    r"\b(?:summari[sz]e|condense|compact|(?:create|write|provide|produce|generate|give)\b[^.:\n]{0,80}\bsummary)\b"
    r"[^.:\n]{0,80}"
    r"\b(?:conversation|chat|dialog(?:ue)?|discussion|history|transcript|session|context|messages|so far)\b"
    r"(?! (?:of|in|from|between|with|about|below|as)\b)",
    re.IGNORECASE,
)
_PASTED: Final = re.compile(r":\s*\S.{40}|\n\s*\n.{40}", re.DOTALL)
_ROLE: Final = re.compile(
    r"\byou(?:'re| are)\b[^.\n]{0,100}?\b(?:summari[sz]\w+|compact\w+|compress\w+|condens\w+|distil\w+)"
    r"|\byour (?:task|job|sole \w+) is to\b[^.\n]{0,80}?\b(?:summary|summari[sz]e|compress|condense|compact)"
    r"|^\W*(?:\w+ ){0,2}?(?:summari[sz]e|condense|compress|compact)\b|^\W*(?:context )?summar(?:y|i[sz]ation)\b"
    r"|你是[^。\n]{0,30}(?:压缩|摘要|总结)",
    re.IGNORECASE,
)


def asks_to_go_on(text: str) -> bool:
    """Whether *text* asks, at its head or at its tail, for what is needed to go on with a conversation."""
    return any(_wishes(window) for window in _ends(text))


def asks_elsewhere(text: str) -> bool:
    """Whether *text* begins by asking so, for a reader who has nothing else, and leaves no work but writing it."""
    head = text.strip()[:HEAD]
    return any(_wishes(window, _ELSEWHERE) for window in _ends(head))


def asks_recap(text: str, *, history: bool) -> bool:
    """Whether *text* asks for a summary of the conversation it stands in.

    Without a *history* before it, it must not bring a conversation of its own.
    """
    for window in _ends(text):
        found = _RECAP.search(window)
        if found and not _is_other(window, found) and (history or not _PASTED.search(window, found.end())):
            return True
    return False


def is_summariser(text: str, *, history: bool) -> bool:
    """Whether a system *text* makes the model one that sums up conversations; with *history*, so that they go on."""
    head = text.strip()[:HEAD]
    role = _ROLE.search(head[:_OPENING])
    if role is None:
        return not history and _wishes(head[:_OPENING])
    if _is_other(head, role) or _OF.search(head, role.start(), role.end() + _NEAR) is None:
        return False
    return not history or _ON.search(head) is not None


def _ends(text: str) -> list[str]:
    """The head and the tail of *text*, or all of it; without the head if its first line wants another thing done."""
    text = text.strip()
    first = text.partition("\n")[0][:_NEAR]
    wants_other = _DEED.search(first) is not None
    if len(text) <= HEAD + TAIL:
        return [] if wants_other else [text]
    return [text[-TAIL:]] if wants_other else [text[:HEAD], text[-TAIL:]]


def _wishes(window: str, what_for: re.Pattern[str] = _ON) -> bool:
    made = _MADE.search(window)
    if made is None or _RECEIVED.match(window) or _is_other(window, made):
        return False
    return _OF.search(window) is not None and what_for.search(window) is not None


def _is_other(window: str, found: re.Match[str]) -> bool:
    """Whether what *window* wants is another thing, by the words around what was *found* in the same paragraph."""
    start = max(found.start() - _NEAR, window.rfind("\n\n", 0, found.start()), 0)
    if _DEED.search(window, start, found.end() + _NEAR // 2) is not None:
        return True
    return _QUESTION.match(window, found.end()) is not None and _REQUEST.search(window, start, found.start()) is None
