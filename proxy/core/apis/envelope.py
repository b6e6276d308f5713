"""What stands around the items of a body: model, output figure, tools, thinking budget.

It is small, and mostly equal from call to call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.core.apis.json_scan import ESCAPED_LETTER, Field, members, reject_duplicates
from proxy.core.apis.json_steps import whole
from proxy.core.errors import InvalidRequest
from proxy.core.session_names import session_in
from proxy.core.tokens.budget import stepped

TOOLS = ("tools", "functions")
COUNTED = (
    *(*TOOLS, "tool_choice", "response_format", "instructions", "text", "prompt", "system"),
    *("output_config", "output_format"),
)
"""Members beside the items that the provider counts as input."""

STORED = ("previous_response_id", "conversation")
"""Members by which a request goes on from what the provider keeps."""

_STORED_KEY = re.compile(rb'"(?:%b)"\s*:' % b"|".join(name.encode() for name in STORED))

_REFERENCE = re.compile(
    rb'"item_reference"|\{\s*+"(?:id|type)"\s*+:\s*+(?:"[^"\\]*+"|null)\s*+(?:,\s*+"(?:id|type)"\s*+:\s*+(?:"[^"\\]*+"|null)\s*+)?\}'
)
"""What may be an item that names a stored one; only looked at more closely then."""

UNSEEN = (*STORED, "prompt", "mcp_servers", "container")
"""Members that bring input which is not in the body."""

SESSION = ("conversation", "metadata", "prompt_cache_key")
"""Members in which clients name a conversation."""

HOSTED = re.compile(r'"type"\s*:\s*"(?:web_|file_search|code_|mcp|image_gen|tool_search)')
"""Tools that the provider runs by itself: what they find is counted as input too."""

MANAGED = {"clear_tool_uses": 100_000, "compact": 150_000}
"""Edits of a context by the provider that keep it short, by the beginning of their type, and when they set in."""

EMPTY = ("null", "[]", "{}", '""')
"""What a member says that says nothing."""

SYSTEM = ("instructions", "system")
"""Those of them that are the operator's words: a text, or a list of text blocks."""


def continues_stored(body: bytes) -> bool:
    """Whether a request with *body* goes on from what the provider keeps: a response, a conversation, a single item.

    Parsers disagree on which of two equal members holds, so one that says something is enough. A body that may name one
    and cannot be read counts as one that does.
    """
    if not _STORED_KEY.search(body) and not _REFERENCE.search(body) and not ESCAPED_LETTER.search(body):
        return False
    try:
        text = body.decode()
        return any(_is_stored(field.key, text[field.start : field.end]) for field in members(text))
    except (ValueError, RecursionError):
        return True


def _is_stored(key: str, value: str) -> bool:
    """Whether a member of the body names what the provider keeps."""
    if key in STORED:
        return value not in EMPTY
    if key != "input" or not value.startswith("["):
        return False
    return any(isinstance(item, dict) and _is_reference(item) for item in json.loads(value, parse_int=len))


def _is_reference(item: Mapping[str, Any]) -> bool:
    """Whether an item stands for one that the provider keeps. Its type may be left out, then it has nothing but an id.

    https://platform.openai.com/docs/api-reference/responses/create#responses_create-input
    """
    if item.get("type"):
        return bool(item["type"] == "item_reference")
    return "id" in item and item.keys() <= {"id", "type"}


@dataclass(frozen=True, slots=True)
class Envelope:
    """Facts of an outline. ``text`` is its JSON, ``fields`` the spans of its members in that text.

    ``least`` is the smallest output figure that the other members allow; ``said`` are the words of the members that
    hold the operator's. ``stored``: the conversation goes on from what the provider keeps and we cannot see;
    ``unseen``: the provider counts more than what is here. From ``managed`` tokens on, if set, the client wants the
    provider itself to shorten the conversation. ``session`` is what the body calls the conversation.
    """

    text: str
    model: str
    stream: bool
    requested: int | None
    fields: Mapping[str, Field]
    least: int = 0
    stored: bool = False
    unseen: bool = False
    managed: int | None = None
    session: str = ""
    said: Mapping[str, str] = field(default_factory=dict)

    def counted(self) -> dict[str, str]:
        """The text of every member that a provider counts as input: words as they are, all else as JSON."""
        found = {key: self.said.get(key) or self.value(key) for key in COUNTED if key in self.fields}
        return {key: value for key, value in found.items() if value not in EMPTY}

    def value(self, key: str) -> str:
        """The JSON text of the member *key*. Raises ``KeyError``."""
        where = self.fields[key]
        return self.text[where.start : where.end]

    def thinking(self, output: int) -> dict[str, str]:
        """The members that state a budget for thinking as they have to be beside a lower figure of *output*."""
        found = {key: json.loads(self.value(key)) for key in THINKING_MEMBERS if key in self.fields}
        return lowered(found, self.requested, output) if found and self.requested else {}


