"""``/v1/responses``: reading items from bytes, and edits of these bytes.

Messages, calls, results and reasoning are elements of one list. Elements that only the provider can read (encrypted
reasoning, its own compaction, references to stored items) are carried as they are or leave with their round.

https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from proxy.core.apis import json_edit
from proxy.core.apis.item_digest import digest
from proxy.core.apis.json_edit import Clip, Slot, argument_slots, grown, joined, leaves, quoted
from proxy.core.apis.json_scan import Field, elements, members
from proxy.core.apis.json_steps import ONE_CALL, decode
from proxy.core.conversation import Item, ItemText, Role
from proxy.core.errors import InvalidRequest
from proxy.core.tokens.counting import injected_memories
from proxy.core.tokens.media import Prices, is_guess, is_media, opaque_tokens, part_tokens, prices_of

Count = Callable[[str], int]

API = "responses"

LIST = "input"
"""The member of the body that holds the items; a text there is one user message."""

OUTPUT_FIGURES: tuple[str, ...] = ("max_output_tokens",)
"""The member that states the output allowance."""

PER_REPLY = 3
"""What primes the answer, once a request."""

PER_TOOLS = 0
"""Nothing: the tools array is counted as the model reads it (``proxy/core/tokens/tools.py``)."""

MARKER = b""
"""There are no marks of a cached prefix in this API."""

PER_ITEM = 4
"""Role and separators of an element."""

REFERENCE = 500
"""Tokens that an element is taken for which only names a stored one; a guess."""

KEPT: Final = frozenset({"compaction", "compaction_summary", "context_compaction"})
"""Elements that stand for history which the provider folded itself: nothing else holds it, so they always stay.
https://platform.openai.com/docs/guides/conversation-state"""

_TRIGGER: Final = "compaction_trigger"
_REFERENCE: Final = "item_reference"
_ROLES: Final[Mapping[str, Role]] = {"system": "system", "developer": "system", "assistant": "assistant"}
_ANSWERS: Final = ("call_id", "approval_request_id", "id")
_REPLACEABLE: Final = frozenset({"function_call_output", "custom_tool_call_output"})
"""Results whose output may be any text."""

_NAMED_BY_ID: Final = frozenset({"local_shell_call", "mcp_approval_request"})
_PLAIN: Final = frozenset({"message", "function_call", "custom_tool_call"})
"""Elements whose texts are the client's or the model's own. Their results are too; all others stay as they are."""

_PICTURE: Final = "image_generation_call"
_OPAQUE: Final = "encrypted_content"
_NAMES: Final = frozenset({"type", "id", "role", "status", "phase", "annotations", "logprobs", "detail"})
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "refusal"})


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


def read_item(raw: bytes, count: Count) -> Item:
    """Return the item of one element's bytes. Raises ``InvalidRequest`` if it is no object."""
    value = json_edit.element(raw, LIST)
    try:
        return _read(value, count, len(raw) > ONE_CALL)
    except RecursionError:
        raise InvalidRequest("An element of 'input' is nested too deeply.") from None


def _read(value: dict[str, Any], count: Count, large: bool) -> Item:
    kind, role = _kind(value), _role(value)
    media, guess = _media_tokens(value, prices_of(count))
    text = PER_ITEM + sum(count(piece) for piece in _counted(value))
    opaque = sum(opaque_tokens(len(piece)) for path, piece in leaves(value) if path[-1] == _OPAQUE)
    is_plain = kind in _PLAIN or kind.endswith("_output")
    sealed = opaque if is_plain else opaque + text
    calls = _call_ids(value) if role == "assistant" else ()
    answers = _answered(value) if role == "tool" else ()
    tokens = text + media + opaque
    remembered = injected_memories("\n".join(_words(value))) if role in ("system", "user") else ""
    memory = count(remembered) if remembered else 0
    return Item(
        role, tokens, media, digest(value, large=large), calls, answers, guess + opaque, memory=memory, sealed=sealed
    )


def _media_tokens(value: dict[str, Any], prices: Prices) -> tuple[int, int]:
    """Return the tokens of an element's media, and how many of them are a guess."""
    kind = _kind(value)
    if kind == _REFERENCE:
        return REFERENCE, REFERENCE
    sizes = [(part, part_tokens(part, prices) or 0) for part in _parts(value) if is_media(part)]
    if kind == _PICTURE:
        sizes.append((value, prices.image.tokens(None, "high")))
    return sum(tokens for _, tokens in sizes), sum(tokens for part, tokens in sizes if is_guess(part))


