"""Whether a request is a client's own compaction of its conversation, and whose: rules as data.

Where a client says so itself (a header, an item), that holds; else its own prompt tells, at the place where it puts it.
A request without tools whose last user text asks for a summary is one too. What the user pasted, what a tool returned,
and what merely quotes such a prompt is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from proxy.core.conversation.outline import EMPTY, TOOLS, Outline
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
    Rule("codex", "user", "You are performing a CONTEXT CHECKPOINT COMPACTION"),
    Rule("opencode", "system", "You are a context summarization agent"),
    Rule("pi", "system", "You are a context summarization assistant"),
    Rule("qwen-code", "user", "First, reason in your scratchpad. Then, generate the <state_snapshot>"),
    Rule("qwen-code", "user", "First, reason in your <analysis> block. Then, produce the <state_snapshot>"),
    Rule("qwen-code", "system", "You are the component that summarizes"),
    Rule("cline", "user", '<explicit_instructions type="summarize_task"'),
    Rule("crush", "system", "You are summarizing a conversation to preserve context for continuing work later"),
)
"""How agents word it; seen on the wire of Claude Code 2.1, Codex 0.169, opencode 1.18, qwen-code 0.24, else in code."""

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

_HINT: Final = re.compile(rb"(?i)summar|compact|condens")
_SHORT: Final = 400
"""Characters at each end of a text in which it says what it wants."""

_ASKS: Final = re.compile(
    r"\b(?:summari[sz]e|condense|compact|(?:create|write|provide|produce|generate|give)\b[^.\n]{0,80}\bsummary)\b"
    r"[^.\n]{0,80}"
    r"\b(?:conversation|chat|dialog(?:ue)?|discussion|history|transcript|session|context|messages|so far)\b",
    re.IGNORECASE,
)
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


def client_of(outline: Outline, first: bytes, last: bytes) -> str:
    """Whose compaction the request is that *outline* surrounds; empty where it is none.

    *first* and *last* are the bytes of its first and last items: nothing else is looked at.
    """
    said = next(iter(outline.said.values()), "").lstrip()
    system = said or (_system(first) if _occurs("system", first[:1024]) else "")
    found = next((rule for rule in RULES if rule.where == "system" and system.startswith(rule.begins)), None)
    if found is not None:
        return found.client
    edges = last if len(last) <= 2 * _EDGE else last[:_EDGE] + last[-_EDGE:]
    marked = TRIGGER.encode() in edges[:256] or _occurs("user", edges)
    asks = not marked and not _may_call(outline) and _HINT.search(edges[:2048] + edges[-2048:]) is not None
    if not marked and not asks:
        return ""
    try:
        value = decode(last)
    except InvalidRequest:
        return ""
    if not isinstance(value, dict):
        return ""
    return _marked(value) if marked else _asking(value, said or _system(first))


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
    if len(kept) == len(content):  # it asks in its own words, and last
        texts = [at for at, part in enumerate(content) if isinstance(part, dict) and isinstance(part.get("text"), str)]
        kept = [part for at, part in enumerate(content) if at not in texts[-1:]]
    return json.dumps({**value, "content": kept}).encode() if kept else b""


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


def _asking(value: Mapping[str, Any], system: str) -> str:
    text = (list(_texts(value)) or [""])[-1]
    asked = text[:_SHORT] + "\n" + text[-_SHORT:]
    return OTHER if _ASKS.search(asked) and not _TITLE.search(asked + system[:_SHORT]) else ""


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


def _may_call(outline: Outline) -> bool:
    """Whether the model is given tools it may call."""
    choice = outline.value("tool_choice") if "tool_choice" in outline.fields else ""
    if "none" in choice:
        return False
    given = [outline.fields[name] for name in TOOLS if name in outline.fields]
    return any(field.end - field.start > _NOTHING for field in given)
