"""``/v1/chat/completions``: reads items from bytes and edits these bytes.

https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from proxy.core.apis import items, json_edit
from proxy.core.apis.base import no_item_list, no_marker
from proxy.core.apis.items import PLAIN, UncountedItem, digest, plain_user_message, text_message, tokens_of
from proxy.core.apis.json_edit import (
    Path,
    Slot,
    argument_slots,
    extended_list,
    extended_string,
    parts_in_content,
    to_json,
    with_content,
)
from proxy.core.apis.json_steps import objects
from proxy.core.conversation import ItemText, Role
from proxy.core.tokens.media import Prices, is_guess, is_media, part_tokens

API = "chat"

LIST = "messages"
"""The member of the body that holds the items."""

OUTPUT_FIGURES: tuple[str, ...] = ("max_completion_tokens", "max_tokens")
"""Members that state the output allowance; the first one that is set decides."""

PER_TOOLS = 0
"""Zero: the tools array is counted as the model reads it (``proxy/core/apis/tool_declarations.py``)."""

MARKER = b""
"""Empty: this API has no marks of a cached prefix. Marks that some providers accept stay on their parts."""

PER_MESSAGE = 4
"""Role and separators of a message: three plus the role, as in OpenAI's own example.

https://github.com/openai/openai-cookbook/blob/main/examples/How_to_count_tokens_with_tiktoken.ipynb
"""

PER_NAME = 1
"""A participant's name costs one more than its text (same example)."""

PER_CALL = 4
"""Tokens of a tool call without its name, arguments and id.

OpenAI renders several calls of one message together (19 tokens, and 3 for each call) and bills no ids. The ids that are
counted here take more than that, so the sum is not too low.
"""

REASONING = ("reasoning_content", "reasoning")
"""Members with a model's plain reasoning. They must not be removed, but may be clipped like any other text.
https://api-docs.deepseek.com/guides/thinking_mode, https://openrouter.ai/docs/use-cases/reasoning-tokens"""

KINDS = ("function", "custom")
"""Members of a tool call that hold its name and arguments, by kind of tool."""

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

with_item_list = no_item_list
user_message = plain_user_message
marker = no_marker

_COUNTED_ELSEWHERE = frozenset({"role", "content", "tool_calls", "function_call", "cache_control"})
"""Members that ``_counted`` handles separately, or that are no input."""


class _Call(NamedTuple):
    """The texts of a tool call; ``id`` is empty if it has none."""

    id: str
    name: str
    arguments: str


def _uncounted(message: dict[str, Any], prices: Prices) -> UncountedItem:
    """Return what is counted of one message."""
    if len(message) == PLAIN and (plain := text_message(message, ROLES)):
        role, text = plain
        return UncountedItem(role, PER_MESSAGE, [text], user_texts=[text])
    role = ROLES.get(str(message.get("role")), "user")
    calls, answers = _calls(message), _answers(message)
    tokens = PER_MESSAGE + PER_CALL * len(calls) + PER_NAME * bool(message.get("name"))
    # The legacy call has no id and is named by its function, as its result is.
    names = tuple([call.id or f"function:{call.name}" for call in calls])
    item = UncountedItem(role, tokens, _counted(message, calls), names, answers)
    if role in ("system", "user"):
        item.user_texts = [_content_text(message)]
    if isinstance(message.get("content"), list):
        _add_media(message["content"], item, prices)
    return item


read_item = partial(items.read_item, LIST, _uncounted, digest)
read_items = partial(items.read_items, LIST, _uncounted, digest)


def _add_media(parts: Sequence[Any], item: UncountedItem, prices: Prices) -> None:
    """Add the tokens of the media among *parts* to *item*."""
    for part in objects(parts):
        tokens = part_tokens(part, prices)
        if tokens is None:
            continue
        item.media += tokens
        if is_guess(part):
            item.guess += tokens


def _item_text(message: dict[str, Any]) -> ItemText:
    """Return the texts of one message."""
    if len(message) == PLAIN and (plain := text_message(message, ROLES)):
        return ItemText(*plain)
    role = ROLES.get(str(message.get("role")), "user")
    media: tuple[str, ...] = ()
    if isinstance(message.get("content"), list):
        media = tuple([str(part.get("type")) for part in objects(message["content"]) if is_media(part)])
    reasoning = "\n".join(text for key in REASONING if isinstance(text := message.get(key), str))
    text = _content_text(message)
    calls = tuple([(call.name, call.arguments) for call in _calls(message)])
    results: tuple[tuple[str, bool], ...] = ()
    if role == "tool":
        results = ((text, False),)
    return ItemText(role, text, calls, media, reasoning, results=results)


read_item_text = partial(items.read_item_text, _item_text)
read_item_texts = partial(items.read_item_texts, _item_text)


def with_text(raw: bytes, text: str, *, before: bool, media: Sequence[bytes] = (), marker: bytes = b"") -> bytes:
    """Return the message with *text* and *media* parts added."""
    del marker  # there are none in this API
    return with_content(raw, lambda content: _extended(content, text, before, media))


