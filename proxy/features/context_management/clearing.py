"""Chooses which old tool results and inputs the context edits of the Messages API clear, and clears them.

https://platform.claude.com/docs/en/build-with-claude/context-editing describes ``clear_tool_uses``. The choice is a
pure function of the conversation, computed item by item: results that are cleared at one boundary stay cleared. So
between two boundaries at which the trigger is reached a view only grows at its end, and the provider's prompt cache
applies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from proxy.core.apis.envelope import PROVIDER_EDITS, context_edits
from proxy.core.apis.json_edit import Path, with_replaced_values
from proxy.core.apis.json_steps import objects
from proxy.core.conversation import Item

PLACEHOLDER: Final = "[Old tool result content cleared]"
"""The text in place of a result that was cleared. The API's documentation does not say how its own is worded."""

_FRAME: Final = 12
"""Tokens that a cleared result or input still takes, by our count."""

CLEARING: Final = "clear_tool_uses_"
COMPACTING: Final = "compact_"
"""Prefixes of the types of the two edits; a date follows, such as ``clear_tool_uses_20250919``."""

CLEAR_FROM, COMPACT_FROM = PROVIDER_EDITS["clear_tool_uses"], PROVIDER_EDITS["compact"]
KEEP: Final = 3
"""The documented defaults of ``trigger`` (input tokens) of both edits, and of ``keep`` (tool uses) of the first.

https://platform.claude.com/docs/en/build-with-claude/context-editing
"""


class ClearToolUses(msgspec.Struct, frozen=True):
    """One ``clear_tool_uses`` edit: above so many ``tokens`` of input or tool ``uses``, all but ``keep`` are cleared.

    ``at_least``: nothing is cleared if it saves fewer tokens. ``excluded`` names tools whose results stay. ``inputs``
    names tools whose inputs are cleared too; None means all tools.
    """

    tokens: int | None = CLEAR_FROM
    uses: int | None = None
    keep: int = KEEP
    at_least: int = 0
    excluded: frozenset[str] = frozenset()
    inputs: frozenset[str] | None = frozenset()


class ContextEdits(msgspec.Struct, frozen=True):
    """The edits of a request: what to clear, and the provider tokens from which to compact."""

    clearing: tuple[ClearToolUses, ...] = ()
    compact_from: int | None = None


def read_edits(management: Any) -> ContextEdits:
    """Return the edits in a decoded ``context_management``, without those that cannot be read or applied."""
    clearing: list[ClearToolUses] = []
    compact_from: list[int] = []
    for edit in context_edits(management):
        kind = str(edit.get("type"))
        if kind.startswith(CLEARING):
            clearing.append(_clearing(edit))
        elif kind.startswith(COMPACTING):
            compact_from.append(_figure(edit.get("trigger"), "input_tokens") or COMPACT_FROM)
    return ContextEdits(tuple(clearing), min(compact_from, default=None))


def _clearing(edit: Mapping[str, Any]) -> ClearToolUses:
    uses = _figure(edit.get("trigger"), "tool_uses")
    tokens = _figure(edit.get("trigger"), "input_tokens")
    if tokens is None and uses is None:
        tokens = CLEAR_FROM
    keep = _figure(edit.get("keep"), "tool_uses")
    if keep is None:
        keep = KEEP
    inputs: frozenset[str] | None = None
    if edit.get("clear_tool_inputs") is not True:
        inputs = _names(edit.get("clear_tool_inputs"))
    return ClearToolUses(
        tokens=tokens,
        uses=uses,
        keep=keep,
        at_least=_figure(edit.get("clear_at_least"), "input_tokens") or 0,
        excluded=_names(edit.get("exclude_tools")),
        inputs=inputs,
    )


def _figure(value: Any, kind: str) -> int | None:
    """Return the figure of a ``{"type": kind, "value": figure}``; None if it is anything else."""
    if not isinstance(value, dict) or value.get("type") != kind:
        return None
    figure = value.get("value")
    if not isinstance(figure, int) or isinstance(figure, bool) or figure < 0:
        return None
    return figure


def _names(value: Any) -> frozenset[str]:
    if not isinstance(value, list):
        return frozenset()
    return frozenset(name for name in value if isinstance(name, str))


class _Use(msgspec.Struct):
    """One tool use: its name, the tokens of its input and of its result, and True once the result was read."""

    name: str
    input_tokens: int
    result_tokens: int = 0
    has_result: bool = False


