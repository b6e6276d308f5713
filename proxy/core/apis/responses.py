"""``/v1/responses``: reads items from bytes and edits these bytes.

Messages, calls, results and reasoning are elements of one list. Elements that only the provider can read (encrypted
reasoning, its own compaction, references to stored items) are never edited: they are sent as they are, or folded
together with their round.

https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

from proxy.core.apis import items, json_edit
from proxy.core.apis.base import no_marker
from proxy.core.apis.items import PLAIN, UncountedItem, digest, text_message, tokens_of
from proxy.core.apis.json_edit import (
    Slot,
    argument_slots,
    extended_list,
    extended_string,
    leaves,
    parts_in_content,
    to_json,
    with_content,
    with_replaced_contents,
)
from proxy.core.apis.json_scan import members
from proxy.core.conversation import ItemText, Role
from proxy.core.tokens.media import Prices, is_guess, is_media, opaque_tokens, part_tokens

API = "responses"

LIST = "input"
"""The member of the body that holds the items; a text there is one user message."""

OUTPUT_FIGURES: tuple[str, ...] = ("max_output_tokens",)
"""The member that states the output allowance."""

PER_TOOLS = 0
"""Zero: the tools array is counted as the model reads it (``proxy/core/apis/tool_declarations.py``)."""

MARKER = b""
"""Empty: there are no marks of a cached prefix in this API."""

marker = no_marker

PER_ITEM = 4
"""Tokens of an element's role and separators."""

REFERENCE = 500
"""Tokens assumed for an element that only refers to a stored one, whose size is unknown."""

PROVIDER_COMPACTIONS: Final = frozenset({"compaction", "compaction_summary", "context_compaction"})
"""Elements that replace history which the provider compacted itself. No other item has it, so they are never folded.
https://developers.openai.com/api/docs/guides/compaction"""

_TRIGGER: Final = "compaction_trigger"
_REFERENCE: Final = "item_reference"
_ROLES: Final[Mapping[str, Role]] = {"system": "system", "developer": "system", "assistant": "assistant"}
_ANSWER_KEYS: Final = ("call_id", "approval_request_id", "id")
"""Members of a result that may name its call; the first one that is there does."""

_REPLACEABLE: Final = frozenset({"function_call_output", "custom_tool_call_output"})
"""Results whose output may be any text."""

_NAMED_BY_ID: Final = frozenset({"local_shell_call", "mcp_approval_request"})
"""Calls whose results may name them by ``id``."""

_PLAIN: Final = frozenset({"message", "function_call", "custom_tool_call"})
"""Elements whose texts may be clipped, besides results (``…_output``); every other element is sent as it is."""

_IMAGE_CALL: Final = "image_generation_call"
_OPAQUE: Final = "encrypted_content"
"""The member that only the provider can read."""

_NAMES: Final = frozenset({"type", "id", "role", "status", "phase", "annotations", "logprobs", "detail"})
"""Members whose texts are no input."""

_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "refusal"})
"""Types of parts that are text."""


def with_item_list(body: bytes) -> bytes | None:
    """Return *body* with its input as a list: a text becomes a user message, a missing input an empty list.

    Return None if the input is something else.
    """
    try:
        source = body.decode()
        fields = members(source)
    except (ValueError, RecursionError):
        return None
    inputs = [field for field in fields if field.key == LIST]
    if not inputs and fields:
        close = source.rindex("}")
        return (source[:close] + f',"{LIST}":[]' + source[close:]).encode()
    if len(inputs) != 1 or source[inputs[0].start] != '"':
        return None
    start, end = inputs[0].start, inputs[0].end
    item = '[{"type":"message","role":"user","content":' + source[start:end] + "}]"
    return (source[:start] + item + source[end:]).encode()


def _uncounted(value: dict[str, Any], prices: Prices) -> UncountedItem:
    """Return what is counted of one element."""
    if len(value) == PLAIN + (value.get("type") == "message") and (plain := text_message(value, _ROLES)):
        role, text = plain
        return UncountedItem(role, PER_ITEM, [text], user_texts=[text])
    kind = _kind(value)
    role = _role(value, kind)
    media, guess = _media_tokens(value, kind, prices)
    opaque = _opaque_tokens(value)
    item = UncountedItem(role, 0, media=media, guess=guess + opaque, sealed=opaque)
    if kind in _PLAIN or kind.endswith("_output"):
        item.text = PER_ITEM
        item.texts += _counted(value)
    else:
        item.sealed += PER_ITEM
        item.sealed_parts.append((0, list(_counted(value))))
    if role == "assistant":
        item.calls = _call_ids(value)
    elif role == "tool":
        item.answers = _answers(value)
    else:
        item.user_texts = list(_words(value))
    return item


