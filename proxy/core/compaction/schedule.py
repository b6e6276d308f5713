"""When a view is made smaller, and how far: a pure fold over places, continued from the newest event that was sent.

The fold sees weights only, never text: what stands for folded rounds is charged at its cap, which the weights give.
So a cut depends on no wording, a cold start costs one walk, and every replica finds the same cuts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from msgspec import structs

from proxy.core.compaction.prune import PrunePassRules, PruneRange, prune_pass
from proxy.core.compaction.record import Compaction, placeholder_tokens
from proxy.core.compaction.truncate import Spared, TruncateLimits, clip_levels, fair_level
from proxy.core.conversation import Item, Layout, unread_from
from proxy.core.tokens.budget import Allocation, Marks, Shares, TokenBudget

CLIP_MARK = 0.65
"""A clip goes down to this share of the room: between the marks, so that more rounds fit before the next event."""

USER_FIRST = 0.1
"""What the user wrote stays whole while that leaves other items this share of the target each."""

CLIP_FLOOR = 48
"""Tokens an item keeps at least when it is clipped: its frame, the marker, and a line of its text."""

NOTE = 120
"""Tokens of the headings and closing words of a block."""

LEAST_SAVED = 1 / 8
"""Share of its view that a compaction which was only asked for has to save: less is not worth a broken prefix."""


LowerOutput = Literal["never", "last", "first"]
"""When a request's own output figure may be lowered."""

MaxLoss = Literal["none", "no_drop", "any"]
"""How much a view may lose: no new compaction at all, nothing dropped or clipped by a new one, or whatever it takes."""

_TRAILING_USERS = 8
"""User items in a row behind the newest round that are looked past when its start is searched."""


@dataclass(frozen=True, slots=True)
class EnabledStages:
    """Which rungs of the ladder may be taken."""

    fold: bool = True
    drop: bool = True
    clip: bool = True
    tools: bool = True


@dataclass(frozen=True, slots=True)
class CompactionRules:
    """What the schedule goes by beside a request's own figures: the marks, the caps of a block, the rungs.

    ``allocation``, if there is one, makes an event go deeper than the low mark and its block smaller than the caps.
    """

    marks: Marks
    shares: Shares
    enabled_stages: EnabledStages
    allocation: Allocation | None = None
    prune_pass: PrunePassRules = field(default_factory=PrunePassRules)
    truncate: TruncateLimits | None = field(default_factory=TruncateLimits)


@dataclass(frozen=True, slots=True)
class CompactionTarget:
    """What a view must reach.

    ``limit`` is the most it may take, None for the budget. ``reserve`` replaces the budget's default reserve.
    ``force`` compacts although the request fits; ``dry_run`` stores nothing; ``replaces``: the record at this boundary
    may be replaced. ``tries`` is how often verification may still tighten the limit. ``wait_for_summary``: the caller
    asked for a compaction, to ``share`` of the room, or to half of the low mark if that is None.
    """

    limit: int | None = None
    reserve: int | None = None
    force: bool = False
    max_loss: MaxLoss = "any"
    lower_output: LowerOutput = "last"
    dry_run: bool = False
    wait_for_summary: bool = False
    share: float | None = None
    replaces: bool = False
    tries: int = 2
    keep_addition: bool = True

    @property
    def is_plain(self) -> bool:
        """True if nothing is asked but that the view fits its budget."""
        return not self.force and self.limit is None


NO_TARGET: Final = CompactionTarget()


@dataclass(frozen=True, slots=True)
class _Levels:
    """The marks and the budget of one place, without the fixed part."""

    low: int
    high: int
    budget: int
    goal: int
    """What a fold should come down to: the low mark, or less where an allocation leaves the history less."""


