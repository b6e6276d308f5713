"""When a view is made smaller, and how far.

Theory of operation
===================

A client sends its whole conversation with every request. The schedule finds the compaction that the view of this
request is made with. It is a pure function of token counts: the same items, budget and last compaction give the same
answer in every process. It never sees a text. The block that will stand for folded rounds is not written yet when the
cut is chosen, so it is charged at the most it may take (decision 1). A cut depends on no wording.

Levels. A view is measured against levels inside the token budget, which is what the input may use beside the answer:

      0 ......... low ......... soft ......... high ... budget ........ window
                  40 %          60 %           90 %           | reserve |

A compaction is due above the high mark, and it goes down to the low mark. Above the soft mark a summary is prepared;
that is not done here. Only above the budget are items clipped: between high mark and budget a view loses nothing that
the model is looking at (decision 2).

Compactions are rare and deep. A provider caches the beginning of a prompt, and a compaction changes it: everything
behind the cut is read again at the full price. A view that lost a little with every request would never be read from
the cache. So nothing happens up to the high mark, and half of the budget is free after a compaction. Until the next one
the view only grows at its end.

Boundaries. A boundary is a length of the conversation at which a request could have ended. The schedule walks over the
boundaries behind the last compaction. At the first one above the high mark it makes a compaction, and it walks on from
there. A view grows from boundary to boundary, so the first one above the mark is found by halving. Past boundaries are
measured against the *baseline* budget, which does not depend on this request's `max_tokens`: otherwise another
`max_tokens` would move cuts that were sent long ago. Only the last boundary, the end of this request, is measured
against what the request itself leaves.

A compaction that was sent is a fact. The walk starts from it and never reconsiders it. A later one may fold more, cut
more items short, or replace more results; it never brings anything back.

      where the walk is         what holds there                      next
      a past boundary           not above the high mark               the next boundary
                                above it                              compacts at the baseline; the next boundary
      the end of the request    a compaction was requested, saves     ends with that compaction
                                an eighth, and the view fits
                                above the high mark, and the last     compacts at the baseline; stays here
                                compaction was made elsewhere
                                the view fits, and nothing is forced  ends
                                it does not fit, or it is forced      compacts at the target's limit; ends

Stages. One compaction tries the stages in this order, and stops as soon as one is enough:

      1. truncate the results that the last compaction left whole because no model had read them
      2. prune: results that a later one repeats, then old results, each replaced by a line
      3. fold the oldest rounds into a block, no more of them than needed for the low mark
      4. truncate large results that the model has read
      5. drop: rounds without a block if folding is switched off, else a smaller block
      6. truncate unread results, only if the budget requires it
      7. clip whatever is largest, only if the budget requires it; what users wrote is clipped last

The newest round always stays, and no stage separates a call from its results. If even the last stage does not reach the
budget, the planner decides what happens: the schedule returns the best it found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from proxy.core.compaction.record import Compaction
from proxy.core.compaction.stages import BLOCK_FRAME, CompactionRules, Levels, Stages, shortest
from proxy.core.conversation import Item, Layout
from proxy.core.tokens.budget import TokenBudget

CLIP_MARK = 0.65
"""Items are cut short down to this share of the room, between the marks: more rounds fit before the next compaction."""

LEAST_SAVED = 1 / 8
"""Share of its view that a requested compaction has to save: less is not worth a broken prefix."""

LowerOutput = Literal["never", "last", "first"]
"""When a request's own output figure may be lowered."""

MaxLoss = Literal["none", "no_drop", "any"]
"""How much a view may lose: no new compaction at all, nothing dropped or clipped by a new one, or whatever it takes."""


