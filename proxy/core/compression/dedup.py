"""Results that say nothing new, because a later one that succeeded says the same or more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.core.compression.swap import Placeholder, Why
from proxy.core.conversation import Call, Result
from proxy.core.tool_calls import Pair
from proxy.core.tool_table import REPEATABLE

OPEN = 2**62
"""The line number of a file's end."""

NOTES = 12
"""Lines and bytes of its own that a tool may add to what it read."""

COMPARED = 8
"""Later readings of one file that an earlier one is compared with: the newest, none of them covered by another."""


@dataclass(frozen=True, slots=True)
class Dedup:
    """Which repetitions count, and how many tokens a replacement must save at least."""

    exact: bool = True
    stale_reads: bool = True
    grep_subsumed: bool = True
    min_saving: int = 50


@dataclass(frozen=True, slots=True)
class _Later:
    """What was seen on the way from the newest pair back to the oldest."""

    same: dict[tuple[int, int], int]
    readings: dict[int, list[Pair]]
    changed: dict[int, int]


def superseded(pairs: Sequence[Pair], rules: Dedup) -> list[Placeholder]:
    """The results among *pairs* that a later one makes superfluous, newest first; none of them is what another names.

    The later one succeeded and covers the lines of the earlier one.
    """
    read = {path for pair in pairs if pair.call.kind == "file_read" for path in pair.call.paths}
    later = _Later({}, defaultdict(list), {})
    found: dict[int, list[Placeholder | None]] = defaultdict(list)
    for pair in reversed(pairs):
        swap = _replacement(pair, later, read, rules)
        found[pair.index].append(swap)
        if swap is None:
            _note(pair, later)
    # An item with several results gives way only as a whole.
    return [swaps[0] for swaps in found.values() if all(swaps) and swaps[0] is not None]


def _note(pair: Pair, later: _Later) -> None:
    call, result = pair.call, pair.result
    if not result.ok:
        return
    if call.kind in ("file_edit", "file_write"):
        later.changed.update({path: pair.call_index for path in call.paths if path not in later.changed})
    if call.same:
        later.same.setdefault((call.same, result.digest), pair.index)
    if call.kind == "file_read" and len(call.paths) == 1 and len(later.readings[call.paths[0]]) < COMPARED:
        later.readings[call.paths[0]].append(pair)


def _replacement(pair: Pair, later: _Later, read: Iterable[int], rules: Dedup) -> Placeholder | None:
    call, result = pair.call, pair.result
    if call.kind not in REPEATABLE:
        return None
    same = later.same.get((call.same, result.digest)) if rules.exact and call.same else None
    if same is not None and same != pair.index:
        return Placeholder(pair.index, "repeated", same)
    if len(call.paths) != 1:
        return None
    path = call.paths[0]
    if call.kind == "file_read" and rules.stale_reads:
        wanted = shown(call, result)
    elif call.kind == "grep" and rules.grep_subsumed and path in read:
        wanted = (1, OPEN)
    else:
        return None
    covering = next((p for p in later.readings[path] if p.index != pair.index and _covers(p, wanted)), None)
    if covering is None:
        return None
    changed = pair.index < later.changed.get(path, -1) < covering.index
    why: Why = "reread" if changed and call.kind == "file_read" else "included"
    return Placeholder(pair.index, why, covering.index)


def shown(call: Call, result: Result) -> tuple[int, int]:
    """The lines a reading can have shown at most: by its own numbers, else by what it asked for."""
    if result.last:
        return result.first, result.last
    return (call.first, call.last or OPEN) if call.first and _is_in_lines(call, result) else (1, OPEN)


def covered(call: Call, result: Result) -> tuple[int, int] | None:
    """The lines a reading has shown for certain; ``None`` where that cannot be told."""
    if not call.first or not _is_in_lines(call, result):
        return None
    if result.partial or (not call.last and call.most and result.lines >= call.most):
        return (result.first, result.last) if result.last else None
    return min(call.first, result.first or call.first), call.last or OPEN


def _is_in_lines(call: Call, result: Result) -> bool:
    """Whether what came back can be the lines that were asked for; more lines, or as many bytes, tell of bytes."""
    asked = call.last - call.first + 1 if call.last else 0
    if not asked or result.last:
        return True
    by_bytes = result.lines < asked and abs(result.size - asked) <= NOTES
    return result.lines <= asked + NOTES and not by_bytes


def _covers(later: Pair, wanted: tuple[int, int]) -> bool:
    lines = covered(later.call, later.result)
    return lines is not None and lines[0] <= wanted[0] and wanted[1] <= lines[1]
