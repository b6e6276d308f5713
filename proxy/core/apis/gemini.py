"""``generateContent`` of Google's Gemini API: reads items from bytes and edits these bytes.

The path names the model and the method. Members are spelled in camel case or with underscores, as in the JSON of any
protocol buffer (https://protobuf.dev/programming-guides/json/).

Most calls and results have no ids. They are paired by their function's name and, if several calls of one content have
the same name, by their order or their ids. All results of a content's calls are in the next content, so no cut can
separate them whatever their names are.

https://ai.google.dev/api/generate-content
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from proxy.core.apis import items, json_edit
from proxy.core.apis.base import no_marker
from proxy.core.apis.gemini_path import WRAPPED
from proxy.core.apis.items import UncountedItem, digest, tokens_of
from proxy.core.apis.json_edit import (
    Path,
    Slot,
    joined_list,
    leaves,
    parts_in_content,
    to_json,
    with_content,
    with_replaced_values,
)
from proxy.core.apis.json_scan import members
from proxy.core.apis.json_steps import as_object, decode
from proxy.core.apis.portable import SIGNATURES
from proxy.core.conversation import ItemText, Role
from proxy.core.tokens.media import Prices, is_guess, opaque_tokens, part_tokens

API = "gemini"

LIST = "contents"
"""The member of the body that holds the items."""

OUTPUT_FIGURES: tuple[str, ...] = ("generationConfig.maxOutputTokens",)
"""The member that states the output allowance; a dot stands before a member of a member."""

PER_TOOLS = 0
"""Zero: the tools array is counted as its JSON. Google does not publish what a model reads for it."""

MARKER = b""
"""Empty: there are no marks of a cached prefix in this API."""

marker = no_marker

PER_CONTENT = 4
"""Tokens of a content's role and separators."""

PER_CALL = 8
"""Tokens of a call or a result without its name, arguments and text; an estimate that calibration corrects."""

VIDEO_TOKENS_PER_SECOND = 300
"""Tokens of a second of video at the default resolution.
https://ai.google.dev/gemini-api/docs/video-understanding"""

VIDEO_BYTES_PER_SECOND = 250_000
"""Bytes assumed for a second of video (2 Mbit/s): the length in its container is not read."""

_ROLES: Final[Mapping[str, Role]] = {"model": "assistant", "function": "tool"}
_RESULT_KEYS: Final = ("output", "result", "error", "content")
"""Members that hold the whole result if they are its only one.
https://ai.google.dev/api/caching#FunctionResponse"""

_EDITABLE: Final[Mapping[str, str]] = {"call": "args", "result": "response"}
"""By kind of part: the member whose texts may be clipped."""

_KINDS: Final[Mapping[str, str]] = {
    "functionCall": "call",
    "function_call": "call",
    "functionResponse": "result",
    "function_response": "result",
    "inlineData": "media",
    "inline_data": "media",
    "fileData": "media",
    "file_data": "media",
    "text": "text",
}
"""The kind of a part by the name of its member."""


def with_item_list(body: bytes) -> bytes | None:
    """Return the request that is wrapped in a request for its token count; None if *body* wraps none."""
    try:
        source = body.decode()
        fields = members(source)
    except (ValueError, RecursionError):
        return None
    wrapped = [field for field in fields if field.key in WRAPPED]
    if len(wrapped) != 1 or any(field.key == LIST for field in fields):
        return None
    inner = source[wrapped[0].start : wrapped[0].end]
    if not inner.startswith("{") or not any(field.key == LIST for field in members(inner)):
        return None
    return inner.encode()


def _uncounted(content: dict[str, Any], prices: Prices) -> UncountedItem:
    """Return what is counted of one content."""
    parts = _parts(content)
    item = UncountedItem(_role(content, parts), PER_CONTENT, user_texts=list(_texts(parts)))
    if item.role == "tool":
        item.beside_results = item.user_texts
    item.calls, item.answers = _names(parts, "call"), _names(parts, "result")
    for part in parts:
        _add_part(part, item, prices)
    item.texts += [to_json(value) for key, value in content.items() if key not in ("role", "parts") and value]
    return item


def _digest(content: dict[str, Any], *, large: bool) -> bytes:
    """Return the digest of one content without its signatures; one without a role is the user's."""
    parts = [_unsigned(part) for part in _parts(content)]
    return digest({**content, "role": content.get("role") or "user", "parts": parts}, large=large)


read_item = partial(items.read_item, LIST, _uncounted, _digest)
read_items = partial(items.read_items, LIST, _uncounted, _digest)