def _call_ids(value: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names by which a result may refer to this call."""
    keys = ("call_id", "id") if _kind(value) in _NAMED_BY_ID else ("call_id",)
    return tuple(str(value[key]) for key in keys if value.get(key))


def _answered(value: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the name of the call that a result answers; empty if it names none."""
    return next(((str(value[key]),) for key in _ANSWERS if value.get(key)), ())


def _kind(value: Mapping[str, Any]) -> str:
    return str(value.get("type") or "message")


def _role(value: Mapping[str, Any]) -> Role:
    kind = _kind(value)
    if kind == "message":
        return _ROLES.get(str(value.get("role")), "user")
    if kind in KEPT:
        return "system"
    return "tool" if kind.endswith(("_output", "_response")) or kind == _TRIGGER else "assistant"


def read_item_text(raw: bytes) -> ItemText:
    """Return the words of one element."""
    value = decode(raw)
    kind, role = _kind(value), _role(value)
    media = tuple(str(part.get("type")) for part in _parts(value) if is_media(part))
    if kind == "reasoning":
        parts = [part for key in ("summary", "content") for part in value.get(key) or () if isinstance(part, dict)]
        return ItemText(role, "", reasoning="\n".join(str(part.get("text") or "") for part in parts))
    calls = ((str(value.get("name") or kind), _arguments(value)),) if kind.endswith("_call") else ()
    words = "\n".join(_words(value))
    return ItemText(
        role, words, calls, media, results=((words, False),) if kind in _REPLACEABLE and "output" in value else ()
    )


def _arguments(value: Mapping[str, Any]) -> str:
    given = next((value[key] for key in ("arguments", "input", "action") if value.get(key)), "")
    return given if isinstance(given, str) else quoted(given)


def _words(value: Mapping[str, Any]) -> Iterator[str]:
    for key in ("content", "output"):
        if isinstance(value.get(key), str):
            yield value[key]
    for part in _parts(value):
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            yield text


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
        added = '"content":' + joined("null", text, "input_text", before, media)
        return (source[:close] + ("," if fields else "") + added + source[close:]).encode()
    own = source[content.start : content.end]
    plain = own.startswith('"') and not media
    value = grown(own, text, before) if plain else joined(own, text, "input_text", before, media)
    return (source[: content.start] + value + source[content.end :]).encode()


def user_message(text: str) -> bytes:
    """Return a user message of our own that holds *text*, for conversations without a user item to carry it."""
    content = joined("null", text, "input_text", before=True, media=())
    return b'{"type":"message","role":"user","content":' + content.encode() + b"}"


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


def with_results(raw: bytes, texts: Sequence[str], *, media: bool = False) -> bytes:
    """Return the result with the one of *texts* in place of its output; every other byte stays as it is.

    With *media* the images and files of the output stay behind its text.
    """
    pairs = [(("output",), "\n".join(texts))]
    return json_edit.resaid(raw.decode(), pairs, "input_text", is_media if media else None).encode()


def clipped(raw: bytes, clip: Clip, count: Count, tokens: int) -> bytes:
    """Return the element cut to about *tokens* by clipping its longest texts; every other byte stays as it is.

    Reasoning, what hosted tools did, and whatever is encrypted is never touched.
    """
    return json_edit.clipped(raw, _slots, clip, count, lambda cut: read_item(cut, count).tokens, tokens)


def _slots(value: dict[str, Any]) -> Iterator[Slot]:
    kind = _kind(value)
    if kind == "function_call" and isinstance(value.get("arguments"), str):
        yield from argument_slots(("arguments",), value["arguments"])
    if kind == "custom_tool_call" and isinstance(value.get("input"), str):
        yield Slot(("input",), value["input"])
    if kind == "message" or kind.endswith("_output"):
        yield from _text_slots(value, "content")
        yield from _text_slots(value, "output")


def _text_slots(value: dict[str, Any], key: str) -> Iterator[Slot]:
    """Yield the text under *key*, or the texts of the parts there."""
    content = value.get(key)
    if isinstance(content, str):
        yield Slot((key,), content)
    if not isinstance(content, list):
        return
    for at, part in enumerate(content):
        texts = part if isinstance(part, dict) else {}
        for name in ("text", "refusal", "stdout", "stderr"):
            if isinstance(texts.get(name), str):
                yield Slot((key, at, name), texts[name])


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
    """Yield every text of an element that a provider counts: all but names of fields, media and what is sealed."""
    unread = {*_NAMES, "result"} if _kind(value) == _PICTURE else _NAMES
    for key, member in value.items():
        if key in unread or not member:
            continue
        if key in ("content", "output") and isinstance(member, list):
            yield from chain.from_iterable(map(_part_texts, member))
        elif not (isinstance(member, dict) and is_media(member)):  # a screenshot
            yield from (text for path, text in leaves(member, (key,)) if path[-1] != _OPAQUE)


def _part_texts(part: Any) -> Iterator[str]:
    """Yield the texts of a part; one of a kind that the API does not define counts as its JSON, media not at all."""
    if not isinstance(part, dict):
        yield quoted(part)
    elif is_media(part):
        return
    elif part.get("type") in _TEXT_PARTS:
        yield from (part[key] for key in ("text", "refusal") if isinstance(part.get(key), str))
    else:
        yield quoted(part)


def _content_field(fields: Sequence[Field]) -> Field | None:
    """Return the member with the content: the last one of that name, as parsers read it."""
    return next((field for field in reversed(fields) if field.key == "content"), None)