def cleared_tool_uses(
    fixed: int, items: Sequence[Item], messages: Sequence[Mapping[str, Any]], clearing: ClearToolUses
) -> dict[str, bool]:
    """Return the ids of the tool uses whose results are cleared, each with True if its input is cleared too.

    *fixed* is the number of tokens around the *items*; *messages* are the same items, decoded.
    """
    uses: dict[str, _Use] = {}
    cleared: dict[str, bool] = {}
    total = fixed
    for index, (item, message) in enumerate(zip(items, messages, strict=True)):
        if item.role != "system":  # system items are part of *fixed*
            total += item.tokens
        for block, tokens in _weighed(item, message):
            _add_use(uses, block, tokens)
        if _ends_request(items, index) and _is_due(clearing, total, uses):
            total -= _clear(clearing, uses, cleared)
    return cleared


def _clear(clearing: ClearToolUses, uses: Mapping[str, _Use], cleared: dict[str, bool]) -> int:
    """Add to *cleared* the uses that can be cleared now, if they save enough; return the tokens saved."""
    clearable = _clearable(clearing, uses, cleared)
    saved = sum(tokens for _, tokens in clearable.values())
    if saved <= 0 or saved < clearing.at_least:
        return 0
    cleared |= {name: with_input for name, (with_input, _) in clearable.items()}
    return saved


def _add_use(uses: dict[str, _Use], block: Mapping[str, Any], tokens: int) -> None:
    """Add the tool use or the result in *block* to *uses*."""
    if block.get("type") == "tool_use" and isinstance(block.get("id"), str):
        uses[block["id"]] = _Use(str(block.get("name")), tokens)
    elif block.get("type") == "tool_result" and str(block.get("tool_use_id")) in uses:
        use = uses[str(block["tool_use_id"])]
        use.has_result = True
        use.result_tokens = 0
        if "content" in block:
            use.result_tokens = tokens


def _ends_request(items: Sequence[Item], index: int) -> bool:
    """True if a request can have ended with the item at *index*: the model speaks next, or nothing follows."""
    if items[index].role == "assistant":
        return False
    return index + 1 == len(items) or items[index + 1].role == "assistant"


def _is_due(clearing: ClearToolUses, total: int, uses: Mapping[str, _Use]) -> bool:
    if clearing.tokens is not None and total > clearing.tokens:
        return True
    return clearing.uses is not None and len(uses) > clearing.uses


def _clearable(
    clearing: ClearToolUses, uses: Mapping[str, _Use], cleared: Mapping[str, bool]
) -> dict[str, tuple[bool, int]]:
    """Return the uses that can be cleared now: True if the input is cleared too, and the tokens that this saves."""
    old = list(uses)[: max(0, len(uses) - clearing.keep)]
    clearable: dict[str, tuple[bool, int]] = {}
    for name in old:
        use = uses[name]
        if name in cleared or not use.has_result or use.name in clearing.excluded:
            continue
        saved = max(0, use.result_tokens - _FRAME)
        with_input = clearing.inputs is None or use.name in clearing.inputs
        if with_input:
            saved += max(0, use.input_tokens - _FRAME)
        clearable[name] = (with_input, saved)
    return clearable


def _weighed(item: Item, message: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield the blocks of a message, each with its share of the item's tokens by length."""
    blocks = objects(message.get("content"))
    if not any(block.get("type") in ("tool_use", "tool_result") for block in blocks):
        return
    # An item is counted as a whole. Its tokens are divided by the lengths of its blocks, which needs no second count.
    sizes = [len(json.dumps(block)) for block in blocks]
    for block, size in zip(blocks, sizes, strict=True):
        yield block, item.tokens * size // max(1, sum(sizes))


def clear_message(raw: bytes, message: Mapping[str, Any], cleared: Mapping[str, bool]) -> bytes:
    """Return a message without the results and inputs that are *cleared*; every other byte stays as it is."""
    content = message.get("content")
    if not isinstance(content, list):
        return raw
    changes: dict[Path, str] = {}
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            continue
        if block.get("type") == "tool_result" and str(block.get("tool_use_id")) in cleared and "content" in block:
            changes["content", index, "content"] = json.dumps(PLACEHOLDER)
        if block.get("type") == "tool_use" and cleared.get(str(block.get("id"))) and "input" in block:
            changes["content", index, "input"] = "{}"
    if not changes:
        return raw
    return with_replaced_values(raw.decode(), changes).encode()
