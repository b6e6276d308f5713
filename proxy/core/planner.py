"""Choose what goes upstream for one measured request. Pure: never waits, reads no clock, touches no cache.

A client sends its whole conversation with every call, so the planner works everything out anew from the items and
their token counts. But a compaction that was sent is a fact: the next view must begin with the very same bytes, or the
provider's prompt cache is lost and replicas disagree. So the planner goes on from the newest compaction record of the
conversation, which says where the last compaction stood, what it folded, and the literal texts it put in.

What the planner lacks it names. ``decide`` returns one of five decisions; two of them say what is missing, and the
engine calls again once it has looked that up or written it:

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

from proxy.core.apis.envelope import TOOLS, splice
from proxy.core.compaction.prune import oldest_results
from proxy.core.compaction.record import VERSION, Compaction, CompactionRecord
from proxy.core.compaction.schedule import CompactionTarget, MaxLoss
from proxy.core.compaction.view import AssembledItems, RenderOptions, assemble, write_texts
from proxy.core.conversation import Layout
from proxy.core.decisions import (
    NO_EDITS,
    START,
    CountedView,
    Decision,
    Edits,
    Forward,
    LookedUp,
    MeasuredRequest,
    NeedBlock,
    NeedRecord,
    Policy,
    Progress,
    Reject,
    Start,
    TooLossy,
    Written,
)
from proxy.core.errors import OUTPUT, ContextTooLong
from proxy.core.tokens.budget import TokenBudget, input_limit, summary_output, to_our_tokens
from proxy.core.tool_calls import pairs_of

LOSSY = frozenset({"drop", "clip"})
"""Stages that lose what the model is looking at."""

LEAST_RESERVE = 32
"""A request that names no output figure keeps at least one token in so many of the window for its answer."""

PRUNE_ATTEMPTS = 3
"""How often the oldest results of a client's own compaction are chosen anew, once their placeholders were counted."""


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


def _before_lookup(measured: MeasuredRequest, policy: Policy) -> Decision:
    target = measured.target
    if measured.client_compaction and target.is_plain and not measured.parsed.envelope.stored:
        view = client_compaction_view(measured, policy)
        if view is not None:
            return Forward(view)
    is_asked = target.wait_for_summary and target.limit is None
    if (target.is_plain or is_asked) and not measured.tools_json and is_quiet(measured, policy):
        # Nothing can have happened to this conversation, nor would it be worth a compaction.
        return Forward(replace(verbatim(measured, None), edits=Edits(nothing_to_fold=is_asked)))
    return NeedRecord()


def _after_lookup(measured: MeasuredRequest, policy: Policy, found: LookedUp) -> Decision:
    target = measured.target
    if target.is_plain and found.record is None and not measured.tools_json and provider_compacts(measured):
        return Forward(verbatim(measured, found.layout))
    if found.requested and not target.dry_run:
        share = found.share if target.share is None else target.share
        target = replace(target, force=True, wait_for_summary=True, max_loss="any", share=share)
    if target.force and target.limit is None and _was_compacted_here(found):
        # Asked again at the same boundary: nothing more happens.
        target = replace(target, force=False, wait_for_summary=False)
    return _planned(measured, policy, found, target)


def _planned(measured: MeasuredRequest, policy: Policy, found: LookedUp, target: CompactionTarget) -> Decision:
    """The next step towards *target*: an existing record is verified, a new compaction needs its block."""
    last = found.record.compaction if found.record else None
    decided = decided_before(measured, policy, found, target)
    compaction, lowered_output = decided or choose_compaction(measured, policy, found.layout, last, target)
    edited = bool(measured.tools_json) or lowered_output is not None
    if _exceeds(target.max_loss, compaction, last, edited):
        return TooLossy()
    if compaction is None:
        return _verified(measured, policy, Written(found, target, None, lowered_output))
    if found.record is not None and compaction == last:
        return _verified(measured, policy, Written(found, target, found.record, lowered_output))
    at_same_boundary = last is not None and last.boundary == compaction.boundary
    replaces = target.replaces or target.force or at_same_boundary
    return NeedBlock(found, replace(target, replaces=replaces), compaction, lowered_output)


