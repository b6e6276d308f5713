"""Recognises a client's own compaction of its conversation, and names the client.

Three kinds of evidence are tried in this order:

1. A header or an item that announces it.
2. The client's own prompt, in the place where that client puts it (``RULES``).
3. The request's intent and form, for clients and wordings that no rule lists. A request for a summary names three
   things close together: a text to write (a summary, a handoff, a snapshot), its subject (the conversation), and its
   use (another agent, a new context, lost history).

Text that a user pasted, that a tool returned or that merely quotes such a prompt is no compaction. A text about such
texts (code that writes summaries, a question on a prompt) names the same three things, but it requests other work first
(``_OTHER_WORK``), and that tells the two apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from proxy.core.apis.envelope import EMPTY, TOOLS, Envelope
from proxy.core.apis.json_steps import decode
from proxy.core.errors import InvalidRequest
from proxy.core.lazy_pattern import lazy_pattern

OTHER: Final = "other"
"""The client of a compaction that only its intent and form show."""

METADATA_HEADER: Final = "x-codex-turn-metadata"
"""The header in which Codex states the purpose of a request, as JSON (tests/recorded has examples)."""

TRIGGER: Final = "compaction_trigger"
"""The type of the last input item of a request that is answered with a compaction item.

https://developers.openai.com/api/docs/guides/compaction
"""

_TRIGGER: Final = TRIGGER.encode()


class PromptRule(msgspec.Struct, frozen=True):
    """*client* compacts if the system text, or a part of the last user message, begins with *begins*.

    ``also`` has to occur in the same part, because the beginning alone has other uses too.
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
    PromptRule("qwen-code", "user", "You are the component that summarizes"),  # there it shares the prompt cache
    PromptRule("cline", "user", '<explicit_instructions type="summarize_task"'),
    PromptRule("cline", "user", '<explicit_instructions type="condense"'),
    PromptRule("continue", "user", "Please provide a concise summary of our conversation so far, capturing the key"),
    PromptRule("crush", "system", "You are summarizing a conversation to preserve context for continuing work later"),
    PromptRule("crush", "system", "The conversation context above needs to be compacted"),
    PromptRule("aider", "system", "*Briefly* summarize this partial conversation about programming"),
    PromptRule("goose", "user", "Please summarize the conversation history provided in the system prompt"),
    PromptRule("goose", "system", "## Task Context\n- An llm context limit was reached"),
    PromptRule("roo-code", "user", "CRITICAL: This summarization request is a SYSTEM OPERATION"),
    PromptRule("amazon-q", "user", "[SYSTEM NOTE: This is an automated summarization request"),
    PromptRule(
        "gemini-cli", "system", "You are a specialized system component responsible for distilling chat history"
    ),
)
"""Prompts of agents, present and past. Those of Claude Code 2.1, Codex 0.169, opencode 1.18 and qwen-code 0.24 were
recorded, the others read in the agents' code. A rule only names the client: other wordings are recognised by intent."""

_SYSTEM_RULES: Final = tuple(rule for rule in RULES if rule.where == "system")

_EDGE: Final = 16_384
"""Bytes at each end of the last item that are searched for a client's prompt: twice as many as the longest one has."""

_TRIGGER_WITHIN: Final = 256
"""Bytes at the beginning of an item that are searched for its type."""

_SYSTEM_WITHIN: Final = 1_024
"""Bytes at the beginning of a first item within which a client's system prompt begins."""

_SYSTEM_BEGINNINGS, _USER_BEGINNINGS = (
    tuple(json.dumps(rule.begins)[1:-1].encode() for rule in RULES if rule.where == where)
    for where in ("system", "user")
)
"""The beginnings of prompts as JSON. One search for each is three times as fast as one pattern of them all."""

_TOOL_CHOICES: Final = ("tool_choice", "toolConfig", "tool_config")
"""Members that may exclude calls, by the word "none": Gemini's is https://ai.google.dev/api/caching#FunctionCallingMode"""

_LONGEST_EMPTY: Final = max(map(len, EMPTY))
"""Characters of the longest spelling of an empty list of tools."""

