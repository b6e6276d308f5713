"""What reading items has in common in all APIs: messages that are one text, sums of tokens, digests.

Digests are equal for items of equal meaning, however a client serialises them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, repeat
from typing import Any

import msgspec

from proxy.core.apis.json_edit import json_bytes
from proxy.core.apis.json_steps import ONE_CALL, UNREADABLE, decoded, dismantle, encode_in_steps, parse
from proxy.core.conversation import HASH_BYTES, Count, Injected, Item, ItemText, Role
from proxy.core.errors import InvalidRequest
from proxy.core.tokens.counting import injected_in, prices_of, token_counts
from proxy.core.tokens.media import Prices

DEEPEST = 250
"""Levels that an item may nest; a deeper one is refused before Python's own limit of 1,000 frames is near."""

LONGEST_ARGUMENTS = 262_144
"""Characters of a call's arguments that are parsed for its digest; of longer ones the spelling has to be equal."""

IGNORED = frozenset({"cache_control", "annotations", "provider_specific_fields"})
"""Members that clients add, move or drop when they repeat an item; its meaning does not depend on them."""

PLAIN = 2
"""Members of a message that is only a text: its role and its content."""

_CONTAINERS = frozenset({dict, list})
_FIGURES = frozenset({int, float, bool})
"""Types of the members that have members, and of those that are never empty."""

_SORTED = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


class UncountedItem(msgspec.Struct, gc=False):
    """What was read of one element: its texts, and the tokens of all but them.

    ``text`` are the tokens of roles, names and separators, ``media`` those of its media, ``sealed`` those of parts that
    must not be edited; ``guess`` is only an estimate. ``texts`` are added to ``text`` when they are counted, the texts
    of ``sealed_parts`` to ``sealed``: each has the tokens of a signature that contains them, 0 for none.

    ``user_texts`` are not the model's, unless it is an item of the model; ``beside_results`` are those beside tool
    results. Both are among the other texts.
    """

    role: Role
    text: int
    texts: list[str] = []
    calls: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    user_texts: Sequence[str] = ()
    beside_results: Sequence[str] = ()
    media: int = 0
    guess: int = 0
    sealed: int = 0
    sealed_parts: list[tuple[int, list[str]]] = []


Read = Callable[[dict[str, Any], Prices], UncountedItem]
"""Reads an element's object, whose media have these prices."""


def read_item(
    name: str,
    read: Read,
    digest_of: Callable[..., bytes],
    raw: bytes,
    count: Count,
    *,
    with_digest: bool = True,
) -> Item:
    """Return the item of one element's bytes in the list *name*.

    *read* returns what is counted of the element's object, *digest_of* its digest.

    Raises ``InvalidRequest`` if it is no object.
    """
    [item] = read_items(name, read, digest_of, (raw,), count, with_digest=with_digest)
    return item


def read_items(
    name: str,
    read: Read,
    digest_of: Callable[..., bytes],
    raws: Iterable[bytes],
    count: Count,
    *,
    with_digest: bool = True,
) -> list[Item]:
    """Return the item of each of *raws*, as ``read_item`` does. Small ones are read and counted together."""
    items: list[Item] = []
    for values, large in decoded(raws):
        if not all(isinstance(value, dict) for value in values):
            raise InvalidRequest(f"Every element of {name!r} must be an object.")
        digests = [b""] * len(values)
        try:
            if with_digest:
                digests = [digest_of(value, large=large) for value in values]
            uncounted = list(map(read, values, repeat(prices_of(count))))
        except RecursionError:
            raise InvalidRequest(f"An element of {name!r} is nested too deeply.") from None
        finally:
            if large:
                dismantle(values[0])
        items += counted_items(uncounted, digests, count)
    return items


def read_item_text(read: Callable[[dict[str, Any]], ItemText], raw: bytes) -> ItemText:
    """Return the texts of one element's bytes, as the API's own *read* reads its object."""
    [text] = read_item_texts(read, (raw,))
    return text


def read_item_texts(read: Callable[[dict[str, Any]], ItemText], raws: Iterable[bytes]) -> list[ItemText]:
    """Return the texts of each of *raws*, as ``read_item_text`` does. Small ones are parsed together."""
    texts: list[ItemText] = []
    for values, large in decoded(raws):
        texts += map(read, values)
        if large:
            dismantle(values[0])
    return texts


