"""Context edits of the Messages API, for servers that do not know them: which old tool results and inputs are cleared.

A pure walk over the conversation: what is cleared at one place stays cleared, so between two places where the trigger
is passed a view only grows at its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proxy.core.apis.json_edit import locate
from proxy.core.conversation import Item

PLACEHOLDER: Final = "[Old tool result content cleared]"
"""What stands for a result that was cleared; the API does not say how its own is worded."""

_FRAME: Final = 12
"""Tokens that a cleared result or input still takes."""

CLEARING: Final = "clear_tool_uses_"
COMPACTING: Final = "compact_"
CLEAR_FROM: Final = 100_000
COMPACT_FROM: Final = 150_000
KEEP: Final = 3
"""What holds where an edit does not say when it sets in (tokens of input), or how many tool uses it spares."""


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """One ``clear_tool_uses`` edit: from so many ``tokens`` of input or tool ``uses`` on, all but ``keep`` are cleared.

    ``at_least`` tokens have to go, or nothing does. ``spared`` names tools that are left alone; ``inputs`` those whose
    inputs go too, ``None`` for all of them.
    """

    tokens: int | None = CLEAR_FROM
    uses: int | None = None
    keep: int = KEEP
    at_least: int = 0
    spared: frozenset[str] = frozenset()
    inputs: frozenset[str] | None = frozenset()


@dataclass(frozen=True, slots=True)
class ContextEdits:
    """What a client asked for: results to be cleared, and a size in tokens from which on to compact."""

    clearing: tuple[ClearToolUses, ...] = ()
    compact_from: int | None = None


def read_edits(management: Any) -> ContextEdits:
    """The edits that a decoded ``context_management`` asks for; what cannot be read or served is not among them."""
    edits = management.get("edits") if isinstance(management, dict) else None
    found = [edit for edit in edits if isinstance(edit, dict)] if isinstance(edits, list) else []
    clearing = tuple(_clearing(edit) for edit in found if str(edit.get("type")).startswith(CLEARING))
    limits = [
        _figure(edit.get("trigger"), "input_tokens") or COMPACT_FROM
        for edit in found
        if str(edit.get("type")).startswith(COMPACTING)
    ]
    return ContextEdits(clearing, min(limits, default=None))


def _clearing(edit: Mapping[str, Any]) -> ClearToolUses:
    uses = _figure(edit.get("trigger"), "tool_uses")
    tokens = _figure(edit.get("trigger"), "input_tokens")
    if tokens is None and uses is None:
        tokens = CLEAR_FROM
    keep, inputs = _figure(edit.get("keep"), "tool_uses"), edit.get("clear_tool_inputs")
    return ClearToolUses(
        tokens=tokens,
        uses=uses,
        keep=KEEP if keep is None else keep,
        at_least=_figure(edit.get("clear_at_least"), "input_tokens") or 0,
        spared=_names(edit.get("exclude_tools")),
        inputs=None if inputs is True else _names(inputs),
    )


def _figure(value: Any, kind: str) -> int | None:
    if not isinstance(value, dict) or value.get("type") != kind:
        return None
    figure = value.get("value")
    return figure if isinstance(figure, int) and not isinstance(figure, bool) and figure >= 0 else None


def _names(value: Any) -> frozenset[str]:
    return frozenset(name for name in value if isinstance(name, str)) if isinstance(value, list) else frozenset()


@dataclass(slots=True)
class _Use:
    """One tool use as the walk meets it: its name, what its input weighs, and what its result does."""

    name: str
    input: int
    result: int = 0
    done: bool = False


def cleared_tool_uses(
    fixed: int, items: Sequence[Item], messages: Sequence[Mapping[str, Any]], clearing: ClearToolUses
) -> dict[str, bool]:
    """The ids of the tool uses whose results are cleared, each with whether its input goes too.

    *fixed* are the tokens around the *items*; *messages* are the same items, decoded.
    """
    uses: dict[str, _Use] = {}
    gone: dict[str, bool] = {}
    total = fixed
    for index, (item, message) in enumerate(zip(items, messages, strict=True)):
        total += item.tokens if item.role != "system" else 0  # those are part of what is fixed
        for block, tokens in _weighed(item, message):
            _note_use(uses, block, tokens)
        if _ends_request(items, index) and _is_due(clearing, total, uses):
            total -= _clear(clearing, uses, gone)
    return gone


def _clear(clearing: ClearToolUses, uses: Mapping[str, _Use], gone: dict[str, bool]) -> int:
    """Add to *gone* what is to be cleared now, if that is enough; return the tokens saved."""
    found = _old(clearing, uses, gone)
    saved = sum(tokens for _, tokens in found.values())
    if saved <= 0 or saved < clearing.at_least:
        return 0
    gone |= {name: inputs for name, (inputs, _) in found.items()}
    return saved


def _note_use(uses: dict[str, _Use], block: Mapping[str, Any], tokens: int) -> None:
    """Add the tool use or the result in *block* to *uses*."""
    if block.get("type") == "tool_use" and isinstance(block.get("id"), str):
        uses[block["id"]] = _Use(str(block.get("name")), tokens)
    elif block.get("type") == "tool_result" and block.get("tool_use_id") in uses:
        use = uses[block["tool_use_id"]]
        use.result, use.done = (tokens if "content" in block else 0), True


def _ends_request(items: Sequence[Item], index: int) -> bool:
    """Return whether a request can have ended with the item at *index*: the model speaks next, or nothing follows."""
    if items[index].role == "assistant":
        return False
    return index + 1 == len(items) or items[index + 1].role == "assistant"


def _is_due(clearing: ClearToolUses, total: int, uses: Mapping[str, _Use]) -> bool:
    over = clearing.tokens is not None and total > clearing.tokens
    return over or (clearing.uses is not None and len(uses) > clearing.uses)


def _old(clearing: ClearToolUses, uses: Mapping[str, _Use], gone: Mapping[str, bool]) -> dict[str, tuple[bool, int]]:
    """What may be cleared now: for each use whether its input goes too, and the tokens that saves."""
    old = list(uses)[: max(0, len(uses) - clearing.keep)]
    found: dict[str, tuple[bool, int]] = {}
    for name in old:
        use = uses[name]
        if name in gone or not use.done or use.name in clearing.spared:
            continue
        inputs = clearing.inputs is None or use.name in clearing.inputs
        saved = max(0, use.result - _FRAME) + (max(0, use.input - _FRAME) if inputs else 0)
        found[name] = (inputs, saved)
    return found


def _weighed(item: Item, message: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], int]]:
    """The blocks of a message, each with its part of the item's tokens by length."""
    content = message.get("content")
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    if not any(block.get("type") in ("tool_use", "tool_result") for block in blocks):
        return
    sizes = [len(json.dumps(block)) for block in blocks]
    for block, size in zip(blocks, sizes, strict=True):
        yield block, item.tokens * size // max(1, sum(sizes))


def clear_message(raw: bytes, message: Mapping[str, Any], gone: Mapping[str, bool]) -> bytes:
    """A message without the results and inputs that are *gone*; every other byte stays as it is."""
    content = message.get("content")
    changes: dict[tuple[str | int, ...], str] = {}
    for at, block in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(block, dict):
            continue
        if block.get("type") == "tool_result" and block.get("tool_use_id") in gone and "content" in block:
            changes["content", at, "content"] = json.dumps(PLACEHOLDER)
        if block.get("type") == "tool_use" and gone.get(str(block.get("id"))) and "input" in block:
            changes["content", at, "input"] = "{}"
    if not changes:
        return raw
    source = raw.decode()
    pieces: list[str] = []
    done = 0
    for path, (start, end) in sorted(locate(source, list(changes)), key=lambda found: found[1]):
        pieces += [source[done:start], changes[path]]
        done = end
    return "".join([*pieces, source[done:]]).encode()
