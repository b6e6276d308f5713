"""What each stage makes of a view, in token counts: prune, fold, drop, truncate and clip.

Every stage takes the last compaction and returns a further one, or None if it does not help. The schedule says in which
order they are tried and how far each goes. Nothing here sees a text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from proxy.core.compaction.prune import PrunePassRules, PruneRange, prune_pass
from proxy.core.compaction.record import Compaction, placeholder_tokens
from proxy.core.compaction.truncate import Spared, TruncateLimits, clip_levels, fair_level
from proxy.core.conversation import Item, Layout, unread_from
from proxy.core.tokens.budget import Allocation, Marks, Shares, TokenBudget

BLOCK_FRAME = 120
"""Tokens of the headings and closing words of a block."""

CLIP_FLOOR = 48
"""Tokens an item keeps at least when it is clipped: its frame, the marker, and a line of its text."""

USERS_WHOLE = 0.1
"""What users wrote stays whole while that leaves every other item this share of the clip's target."""

TRAILING_USERS = 8
"""User items in a row behind the newest round that are passed over when its start is searched."""


@dataclass(frozen=True, slots=True)
class EnabledStages:
    """Which stages may be used."""

    fold: bool = True
    drop: bool = True
    clip: bool = True
    tools: bool = True


@dataclass(frozen=True, slots=True)
class CompactionRules:
    """The configured rules of compaction: the marks, the caps of a block, and the stages with their limits.

    With an ``allocation`` a compaction goes deeper than the low mark, and its block is smaller than the caps.
    """

    marks: Marks
    shares: Shares
    enabled_stages: EnabledStages
    allocation: Allocation | None = None
    prune_pass: PrunePassRules = field(default_factory=PrunePassRules)
    truncate: TruncateLimits | None = field(default_factory=TruncateLimits)


@dataclass(frozen=True, slots=True)
class Levels:
    """How large the items of a view may be at one boundary, in tokens without the fixed part.

    A compaction is due above ``high`` and needed above ``budget``. ``goal`` is what a fold comes down to: the low mark,
    or less if an allocation leaves the history less. ``clip_to`` is what cutting items short comes down to.
    """

    high: int
    budget: int
    goal: int
    clip_to: int


