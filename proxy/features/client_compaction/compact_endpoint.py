"""Builds a compaction that a client requests, without a model, and the response with it.

Clients request one with ``POST /responses/compact``, or with a ``compaction_trigger`` as the last item of an ordinary
request. The endpoint returns the user's messages and one compaction item, an ordinary request the item alone
(https://developers.openai.com/api/docs/guides/compaction). The text of the item is a block, as it stands for folded
rounds in a view.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from proxy.core.apis import responses
from proxy.core.apis.json_steps import decode
from proxy.core.client_compaction import TRIGGER
from proxy.core.compaction.block import FoldedItems, render_block
from proxy.core.compaction.stages import BLOCK_FRAME
from proxy.core.compaction.truncate import clip
from proxy.core.compaction.view import encodable
from proxy.core.conversation import Count, Item
from proxy.core.decisions import MeasuredRequest
from proxy.core.tokens.budget import Shares
from proxy.features.client_compaction.compaction_item import pack
from proxy.features.client_compaction.local_response import JSON, STREAM, event, output_usage, response_head

Kind = Literal["endpoint", "trigger"]
"""A compaction is requested on an endpoint of its own, or by the last item of an ordinary request."""

EARLIER_SHARE: Final = 0.5
"""The share of the block that the text of earlier compactions may take: the rest is for later items."""

SUMMARY_ROOM: Final = 2
"""The least room for text, as a multiple of the summary's tokens: the block has names and steps as well."""

_LONGEST_TRIGGER: Final = 256
"""Most bytes of a trigger item: a longer item with the word is a message about it."""


class OwnCompaction(msgspec.Struct, frozen=True):
    """A compaction: the user's items that stay, as their bytes, and the text of the block.

    ``input_tokens`` and ``output_tokens`` are the provider tokens of the conversation and of its compaction.
    """

    user_items: tuple[bytes, ...]
    text: str
    input_tokens: int
    output_tokens: int


class _Sizes(msgspec.Struct, frozen=True):
    """Tokens by our count: for the user's words, for digest and steps, and for the whole block."""

    user_words: int
    text: int
    block: int


