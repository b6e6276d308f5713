"""Which tool results can be done without: duplicates first, then old ones by what they are worth."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from proxy.core.compaction.record import Placeholder, PlaceholderReason, placeholder_tokens
from proxy.core.conversation import Call, Item, Layout, Result, unread_from
from proxy.core.tool_calls import Pair, mentioned, pairs_of
from proxy.core.tool_table import REPEATABLE

END_OF_FILE = 2**62
"""The line number of a file's end."""

ADDED_LINES = 12
"""Lines and bytes of its own that a tool may add to what it read."""

COMPARED = 8
"""Later readings of one file that an earlier one is compared with: the newest, none of them covered by another."""


@dataclass(frozen=True, slots=True)
class DedupRules:
    """Which repetitions count, and how many tokens a replacement must save at least."""

    exact: bool = True
    stale_reads: bool = True
    grep_subsumed: bool = True
    min_saving: int = 50


@dataclass(frozen=True, slots=True)
class _LaterResults:
    """What was seen on the way from the newest pair back to the oldest."""

    same: dict[tuple[int, int], int]
    readings: dict[int, list[Pair]]
    changed: dict[int, int]


def find_duplicates(pairs: Sequence[Pair], rules: DedupRules) -> list[Placeholder]:
    """The results among *pairs* that a later one makes superfluous, newest first; none of them is what another names.

    The later one succeeded and covers the lines of the earlier one.
    """
    read = {path for pair in pairs if pair.call.kind == "file_read" for path in pair.call.paths}
    later = _LaterResults({}, defaultdict(list), {})
    found: dict[int, list[Placeholder | None]] = defaultdict(list)
    for pair in reversed(pairs):
        swap = _replacement(pair, later, read, rules)
        found[pair.index].append(swap)
        if swap is None:
            _note_later(pair, later)
    # An item with several results gives way only as a whole.
    return [swaps[0] for swaps in found.values() if all(swaps) and swaps[0] is not None]


def _note_later(pair: Pair, later: _LaterResults) -> None:
    call, result = pair.call, pair.result
    if not result.ok:
        return
    if call.kind in ("file_edit", "file_write"):
        later.changed.update({path: pair.call_index for path in call.paths if path not in later.changed})
    if call.same:
        later.same.setdefault((call.same, result.digest), pair.index)
    if call.kind == "file_read" and len(call.paths) == 1 and len(later.readings[call.paths[0]]) < COMPARED:
        later.readings[call.paths[0]].append(pair)


def _replacement(pair: Pair, later: _LaterResults, read: Iterable[int], rules: DedupRules) -> Placeholder | None:
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
        wanted = possible_lines(call, result)
    elif call.kind == "grep" and rules.grep_subsumed and path in read:
        wanted = (1, END_OF_FILE)
    else:
        return None
    covering = next((p for p in later.readings[path] if p.index != pair.index and _covers(p, wanted)), None)
    if covering is None:
        return None
    changed = pair.index < later.changed.get(path, -1) < covering.index
    why: PlaceholderReason = "reread" if changed and call.kind == "file_read" else "included"
    return Placeholder(pair.index, why, covering.index)


def possible_lines(call: Call, result: Result) -> tuple[int, int]:
    """The lines a reading can have shown at most: by its own numbers, else by what it asked for."""
    if result.last:
        return result.first, result.last
    return (call.first, call.last or END_OF_FILE) if call.first and _is_in_lines(call, result) else (1, END_OF_FILE)


def certain_lines(call: Call, result: Result) -> tuple[int, int] | None:
    """The lines a reading has shown for certain; ``None`` where that cannot be told."""
    if not call.first or not _is_in_lines(call, result):
        return None
    if result.partial or (not call.last and call.most and result.lines >= call.most):
        return (result.first, result.last) if result.last else None
    return min(call.first, result.first or call.first), call.last or END_OF_FILE


def _is_in_lines(call: Call, result: Result) -> bool:
    """Whether what came back can be the lines that were asked for; more lines, or as many bytes, tell of bytes.

    Where a reading begins, with no word on how far it goes, tells nothing unless its lines are numbered.
    """
    if result.last:
        return True
    if not call.last:
        return call.first <= 1
    asked = call.last - call.first + 1
    by_bytes = result.lines < asked and abs(result.size - asked) <= ADDED_LINES
    return result.lines <= asked + ADDED_LINES and not by_bytes


