"""``/v1/messages``: reads items from bytes and edits these bytes.

Tool results are blocks of user messages, so a message with a result is a ``tool`` item whatever its ``role``. The
user's own words beside results are counted as ``user_tokens``.

https://platform.claude.com/docs/en/api/messages
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from proxy.core.apis import items, json_edit
from proxy.core.apis.base import no_item_list
from proxy.core.apis.items import (
    PLAIN,
    UncountedItem,
    digest,
    plain_user_message,
    text_message,
    tokens_of,
)
from proxy.core.apis.json_edit import (
    Path,
    Slot,
    extended_list,
    json_bytes,
    leaves,
    parts_in_content,
    to_json,
    with_content,
    with_replaced_contents,
)
from proxy.core.apis.json_steps import decode
from proxy.core.conversation import ItemText, Role
from proxy.core.tokens.media import Prices, is_guess, opaque_tokens, part_tokens

API = "messages"

LIST = "messages"
"""The member of the body that holds the items."""

OUTPUT_FIGURES: tuple[str, ...] = ("max_tokens",)
"""The member that states the output allowance."""

PER_TOOLS = 350
"""The provider's own text on how to call tools: 313 to 346 tokens by model and tool choice.

https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/overview
"""

PER_MESSAGE = 4
"""Tokens of a message's role and separators. Anthropic publishes none of these frames: they are estimates that the
calibration of the route corrects (``proxy/core/learned_window.py``)."""

PER_CALL = 8
"""Tokens of a call or a result without its name, input and id; an estimate, too."""

MARKER = b'"cache_control"'
"""Marks the end of the prompt cache; a request may hold four of these.
https://platform.claude.com/docs/en/build-with-claude/prompt-caching"""

with_item_list = no_item_list
user_message = plain_user_message

_ROLES: Final[Mapping[str, Role]] = {"system": "system", "assistant": "assistant"}
_TEXTS: Final = frozenset({"text", "tool_result", "tool_use", "search_result", "document"})
"""Blocks whose texts may be clipped; every other block is sent as it is."""

_OPAQUE: Final = frozenset({"signature", "data", "encrypted_content", "encrypted_index"})
"""Members that only the provider can read."""


def _uncounted(message: dict[str, Any], prices: Prices) -> UncountedItem:
    """Return what is counted of one message."""
    if len(message) == PLAIN and (plain := text_message(message, _ROLES)):
        role, text = plain
        return UncountedItem(role, PER_MESSAGE, [text], user_texts=[text])
    blocks = _blocks(message)
    item = UncountedItem(_role(message, blocks), PER_MESSAGE, user_texts=list(_user_texts(blocks)))
    if item.role == "tool":
        item.beside_results = item.user_texts
    for block in blocks:
        _add_block(block, item, prices)
    item.calls = tuple([str(block["id"]) for block in blocks if block.get("type") == "tool_use" and block.get("id")])
    item.answers = tuple([str(block["tool_use_id"]) for block in blocks if _is_result(block)])
    item.texts += _other_members(message)
    return item


read_item = partial(items.read_item, LIST, _uncounted, digest)
read_items = partial(items.read_items, LIST, _uncounted, digest)


def _role(message: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]]) -> Role:
    role = _ROLES.get(str(message.get("role")))
    if role is not None:
        return role
    for block in blocks:
        if block.get("type") == "tool_result":
            return "tool"
    return "user"