class Schedule:
    """Weights and structure of one conversation, ready to be asked for events."""

    def __init__(self, items: Sequence[Item], layout: Layout, figures: TokenBudget, rules: CompactionRules) -> None:
        self._items = items
        self._layout = layout
        self._figures = figures
        self._marks = rules.marks
        self._shares = rules.shares
        self._rungs = rules.enabled_stages
        self._allocation = rules.allocation
        self._mild_rules = rules.prune_pass
        self._truncate_rules = rules.truncate
        self._reduced: tuple[Compaction | None, dict[int, int]] = (None, {})
        self._sum = layout.sums
        self._users = layout.user_sums
        self._fixed = figures.quantised_fixed
        self._high = min(figures.high(self._marks, figures.baseline), figures.ceiling)

    def view_tokens(self, place: int, event: Compaction | None) -> int:
        """Tokens of the view's items at *place*, the fixed part aside, when *event* was the last one."""
        if event is None:
            return self._sum[place]
        return self._kept(place, event)

    def newest_compaction(self, since: Compaction | None, target: CompactionTarget = NO_TARGET) -> Compaction | None:
        """The newest event of the conversation: *since* when nothing happened after it, ``None`` when nothing did."""
        figures, count, event = self._figures, self._layout.count, since
        places = self._layout.places
        at, end = bisect_left(places, (since.boundary if since else 0) + 1), bisect_left(places, count)
        while at < end:
            # A view only grows from place to place until the next event: the first place above the mark by halving.
            at = bisect_left(places, True, at, end, key=lambda place: self._over(place, event))
            if at < end:
                event = self._compact(places[at], event, figures.baseline) or event
                at += 1
        budget = min(figures.baseline, figures.budget)
        if target.limit is not None:
            budget = min(budget, target.limit)
        if target.wait_for_summary:
            asked = self._asked(event, budget, target.share)
            if asked is not None and self.fits(asked, budget):
                return asked
        # What was compacted at this very place stays as it is while it fits: the same request gets the same view.
        due = self._over(count, event) and (event is None or event.boundary < count)
        lasting = self._compact(count, event, figures.baseline) if due else None
        force = target.force and not target.wait_for_summary
        if self.fits(lasting or event, budget) and not force:
            return lasting or event
        further = target.force and target.limit is not None
        return self._compact(count, event, budget, further=further) or lasting or event

    def fits(self, event: Compaction | None, budget: int) -> bool:
        """Whether the present view after *event* takes at most *budget*."""
        return self._fixed + self.view_tokens(self._layout.count, event) <= budget

    def minimum_tokens(self) -> int:
        """Tokens that no view of the conversation goes below: its newest round, every item as short as can be.

        What is short is never made shorter, and no call of a round goes without the others.
        """
        count, cuts = self._layout.count, self._layout.cuts
        newest = self._items[cuts[-1] : count] if cuts else ()
        return self._fixed + sum(_least(item) for item in newest if item.role != "system")

    def _over(self, place: int, event: Compaction | None) -> bool:
        return self._fixed + self.view_tokens(place, event) > self._high

    def _kept(self, place: int, event: Compaction) -> int:
        total = self._sum[place] - self._sum[event.cut] + event.block_tokens
        total += sum(self._items[i].tokens for i in event.anchors)
        for index, tokens in self._sizes(event).items():
            if event.cut <= index < place or index in event.anchors:
                total -= self._items[index].tokens - tokens
        return total

    def _sizes(self, event: Compaction) -> dict[int, int]:
        """What the items are charged that *event* made smaller."""
        if self._reduced[0] is not event:
            lines = {swap.index: placeholder_tokens(self._items[swap.index]) for swap in event.placeholders}
            self._reduced = event, {**lines, **dict(event.truncations), **dict(event.clips)}
        return self._reduced[1]

    def _event(self, place: int, cut: int, budget: int, before: Compaction | None) -> Compaction:
        """The fold at *place* that keeps what stands from *cut* on as it was after *before*, its block at its cap."""
        anchors = self._layout.anchors(place, cut)
        block, text = self._block(cut, anchors, budget)
        event = Compaction(place, cut, block, text, anchors, stages=("fold",))
        if before is not None:
            clips = tuple((i, t) for i, t in before.clips if i >= cut or i in anchors)
            trims = tuple((i, t) for i, t in before.truncations if i >= cut)
            lines = tuple(swap for swap in before.placeholders if swap.index >= cut)
            event = structs.replace(event, clips=clips, truncations=trims, placeholders=lines)
        return structs.replace(event, view_tokens=self._kept(place, event))

    def _block(self, cut: int, anchors: Sequence[int], budget: int) -> tuple[int, int]:
        """The most a block for the items before *cut* can take, and how much of it is for digest and steps.

        A function of the folded prefix's weights and the budget only.
        """
        shares, budget = self._shares, self._figures.spendable(budget)
        room = max(0, budget - self._fixed)
        users = self._users[cut] - sum(self._items[i].tokens for i in anchors)
        pins = min(int(shares.pins * budget), users + users // 16)
        most = int(shares.block * room)
        if self._allocation is not None:
            most = min(most, self._allocation.for_block(self._figures.window, self._fixed))
        text = min(int((shares.digest + shares.steps) * budget), self._sum[cut] // 2, most)
        return min(pins + text, most) + NOTE, text

    def _asked(self, before: Compaction | None, budget: int, share: float | None) -> Compaction | None:
        """An event that the caller asked for: down to *share* of the room, by default half of the low mark.

        ``None`` if it would save hardly anything. Nothing is cut short, since nothing has to be.
        """
        low, place, fixed = self._marks.low, self._layout.count, self._fixed
        share = low / 2 if share is None else share
        # Its block is as much smaller than that of other events as its view is.
        room = self._figures.spendable(budget) - fixed
        goal, for_block = int(share * room), fixed + int(min(1.0, share / low) * room)
        levels = replace(self._levels(place, budget), goal=goal)
        present = self.view_tokens(place, before)
        # A caller that asks wants a summary: a fold comes before what does without.
        for found in (self._fold(place, before, for_block, levels), self._mild(place, before, present - goal)):
            if found is not None and present - found.view_tokens >= max(1, int(LEAST_SAVED * present)):
                return found
        return None

    def _levels(self, place: int, budget: int) -> _Levels:
        """The marks at *place*. The present place may use all that its own request leaves, past ones the ceiling."""
        fixed, figures = self._fixed, self._figures
        ceiling = min(budget, figures.room if place == self._layout.count else figures.ceiling)
        low = figures.low(self._marks, budget) - fixed
        return _Levels(
            low,
            min(figures.high(self._marks, budget), ceiling) - fixed,
            ceiling - fixed,
            min(low, self._allocation.for_history(figures.window, fixed)) if self._allocation else low,
        )

    def _compact(
        self, place: int, event: Compaction | None, budget: int, *, further: bool = False
    ) -> Compaction | None:
        """The event at *place*: the first rung of the ladder that gets low enough, or the last one that helps.

        *further* goes on where the present view was refused although it fits *budget* by our count.
        Nothing is clipped while what the client sent fits the budget: above the high mark only folding pays.
        """
        levels, present = self._levels(place, budget), self.view_tokens(place, event)
        target = self._clip_target(levels)
        if event is not None and (relieved := self._relieved(place, event, levels, target)):
            return relieved
        # What unread results take for the time being folds nothing that has room beside them.
        goal = max(levels.goal, min(levels.goal + self._passing(place, event, levels), levels.budget))
        mild = self._mild(place, event, present - goal)
        if mild is not None:
            return mild
        folded = self._fold(place, event, budget, replace(levels, goal=goal))
        # Nothing is cut short for the sake of a fold that saves nothing, while all of it fits.
        if target < (folded.view_tokens if folded else present) and (
            present > levels.budget or _helps(folded, present)
        ):
            folded = self._truncate(place, folded or event, levels, target) or folded
        if not self._rungs.fold and (folded.view_tokens if folded else present) > levels.high:
            folded = self._dropped(place, event, budget, levels, target) or folded
        if folded is not None and "fold" in folded.stages and self._rungs.drop:
            folded = self._smaller_block(place, folded, levels, target)
        if (folded.view_tokens if folded else present) > levels.budget:
            base = folded or event
            unread = range(max(base.cut if base else 0, unread_from(self._items, place)), place)
            folded = self._truncate(place, base, levels, levels.budget, unread) or folded
        if folded is not None and "fold" in folded.stages and folded.view_tokens > levels.budget and self._rungs.drop:
            folded = self._with_block(
                place, folded, max(NOTE, target // 4, folded.block_tokens - folded.view_tokens + target)
            )
        if not _helps(folded, present):
            folded = None
        kept = folded.view_tokens if folded else present
        if kept <= levels.budget and not (further and folded is None):
            return folded
        room = levels.budget if kept > levels.budget else target
        return self._clip(place, folded or event, target, room) or folded

    def _dropped(
        self, place: int, before: Compaction | None, budget: int, levels: _Levels, target: int
    ) -> Compaction | None:
        """A bare fold, and what it keeps truncated where that alone is too big."""
        dropped = self._fold(place, before, budget, levels, bare=True)
        if dropped is None or dropped.view_tokens <= target:
            return dropped
        return self._truncate(place, dropped, levels, target) or dropped

    def _smaller_block(self, place: int, event: Compaction, levels: _Levels, target: int) -> Compaction:
        """*event* with a smaller block if the view would stay above the high mark, or if that leaves results whole.

        What unread results take beyond a truncated one's share is not counted for the mark: it is gone once they are
        read. For them the block gives way down to a note, but only if they fit whole then.
        """
        passing = self._passing(place, event, levels)
        if event.view_tokens - passing > levels.high:
            left = target - (event.view_tokens - passing - event.block_tokens)
            event = self._with_block(place, event, max(left, target // 4, NOTE))
        left = levels.budget - (event.view_tokens - event.block_tokens)
        if passing and NOTE <= left < event.block_tokens:
            event = self._with_block(place, event, left)
        return event

    def _with_block(self, place: int, event: Compaction, left: int) -> Compaction:
        """*event* with its block cut to *left* tokens."""
        block = min(event.block_tokens, left)
        text = event.text_tokens * max(0, block - NOTE) // max(1, event.block_tokens - NOTE)
        stages = ("drop", *event.stages[1:])
        smaller = structs.replace(event, block_tokens=block, text_tokens=text, stages=stages)
        return structs.replace(smaller, view_tokens=self._kept(place, smaller))

    def _passing(self, place: int, event: Compaction | None, levels: _Levels) -> int:
        """Tokens that unread results take now and can be relieved of once they are read."""
        rules = self._truncate_rules
        if rules is None:
            return 0
        sizes = self._sizes(event) if event else {}
        least = rules.tokens_in(levels.budget) + CLIP_FLOOR
        unread = range(max(event.cut if event else 0, unread_from(self._items, place)), place)
        return sum(max(0, sizes.get(i, self._items[i].tokens) - least) for i in unread if self._items[i].answers)

    def _clip_target(self, levels: _Levels) -> int:
        share = (CLIP_MARK - self._marks.low) / (self._marks.high - self._marks.low)
        return int(levels.low + max(0.0, share) * (levels.high - levels.low))

    def _mild(self, place: int, before: Compaction | None, need: int) -> Compaction | None:
        """*before* with old tool results replaced by a line each, where that saves *need* tokens."""
        base = before or Compaction(place, 0, 0)
        stretch = PruneRange(self._items, self._layout, base.cut, place, base.placeholders, self._sizes(base))
        found = prune_pass(stretch, need, self._figures.window, self._mild_rules) if need > 0 else None
        if found is None:
            return None
        gone = {swap.index for swap in found[0]}
        event = structs.replace(
            base,
            boundary=place,
            placeholders=tuple(sorted((*base.placeholders, *found[0]))),
            truncations=tuple(trim for trim in base.truncations if trim[0] not in gone),
            clips=tuple(clip for clip in base.clips if clip[0] not in gone),
            stages=found[1],
        )
        return structs.replace(event, view_tokens=self._kept(place, event))

    def _relieved(self, place: int, event: Compaction, levels: _Levels, target: int) -> Compaction | None:
        """*event* with those results truncated that it left whole to be read, if they are and that reaches *target*.

        The prompt stays the same up to the first of them, which a fold would begin anew.
        """
        start = max(event.cut, unread_from(self._items, event.boundary))
        read = range(start, min(event.boundary, unread_from(self._items, place)))
        found = self._truncate(place, event, levels, target, read)
        return found if found is not None and found.view_tokens <= target else None

    def _truncate(
        self, place: int, before: Compaction | None, levels: _Levels, target: int, among: range | None = None
    ) -> Compaction | None:
        """*before* with the biggest kept tool results truncated to one level, no lower than needed to reach *target*.

        *among* says which ones; by default those that the model has read.
        Going all the way down to the low mark would cost more of what the next step refers to than it wins.
        """
        rules, base = self._truncate_rules, before or Compaction(place, 0, 0)
        if rules is None:
            return None
        total, border = self._kept(place, base), unread_from(self._items, place)
        least = rules.tokens_in(levels.budget) + CLIP_FLOOR
        found = self._results(base, range(base.cut, border) if among is None else among, least)
        if total <= target or not found:
            return None
        most = max(least, fair_level(found, dict.fromkeys(found, least), target - (total - sum(found.values()))))
        if among is None or among.stop <= border:
            most = max(least, min(most, rules.max_tokens + CLIP_FLOOR))
        cut = {index: most + self._items[index].media for index, tokens in found.items() if tokens > most}
        trims = {**dict(base.truncations), **cut}
        earlier = base.stages if before and before.boundary == place else ()
        stages = tuple(dict.fromkeys((*earlier, "truncate")))
        event = structs.replace(base, boundary=place, truncations=tuple(sorted(trims.items())), stages=stages)
        return structs.replace(event, view_tokens=self._kept(place, event))

    def _results(self, event: Compaction, stretch: range, least: int) -> dict[int, int]:
        """The text tokens of the results in *stretch* that may be truncated and have more than *least*, by index."""
        trims = dict(event.truncations)
        gone = {index for index, _ in event.clips} | {swap.index for swap in event.placeholders}
        found = {}
        for index in stretch:
            item = self._items[index]
            known = item.facts is not None and len(item.facts.results) == len(item.answers) > 0
            text = trims.get(index, item.tokens) - item.media
            if known and index not in gone and text > least:
                found[index] = text
        return found

    def _fold(
        self, place: int, before: Compaction | None, budget: int, levels: _Levels, *, bare: bool = False
    ) -> Compaction | None:
        """A fold at the oldest cut that reaches the low mark, else at the newest one that keeps the newest round.

        A *bare* one drops what it folds: a note stands for it.
        """
        if not (self._rungs.drop if bare else self._rungs.fold):
            return None
        cuts = self._layout.cuts
        first, end = bisect_right(cuts, before.cut if before else 0), bisect_left(cuts, place)

        def made(at: int) -> Compaction:
            event = self._event(place, cuts[at], budget, before)
            if not bare:
                return event
            noted = structs.replace(event, block_tokens=NOTE, text_tokens=0, stages=("drop",))
            return structs.replace(noted, view_tokens=self._kept(place, noted))

        def size(at: int) -> int:
            return made(at).view_tokens

        floor = end - 1
        while floor > first and self._items[cuts[floor]].role == "user" and end - floor <= _TRAILING_USERS:
            floor -= 1
        unread = cuts[floor] < unread_from(self._items, place) < place if first <= floor < end - 1 else False
        if first <= floor < end - 1 and size(floor) > (levels.budget if unread else levels.high):
            floor = end - 1  # the newest round is too big to stay beside the user item that follows it
        if first > floor:
            return None
        at = floor
        if size(floor) <= levels.goal:
            at = bisect_left(range(first, floor + 1), True, key=lambda i: size(i) <= levels.goal) + first
        return made(at)

    def _clip(self, place: int, event: Compaction | None, target: int, room: int) -> Compaction | None:
        """*event* with the largest kept items cut to one level, so that the view reaches *target*.

        What users wrote and unread results are cut last, and those results down to *room* only.
        """
        if not self._rungs.clip:
            return None
        event = event or Compaction(place, 0, 0)
        sizes = self._clippable(place, event)
        total = self._kept(place, event)
        if total <= target:
            return None
        items = self._items
        floors = {i: min(sizes[i], items[i].media + items[i].sealed + CLIP_FLOOR) for i in sizes}
        border = unread_from(items, place)
        users = {i for i in sizes if items[i].role == "user"}
        unread = {i for i in sizes if i >= border and items[i].answers}
        caps = clip_levels(sizes, floors, Spared(users, unread), total - target, total - room, int(target * USER_FIRST))
        earlier = dict(event.clips)
        clips = earlier | {i: cap for i, cap in caps.items() if cap < sizes[i] or i in earlier}
        trims = tuple(trim for trim in event.truncations if trim[0] not in clips)
        stages = (*(event.stages if event.boundary == place else ()), "clip")
        clipped = structs.replace(
            event, boundary=place, clips=tuple(sorted(clips.items())), truncations=trims, stages=stages
        )
        after = self._kept(place, clipped)
        return structs.replace(clipped, view_tokens=after) if after < total else None

    def _clippable(self, place: int, event: Compaction) -> dict[int, int]:
        """The tokens of every item that a clip may cut, by index: what stays and did not give way to a line."""
        reduced, gone = self._sizes(event), {swap.index for swap in event.placeholders}
        kept = [i for i in range(event.cut, place) if self._items[i].role != "system" and i not in gone]
        return {i: reduced.get(i, self._items[i].tokens) for i in (*event.anchors, *kept)}


def _least(item: Item) -> int:
    return item.tokens if item.tokens <= CLIP_FLOOR else item.media + item.sealed


def _helps(event: Compaction | None, present: int) -> bool:
    return event is not None and event.view_tokens < present