def _role(content: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> Role:
    role = _ROLES.get(str(content.get("role")))
    if role is not None:
        return role
    if any(_kind(part) == "result" for part in parts):
        return "tool"
    return "user"


def _names(parts: Sequence[Mapping[str, Any]], kind: str) -> tuple[str, ...]:
    """Return a name for each call or result: its function, and its id or number if others are of the same function.

    An id alone is not enough: some clients invent ids for the results of calls that had none.
    """
    values = _values(parts, kind)
    calls_of = Counter(str(value.get("name")) for value in values)
    numbers: Counter[str] = Counter()
    names: list[str] = []
    for value in values:
        function = str(value.get("name"))
        label = str(numbers[function])
        if calls_of[function] > 1:
            label = str(value.get("id") or label)
        names.append(f"{function}#{label}")
        numbers[function] += 1
    return tuple(names)


def _add_part(part: Mapping[str, Any], item: UncountedItem, prices: Prices) -> None:
    """Add *part* to *item*."""
    opaque = opaque_tokens(len(_signature(part)))
    item.sealed += opaque
    item.guess += opaque
    kind = _kind(part)
    if kind == "media":
        _add_media(_value(part), item, prices)
        return
    if kind == "result":
        for media in _values(_parts(_value(part)), "media"):
            _add_media(media, item, prices)
    frame = 0
    if kind != "text":
        frame = PER_CALL
    if _is_sealed(part):
        item.sealed += frame
        item.sealed_parts.append((0, _part_texts(part, kind)))
    else:
        item.text += frame
        item.texts += _part_texts(part, kind)


def _part_texts(part: Mapping[str, Any], kind: str) -> list[str]:
    """Return the texts of a part without media and signature."""
    if kind == "text":
        return [_text(part)]
    if kind in _EDITABLE:
        value = _value(part)
        return [str(value.get("name")), str(value.get("id") or ""), to_json(value.get(_EDITABLE[kind]))]
    return [to_json(_unsigned(part))]


def _add_media(value: Mapping[str, Any], item: UncountedItem, prices: Prices) -> None:
    tokens, guessed = _media_tokens(value, prices)
    item.media += tokens
    if guessed:
        item.guess += tokens


def _media_tokens(value: Mapping[str, Any], prices: Prices) -> tuple[int, bool]:
    """Return the tokens of inline or stored data, and True if they are a guess."""
    mime = _mime(value)
    data = value.get("data")
    if not isinstance(data, str):
        return prices.image.tokens(None, "high"), True
    if mime.startswith("video/"):
        seconds = len(data) * 3 // 4 / VIDEO_BYTES_PER_SECOND
        return int(VIDEO_TOKENS_PER_SECOND * (1 + seconds)), True
    if mime.startswith("audio/"):
        block: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": data}}
    else:
        kind = "document"
        if mime.startswith("image/"):
            kind = "image"
        block = {"type": kind, "source": {"type": "base64", "media_type": mime, "data": data}}
    return part_tokens(block, prices) or 0, is_guess(block)


def _item_text(content: dict[str, Any]) -> ItemText:
    """Return the texts of one content."""
    parts = _parts(content)
    role = _role(content, parts)
    calls = tuple((str(value.get("name")), to_json(value.get("args") or {})) for value in _values(parts, "call"))
    results = tuple((_result_text(value.get("response")), _failed(value)) for value in _values(parts, "result"))
    media = tuple(_mime(value).partition("/")[0] or "file" for value in _values(parts, "media"))
    words = "\n".join(filter(None, map(_words, parts)))
    user_text = ""
    if role == "tool":
        user_text = "\n".join(_texts(parts))
    reasoning = "\n".join(_text(part) for part in parts if part.get("thought"))
    return ItemText(role, words, calls, media, reasoning, user_text, results)


read_item_text = partial(items.read_item_text, _item_text)
read_item_texts = partial(items.read_item_texts, _item_text)


def _words(part: Mapping[str, Any]) -> str:
    """Return the text of a text part or of a tool result; empty for thoughts and all other parts."""
    if part.get("thought"):
        return ""
    if _kind(part) == "result":
        return _result_text(_value(part).get("response"))
    return _text(part)


def _result_text(response: Any) -> str:
    """Return the text of a result, or its JSON if it is more than one text."""
    if isinstance(response, dict) and len(response) == 1:
        key, text = next(iter(response.items()))
        if key in _RESULT_KEYS and isinstance(text, str):
            return text
    return to_json(response)


def _failed(value: Mapping[str, Any]) -> bool:
    response = value.get("response")
    return isinstance(response, dict) and bool(response.get("error"))


def with_text(raw: bytes, text: str, *, before: bool, media: Sequence[bytes] = (), marker: bytes = b"") -> bytes:
    """Return the content with *text* and *media* parts added."""
    del marker  # there are none in this API
    added = ",".join([_text_part(text), *(part.decode() for part in media)])

    def extended(parts: str) -> str:
        if not parts.startswith("["):
            return joined_list("", added, before)
        return joined_list(parts[1:-1].strip(), added, before)

    return with_content(raw, extended, "parts")


def user_message(text: str) -> bytes:
    """Return a user content of our own that holds *text*, for conversations without a user item to carry it."""
    return b'{"role":"user","parts":[' + _text_part(text).encode() + b"]}"


def _text_part(text: str) -> str:
    return '{"text":' + to_json(text) + "}"


def media_parts(raw: bytes) -> list[bytes]:
    """Return the media parts of a content, each as its own bytes."""
    return parts_in_content(raw, lambda part: _kind(part) == "media", "parts")


def with_results(raw: bytes, texts: Sequence[str], *, media: bool = False) -> bytes:
    """Return the content with *texts* in place of the texts of its tool results; every other byte stays as it is.

    With *media* the image and file parts of a result stay. A result whose text does not change stays whole.
    """
    parts = decode(raw)["parts"]
    results = [(at, part) for at, part in enumerate(parts) if isinstance(part, dict) and _kind(part) == "result"]
    values: dict[Path, str] = {}
    for (at, part), text in zip(results, texts, strict=True):
        value = dict(_value(part))
        if text != _result_text(value.get("response")):
            value["response"] = {"output": text}
        if not media:
            value.pop("parts", None)
        values["parts", at, _key(part)] = to_json(value)
    return with_replaced_values(raw.decode(), values).encode()


def _slots(content: Mapping[str, Any]) -> Iterator[Slot]:
    """Yield the texts that may be clipped: none of signed parts, thoughts, media, or what server tools returned."""
    if not isinstance(content.get("parts"), list):
        return
    for at, part in enumerate(content["parts"]):
        if isinstance(part, dict) and not _is_sealed(part):
            yield from _part_slots(part, ("parts", at))


clipped = partial(json_edit.clipped, slots=_slots, weigh=partial(tokens_of, read_item))


def _part_slots(part: Mapping[str, Any], path: Path) -> Iterator[Slot]:
    kind = _kind(part)
    if kind == "text":
        yield Slot((*path, "text"), _text(part))
    if kind in _EDITABLE:
        member = _EDITABLE[kind]
        for inner, text in leaves(_value(part).get(member)):
            yield Slot((*path, _key(part), member, *inner), text)


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return the parts of a content; elements that are no objects are left out."""
    if not isinstance(content, dict) or not isinstance(content.get("parts"), list):
        return []
    return [part for part in content["parts"] if isinstance(part, dict)]


def _key(part: Mapping[str, Any]) -> str:
    """Return the name of a part's member; empty for a part of an unknown kind."""
    return next((key for key in part if key in _KINDS), "")


def _kind(part: Mapping[str, Any]) -> str:
    """Return the kind of a part: text, call, result or media; empty for any other."""
    return _KINDS.get(_key(part), "")


def _value(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object in a part; an empty one if there is none."""
    return as_object(part.get(_key(part)))


def _values(parts: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the objects in the parts of one *kind*."""
    return [_value(part) for part in parts if _kind(part) == kind]


def _text(part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if isinstance(text, str):
        return text
    return ""


def _texts(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts among *parts* that are no thoughts."""
    return (_text(part) for part in parts if _kind(part) == "text" and not part.get("thought"))


def _mime(value: Mapping[str, Any]) -> str:
    return str(value.get("mimeType") or value.get("mime_type") or "")


def _signature(part: Mapping[str, Any]) -> str:
    """Return the signature of a part; empty if it has none."""
    for key in SIGNATURES:
        if isinstance(part.get(key), str):
            return str(part[key])
    return ""


def _is_sealed(part: Mapping[str, Any]) -> bool:
    """Return True if a part must not be edited: it is signed, a thought, or of a kind that only the server knows."""
    return bool(part.get("thought")) or not _kind(part) or bool(_signature(part))


def _unsigned(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part without its signature: clients may omit it in older turns, and the digest must not change."""
    return {key: member for key, member in part.items() if key not in SIGNATURES}
