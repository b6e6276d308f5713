"""Recall over ``/v1/messages``: a generation is the blocks of one assistant message.

Consecutive thinking blocks have to come back as one response held them. So they are held until what they lead to
begins, and go with the calls that they led to where those go.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from proxy.core.apis.usage import usage_of
from proxy.core.compaction.truncate import OMITTED
from proxy.features.recall.events import dumped, kind_of, written
from proxy.features.recall.grown import grown, plain
from proxy.features.recall.merger import NOT_RUN, Call, StreamMerger, without_calls
from proxy.features.recall.tool import NAME

SILENCE: Final = {"type": "text", "text": OMITTED}
"""What stands for an answer of nothing but recalls: a message without content could not be sent back."""

_INPUT: Final = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_CUT: Final = frozenset({"max_tokens", "model_context_window_exceeded", "refusal"})
"""Why an answer ends whose last call may be half."""

_DELTAS: Final = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


def said(answer: Mapping[str, Any]) -> Any:
    """The blocks of a whole answer; ``None`` where it has none."""
    content = answer.get("content")
    return content if isinstance(content, list) and all(isinstance(block, dict) for block in content) else None


def is_cut(answer: Mapping[str, Any]) -> bool:
    """Whether it was broken off."""
    return str(answer.get("stop_reason")) in _CUT


def calls(said: Sequence[Mapping[str, Any]]) -> list[Call]:
    """The calls of the tool among blocks."""
    return [Call(str(block.get("id")), dumped(block.get("input")).decode()) for block in said if _is_ours(block)]


def asked(said: Sequence[Mapping[str, Any]], body: bytes) -> list[Any]:
    """The message to go on from, thoughts and their seals as they were."""
    del body
    kept = [block for block in said if not _is_empty(block)]
    return [{"role": "assistant", "content": [{k: v for k, v in block.items() if v is not None} for block in kept]}]


def answered(said: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[Any]:
    """One user message with every result."""
    left = iter(texts)
    pairs = [(block.get("id"), next(left) if _is_ours(block) else NOT_RUN) for block in said if _is_call(block)]
    blocks = [{"type": "tool_result", "tool_use_id": str(name), "content": text} for name, text in pairs]
    return [{"role": "user", "content": blocks}]


def whole(answer: Mapping[str, Any], earlier: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The last answer, its blocks behind those of the *earlier* ones that were no calls."""
    content = [block for one in earlier for block in without_calls(one, _is_call, _is_call, _thinks)]
    content += without_calls(answer["content"], _is_ours, _is_call, _thinks)
    content = content or [SILENCE]
    return {
        **answer,
        "content": content,
        "stop_reason": _stop(answer.get("stop_reason"), calls=any(map(_is_call, content))),
    }


used = usage_of


def stream() -> StreamMerger:
    """The stream of a new answer."""
    return Stream()


