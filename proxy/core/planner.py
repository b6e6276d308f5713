"""Choose what goes upstream for one measured request. Pure: never waits, reads no clock, touches no cache.

A client sends its whole conversation with every call, so the planner computes everything again from the items and
their token counts. But a compaction that was sent is a fact: the next view must begin with the very same bytes, or the
provider's prompt cache is lost and replicas disagree. So the planner continues from the newest compaction record of the
conversation: it has the boundary of the last compaction, the cut up to which it folded, and the literal texts it wrote.

``decide`` returns one of six decisions. Three of them name what is missing; the engine looks that up, reads or writes
it, and calls ``decide`` again with the result:

    progress  what is known                  next
    Start     the measured request           Forward: below half of the low mark, or a client's own compaction that fits
                                             NeedRecord: everything else
    LookedUp  + layout and newest record     Forward: no compaction is due, or the last one is still enough
                                             NeedBlock: a new one is due
                                             TooLossy: it would lose more than the target allows
    Written   + a record for a target        Forward: the view fits, or exceeds the budget only by guessed tokens
                                             NeedBlock: it does not fit, and a tighter target is left
                                             TooLossy: the tighter target would lose more than allowed
                                             Reject: nothing is left to give up

``NeedFacts`` may come in every state, once: most requests are planned from the token counts of their items, and only
the schedule asks what calls and results are about (``Item.facts``).

The schedule decides from token counts alone, before any text is written, and counts a block at its cap. The view's true
size is known only when its texts are written, and the provider's count may differ from ours. So every view is verified
(``_verified``), and one that is too large is planned again with a tighter target.

This ends, because every ``NeedBlock`` after the first has a tighter target than the one before:

    tighter_limit             the limit falls by the excess, at most twice (``tries``)
    without_default_reserve   once: a request that names no output figure reserves a 32nd of the window for its answer
    without_addition          once: the view gets no addition of a feature

and the last two reset ``tries``: at most nine blocks, in practice one or two.

No request is refused on a guess. A view is rejected only if it is too large by our own count, without the tokens that
are guesses (media of unknown size), for a window that a person, a server or an error stated. Otherwise it is sent, and
the provider decides.
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
from proxy.core.tokens.budget import TokenBudget, input_limit, smallest_lowered, to_our_tokens
from proxy.core.views import client_compaction_view, compacted_view

LOSSY = frozenset({"drop", "clip"})
"""Stages that remove text which no block stands for: the model cannot know what it lost."""

LEAST_RESERVE = 32
"""Divisor of the window: the least reserve for the answer to a request that names no output figure."""

MANY_CALLS = 1_000
"""Calls and results of one round above which a request that cannot fit is refused before its view is written.

Agents call some dozens of tools at once. To write a view of thousands, only to refuse it, takes three times as long as
all that is done before (decision 36).
"""


def decide(measured: MeasuredRequest, policy: Policy, progress: Progress = START) -> Decision:
    """Return what to send for *measured*, or what is missing to decide that."""
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
    """Return a decision that sends the client's own bytes and reports what *decision* would have sent."""
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
        # So small a conversation cannot have a compaction, and gains nothing by one: the store is not read.
        return Forward(verbatim(measured, None, edits=Edits(nothing_to_fold=is_requested)))
    return NeedRecord()


def _after_lookup(measured: MeasuredRequest, policy: Policy, lookup: LookedUp) -> Decision:
    target = measured.target
    if is_left_to_provider(measured, lookup.record):
        return Forward(verbatim(measured, lookup.layout))
    layout = lookup.layout
    if layout.cuts and layout.sums[-1] - layout.sums[layout.cuts[-1]] > measured.budget.window:
        refused = refused_unwritten(measured, policy, layout)
        if refused is not None:
            return refused
    if lookup.requested and not target.dry_run:
        share = target.share
        if share is None:
            share = lookup.share
        target = structs.replace(target, force=True, wait_for_summary=True, max_loss="any", share=share)
    if target.force and target.limit is None and _was_compacted_here(lookup):
        # The same compaction was requested before, for instance by a client's retry: it is sent again as it is.
        target = structs.replace(target, force=False, wait_for_summary=False)
    return _planned(measured, policy, lookup, target)


