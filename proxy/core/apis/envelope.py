"""Everything around the items of a body: model, output figure, tools, thinking budget.

It is small and mostly equal from request to request, so it is cached by its bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.core.apis.json_scan import ESCAPED_LETTER, Field, members, reject_duplicates
from proxy.core.apis.json_steps import objects, read_fraction, read_integer
from proxy.core.errors import InvalidRequest
from proxy.core.request import session_in_body
from proxy.core.tokens.budget import rounded_down

TOOLS = ("tools", "functions")
"""Members with the tools: a list of them, and the legacy one of functions."""

COUNTED = (
    "tools",
    "functions",
    "tool_choice",
    "response_format",
    "instructions",
    "text",
    "prompt",
    "system",
    "output_config",
    "output_format",
    "systemInstruction",
    "system_instruction",
    "generationConfig.responseSchema",
    "generationConfig.responseJsonSchema",
)
"""Members beside the items that the provider counts as input."""

STORED = ("previous_response_id", "conversation")
"""Members that name a conversation which the provider stores and the request continues.
https://platform.openai.com/docs/guides/conversation-state"""

CACHED = ("cachedContent", "cached_content")
"""Members that name a prefix which the provider stores: https://ai.google.dev/gemini-api/docs/caching"""

_STORED_KEY = re.compile(rb'"(?:%b)"\s*:' % b"|".join(name.encode() for name in (*STORED, *CACHED)))
"""Matches one of these members."""

_REFERENCE = re.compile(
    rb'"item_reference"|\{\s*+"(?:id|type)"\s*+:\s*+(?:"[^"\\]*+"|null)\s*+(?:,\s*+"(?:id|type)"\s*+:\s*+(?:"[^"\\]*+"|null)\s*+)?\}'
)
"""Matches in every body with an item that only refers to a stored one; without a match no item is decoded."""

UNSEEN = (*STORED, *CACHED, "prompt", "mcp_servers", "container")
"""Members that add input which is not in the body."""

SESSION = ("conversation", "metadata", "prompt_cache_key")
"""Members in which clients name a conversation."""

HOSTED = re.compile(
    r'"type"\s*:\s*"(?:web_|file_search|code_|mcp|image_gen|tool_search)'
    r'|(?:[\[,]\s*\{|\]\s*,)\s*"(?:google_?[sS]earch|code_?[eE]xecution|url_?[cC]ontext|file_?[sS]earch|google_?[mM]aps)\w*"\s*:'
)
"""Matches tools that the provider runs itself: their results are counted as input, too, and are not in the body.

https://platform.openai.com/docs/guides/tools-connectors-mcp, https://ai.google.dev/api/generate-content
"""

STEP, OVERLAP = 65_536, 4_096
"""Characters that are searched in one call, and those that two calls share.

``re`` holds the interpreter's lock while it searches: one call for a large text would stop all other threads.
"""

PROVIDER_EDITS = {"clear_tool_uses": 100_000, "compact": 150_000}
"""Edits by which the provider shortens a context: the beginning of their type, and the default trigger in tokens.
https://platform.claude.com/docs/en/build-with-claude/context-editing
https://platform.claude.com/docs/en/build-with-claude/compaction"""

INNER = ("generationConfig", "generationConfig.thinkingConfig")
"""Objects of Gemini's API whose members are fields of an envelope, too."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Lone surrogates: JSON can write them as escapes, but no header, log or store can hold them."""

_UNDERSCORE = re.compile(r"_([a-z])")

EMPTY = ("null", "[]", "{}", '""')
"""Values of a member that mean the same as its absence."""

SYSTEM = ("instructions", "system", "systemInstruction", "system_instruction")
"""Members with the system text: a text, a list of text blocks, or an object with such a list under ``parts``."""

LEAST_THINKING = 1_024
"""Tokens below which no thinking budget is lowered: Anthropic and its resellers reject a smaller one.
https://platform.claude.com/docs/en/build-with-claude/extended-thinking"""

