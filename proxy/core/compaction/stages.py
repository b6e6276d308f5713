"""The stages of a compaction, in token counts: prune, fold, drop, truncate and clip.

Every stage takes a compaction and returns one that goes further, or None if it does not help. The schedule decides in
which order they are tried and how far each goes. Nothing here reads a text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from msgspec import structs

from proxy.core.compaction.excerpts import MOST_TEXTS
from proxy.core.compaction.prune import PrunePassRules, PruneRange, placeholder_tokens, prune_pass
from proxy.core.compaction.record import Compaction
from proxy.core.compaction.truncate import Spared, TruncateLimits, clip_levels, fair_level
from proxy.core.conversation import Item, Layout, unread_from
from proxy.core.tokens.allocation import Allocation
from proxy.core.tokens.budget import Marks, Shares, TokenBudget

BLOCK_FRAME = 120
"""Tokens of the headings and closing words of a block."""

CLIP_FLOOR = 48
"""Tokens that a clipped item keeps at least: its frame, the marker, and a line of its text."""

USERS_WHOLE = 0.1
"""Share of a clip's target that every other item must keep, or else users' words are cut too."""

MINIFY = "minify"
"""The stage that loses nothing."""

LEAST_CALL = 4
"""Tokens that a call or a result keeps at least: its id and separators are never cut."""

TRAILING_USERS = 8
"""Most user items in a row behind the newest round that count as part of it."""


@dataclass(frozen=True, slots=True)
class EnabledStages:
    """The stages that may be used."""

    minify: bool = True
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
    """Sizes with which the items of a view are compared at one boundary, in tokens without the fixed part.

    A compaction is due above ``high`` and needed above ``budget``. ``goal`` is what a fold comes down to: the low mark,
    or less if an allocation leaves the history less. ``clip_to`` is what cutting items short comes down to. A chat of
    small rounds comes down less far: ``extra`` is what its block may take beyond its shares.
    """

    high: int
    budget: int
    goal: int
    clip_to: int
    extra: int = 0


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
        """Tokens of the view's items at *boundary* after *compaction*, without the fixed part."""
        sums = self._layout.sums
        if compaction is None:
            return sums[boundary]
        cut, anchors = compaction.cut, compaction.anchors
        known, reduced = self._reduced
        if known is not compaction:  # compared here: the binary search of the schedule comes here at every step
            reduced = self._reduced_items(compaction)
        total = sums[boundary] - sums[cut] + compaction.block_tokens
        total += sum(self._items[i].tokens for i in anchors)
        for index, tokens in reduced.items():
            if cut <= index < boundary or index in anchors:
                total -= self._items[index].tokens - tokens
        return total

    def unread_excess(self, boundary: int, compaction: Compaction, levels: Levels) -> int:
        """Tokens of unread results that truncation can save as soon as they are read."""
        limits = self._rules.truncate
        if limits is None:
            return 0
        reduced = self._reduced_items(compaction)
        least = limits.tokens_in(levels.budget) + CLIP_FLOOR
        excess = 0
        for index in self.unread(boundary, compaction):
            item = self._items[index]
            if item.answers:
                excess += max(0, reduced.get(index, item.tokens) - least)
        return excess

    def unread(self, boundary: int, compaction: Compaction) -> range:
        """The items at the end of the view that no model has read."""
        return range(max(unread_from(self._items, boundary), compaction.cut), boundary)

    # The stages.

    def minify(self, boundary: int, base: Compaction) -> Compaction | None:
        """*base* with the white space gone from JSON in all results that are whole; None if there is none.

        Nothing is lost: what is left parses to the same values.
        """
        if not self._enabled.minify:
            return None
        reduced = self._reduced_items(base)
        minified = dict(base.minified)
        for index in range(base.cut, boundary):
            item = self._items[index]
            if index in reduced or item.facts is None or not item.answers:
                continue
            if spare := sum([result.spare for result in item.facts.results]):
                minified[index] = item.tokens - spare
        if len(minified) == len(base.minified):
            return None
        compaction = structs.replace(
            base,
            boundary=boundary,
            minified=tuple(sorted(minified.items())),
            stages=(*_stages_at(boundary, base), MINIFY),
        )
        return self._with_size(boundary, compaction)

    def prune(self, boundary: int, base: Compaction, need: int) -> Compaction | None:
        """*base* with tool results replaced by placeholders; None if that does not save *need* tokens."""
        if need <= 0:
            return None
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
            minified=tuple(each for each in base.minified if each[0] not in replaced),
            stages=(*_lossless(boundary, base), *stages),
        )
        return self._with_size(boundary, compaction)

    def fold(
        self, boundary: int, base: Compaction, limit: int, levels: Levels, *, bare: bool = False
    ) -> Compaction | None:
        """A fold at the oldest cut that reaches the goal, else at the newest cut that keeps the newest round.

        The block is charged at its cap in a view of *limit* tokens. A *bare* fold drops what it folds: its block is no
        more than a note. None if the stage is switched off, or if there is nothing to fold.
        """
        if bare and not self._enabled.drop:
            return None
        if not bare and not self._enabled.fold:
            return None
        cuts = self._layout.cuts
        first, end = bisect_right(cuts, base.cut), bisect_left(cuts, boundary)

        folded = cache(partial(self._folded, boundary, self._budget.affordable(limit), base, levels.extra, bare))
        newest = self._newest_round(first, end)
        if first <= newest < end - 1:
            most = levels.high
            if cuts[newest] < unread_from(self._items, boundary) < boundary:
                most = levels.budget  # a part of the newest round is unread
            if folded(cuts[newest]).view_tokens > most:
                newest = end - 1  # the newest round is too large to stay beside the user items that follow it
        if first > newest:
            return None
        smallest = folded(cuts[newest])
        if smallest.view_tokens > levels.goal:
            return smallest
        # The later the cut, the smaller the view.
        oldest = bisect_left(cuts, True, first, newest, key=lambda cut: folded(cut).view_tokens <= levels.goal)
        return folded(cuts[oldest])

    def truncate(
        self, boundary: int, base: Compaction, levels: Levels, target: int, among: range | None = None
    ) -> Compaction | None:
        """*base* with the largest tool results truncated to one level, no lower than needed to reach *target*.

        *among* are the results to truncate, by default those that the model has read. None if that saves nothing.
        Going down to the low mark would lose more of what the next step refers to than it saves: decision 4.
        """
        limits = self._rules.truncate
        if limits is None:
            return None
        total, read_to = self.view_tokens(boundary, base), unread_from(self._items, boundary)
        if among is None:
            among = range(base.cut, read_to)
        least = limits.tokens_in(levels.budget) + CLIP_FLOOR
        sizes = self._truncatable(base, among, least)
        if total <= target or not sizes:
            return None
        floors = dict.fromkeys(sizes, least)
        level = max(least, fair_level(sizes, floors, target - (total - sum(sizes.values()))))
        if among.stop <= read_to:
            level = max(least, min(level, limits.max_tokens + CLIP_FLOOR))
        truncated = {index: level + self._items[index].media for index, size in sizes.items() if size > level}
        compaction = structs.replace(
            base,
            boundary=boundary,
            truncations=tuple(sorted({**dict(base.truncations), **truncated}.items())),
            minified=tuple(each for each in base.minified if each[0] not in truncated),
            stages=tuple(dict.fromkeys((*_stages_at(boundary, base), "truncate"))),
        )
        return self._with_size(boundary, compaction)

    def clip(self, boundary: int, base: Compaction, target: int, needed: int) -> Compaction | None:
        """*base* with its largest items cut to one level, so that the view reaches *target*.

        None if that saves nothing. What users wrote and unread results are cut last, and only as far as *needed*.
        """
        if not self._enabled.clip:
            return None
        items = self._items
        total = self.view_tokens(boundary, base)
        if total <= target:
            return None
        sizes = self._clippable(boundary, base)
        floors = {i: min(size, items[i].media + items[i].sealed + CLIP_FLOOR) for i, size in sizes.items()}
        read_to = unread_from(items, boundary)
        users = {i for i in sizes if items[i].role == "user"}
        unread = {i for i in sizes if i >= read_to and items[i].answers}
        least = int(target * USERS_WHOLE)
        caps = clip_levels(sizes, floors, Spared(users, unread), total - target, total - needed, least)
        earlier = dict(base.clips)
        clips = earlier | {i: cap for i, cap in caps.items() if cap < sizes[i] or i in earlier}
        compaction = structs.replace(
            base,
            boundary=boundary,
            clips=tuple(sorted(clips.items())),
            truncations=tuple(each for each in base.truncations if each[0] not in clips),
            minified=tuple(each for each in base.minified if each[0] not in clips),
            stages=(*_stages_at(boundary, base), "clip"),
        )
        clipped = self._with_size(boundary, compaction)
        if clipped.view_tokens >= total:
            return None
        return clipped

    def with_smaller_block(self, boundary: int, compaction: Compaction, tokens: int) -> Compaction:
        """*compaction* with a block of at most *tokens*."""
        block = min(compaction.block_tokens, tokens)
        room, room_before = max(0, block - BLOCK_FRAME), max(1, compaction.block_tokens - BLOCK_FRAME)
        smaller = structs.replace(
            compaction,
            block_tokens=block,
            text_tokens=compaction.text_tokens * room // room_before,
            stages=tuple("drop" if stage == "fold" else stage for stage in compaction.stages),
        )
        return self._with_size(boundary, smaller)

    # Parts of the stages.

    def _with_size(self, boundary: int, compaction: Compaction) -> Compaction:
        return structs.replace(compaction, view_tokens=self.view_tokens(boundary, compaction))

    def _reduced_items(self, compaction: Compaction) -> dict[int, int]:
        """The tokens of every item that *compaction* made smaller, by index."""
        if self._reduced[0] is not compaction:
            replaced = {each.index: placeholder_tokens(self._items[each.index]) for each in compaction.placeholders}
            cut = dict((*compaction.minified, *compaction.truncations, *compaction.clips))
            self._reduced = compaction, {**cut, **replaced}
        return self._reduced[1]

    def _newest_round(self, first: int, end: int) -> int:
        """The index of the cut, from *first* to *end*, that starts the newest round; users behind it are part of it."""
        cuts, at = self._layout.cuts, end - 1
        while at > first and self._items[cuts[at]].role == "user" and end - at <= TRAILING_USERS:
            at -= 1
        return at

    def _folded(self, boundary: int, limit: int, base: Compaction, extra: int, bare: bool, cut: int) -> Compaction:
        """The fold of all items before *cut*; items from there on stay as they are after *base*."""
        anchors = self._layout.verbatim_users(boundary, cut)
        block, text = self._block_tokens(cut, anchors, limit, extra)
        stages: tuple[str, ...] = ("fold",)
        if bare:
            block, text, stages = BLOCK_FRAME, 0, ("drop",)
        compaction = Compaction(
            boundary,
            cut,
            block,
            text,
            anchors,
            clips=tuple(each for each in base.clips if each[0] >= cut or each[0] in anchors),
            stages=(*_lossless(boundary, base), *stages),
            placeholders=tuple(each for each in base.placeholders if each.index >= cut),
            truncations=tuple(each for each in base.truncations if each[0] >= cut),
            minified=tuple(each for each in base.minified if each[0] >= cut),
        )
        return self._with_size(boundary, compaction)

    def _block_tokens(self, cut: int, anchors: Sequence[int], limit: int, extra: int) -> tuple[int, int]:
        """The most that a block for the items before *cut* can take, and the part of it for digest and steps.

        Both depend only on the sizes of the folded items, on *limit*, what a view may cost, and on *extra*, what the
        block of a chat may take beyond its shares: it quotes both sides, so that not only the user's words count.
        """
        shares, allocation = self._rules.shares, self._rules.allocation
        fixed = self._budget.quantised_fixed
        users = self._layout.user_sums[cut] - sum(self._items[i].tokens for i in anchors)
        room = max(0, limit - fixed)
        pins = min(int(shares.pins * limit), users + users // 16)
        most = int(shares.block * room) + extra
        if extra:
            pins = min(int(shares.pins * limit) + extra, self._layout.sums[cut] // 2)
            most = min(most, self._quotable(cut))
        if allocation is not None:
            most = min(most, allocation.for_block(self._budget.window, fixed))
        text = min(int((shares.digest + shares.steps) * room), self._layout.sums[cut] // 2, most)
        return min(pins + text, most) + BLOCK_FRAME, text

    def _quotable(self, cut: int) -> int:
        """The tokens that quotes of a chat can fill: half of the newest folded items, from which they are chosen.

        What a larger block would leave unused is for the newest messages (decision 33).
        """
        sums = self._layout.sums
        return (sums[cut] - sums[max(0, cut - 2 * MOST_TEXTS)]) // 2

    def _truncatable(self, compaction: Compaction, among: range, least: int) -> dict[int, int]:
        """The text tokens of those results of *among* that may be truncated and are larger than *least*, by index."""
        truncated = dict((*compaction.minified, *compaction.truncations))
        reduced = {index for index, _ in compaction.clips} | {each.index for each in compaction.placeholders}
        sizes: dict[int, int] = {}
        for index in among:
            item = self._items[index]
            text = truncated.get(index, item.tokens) - item.media
            if text > least and index not in reduced and _has_known_results(item):
                sizes[index] = text
        return sizes

    def _clippable(self, boundary: int, compaction: Compaction) -> dict[int, int]:
        """The tokens of every item that a clip may cut, by index: all items of the view but system and placeholders."""
        reduced, replaced = self._reduced_items(compaction), {each.index for each in compaction.placeholders}
        sizes = {index: reduced.get(index, self._items[index].tokens) for index in compaction.anchors}
        for index in range(compaction.cut, boundary):
            item = self._items[index]
            if item.role != "system" and index not in replaced:
                sizes[index] = reduced.get(index, item.tokens)
        return sizes


def shortest(item: Item) -> int:
    """Tokens that *item* keeps however short it is cut."""
    if item.tokens <= CLIP_FLOOR:
        return item.tokens
    return item.media + item.sealed + LEAST_CALL * (len(item.calls) + len(item.answers))


def _lossless(boundary: int, compaction: Compaction) -> tuple[str, ...]:
    """The lossless stages of *compaction* if it was made at *boundary*."""
    if compaction.boundary != boundary or MINIFY not in compaction.stages:
        return ()
    return (MINIFY,)


def _stages_at(boundary: int, compaction: Compaction) -> tuple[str, ...]:
    """The stages of *compaction*; none if it was made at another boundary."""
    if compaction.boundary != boundary:
        return ()
    return compaction.stages


def _has_known_results(item: Item) -> bool:
    """True if *item* consists of tool results, and facts about each of them are known."""
    return item.facts is not None and len(item.facts.results) == len(item.answers) > 0