def _planned(measured: MeasuredRequest, policy: Policy, lookup: LookedUp, target: CompactionTarget) -> Decision:
    """Return the next step towards *target*: verify the view of an existing record, or have a new block written."""
    last: Compaction | None = None
    if lookup.record is not None:
        last = lookup.record.compaction
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
        # It will not fit. Nothing is stored, so that a later, smaller request does not continue from these losses.
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
    lower = lowered_further(measured, written, view)
    if lower is not None:
        return _verified(measured, policy, structs.replace(written, lowered_output=lower))
    lookup = _lookup_after(written)
    if not _is_hopeless(measured, policy, lookup.layout, view.budget):
        for tighter in TIGHTER_TARGETS:
            target = tighter(measured, written, view, excess)
            if target is not None:
                return _planned(measured, policy, lookup, target)
    if excess > guessed_tokens(view) and is_certain(view, reserve):
        return Reject(refusal(view, reserve), view)
    return Forward(view)  # without its guessed tokens it would fit: the provider decides


def build_view(measured: MeasuredRequest, written: Written) -> CountedView:
    """Return the view for *written*: the client's own bytes if nothing changes them."""
    lookup, target, record = written.lookup, written.target, written.record
    if record is None and not measured.tools_json and written.lowered_output is None:
        if not target.keep_addition:
            target = structs.replace(target, keep_addition=True)
        budget = measured.budget_for(target)
        requested = target.wait_for_summary and target.limit is None
        edits = Edits(previous=lookup.first, nothing_to_fold=requested)
        return verbatim(measured, lookup.layout, budget, edits)
    return compacted_view(measured, written)


def _is_hopeless(measured: MeasuredRequest, policy: Policy, layout: Layout, budget: TokenBudget) -> bool:
    """True if even the smallest view is too large beside the least reserve, so that no tighter target can help."""
    return measured.schedule(policy, layout, budget).minimum_tokens() > budget.input_budget(
        budget.window // LEAST_RESERVE
    )


def _lookup_after(written: Written) -> LookedUp:
    """Return the look-up with the record of *written* as the newest one."""
    lookup = written.lookup
    wrote = lookup.wrote or written.record is not lookup.record
    return structs.replace(lookup, record=written.record or lookup.record, wrote=wrote)


def _was_compacted_here(lookup: LookedUp) -> bool:
    """True if the newest record is at the end of this very request, which came before."""
    return lookup.record is not None and lookup.record.compaction.boundary == lookup.layout.count


def _exceeds(max_loss: MaxLoss, compaction: Compaction | None, last: Compaction | None, edited: bool) -> bool:
    """True if *compaction* loses more than *max_loss*. *edited*: members around the items change, too."""
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
    """Return the target with its limit lowered by *excess* tokens; None if no try is left or it cannot help.

    It cannot help if the schedule found nothing to compact for the view's own size. It can if only the provider's
    count is too large: the schedule does not know that.
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
    """Return the target with the least reserve; None if the request names an output figure.

    A client that names none has asked for no length: a short answer is better than a refusal.
    """
    del excess
    least = view.budget.window // LEAST_RESERVE
    if measured.requested_output is not None or view.budget.reserve <= least:
        return None
    return structs.replace(written.target, reserve=least, replaces=True, tries=2)


def without_addition(
    measured: MeasuredRequest, written: Written, view: CountedView, excess: int
) -> CompactionTarget | None:
    """Return the target without room for the addition; None if there is none. No request is refused because of it."""
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
    """Return the tokens of the view's history: what the *last* compaction left, and all items since."""
    if last is None:
        return layout.sums[-1]
    return last.view_tokens + layout.sums[-1] - layout.sums[last.boundary]


def is_quiet(measured: MeasuredRequest, policy: Policy) -> bool:
    """True if the request as the client sent it is below half of the low mark, where no compaction is ever made."""
    budget = measured.budget
    limit = min(budget.baseline, budget.input)
    quiet = min(budget.quiet(policy.rules.marks, limit), limit)
    return budget.fixed + measured.counts.history <= quiet and budget.reserve <= budget.window // 2


def is_left_to_provider(measured: MeasuredRequest, record: CompactionRecord | None) -> bool:
    """True if the provider compacts the conversation itself, and Ullage neither has to nor has done so before."""
    if record is not None or measured.tools_json or not is_plain(measured.target):
        return False
    return provider_compacts(measured)


def provider_compacts(measured: MeasuredRequest) -> bool:
    """True if the client lets the provider compact the conversation from a size below the window."""
    limit = measured.parsed.envelope.provider_compacts_from
    return limit is not None and limit <= measured.budget.window * measured.known.token_ratio


