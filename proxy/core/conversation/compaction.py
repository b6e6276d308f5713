"""Whether a request is a client's own compaction of its conversation, and whose: rules as data.

If a client says so itself (a header, an item), that holds; else its own prompt tells, at the place where it puts it.
A wording that is not known tells by its intent, with the form of the request as evidence. What the user pasted, what a
tool returned, and what merely quotes such a prompt is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from proxy.core.conversation.intent import asks_elsewhere, asks_recap, asks_to_go_on, is_summariser
from proxy.core.conversation.outline import EMPTY, TOOLS, Envelope
from proxy.core.conversation.scan import decode
from proxy.core.errors import InvalidRequest

OTHER: Final = "other"
"""Whose compaction it is where nothing but its form tells."""

METADATA_HEADER: Final = "x-codex-turn-metadata"
"""JSON in which Codex says what a request is for."""

TRIGGER: Final = "compaction_trigger"
"""The last input item of a request that wants a compaction item for an answer."""


@dataclass(frozen=True, slots=True)
class Rule:
    """*client* compacts where a text begins with *begins*: the system text, or a part of the last user message.

    ``also`` has to occur in the same part, where the beginning alone is used for other things too.
    """

    client: str
    where: Literal["system", "user"]
    begins: str
    also: str = ""


RULES: Final = (
    Rule("claude-code", "user", "CRITICAL: Respond with TEXT ONLY", "summary"),
    Rule("claude-code", "user", "Your task is to create a detailed summary of the conversation"),
    Rule("claude-code", "user", "Your task is to create a detailed summary of the RECENT portion of the conversation"),
    Rule("codex", "user", "You are performing a CONTEXT CHECKPOINT COMPACTION"),
    Rule("codex", "user", "You have exceeded the maximum number of tokens, please stop coding"),
    Rule("opencode", "system", "You are a context summarization agent"),
    Rule("opencode", "user", "Provide a detailed prompt for continuing our conversation above"),
    Rule("pi", "system", "You are a context summarization assistant"),
    Rule("qwen-code", "user", "First, reason in your scratchpad. Then, generate the <state_snapshot>"),
    Rule("qwen-code", "user", "First, reason in your <analysis> block. Then, produce the <state_snapshot>"),
    Rule("qwen-code", "system", "You are the component that summarizes"),
    Rule("cline", "user", '<explicit_instructions type="summarize_task"'),
    Rule("cline", "user", '<explicit_instructions type="condense"'),
    Rule("continue", "user", "Please provide a concise summary of our conversation so far, capturing the key"),
    Rule("crush", "system", "You are summarizing a conversation to preserve context for continuing work later"),
    Rule("crush", "system", "The conversation context above needs to be compacted"),
    Rule("aider", "system", "*Briefly* summarize this partial conversation about programming"),
    Rule("goose", "user", "Please summarize the conversation history provided in the system prompt"),
    Rule("gemini-cli", "system", "You are a specialized system component responsible for distilling chat history"),
)
"""How agents word it, present and before; seen on the wire of Claude Code 2.1, Codex 0.169, opencode 1.18 and qwen-code
0.24, else in their code. They only name the client: what asks for the same in other words is found by its intent."""

_SYSTEM_RULES: Final = tuple(rule for rule in RULES if rule.where == "system")

CLIENTS: Final = frozenset({*(rule.client for rule in RULES), OTHER})
"""Everything a compaction may be labelled with."""

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
"""Characters of a system text in which it says what the model is."""

_TITLE: Final = re.compile(r"\b(?:title|headline|follow-?up|tags?|branch name|commit message)\b", re.IGNORECASE)


def announced(headers: Mapping[str, str]) -> str:
    """Whose compaction request *headers* (names in lower case) announce; empty where they announce none."""
    said = headers.get(METADATA_HEADER, "")
    if "compaction" not in said:
        return ""
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        return ""
    return "codex" if isinstance(found, dict) and found.get("request_kind") == "compaction" else ""


def client_of(outline: Envelope, first: bytes, last: bytes, history: bool = False) -> str:
    """Whose compaction the request is that *outline* surrounds; empty where it is none.

    *first* and *last* are the bytes of its first and last items: nothing else is looked at. *history*: a model spoke
    before. A wording that nobody knows is one by its intent, and by the request's form: no tools that may be called, or
    a history before it and words that leave nothing to call them for.
    """
    said = next(iter(outline.said.values()), "").lstrip()
    called = _may_call(outline)
    system = said or (_system(first) if not called or _occurs("system", first[:1024]) else "")
    found = next((rule for rule in _SYSTEM_RULES if system.startswith(rule.begins)), None)
    if found is not None:
        return found.client
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


def _may_ask(edges: bytes, system: str, *, called: bool, history: bool) -> bool:
    """Whether the last item may hold a wish in words of its own; *called*: tools may be called."""
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
    """The last item of a client's compaction without the words that ask for it; empty where it says nothing else."""
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
    """The words of a user's message, part by part; nothing of any other item."""
    if value.get("role") != "user":
        return
    content = value.get("content")
    for part in content if isinstance(content, list) else [{"text": content}]:
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str) and text.strip():
            yield text


def _system(first: bytes) -> str:
    """The beginning of a first item's text, where it is the operator's."""
    if b'"system"' not in first and b'"developer"' not in first:
        return ""
    try:
        value = decode(first)
    except InvalidRequest:
        return ""
    if not isinstance(value, dict) or value.get("role") not in ("system", "developer"):
        return ""
    return next(_texts({**value, "role": "user"}), "").lstrip()


def _may_call(outline: Envelope) -> bool:
    """Whether the model is given tools it may call."""
    choice = outline.value("tool_choice") if "tool_choice" in outline.fields else ""
    if "none" in choice:
        return False
    given = [outline.fields[name] for name in TOOLS if name in outline.fields]
    return any(field.end - field.start > _NOTHING for field in given)