THINKING_PATHS: tuple[tuple[str, ...], ...] = (
    ("thinking", "budget_tokens"),
    ("reasoning", "max_tokens"),
    ("thinking_budget",),
    ("extra_body", "google", "thinking_config", "thinking_budget"),
    ("google", "thinking_config", "thinking_budget"),
    ("generationConfig.thinkingConfig.thinkingBudget",),
)
"""Paths to a thinking budget in tokens, by provider:

- Anthropic's, which has to be below ``max_tokens``: https://platform.claude.com/docs/en/build-with-claude/extended-thinking
- OpenRouter's, for which the same holds: https://openrouter.ai/docs/use-cases/reasoning-tokens
- Qwen's: https://www.alibabacloud.com/help/en/model-studio/deep-thinking
- Gemini's in OpenAI's API, as gateways take it and as it is sent: https://ai.google.dev/gemini-api/docs/openai
- Gemini's in its own API, a part of the output figure: https://ai.google.dev/gemini-api/docs/thinking

OpenAI's ``effort`` is no number of tokens.
"""

THINKING_MEMBERS = tuple(dict.fromkeys(path[0] for path in THINKING_PATHS))
"""The members of a body that may hold a thinking budget."""


class Envelope(msgspec.Struct, frozen=True):
    """Everything around the items of a body. ``text`` is its JSON, ``fields`` are the spans of its members in it.

    ``least_output`` is the smallest output figure that the other members allow. ``texts`` are the system texts by
    member (``SYSTEM``). ``stored`` is True if the request continues a conversation that the provider stores;
    ``has_unseen_input`` is True if the provider counts input that is not in the body. ``provider_compacts_from`` is the
    number of tokens from which the provider compacts the conversation itself, None if it does not. ``session`` is the
    body's name of the conversation.
    """

    text: str
    model: str
    stream: bool
    requested_output: int | None
    fields: Mapping[str, Field]
    least_output: int
    stored: bool
    has_unseen_input: bool
    provider_compacts_from: int | None
    session: str
    texts: Mapping[str, str]

    def counted(self) -> dict[str, str]:
        """Return the text of every member that a provider counts as input: system texts as they are, others as JSON."""
        texts = {key: self.texts.get(key) or self.value(key) for key in COUNTED if key in self.fields}
        return {key: text for key, text in texts.items() if text not in EMPTY}

    def value(self, key: str) -> str:
        """Return the JSON text of the member *key*. Raises ``KeyError``."""
        span = self.fields[key]
        return self.text[span.start : span.end]

    def value_or_nothing(self, key: str) -> str:
        """Return the JSON text of the member *key*; empty if there is none."""
        if key not in self.fields:
            return ""
        return self.value(key)

    def member(self, key: str) -> Any:
        """Return the decoded member *key*; None if there is none."""
        return _value(self.text, self.fields, key)

    def thinking(self, output: int) -> dict[str, str]:
        """Return the JSON of the members whose thinking budget must change for a lower output figure, *output*."""
        members = {key: self.member(key) for key in THINKING_MEMBERS if key in self.fields}
        if not members or not self.requested_output:
            return {}
        return lowered_thinking(members, self.requested_output, output)


