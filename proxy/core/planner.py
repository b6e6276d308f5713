"""Choose what goes upstream for one measured request. Pure: never waits, reads no clock, touches no cache.

A client sends its whole conversation with every call, so the planner works everything out anew from the items and
their token counts. But a compaction that was sent is a fact: the next view must begin with the very same bytes, or the
provider's prompt cache is lost and replicas disagree. So the planner goes on from the newest compaction record of the
conversation, which says where the last compaction stood, what it folded, and the literal texts it put in.

What the planner lacks it names. ``decide`` returns one of six decisions; three of them say what is missing, and the
engine calls again once it has looked that up, read it or written it:

    progress  what is known                  next
    Start     the measured request           Forward: below half of the low mark, or a client's own compaction that fits
                                             NeedRecord: everything else
    LookedUp  + layout and newest record     Forward: no compaction is due, or the last one still does
                                             NeedBlock: a new one is due
                                             TooLossy: it would lose more than the target allows
    Written   + a record for a target        Forward: the view fits, or only guesses say that it does not
                                             NeedBlock: it does not fit, and a tighter target is left
                                             TooLossy: the tighter target would lose more than allowed
                                             Reject: nothing is left to give up

``NeedFacts`` may come in every state, once: most requests are planned from the token counts of their items, and only
the schedule asks what calls and results are about (``Item.facts``).

The schedule decides from token counts alone, before any text is written, and charges a block at its cap. The texts are
written after that, and only then is the view's true size known: what a provider counts may also differ from our count.
So every view is verified (``_verified``), and one that is too large is planned again with a tighter target.

That ends. Every ``NeedBlock`` after the first has a tighter target than the one before:

    tighter_limit             the limit falls by the excess, at most twice (``tries``)
    without_default_reserve   once: a request that names no output figure keeps a 32nd of the window for its answer
    without_addition          once: the view does without what a feature wanted to add

and the last two start ``tries`` anew: at most nine blocks, in practice one or two.

Nothing is refused on a guess. A view is rejected only if it is too large by our own count, without the tokens that are
guesses (media of unknown size), for a window that somebody stated. Otherwise the provider judges.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from msgspec import structs

from proxy.core.compaction.record import Compaction, CompactionRecord
from proxy.core.compaction.schedule import CompactionTarget, MaxLoss
from proxy.core.conversation import Layout
from proxy.core.decisions import (
    START,
    CountedView,
    Decision,
    Edits,
    FinalDecision,
    Forward,
    LookedUp,
    MeasuredRequest,
    NeedBlock,
    NeedFacts,
    NeedRecord,
    Observation,
    Policy,
    Progress,
    Reject,
    Start,
    TooLossy,
    UncountedView,
    Written,
    verbatim,
)
from proxy.core.errors import OUTPUT, ContextTooLong
from proxy.core.tokens.budget import TokenBudget, input_limit, to_our_tokens
from proxy.core.views import client_compaction_view, compacted_view

LOSSY = frozenset({"drop", "clip"})
"""Stages that lose what the model is looking at."""

LEAST_RESERVE = 32
"""A request that names no output figure keeps at least one token in so many of the window for its answer."""


def decide(measured: MeasuredRequest, policy: Policy, progress: Progress = START) -> Decision:
    """Choose what to send for *measured*, or name what is missing."""
    match progress:
        case Start():
            return _before_lookup(measured, policy)
        case LookedUp():
            return _after_lookup(measured, policy, progress)
        case Written():
            return _verified(measured, policy, progress)
        case other:
            assert_never(other)


def as_observed(decision: FinalDecision) -> FinalDecision:
    """The client's own bytes, with the figures of what *decision* would have sent."""
    if isinstance(decision, TooLossy) or isinstance(decision.view, UncountedView):
        return decision
    view = decision.view
    observation: Observation = "fits"
    if isinstance(decision, Reject):
        observation = "would_refuse"
    elif view.body != view.request.body:
        observation = "would_compact"
    return Forward(structs.replace(view, body=view.request.body, observation=observation))


def _before_lookup(measured: MeasuredRequest, policy: Policy) -> Decision:
    target = measured.target
    if measured.client_compaction and is_plain(target) and not measured.parsed.envelope.stored:
        view = client_compaction_view(measured, policy)
        if isinstance(view, NeedFacts):
            return view
        if view is not None:
            return Forward(view)
    is_requested = target.wait_for_summary and target.limit is None
    if (is_plain(target) or is_requested) and not measured.tools_json and is_quiet(measured, policy):
        # Nothing can have happened to this conversation, nor would it be worth a compaction.
        return Forward(verbatim(measured, None, edits=Edits(nothing_to_fold=is_requested)))
    return NeedRecord()


