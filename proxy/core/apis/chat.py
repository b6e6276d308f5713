"""``/v1/chat/completions``: reading items from bytes, and edits of these bytes.

https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from proxy.core.apis import json_edit
from proxy.core.apis.item_digest import digest
from proxy.core.apis.json_edit import Clip, Path, Slot, argument_slots, grown, joined, quoted
from proxy.core.apis.json_scan import Field, elements, members
from proxy.core.apis.json_steps import ONE_CALL, decode
from proxy.core.conversation import Item, ItemText, Role
from proxy.core.errors import InvalidRequest
from proxy.core.tokens.counting import injected_memories
from proxy.core.tokens.media import is_guess, is_media, part_tokens, prices_of

Count = Callable[[str], int]

API = "chat"

LIST = "messages"
"""The member of the body that holds the items."""

OUTPUT_FIGURES: tuple[str, ...] = ("max_completion_tokens", "max_tokens")
"""The members that state the output allowance; the first one that is set holds."""

PER_TOOLS = 0
"""Nothing: the tools array is counted as the model reads it (``proxy/core/tokens/tools.py``)."""

MARKER = b""
"""Marks of a cached prefix are no part of this API; if a provider takes them, they stay on the parts that bear them."""

PER_MESSAGE = 4
"""Role and separators of a message: three plus the role, as in OpenAI's own example.

https://github.com/openai/openai-cookbook/blob/main/examples/How_to_count_tokens_with_tiktoken.ipynb
"""

PER_NAME = 1
"""A participant's name costs one more than its text (same example)."""

PER_REPLY = 3
"""What primes the assistant's answer, once a request (same example)."""

PER_CALL = 4
"""Separators of a tool call beside its name, arguments and id.

OpenAI renders several calls of one message as one (19 tokens and 3 a call) and bills no ids, which take more than that.
"""

REASONING = ("reasoning_content", "reasoning")
"""Members with a model's plain reasoning. They must be there, but may lose their middle like any other text."""

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

_COUNTED_ELSEWHERE = frozenset({"role", "content", "tool_calls", "function_call", "cache_control"})


def with_item_list(body: bytes) -> bytes | None:
    """Return None: a body without a list of messages is no request of this API."""
    del body
    return None


def read_item(raw: bytes, count: Count) -> Item:
    """Return the item of one message's bytes. Raises ``InvalidRequest`` if it is no object."""
    message = decode(raw)
    if not isinstance(message, dict):
        raise InvalidRequest("Every element of 'messages' must be an object.")
    try:
        return _read(message, count, len(raw) > ONE_CALL)
    except RecursionError:
        raise InvalidRequest("An element of 'messages' is nested too deeply.") from None


def _read(message: dict[str, Any], count: Count, large: bool) -> Item:
    role = ROLES.get(str(message.get("role")), "user")
    prices = prices_of(count)
    sizes = [(part, tokens) for part in _parts(message) if (tokens := part_tokens(part, prices)) is not None]
    media, guess = sum(tokens for _, tokens in sizes), sum(tokens for part, tokens in sizes if is_guess(part))
    called = _calls(message)
    text = sum(count(piece) for piece in _counted(message, called))
    calls = tuple(name for call in called if (name := _call_id(call)))
    answered = _answered(message)
    overhead = PER_MESSAGE + PER_CALL * len(called) + PER_NAME * bool(message.get("name"))
    answers = (answered,) if answered else ()
    remembered = injected_memories(_content_text(message)) if role in ("system", "user") else ""
    memory = count(remembered) if remembered else 0
    return Item(role, overhead + media + text, media, digest(message, large=large), calls, answers, guess, memory)


def read_item_text(raw: bytes) -> ItemText:
    """Return the words of one message."""
    message = decode(raw)
    role = ROLES.get(str(message.get("role")), "user")
    media = tuple(str(part.get("type")) for part in _parts(message) if is_media(part))
    reasoning = "\n".join(text for key in REASONING if isinstance(text := message.get(key), str))
    text = _content_text(message)
    results = ((text, False),) if role == "tool" else ()
    return ItemText(role, text, tuple(_call_texts(_calls(message))), media, reasoning, results=results)


def with_text(raw: bytes, text: str, *, before: bool, media: Sequence[bytes] = (), marker: bytes = b"") -> bytes:
    """Return the message with *text* and *media* parts added before or after its own content.

    Its own content stays one unchanged run of bytes. There are no markers in this API.
    """
    del marker
    source = raw.decode()
    fields = members(source)
    content = _content_field(fields)
    if content is None:
        close = source.rindex("}")
        added = '"content":' + _joined("null", text, before, media)
        return (source[:close] + ("," if fields else "") + added + source[close:]).encode()
    value = _joined(source[content.start : content.end], text, before, media)
    return (source[: content.start] + value + source[content.end :]).encode()


def _content_field(fields: Sequence[Field]) -> Field | None:
    """Return the member with the content: the last one of that name, as parsers read it."""
    return next((field for field in reversed(fields) if field.key == "content"), None)