def read_envelope(text: str, figures: Sequence[str]) -> Envelope:
    """Return the envelope whose JSON is *text*; *figures* are the members that may state the output allowance.

    Raises ``InvalidRequest`` if a member that decides anything occurs twice or is of the wrong type.
    """
    try:
        fields_in_order = members(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    reject_duplicates(fields_in_order)
    fields = {field.key: field for field in fields_in_order}
    if any("." in figure for figure in figures):
        fields |= _inner_fields(text, fields)
    model = _value(text, fields, "model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("'model' must be a string.")
    if model and _SURROGATE.search(model):
        raise InvalidRequest("'model' must be a string that can be written as UTF-8.")
    outputs = [_value(text, fields, key) for key in figures]
    has_unseen_members = any(_value(text, fields, key) for key in UNSEEN if key in fields)
    return Envelope(
        text=text,
        model=model or "",
        stream=_value(text, fields, "stream") is True,
        requested_output=next(filter(_is_figure, outputs), None),
        fields=fields,
        least_output=least_output({key: _value(text, fields, key) for key in THINKING_MEMBERS if key in fields}),
        stored=any(_value(text, fields, key) for key in STORED if key in fields),
        has_unseen_input=has_unseen_members or _has_hosted_tool(text, fields.get("tools")),
        session=session_in_body({key: _value(text, fields, key) for key in SESSION}),
        provider_compacts_from=_compacts_from(
            _value(text, fields, "truncation"), _value(text, fields, "context_management")
        ),
        texts=_system_texts(text, fields),
    )


def _has_hosted_tool(text: str, tools: Field | None) -> bool:
    """True if the member *tools* of *text* has one that the provider runs itself."""
    if tools is None:
        return False
    starts = range(tools.start, tools.end, STEP)
    return any(HOSTED.search(text, start, min(start + STEP + OVERLAP, tools.end)) for start in starts)


def _system_texts(text: str, fields: Mapping[str, Field]) -> dict[str, str]:
    """Return the system texts by member; members without text are left out."""
    texts = {key: _words(_value(text, fields, key)) for key in SYSTEM if key in fields}
    return {key: words for key, words in texts.items() if words}


def _inner_fields(text: str, fields: Mapping[str, Field]) -> dict[str, Field]:
    """Return the members of Gemini's ``generationConfig``, each under its path with dots, in camel case.

    https://ai.google.dev/api/generate-content#generationconfig
    """
    inner: dict[str, Field] = {}
    waiting = [field for key, field in fields.items() if _in_camel_case(key) in INNER]
    while waiting:
        outer = waiting.pop()
        if text[outer.start : outer.start + 1] != "{":
            continue
        for member in members(text[outer.start : outer.end]):
            path = f"{_in_camel_case(outer.key)}.{_in_camel_case(member.key)}"
            inner[path] = Field(path, outer.start + member.start, outer.start + member.end)
            if path in INNER:
                waiting.append(inner[path])
    return inner


def _in_camel_case(name: str) -> str:
    """Return *name* in camel case; the API accepts underscores, too (https://protobuf.dev/programming-guides/json/)."""
    return _UNDERSCORE.sub(lambda match: match[1].upper(), name)


def continues_stored(body: bytes) -> bool:
    """Return True if *body* names a response, a conversation or an item that the provider stores.

    If a member occurs twice, parsers disagree on which one counts: one that is not empty is enough. A body that cannot
    be parsed is treated as one that names something stored.
    """
    if not _STORED_KEY.search(body) and not _REFERENCE.search(body) and not ESCAPED_LETTER.search(body):
        return False
    try:
        text = body.decode()
        return any(_names_stored(field.key, text[field.start : field.end]) for field in members(text))
    except (ValueError, RecursionError):
        return True


def _names_stored(key: str, value: str) -> bool:
    """Return True if the member *key*, with the JSON *value*, names a stored response, conversation or item."""
    if key in STORED or key in CACHED:
        return value not in EMPTY
    if key != "input" or not value.startswith("["):
        return False
    return any(isinstance(item, dict) and _is_reference(item) for item in json.loads(value, parse_int=len))


def _is_reference(item: Mapping[str, Any]) -> bool:
    """Return True if an item only refers to a stored one: by its type, or because it has nothing but an id.

    https://platform.openai.com/docs/api-reference/responses/create#responses_create-input
    """
    if item.get("type"):
        return bool(item["type"] == "item_reference")
    return "id" in item and item.keys() <= {"id", "type"}


def wants_plain_text(envelope: Envelope) -> bool:
    """Return True if one plain text can be the whole answer: one choice, no response format, audio or later result."""
    if envelope.member("n") not in (None, 1):
        return False
    if any(envelope.member(name) for name in ("audio", "background", "container")):
        return False
    formats = [envelope.member(name) for name in ("response_format", "output_format")]
    formats += [_inner(envelope.member(name), "format") for name in ("text", "output_config")]
    return all(form is None or _inner(form, "type") == "text" for form in formats)


def tool_choice(envelope: Envelope) -> str:
    """Return how the model chooses tools: ``auto``, also by default, ``none``, or a type that requires a call."""
    choice = envelope.member("tool_choice")
    if choice is None:
        return "auto"
    return str(_inner(choice, "type") or choice)


def splice(envelope: Envelope, at: int, items: bytes, edits: Mapping[str, str]) -> bytes:
    """Return the body of *envelope* with *items* inserted at character *at* and the members of *edits* replaced.

    A member that it does not have is appended to the others.
    """
    text = envelope.text
    replacements: list[tuple[int, int, bytes]] = [(at, at, items)]
    for key, value in edits.items():
        field = envelope.fields.get(key)
        if field is None:
            end = text.rindex("}")
            replacements.append((end, end, f",{json.dumps(key)}:{value}".encode()))
        else:
            replacements.append((field.start, field.end, value.encode()))
    body: list[bytes] = []
    done = 0
    # Copied from left to right in one pass, so that no replacement moves the offsets of another.
    for start, end, piece in sorted(replacements, key=lambda replacement: replacement[0]):
        body += [text[done:start].encode(), piece]
        done = end
    return b"".join([*body, text[done:].encode()])


def least_output(members: Mapping[str, Any]) -> int:
    """Return the smallest output figure that the lowered thinking budgets in *members* allow; zero without any."""
    budgets = [min(budget, LEAST_THINKING) for path in THINKING_PATHS if (budget := _thinking_budget(members, path))]
    if not budgets:
        return 0
    return max(budgets) + 1


def lowered_thinking(members: Mapping[str, Any], requested: int, output: int) -> dict[str, str]:
    """Return the JSON of those *members* that change if the output figure is lowered from *requested* to *output*.

    A budget keeps its share of the figure, rounded to few large steps, because each change of it invalidates the prompt
    cache of the messages. It does not change while half of the figure is left for the answer.
    https://platform.claude.com/docs/en/build-with-claude/prompt-caching
    """
    changed: dict[str, Any] = {}
    for path in THINKING_PATHS:
        budget = _thinking_budget(members, path)
        if budget > max(output // 2, LEAST_THINKING):
            share = min(budget * output // max(1, requested), output - 1)
            value = changed.get(path[0], members[path[0]])
            changed[path[0]] = _with_budget(value, path[1:], max(LEAST_THINKING, rounded_down(max(1, share))))
    return {key: json.dumps(value) for key, value in changed.items()}


def _thinking_budget(members: Mapping[str, Any], path: tuple[str, ...]) -> int:
    """Return the budget at *path*; zero if there is none."""
    value: Any = members
    for key in path:
        if not isinstance(value, Mapping):
            return 0
        value = value.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return max(0, value)


def _with_budget(value: Any, path: tuple[str, ...], budget: int) -> Any:
    """Return *value* with *budget* at *path*."""
    if not path:
        return budget
    return {**value, path[0]: _with_budget(value[path[0]], path[1:], budget)}


def _inner(value: Any, key: str) -> Any:
    """Return the member *key* of a decoded object; None if *value* is no object or has none."""
    if not isinstance(value, dict):
        return None
    return value.get(key)


def _value(text: str, fields: Mapping[str, Field], key: str) -> Any:
    """Return the decoded member *key*; None if there is none."""
    field = fields.get(key)
    if field is None:
        return None
    return json.loads(text[field.start : field.end], parse_int=read_integer, parse_float=read_fraction)


def _compacts_from(truncation: Any, management: Any) -> int | None:
    """Return the number of tokens from which the provider shortens the conversation; None if it does not.

    It does if *truncation* is ``auto`` (https://platform.openai.com/docs/api-reference/responses/create), or if
    *management* has an edit that shortens it.
    """
    if truncation == "auto":
        return 0
    triggers = [_trigger(edit) for edit in context_edits(management)]
    return min((tokens for tokens in triggers if tokens is not None), default=None)


def context_edits(management: Any) -> Sequence[dict[str, Any]]:
    """Return the edits in a decoded ``context_management``.

    OpenAI has a list (https://platform.openai.com/docs/api-reference/responses/create), Anthropic an object with the
    list under ``edits`` (https://platform.claude.com/docs/en/build-with-claude/context-editing).
    """
    if isinstance(management, dict):
        management = management.get("edits")
    return objects(management)


def _trigger(edit: dict[str, Any]) -> int | None:
    """Return the number of tokens from which *edit* shortens the context; None if it is of another kind."""
    kind = next((kind for kind in PROVIDER_EDITS if str(edit.get("type")).startswith(kind)), None)
    if kind is None:
        return None
    trigger = edit.get("trigger")
    tokens: Any = edit.get("compact_threshold")
    if isinstance(trigger, dict):
        if trigger.get("type") == "tool_uses":
            return 0
        tokens = trigger.get("value")
    if _is_figure(tokens):
        return int(tokens)
    return PROVIDER_EDITS[kind]


def _words(value: Any) -> str:
    """Return the text of a string or of a list of nothing but text blocks; empty for anything else."""
    if isinstance(value, dict):
        value = value.get("parts")
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    if isinstance(value, str):
        return value
    return ""


def _is_figure(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