class Stream(StreamMerger):
    """Events of one message: it starts and stops once, and the indexes of its blocks run on."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, Any] = {}
        self._citations: dict[int, list[Any]] = {}
        self._arrived: dict[int, int] = {}
        self._left: dict[int, int] | None = None
        self._called = self._calls_left = False
        self._base = 0
        self._shown = 0

    @property
    def said(self) -> list[dict[str, Any]]:
        """The blocks as they were put together."""
        return [self._block(index) for index in sorted(self._blocks)]

    def calls(self) -> list[Call]:
        """See ``StreamMerger``."""
        return calls(self.said)

    def _block(self, index: int) -> dict[str, Any]:
        block = {key: plain(member) for key, member in self._blocks[index].items()}
        if index in self._citations:
            block["citations"] = self._citations[index]
        if index not in self._inputs:
            return block
        try:
            return {**block, "input": json.loads(plain(self._inputs[index]))}
        except (ValueError, RecursionError):
            return {**block, "input": {}}

    def _note(self, value: dict[str, Any]) -> None:
        kind, index = kind_of(value), value.get("index")
        if kind == "message_start" and isinstance(value.get("message"), dict):
            self.usage = dict(value["message"].get("usage") or {})
        elif kind == "content_block_start" and isinstance(value.get("content_block"), dict):
            self._begun(int(index or 0), value["content_block"])
        elif kind == "content_block_delta" and index in self._blocks:
            self._grow(int(index or 0), value.get("delta") or {})
        elif kind == "message_delta":
            self._end(value)
        self.over |= kind == "message_stop"
        self.failed |= kind == "error"

    def _end(self, value: dict[str, Any]) -> None:
        """Note usage and stop reason, which the event before the last one states."""
        self.usage |= {key: figure for key, figure in (value.get("usage") or {}).items() if figure is not None}
        self.cut = str((value.get("delta") or {}).get("stop_reason")) in _CUT

    def _begun(self, index: int, block: Mapping[str, Any]) -> None:
        self._blocks[index] = dict(block)
        self._arrived.setdefault(index, len(self._arrived))
        self._called = self._called or _is_call(block)

    def _grow(self, index: int, delta: Mapping[str, Any]) -> None:
        block, kind = self._blocks[index], str(delta.get("type"))
        if kind == "input_json_delta":
            if piece := str(delta.get("partial_json") or ""):
                self._inputs[index] = grown("input", self._inputs.get(index), piece)
        elif kind == "citations_delta":
            self._citations.setdefault(index, list(block.get("citations") or ())).append(delta.get("citation"))
        elif (key := _DELTAS.get(kind)) is not None:
            block[key] = grown(key, block.get(key) or "", str(delta.get(key) or ""))

    def _begins_hold(self, value: dict[str, Any]) -> bool:
        block = value.get("content_block") or {}
        return value.get("type") == "content_block_start" and (_is_call(block) or _thinks(block))

    def _release(self, value: dict[str, Any]) -> bool:
        """Thoughts stand once something other than a call follows, or nothing."""
        if self._called:
            return False
        follows = value.get("type") == "content_block_start" and not _thinks(value.get("content_block") or {})
        return follows or value.get("type") == "message_delta"

    def _seen(self, value: dict[str, Any]) -> None:
        self._shown += value.get("type") == "content_block_start"

    def _rewritten(self, value: dict[str, Any]) -> bytes:
        kind, index = kind_of(value), value.get("index")
        if kind == "message_start" and not self.first:
            return b""
        made = dict(value)
        if isinstance(index, int):
            place = self._standing().get(index)
            if place is None:
                return b""
            made["index"] = self._base + place
            self._seen(value)
        before = self._rewrite_end(made) if kind == "message_delta" else b""
        return before + written(made, kind)

    def _rewrite_end(self, made: dict[str, Any]) -> bytes:
        """Settle usage and stop reason in the event *made*; return the events that have to go before it."""
        standing = self._standing()
        made["usage"] = made.get("usage")
        if not self.first:
            inputs = {key: self.usage[key] for key in _INPUT if isinstance(self.usage.get(key), int)}
            made["usage"] = {**inputs, **(made["usage"] or {})}
        if not self._strip:
            return b""
        if isinstance(made.get("delta"), dict):
            stop = _stop(made["delta"].get("stop_reason"), calls=self._calls_left)
            made["delta"] = {**made["delta"], "stop_reason": stop}
        return b"" if self._base or standing else _silence()

    def _standing(self) -> dict[int, int]:
        """The blocks that stand, each with its place among them.

        In a generation without calls of the tool they are those that came. In one with such calls they are settled at
        its end, once: working them out for every event would be quadratic.
        """
        if not self._strip:
            return self._arrived
        if self._left is None:
            blocks = self._blocks
            left = without_calls(
                sorted(blocks),
                lambda index: _is_ours(blocks[index]),
                lambda index: _is_call(blocks[index]),
                lambda index: _thinks(blocks[index]),
            )
            self._left = {index: place for place, index in enumerate(left)}
            self._calls_left = any(_is_call(blocks[index]) for index in left)
        return self._left

    def _begin(self) -> None:
        self._base += self._shown
        self._shown, self._blocks, self._inputs, self._citations = 0, {}, {}, {}
        self._arrived, self._left, self._called = {}, None, False


def _silence() -> bytes:
    """The events of the block that stands for nothing."""
    block, delta = {**SILENCE, "text": ""}, {"type": "text_delta", "text": OMITTED}
    told: list[dict[str, Any]] = [
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
    ]
    return b"".join(written(value, value["type"]) for value in told)


def _stop(reason: Any, *, calls: bool) -> Any:
    """Why it stopped, once calls of the tool are gone; *calls*: others are left."""
    return "end_turn" if reason == "tool_use" and not calls else reason


def _is_call(block: Mapping[str, Any]) -> bool:
    """Whether the client would have to answer a block."""
    return block.get("type") == "tool_use"


def _thinks(block: Mapping[str, Any]) -> bool:
    return block.get("type") in ("thinking", "redacted_thinking")


def _is_ours(block: Mapping[str, Any]) -> bool:
    return _is_call(block) and block.get("name") == NAME


def _is_empty(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "text" and not block.get("text")
