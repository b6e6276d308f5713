"""Recognises a client's own compaction of its conversation, and whose it is: rules as data.

If the client announces it (a header, an item), that holds; else its own prompt shows it, at the place where the client
puts it. A wording that is not known is recognised by its intent, with the form of the request as evidence. What the
user pasted, what a tool returned, and what merely quotes such a prompt is none.

The intent: such a request names three things close together: something to be written (a summary, a handoff, a
snapshot), what it is of (the conversation), and that work goes on from it (another agent, a new context, lost history).
A text about such texts (code that makes them, a question on a prompt) names the same things; what it wants done first
tells it apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from proxy.core.apis.envelope import EMPTY, TOOLS, Envelope
from proxy.core.apis.json_steps import decode
from proxy.core.errors import InvalidRequest

OTHER: Final = "other"
"""The client of a compaction that only its form shows."""

METADATA_HEADER: Final = "x-codex-turn-metadata"
"""JSON with which Codex states the purpose of a request."""

TRIGGER: Final = "compaction_trigger"
"""The last input item of a request that wants a compaction item for an answer."""


@dataclass(frozen=True, slots=True)
class PromptRule:
    """*client* compacts if a text begins with *begins*: the system text, or a part of the last user message.

    ``also`` has to occur in the same part, if the beginning alone is used for other things too.
    """

    client: str
    where: Literal["system", "user"]
    begins: str
    also: str = ""


RULES: Final = (
    PromptRule("claude-code", "user", "CRITICAL: Respond with TEXT ONLY", "summary"),
    PromptRule("claude-code", "user", "Your task is to create a detailed summary of the conversation"),
    PromptRule(
        "claude-code", "user", "Your task is to create a detailed summary of the RECENT portion of the conversation"
    ),
    PromptRule("codex", "user", "You are performing a CONTEXT CHECKPOINT COMPACTION"),
    PromptRule("codex", "user", "You have exceeded the maximum number of tokens, please stop coding"),
    PromptRule("opencode", "system", "You are a context summarization agent"),
    PromptRule("opencode", "user", "Provide a detailed prompt for continuing our conversation above"),
    PromptRule("pi", "system", "You are a context summarization assistant"),
    PromptRule("qwen-code", "user", "First, reason in your scratchpad. Then, generate the <state_snapshot>"),
    PromptRule("qwen-code", "user", "First, reason in your <analysis> block. Then, produce the <state_snapshot>"),
    PromptRule("qwen-code", "system", "You are the component that summarizes"),
    PromptRule("cline", "user", '<explicit_instructions type="summarize_task"'),
    PromptRule("cline", "user", '<explicit_instructions type="condense"'),
    PromptRule("continue", "user", "Please provide a concise summary of our conversation so far, capturing the key"),
    PromptRule("crush", "system", "You are summarizing a conversation to preserve context for continuing work later"),
    PromptRule("crush", "system", "The conversation context above needs to be compacted"),
    PromptRule("aider", "system", "*Briefly* summarize this partial conversation about programming"),
    PromptRule("goose", "user", "Please summarize the conversation history provided in the system prompt"),
    PromptRule(
        "gemini-cli", "system", "You are a specialized system component responsible for distilling chat history"
    ),
)
"""How agents word it, present and before; seen on the wire of Claude Code 2.1, Codex 0.169, opencode 1.18 and qwen-code
0.24, else in their code. They only name the client: other words for the same are recognised by their intent."""

_SYSTEM_RULES: Final = tuple(rule for rule in RULES if rule.where == "system")

CLIENTS: Final = frozenset({*(rule.client for rule in RULES), OTHER})
"""Every label of a compaction."""

_EDGE: Final = 16_384
"""Bytes at each end of the last item in which a client's prompt is looked for; the longest is half of that."""

_BEGINS: Final = {
    where: tuple(json.dumps(rule.begins)[1:-1].encode() for rule in RULES if rule.where == where)
    for where in ("system", "user")
}
"""The beginnings as they stand in JSON. Looked for one by one: three times as fast as all of them in one pattern."""