def _covers(later: Pair, wanted: tuple[int, int]) -> bool:
    lines = certain_lines(later.call, later.result)
    return lines is not None and lines[0] <= wanted[0] and wanted[1] <= lines[1]


KIND_WEIGHTS: Mapping[str, int] = MappingProxyType(
    {
        "shell": 70,
        "shell_read": 65,
        "web_fetch": 55,
        "grep": 50,
        "search_semantic": 50,
        "web_search": 40,
        "file_read": 30,
        "unknown": 25,
        "media_read": 30,
        "glob": 20,
        "list": 20,
        "file_edit": 10,
        "file_write": 10,
        "agent": 0,
    }
)
"""How easily a result of each kind is done without; what has no weight is never left out."""

REFERENCE = 20
QUOTATION = 20
DECISION = 10
"""What a result is worth more for each later item that names its file or quotes it, and if a conclusion follows it."""

USUAL_WINDOW = 200_000
"""Below this window the figures in tokens shrink with it."""


@dataclass(frozen=True, slots=True)
class PruneRules:
    """What is never left out, in rounds and in tokens of results from the newest back; the least that pays; weights."""

    protect_rounds: int = 6
    protect_tokens: int = 40_000
    min_saving: int = 20_000
    weights: Mapping[str, int] = field(default_factory=lambda: KIND_WEIGHTS)

    def scaled(self, window: int) -> PruneRules:
        """The same for a *window*: below the usual one fewer tokens and rounds are protected."""
        share = min(1.0, window / USUAL_WINDOW)
        tokens, saving = int(self.protect_tokens * share), int(self.min_saving * share)
        rounds = max(min(1, self.protect_rounds), int(self.protect_rounds * share))
        return PruneRules(rounds, tokens, saving, self.weights)


def first_protected(layout: Layout, start: int, place: int, rules: PruneRules) -> int:
    """The first protected item between *start* and *place*: results before it may go."""
    cuts = layout.cuts[: bisect_left(layout.cuts, place)]
    oldest = cuts[-rules.protect_rounds] if len(cuts) >= rules.protect_rounds else start
    oldest = oldest if rules.protect_rounds else place
    sums = layout.result_sums
    tokens = bisect_left(sums, sums[place] - rules.protect_tokens) - 1 if rules.protect_tokens else place
    # The result that crosses the limit may go; those after it may not.
    return max(start, min(oldest, tokens + 1))


def rank_prunable(pairs: Sequence[Pair], items: Sequence[Item], place: int, rules: PruneRules) -> list[Placeholder]:
    """The results among *pairs* that may go, the most dispensable first, an unknown tool's last.

    Only what was written before *place* counts.
    """
    scores: dict[int, list[tuple[bool, int] | None]] = {}
    for pair, value in zip(reversed(pairs), _values(pairs, items, place), strict=True):
        weight = rules.weights.get(pair.call.kind)
        score = None if weight is None else (pair.call.kind == "unknown", -max(0, weight - value))
        scores.setdefault(pair.index, []).append(score)
    order: dict[int, tuple[bool, int]] = {}
    for index, found in scores.items():
        known = [score for score in found if score is not None]
        if len(known) == len(found):  # an item with several results gives way only as a whole
            order[index] = max(known)
    return [Placeholder(index, "old") for index in sorted(order, key=lambda index: (order[index], index))]


def oldest_results(pairs: Sequence[Pair], items: Sequence[Item], over: int) -> tuple[Placeholder, ...] | None:
    """The fewest of the oldest results among *pairs* that save *over* tokens, whatever they are worth.

    ``None`` where all of them do not save as much.
    """
    found: list[Placeholder] = []
    for index in sorted({pair.index for pair in pairs}):
        if over <= 0:
            break
        saved = items[index].tokens - placeholder_tokens(items[index])
        if saved > 0:
            found.append(Placeholder(index, "old"))
            over -= saved
    return tuple(found) if over <= 0 else None