class Stages:
    """The stages over the items of one conversation."""

    def __init__(self, items: Sequence[Item], layout: Layout, budget: TokenBudget, rules: CompactionRules) -> None:
        self._items = items
        self._layout = layout
        self._budget = budget
        self._rules = rules
        self._enabled = rules.enabled_stages
        self._reduced: tuple[Compaction | None, dict[int, int]] = (None, {})

    def view_tokens(self, boundary: int, compaction: Compaction | None) -> int:
        """Tokens of the view's items at *boundary* after *compaction*, the fixed part aside."""
        sums = self._layout.sums
        if compaction is None:
            return sums[boundary]
        cut, anchors = compaction.cut, compaction.anchors
        reduced = self._reduced[1] if self._reduced[0] is compaction else self._reduced_items(compaction)
        total = sums[boundary] - sums[cut] + compaction.block_tokens
        total += sum(self._items[i].tokens for i in anchors)
        for index, tokens in reduced.items():
            if cut <= index < boundary or index in anchors:
                total -= self._items[index].tokens - tokens
        return total

    def unread_excess(self, boundary: int, compaction: Compaction | None, levels: Levels) -> int:
        """Tokens that unread results take now and that truncation can save as soon as they are read."""
        limits = self._rules.truncate
        if limits is None:
            return 0
        reduced = self._reduced_items(compaction) if compaction else {}
        least = limits.tokens_in(levels.budget) + CLIP_FLOOR
        excess = 0
        for index in self.unread(boundary, compaction):
            item = self._items[index]
            if item.answers:
                excess += max(0, reduced.get(index, item.tokens) - least)
        return excess

    def unread(self, boundary: int, compaction: Compaction | None) -> range:
        """The items at the end of the view that no model has read."""
        cut = compaction.cut if compaction else 0
        return range(max(cut, unread_from(self._items, boundary)), boundary)

    # The stages.

    def prune(self, boundary: int, last: Compaction | None, need: int) -> Compaction | None:
        """*last* with old tool results replaced by placeholders; None if that does not save *need* tokens."""
        if need <= 0:
            return None
        base = last or Compaction(boundary, 0, 0)
        among = PruneRange(self._items, self._layout, base.cut, boundary, base.placeholders, self._reduced_items(base))
        pruned = prune_pass(among, need, self._budget.window, self._rules.prune_pass)
        if pruned is None:
            return None
        placeholders, stages = pruned
        replaced = {placeholder.index for placeholder in placeholders}
        compaction = structs.replace(
            base,
            boundary=boundary,
            placeholders=tuple(sorted((*base.placeholders, *placeholders))),
            truncations=tuple(each for each in base.truncations if each[0] not in replaced),
            clips=tuple(each for each in base.clips if each[0] not in replaced),
            stages=stages,
        )
        return self._with_size(boundary, compaction)

    def fold(
        self, boundary: int, last: Compaction | None, limit: int, levels: Levels, *, bare: bool = False
    ) -> Compaction | None:
        """A fold at the oldest cut that reaches the goal, else at the newest one that keeps the newest round.

        The block is charged at its cap in a view of *limit* tokens. A *bare* fold drops what it folds: its block is no
        more than a note. None if the stage is switched off, or if there is nothing to fold.
        """
        if not (self._enabled.drop if bare else self._enabled.fold):
            return None
        cuts = self._layout.cuts
        first, end = bisect_right(cuts, last.cut if last else 0), bisect_left(cuts, boundary)

        def folded(at: int) -> Compaction:
            return self._folded(boundary, cuts[at], limit, last, bare=bare)

        newest = self._newest_round(first, end)
        if first <= newest < end - 1:
            unread = cuts[newest] < unread_from(self._items, boundary) < boundary
            most = levels.budget if unread else levels.high
            if folded(newest).view_tokens > most:
                newest = end - 1  # the newest round is too big to stay beside the user items that follow it
        if first > newest:
            return None
        smallest = folded(newest)
        if smallest.view_tokens > levels.goal:
            return smallest
        # The later the cut, the smaller the view.
        reaching = range(first, newest + 1)
        oldest = bisect_left(reaching, True, key=lambda at: folded(at).view_tokens <= levels.goal)
        return folded(reaching[oldest])

    def truncate(
        self, boundary: int, last: Compaction | None, levels: Levels, target: int, among: range | None = None
    ) -> Compaction | None:
        """*last* with the biggest kept tool results truncated to one level, no lower than needed to reach *target*.

        *among* are the results to truncate, by default those that the model has read. None if nothing is to be gained.
        Going down to the low mark would lose more of what the next step refers to than it saves: decision 4.
        """
        limits, base = self._rules.truncate, last or Compaction(boundary, 0, 0)
        if limits is None:
            return None
        total, read_to = self.view_tokens(boundary, base), unread_from(self._items, boundary)
        least = limits.tokens_in(levels.budget) + CLIP_FLOOR
        sizes = self._truncatable(base, range(base.cut, read_to) if among is None else among, least)
        if total <= target or not sizes:
            return None
        floors = dict.fromkeys(sizes, least)
        level = max(least, fair_level(sizes, floors, target - (total - sum(sizes.values()))))
        if among is None or among.stop <= read_to:
            level = max(least, min(level, limits.max_tokens + CLIP_FLOOR))
        truncated = {index: level + self._items[index].media for index, size in sizes.items() if size > level}
        earlier = base.stages if last and last.boundary == boundary else ()
        compaction = structs.replace(
            base,
            boundary=boundary,
            truncations=tuple(sorted({**dict(base.truncations), **truncated}.items())),
            stages=tuple(dict.fromkeys((*earlier, "truncate"))),
        )
        return self._with_size(boundary, compaction)

    def clip(self, boundary: int, last: Compaction | None, target: int, needed: int) -> Compaction | None:
        """*last* with its largest items cut to one level, so that the view reaches *target*.

        None if that saves nothing. What users wrote and unread results are cut last, and only as far as *needed*.
        """
        if not self._enabled.clip:
            return None
        base, items = last or Compaction(boundary, 0, 0), self._items
        total = self.view_tokens(boundary, base)
        if total <= target:
            return None
        sizes = self._clippable(boundary, base)
        floors = {i: min(size, items[i].media + items[i].sealed + CLIP_FLOOR) for i, size in sizes.items()}
        read_to = unread_from(items, boundary)
        users = {i for i in sizes if items[i].role == "user"}
        unread = {i for i in sizes if i >= read_to and items[i].answers}
        whole = int(target * USERS_WHOLE)
        caps = clip_levels(sizes, floors, Spared(users, unread), total - target, total - needed, whole)
        earlier = dict(base.clips)
        clips = earlier | {i: cap for i, cap in caps.items() if cap < sizes[i] or i in earlier}
        stages = base.stages if base.boundary == boundary else ()
        compaction = structs.replace(
            base,
            boundary=boundary,
            clips=tuple(sorted(clips.items())),
            truncations=tuple(each for each in base.truncations if each[0] not in clips),
            stages=(*stages, "clip"),
        )
        clipped = self._with_size(boundary, compaction)
        return clipped if clipped.view_tokens < total else None

    def with_smaller_block(self, boundary: int, compaction: Compaction, tokens: int) -> Compaction:
        """*compaction* with a block of at most *tokens*."""
        block = min(compaction.block_tokens, tokens)
        share = max(0, block - BLOCK_FRAME), max(1, compaction.block_tokens - BLOCK_FRAME)
        smaller = structs.replace(
            compaction,
            block_tokens=block,
            text_tokens=compaction.text_tokens * share[0] // share[1],
            stages=("drop", *compaction.stages[1:]),
        )
        return self._with_size(boundary, smaller)

    # Parts of the stages.

    def _with_size(self, boundary: int, compaction: Compaction) -> Compaction:
        return structs.replace(compaction, view_tokens=self.view_tokens(boundary, compaction))

    def _reduced_items(self, compaction: Compaction) -> dict[int, int]:
        """The tokens of every item that *compaction* made smaller, by index."""
        if self._reduced[0] is not compaction:
            replaced = {each.index: placeholder_tokens(self._items[each.index]) for each in compaction.placeholders}
            self._reduced = compaction, {**replaced, **dict(compaction.truncations), **dict(compaction.clips)}
        return self._reduced[1]

    def _newest_round(self, first: int, end: int) -> int:
        """Which of the cuts from *first* to *end* starts the newest round: user items behind it belong to it."""
        cuts, at = self._layout.cuts, end - 1
        while at > first and self._items[cuts[at]].role == "user" and end - at <= TRAILING_USERS:
            at -= 1
        return at

    def _folded(self, boundary: int, cut: int, limit: int, last: Compaction | None, *, bare: bool) -> Compaction:
        """The fold of all items before *cut*; items from there on stay as they are after *last*."""
        anchors = self._layout.verbatim_users(boundary, cut)
        block, text = self._block_tokens(cut, anchors, limit)
        stages: tuple[str, ...] = ("fold",)
        if bare:
            block, text, stages = BLOCK_FRAME, 0, ("drop",)
        compaction = Compaction(boundary, cut, block, text, anchors, stages=stages)
        if last is not None:
            compaction = structs.replace(
                compaction,
                clips=tuple(each for each in last.clips if each[0] >= cut or each[0] in anchors),
                truncations=tuple(each for each in last.truncations if each[0] >= cut),
                placeholders=tuple(each for each in last.placeholders if each.index >= cut),
            )
        return self._with_size(boundary, compaction)

    def _block_tokens(self, cut: int, anchors: Sequence[int], limit: int) -> tuple[int, int]:
        """The most a block for the items before *cut* can take, and how much of it is for digest and steps.

        Depends only on the sizes of the folded items and on *limit*.
        """
        shares, allocation = self._rules.shares, self._rules.allocation
        fixed, limit = self._budget.quantised_fixed, self._budget.affordable(limit)
        users = self._layout.user_sums[cut] - sum(self._items[i].tokens for i in anchors)
        pins = min(int(shares.pins * limit), users + users // 16)
        most = int(shares.block * max(0, limit - fixed))
        if allocation is not None:
            most = min(most, allocation.for_block(self._budget.window, fixed))
        text = min(int((shares.digest + shares.steps) * limit), self._layout.sums[cut] // 2, most)
        return min(pins + text, most) + BLOCK_FRAME, text

    def _truncatable(self, compaction: Compaction, among: range, least: int) -> dict[int, int]:
        """The text tokens of the results of *among* that may be truncated and have more than *least*, by index."""
        truncated = dict(compaction.truncations)
        reduced = {index for index, _ in compaction.clips} | {each.index for each in compaction.placeholders}
        sizes: dict[int, int] = {}
        for index in among:
            item = self._items[index]
            text = truncated.get(index, item.tokens) - item.media
            if text > least and index not in reduced and _has_known_results(item):
                sizes[index] = text
        return sizes

    def _clippable(self, boundary: int, compaction: Compaction) -> dict[int, int]:
        """The tokens of every item that a clip may cut, by index: what is in the view and is no placeholder."""
        reduced, replaced = self._reduced_items(compaction), {each.index for each in compaction.placeholders}
        sizes = {index: reduced.get(index, self._items[index].tokens) for index in compaction.anchors}
        for index in range(compaction.cut, boundary):
            item = self._items[index]
            if item.role != "system" and index not in replaced:
                sizes[index] = reduced.get(index, item.tokens)
        return sizes


def shortest(item: Item) -> int:
    """Tokens that *item* keeps however short it is cut."""
    return item.tokens if item.tokens <= CLIP_FLOOR else item.media + item.sealed


def _has_known_results(item: Item) -> bool:
    """True if *item* is made of tool results, and all of them were read when it was measured."""
    return item.facts is not None and len(item.facts.results) == len(item.answers) > 0