def _after_lookup(measured: MeasuredRequest, policy: Policy, lookup: LookedUp) -> Decision:
    target = measured.target
    if is_left_to_provider(measured, lookup.record):
        return Forward(verbatim(measured, lookup.layout))
    if lookup.requested and not target.dry_run:
        share = target.share
        if share is None:
            share = lookup.share
        target = structs.replace(target, force=True, wait_for_summary=True, max_loss="any", share=share)
    if target.force and target.limit is None and _was_compacted_here(lookup):
        # Requested again at the same boundary: nothing more happens.
        target = structs.replace(target, force=False, wait_for_summary=False)
    return _planned(measured, policy, lookup, target)


def _planned(measured: MeasuredRequest, policy: Policy, lookup: LookedUp, target: CompactionTarget) -> Decision:
    """The next step towards *target*: an existing record is verified, a new compaction needs its block."""
    last = lookup.record.compaction if lookup.record else None
    chosen = _chosen_before(measured, policy, lookup, target)
    if chosen is None:
        if not measured.has_facts:
            return NeedFacts()
        chosen = choose_compaction(measured, policy, lookup.layout, last, target)
    compaction, lowered_output = chosen
    edited = bool(measured.tools_json) or lowered_output is not None
    if _exceeds(target.max_loss, compaction, last, edited):
        return TooLossy()
    if compaction is None:
        return _verified(measured, policy, Written(lookup, target, None, lowered_output))
    if lookup.record is not None and compaction == last:
        return _verified(measured, policy, Written(lookup, target, lookup.record, lowered_output))
    at_same_boundary = last is not None and last.boundary == compaction.boundary
    target = structs.replace(target, replaces=target.replaces or target.force or at_same_boundary)
    loses = not LOSSY.isdisjoint(compaction.stages)
    if loses and _is_hopeless(measured, policy, lookup.layout, measured.budget_for(target)):
        # It will be refused, or the provider judges: what fits later must not begin with what was dropped in vain.
        target = structs.replace(target, dry_run=True)
    return NeedBlock(lookup, target, compaction, lowered_output)


def _verified(measured: MeasuredRequest, policy: Policy, written: Written) -> Decision:
    """Forward the view if it fits, else try a tighter target, else refuse."""
    view = build_view(measured, written)
    reserve = written.lowered_output or view.budget.reserve
    room = view.budget.input_budget(reserve)
    excess = to_our_tokens(view.expected_tokens, measured.known.token_ratio) - room
    if excess <= 0:
        return Forward(view)
    lookup = _go_on_from(written)
    if not _is_hopeless(measured, policy, lookup.layout, view.budget):
        for tighter in TIGHTER_TARGETS:
            target = tighter(measured, written, view, excess)
            if target is not None:
                return _planned(measured, policy, lookup, target)
    if excess > guessed_tokens(view) and is_certain(view, reserve):
        return Reject(refusal(view, reserve), view)
    return Forward(view)  # only guesses are too much: the provider judges


def build_view(measured: MeasuredRequest, written: Written) -> CountedView:
    """The view after *written*: the client's own bytes if nothing changes them."""
    lookup, target, record = written.lookup, written.target, written.record
    if record is None and not measured.tools_json and written.lowered_output is None:
        if not target.keep_addition:
            target = structs.replace(target, keep_addition=True)
        budget = measured.budget_for(target)
        in_vain = target.wait_for_summary and target.limit is None
        edits = Edits(previous=lookup.first, nothing_to_fold=in_vain)
        return verbatim(measured, lookup.layout, budget, edits)
    return compacted_view(measured, written)


def _is_hopeless(measured: MeasuredRequest, policy: Policy, layout: Layout, budget: TokenBudget) -> bool:
    """True if the newest round alone is too large, however short: each more try would cost as much as the first."""
    return measured.schedule(policy, layout, budget).minimum_tokens() > budget.input_budget(
        budget.window // LEAST_RESERVE
    )


def _go_on_from(written: Written) -> LookedUp:
    """Return what is known after a record was written: it is the newest one now."""
    lookup = written.lookup
    wrote = lookup.wrote or written.record is not lookup.record
    return structs.replace(lookup, record=written.record or lookup.record, wrote=wrote)


def _was_compacted_here(lookup: LookedUp) -> bool:
    return lookup.record is not None and lookup.record.compaction.boundary == lookup.layout.count