def _verified(measured: MeasuredRequest, policy: Policy, written: Written) -> Decision:
    """Forward the view if it fits, else try a tighter target, else refuse."""
    view = build_view(measured, written)
    reserve = written.lowered_output or view.budget.reserve
    room = view.budget.input_budget(reserve)
    excess = to_our_tokens(view.expected_tokens, measured.token_ratio) - room
    if excess <= 0:
        return Forward(view)
    found = _go_on_from(written)
    tighter_targets = () if _is_hopeless(measured, policy, found.layout, view) else TIGHTER_TARGETS
    for tighter in tighter_targets:
        target = tighter(measured, written, view, excess)
        if target is not None:
            return _planned(measured, policy, found, target)
    if excess > guessed_tokens(view) and is_certain(view, reserve):
        return Reject(refusal(view, reserve), view)
    return Forward(view)  # only guesses are too much: the provider judges


def _is_hopeless(measured: MeasuredRequest, policy: Policy, layout: Layout, view: CountedView) -> bool:
    """True if the newest round alone is too large, however short: each more try would cost as much as the first."""
    budget = view.budget
    return measured.schedule(policy, layout, budget).minimum_tokens() > budget.input_budget(
        budget.window // LEAST_RESERVE
    )


def _go_on_from(written: Written) -> LookedUp:
    """What is known after a record was written: it is the newest one now."""
    found = written.found
    wrote = found.wrote or written.record is not found.record
    return replace(found, record=written.record or found.record, wrote=wrote)


def _was_compacted_here(found: LookedUp) -> bool:
    return found.record is not None and found.record.compaction.boundary == found.layout.count


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
    return replace(target, limit=max(0, limit), force=True, replaces=True, wait_for_summary=False, tries=tries)


def without_default_reserve(
    measured: MeasuredRequest, written: Written, view: CountedView, excess: int
) -> CompactionTarget | None:
    """The target with hardly any room kept for the answer; None if the request names an output figure itself.

    A client that names none prefers a short answer to none.
    """
    del excess
    least = view.budget.window // LEAST_RESERVE
    if measured.requested_output is not None or view.budget.reserve <= least:
        return None
    return replace(written.target, reserve=least, replaces=True, tries=2)


def without_addition(
    measured: MeasuredRequest, written: Written, view: CountedView, excess: int
) -> CompactionTarget | None:
    """The target without room for the addition; None if there is none. No request is refused for want of its room."""
    del view, excess
    if not measured.addition.tokens or not written.target.keep_addition:
        return None
    return replace(written.target, keep_addition=False, replaces=True, tries=2)


TIGHTER_TARGETS = (tighter_limit, without_default_reserve, without_addition)

# What the schedule is asked.


def is_quiet(measured: MeasuredRequest, policy: Policy) -> bool:
    """True if the request as the client sent it is below half of the low mark: nothing can have happened to it."""
    budget = measured.budget
    limit = min(budget.baseline, budget.input)
    quiet = min(budget.quiet(policy.rules.marks, limit), limit)
    return budget.fixed + measured.counts.history <= quiet and budget.reserve <= budget.window // 2


def provider_compacts(measured: MeasuredRequest) -> bool:
    """True if the client wants the provider to shorten the conversation itself, before it is too long."""
    limit = measured.parsed.envelope.provider_compacts_from
    return limit is not None and limit <= measured.budget.window * measured.token_ratio


def decided_before(
    measured: MeasuredRequest, policy: Policy, found: LookedUp, target: CompactionTarget
) -> tuple[Compaction, int] | None:
    """What was decided for this very request when it came before, its lowered output figure among it."""
    record, budget = found.record, measured.budget_for(target)
    if record is None or not record.lowered_output or not target.is_plain or not _was_compacted_here(found):
        return None
    if target.lower_output == "never" or record.lowered_output >= budget.reserve:
        return None
    schedule = measured.schedule(policy, found.layout, budget)
    if not schedule.fits(record.compaction, budget.input_budget(record.lowered_output)):
        return None
    return record.compaction, record.lowered_output


