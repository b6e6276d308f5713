"""Chooses the tool results that give way to a line each, and words that line: duplicates first, the least needed next.

A result is replaced only with its whole item, and never if a placeholder refers to it. The choice depends on facts
about the results that were noted when they were measured; no text is read here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from proxy.core.compaction.record import Placeholder, PlaceholderReason
from proxy.core.conversation import Call, Item, Layout, Result, unread_from
from proxy.core.tool_calls import Pair, pairs_of, unpack_mentions
from proxy.core.tool_table import REPEATABLE

END_OF_FILE = 2**62
"""The line number of a file's end."""

ADDED_LINES = 12
"""Most lines or bytes that a tool adds to what it read, such as a heading."""

COMPARED = 8
"""Most later readings of one file with which an earlier one is compared: the newest that are no duplicates."""

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
"""The weight of each kind of result: the higher, the sooner it is pruned. A kind without a weight never is."""

REFERENCE = 20
QUOTATION = 20
DECISION = 10
"""Worth that a result gains by each later mention of its file, by a quotation, and by a conclusion behind it."""

USUAL_WINDOW = 200_000
"""The window for which the limits in tokens and rounds hold; in a smaller one they shrink with it."""

FRAME = 40
LINE = 56
"""Tokens charged for an item of placeholders: for its ids and separators, and for the line of each result."""

NAMES = 10
"""One token in so many of an old result stays, as names, errors and figures: later steps refer to them.

Measured: the share of what later steps refer to is .875 with and .858 without them in a view of half the conversation's
size, .583 and .579 in a quarter (decision 3).
"""

WORDS: dict[PlaceholderReason, str] = {
    "repeated": "[Left out: a later call of the same tool gave the same result.]",
    "reread": "[Left out: {target} was changed and read again later.]",
    "included": "[Left out: a later reading of {target} includes this.]",
    "again": "[Left out: {target} was read again later.]",
}
OLD = "[Old {name} output left out to save room{target}; the call {outcome}. Call it again if you need it.{line}]"


@dataclass(frozen=True, slots=True)
class DedupRules:
    """The kinds of repetition that count as duplicates, and the fewest tokens that a replacement must save."""

    exact: bool = True
    stale_reads: bool = True
    grep_subsumed: bool = True
    min_saving: int = 50


@dataclass(frozen=True, slots=True)
class PruneRules:
    """The rounds, and the tokens of results, that are never pruned, counted back from the newest.

    ``min_saving`` are the fewest tokens that pruning must save in all. ``weights`` are as ``KIND_WEIGHTS``.
    """

    protect_rounds: int = 6
    protect_tokens: int = 40_000
    min_saving: int = 20_000
    weights: Mapping[str, int] = field(default_factory=lambda: KIND_WEIGHTS)

    def scaled(self, window: int) -> PruneRules:
        """The rules for a *window*: in a small one fewer tokens and rounds are protected."""
        share = min(1.0, window / USUAL_WINDOW)
        tokens, saving = int(self.protect_tokens * share), int(self.min_saving * share)
        rounds = max(min(1, self.protect_rounds), int(self.protect_rounds * share))
        return PruneRules(rounds, tokens, saving, self.weights)


@dataclass(frozen=True, slots=True)
class PrunePassRules:
    """The rules of both parts of a prune pass; None for a part that is switched off."""

    dedup: DedupRules | None = field(default_factory=DedupRules)
    prune: PruneRules | None = field(default_factory=PruneRules)

    @property
    def min_saving(self) -> int:
        """The fewest tokens that one replacement must save."""
        return (self.dedup or DedupRules()).min_saving


@dataclass(frozen=True, slots=True)
class PruneRange:
    """The results that a prune pass may replace: from item ``start`` to ``end``, without those in ``placeholders``.

    ``reduced`` are the present tokens of items that were made smaller before, by index.
    """

    items: Sequence[Item]
    layout: Layout
    start: int
    end: int
    placeholders: tuple[Placeholder, ...] = ()
    reduced: Mapping[int, int] = field(default_factory=dict)

    def savings(self, least: int) -> dict[int, int]:
        """The tokens that replacing each result saves, by index; without those that save less than *least*."""
        replaced = {each.index for each in self.placeholders}
        savings: dict[int, int] = {}
        for index in range(self.start, self.end):
            item = self.items[index]
            if item.answers and index not in replaced:
                saved = self.reduced.get(index, item.tokens) - placeholder_tokens(item)
                if saved >= least:
                    savings[index] = saved
        return savings

    def pairs(self) -> list[Pair]:
        """The results that still stand, each with its call, in order."""
        replaced = {each.index for each in self.placeholders}
        return [pair for pair in pairs_of(self.items, self.start, self.end) if pair.index not in replaced]


