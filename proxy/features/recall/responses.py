"""Recall over ``/v1/responses``: a generation is a list of output items.

A reasoning item may not come back without the item it led to. So it is held until that begins, and goes with the calls
that it led to where those go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from proxy.core.apis.usage import usage_of
from proxy.features.recall.events import kind_of, written
from proxy.features.recall.merger import NOT_RUN, Call, StreamMerger, without_calls
from proxy.features.recall.tool import NAME

Item = Mapping[str, Any]

_CLIENT_CALLS: Final = frozenset(
    {
        *("function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call", "computer_call"),
        "mcp_approval_request",
    }
)
_ANSWERABLE: Final = frozenset({"function_call", "custom_tool_call"})
"""Calls that any text answers."""

_OPENING: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
_ENDING: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_UNSTORED: Final = re.compile(rb'"store"\s*:\s*false')
"""With this the server keeps no items and refuses an ``id`` of one, so reasoning must come back sealed or not at all.

https://community.openai.com/t/requests-api-does-not-support-manual-context-management/1269225
"""

_ADDED, _DONE = "response.output_item.added", "response.output_item.done"


def said(answer: Item) -> Any:
    """The output items of a whole answer; ``None`` where it has none."""
    output = answer.get("output")
    return output if isinstance(output, list) and all(isinstance(item, dict) for item in output) else None


def is_cut(answer: Item) -> bool:
    """Whether it was broken off."""
    return answer.get("status") == "incomplete"


def calls(said: Sequence[Item]) -> list[Call]:
    """The calls of the tool among items."""
    return [Call(str(item.get("call_id")), str(item.get("arguments") or "")) for item in said if _is_ours(item)]


def asked(said: Sequence[Item], body: bytes) -> list[Any]:
    """The items to go on from, but what only a server that keeps answers could make something of."""
    kept = [_without_nulls(item) for item in without_calls(said, _is_odd, _is_call, _thinks)]
    if not _UNSTORED.search(body):
        return kept
    if all(item.get("encrypted_content") for item in kept if item["type"] == "reasoning"):
        return kept
    spoken = [item for item in kept if item["type"] != "reasoning"]
    return [{key: member for key, member in item.items() if key != "id"} for item in spoken]


def _without_nulls(item: Item) -> dict[str, Any]:
    return {key: member for key, member in item.items() if member is not None}


def answered(said: Sequence[Item], texts: Sequence[str]) -> list[Any]:
    """An output item for each call."""
    left = iter(texts)
    return [
        {"type": f"{item['type']}_output", "call_id": str(item.get("call_id")), "output": text}
        for item in said
        if item.get("type") in _ANSWERABLE
        for text in [next(left) if _is_ours(item) else NOT_RUN]
    ]


def whole(answer: Item, earlier: Sequence[Sequence[Item]]) -> dict[str, Any]:
    """The last answer, its items behind those of the *earlier* ones that stand."""
    output = [item for one in earlier for item in without_calls(one, _is_call, _is_call, _thinks)]
    return {**answer, "output": [*output, *without_calls(answer["output"], _is_ours, _is_call, _thinks)]}


used = usage_of


def stream() -> StreamMerger:
    """The stream of a new answer."""
    return Stream()


class Stream(StreamMerger):
    """Events of one response. What the last generation's own end says of it holds, its id too: that is what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self._items: dict[int, dict[str, Any]] = {}
        self._passed_items: list[dict[str, Any]] = []
        self._number = 0
        self._base = 0
        self._shown = 0
        self._places: dict[int, int] | None = None
        self._called = False
        self._told_end = False

    @property
    def said(self) -> list[dict[str, Any]]:
        """The items as they were told to be done."""
        return [self._items[index] for index in sorted(self._items)]

    def calls(self) -> list[Call]:
        """See ``StreamMerger``."""
        return calls(self.said)

    def _note(self, value: dict[str, Any]) -> None:
        kind, item = kind_of(value), value.get("item")
        if kind in (_ADDED, _DONE) and isinstance(item, dict):
            self._items[int(value.get("output_index") or 0)] = item
            self._called = self._called or _is_call(item)
        if kind in _ENDING and isinstance(value.get("response"), dict):
            self.over = True
            self.usage = dict(value["response"].get("usage") or {})
            self.cut = kind == "response.incomplete"
        self.failed = self.failed or kind in ("error", "response.failed")

    def _begins_hold(self, value: dict[str, Any]) -> bool:
        item = value.get("item")
        if value.get("type") != _ADDED or not isinstance(item, dict):
            return False
        return _is_call(item) or item.get("type") == "reasoning"

    def _release(self, value: dict[str, Any]) -> bool:
        """Thoughts stand once something other than a call follows, or nothing."""
        if self._called:
            return False
        item = value.get("item")
        follows = value.get("type") == _ADDED and isinstance(item, dict) and item.get("type") != "reasoning"
        return follows or value.get("type") in _ENDING

    def _seen(self, value: dict[str, Any]) -> None:
        self._number = _number(value.get("sequence_number"), self._number - 1) + 1
        self._shown += value.get("type") == _ADDED
        if value.get("type") == _DONE and isinstance(value.get("item"), dict):
            self._passed_items.append(value["item"])

    def _rewritten(self, value: dict[str, Any]) -> bytes:
        kind, made = kind_of(value), dict(value)
        if kind in _OPENING and not self.first:
            return b""
        index = value.get("output_index")
        if isinstance(index, int):
            place = self._place(index)
            if place is None:
                return b""
            made["output_index"] = self._base + place
        if kind in _ENDING and isinstance(value.get("response"), dict):
            if self._told_end:
                return b""  # a response ends once; each end holds all items
            self._told_end = True
            response, before = value["response"], self._passed_items[: self._base]
            output = response.get("output") or self.said
            made["response"] = {**response, "output": [*before, *self._left(output)]}
        if "sequence_number" in value:
            made["sequence_number"] = self._number
        self._seen(made)
        return written(made, kind)

    def _left(self, items: Sequence[Item]) -> list[Item]:
        return without_calls(items, _is_ours, _is_call, _thinks) if self._strip else list(items)

    def _place(self, index: int) -> int | None:
        """Where an item stands in the client's view of this generation; ``None`` where it is not in there."""
        if not self._strip:
            return index
        if self._places is None:
            # Settled at the generation's end, once: working it out for every event would be quadratic.
            stands = {id(item) for item in self._left(self.said)}
            left = [index for index, item in sorted(self._items.items()) if id(item) in stands]
            self._places = {index: place for place, index in enumerate(left)}
        return self._places.get(index)

    def _begin(self) -> None:
        self._base += self._shown
        self._shown, self._items, self._places, self._called = 0, {}, None, False


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _is_call(item: Item) -> bool:
    """Whether the client would have to answer an item."""
    return item.get("type") in _CLIENT_CALLS


def _is_ours(item: Item) -> bool:
    return item.get("type") == "function_call" and item.get("name") == NAME


def _is_odd(item: Item) -> bool:
    """Whether a call can only be answered with what its client found."""
    return item.get("type") not in _ANSWERABLE


def _thinks(item: Item) -> bool:
    return item.get("type") == "reasoning"
