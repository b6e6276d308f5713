"""Builds views that differ from the client's request: its items, the texts of a record, edited members around them."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from proxy.core.apis.envelope import TOOLS, splice
from proxy.core.compaction.prune import oldest_results
from proxy.core.compaction.record import VERSION, Compaction, CompactionRecord
from proxy.core.compaction.view import AssembledItems, assemble, with_present_marks, write_texts
from proxy.core.conversation import Layout
from proxy.core.decisions import (
    CountedView,
    Edits,
    LookedUp,
    MeasuredRequest,
    NeedFacts,
    Policy,
    Written,
    verbatim,
)
from proxy.core.tokens.budget import summary_output, to_our_tokens
from proxy.core.tool_calls import Pair, pairs_of

PRUNE_ATTEMPTS = 3
"""Attempts to prune enough results of a client's own compaction: placeholders are counted only when written."""


def compacted_view(measured: MeasuredRequest, written: Written) -> CountedView:
    """Return the view for *written*: the client's items with the record's texts, and edited members around them."""
    lookup, target, record = written.lookup, written.target, written.record
    has_addition = record is not None and target.keep_addition and measured.addition.tokens > 0
    items = _items_of(measured, lookup.layout, record, has_addition=has_addition)
    body, stages = _edited_body(measured, items.content, written.lowered_output, has_addition=has_addition)
    budget = measured.budget_for(structs.replace(target, keep_addition=has_addition))
    tokens = budget.fixed - measured.counts.roles.system + items.tokens
    boundary, compacted_now = -1, lookup.wrote
    if record is not None:
        boundary, stages = record.compaction.boundary, record.compaction.stages + stages
        compacted_now = compacted_now or lookup.record is None or lookup.record.compaction != record.compaction
    return CountedView(
        request=measured.request,
        known=measured.known,
        measured=measured,
        budget=budget,
        layout=lookup.layout,
        body=body,
        counted=tokens,
        expected_tokens=measured.expected_tokens(boundary, tokens),
        roles=items.roles,
        summary=items.summary_tokens,
        edits=Edits(
            record=record,
            previous=lookup.first,
            compacted_now=compacted_now,
            lowered_output=written.lowered_output,
            tools_shrunk=bool(measured.tools_json),
            addition=has_addition,
            stages=stages,
        ),
    )


def view_without_addition(view: CountedView) -> CountedView:
    """Return *view* without the addition of a feature."""
    edits = view.edits
    target = structs.replace(view.measured.target, keep_addition=False)
    lookup = LookedUp(view.layout or view.measured.lay_out(), edits.record, first=edits.previous)
    bare = compacted_view(view.measured, Written(lookup, target, edits.record, edits.lowered_output))
    return structs.replace(bare, edits=structs.replace(bare.edits, compacted_now=edits.compacted_now))


def _items_of(
    measured: MeasuredRequest, layout: Layout, record: CompactionRecord | None, *, has_addition: bool
) -> AssembledItems:
    """Return the items of the view, with the addition's note at the end of the block if it *has_addition*."""
    if record is None:
        scan, roles = measured.parsed.scan, measured.counts.roles
        return AssembledItems(measured.parsed.body[scan.start : scan.end], roles.system + roles.history, roles)
    note = ""
    if has_addition:
        note = measured.addition.note
    original, edits = measured.original(layout), record.edits
    if edits:
        edits = with_present_marks(original, edits)
    return assemble(original, record.compaction, record.block, edits, measured.read_item, note)


def _edited_body(
    measured: MeasuredRequest, items: bytes, lowered_output: int | None, *, has_addition: bool
) -> tuple[bytes, tuple[str, ...]]:
    """Return the body with *items* in place of its own, and the stages that changed members around them."""
    parsed, tools = measured.parsed, measured.tools_json
    body, scan, envelope = parsed.body, parsed.scan, parsed.envelope
    members: dict[str, str] = {}
    stages: list[str] = []
    if tools:
        members[tools_member(measured)] = tools
        stages.append("tools")
    if has_addition:
        members["tools"] = measured.addition.added_to(tools or envelope.value_or_nothing("tools"))
    if lowered_output is not None:
        figure = max(int(lowered_output * measured.known.token_ratio), envelope.least_output)
        thinking = envelope.thinking(figure)
        members |= _output_members(measured, figure) | thinking
        stages.append("output")
        if thinking:
            stages.append("thinking")
    if has_addition:
        stages.append("recall")
    if not members:
        return b"".join((body[: scan.start], items, body[scan.end :])), ()
    return splice(envelope, len(body[: scan.start].decode()), items, members), tuple(stages)