_NOTHING: Final = max(map(len, EMPTY))
"""No list of tools is as short."""

_HINT: Final = re.compile(
    rb"(?i)summar|compact|condens|compress|distil|hand-?o|checkpoint|snapshot|memento|extract|continuing"
    rb"|\\u(?:603b|6458|538b|6982|4ea4|8981)|\xe6\x80\xbb\xe7\xbb\x93|\xe6\x91\x98\xe8\xa6\x81|\xe5\x8e\x8b\xe7\xbc\xa9|\xe4\xba\xa4\xe6\x8e\xa5"
)
"""Without any of these, escaped or not, nothing asks for a summary: most requests need no closer look."""

_HINTED: Final = 4_096
"""Bytes at each end in which such a word is looked for."""

_SHORT: Final = 400
"""Characters of a system text in which it defines what the model is."""

_TITLE: Final = re.compile(r"\b(?:title|headline|follow-?up|tags?|branch name|commit message)\b", re.IGNORECASE)


def announced(headers: Mapping[str, str]) -> str:
    """Return the client whose compaction *headers* (names in lower case) announce; empty if they announce none."""
    metadata = headers.get(METADATA_HEADER, "")
    if "compaction" not in metadata:
        return ""
    try:
        value = json.loads(metadata)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(value, dict) or value.get("request_kind") != "compaction":
        return ""
    return "codex"


def client_of(envelope: Envelope, first: bytes, last: bytes, history: bool = False) -> str:
    """Return the client whose compaction the request with *envelope* around its items is; empty if it is none.

    *first* and *last* are the bytes of its first and last items: nothing else is looked at. *history*: a model spoke
    before. An unknown wording is recognised by its intent, and by the request's form: no tools that may be called, or
    a history before it and words that leave nothing to call them for.
    """
    called = _may_call(envelope)
    system = _system_text(envelope, first, called=called)
    for rule in _SYSTEM_RULES:
        if system.startswith(rule.begins):
            return rule.client
    edges = last if len(last) <= 2 * _EDGE else last[:_EDGE] + last[-_EDGE:]
    marked = TRIGGER.encode() in edges[:256] or _occurs("user", edges)
    if not marked and not _may_ask(edges, system, called=called, history=history):
        return ""
    try:
        value = decode(last)
    except InvalidRequest:
        return ""
    if not isinstance(value, dict):
        return ""
    known = _marked(value) if marked else ""
    return known or (OTHER if _asks(value, system, called=called, history=history) else "")


def _system_text(envelope: Envelope, first: bytes, *, called: bool) -> str:
    """Return the operator's words; of a *first* item only if tools may not be *called* or a rule's words occur."""
    system = next(iter(envelope.texts.values()), "").lstrip()
    if not system and (not called or _occurs("system", first[:1024])):
        return _system(first)
    return system


def _may_ask(edges: bytes, system: str, *, called: bool, history: bool) -> bool:
    """Return True if the last item may ask for a summary in other words; *called*: tools may be called."""
    if called and (not history or len(edges) > _EDGE):
        return False  # what asks for a text in place of a call is short
    return _HINT.search(edges[:_HINTED] + edges[-_HINTED:]) is not None or is_summariser(system, history=history)


def _asks(value: Mapping[str, Any], system: str, *, called: bool, history: bool) -> bool:
    text = (list(_texts(value)) or [""])[-1]
    if called:
        return history and asks_elsewhere(text)
    if _TITLE.search(system[:_SHORT]) or not text:
        return False
    return asks_to_go_on(text) or asks_recap(text, history=history) or is_summariser(system, history=history)


def without_prompt(raw: bytes) -> bytes:
    """Return the last item of a client's compaction without the words that ask for it; empty if it has no others."""
    try:
        value = decode(raw)
    except InvalidRequest:
        return b""
    if not isinstance(value, dict) or value.get("role") != "user":
        return raw
    content = value.get("content")
    if not isinstance(content, list):
        return b""
    kept = [part for part in content if not _is_prompt(part)]
    if len(kept) == len(content):
        kept = _without_last_text(content)
    return json.dumps({**value, "content": kept}).encode() if kept else b""