def text_message(message: Mapping[str, Any], roles: Mapping[str, Role]) -> tuple[Role, str] | None:
    """Return role and text of a message of ``PLAIN`` members; None if these are not the role and a text.

    Most short items are such messages, and this shortcut reads them in a third of the time.
    """
    role, text = message.get("role"), message.get("content")
    if type(role) is not str or type(text) is not str:
        return None
    item_role = roles.get(role, "user")
    if not role or not text or len(text) > ONE_CALL or item_role == "tool":
        return None
    return item_role, text


def counted_items(uncounted: Sequence[UncountedItem], digests: Iterable[bytes], count: Count) -> list[Item]:
    """Return the items of *uncounted* with their *digests*: first all their texts are counted, in one run."""
    texts: list[str] = []
    user_texts: list[str] = []
    for each in uncounted:
        texts += each.texts
        texts += each.beside_results
        for _, contained in each.sealed_parts:
            texts += contained
        own = ""
        if each.role != "assistant":
            own = "\n".join(each.user_texts)
        user_texts.append(own)
    sizes = iter(token_counts(texts, count))
    parts: list[tuple[Injected, ...]] = [()] * len(user_texts)
    if any(user_texts):
        parts = injected_in(user_texts, count)
    items: list[Item] = []
    for each, name, injected in zip(uncounted, digests, parts, strict=True):
        text, sealed, guess, user_tokens = each.text + sum(islice(sizes, len(each.texts))), each.sealed, each.guess, 0
        if each.beside_results:
            user_tokens = sum(islice(sizes, len(each.beside_results)))
        for signature, contained in each.sealed_parts:
            plain = sum(islice(sizes, len(contained)))
            sealed += max(signature, plain)
            guess += max(0, signature - plain)
        total, links = text + each.media + sealed, (each.calls, each.answers)
        items.append(Item(each.role, total, each.media, name, *links, guess, injected, sealed, user_tokens))
    return items


def tokens_of(read_item: Callable[..., Item], raw: bytes, count: Count) -> int:
    """Return the tokens of an element's bytes, as *read_item* counts them."""
    return read_item(raw, count, with_digest=False).tokens


def plain_user_message(text: str) -> bytes:
    """Return a user message of our own that holds *text*, for conversations without a user item to carry it."""
    return b'{"role":"user","content":' + json_bytes(text) + b"}"


def digest(item: dict[str, Any], *, large: bool = False) -> bytes:
    """Return 16 bytes that are equal for items of equal meaning.

    Key order, spacing, nulls and the spelling of arguments do not change them. A *large* item is encoded in steps.
    """
    role, text = item.get("role"), item.get("content")
    if len(item) == PLAIN and type(role) is type(text) is str and role and text:
        plain: dict[str, Any] = {"content": [{"text": text, "type": "text"}], "role": role}  # most short items
    else:
        plain = _canonical(item)
        if isinstance(plain.get("content"), str):
            plain["content"] = [{"text": plain["content"], "type": "text"}]
    try:
        if large:
            encoded = encode_in_steps(plain, _encode, ordered=True).encode()
        else:
            encoded = msgspec.json.encode(plain, order="deterministic")
    except (UnicodeError, TypeError):  # lone surrogates, and numbers that Python does not hold
        encoded = encode_in_steps(plain, _SORTED.encode, ordered=True).encode()
    if large:
        dismantle(plain)
    return hashlib.sha256(encoded).digest()[:HASH_BYTES]


def _encode(value: Any) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def _canonical(value: Any, depth: int = 0) -> Any:
    """Return *value* without ignored and empty members; zero and ``false`` are not empty."""
    if depth > DEEPEST:
        raise RecursionError
    # Runs for every object of a body: plain loops and exact types are fast, and parsed JSON has no other types.
    if type(value) is list:
        return [_canonical(part, depth + 1) for part in value]
    if type(value) is not dict:
        return value
    canonical = {}
    for key, member in value.items():
        if key in IGNORED:
            continue
        if type(member) in _CONTAINERS:
            member = _canonical(member, depth + 1)
        elif key == "arguments":
            member = _arguments(member)
        if member or type(member) in _FIGURES:
            canonical[key] = member
    return canonical


def _arguments(text: Any) -> Any:
    """Return the value of a call's arguments, so that their spelling does not matter; *text* itself if it is no JSON.

    Some clients send ``arguments`` as an object, or as ``null``: these are returned as they are.
    """
    if type(text) is not str or len(text) > LONGEST_ARGUMENTS:
        return text
    try:
        if len(text) <= ONE_CALL:
            return ["json", msgspec.json.decode(text)]
    except UNREADABLE:
        pass  # ``parse`` also reads what only the standard parser does
    try:
        return ["json", parse(text)]
    except (ValueError, RecursionError):
        return text