read_item = partial(items.read_item, LIST, _uncounted, digest)
read_items = partial(items.read_items, LIST, _uncounted, digest)


def _opaque_tokens(value: dict[str, Any]) -> int:
    """Return the tokens of everything encrypted in an element."""
    tokens = 0
    containers: list[Any] = [value]
    while containers:
        node = containers.pop()
        if isinstance(node, dict):
            sealed = node.get(_OPAQUE)
            if isinstance(sealed, str):
                tokens += opaque_tokens(len(sealed))
            node = node.values()
        containers += [member for member in node if isinstance(member, dict | list)]
    return tokens


def _media_tokens(value: dict[str, Any], kind: str, prices: Prices) -> tuple[int, int]:
    """Return the tokens of an element's media, and how many of them are a guess."""
    if kind == _REFERENCE:
        return REFERENCE, REFERENCE
    parts = [part for part in _parts(value) if is_media(part)]
    if not parts and kind != _IMAGE_CALL:
        return 0, 0
    sizes = [(part, part_tokens(part, prices) or 0) for part in parts]
    if kind == _IMAGE_CALL:
        sizes.append((value, prices.image.tokens(None, "high")))
    return sum(tokens for _, tokens in sizes), sum(tokens for part, tokens in sizes if is_guess(part))


def _call_ids(value: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names by which a result may refer to this call."""
    keys = ["call_id"]
    if _kind(value) in _NAMED_BY_ID:
        keys.append("id")
    return tuple(str(value[key]) for key in keys if value.get(key))


def _answers(value: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the name of the call that a result answers; none if it names none."""
    for key in _ANSWER_KEYS:
        if value.get(key):
            return (str(value[key]),)
    return ()


def _kind(value: Mapping[str, Any]) -> str:
    return str(value.get("type") or "message")


def _role(value: Mapping[str, Any], kind: str) -> Role:
    if kind == "message":
        return _ROLES.get(str(value.get("role")), "user")
    if kind in PROVIDER_COMPACTIONS:
        return "system"
    if kind.endswith(("_output", "_response")) or kind == _TRIGGER:
        return "tool"
    return "assistant"


def _item_text(value: dict[str, Any]) -> ItemText:
    """Return the texts of one element."""
    if len(value) == PLAIN + (value.get("type") == "message") and (plain := text_message(value, _ROLES)):
        return ItemText(*plain)
    kind = _kind(value)
    role = _role(value, kind)
    if kind == "reasoning":
        return ItemText(role, "", reasoning=_reasoning(value))
    media = tuple(str(part.get("type")) for part in _parts(value) if is_media(part))
    words = "\n".join(_words(value))
    calls: tuple[tuple[str, str], ...] = ()
    results: tuple[tuple[str, bool], ...] = ()
    if kind.endswith("_call"):
        calls = ((str(value.get("name") or kind), _arguments(value)),)
    if kind in _REPLACEABLE and "output" in value:
        results = ((words, False),)
    return ItemText(role, words, calls, media, results=results)


read_item_text = partial(items.read_item_text, _item_text)
read_item_texts = partial(items.read_item_texts, _item_text)


def _reasoning(value: Mapping[str, Any]) -> str:
    """Return the readable reasoning of an element: its summary and its content."""
    members = [value.get("summary"), value.get("content")]
    parts = [part for member in members if isinstance(member, list) for part in member]
    return "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _arguments(value: Mapping[str, Any]) -> str:
    """Return the arguments of a call as text; empty if it has none."""
    for key in ("arguments", "input", "action"):
        arguments = value.get(key)
        if isinstance(arguments, str) and arguments:
            return arguments
        if arguments:
            return to_json(arguments)
    return ""


def _words(value: Mapping[str, Any]) -> Iterator[str]:
    for key in ("content", "output"):
        if isinstance(value.get(key), str):
            yield value[key]
    for part in _parts(value):
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            yield text


def with_text(raw: bytes, text: str, *, before: bool, media: Sequence[bytes] = (), marker: bytes = b"") -> bytes:
    """Return the message with *text* and *media* parts added."""
    del marker  # there are none in this API
    return with_content(raw, lambda content: _extended(content, text, before, media))


def _extended(content: str, text: str, before: bool, media: Sequence[bytes]) -> str:
    """Return the JSON *content* with *text* and *media* added; a text stays a text unless media are added."""
    if content.startswith('"') and not media:
        return extended_string(content, text, before)
    return extended_list(content, text, "input_text", before, media)


def user_message(text: str) -> bytes:
    """Return a user message of our own that holds *text*, for conversations without a user item to carry it."""
    content = extended_list("null", text, "input_text", before=True, media=())
    return b'{"type":"message","role":"user","content":' + content.encode() + b"}"


def media_parts(raw: bytes) -> list[bytes]:
    """Return the media parts of a message, each as its own bytes."""
    return parts_in_content(raw, is_media)


def with_results(raw: bytes, texts: Sequence[str], *, media: bool = False) -> bytes:
    """Return the result with the one of *texts* in place of its output; every other byte stays as it is."""
    replacement = (("output",), "\n".join(texts))
    return with_replaced_contents(raw.decode(), [replacement], "input_text", is_media, media=media).encode()


def _slots(value: dict[str, Any]) -> Iterator[Slot]:
    """Yield the texts that may be clipped: none of reasoning, of calls of hosted tools, or of encrypted content."""
    kind = _kind(value)
    if kind == "function_call" and isinstance(value.get("arguments"), str):
        yield from argument_slots(("arguments",), value["arguments"])
    if kind == "custom_tool_call" and isinstance(value.get("input"), str):
        yield Slot(("input",), value["input"])
    if kind == "message" or kind.endswith("_output"):
        yield from _text_slots(value, "content")
        yield from _text_slots(value, "output")


clipped = partial(json_edit.clipped, slots=_slots, weigh=partial(tokens_of, read_item))


def _text_slots(value: dict[str, Any], key: str) -> Iterator[Slot]:
    """Yield the text under *key*, or the texts of the parts there."""
    content = value.get(key)
    if isinstance(content, str):
        yield Slot((key,), content)
    if not isinstance(content, list):
        return
    for at, part in enumerate(content):
        if not isinstance(part, dict):
            continue
        for name in ("text", "refusal", "stdout", "stderr"):
            if isinstance(part.get(name), str):
                yield Slot((key, at, name), part[name])


def _parts(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a message's content or of a result's output."""
    parts: list[dict[str, Any]] = []
    for key in ("content", "output"):
        member = value.get(key)
        if isinstance(member, list):
            parts += [part for part in member if isinstance(part, dict)]
        elif isinstance(member, dict):
            parts.append(member)
    return parts


def _counted(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield every text of an element that a provider counts: all but names of fields, media and encrypted content."""
    unread = _NAMES
    if _kind(value) == _IMAGE_CALL:
        unread = _NAMES | {"result"}
    for key, member in value.items():
        if key not in unread and member:
            yield from _member_texts(key, member)


def _member_texts(key: str, member: Any) -> Iterable[str]:
    """Return the texts of one member that a provider counts."""
    if isinstance(member, str) and key == _OPAQUE:
        return ()
    if isinstance(member, str):
        return (member,)
    if isinstance(member, list) and key in ("content", "output"):
        return chain.from_iterable(map(_part_texts, member))
    if isinstance(member, dict) and is_media(member):  # a screenshot
        return ()
    return (text for path, text in leaves(member, (key,)) if path[-1] != _OPAQUE)


def _part_texts(part: Any) -> Iterator[str]:
    """Yield the texts of a part; one of a kind that the API does not define counts as its JSON, media not at all."""
    if not isinstance(part, dict):
        yield to_json(part)
    elif is_media(part):
        return
    elif str(part.get("type")) in _TEXT_PARTS:
        yield from (part[key] for key in ("text", "refusal") if isinstance(part.get(key), str))
    else:
        yield to_json(part)