def prune_pass(
    among: PruneRange, need: int, window: int, rules: PrunePassRules
) -> tuple[tuple[Placeholder, ...], tuple[str, ...]] | None:
    """The placeholders that together save *need* tokens, and the stages that chose them.

    None if they cannot save so many: a pass that saves too little would change the prompt in vain.
    """
    savings = among.savings(rules.min_saving)
    if sum(savings.values()) < need:
        return None
    pairs = among.pairs()
    candidates = savings.keys() - {each.same_as for each in among.placeholders}
    duplicates: dict[int, Placeholder] = {}
    if rules.dedup is not None:
        found = find_duplicates(pairs, rules.dedup, unread_from(among.items, among.end))
        duplicates = {each.index: each for each in found if each.index in candidates}
    need -= sum(savings[index] for index in duplicates)
    if duplicates and need <= 0:
        return tuple(sorted(duplicates.values())), ("dedup",)
    if rules.prune is None:
        return None
    pruned = _pruned(among, pairs, candidates.difference(duplicates), need, savings, rules.prune.scaled(window))
    if not pruned:
        return None
    chosen = _without_references_to(pruned, duplicates) | pruned
    if not duplicates:
        return tuple(sorted(chosen.values())), ("prune",)
    return tuple(sorted(chosen.values())), ("dedup", "prune")


def oldest_results(pairs: Sequence[Pair], items: Sequence[Item], over: int) -> tuple[Placeholder, ...] | None:
    """The fewest of the oldest results among *pairs* that together save *over* tokens; None if all save less."""
    chosen: list[Placeholder] = []
    for index in sorted({pair.index for pair in pairs}):
        if over <= 0:
            break
        saved = items[index].tokens - placeholder_tokens(items[index])
        if saved > 0:
            chosen.append(Placeholder(index, "old"))
            over -= saved
    if over > 0:
        return None
    return tuple(chosen)


def _pruned(
    among: PruneRange,
    pairs: Sequence[Pair],
    candidates: Collection[int],
    need: int,
    savings: Mapping[int, int],
    rules: PruneRules,
) -> dict[int, Placeholder]:
    """The least needed *candidates* that are old enough and together save *need* tokens, by index.

    Empty if they save too little. That is seen before they are ranked, if all of them together do.
    """
    least = max(need, rules.min_saving)
    before = min(first_protected(among.layout, among.start, among.end, rules), unread_from(among.items, among.end))
    old = {index for index in candidates if index < before}
    if sum(savings[index] for index in old) < least:
        return {}
    ranked = rank_prunable(pairs, among.items, among.end, rules)
    chosen = _first_that_save(need, [each for each in ranked if each.index in old], savings)
    if sum(savings[index] for index in chosen) < least:
        return {}
    return chosen


def _first_that_save(
    need: int, candidates: Sequence[Placeholder], savings: Mapping[int, int]
) -> dict[int, Placeholder]:
    """The first of *candidates* that together save *need* tokens, by index; all of them if they save less."""
    chosen: dict[int, Placeholder] = {}
    for candidate in candidates:
        if need <= 0:
            break
        chosen[candidate.index] = candidate
        need -= savings[candidate.index]
    return chosen


def _without_references_to(pruned: Collection[int], chosen: Mapping[int, Placeholder]) -> dict[int, Placeholder]:
    """*chosen* with "old" as the reason of those that refer to a result which is *pruned* as well."""
    result = dict(chosen)
    for index, placeholder in chosen.items():
        if placeholder.same_as in pruned:
            result[index] = Placeholder(index, "old")
    return result


# Duplicates.