def _joined(value: str, text: str, before: bool, media: Sequence[bytes]) -> str:
    if media or value.startswith("["):
        parts = joined(value, text, "text", before, media)
        return parts if media or value[1:-1].strip() else quoted(text)
    return grown(value, text, before) if value.startswith('"') else quoted(text)


def media_parts(raw: bytes) -> list[bytes]:
    """Return the media parts of a message, each as its own bytes."""
    source = raw.decode()
    content = _content_field(members(source))
    if content is None or source[content.start] != "[":
        return []
    parts = [source[start:end].encode() for start, end in elements(source, content.start)[0]]
    values = [(part, decode(part)) for part in parts]
    return [part for part, value in values if isinstance(value, dict) and is_media(value)]


def marker(raw: bytes) -> bytes:
    """Return nothing: see ``MARKER``."""
    del raw
    return b""


def user_message(text: str) -> bytes:
    """Return a user message of our own that holds *text*, for conversations without a user item to carry it."""
    return b'{"role":"user","content":' + quoted(text).encode() + b"}"


def with_results(raw: bytes, texts: Sequence[str], *, media: bool = False) -> bytes:
    """Return the tool result with the one of *texts* in place of its content; the rest stays as it was.

    With *media* the images of the content stay behind the text.
    """
    source = raw.decode()
    text = "\n".join(texts)
    content = _content_field(members(source))
    if content is None:
        return with_text(raw, text, before=False)
    parts = media_parts(raw) if media else []
    is_list = source[content.start] == "["
    value = joined("null", text, "text", before=True, media=parts) if is_list else quoted(text)
    return (source[: content.start] + value + source[content.end :]).encode()


def clipped(raw: bytes, clip: Clip, count: Count, tokens: int) -> bytes:
    """Return the message cut to about *tokens* by clipping its longest texts; every other byte stays as it is.

    *clip* shortens one text to so many tokens. String arguments of tool calls stay valid JSON.
    """
    return json_edit.clipped(raw, _slots, clip, count, lambda cut: read_item(cut, count).tokens, tokens)


def _slots(message: dict[str, Any]) -> Iterator[Slot]:
    yield from _text_slots(message)
    calls = message.get("tool_calls")
    for at, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict):
            kind = next((key for key in KINDS if isinstance(call.get(key), dict)), "")
            path = ("tool_calls", at, kind) if kind else ("tool_calls", at)
            yield from _call_slots(_named(call), path)
    if isinstance(legacy := message.get("function_call"), dict):
        yield from _call_slots(legacy, ("function_call",))


def _text_slots(message: dict[str, Any]) -> Iterator[Slot]:
    """Yield the texts of a message's content and reasoning."""
    for key in ("content", *REASONING):
        if isinstance(message.get(key), str):
            yield Slot((key,), message[key])
    content = message.get("content")
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield Slot(("content", at, "text"), part["text"])


def _call_slots(function: dict[str, Any], path: Path) -> Iterator[Slot]:
    for name in ("arguments", "input"):
        if isinstance(function.get(name), str):
            yield from argument_slots((*path, name), function[name])


def _counted(message: Mapping[str, Any], calls: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield every text of a message with these *calls* that a provider counts."""
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            yield part
        elif part is not None:
            yield from _part_texts(part)
    for call in calls:
        yield str(call.get("id") or "")
    for name, arguments in _call_texts(calls):
        yield name
        yield arguments
    for key, value in message.items():
        if key not in _COUNTED_ELSEWHERE and value:
            yield value if isinstance(value, str) else quoted(value)


def _part_texts(part: Any) -> Iterator[str]:
    """Yield the text of a part; one that is neither text nor media counts as its JSON."""
    if isinstance(part, dict) and is_media(part):
        return
    is_text = isinstance(part, dict) and part.get("type") in (None, "text") and isinstance(part.get("text"), str)
    yield part["text"] if is_text else quoted(part)


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in _parts(message) if isinstance(part.get("text"), str))


def _call_texts(calls: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the name and the argument text of each of *calls*."""
    for call in calls:
        function = _named(call)
        arguments = function.get("arguments", function.get("input", ""))
        yield str(function.get("name", "")), arguments if isinstance(arguments, str) else quoted(arguments)


def _named(call: dict[str, Any]) -> dict[str, Any]:
    """Return the object with a call's name and arguments, whatever kind of tool it calls."""
    return next((v for key in KINDS if isinstance(v := call.get(key), dict)), call)


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    objects = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    legacy = message.get("function_call")
    return [*objects, {"function": legacy}] if isinstance(legacy, dict) else objects


def _call_id(call: dict[str, Any]) -> str:
    if call.get("id"):
        return str(call["id"])
    return "function:" + "".join(name for name, _ in _call_texts([call]))


def _answered(message: Mapping[str, Any]) -> str:
    if message.get("role") == "function":
        return f"function:{message.get('name', '')}"
    return str(message["tool_call_id"]) if message.get("tool_call_id") else ""
