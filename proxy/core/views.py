"""Views that differ from what the client sent: built from its items, a record and the edits beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from msgspec import structs

from proxy.core.apis.envelope import TOOLS, splice
from proxy.core.compaction.prune import oldest_results
from proxy.core.compaction.record import VERSION, Compaction, CompactionRecord
from proxy.core.compaction.view import AssembledItems, assemble, write_texts
from proxy.core.conversation import Layout
from proxy.core.decisions import (
    CountedView,
    Edits,
    LookedUp,
    MeasuredRequest,
    NeedFacts,
    ParsedBody,
    Policy,
    Written,
    verbatim,
)
from proxy.core.tokens.budget import summary_output, to_our_tokens
from proxy.core.tool_calls import Pair, pairs_of

PRUNE_ATTEMPTS = 3
"""How often the oldest results of a client's own compaction are chosen anew, once their placeholders were counted."""


def compacted_view(measured: MeasuredRequest, written: Written) -> CountedView:
    """The view after *written*: what the client sent, with the record's texts and the edits beside the items."""
    lookup, target, record = written.lookup, written.target, written.record
    parsed, layout = measured.parsed, lookup.layout
    budget = measured.budget_for(target)
    has_addition = bool(measured.addition.tokens) and target.keep_addition and record is not None
    note, last, boundary = "", None, -1
    stages: tuple[str, ...] = ()
    if has_addition:
        note = measured.addition.note
    if lookup.record is not None:
        last = lookup.record.compaction
    if record is not None:
        boundary, stages = record.compaction.boundary, record.compaction.stages
    items = _items_of(measured, layout, record, note)
    members: dict[str, str] = {}
    thinking: dict[str, str] = {}
    if measured.tools_json:
        members[tools_member(measured)] = measured.tools_json
    if has_addition:
        members["tools"] = measured.addition.added_to(measured.tools_json or parsed.envelope.value_or_nothing("tools"))
    if written.lowered_output is not None:
        figure = max(int(written.lowered_output * measured.known.token_ratio), parsed.envelope.least_output)
        thinking = parsed.envelope.thinking(figure)
        members |= _output_members(measured, figure) | thinking
    if measured.addition.tokens and target.keep_addition and not has_addition:
        budget = measured.without_addition_room(budget)
    tokens = budget.fixed - measured.counts.roles.system + items.tokens
    used = {
        "tools": measured.tools_json,
        "output": written.lowered_output,
        "thinking": thinking,
        "recall": has_addition,
    }
    return CountedView(
        request=measured.request,
        known=measured.known,
        measured=measured,
        budget=budget,
        layout=layout,
        body=_body_of(parsed, items.content, members),
        counted=tokens,
        expected_tokens=measured.expected_tokens(boundary, tokens),
        roles=items.roles,
        summary=items.summary_tokens,
        edits=Edits(
            record=record,
            previous=lookup.first,
            compacted_now=lookup.wrote or (record is not None and record.compaction != last),
            lowered_output=written.lowered_output,
            tools_shrunk=bool(measured.tools_json),
            addition=has_addition,
            stages=stages + tuple(name for name, value in used.items() if value),
        ),
    )


def view_without_addition(view: CountedView) -> CountedView:
    """*view* without what a feature added to it."""
    edits = view.edits
    target = structs.replace(view.measured.target, keep_addition=False)
    lookup = LookedUp(view.layout or view.measured.lay_out(), edits.record, first=edits.previous)
    bare = compacted_view(view.measured, Written(lookup, target, edits.record, edits.lowered_output))
    return structs.replace(bare, edits=structs.replace(bare.edits, compacted_now=edits.compacted_now))


def _items_of(measured: MeasuredRequest, layout: Layout, record: CompactionRecord | None, note: str) -> AssembledItems:
    """The items of the view, with *note* at the end of the block."""
    if record is None:
        scan, roles = measured.parsed.scan, measured.counts.roles
        return AssembledItems(measured.parsed.body[scan.start : scan.end], roles.system + roles.history, roles)
    original = measured.original(layout)
    return assemble(original, record.compaction, record.block, record.edits, measured.read_item, note)


def _body_of(parsed: ParsedBody, items: bytes, members: Mapping[str, str]) -> bytes:
    """The body with *items* in place of its own, and with *members* in place of those around them."""
    body, scan = parsed.body, parsed.scan
    if not members:
        return b"".join((body[: scan.start], items, body[scan.end :]))
    return splice(parsed.envelope, len(body[: scan.start].decode()), items, members)


def tools_member(measured: MeasuredRequest) -> str:
    """The name of the counted member that holds the tools. Raises ``StopIteration`` if there is none."""
    return next(key for key in TOOLS if key in measured.counts.members)


def _output_members(measured: MeasuredRequest, figure: int) -> dict[str, str]:
    """The members that state the output figure, lowered to *figure*."""
    fields = measured.parsed.envelope.fields
    return {key: str(figure) for key in measured.api_format.OUTPUT_FIGURES if key in fields}


# A client's own compaction.


def client_compaction_view(measured: MeasuredRequest, policy: Policy) -> CountedView | NeedFacts | None:
    """The view for a client that compacts its conversation itself; None if that is too large for it.

    What the model reads now is all that will be left, so nothing changes, whatever happened to the conversation
    before. If it is too large, its answer gets the room a summary needs instead of what it requested; after that its
    oldest tool results give way, as many as have to. No record is read or written.
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
    """Tokens by which *view* is too large beside an answer of *reserve*."""
    return to_our_tokens(view.expected_tokens, view.measured.known.token_ratio) - view.budget.input_budget(reserve)


def _pruned(view: CountedView, policy: Policy, layout: Layout, reserve: int) -> CountedView | None:
    """*view* without as many of its oldest tool results as it takes beside an answer of *reserve* tokens, verified."""
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
        over += excess
    return None


def _with_reserve(view: CountedView, layout: Layout, record: CompactionRecord | None, reserve: int) -> CountedView:
    """The view of *record* with an output figure of at least *reserve* tokens, if that is less than was requested."""
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
        output = min(budget.reserve, max(reserve, budget.window - used - budget.window // 64))
    if record is None and output is None:
        return view
    return compacted_view(unshrunk, structs.replace(written, lowered_output=output))