_HINT_WORDS: Final = (
    "summar|compact|condens|compress|distil|hand-?o|checkpoint|snapshot|memento|recap|extract|continu(?:ing|ation)"
    "|out of context|write (?:down|everything)|record all|note to|progress report|leave yourself|brief|dump"
    "|zusammen|resum|riassum"
)
_HINT_FOREIGN: Final = (
    *("résum", "Résum", "总结", "摘要", "压缩", "概括", "交接", "要約", "まとめ", "요약"),
    *("итог", "Итог", "езюм", "водк", "бобщ"),
)
_HINT_SPELLINGS: Final = tuple(
    spelling for word in _HINT_FOREIGN for spelling in (word.encode(), json.dumps(word)[1:-1].encode())
)
_HINT: Final = re.compile(b"(?i)" + b"|".join([_HINT_WORDS.encode(), *map(re.escape, _HINT_SPELLINGS)]))
"""Matches words of which every request for a summary has one, escaped or not; other requests are not decoded."""

_HINT_WITHIN: Final = 4_096
"""Bytes at each end of the last item that are searched for such a word."""

_TITLE: Final = lazy_pattern(r"\b(?:title|headline|follow-?up|tags?|branch name|commit message)\b", re.IGNORECASE)


def announced_client(headers: Mapping[str, str]) -> str:
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


def compacting_client(envelope: Envelope, first: bytes, last: bytes, has_history: bool) -> str:
    """Return the client whose compaction a request is; empty if it is none.

    *envelope* holds the members around its items, *first* and *last* are the bytes of its first and last items; no
    other item is read. *has_history* is True if a message of the model precedes the last item. An unknown wording is
    recognised by its intent and by the request's form: it has no tools that the model may call, or it has a history
    and its words exclude calls.
    """
    may_call = _may_call_tools(envelope)
    system = _system_text(envelope, first, may_call=may_call)
    for rule in _SYSTEM_RULES:
        if system.startswith(rule.begins):
            return rule.client
    if len(last) <= 2 * _EDGE and b'"user"' not in last and _TRIGGER not in last:
        return ""  # most last items are results of tools, and only a user's message can be a prompt
    return _client_of_last(last, system, may_call=may_call, has_history=has_history)


def _client_of_last(last: bytes, system: str, *, may_call: bool, has_history: bool) -> str:
    """Return the client whose compaction the *last* item requests; empty if it requests none."""
    # Bytes are searched before any JSON is decoded: every request comes here, and hardly any is a compaction.
    edges = last
    if len(last) > 2 * _EDGE:
        edges = last[:_EDGE] + last[-_EDGE:]
    has_prompt = _TRIGGER in edges[:_TRIGGER_WITHIN] or any(begins in edges for begins in _USER_BEGINNINGS)
    if not has_prompt and not _has_hint(edges, system, may_call=may_call, has_history=has_history):
        return ""
    item = _decoded_object(last)
    if item is None:
        return ""
    client = ""
    if has_prompt:
        client = _client_by_prompt(item)
    if not client and _has_intent(item, system, may_call=may_call, has_history=has_history):
        return OTHER
    return client


def _system_text(envelope: Envelope, first: bytes, *, may_call: bool) -> str:
    """Return the system text: that of the envelope, else that of the *first* item.

    The item is decoded only if the model may call no tools, or if the beginning of a rule's prompt occurs in it.
    """
    system = next(iter(envelope.texts.values()), "").lstrip()
    if system:
        return system
    head = first[:_SYSTEM_WITHIN]
    if may_call and not any(begins in head for begins in _SYSTEM_BEGINNINGS):
        return ""
    return _system_item_text(first)


def _has_hint(edges: bytes, system: str, *, may_call: bool, has_history: bool) -> bool:
    """Return True if the last item, of which *edges* are both ends, may request a summary in unknown words."""
    if may_call and (not has_history or len(edges) > _EDGE):
        return False  # a request for text instead of a call comes in a short message
    if _HINT.search(edges[:_HINT_WITHIN] + edges[-_HINT_WITHIN:]) is not None:
        return True
    return is_summariser(system, has_history=has_history)


