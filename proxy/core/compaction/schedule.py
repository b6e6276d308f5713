"""Decides when a view is made smaller, and how far.

Theory of operation
===================

A client sends its whole conversation with every request. For each request the schedule chooses the compaction that its
view is built with. It is a pure function of token counts: the same items, budget and last compaction give the same
compaction in every process. It never reads a text. When it chooses a cut, the block that will stand for the folded
rounds is not written yet, so the block is charged at the most it may take (decision 1).

Levels. The token budget is what the input may use beside the answer. A view is compared with levels inside it:

      0 ......... low ......... soft ......... high ... budget ........ window
                  40 %          60 %           90 %           | reserve |

The low mark of a conversation without tool results is 50 %: nothing in it can be pruned, and its newest messages hold
what comes up next (decision 25). If its rounds are small beside the window, so that a dozen of them still fit until the
next compaction, it keeps more, up to three quarters of the way to the high mark, and its block has that room
(decisions 29 and 33).

Above the high mark a compaction is due, and it goes down to the low mark. Above the soft mark a summary is prepared,
which is done elsewhere. Only above the budget are items clipped: between the high mark and the budget a view loses
nothing that the model is looking at (decision 2).

Compactions are rare and deep. A provider caches the beginning of a prompt, and a compaction changes that beginning:
everything behind the cut is read again at the full price. If a view lost a little with every request, the cache would
never be used. So nothing happens up to the high mark, half of the budget is free after a compaction, and until the next
one the view only grows at its end.

Boundaries. A boundary is a length of the conversation at which a request could have ended. The schedule walks over the
boundaries behind the last compaction. At the first one above the high mark it makes a compaction, and it goes on from
there. A view grows from boundary to boundary, so a binary search finds the first one above the mark, and none is above
it if the end of the request is not.

Past boundaries are compared with the *baseline* budget, which does not depend on this request's `max_tokens`: otherwise
another `max_tokens` would move cuts that were sent long ago. Only the last boundary, the end of the request, is
compared with what the request itself leaves.

A compaction that was sent is a fact. The walk starts from it and never changes it. A later one may fold more, cut more
items short, or replace more results; it never brings anything back.

      position                  condition                             next
      a past boundary           not above the high mark               go to the next boundary
                                above the high mark                   compact to the baseline budget; next boundary
      the end of the request    a compaction was requested, saves     end with that compaction
                                an eighth, and the view fits
                                above the high mark, and the last     compact to the baseline budget; stay here
                                compaction is at a past boundary
                                the view fits, and nothing is forced  end
                                it does not fit, or it is forced      compact to the target's limit; end

Stages. A compaction tries the stages in this order and stops at the first one that is enough:

      0. minify: take the white space out of JSON in results; enough if the view comes down to the clip mark
      1. truncate the results that the last compaction left whole because no model had read them
      2. prune: replace results that a later one repeats, then old results, by a line each
      3. fold the oldest rounds into a block, no more of them than needed for the low mark
      4. truncate large results that the model has read
      5. drop: rounds without a block if folding is switched off, else a part of the block
      6. truncate unread results, only if the budget requires it
      7. clip the largest items, only if the budget requires it; what users wrote comes last

The newest round always stays, and no stage separates a call from its results. If even the last stage does not reach the
budget, the schedule returns the smallest view it found, and the planner decides.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

import msgspec
from msgspec import structs

from proxy.core.compaction.record import NO_COMPACTION, Compaction
from proxy.core.compaction.stages import BLOCK_FRAME, CompactionRules, Levels, Stages, shortest
from proxy.core.conversation import Item, Layout
from proxy.core.tokens.budget import TokenBudget

CLIP_MARK = 0.65
"""Share of the room down to which items are cut short: going further would lose more than it saves (decision 4)."""

LEAST_SAVED = 1 / 8
"""Share of the view that a requested compaction has to save: less is not worth a broken prefix."""

ROUNDS_BETWEEN = 12
"""Rounds of a chat that fit between two compactions, if it keeps more than its low mark."""

MOST_EXTRA = 3 / 4
"""Share of the way from its low mark to the high one that a chat of small rounds keeps beyond the former, at most."""

LowerOutput = Literal["never", "last", "first"]
"""When a request's own output figure may be lowered: after all stages, or before one of them loses anything."""

