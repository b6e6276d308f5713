"""Server tools over ``/v1/messages``: the output of a generation is the content of one assistant message.

The events of a stream: https://docs.anthropic.com/en/docs/build-with-claude/streaming. Consecutive thinking blocks must
be sent back exactly as one response had them
(https://docs.anthropic.com/en/docs/build-with-claude/extended-thinking#preserving-thinking-blocks). So they are
buffered until the next block begins, and are removed together with the calls after them if these are removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from proxy.core.apis.json_edit import to_json
from proxy.core.compaction.truncate import OMITTED
from proxy.server_tools.events import kind_of, without_nulls, written
from proxy.server_tools.merger import Call, Names, StreamMerger, with_texts, without_calls
from proxy.server_tools.pieces import add_piece, assembled, assembled_members

Block = Mapping[str, Any]

NOTHING_LEFT: Final = {"type": "text", "text": OMITTED}
"""The content of an answer that had only calls of server tools: the API accepts no message without content back."""

_INPUT_USAGE: Final = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_TRUNCATED: Final = frozenset({"max_tokens", "model_context_window_exceeded", "refusal"})
"""Values of ``stop_reason`` after which the last call may be incomplete.

https://platform.claude.com/docs/en/build-with-claude/handling-stop-reasons
"""

_TEXT_DELTAS: Final = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
"""The member of a block that each type of delta adds to."""


def output_of(answer: Mapping[str, Any]) -> Any:
    """Return the blocks of a whole answer; None if it has none."""
    content = answer.get("content")
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        return None
    return content


def is_truncated(answer: Mapping[str, Any]) -> bool:
    """True if the answer was broken off."""
    return str(answer.get("stop_reason")) in _TRUNCATED


def calls(output: Sequence[Block], names: Names) -> list[Call]:
    """Return the calls of a server tool among blocks."""
    return [
        Call(str(block.get("id")), str(block["name"]), to_json(block.get("input")))
        for block in output
        if _is_server_call(block, names)
    ]


def input_of(output: Sequence[Block], body: bytes) -> list[Any]:
    """Return the message to continue from, with thinking and signatures unchanged."""
    del body
    content = [without_nulls(block) for block in output if not _is_empty(block)]
    return [{"role": "assistant", "content": content}]


def results(output: Sequence[Block], names: Names, texts: Sequence[str]) -> list[Any]:
    """Return one user message with every result."""
    answered = with_texts(filter(_is_call, output), lambda call: _is_server_call(call, names), texts)
    content = [{"type": "tool_result", "tool_use_id": str(call.get("id")), "content": text} for call, text in answered]
    return [{"role": "user", "content": content}]


def merged(answer: Mapping[str, Any], earlier: Sequence[Sequence[Block]], names: Names) -> dict[str, Any]:
    """Return the last answer, its blocks after those of the *earlier* outputs that are no calls."""
    content = [block for output in earlier for block in without_calls(output, _is_call, _is_call, _is_thought)]
    content += without_calls(answer["content"], lambda block: _is_server_call(block, names), _is_call, _is_thought)
    content = content or [NOTHING_LEFT]
    stop_reason = _stop_reason(answer.get("stop_reason"), calls_left=any(map(_is_call, content)))
    return {**answer, "content": content, "stop_reason": stop_reason}


class MessagesMerger(StreamMerger):
    """Merges events of messages: one message starts and stops, and the indexes of its blocks run on.

    ``_blocks``, ``_inputs`` and ``_citations`` are this generation so far, by index. ``_positions`` maps each index to
    its place in the order of arrival. ``_sent_before`` and ``_sent`` count the blocks that the client has: of earlier
    generations, and of this one.
    """

    calls_in = staticmethod(calls)

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, Any] = {}
        self._citations: dict[int, list[Any]] = {}
        self._positions: dict[int, int] = {}
        self._remaining: dict[int, int] | None = None
        self._has_calls = False
        self._calls_left = False
        self._sent_before = 0
        self._sent = 0

    @property
    def output(self) -> list[dict[str, Any]]:
        """The blocks so far."""
        return [self._block(index) for index in sorted(self._blocks)]

    def _block(self, index: int) -> dict[str, Any]:
        block = assembled_members(self._blocks[index])
        if index in self._citations:
            block["citations"] = self._citations[index]
        if index not in self._inputs:
            return block
        try:
            return {**block, "input": json.loads(assembled(self._inputs[index]))}
        except (ValueError, RecursionError):
            return {**block, "input": {}}

    def _note(self, value: dict[str, Any]) -> None:
        kind, index = kind_of(value), value.get("index")
        if kind == "message_start" and isinstance(value.get("message"), dict):
            self.usage = dict(value["message"].get("usage") or {})
        elif kind == "content_block_start" and isinstance(value.get("content_block"), dict):
            self._start_block(int(index or 0), value["content_block"])
        elif kind == "content_block_delta" and index in self._blocks:
            self._grow_block(int(index or 0), value.get("delta") or {})
        elif kind == "message_delta":
            self._note_end(value)
        self.ended |= kind == "message_stop"
        self.failed |= kind == "error"

    def _note_end(self, value: dict[str, Any]) -> None:
        """Note usage and stop reason, which the event before the last one states."""
        self.usage |= {name: tokens for name, tokens in (value.get("usage") or {}).items() if tokens is not None}
        self.truncated = str((value.get("delta") or {}).get("stop_reason")) in _TRUNCATED

    def _start_block(self, index: int, block: Block) -> None:
        self._blocks[index] = dict(block)
        self._positions.setdefault(index, len(self._positions))
        self._has_calls = self._has_calls or _is_call(block)

    def _grow_block(self, index: int, delta: Mapping[str, Any]) -> None:
        block, kind = self._blocks[index], str(delta.get("type"))
        if kind == "input_json_delta":
            if piece := str(delta.get("partial_json") or ""):
                self._inputs[index] = add_piece("input", self._inputs.get(index), piece)
        elif kind == "citations_delta":
            self._citations.setdefault(index, list(block.get("citations") or ())).append(delta.get("citation"))
        elif (name := _TEXT_DELTAS.get(kind)) is not None:
            block[name] = add_piece(name, block.get(name) or "", str(delta.get(name) or ""))

    def _starts_buffering(self, value: dict[str, Any]) -> bool:
        block = value.get("content_block") or {}
        return value.get("type") == "content_block_start" and (_is_call(block) or _is_thought(block))

    def _proves_buffer(self, value: dict[str, Any]) -> bool:
        """True if something other than a call follows the buffered thoughts, or nothing does."""
        if self._has_calls:
            return False
        if value.get("type") == "content_block_start":
            return not _is_thought(value.get("content_block") or {})
        return value.get("type") == "message_delta"

    def _passed(self, value: dict[str, Any]) -> None:
        self._sent += value.get("type") == "content_block_start"

    def _rewritten(self, value: dict[str, Any]) -> bytes:
        kind, index = kind_of(value), value.get("index")
        if kind == "message_start" and not self.is_first:
            return b""
        event = dict(value)
        if isinstance(index, int):
            position = self._remaining_positions().get(index)
            if position is None:
                return b""
            event["index"] = self._sent_before + position
            self._passed(value)
        before = b""
        if kind == "message_delta":
            before = self._rewrite_end(event)
        return before + written(event, kind)

    def _rewrite_end(self, event: dict[str, Any]) -> bytes:
        """Rewrite usage and stop reason in *event*; return the events that have to go before it."""
        remaining = self._remaining_positions()
        event["usage"] = event.get("usage")
        if not self.is_first:
            input_usage = {name: self.usage[name] for name in _INPUT_USAGE if isinstance(self.usage.get(name), int)}
            event["usage"] = {**input_usage, **(event["usage"] or {})}
        if not self._without_server_calls:
            return b""
        if isinstance(event.get("delta"), dict):
            stop_reason = _stop_reason(event["delta"].get("stop_reason"), calls_left=self._calls_left)
            event["delta"] = {**event["delta"], "stop_reason": stop_reason}
        if self._sent_before or remaining:
            return b""
        return _nothing_left_events()

    def _remaining_positions(self) -> dict[int, int]:
        """Return the position of each block that the client gets, by its index.

        Without calls of server tools these are all blocks. Else they are computed once, at the generation's end: for
        every event it would take quadratic time.
        """
        if not self._without_server_calls:
            return self._positions
        if self._remaining is None:
            blocks = self._blocks
            indexes = without_calls(
                sorted(blocks),
                lambda index: _is_server_call(blocks[index], self.names),
                lambda index: _is_call(blocks[index]),
                lambda index: _is_thought(blocks[index]),
            )
            self._remaining = {index: position for position, index in enumerate(indexes)}
            self._calls_left = any(_is_call(blocks[index]) for index in indexes)
        return self._remaining

    def _reset(self) -> None:
        self._sent_before += self._sent
        self._sent, self._blocks, self._inputs, self._citations = 0, {}, {}, {}
        self._positions, self._remaining, self._has_calls = {}, None, False


new_stream = MessagesMerger
"""Makes the merger for the stream of a new answer."""


def _nothing_left_events() -> bytes:
    """Return the events of the block ``NOTHING_LEFT``."""
    block, delta = {**NOTHING_LEFT, "text": ""}, {"type": "text_delta", "text": OMITTED}
    events: list[dict[str, Any]] = [
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
    ]
    return b"".join(written(event, event["type"]) for event in events)


def _stop_reason(reason: Any, *, calls_left: bool) -> Any:
    """Return the stop reason of a message without calls of server tools; *calls_left* is True if it has others."""
    if reason == "tool_use" and not calls_left:
        return "end_turn"
    return reason


def _is_call(block: Block) -> bool:
    """True if the client would have to answer a block."""
    return block.get("type") == "tool_use"


def _is_thought(block: Block) -> bool:
    return block.get("type") in ("thinking", "redacted_thinking")


def _is_server_call(block: Block, names: Names) -> bool:
    return _is_call(block) and block.get("name") in names


def _is_empty(block: Block) -> bool:
    return block.get("type") == "text" and not block.get("text")