def compact(
    measured: MeasuredRequest, kind: Kind, ours: frozenset[int], shares: Shares, count: Count, summary: str = ""
) -> OwnCompaction:
    """Return the compaction of a measured request; *ours* are the indexes of items that hold an earlier one.

    *summary* is a model's verified summary of the conversation's beginning, if one is ready.
    """
    parsed = measured.parsed
    items, raw = parsed.items, [parsed.item(index) for index in range(len(parsed.items))]
    conversation = [i for i, item in enumerate(items) if item.role != "system" and not is_trigger(raw[i])]
    entries = {i: responses.read_item_text(raw[i]) for i in conversation}
    sizes = _sizes(measured, shares, SUMMARY_ROOM * count(summary))
    users = [i for i in conversation if items[i].role == "user" and i not in ours]
    verbatim: list[int] = []
    if kind == "endpoint":
        verbatim = _newest(users, items, sizes.user_words)
    folded = FoldedItems(
        entries=tuple(entry for i, entry in entries.items() if i not in ours),
        user_texts=tuple(entries[i].text for i in users if i not in verbatim),
        carrier_text="\n".join(entries[i].text for i in verbatim),
    )
    earlier = [clip(entries[i].text, int(sizes.block * EARLIER_SHARE) // len(ours), count) for i in sorted(ours)]
    remaining = sizes.block - sum(map(count, earlier))
    block = render_block(folded, remaining, min(sizes.text, remaining), count, summary)
    text = encodable("\n\n".join([*earlier, block]))
    tokens = sum(items[i].tokens for i in verbatim) + count(text)
    ratio = measured.known.token_ratio
    user_items = tuple(_output_message(raw[i]) for i in verbatim)
    return OwnCompaction(user_items, text, int(measured.counts.total * ratio), math.ceil(tokens * ratio))


def _sizes(measured: MeasuredRequest, shares: Shares, least_text: int) -> _Sizes:
    """Return the sizes of a compaction with at least *least_text* tokens of text."""
    # The block takes no more of the budget than one of our own compactions would (``shares.block``), and its text no
    # more than half of the history that it replaces. If system text and tools fill the budget it gets a quarter.
    budget = usable_budget(measured)
    most = int(shares.block * max(0, budget - measured.budget.fixed)) or budget // 4
    user_words = int(shares.pins * budget)
    text = min(int((shares.digest + shares.steps) * budget), max(BLOCK_FRAME, measured.counts.history // 2), most)
    added = max(0, least_text - text)
    return _Sizes(user_words, text + added, min(user_words + text, most) + added + BLOCK_FRAME)


def usable_budget(measured: MeasuredRequest) -> int:
    """Return the token budget of a compaction: that of the input, but a quarter of the window at least.

    The budget of the input is small if the request reserves most of the window for its answer.
    """
    return max(measured.budget.input, measured.budget.window // 4)


def _newest(indexes: Sequence[int], items: Sequence[Item], tokens: int) -> list[int]:
    """Return the newest of the items at *indexes* that fit *tokens* together, in order."""
    newest: list[int] = []
    for index in reversed(indexes):
        tokens -= items[index].tokens
        if tokens < 0:
            break
        newest.append(index)
    return newest[::-1]


def compaction_item(compaction: OwnCompaction, key: bytes) -> dict[str, str]:
    """Return the compaction item with the text of *compaction*, authenticated with *key* (32 bytes)."""
    content = pack(compaction.text, key)
    # Derived from the content, so that the same request has the same answer on every replica.
    name = hashlib.sha256(content.encode()).hexdigest()[:32]
    return {"type": "compaction", "id": f"cmp_{name}", "encrypted_content": content}


def response(
    compaction: OwnCompaction,
    item: Mapping[str, str],
    kind: Kind,
    request_body: bytes,
    model: str,
    created: int,
    *,
    stream: bool,
) -> tuple[bytes, str]:
    """Return the response body with *compaction* and its *item*, and its content type; *created* is Unix time.

    Its id belongs to the body of the request, because the same block may answer another one.
    """
    usage = output_usage(compaction.input_tokens, compaction.output_tokens)
    name = hashlib.sha256(item["id"].encode() + request_body).hexdigest()[:32]
    if kind == "endpoint":
        # https://platform.openai.com/docs/api-reference/responses/compact; the user's items stay byte for byte.
        head = json.dumps({"id": f"resp_{name}", "object": "response.compaction", "created_at": created})[:-1]
        output = b",".join([*compaction.user_items, json.dumps(item).encode()])
        return b'%b, "output": [%b], "usage": %b}' % (head.encode(), output, json.dumps(usage).encode()), JSON
    completed = {**response_head(name, model, created), "output": [item], "usage": usage}
    if not stream:
        return json.dumps(completed).encode(), JSON
    return b"".join(_events(completed, item)), STREAM


def _events(completed: Mapping[str, Any], item: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the events of a response: clients read the item from its own event, the usage from the last one."""
    started = {**completed, "status": "in_progress", "output": [], "usage": None}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": started}),
        ("response.output_item.added", {"output_index": 0, "item": {**item, "encrypted_content": ""}}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": completed}),
    ]
    for number, (kind, members) in enumerate(events):
        yield event(kind, sequence_number=number, **members)


def is_trigger(raw: bytes) -> bool:
    """True if an item requests a compaction."""
    return len(raw) < _LONGEST_TRIGGER and TRIGGER.encode() in raw and json.loads(raw).get("type") == TRIGGER


def _output_message(raw: bytes) -> bytes:
    """Return a user's item in the form of output items: as it is, with its content as a list of parts."""
    value = decode(raw)
    content = value.get("content")
    if value.get("type") == "message" and isinstance(content, list):
        return raw
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    return json.dumps({"type": "message", **value, "content": content}).encode()
