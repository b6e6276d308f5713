"""Recognises a client's own compaction of its conversation, and names the client.

Three kinds of evidence are tried in this order:

1. A header or an item that announces it.
2. The client's own prompt, in the place where that client puts it (``RULES``).
3. The request's form, and the intent of its last text (``proxy/core/compaction_intent.py``), for clients and wordings
   that no rule lists.

Text that a user pasted, that a tool returned or that merely quotes such a prompt is no compaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from proxy.core.apis.envelope import EMPTY, TOOLS, Envelope
from proxy.core.apis.json_steps import decode
from proxy.core.compaction_intent import (
    is_summariser,
    requests_continuation,
    requests_handover,
    requests_recap,
    requests_text_only,
    requests_title,
)
from proxy.core.errors import InvalidRequest

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
    *("summar", "compact", "condens", "compress", "distil", "hando", "hand-o", "checkpoint", "snapshot", "memento"),
    *("recap", "extract", "continu", "context", "write down", "write everything", "record all", "note to", "dump"),
    *("progress report", "leave yourself", "brief", "take over", "pick ", "carry on", "finish it", "about to be"),
    *("zusammen", "verdicht", "bergab", "bernehm", "bernimm", "fortf", "fortse", "weiter", "kontex", "verlauf"),
    "nachfolg",
    *("résum", "resum", "contexte", "repren", "relais", "poursui", "retom", "relevo", "segui", "contest", "assum"),
    *("riassum", "prosegu", "riprend", "subentr", "samen", "verder", "overne", "podsum", "kontek", "kontyn", "przej"),
    *("wznowi", "sammanfat", "över", "Över", "fortsät", "özet", "Özet", "bağlam", "devral", "devam"),
    *("итог", "езюм", "водк", "бобщ", "родолж", "онтекст", "подхват", "переня"),
    *("总结", "摘要", "压缩", "概括", "交接", "接手", "继续", "接替", "上下文", "要約", "まとめ", "引き継", "続"),
    *("コンテキスト", "再開", "요약", "이어", "계속", "인수인계", "컨텍스트"),
)
_HINTS: Final = tuple(
    dict.fromkeys(spelling for word in _HINT_WORDS for spelling in (word.encode(), json.dumps(word)[1:-1].encode()))
)
"""Lower-case words of which every request for a summary has one, as UTF-8 and as JSON escapes: others are not decoded.

One search for each costs less than one pattern of them all. Letters beyond ASCII are not lower-cased, so words begin
behind them.
"""

_HINT_WITHIN: Final = 4_096
"""Bytes at each end of the last item that are searched for such a word."""


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


def compacting_client(
    envelope: Envelope, first: bytes, last: bytes, has_history: bool, *, has_results: bool = False
) -> str:
    """Return the client whose compaction a request is; empty if it is none.

    *envelope* holds the members around its items, *first* and *last* are the bytes of its first and last items; no
    other item is read. *has_history* is True if a message of the model precedes the last item, *has_results* if tool
    results do. An unknown wording is recognised by its intent and by the request's form: it has no tools that the model
    may call, all the more if it called some before; or it has a history and its words exclude calls.
    """
    may_call = _may_call_tools(envelope)
    system = _system_text(envelope, first, may_call=may_call)
    for rule in _SYSTEM_RULES:
        if system.startswith(rule.begins):
            return rule.client
    if len(last) <= 2 * _EDGE and b'"user"' not in last and _TRIGGER not in last:
        return ""  # most last items are results of tools, and only a user's message can be a prompt
    client = _client_of_last(last, system, may_call=may_call, has_history=has_history)
    if not client and has_results and not may_call and _requests_handover(last, system):
        return OTHER
    return client


def _requests_handover(last: bytes, system: str) -> bool:
    """Return True if the *last* item requests what somebody else needs to take over, and *system* no title."""
    item = _decoded_object(last)
    if item is None or requests_title(system):
        return False
    return requests_handover(["", *_user_texts(item)][-1])


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
    searched = (edges[:_HINT_WITHIN] + edges[-_HINT_WITHIN:]).lower()
    if any(searched.find(word) >= 0 for word in _HINTS):
        return True
    return is_summariser(system, has_history=has_history)


def _has_intent(item: Mapping[str, Any], system: str, *, may_call: bool, has_history: bool) -> bool:
    """Return True if the last text of *item*, or the *system* text, requests a summary from which work continues."""
    # The last text is the request; those before it may be reminders of the client or a pasted conversation.
    text = ["", *_user_texts(item)][-1]
    if may_call:
        return has_history and requests_text_only(text)
    if requests_title(system) or not text:
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