def _chosen_before(
    measured: MeasuredRequest, policy: Policy, lookup: LookedUp, target: CompactionTarget
) -> tuple[Compaction | None, int | None] | None:
    """Return the last compaction and its lowered output figure if no schedule is needed to choose it; else None.

    No schedule is needed if this very request came before and was decided like that, or if no compaction can be due:
    the view is largest now, and it is below the high mark.
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
    """Return the compaction for *target*, and the output figure if lowering it avoids a loss.

    It is *last*, the last compaction, if no new one is due, None if none ever was.
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
    """Return a compaction that loses less beside a lowered output figure, and that figure; None if there is none.

    *otherwise_fits*: the compaction beside the request's own output figure fits, so a lossy one here gains nothing.
    """
    budget = measured.budget_for(target)
    lossy: tuple[Compaction | None, int | None] | None = None
    for reserve in _smaller_reserves(measured, budget):
        schedule = measured.schedule(policy, layout, replace(budget, reserve=reserve))
        compaction = schedule.newest_compaction(last, target)
        loses = is_lossy(compaction, last)
        if not loses and schedule.fits(compaction, budget.input):
            return compaction, None  # it fits beside the request's own output figure, too
        if not schedule.fits(compaction, budget.input_budget(reserve)):
            continue
        used = budget.quantised_fixed + schedule.view_tokens(layout.count, compaction)
        chosen = compaction, _room_left(measured, budget, used)
        if not loses:
            return chosen
        if lossy is None and not otherwise_fits:
            lossy = chosen
    return lossy


def _smaller_reserves(measured: MeasuredRequest, budget: TokenBudget) -> list[int]:
    """Return the reserves to try instead of the request's own, larger ones first: half the window, then 1,024."""
    least = to_our_tokens(measured.parsed.envelope.least_output, measured.known.token_ratio)
    half, small = budget.window // 2, smallest_lowered(budget.window)
    return [reserve for reserve in (max(least, half), max(least, small)) if reserve < budget.reserve]


def lowered_further(measured: MeasuredRequest, written: Written, view: CountedView) -> int | None:
    """Return a lower figure for an output that was lowered already, if the provider counts more input than we do.

    None if none is left that is worth an answer: then the input has to give way.
    """
    lowered, budget = written.lowered_output, view.budget
    if lowered is None:
        return None
    used = to_our_tokens(view.expected_tokens, measured.known.token_ratio)
    left = _room_left(measured, budget, used)
    if left is None or not smallest_lowered(budget.window) <= left < lowered:
        return None
    return left


def _room_left(measured: MeasuredRequest, budget: TokenBudget, used: int) -> int | None:
    """Return the output figure beside *used* tokens of input; None if that is no less than what was requested."""
    least = to_our_tokens(measured.parsed.envelope.least_output, measured.known.token_ratio)
    left = max(1, least, budget.output_beside(used))
    if left >= budget.reserve:
        return None
    return left


# Refusals.


def refused_unwritten(measured: MeasuredRequest, policy: Policy, layout: Layout) -> Reject | None:
    """Return the refusal of a request whose newest round has thousands of calls and cannot fit, however it is cut.

    None for every other request that has a round. The error states the tokens that no view goes below, and the report
    those of the client's own bytes.
    """
    if measured.target.max_loss != "any":
        return None
    newest = measured.parsed.items[layout.cuts[-1] :]
    if sum(len(item.calls) + len(item.answers) for item in newest) <= MANY_CALLS:
        return None
    least = measured.budget_for(structs.replace(measured.target, keep_addition=False))
    reserve = least.window // LEAST_RESERVE
    minimum = measured.schedule(policy, layout, least).minimum_tokens() - least.quantised_fixed + least.fixed
    guessed = sum(item.guess for item in newest)
    view = verbatim(measured, layout)
    smallest = structs.replace(view, budget=least, counted=minimum)
    if minimum - guessed <= least.input_budget(reserve) or not is_certain(smallest, reserve):
        return None
    return Reject(refusal(smallest, measured.budget.reserve), view)


def guessed_tokens(view: CountedView) -> int:
    """Return the tokens of the view that are only a guess."""
    items, record = view.measured.parsed.items, view.edits.record
    if record is None:
        return sum(item.guess for item in items)
    shown = {*record.compaction.anchors, *range(record.compaction.cut, len(items))}
    return sum(items[index].guess for index in shown)


def is_certain(view: CountedView, reserve: int) -> bool:
    """True if the view is too large by our own count, too, for a window that a person, server or error stated."""
    known = view.measured.known
    if known.stated_window is None:
        return False
    ratio = max(1.0, known.token_ratio)
    return view.tokens > input_limit(known.stated_window, int(reserve * ratio), known.route.max_input)


def refusal(view: CountedView, reserve: int) -> ContextTooLong:
    """Return the error for *view*, the smallest one beside *reserve*, with its excess and its largest part."""
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