@dataclass(frozen=True, slots=True)
class CompactionTarget:
    """What a view must reach.

    ``limit`` is the most it may take, None for the budget. ``reserve`` replaces the budget's default reserve.
    ``force`` compacts although the request fits; ``dry_run`` stores nothing; ``replaces``: the record at this boundary
    may be replaced. ``tries`` is how often verification may still tighten the limit. ``wait_for_summary``: the caller
    requested a compaction, to ``share`` of the room, or to half of the low mark if that is None.
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
        """True if nothing is required but that the view fits its budget."""
        return not self.force and self.limit is None


NO_TARGET: Final = CompactionTarget()


class Schedule:
    """The compactions of one conversation under one budget.

    ``view_tokens(boundary, compaction)`` gives the tokens of the view's items, the fixed part aside.
    """

    def __init__(self, items: Sequence[Item], layout: Layout, budget: TokenBudget, rules: CompactionRules) -> None:
        self._items = items
        self._layout = layout
        self._budget = budget
        self._marks = rules.marks
        self._enabled = rules.enabled_stages
        self._allocation = rules.allocation
        self._stages = Stages(items, layout, budget, rules)
        self._fixed = budget.quantised_fixed
        self._high = min(budget.high(rules.marks, budget.baseline), budget.ceiling) - self._fixed
        self.view_tokens = self._stages.view_tokens  # an attribute, since halving calls it for every step

    def newest_compaction(self, last: Compaction | None, target: CompactionTarget = NO_TARGET) -> Compaction | None:
        """The newest compaction of the conversation.

        *last* itself if nothing happened after it, None if nothing ever did.
        """
        last = self._past(last)
        limit = min(self._budget.baseline, self._budget.input)
        if target.limit is not None:
            limit = min(limit, target.limit)
        if not target.wait_for_summary:
            return self._present(last, limit, target, force=target.force)
        requested = self._requested(last, limit, target.share)
        if requested is not None and self.fits(requested, limit):
            return requested
        return self._present(last, limit, target, force=False)

    def fits(self, compaction: Compaction | None, limit: int) -> bool:
        """True if the view of this request takes at most *limit* tokens after *compaction*."""
        return self._fixed + self.view_tokens(self._layout.count, compaction) <= limit

    def minimum_tokens(self) -> int:
        """Tokens that no view of the conversation goes below: its newest round, every item as short as can be.

        Short items are never cut, and no call of a round goes without the others.
        """
        count, cuts = self._layout.count, self._layout.cuts
        newest = self._items[cuts[-1] : count] if cuts else ()
        return self._fixed + sum(shortest(item) for item in newest if item.role != "system")

    # The walk over the boundaries.

    def _past(self, last: Compaction | None) -> Compaction | None:
        """The newest compaction before the end of this request."""
        boundaries = self._layout.boundaries
        start = last.boundary + 1 if last else 1
        at, end = bisect_left(boundaries, start), bisect_left(boundaries, self._layout.count)
        compaction, view_tokens, high = last, self.view_tokens, self._high
        while at < end:
            at = bisect_left(boundaries, True, at, end, key=lambda boundary: view_tokens(boundary, compaction) > high)
            if at < end:
                compaction = self._compact(boundaries[at], compaction, self._budget.baseline) or compaction
                at += 1
        return compaction

    def _present(
        self, last: Compaction | None, limit: int, target: CompactionTarget, *, force: bool
    ) -> Compaction | None:
        """The compaction of this request's own view, which is to take at most *limit* tokens."""
        count, compaction = self._layout.count, last
        # A compaction at this very boundary stays while it fits: the same request gets the same view.
        is_new = last is None or last.boundary < count
        if is_new and self.view_tokens(count, last) > self._high:
            compaction = self._compact(count, last, self._budget.baseline) or last
        if self.fits(compaction, limit) and not force:
            return compaction
        was_refused = target.force and target.limit is not None
        return self._compact(count, last, limit, was_refused=was_refused) or compaction

    def _requested(self, last: Compaction | None, limit: int, share: float | None) -> Compaction | None:
        """A compaction that the caller requested: to *share* of the room, by default to half of the low mark.

        None if it would save hardly anything. Nothing is cut short, since nothing has to be.
        """
        low, count, fixed = self._marks.low, self._layout.count, self._fixed
        share = low / 2 if share is None else share
        room = self._budget.affordable(limit) - fixed
        goal = int(share * room)
        # The block is as much smaller than that of other compactions as the view is.
        block_limit = fixed + int(min(1.0, share / low) * room)
        levels = replace(self._levels(count, limit), goal=goal)
        present = self.view_tokens(count, last)
        least_saved = max(1, int(LEAST_SAVED * present))
        # A fold comes first: a caller that requests a compaction wants a summary.
        folded = self._stages.fold(count, last, block_limit, levels)
        if folded is not None and present - folded.view_tokens >= least_saved:
            return folded
        pruned = self._stages.prune(count, last, present - goal)
        if pruned is not None and present - pruned.view_tokens >= least_saved:
            return pruned
        return None

    def _levels(self, boundary: int, limit: int) -> Levels:
        """The levels at *boundary* for a view of at most *limit* tokens.

        The end of the request may use all that the request leaves, past boundaries only the ceiling.
        """
        fixed, budget = self._fixed, self._budget
        ceiling = min(limit, budget.view_limit if boundary == self._layout.count else budget.ceiling) - fixed
        low = budget.low(self._marks, limit) - fixed
        high = min(budget.high(self._marks, limit) - fixed, ceiling)
        goal = low
        if self._allocation is not None:
            goal = min(low, self._allocation.for_history(budget.window, fixed))
        between = (CLIP_MARK - self._marks.low) / (self._marks.high - self._marks.low)
        return Levels(high, ceiling, goal, clip_to=int(low + max(0.0, between) * (high - low)))

    # One compaction.

    def _compact(
        self, boundary: int, last: Compaction | None, limit: int, *, was_refused: bool = False
    ) -> Compaction | None:
        """The compaction at *boundary*: of the first stages that get low enough, or the best there is.

        *was_refused*: a provider refused the present view although it fits *limit* by our count, so that it is clipped
        if nothing else helps.
        """
        stages, levels = self._stages, self._levels(boundary, limit)
        present = self.view_tokens(boundary, last)
        if last is not None and (relieved := self._relieved(boundary, last, levels)):
            return relieved
        # What unread results take for the time being folds nothing that has room beside them.
        passing = levels.goal + stages.unread_excess(boundary, last, levels)
        goal = max(levels.goal, min(passing, levels.budget))
        pruned = stages.prune(boundary, last, present - goal)
        if pruned is not None:
            return pruned
        folded = stages.fold(boundary, last, limit, replace(levels, goal=goal))
        found = self._truncated(boundary, last, levels, folded)
        found = self._dropped(boundary, last, limit, levels, found)
        found = self._within_budget(boundary, last, levels, found)
        if not _saves(found, present):
            found = None
        left = found.view_tokens if found else present
        if left <= levels.budget and not (was_refused and found is None):
            return found
        needed = levels.budget if left > levels.budget else levels.clip_to
        return stages.clip(boundary, found or last, levels.clip_to, needed) or found

    def _relieved(self, boundary: int, last: Compaction, levels: Levels) -> Compaction | None:
        """*last* with those results truncated that it left whole because no model had read them.

        None if that is not enough. The prompt stays the same up to the first of them; a fold would change all of it.
        """
        start = self._stages.unread(last.boundary, last).start
        read = range(start, min(last.boundary, self._stages.unread(boundary, None).start))
        truncated = self._stages.truncate(boundary, last, levels, levels.clip_to, read)
        if truncated is None or truncated.view_tokens > levels.clip_to:
            return None
        return truncated

    def _truncated(
        self, boundary: int, last: Compaction | None, levels: Levels, folded: Compaction | None
    ) -> Compaction | None:
        """*folded* with large results truncated; *folded* itself if that is not needed.

        Nothing is cut short for the sake of a fold that saves nothing, while all of it fits.
        """
        present = self.view_tokens(boundary, last)
        left = folded.view_tokens if folded else present
        if left <= levels.clip_to or (present <= levels.budget and not _saves(folded, present)):
            return folded
        return self._stages.truncate(boundary, folded or last, levels, levels.clip_to) or folded

    def _dropped(
        self, boundary: int, last: Compaction | None, limit: int, levels: Levels, found: Compaction | None
    ) -> Compaction | None:
        """*found* with rounds dropped if nothing may be folded, and with a smaller block if its block is too big."""
        left = found.view_tokens if found else self.view_tokens(boundary, last)
        if not self._enabled.fold and left > levels.high:
            dropped = self._stages.fold(boundary, last, limit, levels, bare=True)
            if dropped is not None and dropped.view_tokens > levels.clip_to:
                dropped = self._stages.truncate(boundary, dropped, levels, levels.clip_to) or dropped
            found = dropped or found
        if found is not None and self._may_shrink_block(found):
            return self._with_smaller_block(boundary, found, levels)
        return found

    def _with_smaller_block(self, boundary: int, compaction: Compaction, levels: Levels) -> Compaction:
        """*compaction* with a smaller block if its view is still above the high mark, or if that keeps results whole.

        What unread results take beyond a truncated one's share does not count for the mark: it goes once they are read.
        For them the block shrinks to its frame at most, and only if they fit whole then.
        """
        passing = self._stages.unread_excess(boundary, compaction, levels)
        lasting = compaction.view_tokens - passing
        if lasting > levels.high:
            left = levels.clip_to - (lasting - compaction.block_tokens)
            tokens = max(left, levels.clip_to // 4, BLOCK_FRAME)
            compaction = self._stages.with_smaller_block(boundary, compaction, tokens)
        left = levels.budget - (compaction.view_tokens - compaction.block_tokens)
        if passing and BLOCK_FRAME <= left < compaction.block_tokens:
            compaction = self._stages.with_smaller_block(boundary, compaction, left)
        return compaction

    def _within_budget(
        self, boundary: int, last: Compaction | None, levels: Levels, found: Compaction | None
    ) -> Compaction | None:
        """*found* with unread results truncated, then with a smaller block, as far as the budget requires it."""
        stages, base = self._stages, found or last
        left = found.view_tokens if found else self.view_tokens(boundary, last)
        if left > levels.budget:
            unread = stages.unread(boundary, base)
            found = stages.truncate(boundary, base, levels, levels.budget, unread) or found
        if found is None or found.view_tokens <= levels.budget or not self._may_shrink_block(found):
            return found
        tokens = found.block_tokens - (found.view_tokens - levels.clip_to)
        return stages.with_smaller_block(boundary, found, max(BLOCK_FRAME, levels.clip_to // 4, tokens))

    def _may_shrink_block(self, compaction: Compaction) -> bool:
        return self._enabled.drop and "fold" in compaction.stages


def _saves(compaction: Compaction | None, present: int) -> bool:
    """True if *compaction* makes a view of *present* tokens smaller."""
    return compaction is not None and compaction.view_tokens < present