def _extended(content: str, text: str, before: bool, media: Sequence[bytes]) -> str:
    """Return the JSON *content* with *text* and *media* added; a text stays a text unless media are added."""
    if media:
        return extended_list(content, text, "text", before, media)
    if content.startswith("[") and content[1:-1].strip():
        return extended_list(content, text, "text", before, ())
    if content.startswith('"'):
        return extended_string(content, text, before)
    return to_json(text)


def media_parts(raw: bytes) -> list[bytes]:
    """Return the media parts of a message, each as its own bytes."""
    return parts_in_content(raw, is_media)


def with_results(raw: bytes, texts: Sequence[str], *, media: bool = False) -> bytes:
    """Return the tool result with the one of *texts* in place of its content; every other byte stays as it is."""
    text = "\n".join(texts)
    parts: list[bytes] = []
    if media:
        parts = media_parts(raw)

    def replaced(content: str) -> str:
        if not content.startswith("["):
            return to_json(text)
        return extended_list("null", text, "text", before=True, media=parts)

    return with_content(raw, replaced)


def _slots(message: dict[str, Any]) -> Iterator[Slot]:
    """Yield the texts of a message that may be clipped; string arguments of tool calls stay valid JSON."""
    yield from _text_slots(message)
    for at, call in enumerate(_listed(message, "tool_calls")):
        if isinstance(call, dict):
            kinds = [key for key in KINDS if isinstance(call.get(key), dict)]
            yield from _call_slots(_named(call), ("tool_calls", at, *kinds[:1]))
    legacy = message.get("function_call")
    if isinstance(legacy, dict):
        yield from _call_slots(legacy, ("function_call",))


clipped = partial(json_edit.clipped, slots=_slots, weigh=partial(tokens_of, read_item))


def _text_slots(message: dict[str, Any]) -> Iterator[Slot]:
    """Yield the texts of a message's content and reasoning."""
    for key in ("content", *REASONING):
        if isinstance(message.get(key), str):
            yield Slot((key,), message[key])
    for at, part in enumerate(_listed(message, "content")):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield Slot(("content", at, "text"), part["text"])


def _call_slots(function: dict[str, Any], path: Path) -> Iterator[Slot]:
    for name in ("arguments", "input"):
        if isinstance(function.get(name), str):
            yield from argument_slots((*path, name), function[name])


def _counted(message: Mapping[str, Any], calls: Sequence[_Call]) -> list[str]:
    """Return every text of a message with these *calls* that a provider counts."""
    # A list and no generator: this runs for every item, and each text would be one more call.
    texts: list[str] = []
    parts = message.get("content")
    if not isinstance(parts, list):
        parts = [parts]
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part is not None:
            texts += _part_texts(part)
    texts += chain.from_iterable(calls)
    for key, value in message.items():
        if key in _COUNTED_ELSEWHERE or not value:
            continue
        if isinstance(value, str):
            texts.append(value)
        else:
            texts.append(to_json(value))
    return texts


def _part_texts(part: Any) -> Iterator[str]:
    """Yield the text of a part; one that is neither text nor media counts as its JSON."""
    if not isinstance(part, dict):
        yield to_json(part)
    elif is_media(part):
        return
    elif part.get("type") in (None, "text") and isinstance(part.get("text"), str):
        yield part["text"]
    else:
        yield to_json(part)


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join([part["text"] for part in objects(content) if isinstance(part.get("text"), str)])


def _named(call: dict[str, Any]) -> dict[str, Any]:
    """Return the object with a call's name and arguments, whatever kind of tool it calls."""
    for key in KINDS:
        named = call.get(key)
        if isinstance(named, dict):
            return named
    return call


def _listed(message: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list under *key*; an empty one if there is none."""
    value = message.get(key)
    if isinstance(value, list):
        return value
    return []


def _calls(message: Mapping[str, Any]) -> list[_Call]:
    """Return the tool calls of a message, and behind them the legacy ``function_call``."""
    listed: list[dict[str, Any]] = []
    if isinstance(message.get("tool_calls"), list):
        listed = [call for call in message["tool_calls"] if isinstance(call, dict)]
    legacy = message.get("function_call")
    if isinstance(legacy, dict):
        listed.append({"function": legacy})
    calls: list[_Call] = []
    for call in listed:
        function = _named(call)
        arguments = function.get("arguments", function.get("input", ""))
        if not isinstance(arguments, str):
            arguments = to_json(arguments)
        calls.append(_Call(str(call.get("id") or ""), str(function.get("name", "")), arguments))
    return calls


def _answers(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the id of the call that a result answers; none if it names none."""
    if message.get("role") == "function":
        return (f"function:{message.get('name', '')}",)
    if message.get("tool_call_id"):
        return (str(message["tool_call_id"]),)
    return ()