def tools_member(measured: MeasuredRequest) -> str:
    """Return the name of the counted member that holds the tools. Raises ``StopIteration`` if there is none."""
    return next(key for key in TOOLS if key in measured.counts.members)


def _output_members(measured: MeasuredRequest, figure: int) -> dict[str, str]:
    """Return the members that state the output figure, lowered to *figure*."""
    fields = measured.parsed.envelope.fields
    return {key: str(figure) for key in measured.api_format.OUTPUT_FIGURES if key in fields}


# A client's own compaction.


def client_compaction_view(measured: MeasuredRequest, policy: Policy) -> CountedView | NeedFacts | None:
    """Return the view for a client that compacts its conversation itself; None if it cannot be made to fit.

    The model's answer replaces the history, so the model must read all of it: the client's bytes are sent unchanged,
    even if earlier views of the conversation were compacted. If they do not fit, the output figure is lowered to what a
    summary needs; if that is not enough, the oldest tool results are pruned, as few as possible. No record is read or
    written.
    """
    layout = measured.lay_out()
    budget = replace(measured.budget, fixed=measured.counts.fixed)
    view = verbatim(measured, layout, budget)
    reserve = budget.reserve
    if _excess(view, reserve) <= 0:
        return view
    if policy.lower_output != "never":
        least = to_our_tokens(measured.parsed.envelope.least_output, measured.known.token_ratio)
        reserve = min(reserve, summary_output(budget.window, least))
    if _excess(view, reserve) <= 0:
        return _with_reserve(view, layout, None, reserve)
    if not measured.has_facts:
        return NeedFacts()
    return _pruned(view, policy, layout, reserve)


def _excess(view: CountedView, reserve: int) -> int:
    """Return the tokens by which *view* is too large beside an answer of *reserve*."""
    return to_our_tokens(view.expected_tokens, view.measured.known.token_ratio) - view.budget.input_budget(reserve)


def _pruned(view: CountedView, policy: Policy, layout: Layout, reserve: int) -> CountedView | None:
    """Return *view* with as many of its oldest tool results pruned as it takes to fit; None if all are too few."""
    measured, rules = view.measured, policy.rules
    items, count = measured.parsed.items, layout.count
    pairs: list[Pair] = []
    if rules.prune_pass.prune:
        pairs += pairs_of(items, 0, count)
    over = _excess(view, reserve)
    for _ in range(PRUNE_ATTEMPTS):
        placeholders = oldest_results(pairs, items, over)
        if placeholders is None:
            return None
        compaction = Compaction(count, 0, 0, placeholders=placeholders, stages=("prune",))
        block, edits = write_texts(measured.original(layout), compaction, measured.count, policy.tools)
        budget = view.budget
        record = CompactionRecord(VERSION, compaction, block, edits, budget.window, budget.reserve, budget.fixed)
        smaller = _with_reserve(view, layout, record, reserve)
        excess = _excess(smaller, reserve)
        if excess <= 0:
            return smaller
        over += excess  # the placeholders took more than was estimated for them
    return None


def _with_reserve(view: CountedView, layout: Layout, record: CompactionRecord | None, reserve: int) -> CountedView:
    """Return the view of *record* with the output figure lowered to the room left, but to no less than *reserve*."""
    measured, budget = view.measured, view.budget
    unshrunk = structs.replace(measured, budget=budget, tools_json="")
    lookup = LookedUp(layout, record)
    written = Written(lookup, measured.target, record, None)
    output: int | None = None
    if measured.requested_output is not None and reserve < budget.reserve:
        compacted = view
        if record is not None:
            compacted = compacted_view(unshrunk, structs.replace(written, lowered_output=reserve))
        used = to_our_tokens(compacted.expected_tokens, measured.known.token_ratio)
        output = min(budget.reserve, max(reserve, budget.output_beside(used)))
    if record is None and output is None:
        return view
    return compacted_view(unshrunk, structs.replace(written, lowered_output=output))