def _values(pairs: Sequence[Pair], items: Sequence[Item], place: int) -> Iterator[int]:
    """What each of *pairs*, from the last to the first, is worth more for what the model wrote after it."""
    seen: Counter[int] = Counter()
    decides, index = False, place
    for pair in reversed(pairs):
        while index > pair.index + 1:
            index -= 1
            facts = items[index].facts
            if items[index].role != "assistant":
                continue
            decides = facts is not None and facts.decides
            if facts is not None:
                names = [name for call in facts.calls for name in call.names]
                seen.update({*mentioned(facts.mentions), *names})
        named = max((seen[name] for name in pair.call.names), default=0)
        quoted = bool(pair.result.opening) and seen[pair.result.opening] > 0
        yield REFERENCE * named + QUOTATION * quoted + DECISION * decides


@dataclass(frozen=True, slots=True)
class PrunePassRules:
    """What the mild event may do; ``None`` where a part of it is switched off."""

    dedup: DedupRules | None = field(default_factory=DedupRules)
    prune: PruneRules | None = field(default_factory=PruneRules)


@dataclass(frozen=True, slots=True)
class PruneRange:
    """The results that a prune pass may replace: from item ``start`` to ``end``, without those in ``placeholders``.

    ``reduced`` are the tokens of items that were made smaller before, by index: no more can be saved there.
    """

    items: Sequence[Item]
    layout: Layout
    start: int
    end: int
    placeholders: tuple[Placeholder, ...] = ()
    reduced: Mapping[int, int] = field(default_factory=dict)


def prune_pass(
    stretch: PruneRange, need: int, window: int, rules: PrunePassRules
) -> tuple[tuple[Placeholder, ...], tuple[str, ...]] | None:
    """The results that give way so that *need* tokens are saved, and the stages that chose them.

    ``None`` where not so many can be saved. What another replacement names stays; nothing is done by halves.
    """
    items, layout, start, place = stretch.items, stretch.layout, stretch.start, stretch.end
    prune = rules.prune.scaled(window) if rules.prune else None
    most = layout.result_sums[place] - layout.result_sums[start]
    if most < need or (rules.dedup is None and prune is None):
        return None
    gone = {swap.index for swap in stretch.placeholders}
    named = {swap.same_as for swap in stretch.placeholders}
    least = rules.dedup.min_saving if rules.dedup else DedupRules().min_saving
    results = [i for i in range(start, place) if items[i].answers and i not in gone]
    gains = {i: stretch.reduced.get(i, items[i].tokens) - placeholder_tokens(items[i]) for i in results}
    pairs = [pair for pair in pairs_of(items, start, place) if pair.index in gains]
    repeated = find_duplicates(pairs, rules.dedup) if rules.dedup else []
    chosen = {swap.index: swap for swap in repeated if gains[swap.index] >= least and swap.index not in named}
    saved = sum(gains[index] for index in chosen)
    stages: tuple[str, ...] = ("dedup",) if chosen else ()
    if saved < need and prune is not None:
        first = min(first_protected(layout, start, place, prune), unread_from(items, place))
        spared = {*chosen, *named}
        old = [
            swap
            for swap in rank_prunable(pairs, items, place, prune)
            if swap.index < first and swap.index not in spared
        ]
        taken, pruned = _enough([swap for swap in old if gains[swap.index] >= least], gains, need - saved)
        if pruned >= prune.min_saving:
            # What said that a later result has it says so no longer where that one goes as well.
            pointing = {i: Placeholder(i, "old") if swap.same_as in taken else swap for i, swap in chosen.items()}
            chosen = pointing | taken
            saved += pruned
            stages = (*stages, "prune")
    if not chosen or saved < need:
        return None
    return tuple(sorted(chosen.values())), stages


def _enough(old: Sequence[Placeholder], gains: Mapping[int, int], need: int) -> tuple[dict[int, Placeholder], int]:
    """The first of *old* that together save *need*, and what they save; all of them where they save less."""
    taken: dict[int, Placeholder] = {}
    saved = 0
    for swap in old:
        if saved >= need:
            break
        taken[swap.index] = swap
        saved += gains[swap.index]
    return taken, saved