MaxLoss = Literal["none", "no_drop", "any"]
"""How much a view may lose: ``none`` allows no new compaction, ``no_drop`` one that drops and clips nothing."""


class CompactionTarget(msgspec.Struct, frozen=True):
    """The goal of a view.

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


NO_TARGET: Final = CompactionTarget()


class Schedule:
    """The compactions of one conversation under one budget.

    ``view_tokens(boundary, compaction)`` returns the tokens of the view's items, without the fixed part.
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
        self.view_tokens = self._stages.view_tokens  # an attribute: the binary search calls it for every step

    def newest_compaction(self, last: Compaction | None, target: CompactionTarget = NO_TARGET) -> Compaction | None:
        """The newest compaction of the conversation.

        *last* itself if none is due after it, None if there never was one.
        """
        count, last = self._layout.count, last or NO_COMPACTION
        present = self.view_tokens(count, last)
        # A view grows from boundary to boundary: unless it is above the mark at its end, it never was.
        if present > self._high:
            last = self._compact_past_boundaries(last)
            present = self.view_tokens(count, last)
        limit = min(self._budget.baseline, self._budget.input)
        if target.limit is not None:
            limit = min(limit, target.limit)
        force = target.force
        if target.wait_for_summary:
            requested = self._compact_on_request(last, present, limit, target.share)
            if requested is not None and self.fits(requested, limit):
                return requested
            force = False
        newest = self._compact_end(last, present, limit, target, force=force)
        if newest is NO_COMPACTION:
            return None
        return newest

    def fits(self, compaction: Compaction | None, limit: int) -> bool:
        """True if the view of this request takes at most *limit* tokens after *compaction*."""
        return self._fixed + self.view_tokens(self._layout.count, compaction) <= limit

    def minimum_tokens(self) -> int:
        """Tokens that no view of the conversation goes below: its newest round, every item as short as can be.

        Short items are never cut, and no call of a round goes without the others.
        """
        count, cuts = self._layout.count, self._layout.cuts
        if not cuts:
            return self._fixed
        newest = self._items[cuts[-1] : count]
        return self._fixed + sum(shortest(item) for item in newest if item.role != "system")

    # The walk over the boundaries.

    def _compact_past_boundaries(self, last: Compaction) -> Compaction:
        """The newest compaction before the end of this request."""
        boundaries = self._layout.boundaries
        at, end = bisect_left(boundaries, last.boundary + 1), bisect_left(boundaries, self._layout.count)
        compaction, view_tokens, high = last, self.view_tokens, self._high
        while at < end:
            at = bisect_left(boundaries, True, at, end, key=lambda boundary: view_tokens(boundary, compaction) > high)
            if at < end:
                compaction = self._compact(boundaries[at], compaction, self._budget.baseline) or compaction
                at += 1
        return compaction

    def _compact_end(
        self, last: Compaction, present: int, limit: int, target: CompactionTarget, *, force: bool
    ) -> Compaction:
        """The compaction for the end of this request, whose view takes *present* tokens and may take *limit*."""
        count, compaction = self._layout.count, last
        # A compaction at this very boundary stays while it fits: the same request gets the same view.
        if last.boundary < count and present > self._high:
            compacted = self._compact(count, last, self._budget.baseline)
            if compacted is not None:
                compaction, present = compacted, compacted.view_tokens
        if self._fixed + present <= limit and not force:
            return compaction
        was_refused = target.force and target.limit is not None
        return self._compact(count, last, limit, was_refused=was_refused) or compaction

    def _compact_on_request(self, last: Compaction, present: int, limit: int, share: float | None) -> Compaction | None:
        """A compaction that the caller requested: to *share* of the room, by default to half of the low mark.

        None if it would save hardly any of the view's *present* tokens. Nothing is cut short, since nothing has to be.
        """
        low, count, fixed = self._marks.low, self._layout.count, self._fixed
        if share is None:
            share = low / 2
        room = self._budget.affordable(limit) - fixed
        goal = int(share * room)
        # The block is as much smaller than that of other compactions as the view is.
        block_limit = fixed + int(min(1.0, share / low) * room)
        levels = replace(self._levels(count, limit), goal=goal, extra=0)
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
        most = budget.ceiling
        if boundary == self._layout.count:
            most = budget.view_limit
        ceiling = min(limit, most) - fixed
        marks = self._marks
        is_chat = not self._layout.result_sums[boundary]
        if is_chat:
            marks = marks.of_chats
        low = budget.low(marks, limit) - fixed
        high = min(budget.high(marks, limit) - fixed, ceiling)
        between = (CLIP_MARK - marks.low) / (marks.high - marks.low)
        clip_to = int(low + max(0.0, between) * (high - low))
        extra = 0
        if is_chat:
            extra = self._chat_extra(boundary, high - low)
        goal = low + extra
        if self._allocation is not None:
            goal = min(goal, self._allocation.for_history(budget.window, fixed))
        return Levels(high, ceiling, goal, max(clip_to, goal), extra)

    def _chat_extra(self, boundary: int, room: int) -> int:
        """Tokens of the *room* between low and high mark that a chat keeps beyond the low one.

        None if the mark of chats is configured, or if the input has a price cap.
        """
        layout = self._layout
        if self._marks.chat_low is not None or self._budget.price_cap is not None:
            return 0
        mean = layout.sums[boundary] // max(1, bisect_right(layout.boundaries, boundary))
        return max(0, min(int(MOST_EXTRA * room), room - ROUNDS_BETWEEN * mean))

    # One compaction.

    def _compact(self, boundary: int, last: Compaction, limit: int, *, was_refused: bool = False) -> Compaction | None:
        """The compaction at *boundary*: the first that gets low enough, else the smallest view there is.

        *was_refused*: a provider refused the present view although it fits *limit* by our count. Then items are clipped
        if nothing else helps.
        """
        stages, levels = self._stages, self._levels(boundary, limit)
        base = stages.minify(boundary, last) or last
        if base is not last and base.view_tokens <= levels.clip_to:
            return base
        if last.boundary and (relieved := self._relieved(boundary, last, base, levels)):
            return relieved
        present = self.view_tokens(boundary, base)
        # Unread results are truncated as soon as they are read: until then nothing is folded for their sake.
        with_unread = levels.goal + stages.unread_excess(boundary, base, levels)
        goal = max(levels.goal, min(with_unread, levels.budget))
        pruned = stages.prune(boundary, base, present - goal)
        if pruned is not None:
            return pruned
        whole = structs.replace(base, view_tokens=present)
        smallest = self._folded(boundary, whole, limit, levels, goal)
        clipped: Compaction | None = None
        if smallest.view_tokens > levels.budget:
            clipped = stages.clip(boundary, smallest, levels.clip_to, levels.budget)
        elif was_refused and smallest is whole:
            clipped = stages.clip(boundary, whole, levels.clip_to, levels.clip_to)
        if clipped is not None:
            return clipped
        if smallest is not whole:
            return smallest
        return self._minified(boundary, last, whole, levels, was_refused=was_refused)

    def _minified(
        self, boundary: int, last: Compaction, whole: Compaction, levels: Levels, *, was_refused: bool
    ) -> Compaction | None:
        """*whole* if white space is all that it lacks and the view of *last* does not fit; None if nothing is due."""
        if whole.minified == last.minified:
            return None
        if was_refused or self.view_tokens(boundary, last) > levels.budget:
            return whole
        return None

    def _relieved(self, boundary: int, last: Compaction, base: Compaction, levels: Levels) -> Compaction | None:
        """*base* with those results truncated that *last* left whole because no model had read them.

        None if that is not enough. The prompt stays the same up to the first of them; a fold would change it earlier.
        """
        start = self._stages.unread(last.boundary, last).start
        read = range(start, min(last.boundary, self._stages.unread(boundary, NO_COMPACTION).start))
        truncated = self._stages.truncate(boundary, base, levels, levels.clip_to, read)
        if truncated is None or truncated.view_tokens > levels.clip_to:
            return None
        return truncated

    def _folded(self, boundary: int, whole: Compaction, limit: int, levels: Levels, goal: int) -> Compaction:
        """*whole*, the present view, after stages 3 to 6: folded down to *goal*, and reduced if that is not enough.

        If a fold saves nothing, since its block takes what the folded rounds take, it is left: it would change the
        prompt from its beginning (decision 34).
        """
        folded = self._stages.fold(boundary, whole, limit, replace(levels, goal=goal)) or whole
        smallest = self._reduced(boundary, whole, folded, limit, levels)
        if folded.view_tokens < whole.view_tokens:
            return smallest
        in_place = self._reduced(boundary, whole, whole, limit, levels)
        if in_place.view_tokens <= levels.budget:
            return in_place
        return smallest

    def _reduced(self, boundary: int, whole: Compaction, folded: Compaction, limit: int, levels: Levels) -> Compaction:
        """*folded* after stages 4 to 6, each only if those before it are not enough; *whole* if they save nothing.

        It is *whole*, the present view, if nothing was folded. If that fits and a fold saves nothing, no result that
        was read is truncated.
        """
        stages, smallest = self._stages, folded
        is_due = whole.view_tokens > levels.budget or folded.view_tokens < whole.view_tokens
        if is_due and folded.view_tokens > levels.clip_to:
            smallest = stages.truncate(boundary, folded, levels, levels.clip_to) or folded
        if not self._enabled.fold and smallest.view_tokens > levels.high:
            smallest = self._dropped(boundary, whole, limit, levels) or smallest
        if self._may_shrink_block(whole, smallest):
            smallest = self._with_smaller_block(boundary, smallest, levels)
        if smallest.view_tokens > levels.budget:
            smallest = self._within_budget(boundary, whole, smallest, levels)
        if smallest.view_tokens >= whole.view_tokens:
            return whole
        return smallest

    def _within_budget(self, boundary: int, whole: Compaction, smallest: Compaction, levels: Levels) -> Compaction:
        """*smallest* with unread results truncated, then with a smaller block if that is not enough for the budget."""
        unread = self._stages.unread(boundary, smallest)
        smallest = self._stages.truncate(boundary, smallest, levels, levels.budget, unread) or smallest
        if smallest.view_tokens <= levels.budget or not self._may_shrink_block(whole, smallest):
            return smallest
        tokens = smallest.block_tokens - (smallest.view_tokens - levels.clip_to)
        return self._stages.with_smaller_block(boundary, smallest, max(BLOCK_FRAME, levels.clip_to // 4, tokens))

    def _may_shrink_block(self, whole: Compaction, compaction: Compaction) -> bool:
        """True if *compaction* has a block of its own: that of *whole*, the present view, stays as it is."""
        return self._enabled.drop and compaction is not whole and "fold" in compaction.stages

    def _dropped(self, boundary: int, whole: Compaction, limit: int, levels: Levels) -> Compaction | None:
        """*whole* with rounds dropped, and with large results truncated if that is not enough; None without rounds."""
        dropped = self._stages.fold(boundary, whole, limit, levels, bare=True)
        if dropped is None or dropped.view_tokens <= levels.clip_to:
            return dropped
        return self._stages.truncate(boundary, dropped, levels, levels.clip_to) or dropped

    def _with_smaller_block(self, boundary: int, compaction: Compaction, levels: Levels) -> Compaction:
        """*compaction* with a smaller block if its view is still above the high mark, or if that keeps results whole.

        What unread results take beyond the share of a truncated one does not count here: it goes once they are read.
        The block makes room for them down to its frame, but only if they fit whole then.
        """
        excess = self._stages.unread_excess(boundary, compaction, levels)
        lasting = compaction.view_tokens - excess
        if lasting > levels.high:
            left = levels.clip_to - (lasting - compaction.block_tokens)
            tokens = max(left, levels.clip_to // 4, BLOCK_FRAME)
            compaction = self._stages.with_smaller_block(boundary, compaction, tokens)
        left = levels.budget - (compaction.view_tokens - compaction.block_tokens)
        if excess and BLOCK_FRAME <= left < compaction.block_tokens:
            compaction = self._stages.with_smaller_block(boundary, compaction, left)
        return compaction
