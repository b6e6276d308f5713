"""Server tools over ``/v1/responses``: the output of a generation is a list of output items.

The events of a stream: https://platform.openai.com/docs/api-reference/responses-streaming. A reasoning item must not be
sent back without the item that follows it (https://github.com/vercel/ai/issues/7099). So it is buffered until that item
begins, and is removed together with the calls after it if these are removed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from proxy.server_tools.events import kind_of, without_nulls, written
from proxy.server_tools.merger import Call, Names, StreamMerger, with_texts, without_calls

Item = Mapping[str, Any]

_CLIENT_CALLS: Final = frozenset(
    {
        *("function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call", "computer_call"),
        "mcp_approval_request",
    }
)
"""Types of items that the client has to answer."""

_ANSWERABLE: Final = frozenset({"function_call", "custom_tool_call"})
"""Types of calls whose result may be any text."""

_OPENING: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
_ENDING: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_UNSTORED: Final = re.compile(rb'"store"\s*:\s*false')
"""With this the server stores no items and rejects their ``id``: reasoning must be sent back encrypted or not at all.

https://community.openai.com/t/requests-api-does-not-support-manual-context-management/1269225
"""

_ADDED, _DONE = "response.output_item.added", "response.output_item.done"


def output_of(answer: Item) -> Any:
    """Return the output items of a whole answer; None if it has none."""
    output = answer.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        return None
    return output


def is_truncated(answer: Item) -> bool:
    """True if the answer was broken off."""
    return answer.get("status") == "incomplete"


def calls(output: Sequence[Item], names: Names) -> list[Call]:
    """Return the calls of a server tool among items."""
    return [
        Call(str(item.get("call_id")), str(item["name"]), str(item.get("arguments") or ""))
        for item in output
        if _is_server_call(item, names)
    ]


def input_of(output: Sequence[Item], body: bytes) -> list[Any]:
    """Return the items to continue from, without those that only a server with stored answers can use."""
    items = [without_nulls(item) for item in without_calls(output, _is_unanswerable, _is_call, _is_thought)]
    if not _UNSTORED.search(body):
        return items
    if all(item.get("encrypted_content") for item in items if _is_thought(item)):
        return items
    without_thoughts = [item for item in items if not _is_thought(item)]
    return [{name: member for name, member in item.items() if name != "id"} for item in without_thoughts]


def results(output: Sequence[Item], names: Names, texts: Sequence[str]) -> list[Any]:
    """Return an output item for each call."""
    answerable = [item for item in output if str(item.get("type")) in _ANSWERABLE]
    answered = with_texts(answerable, lambda item: _is_server_call(item, names), texts)
    return [
        {"type": f"{item['type']}_output", "call_id": str(item.get("call_id")), "output": text}
        for item, text in answered
    ]


def merged(answer: Item, earlier: Sequence[Sequence[Item]], names: Names) -> dict[str, Any]:
    """Return the last answer, its items after those of the *earlier* outputs that are no calls."""
    items = [item for output in earlier for item in without_calls(output, _is_call, _is_call, _is_thought)]
    items += without_calls(answer["output"], lambda item: _is_server_call(item, names), _is_call, _is_thought)
    return {**answer, "output": items}


class ResponsesMerger(StreamMerger):
    """Merges events of responses. The final event keeps the last generation's id: that response is the stored one.

    ``_items`` are the items of this generation by their index, ``_sent_items`` the complete ones that the client has.
    ``_sequence_number`` is the next one. ``_sent_before`` and ``_sent`` count the items whose first event the client
    has: of earlier generations, and of this one.
    """

    calls_in = staticmethod(calls)

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._items: dict[int, dict[str, Any]] = {}
        self._sent_items: list[dict[str, Any]] = []
        self._sequence_number = 0
        self._sent_before = 0
        self._sent = 0
        self._remaining: dict[int, int] | None = None
        self._has_calls = False
        self._end_sent = False

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items so far."""
        return [self._items[index] for index in sorted(self._items)]

    def _note(self, value: dict[str, Any]) -> None:
        kind, item = kind_of(value), value.get("item")
        if kind in (_ADDED, _DONE) and isinstance(item, dict):
            self._items[int(value.get("output_index") or 0)] = item
            self._has_calls = self._has_calls or _is_call(item)
        if kind in _ENDING and isinstance(value.get("response"), dict):
            self.ended = True
            self.usage = dict(value["response"].get("usage") or {})
            self.truncated = kind == "response.incomplete"
        self.failed = self.failed or kind in ("error", "response.failed")

    def _starts_buffering(self, value: dict[str, Any]) -> bool:
        item = value.get("item")
        if value.get("type") != _ADDED or not isinstance(item, dict):
            return False
        return _is_call(item) or _is_thought(item)

    def _proves_buffer(self, value: dict[str, Any]) -> bool:
        """True if something other than a call follows the buffered thoughts, or nothing does."""
        if self._has_calls:
            return False
        item = value.get("item")
        if value.get("type") == _ADDED and isinstance(item, dict):
            return not _is_thought(item)
        return str(value.get("type")) in _ENDING

    def _passed(self, value: dict[str, Any]) -> None:
        self._sequence_number = _number(value.get("sequence_number"), self._sequence_number - 1) + 1
        self._sent += value.get("type") == _ADDED
        if value.get("type") == _DONE and isinstance(value.get("item"), dict):
            self._sent_items.append(value["item"])

    def _rewritten(self, value: dict[str, Any]) -> bytes:
        kind, event = kind_of(value), dict(value)
        if kind in _OPENING and not self.is_first:
            return b""
        index = value.get("output_index")
        if isinstance(index, int):
            position = self._position(index)
            if position is None:
                return b""
            event["output_index"] = self._sent_before + position
        if kind in _ENDING and isinstance(value.get("response"), dict):
            if self._end_sent:
                return b""  # a response ends once, and each end holds all items
            self._end_sent = True
            event["response"] = self._merged_response(value["response"])
        if "sequence_number" in value:
            event["sequence_number"] = self._sequence_number
        self._passed(event)
        return written(event, kind)

    def _merged_response(self, response: Item) -> dict[str, Any]:
        """Return the response at the end of the stream, with the items of all generations."""
        before = self._sent_items[: self._sent_before]
        return {**response, "output": [*before, *self._without_removed(response.get("output") or self.output)]}

    def _without_removed(self, items: Sequence[Item]) -> list[Item]:
        if not self._without_server_calls:
            return list(items)
        return without_calls(items, lambda item: _is_server_call(item, self.names), _is_call, _is_thought)

    def _position(self, index: int) -> int | None:
        """Return an item's position among those of this generation that the client gets; None if it is removed."""
        if not self._without_server_calls:
            return index
        if self._remaining is None:
            # Computed once, at the generation's end: for every event it would take quadratic time.
            remaining = {id(item) for item in self._without_removed(self.output)}
            indexes = [index for index, item in sorted(self._items.items()) if id(item) in remaining]
            self._remaining = {index: position for position, index in enumerate(indexes)}
        return self._remaining.get(index)

    def _reset(self) -> None:
        self._sent_before += self._sent
        self._sent, self._items, self._remaining, self._has_calls = 0, {}, None, False


new_stream = ResponsesMerger
"""Makes the merger for the stream of a new answer."""


def _number(value: Any, default: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return default


def _is_call(item: Item) -> bool:
    """True if the client would have to answer an item."""
    return str(item.get("type")) in _CLIENT_CALLS


def _is_server_call(item: Item, names: Names) -> bool:
    return item.get("type") == "function_call" and item.get("name") in names


def _is_unanswerable(item: Item) -> bool:
    """True if only the client can answer a call: no text of ours could be its result."""
    return str(item.get("type")) not in _ANSWERABLE


def _is_thought(item: Item) -> bool:
    return item.get("type") == "reasoning"