def _without_last_text(content: Sequence[Any]) -> list[Any]:
    """Return *content* without its last text: a client that asks in words of its own does so there."""
    texts = [at for at, part in enumerate(content) if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return [part for at, part in enumerate(content) if at not in texts[-1:]]


def _is_prompt(part: Any) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and any(
        rule.where == "user" and text.lstrip().startswith(rule.begins) for rule in RULES
    )


def _occurs(where: str, text: bytes) -> bool:
    return any(begins in text for begins in _BEGINS[where])


def _marked(value: Mapping[str, Any]) -> str:
    if value.get("type") == TRIGGER:
        return "codex"
    for text in _texts(value):
        start = text.lstrip()
        for rule in RULES:
            if rule.where == "user" and start.startswith(rule.begins) and rule.also in start:
                return rule.client
    return ""


def _texts(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a user's message, part by part; nothing of any other item."""
    if value.get("role") != "user":
        return
    content = value.get("content")
    for part in content if isinstance(content, list) else [{"text": content}]:
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str) and text.strip():
            yield text


def _system(first: bytes) -> str:
    """Return the text of a first item if it is the operator's; else an empty one."""
    if b'"system"' not in first and b'"developer"' not in first:
        return ""
    try:
        value = decode(first)
    except InvalidRequest:
        return ""
    if not isinstance(value, dict) or value.get("role") not in ("system", "developer"):
        return ""
    return next(_texts({**value, "role": "user"}), "").lstrip()


def _may_call(envelope: Envelope) -> bool:
    """Return True if the model is given tools it may call."""
    choice = envelope.value("tool_choice") if "tool_choice" in envelope.fields else ""
    if "none" in choice:
        return False
    given = [envelope.fields[name] for name in TOOLS if name in envelope.fields]
    return any(field.end - field.start > _NOTHING for field in given)


HEAD, TAIL = 900, 1_600
"""Characters at each end of a text that state its wish: a conversation may stand before or behind that."""

_OPENING: Final = 400
"""Characters of a system text in which it defines what the model is."""

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
"""What a request that may call tools must state: its answer is read outside this conversation, or calls nothing."""

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
    """Return True if *text* asks, at its head or at its tail, for what is needed to go on with a conversation."""
    return any(_wishes(window) for window in _ends(text))


def asks_elsewhere(text: str) -> bool:
    """Return True if *text* begins by asking so, for a reader who has nothing else, and leaves no other work."""
    head = text.strip()[:HEAD]
    return any(_wishes(window, _ELSEWHERE) for window in _ends(head))


def asks_recap(text: str, *, history: bool) -> bool:
    """Return True if *text* asks for a summary of the conversation it stands in.

    Without a *history* before it, it must not bring a conversation of its own.
    """
    for window in _ends(text):
        found = _RECAP.search(window)
        if found and not _is_other(window, found) and (history or not _PASTED.search(window, found.end())):
            return True
    return False


def is_summariser(text: str, *, history: bool) -> bool:
    """Return True if a system *text* makes the model a summariser; with *history*, one after which work goes on."""
    head = text.strip()[:HEAD]
    role = _ROLE.search(head[:_OPENING])
    if role is None:
        return not history and _wishes(head[:_OPENING])
    if _is_other(head, role) or _OF.search(head, role.start(), role.end() + _NEAR) is None:
        return False
    return not history or _ON.search(head) is not None


def _ends(text: str) -> list[str]:
    """Return head and tail of *text*, or all of it; without the head if its first line wants something else."""
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
    """Return True if *window* wants another thing, by the words around the match *found* in the same paragraph."""
    start = max(found.start() - _NEAR, window.rfind("\n\n", 0, found.start()), 0)
    if _DEED.search(window, start, found.end() + _NEAR // 2) is not None:
        return True
    return _QUESTION.match(window, found.end()) is not None and _REQUEST.search(window, start, found.start()) is None