def choose_compaction(
    measured: MeasuredRequest, policy: Policy, layout: Layout, last: Compaction | None, target: CompactionTarget
) -> tuple[Compaction | None, int | None]:
    """The newest compaction towards *target*, and the output figure if it is lowered so that nothing is lost.

    *last* itself if nothing new is due, None if nothing ever was.
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
    least = to_our_tokens(measured.parsed.envelope.least_output, measured.token_ratio)
    half, small = budget.window // 2, min(1024, budget.window // 4)
    return [reserve for reserve in (max(least, half), max(least, small)) if reserve < budget.reserve]


def _room_left(measured: MeasuredRequest, budget: TokenBudget, used: int) -> int | None:
    """The output figure beside *used* tokens of input; None if that is no less than what was asked for."""
    least = to_our_tokens(measured.parsed.envelope.least_output, measured.token_ratio)
    left = max(1, least, budget.window - used - budget.window // 64)
    return left if left < budget.reserve else None


# Views.


def build_view(measured: MeasuredRequest, written: Written) -> CountedView:
    """The view after *written*: what the client sent, with the record's texts and the edits beside the items."""
    found, target, record = written.found, written.target, written.record
    if record is None and not measured.tools_json and written.lowered_output is None:
        budget = measured.budget_for(replace(target, keep_addition=True))
        in_vain = target.wait_for_summary and target.limit is None
        edits = Edits(previous=found.first, nothing_to_fold=in_vain)
        return replace(verbatim(measured, found.layout, budget), edits=edits)
    return _compacted(measured, written)


def verbatim(measured: MeasuredRequest, layout: Layout | None, budget: TokenBudget | None = None) -> CountedView:
    """The client's own bytes, held against *budget* (the request's own by default)."""
    counts = measured.counts
    return CountedView(
        measured=measured,
        budget=_without_addition(budget or measured.budget, measured.addition.tokens),
        layout=layout,
        body=measured.request.body,
        counted=counts.total,
        expected_tokens=expected_tokens(measured, -1, counts.total),
        roles=counts.roles,
        edits=NO_EDITS,
    )


def _compacted(measured: MeasuredRequest, written: Written) -> CountedView:
    found, target, record = written.found, written.target, written.record
    parsed, layout = measured.parsed, found.layout
    budget = measured.budget_for(target)
    has_addition = bool(measured.addition.tokens) and target.keep_addition and record is not None
    items = _items_of(measured, layout, record, measured.addition.note if has_addition else "")
    members: dict[str, str] = {}
    thinking: dict[str, str] = {}
    if measured.tools_json:
        members[tools_member(measured)] = measured.tools_json
    if has_addition:
        members["tools"] = measured.addition.added_to(measured.tools_json or parsed.envelope.value("tools"))
    if written.lowered_output is not None:
        figure = max(int(written.lowered_output * measured.token_ratio), parsed.envelope.least_output)
        thinking = parsed.envelope.thinking(figure)
        members |= _output_members(measured, figure) | thinking
    at = len(parsed.body[: parsed.scan.start].decode())
    if target.keep_addition and not has_addition:
        budget = _without_addition(budget, measured.addition.tokens)
    tokens = budget.fixed - measured.counts.roles.system + items.tokens
    last = found.record.compaction if found.record else None
    stages = record.compaction.stages if record else ()
    used = {
        "tools": measured.tools_json,
        "output": written.lowered_output,
        "thinking": thinking,
        "recall": has_addition,
    }
    return CountedView(
        measured=measured,
        budget=budget,
        layout=layout,
        body=splice(parsed.envelope, at, items.content, members),
        counted=tokens,
        expected_tokens=expected_tokens(measured, record.compaction.boundary if record else -1, tokens),
        roles=items.roles,
        summary=items.summary_tokens,
        edits=Edits(
            record=record,
            previous=found.first,
            compacted_now=found.wrote or (record is not None and record.compaction != last),
            lowered_output=written.lowered_output,
            tools_shrunk=bool(measured.tools_json),
            addition=has_addition,
            stages=stages + tuple(name for name, value in used.items() if value),
        ),
    )


def _without_addition(budget: TokenBudget, tokens: int) -> TokenBudget:
    """*budget* without the room that was kept for an addition of *tokens*."""
    return replace(budget, fixed=budget.fixed - tokens) if tokens else budget


def _items_of(measured: MeasuredRequest, layout: Layout, record: CompactionRecord | None, note: str) -> AssembledItems:
    """The items of the view, with *note* at the end of the block."""
    if record is None:
        scan, roles = measured.parsed.scan, measured.counts.roles
        return AssembledItems(measured.parsed.body[scan.start : scan.end], roles.system + roles.history, roles)
    return assemble(measured.original(layout), record.compaction, record.block_with(note), record.edits, measured.count)