def _exceeds(max_loss: MaxLoss, compaction: Compaction | None, last: Compaction | None, edited: bool) -> bool:
    """True if *compaction* loses more than *max_loss*; *edited*: something beside the items is changed too."""
    if max_loss == "any":
        return False
    if max_loss == "none" and (edited or compaction != last):
        return True
    return is_lossy(compaction, last)


def is_lossy(compaction: Compaction | None, last: Compaction | None) -> bool:
    """True if *compaction* is a new one that drops or clips."""
    return compaction is not None and compaction != last and not LOSSY.isdisjoint(compaction.stages)


# Tighter targets, in the order in which they are tried.


def tighter_limit(
    measured: MeasuredRequest, written: Written, view: CountedView, excess: int
) -> CompactionTarget | None:
    """The target with its limit lowered by *excess* tokens; None if that was tried often enough or is of no use.

    Without a record the schedule has tried, unless it is what the provider counted so far that is too much.
    """
    del measured
    target, budget = written.target, view.budget
    reserve = written.lowered_output or budget.reserve
    if not target.tries or (written.record is None and view.tokens > budget.input_budget(reserve)):
        return None
    limit = min(budget.input, target.limit or budget.window) - excess
    tries = target.tries - 1
    return structs.replace(target, limit=max(0, limit), force=True, replaces=True, wait_for_summary=False, tries=tries)


def without_default_reserve(
    measured: MeasuredRequest, written: Written, view: CountedView, excess: int
) -> CompactionTarget | None:
    """The target with hardly any room for the answer; None if the request names an output figure itself.

    A client that names none prefers a short answer to none.
    """
    del excess
    least = view.budget.window // LEAST_RESERVE
    if measured.requested_output is not None or view.budget.reserve <= least:
        return None
    return structs.replace(written.target, reserve=least, replaces=True, tries=2)


def without_addition(
    measured: MeasuredRequest, written: Written, view: CountedView, excess: int
) -> CompactionTarget | None:
    """The target without room for the addition; None if there is none. No request is refused for want of its room."""
    del view, excess
    if not measured.addition.tokens or not written.target.keep_addition:
        return None
    return structs.replace(written.target, keep_addition=False, replaces=True, tries=2)


TIGHTER_TARGETS = (tighter_limit, without_default_reserve, without_addition)

# Questions to the schedule.


def is_plain(target: CompactionTarget) -> bool:
    """True if nothing is required but that the view fits its budget."""
    return not target.force and target.limit is None


def history_in_view(layout: Layout, last: Compaction | None) -> int:
    """Return the tokens of the view's items after *last*, the last compaction there was: what came since is whole."""
    if last is None:
        return layout.sums[-1]
    return last.view_tokens + layout.sums[-1] - layout.sums[last.boundary]


def is_quiet(measured: MeasuredRequest, policy: Policy) -> bool:
    """True if the request as the client sent it is below half of the low mark: nothing can have happened to it."""
    budget = measured.budget
    limit = min(budget.baseline, budget.input)
    quiet = min(budget.quiet(policy.rules.marks, limit), limit)
    return budget.fixed + measured.counts.history <= quiet and budget.reserve <= budget.window // 2


def is_left_to_provider(measured: MeasuredRequest, record: CompactionRecord | None) -> bool:
    """True if the provider shortens the conversation itself: nothing is required here, nor was anything done before."""
    if record is not None or measured.tools_json or not is_plain(measured.target):
        return False
    return provider_compacts(measured)


def provider_compacts(measured: MeasuredRequest) -> bool:
    """True if the client wants the provider to shorten the conversation itself, before it is too long."""
    limit = measured.parsed.envelope.provider_compacts_from
    return limit is not None and limit <= measured.budget.window * measured.known.token_ratio


def _chosen_before(
    measured: MeasuredRequest, policy: Policy, lookup: LookedUp, target: CompactionTarget
) -> tuple[Compaction | None, int | None] | None:
    """The last compaction and its lowered output figure, if they still do; None if the schedule is to choose.

    They do if this very request came before and was decided so, or if no compaction can be due: a view grows at its
    end, and there it is below the high mark.
    """
    if not is_plain(target):
        return None
    record, budget, last, lowered = lookup.record, measured.budget_for(target), None, 0
    if record is not None:
        last, lowered = record.compaction, record.lowered_output
    level = budget.quantised_fixed + history_in_view(lookup.layout, last)
    may_lower = target.lower_output != "never" and 0 < lowered < budget.reserve
    if may_lower and _was_compacted_here(lookup) and level <= budget.input_budget(lowered):
        return last, lowered
    high = budget.high(policy.rules.marks, budget.baseline)
    if level <= min(high, budget.ceiling, budget.baseline, budget.input):
        return last, None
    return None