@dataclass(frozen=True, slots=True)
class _LaterResults:
    """The results behind the present one, on the way from the newest pair back to the oldest.

    ``unread`` is the first item that no model has read. ``same`` is the item of each result, by call and digest.
    ``readings`` are those of each file, the newest first, and ``changed`` is the item that changed the file last, by
    path.
    """

    unread: int
    same: dict[tuple[int, int], int] = field(default_factory=dict)
    readings: dict[int, list[Pair]] = field(default_factory=lambda: defaultdict(list))
    changed: dict[int, int] = field(default_factory=dict)

    def add(self, pair: Pair) -> None:
        """Add *pair*, if its call succeeded."""
        call, result = pair.call, pair.result
        if not result.ok:
            return
        if call.kind in ("file_edit", "file_write"):
            for path in call.paths:
                self.changed.setdefault(path, pair.call_index)
        if call.repeat_key:
            self.same.setdefault((call.repeat_key, result.digest), pair.index)
        if call.kind == "file_read" and len(call.paths) == 1:
            readings = self.readings[call.paths[0]]
            if len(readings) < COMPARED:
                readings.append(pair)


def find_duplicates(pairs: Sequence[Pair], rules: DedupRules, unread: int) -> list[Placeholder]:
    """The results among *pairs* that a later one repeats, newest first.

    The call of the later one succeeded, and its result is the same or covers the lines of the earlier one. The later
    one is no duplicate itself. From the item *unread* on only the same result counts: two readings of one file in a
    round that no model has read show the same lines, but perhaps not the same text.
    """
    read = {path for pair in pairs if pair.call.kind == "file_read" for path in pair.call.paths}
    later = _LaterResults(unread)
    by_item: dict[int, list[Placeholder | None]] = defaultdict(list)
    for pair in reversed(pairs):
        duplicate = None
        if pair.call.kind in REPEATABLE:
            duplicate = _repeated(pair, later, rules) or _included(pair, later, read, rules)
        by_item[pair.index].append(duplicate)
        if duplicate is None:
            later.add(pair)
    # An item with several results gives way only as a whole.
    return [placeholders[0] for placeholders in by_item.values() if placeholders[0] is not None and all(placeholders)]


def _repeated(pair: Pair, later: _LaterResults, rules: DedupRules) -> Placeholder | None:
    """The placeholder for a result that the same call gave again later."""
    if not rules.exact or not pair.call.repeat_key:
        return None
    same_as = later.same.get((pair.call.repeat_key, pair.result.digest))
    if same_as is None or same_as == pair.index:
        return None
    return Placeholder(pair.index, "repeated", same_as)


def _included(pair: Pair, later: _LaterResults, read: Collection[int], rules: DedupRules) -> Placeholder | None:
    """The placeholder for a result whose lines a later reading of the file shows."""
    lines = _lines_to_cover(pair, read, rules)
    if lines is None or pair.index >= later.unread:
        return None
    [path] = pair.call.paths
    for reading in later.readings[path]:
        if reading.index != pair.index and _covers(reading, lines):
            was_changed = pair.index < later.changed.get(path, -1) < reading.index
            reason: PlaceholderReason = "included"
            if was_changed and pair.call.kind == "file_read":
                reason = "reread"
            return Placeholder(pair.index, reason, reading.index)
    return None


def _lines_to_cover(pair: Pair, read: Collection[int], rules: DedupRules) -> tuple[int, int] | None:
    """The first and last line that a later reading must show to include *pair*; None if none can include it."""
    call = pair.call
    if len(call.paths) != 1:
        return None
    if call.kind == "file_read" and rules.stale_reads:
        return possible_lines(call, pair.result)
    if call.kind == "grep" and rules.grep_subsumed and call.paths[0] in read:
        return 1, END_OF_FILE
    return None


def possible_lines(call: Call, result: Result) -> tuple[int, int]:
    """The first and last line that a reading can show: by the line numbers in it, else by its call's arguments."""
    if result.last:
        return result.first, result.last
    if call.first and _is_in_lines(call, result):
        return call.first, call.last or END_OF_FILE
    return 1, END_OF_FILE


def certain_lines(call: Call, result: Result) -> tuple[int, int] | None:
    """The first and last line that a reading shows for certain; None if they are unknown."""
    if not call.first or not _is_in_lines(call, result):
        return None
    may_be_cut = not call.last and call.line_limit and result.lines >= call.line_limit
    if not result.partial and not may_be_cut:
        return min(call.first, result.first or call.first), call.last or END_OF_FILE
    if not result.last:
        return None
    return result.first, result.last


