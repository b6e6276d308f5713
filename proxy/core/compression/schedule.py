"""When a view is made smaller, and how far: a pure fold over places, continued from the newest event that was sent.

The fold sees weights only, never text: what stands for folded rounds is charged at its cap, which the weights give.
So a cut depends on no wording, a cold start costs one walk, and every replica finds the same cuts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from proxy.core.budget.figures import Figures, Marks, Shares
from proxy.core.budget.shares import Allocation
from proxy.core.compression.mild import Mild, Stretch, swaps
from proxy.core.compression.swap import Swap, charge
from proxy.core.compression.truncate import Truncate
from proxy.core.conversation.items import Item, Layout

CLIP_MARK = 0.65
"""A clip goes down to this share of the room: between the marks, so that more rounds fit before the next event."""

USER_FIRST = 0.1
"""What the user wrote stays whole while that leaves other items this share of the target each."""

CLIP_FLOOR = 48
"""Tokens an item keeps at least when it is clipped: its frame, the marker, and a line of its text."""

NOTE = 120
"""Tokens of the headings and closing words of a block."""


_TRAILING_USERS = 8
"""User items in a row behind the newest round that are looked past when its start is searched."""


@dataclass(frozen=True, slots=True)
class Event:
    """A compaction at ``place`` (a length of the conversation); items before ``cut`` are folded.

    ``anchors`` are the folded user items that stay verbatim all the same: the task and what was then the newest one.

    ``block`` are the tokens charged for what stands for them, of which ``text`` are meant for digest and steps;
    ``swaps`` are the kept items whose results gave way to a line, ``trims`` and ``clips`` the tokens that truncated and
    clipped items may keep, by index; ``after`` is the weight of the view at the event without the fixed part.
    ``stages`` names the rungs that were taken.
    """

    place: int
    cut: int
    block: int
    text: int = 0
    anchors: tuple[int, ...] = ()
    clips: tuple[tuple[int, int], ...] = ()
    after: int = 0
    stages: tuple[str, ...] = ()
    swaps: tuple[Swap, ...] = ()
    trims: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """What the present request asks of the schedule beside its figures.

    ``force`` compacts now whatever the pressure; ``limit`` replaces the budget by something smaller (an overflow told).
    ``peek`` asks what would be sent, and makes it no fact. ``wait``: the caller asked for it and waits for a summary.
    """

    force: bool = False
    limit: int | None = None
    peek: bool = False
    wait: bool = False


@dataclass(frozen=True, slots=True)
class Rungs:
    """Which rungs of the ladder may be taken."""

    fold: bool = True
    drop: bool = True
    clip: bool = True
    tools: bool = True


@dataclass(frozen=True, slots=True)
class Rules:
    """What the schedule goes by beside a request's own figures: the marks, the caps of a block, the rungs.

    ``allocation``, if there is one, makes an event go deeper than the low mark and its block smaller than the caps.
    """

    marks: Marks
    shares: Shares
    rungs: Rungs
    allocation: Allocation | None = None
    mild: Mild = field(default_factory=Mild)
    truncate: Truncate | None = field(default_factory=Truncate)


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

    def __init__(self, items: Sequence[Item], layout: Layout, figures: Figures, rules: Rules) -> None:
        self._items = items
        self._layout = layout
        self._figures = figures
        self._marks = rules.marks
        self._shares = rules.shares
        self._rungs = rules.rungs
        self._allocation = rules.allocation
        self._mild_rules = rules.mild
        self._truncate_rules = rules.truncate
        self._reduced: tuple[Event | None, dict[int, int]] = (None, {})
        self._sum = layout.sums
        self._users = layout.user_sums
        self._fixed = figures.stepped
        self._high = min(figures.high(self._marks, figures.lasting), figures.ceiling)

    def weight(self, place: int, event: Event | None) -> int:
        """Tokens of the view's items at *place*, the fixed part aside, when *event* was the last one."""
        if event is None:
            return self._sum[place]
        return self._kept(place, event)

    def run(self, since: Event | None, demand: Demand | None = None) -> Event | None:
        """The newest event of the conversation: *since* when nothing happened after it, ``None`` when nothing did."""
        figures, count, event = self._figures, self._layout.count, since
        places = self._layout.places
        at, end = bisect_left(places, (since.place if since else 0) + 1), bisect_left(places, count)
        while at < end:
            # A view only grows from place to place until the next event: the first place above the mark by halving.
            at = bisect_left(places, True, at, end, key=lambda place: self._over(place, event))
            if at < end:
                event = self._compact(places[at], event, figures.lasting) or event
                at += 1
        budget = min(figures.lasting, figures.budget)
        if demand is not None and demand.limit is not None:
            budget = min(budget, demand.limit)
        force = demand is not None and demand.force
        lasting = self._compact(count, event, figures.lasting) if self._over(count, event) else None
        if self.fits(lasting or event, budget) and not force:
            return lasting or event
        asked = demand is not None and demand.wait
        return self._compact(count, event, budget, forced=force, asked=asked) or lasting or event

    def fits(self, event: Event | None, budget: int) -> bool:
        """Whether the present view after *event* takes at most *budget*."""
        return self._fixed + self.weight(self._layout.count, event) <= budget

    def least(self) -> int:
        """Tokens that no view of the conversation goes below: its newest round, every item as short as can be.

        What is short is never made shorter, and no call of a round goes without the others.
        """
        count, cuts = self._layout.count, self._layout.cuts
        newest = self._items[cuts[-1] : count] if cuts else ()
        return self._fixed + sum(_least(item) for item in newest if item.role != "system")

    def _over(self, place: int, event: Event | None) -> bool:
        return self._fixed + self.weight(place, event) > self._high

    def _kept(self, place: int, event: Event) -> int:
        total = self._sum[place] - self._sum[event.cut] + event.block
        total += sum(self._items[i].tokens for i in event.anchors)
        for index, tokens in self._sizes(event).items():
            if event.cut <= index < place or index in event.anchors:
                total -= self._items[index].tokens - tokens
        return total

    def _sizes(self, event: Event) -> dict[int, int]:
        """What the items are charged that *event* made smaller."""
        if self._reduced[0] is not event:
            lines = {swap.index: charge(self._items[swap.index]) for swap in event.swaps}
            self._reduced = event, {**lines, **dict(event.trims), **dict(event.clips)}
        return self._reduced[1]

    def _event(self, place: int, cut: int, budget: int, before: Event | None) -> Event:
        """The fold at *place* that keeps what stands from *cut* on as it was after *before*, its block at its cap."""
        anchors = self._layout.anchors(place, cut)
        block, text = self._block(cut, anchors, budget)
        event = Event(place, cut, block, text, anchors, stages=("fold",))
        if before is not None:
            clips = tuple((i, t) for i, t in before.clips if i >= cut or i in anchors)
            trims = tuple((i, t) for i, t in before.trims if i >= cut)
            lines = tuple(swap for swap in before.swaps if swap.index >= cut)
            event = replace(event, clips=clips, trims=trims, swaps=lines)
        return replace(event, after=self._kept(place, event))

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

    def _compact(
        self, place: int, event: Event | None, budget: int, *, forced: bool = False, asked: bool = False
    ) -> Event | None:
        """The event at *place*: the first rung of the ladder that gets low enough, or the last one that helps.

        Who *asked* for it wants a summary, so that a fold is tried before what does without.
        Nothing is clipped while what the client sent fits the budget: above the high mark only folding pays.
        """
        fixed, ceiling = self._fixed, min(budget, self._figures.ceiling)
        low = self._figures.low(self._marks, budget) - fixed
        levels = _Levels(
            low,
            min(self._figures.high(self._marks, budget), ceiling) - fixed,
            ceiling - fixed,
            min(low, self._allocation.for_history(self._figures.window, fixed)) if self._allocation else low,
        )
        present = self.weight(place, event)
        mild = self._mild(place, event, present - levels.goal)
        folded = self._fold(place, event, budget, levels) if mild is None or asked else None
        if mild is not None and not _helps(folded, present):
            return mild
        target = self._clip_target(levels)
        # Nothing is cut short for the sake of a fold that saves nothing, while all of it fits.
        if target < (folded.after if folded else present) and (present > levels.budget or _helps(folded, present)):
            folded = self._truncate(place, folded or event, levels.budget, target) or folded
        if not self._rungs.fold and mild is None and (folded.after if folded else present) > levels.high:
            folded = self._dropped(place, event, budget, levels, target) or folded
        if folded is not None and "fold" in folded.stages and folded.after > levels.high and self._rungs.drop:
            folded = self._smaller_block(place, folded, target)
        if not _helps(folded, present):
            folded = None
        kept = folded.after if folded else present
        if kept <= levels.budget and not (forced and folded is None):
            return folded
        return self._clip(place, folded or event, target) or folded

    def _dropped(self, place: int, before: Event | None, budget: int, levels: _Levels, target: int) -> Event | None:
        """A bare fold, and what it keeps truncated where that alone is too big."""
        dropped = self._fold(place, before, budget, levels, bare=True)
        if dropped is None or dropped.after <= target:
            return dropped
        return self._truncate(place, dropped, levels.budget, target) or dropped

    def _smaller_block(self, place: int, event: Event, target: int) -> Event:
        """*event* with its block cut to what is left under *target*, at least to a quarter of it or a note."""
        left = max(target - (event.after - event.block), target // 4, NOTE)
        block = min(event.block, left)
        text = event.text * max(0, block - NOTE) // max(1, event.block - NOTE)
        stages = ("drop", *event.stages[1:])
        smaller = replace(event, block=block, text=text, stages=stages)
        return replace(smaller, after=self._kept(place, smaller))

    def _clip_target(self, levels: _Levels) -> int:
        share = (CLIP_MARK - self._marks.low) / (self._marks.high - self._marks.low)
        return int(levels.low + max(0.0, share) * (levels.high - levels.low))

    def _mild(self, place: int, before: Event | None, need: int) -> Event | None:
        """*before* with old tool results replaced by a line each, where that saves *need* tokens."""
        base = before or Event(place, 0, 0)
        stretch = Stretch(self._items, self._layout, base.cut, place, base.swaps)
        found = swaps(stretch, need, self._figures.window, self._mild_rules) if need > 0 else None
        if found is None:
            return None
        gone = {swap.index for swap in found[0]}
        event = replace(
            base,
            place=place,
            swaps=tuple(sorted((*base.swaps, *found[0]))),
            trims=tuple(trim for trim in base.trims if trim[0] not in gone),
            clips=tuple(clip for clip in base.clips if clip[0] not in gone),
            stages=found[1],
        )
        return replace(event, after=self._kept(place, event))

    def _truncate(self, place: int, before: Event | None, room: int, target: int) -> Event | None:
        """*before* with the biggest kept tool results truncated to one level, no lower than needed to reach *target*.

        Going all the way down to the low mark would cost more of what the next step refers to than it wins.
        """
        rules, base = self._truncate_rules, before or Event(place, 0, 0)
        if rules is None:
            return None
        sizes, total = self._sizes(base), self._kept(place, base)
        least, found = rules.tokens(room) + CLIP_FLOOR, {}
        for index in range(base.cut, place):
            item = self._items[index]
            known = item.facts is not None and len(item.facts.results) == len(item.answers) > 0
            if known and not item.media and item.tokens > least and index not in sizes:
                found[index] = item.tokens
        if total <= target or not found:
            return None
        most = _level(found, dict.fromkeys(found, least), target - (total - sum(found.values())))
        most = max(least, min(most, rules.most + CLIP_FLOOR))
        trims = {**dict(base.trims), **{index: most for index, tokens in found.items() if tokens > most}}
        stages = (*(base.stages if before and before.place == place else ()), "truncate")
        event = replace(base, place=place, trims=tuple(sorted(trims.items())), stages=stages)
        return replace(event, after=self._kept(place, event))

    def _fold(
        self, place: int, before: Event | None, budget: int, levels: _Levels, *, bare: bool = False
    ) -> Event | None:
        """A fold at the oldest cut that reaches the low mark, else at the newest one that keeps the newest round.

        A *bare* one drops what it folds: a note stands for it.
        """
        if not (self._rungs.drop if bare else self._rungs.fold):
            return None
        cuts = self._layout.cuts
        first, end = bisect_right(cuts, before.cut if before else 0), bisect_left(cuts, place)

        def made(at: int) -> Event:
            event = self._event(place, cuts[at], budget, before)
            if not bare:
                return event
            noted = replace(event, block=NOTE, text=0, stages=("drop",))
            return replace(noted, after=self._kept(place, noted))

        def size(at: int) -> int:
            return made(at).after

        floor = end - 1
        while floor > first and self._items[cuts[floor]].role == "user" and end - floor <= _TRAILING_USERS:
            floor -= 1
        if first <= floor < end - 1 and size(floor) > levels.high:
            floor = end - 1  # the newest round is too big to stay beside the user item that follows it
        if first > floor:
            return None
        at = floor
        if size(floor) <= levels.goal:
            at = bisect_left(range(first, floor + 1), True, key=lambda i: size(i) <= levels.goal) + first
        return made(at)

    def _clip(self, place: int, event: Event | None, target: int) -> Event | None:
        """*event* with the largest kept items cut to one level, so that the view reaches *target*."""
        if not self._rungs.clip:
            return None
        event = event or Event(place, 0, 0)
        clips, reduced = dict(event.clips), self._sizes(event)
        gone = {swap.index for swap in event.swaps}
        total = self._kept(place, event)
        if total <= target:
            return None
        indexes = [*event.anchors]
        indexes += [i for i in range(event.cut, place) if self._items[i].role != "system" and i not in gone]
        sizes = {i: reduced.get(i, self._items[i].tokens) for i in indexes}
        floors = {i: min(sizes[i], self._items[i].media + self._items[i].sealed + CLIP_FLOOR) for i in indexes}
        room = target - (total - sum(sizes.values()))
        spared = {i for i in indexes if self._items[i].role == "user"}
        others = {i: size for i, size in sizes.items() if i not in spared}
        level = _level(others, floors, room - sum(sizes[i] for i in spared))
        if level < target * USER_FIRST:
            spared, level = set(), _level(sizes, floors, room)
        for index in indexes:
            keep = sizes[index] if index in spared else max(floors[index], min(sizes[index], level))
            if keep < sizes[index] or index in clips:
                clips[index] = keep
        trims = tuple(trim for trim in event.trims if trim[0] not in clips)
        stages = (*(event.stages if event.place == place else ()), "clip")
        clipped = replace(event, place=place, clips=tuple(sorted(clips.items())), trims=trims, stages=stages)
        after = self._kept(place, clipped)
        return replace(clipped, after=after) if after < total else None


def _least(item: Item) -> int:
    return item.tokens if item.tokens <= CLIP_FLOOR else item.media + item.sealed


def _helps(event: Event | None, present: int) -> bool:
    return event is not None and event.after < present


def _level(sizes: Mapping[int, int], floors: Mapping[int, int], room: int) -> int:
    """The largest common cap for *sizes*, none below its floor, that takes at most *room*; at least zero."""
    low, high = 0, max(sizes.values(), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(max(floors[i], min(size, middle)) for i, size in sizes.items()) <= room:
            low = middle
        else:
            high = middle - 1
    return low