def choose_compaction(
    measured: MeasuredRequest, policy: Policy, layout: Layout, last: Compaction | None, target: CompactionTarget
) -> tuple[Compaction | None, int | None]:
    """The newest compaction towards *target*, and the output figure if it is lowered so that nothing is lost.

    *last*, the last compaction, if nothing new is due, None if nothing ever was.
    """
    budget = measured.budget_for(target)
    schedule = measured.schedule(policy, layout, budget)
    compaction = schedule.newest_compaction(last, target)
    if measured.requested_output is None or target.lower_output == "never":
        return compaction, None
    fits = schedule.fits(compaction, budget.input)
    is_modest = target.lower_output == "last" and budget.reserve <= budget.window // 2
    if fits and not is_lossy(compaction, last) and (compaction == last or is_modest):
        return compaction, None
    lowered = _with_lowered_output(measured, policy, layout, last, target, otherwise_fits=fits)
    return lowered or (compaction, None)


def _with_lowered_output(
    measured: MeasuredRequest,
    policy: Policy,
    layout: Layout,
    last: Compaction | None,
    target: CompactionTarget,
    *,
    otherwise_fits: bool,
) -> tuple[Compaction | None, int | None] | None:
    """A compaction that loses less beside a lowered output figure, and that figure; None if lowering is of no use.

    *otherwise_fits*: the compaction beside the request's own output figure fits, so that a lossy one gains nothing.
    """
    budget = measured.budget_for(target)
    for reserve in _smaller_reserves(measured, budget):
        schedule = measured.schedule(policy, layout, replace(budget, reserve=reserve))
        compaction = schedule.newest_compaction(last, target)
        loses = is_lossy(compaction, last)
        if not loses and schedule.fits(compaction, budget.input):
            return compaction, None  # nothing has to be lowered for it
        if loses and otherwise_fits:
            continue
        if schedule.fits(compaction, budget.input_budget(reserve)):
            used = budget.quantised_fixed + schedule.view_tokens(layout.count, compaction)
            return compaction, _room_left(measured, budget, used)
    return None


def _smaller_reserves(measured: MeasuredRequest, budget: TokenBudget) -> list[int]:
    """The reserves to try instead of the request's own, larger ones first."""
    least = to_our_tokens(measured.parsed.envelope.least_output, measured.known.token_ratio)
    half, small = budget.window // 2, min(1024, budget.window // 4)
    return [reserve for reserve in (max(least, half), max(least, small)) if reserve < budget.reserve]


def _room_left(measured: MeasuredRequest, budget: TokenBudget, used: int) -> int | None:
    """The output figure beside *used* tokens of input; None if that is no less than what was requested."""
    least = to_our_tokens(measured.parsed.envelope.least_output, measured.known.token_ratio)
    left = max(1, least, budget.window - used - budget.window // 64)
    if left >= budget.reserve:
        return None
    return left


# Refusals.


def guessed_tokens(view: CountedView) -> int:
    """Tokens of the view that are no more than a guess."""
    items, record = view.measured.parsed.items, view.edits.record
    if record is None:
        return sum(item.guess for item in items)
    shown = {*record.compaction.anchors, *range(record.compaction.cut, len(items))}
    return sum(items[index].guess for index in shown)


def is_certain(view: CountedView, reserve: int) -> bool:
    """True if the view is too large by our own count too, for a window that somebody stated."""
    known = view.measured.known
    if known.stated_window is None:
        return False
    ratio = max(1.0, known.token_ratio)
    return view.tokens > input_limit(known.stated_window, int(reserve * ratio), known.route.max_input)


def refusal(view: CountedView, reserve: int) -> ContextTooLong:
    """Return the error that names what is too large and by how much: even *view*, the smallest beside *reserve*."""
    measured, budget = view.measured, view.budget
    counts, ratio = measured.counts, measured.known.token_ratio
    parts = {
        "tools": counts.beside.tools - (counts.fixed - budget.fixed),
        "system messages": counts.roles.system + counts.beside.system,
        "newest messages": view.tokens - budget.fixed,
    }
    if measured.requested_output is not None:
        parts[OUTPUT] = reserve
    largest = max(parts, key=lambda name: parts[name])
    return ContextTooLong(
        tokens=int(view.tokens * ratio),
        limit=measured.known.window or int(budget.window * ratio),
        reserve=int((budget.window - budget.input_budget(reserve)) * ratio),
        largest=largest,
        largest_tokens=int(parts[largest] * ratio),
    )