def _other_members(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the members that the API does not define but clients send."""
    for key, value in message.items():
        if key in ("role", "content", "cache_control") or not value:
            continue
        if not isinstance(value, str):
            value = to_json(value)
        yield value


def _add_block(block: Mapping[str, Any], item: UncountedItem, prices: Prices) -> None:
    """Add *block*, and the blocks inside it, to *item*."""
    kind = block.get("type")
    if _is_media(block):
        _add_media(block, item, prices)
    elif kind == "text":
        item.texts.append(_text(block.get("text")))
    elif kind == "tool_use":
        item.text += PER_CALL
        item.texts += (_text(block.get("id")), _text(block.get("name")), to_json(block.get("input")))
    elif kind == "tool_result":
        item.text += PER_CALL
        item.texts.append(_text(block.get("tool_use_id")))
        for part in _blocks(block):
            _add_block(part, item, prices)
    elif kind in ("document", "search_result"):
        _add_document(block, item, prices)
    else:
        _add_sealed(block, item)


def _add_media(block: Mapping[str, Any], item: UncountedItem, prices: Prices) -> None:
    tokens = part_tokens(block, prices) or 0
    item.media += tokens
    if is_guess(block):
        item.guess += tokens
    item.texts += [str(block[key]) for key in ("title", "context") if block.get(key)]


def _add_document(block: Mapping[str, Any], item: UncountedItem, prices: Prices) -> None:
    """Add a document or a search result to *item*: its labels, and the text or the blocks of its source."""
    item.texts += [_text(block.get(key)) for key in ("title", "context", "source")]
    source: Any = block
    if block.get("type") == "document":
        source = block.get("source")
    if not isinstance(source, dict):
        return
    item.texts.append(_text(source.get("data")))
    for part in _blocks(source):
        _add_block(part, item, prices)


def _add_sealed(block: Mapping[str, Any], item: UncountedItem) -> None:
    """Add to *item* a block that must stay as it is; texts that only the provider can read count by their size."""
    texts: list[str] = []
    opaque = 0
    for path, text in leaves(block):
        if path[-1] in _OPAQUE:
            opaque += opaque_tokens(len(text))
        elif path[-1] != "type":
            texts.append(text)
    item.sealed += PER_CALL
    if block.get("type") == "thinking":  # the signature is the encrypted thinking, so the plain text is in it again
        item.sealed_parts.append((opaque, texts))
        return
    item.sealed_parts.append((0, texts))
    item.sealed += opaque
    item.guess += opaque


def _item_text(message: dict[str, Any]) -> ItemText:
    """Return the texts of one message."""
    if len(message) == PLAIN and (plain := text_message(message, _ROLES)):
        return ItemText(*plain)
    blocks = _blocks(message)
    role = _role(message, blocks)
    calls: list[tuple[str, str]] = []
    results: list[tuple[str, bool]] = []
    media: list[str] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = str(block.get("type"))
        if kind == "thinking":
            thoughts.append(_text(block.get("thinking")))
        elif kind.endswith("tool_use"):
            calls.append((_text(block.get("name")), to_json(block.get("input"))))
        elif _is_result(block):
            results.append(("\n".join(_words(_blocks(block))), block.get("is_error") is True))
        elif _is_media(block):
            media.append(kind)
    user_text = ""
    if role == "tool":
        user_text = "\n".join(_user_texts(blocks))
    text = "\n".join(_words(blocks))
    return ItemText(role, text, tuple(calls), tuple(media), "\n".join(thoughts), user_text, tuple(results))


read_item_text = partial(items.read_item_text, _item_text)
read_item_texts = partial(items.read_item_texts, _item_text)


def with_text(raw: bytes, text: str, *, before: bool, media: Sequence[bytes] = (), marker: bytes = b"") -> bytes:
    """Return the message with a text block and *media* blocks added before or after its own content.

    Its own content stays one unchanged run of bytes. *marker* is the cache marker of the added block. A string becomes
    a block, so that its bytes are the same with and without a marker beside it.
    """
    more = ""
    if marker:
        more = f',"cache_control":{marker.decode()}'
    return with_content(raw, lambda content: extended_list(content, text, "text", before, media, more))


def media_parts(raw: bytes) -> list[bytes]:
    """Return the image and document blocks of a message, each as its own bytes."""
    return parts_in_content(raw, _is_media)


def marker(raw: bytes) -> bytes:
    """Return the last cache marker on a block of the message, as JSON; empty if there is none."""
    last = b""
    for block in _blocks(decode(raw)):
        for part in (*_blocks(block), block):
            if isinstance(part.get("cache_control"), dict):
                last = json_bytes(part["cache_control"])
    return last


def with_results(raw: bytes, texts: Sequence[str], *, media: bool = False) -> bytes:
    """Return the message with *texts* in place of its tool results; every other byte stays as it is."""
    blocks = decode(raw)["content"]
    indexes = [at for at, block in enumerate(blocks) if isinstance(block, dict) and _is_result(block)]
    replacements = [
        (("content", at, "content"), text) for at, text in zip(indexes, texts, strict=True) if "content" in blocks[at]
    ]
    return with_replaced_contents(raw.decode(), replacements, "text", _is_media, media=media).encode()


def _slots(holder: Mapping[str, Any], path: Path = ()) -> Iterator[Slot]:
    """Yield the texts that may be clipped in the ``content`` of *holder*: a message, a block or a source at *path*.

    Signed and encrypted blocks, media and what server tools returned are never touched.
    """
    content = holder.get("content")
    if isinstance(content, str):
        yield Slot((*path, "content"), content)
    if not isinstance(content, list):
        return
    for at, block in enumerate(content):
        if isinstance(block, dict) and str(block.get("type")) in _TEXTS:
            yield from _block_slots(block, (*path, "content", at))


def _block_slots(block: Mapping[str, Any], path: Path) -> Iterator[Slot]:
    if isinstance(block.get("text"), str):
        yield Slot((*path, "text"), block["text"])
    if block["type"] == "tool_use":
        for inner, text in leaves(block.get("input")):
            yield Slot((*path, "input", *inner), text)
    if block["type"] == "document":
        yield from _source_slots(block.get("source") or {}, (*path, "source"))
    else:
        yield from _slots(block, path)


def _source_slots(source: Mapping[str, Any], path: Path) -> Iterator[Slot]:
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        yield Slot((*path, "data"), source["data"])
    yield from _slots(source, path)


clipped = partial(json_edit.clipped, slots=_slots, weigh=partial(tokens_of, read_item))


def _blocks(holder: Any) -> list[dict[str, Any]]:
    """Return the blocks under ``content``; a string is one text block."""
    if not isinstance(holder, dict):
        return []
    content = holder.get("content")
    if isinstance(content, list):
        return [_as_block(part) for part in content]
    if isinstance(content, str) and content:
        return [{"type": "text", "text": content}]
    return []


def _as_block(part: Any) -> dict[str, Any]:
    """Return *part* if it is an object; anything else as a text block of its JSON."""
    if isinstance(part, dict):
        return part
    return {"type": "text", "text": to_json(part)}


def _is_result(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "tool_result" and bool(block.get("tool_use_id"))


def _is_media(block: Mapping[str, Any]) -> bool:
    """Return True if a block is an image or a file; a document whose source is text or blocks is text."""
    source = block.get("source")
    if not isinstance(source, dict):
        return False
    if block.get("type") == "document":
        return source.get("type") not in ("text", "content")
    return block.get("type") == "image"


def _user_texts(blocks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    return (_text(block.get("text")) for block in blocks if block.get("type") == "text")


def _words(blocks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of blocks in order, also inside results and documents; never a model's reasoning."""
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            yield _text(block.get("text"))
        elif kind in ("tool_result", "search_result", "compaction", "mcp_tool_result"):
            yield from _words(_blocks(block))
        elif kind == "document" and isinstance(block.get("source"), dict):
            source, data = block["source"], ""
            if source.get("type") == "text":
                data = _text(source.get("data"))
            yield data
            yield from _words(_blocks(source))


def _text(value: Any) -> str:
    """Return a text as it is, and other values as JSON; empty for an object and for None."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, dict):
        return ""
    return to_json(value)