def read_envelope(text: str, figures: Sequence[str]) -> Envelope:
    """The facts of the outline *text*; *figures* are the members that may state the output allowance.

    Raises ``InvalidRequest`` where a member that decides anything occurs twice or is of the wrong type.
    """
    try:
        found = members(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    reject_duplicates(found)
    fields = {each.key: each for each in found}
    values = {key: _value(text, fields, key) for key in ("model", "stream", *figures)}
    model = values["model"]
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("'model' must be a string.")
    return Envelope(
        text=text,
        model=model or "",
        stream=values["stream"] is True,
        requested=next((v for key in figures if _is_figure(v := values[key])), None),
        fields=fields,
        least=least_output({key: _value(text, fields, key) for key in THINKING_MEMBERS}),
        stored=any(_value(text, fields, key) for key in STORED),
        unseen=any(_value(text, fields, key) for key in UNSEEN) or bool(HOSTED.search(_raw(text, fields, "tools"))),
        session=session_in({key: _value(text, fields, key) for key in SESSION}),
        managed=_managed(_value(text, fields, "truncation"), _value(text, fields, "context_management")),
        said={key: words for key in SYSTEM if (words := _words(_value(text, fields, key)))},
    )


def splice(outline: Envelope, at: int, items: bytes, edits: Mapping[str, str]) -> bytes:
    """The body of *outline* with *items* put back at character *at* and the members of *edits* replaced."""
    text = outline.text
    pieces: list[tuple[int, int, bytes]] = [(at, at, items)]
    pieces += [(outline.fields[key].start, outline.fields[key].end, value.encode()) for key, value in edits.items()]
    result: list[bytes] = []
    done = 0
    for start, end, value in sorted(pieces, key=lambda piece: piece[0]):
        result += [text[done:start].encode(), value]
        done = end
    return b"".join([*result, text[done:].encode()])


def _value(text: str, fields: Mapping[str, Field], key: str) -> Any:
    where = fields.get(key)
    return json.loads(text[where.start : where.end], parse_int=whole) if where else None


def _managed(truncation: Any, management: Any) -> int | None:
    """From how many tokens on the provider is to shorten the conversation by itself; ``None`` where it is not."""
    if truncation == "auto":
        return 0
    edits = management.get("edits") if isinstance(management, dict) else management
    limits = [_limit(edit) for edit in edits if isinstance(edit, dict)] if isinstance(edits, list) else []
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(edit: dict[str, Any]) -> int | None:
    kind = next((kind for kind in MANAGED if str(edit.get("type")).startswith(kind)), None)
    if kind is None:
        return None
    trigger = edit.get("trigger")
    if isinstance(trigger, dict) and trigger.get("type") == "tool_uses":
        return 0
    limit = trigger.get("value") if isinstance(trigger, dict) else edit.get("compact_threshold")
    return limit if isinstance(limit, int) and _is_figure(limit) else MANAGED[kind]


def _raw(text: str, fields: Mapping[str, Field], key: str) -> str:
    where = fields.get(key)
    return text[where.start : where.end] if where else ""


def _words(value: Any) -> str:
    """The words of a text or of a list of nothing but text blocks; empty for anything else."""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    return value if isinstance(value, str) else ""


def _is_figure(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


LEAST_THINKING = 1_024
"""The fewest tokens a budget is lowered to: less is an error at Anthropic and its resellers.
https://platform.claude.com/docs/en/build-with-claude/extended-thinking"""

THINKING_PATHS: tuple[tuple[str, ...], ...] = (
    ("thinking", "budget_tokens"),
    ("reasoning", "max_tokens"),
    ("thinking_budget",),
    ("extra_body", "google", "thinking_config", "thinking_budget"),
    ("google", "thinking_config", "thinking_budget"),
)
"""Where a budget stands, by the members that lead to it. Anthropic's has to be below ``max_tokens``, and OpenRouter's
(https://openrouter.ai/docs/use-cases/reasoning-tokens). Then Qwen's
(https://www.alibabacloud.com/help/en/model-studio/deep-thinking), and Gemini's in OpenAI's API, as it is on the wire
(https://ai.google.dev/gemini-api/docs/openai) and as gateways take it. OpenAI's ``effort`` is no number of tokens."""

THINKING_MEMBERS = tuple(dict.fromkeys(path[0] for path in THINKING_PATHS))
"""The members of a body in which a budget may stand."""


def least_output(members: Mapping[str, Any]) -> int:
    """The smallest output figure beside the budgets in *members*, once they are lowered; zero if there is none."""
    found = [min(budget, LEAST_THINKING) for path in THINKING_PATHS if (budget := _budget(members, path))]
    return max(found) + 1 if found else 0


def lowered(members: Mapping[str, Any], requested: int, output: int) -> dict[str, str]:
    """The JSON of those of *members* that change when the output figure goes from *requested* to *output*.

    A budget keeps its part of the figure, in few large steps, since another budget costs the prompt cache's messages.
    It stays as it is while half of the figure is left for the answer.
    """
    changed: dict[str, Any] = {}
    for path in THINKING_PATHS:
        budget = _budget(members, path)
        if budget > max(output // 2, LEAST_THINKING):
            share = min(budget * output // max(1, requested), output - 1)
            value = changed.get(path[0], members[path[0]])
            changed[path[0]] = _with(value, path[1:], max(LEAST_THINKING, stepped(max(1, share))))
    return {key: json.dumps(value) for key, value in changed.items()}


def _budget(members: Mapping[str, Any], path: tuple[str, ...]) -> int:
    """The budget at *path*; zero if there is none."""
    value: Any = members
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _with(value: Any, path: tuple[str, ...], budget: int) -> Any:
    """*value* with *budget* at *path*."""
    return {**value, path[0]: _with(value[path[0]], path[1:], budget)} if path else budget