def tools_member(measured: MeasuredRequest) -> str:
    """The name of the counted member that holds the tools. Raises ``StopIteration`` if there is none."""
    return next(key for key in TOOLS if key in measured.counts.members)


def _output_members(measured: MeasuredRequest, figure: int) -> dict[str, str]:
    """The members that state the output figure, lowered to *figure*."""
    fields = measured.parsed.envelope.fields
    return {key: str(figure) for key in measured.api_format.OUTPUT_FIGURES if key in fields}


def expected_tokens(measured: MeasuredRequest, boundary: int, tokens: int) -> int:
    """What the provider will count for a view of *tokens*; *boundary*: of its compaction, -1 if there is none."""
    ratio = measured.token_ratio
    expected = measured.anchor.expect(boundary, tokens, ratio) if measured.anchor else None
    return int(tokens * ratio) if expected is None else expected


# A client's own compaction.


def client_compaction_view(measured: MeasuredRequest, policy: Policy) -> CountedView | None:
    """The view for a client that compacts its conversation itself; None if that is too large for it.

    What the model reads now is all that will be left, so nothing changes, whatever happened to the conversation
    before. If it is too large, its answer gets the room a summary needs instead of what it asked for; after that its
    oldest tool results give way, as many as have to. No record is read or written.
    """
    layout = measured.lay_out()
    budget = replace(measured.budget, fixed=measured.counts.fixed)
    view = verbatim(measured, layout, budget)
    reserve = budget.reserve
    if _excess(view, reserve) <= 0:
        return view
    if policy.lower_output != "never":
        least = to_our_tokens(measured.parsed.envelope.least_output, measured.token_ratio)
        reserve = min(reserve, summary_output(budget.window, least))
    if _excess(view, reserve) <= 0:
        return _with_reserve(view, layout, None, reserve)
    return _pruned(view, policy, layout, reserve)


def _excess(view: CountedView, reserve: int) -> int:
    """Tokens by which *view* is too large beside an answer of *reserve*."""
    return to_our_tokens(view.expected_tokens, view.measured.token_ratio) - view.budget.input_budget(reserve)


def _pruned(view: CountedView, policy: Policy, layout: Layout, reserve: int) -> CountedView | None:
    """*view* without as many of its oldest tool results as it takes beside an answer of *reserve* tokens, verified."""
    measured, rules = view.measured, policy.rules
    items, count = measured.parsed.items, layout.count
    pairs = list(pairs_of(items, 0, count)) if rules.prune_pass.prune else []
    pen = RenderOptions(measured.count, policy.tools)
    over = _excess(view, reserve)
    for _ in range(PRUNE_ATTEMPTS):
        placeholders = oldest_results(pairs, items, over)
        if placeholders is None:
            return None
        compaction = Compaction(count, 0, 0, placeholders=placeholders, stages=("prune",))
        block, edits = write_texts(measured.original(layout), compaction, pen)
        budget = view.budget
        record = CompactionRecord(VERSION, compaction, block, edits, budget.window, budget.reserve, budget.fixed)
        smaller = _with_reserve(view, layout, record, reserve)
        excess = _excess(smaller, reserve)
        if excess <= 0:
            return smaller
        over += excess
    return None


def _with_reserve(view: CountedView, layout: Layout, record: CompactionRecord | None, reserve: int) -> CountedView:
    """The view of *record* with an output figure of at least *reserve* tokens, if that is less than was asked for."""
    measured, budget = view.measured, view.budget
    unshrunk = replace(measured, budget=budget, tools_json="")
    found = LookedUp(layout, record)
    written = Written(found, measured.target, record, None)
    output: int | None = None
    if measured.requested_output is not None and reserve < budget.reserve:
        made = _compacted(unshrunk, replace(written, lowered_output=reserve)) if record else view
        used = to_our_tokens(made.expected_tokens, measured.token_ratio)
        output = min(budget.reserve, max(reserve, budget.window - used - budget.window // 64))
    if record is None and output is None:
        return view
    return _compacted(unshrunk, replace(written, lowered_output=output))


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
    """Why the request goes nowhere: what is too large, and by how much. *view* is the smallest beside *reserve*."""
    measured, budget = view.measured, view.budget
    counts, ratio = measured.counts, measured.token_ratio
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