def _has_intent(item: Mapping[str, Any], system: str, *, may_call: bool, has_history: bool) -> bool:
    """Return True if the last text of *item*, or the *system* text, requests a summary from which work continues."""
    # The last text is the request; those before it may be reminders of the client or a pasted conversation.
    text = ["", *_user_texts(item)][-1]
    if may_call:
        return has_history and requests_text_only(text)
    if _TITLE.search(system[:_OPENING]) or not text:
        return False
    if requests_continuation(text) or requests_recap(text, has_history=has_history):
        return True
    return is_summariser(system, has_history=has_history)


def without_prompt(raw: bytes) -> bytes:
    """Return the last item of a client's compaction without the prompt; empty if nothing else is in it."""
    item = _decoded_object(raw)
    if item is None:
        return b""
    if item.get("role") != "user":
        return raw
    content = item.get("content")
    if not isinstance(content, list):
        return b""
    rest = [part for part in content if not _is_prompt(part)]
    if len(rest) == len(content):
        rest = _without_last_text(content)
    if not rest:
        return b""
    return json.dumps({**item, "content": rest}).encode()


def _without_last_text(content: Sequence[Any]) -> list[Any]:
    """Return *content* without its last text: the prompt of a client that no rule lists."""
    texts = [at for at, part in enumerate(content) if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return [part for at, part in enumerate(content) if at not in texts[-1:]]


def _is_prompt(part: Any) -> bool:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        return False
    start = part["text"].lstrip()
    return any(rule.where == "user" and start.startswith(rule.begins) for rule in RULES)


def _client_by_prompt(item: Mapping[str, Any]) -> str:
    """Return the client that the type or the prompt of *item* names; empty if there is none."""
    if item.get("type") == TRIGGER:
        return "codex"
    for text in _user_texts(item):
        start = text.lstrip()
        for rule in RULES:
            if rule.where == "user" and start.startswith(rule.begins) and rule.also in start:
                return rule.client
    return ""


def _user_texts(item: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a user's message, part by part; none of any other item."""
    if item.get("role") == "user":
        yield from _texts(item)


def _texts(item: Mapping[str, Any]) -> Iterator[str]:
    parts = item.get("content", item.get("parts"))
    if not isinstance(parts, list):
        parts = [{"text": parts}]
    for part in parts:
        if not isinstance(part, dict):
            continue
        text = part.get("text")
        if isinstance(text, str) and text.strip():
            yield text


def _system_item_text(first: bytes) -> str:
    """Return the first text of a *first* item that is a system item; empty if it is none."""
    if b'"system"' not in first and b'"developer"' not in first:
        return ""
    item = _decoded_object(first)
    if item is None or item.get("role") not in ("system", "developer"):
        return ""
    return next(_texts(item), "").lstrip()


def _decoded_object(raw: bytes) -> dict[str, Any] | None:
    """Return the object of an item's bytes; None if it is none."""
    try:
        value = decode(raw)
    except InvalidRequest:
        return None
    if not isinstance(value, dict):
        return None
    return value


def _may_call_tools(envelope: Envelope) -> bool:
    """Return True if the request has tools that the model may call."""
    fields = envelope.fields
    if any(key in fields and '"none"' in envelope.value(key).lower() for key in _TOOL_CHOICES):
        return False
    lists = [fields[name] for name in TOOLS if name in fields]
    return any(field.end - field.start > _LONGEST_EMPTY for field in lists)


HEAD, TAIL = 900, 1_600
"""Characters at each end of a text that are searched for its request: between them may be a whole conversation."""

_OPENING: Final = 400
"""Characters at the beginning of a system text in which it defines the model's role."""

_NEAR: Final = 120
"""Characters around a match that are searched for other work."""

_SUMMARY: Final = lazy_pattern(
    r"\b(?:summar(?:y|ies|i[sz]e[ds]?|i[sz]ing|i[sz]ation)|condens\w+|compress\w*|distil\w*|memento|briefing"
    r"|compact(?! (?:json|form|format|table|list|view))\w*|recap\w*"
    r"|hand-?(?:off|over)(?! between the)|checkpoint|state_snapshot|continuation (?:brief|note|prompt|document))\b"
    r"|\bprogress report\b|\bnote to (?:the|your) (?:\w+ )?(?:agent|assistant|model|self)\b|\brecord all\b"
    r"|\bprompt for continuing|\bextract\b[^.\n]{0,60}\b(?:context\b|information (?:\w+ )?(?:for|to) (?:continu|resum))"
    r"|\bleave yourself (?:a|an|some)\b"
    r"|\b(?:write down|dump) (?:everything|all|what)\b|\bwrite everything\b"
    r"|\bzusammenfass\w+|\bfasse?\b[^.\n]{0,80}\bzusammen\b"
    r"|(?<!my )(?<!your )\brésum\w*|\bresum(?:en|ir|o)\b|\bresum[ae] (?:tod[ao]|la|el|esta|nuestra|a|o)\b|\briassum\w+"
    r"|总结|摘要|压缩|概括|交接|要約|まとめ|요약"
    r"|\bподвед\w+ итог|\bподыто\w+|\bрезюм\w+|\bсводк\w+|\bобобщ\w+",
    re.IGNORECASE,
)
_SUBJECT: Final = lazy_pattern(
    r"\b(?:conversations?|chats?|dialog(?:ue)?s?|discussion"
    r"|history(?! (?:table|file|page)s?\b)"
    r"(?! of (?!(?:the |all )?(?:conversation|chat|dialog|session|messages|work|this|our|your)))"
    r"|(?<!next )session|transcripts?|context|messages"
    r"|trajector(?:y|ies)|events|memory|progress|so far|task described above|whoever continues)\b"
    r"|what you (?:have )?(?:finished|did)"
    r"|\bhand-?(?:off|over)(?: \w+)? (?:for|to) (?:the next|another|an? (?:new|fresh|future)) "
    r"(?:agent|llm|model|ai|assistant|instance|session|context)\b"
    r"|\b(?:gespräch|unterhaltung|verlauf|sitzung|bisherig|conversa(?:ci|z)|historial|sesi|conversa\b|sessão|échange)"
    r"|对话|会话|历史|上下文|到目前为止|会話|セッション|これまで|대화|세션"
    r"|\b(?:разговор|диалог|бесед|переписк|сесси|сеанс)",
    re.IGNORECASE,
)
_READER = r"(?:\w+ )?(?:agent|llm|language model|model|ai|assistant|instance|session|context|conversation)\b"
_CONTINUATION: Final = lazy_pattern(
    r"\bcontinu\w+|\bresum(?:e|es|ed|ing|ption)\b|\bcarry on\b|\b(?:pick|tak)(?:e|es|s|ing)? ?(?:up|over)\b"
    r"|\bhand-?(?:off|over)\b|\bout of (?:context|room)\b|\bonly (?:memory|context|record)\b"
    r"|\b(?:replace|overwrit)\w*\b|\bcompact(?:ion|ed|ing|s)?\b|\bmaximum number of tokens\b"
    r"|\b(?:without|not?) los(?:e|ing)\b|\bpreserv\w+\b|\bstate[_ ](?:snapshot|summary)\b|\breturning later\b"
    r"|\bcontext (?:window|limit|checkpoint|summari[sz]ation|extraction|compaction)\b"
    rf"|\b(?:another|next|other|future|new|fresh) {_READER}"
    r"|\bbetween (?:a|the) (?:user|human)\b[^.\n]{0,20}\band (?:a|an|the) (?:\w+ )?(?:agent|assistant|ai|model)\b"
    r"|\b(?:fortsetz|fortfahr|weiterarbeit|weitermach|übernehm|reprend|reprise|continu|poursui|retom|prossegui|seguir\b)"
    r"|\bfuture self\b|\bcontext (?:\w+ ){0,3}(?:reset|cleared|wiped|discarded)\b|\bprosegu"
    r"|继续|接手|后续|続け|引き継|계속|이어|\bпродолж",
    re.IGNORECASE,
)
_TEXT_ONLY: Final = lazy_pattern(
    rf"\b(?:another|next|other|future|new|fresh) {_READER}|\bwhoever continues\b"
    r"|\bcontext (?:checkpoint|window)\b|\bout of context\b"
    r"|\bmaximum number of tokens\b|\breplace\w* (?:\w+ ){0,3}(?:conversation|history|context|messages)\b"
    r"|\b(?:history|conversation) (?:\w+ ){0,3}(?:replaced|discarded|cleared|removed)\b"
    r"|\bonly (?:memory|context|record|with the summary)\b|\bonly the summary\b"
    r"|(?:do not|don['’]t|never|without) (?:call|us|invok|run)(?:e|ing)? (?:(?:a|any|your) )?tools?\b|\btext only\b"
    r"|\bno tools?\b(?! results?| outputs?)|\btools are disabled\b|\bfuture self\b"
    r"|\bkeine (?:\w+ )?(?:werkzeuge|tools)\b|\bauc?un outil\b|\b(?:ninguna|nenhuma) (?:herramienta|ferramenta)\b"
    r"|\bnessuno strumento\b"
    r"|(?:不要|不得|请勿)调用|[只仅]输出|新的?(?:会话|对话)|后续模型|ツールは?を?(?:呼び|使)|新しい(?:会話|セッション)"
    r"|도구를? (?:호출|사용)하지|새(?:로운)? (?:세션|대화)|\bнов(?:ый|ого|ом|ой) (?:агент|сеанс|сесси)|\bдругой агент"
    r"|\bне (?:вызыва|использу)\w* инструмент",
    re.IGNORECASE,
)
"""Words of a request that has tools but excludes calls, or whose answer another context will read."""

_OTHER_WORK: Final = lazy_pattern(
    r"\b(?:function|script|class|method|endpoint|widget|dashboard|tests?|command|feature|implement\w*|refactor\w*|fix|bug|add|docs?"
    r"|documentation|readme|commit|translat\w+|explain|review|article|essay|e-?mail|boss|manager|tweet|blog|images?"
    r"|meetings?|interview|podcast|lecture|phone call"
    r"|paragraph|judge|score|evaluate|grad(?:e|ing)|classify|titles?|headline|follow-?up|tags?|branch name|prompt of"
    r"|this prompt|this code)\b|\b(?:how|why) (?:do|does|did|can|is|are|to)\b|\bwhat (?:do|does|is|are) th|\bhere is\b"
    r"|[\w/-]+\.(?:md|txt|json|py|[jt]sx?|go|rs|java|ya?ml|toml)\b|\b(?:in|into) [\w./-]+/(?!\w)"
    r"|函数|代码|翻译|解释|文章",
    re.IGNORECASE,
)
"""Words of a request for other work: code, an answer to a question on such texts, a text for other people."""

_QUESTION: Final = lazy_pattern(r"[^.!\n]{0,200}\?")
_POLITE_REQUEST: Final = lazy_pattern(r"\b(?:can|could|would|will) you\b", re.IGNORECASE)
"""A sentence that ends in a question mark is a question about a summary, unless it begins like this."""

_FOLLOW_UP: Final = lazy_pattern(
    r"^\W*(?:this (?:session|conversation) is being continued|this is what\b"
    r"|this is (?:a|the|my|our|your) (?:\w+ )?(?:summary|hand-?off|handover|notes?)\b"
    r"|another language model|here is|i (?:have )?pasted"
    r"|continue\b|the previous|(?:is|are|was|were|does|did|do|has|have) (?:the|this|that|my|our|your)\b)",
    re.IGNORECASE,
)
"""Beginnings of messages that contain a finished summary, or ask a question about one."""

_RECAP: Final = lazy_pattern(
    r"\b(?:summari[sz]e|condense|compact|(?:create|write|provide|produce|generate|give)\b[^.:\n]{0,80}\bsummary)\b"
    r"[^.:\n]{0,80}"
    r"\b(?:conversation|chat|dialog(?:ue)?|discussion|history|transcript|session|context|messages|so far)\b"
    r"(?! (?:of|in|from|between|with|about|below|as)\b)",
    re.IGNORECASE,
)
"""A request to summarise the conversation, without words on the summary's use."""

_PASTED: Final = lazy_pattern(r":\s*\S.{40}|\n\s*\n.{40}", re.DOTALL)
"""A text behind a colon or an empty line that is long enough to be pasted text: the subject may be that."""

_ROLE: Final = lazy_pattern(
    r"\byou(?:'re| are)\b[^.\n]{0,100}?\b(?:summari[sz]\w+|compact\w+|compress\w+|condens\w+|distil\w+)"
    r"|\byour (?:task|job|sole \w+) is to\b[^.\n]{0,80}?\b(?:summary|summari[sz]e|compress|condense|compact)"
    r"|^\W*(?:\w+ ){0,2}?(?:summari[sz]e|condense|compress|compact)\b"
    r"|^you (?:summari[sz]e|condense|compress|compact)\b|^\W*(?:context )?summar(?:y|i[sz]ation)\b"
    r"|你是[^。\n]{0,30}(?:压缩|摘要|总结)",
    re.IGNORECASE,
)
"""A system text whose subject is to summarise."""


def requests_continuation(text: str) -> bool:
    """Return True if *text* requests, in its head or tail, a summary from which the conversation continues."""
    return any(_requests_summary(window, _CONTINUATION) for window in _windows(text))


def requests_text_only(text: str) -> bool:
    """Return True if *text* begins with a request for a summary and nothing else.

    It states that no tools are to be called, or that the reader of the summary will have nothing else.
    """
    head = text.strip()[:HEAD]
    return any(_requests_summary(window, _TEXT_ONLY) for window in _windows(head))


def requests_recap(text: str, *, has_history: bool) -> bool:
    """Return True if *text* requests a summary of its own conversation.

    Without history the text must not contain a pasted conversation: the summary would be of that one.
    """
    for window in _windows(text):
        recap = _RECAP.search(window)
        if recap is None or _has_other_purpose(window, recap):
            continue
        if has_history or not _PASTED.search(window, recap.end()):
            return True
    return False


def is_summariser(text: str, *, has_history: bool) -> bool:
    """Return True if the system *text* makes the model a summariser.

    If the request *has_history*, the text must also state that work continues from the summary.
    """
    head = text.strip()[:HEAD]
    role = _ROLE.search(head[:_OPENING])
    if role is None:
        return not has_history and _requests_summary(head[:_OPENING], _CONTINUATION)
    if _has_other_purpose(head, role) or _SUBJECT.search(head, role.start(), role.end() + _NEAR) is None:
        return False
    return not has_history or _CONTINUATION.search(head) is not None


def _windows(text: str) -> list[str]:
    """Return the head and the tail of *text*, or a short text as a whole; no head if it first requests other work."""
    text = text.strip()
    first_line = text.partition("\n")[0][:_NEAR]
    windows = [text]
    if len(text) > HEAD + TAIL:
        windows = [text[:HEAD], text[-TAIL:]]
    if _OTHER_WORK.search(first_line) is not None:
        return windows[1:]
    return windows


def _requests_summary(window: str, use: re.Pattern[str]) -> bool:
    """Return True if *window* requests a summary of the conversation for a *use* of it."""
    summary = _SUMMARY.search(window)
    if summary is None or _FOLLOW_UP.match(window) or _has_other_purpose(window, summary):
        return False
    return _SUBJECT.search(window) is not None and use.search(window) is not None


def _has_other_purpose(window: str, match: re.Match[str]) -> bool:
    """Return True if the words around *match*, in the same paragraph of *window*, request something else."""
    start = max(match.start() - _NEAR, window.rfind("\n\n", 0, match.start()), 0)
    if _OTHER_WORK.search(window, start, match.end() + _NEAR // 2) is not None:
        return True
    if _QUESTION.match(window, match.end()) is None:
        return False
    return _POLITE_REQUEST.search(window, start, match.start()) is None