def _is_in_lines(call: Call, result: Result) -> bool:
    """True if the result can be the lines that the call requested.

    If it has more lines than that, or just as many bytes, the tool counts in bytes. An offset without an end proves
    nothing unless the lines are numbered.
    """
    if result.last:
        return True
    if not call.last:
        return call.first <= 1
    requested = call.last - call.first + 1
    is_in_bytes = result.lines < requested and abs(result.size - requested) <= ADDED_LINES
    return result.lines <= requested + ADDED_LINES and not is_in_bytes


def _covers(reading: Pair, lines: tuple[int, int]) -> bool:
    """True if *reading* shows all of *lines* for certain."""
    shown = certain_lines(reading.call, reading.result)
    return shown is not None and shown[0] <= lines[0] and lines[1] <= shown[1]


# Old results.


class _LaterUse:
    """The mentions in later texts of the model, gathered from item *end* back to the oldest."""

    def __init__(self, items: Sequence[Item], end: int) -> None:
        self._items = items
        self._next = end
        self._mentions: Counter[int] = Counter()
        self._decides = False

    def value(self, pair: Pair) -> int:
        """The worth that *pair* gains by the texts behind it. To be called for the last pair first."""
        while self._next > pair.index + 1:
            self._next -= 1
            self._add(self._items[self._next])
        named = max((self._mentions[name] for name in pair.call.names), default=0)
        opening = pair.result.opening
        is_quoted = bool(opening) and self._mentions[opening] > 0
        return REFERENCE * named + QUOTATION * is_quoted + DECISION * self._decides

    def _add(self, item: Item) -> None:
        if item.role != "assistant":
            return
        facts = item.facts
        if facts is None:
            self._decides = False
            return
        self._decides = facts.decides
        names = [name for call in facts.calls for name in call.names]
        self._mentions.update({*unpack_mentions(facts.mentions), *names})


def first_protected(layout: Layout, start: int, end: int, rules: PruneRules) -> int:
    """The first protected item between *start* and *end*: results before it may go."""
    cuts, sums = layout.cuts[: bisect_left(layout.cuts, end)], layout.result_sums
    by_rounds = by_tokens = end
    if rules.protect_rounds > len(cuts):
        by_rounds = start
    elif rules.protect_rounds:
        by_rounds = cuts[-rules.protect_rounds]
    if rules.protect_tokens:
        # The result at which the tokens exceed the limit may go; those after it may not.
        by_tokens = bisect_left(sums, sums[end] - rules.protect_tokens)
    return max(start, min(by_rounds, by_tokens))


def rank_prunable(pairs: Sequence[Pair], items: Sequence[Item], end: int, rules: PruneRules) -> list[Placeholder]:
    """The results among *pairs* that may be pruned, the least needed first, those of unknown tools last.

    Only texts before item *end* count.
    """
    later_use = _LaterUse(items, end)
    ranks: dict[int, list[tuple[bool, int] | None]] = defaultdict(list)
    for pair in reversed(pairs):
        value, weight = later_use.value(pair), rules.weights.get(pair.call.kind)
        rank = None
        if weight is not None:
            rank = (pair.call.kind == "unknown", -max(0, weight - value))
        ranks[pair.index].append(rank)
    order: list[tuple[tuple[bool, int], int]] = []
    for index, of_item in ranks.items():
        prunable = [rank for rank in of_item if rank is not None]
        if len(prunable) == len(of_item):  # an item with several results gives way only as a whole
            order.append((max(prunable), index))
    return [Placeholder(index, "old") for _, index in sorted(order)]


# The line in the place of a result.


def placeholder_tokens(item: Item) -> int:
    """Tokens that *item* is charged once its results are placeholders; never more than it takes."""
    whole = item.user_tokens + item.sealed
    lines = LINE * max(1, len(item.answers))
    names = (item.tokens - whole) // NAMES
    return min(item.tokens, FRAME + lines + names + whole)


def placeholder_text(reason: PlaceholderReason, name: str, target: str, *, ok: bool, error: str) -> str:
    """The line for one result of the tool *name*: why it is left out, what it was about, how the call ended.

    *target* is what the call was about, in the client's own words; *error* is the result's first line about an error.
    """
    if reason != "old":
        return WORDS[reason].format(target=target or "it")
    outcome, error_line = "succeeded", ""
    if not ok:
        outcome = "failed"
        if error:
            error_line = f" It said: {error}"
    about = ""
    if target:
        about = f", of {target}"
    return OLD.format(name=name, target=about, outcome=outcome, line=error_line)
