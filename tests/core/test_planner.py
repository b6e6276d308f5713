"""The planner as a table of states, and what holds for every way through it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from proxy.core.compaction.schedule import CompactionTarget
from proxy.core.decisions import (
    CountedView,
    Forward,
    KnownRoute,
    LookedUp,
    MeasuredRequest,
    NeedBlock,
    NeedFacts,
    NeedRecord,
    Policy,
    Reject,
    TooLossy,
    UsageAnchor,
    Written,
)
from proxy.core.models import Route
from proxy.core.planner import MANY_CALLS, decide, refused_unwritten
from proxy.core.request import Request
from tests.support.conversation_strategies import agent_sessions
from tests.support.engine_fixtures import POLICY, TENANT, UNSHRUNK, DictRecords, Replica, chat_body, tool_map_of_package
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, chat_turn, prose

WINDOW = 8192
Message = dict[str, Any]
PLANNING = structs.replace(POLICY, tools=tool_map_of_package())
MOST_BLOCKS = 9
"""Three tries each with the request's own target, without its default reserve and without the addition."""


def measured(
    messages: Sequence[Message],
    window: int = WINDOW,
    target: CompactionTarget | None = None,
    replica: Replica | None = None,
    ratio: float = 1.0,
    **members: Any,
) -> MeasuredRequest:
    """*messages* as a measured request; *ratio*: provider tokens per token of our count."""
    measurer = (replica or Replica()).measurer
    request = Request("chat", chat_body(messages, **members), TENANT, "r")
    route = Route("stub", "house-model", window, None, "o200k_base", "configured")
    known = KnownRoute(route, window, "configured", None, ratio)
    return asyncio.run(measurer.count(request, measurer.locate(request), known, window, target)).with_facts()


def looked_up(request: MeasuredRequest) -> LookedUp:
    """What is known of *request* once nothing was found in the store."""
    return LookedUp(request.lay_out(), None)


def written(request: MeasuredRequest, need: NeedBlock, replica: Replica | None = None) -> Written:
    """The record that *need* asks for, written by the real engine over a store of its own."""
    return asyncio.run((replica or Replica()).compactions.write(request, need))


LONG = agent_session(20, 500)
SHORT = agent_session(3, 100)


def without_facts(request: MeasuredRequest) -> MeasuredRequest:
    """*request* as it is measured: no facts of its calls and results were read."""
    measurer, known = Replica().measurer, request.known
    located = measurer.locate(request.request)
    return asyncio.run(measurer.count(request.request, located, known, known.window or WINDOW, request.target))


def test_facts_are_read_for_a_compaction_only() -> None:
    """A request that needs no compaction is planned without the facts of its calls; with them the plan is the same."""
    for messages, expected in ((LONG, NeedFacts), (agent_session(12, 200), Forward)):
        request = without_facts(measured(messages))
        assert not request.has_facts
        assert isinstance(decide(request, PLANNING, looked_up(request)), expected)
        with_facts = request.with_facts()
        assert isinstance(decide(with_facts, PLANNING, looked_up(with_facts)), NeedBlock | Forward)


def test_below_the_low_mark_nothing_is_looked_up() -> None:
    """What fits by far is forwarded as it came, with no store asked."""
    request = measured(SHORT)
    decision = decide(request, PLANNING)
    assert isinstance(decision, Forward)
    assert decision.view.body is request.request.body
    assert decision.view.edits.is_verbatim
    assert decision.view.layout is None


@pytest.mark.parametrize("target", [CompactionTarget(force=True), CompactionTarget(limit=100)], ids=["now", "limit"])
def test_a_tightened_target_is_never_answered_without_the_record(target: CompactionTarget) -> None:
    """A request that fits, but is asked for less, needs to know what was sent before."""
    assert isinstance(decide(measured(SHORT, target=target), PLANNING), NeedRecord)


def test_above_the_low_mark_the_record_is_needed() -> None:
    """From there on the conversation may have been compacted before."""
    assert isinstance(decide(measured(LONG), PLANNING), NeedRecord)


def test_without_a_record_between_the_marks_the_bytes_are_forwarded() -> None:
    """No compaction is due below the high mark."""
    request = measured(agent_session(8, 500))
    assert isinstance(decide(request, PLANNING), NeedRecord)
    decision = decide(request, PLANNING, looked_up(request))
    assert isinstance(decision, Forward)
    assert decision.view.edits.is_verbatim
    assert decision.view.layout is not None


def test_above_the_high_mark_a_block_is_needed_and_then_the_view_fits() -> None:
    """A new compaction names its boundary, and what is made of it fits."""
    request = measured(LONG)
    need = decide(request, PLANNING, looked_up(request))
    assert isinstance(need, NeedBlock)
    assert need.compaction.boundary in need.lookup.layout.boundaries
    final = decide(request, PLANNING, written(request, need))
    assert isinstance(final, Forward)
    assert final.view.edits.compacted_now
    assert final.view.tokens <= request.budget.input


def test_a_record_that_still_does_is_used_again() -> None:
    """The view after a known record is built without another block, and is no new compaction."""
    request = measured(LONG)
    need = decide(request, PLANNING, looked_up(request))
    assert isinstance(need, NeedBlock)
    record = written(request, need).record
    longer = measured([*LONG, *agent_session(1, 50)[2:]])
    found = LookedUp(longer.lay_out(), record, first=record.compaction if record else None)
    decision = decide(longer, PLANNING, found)
    assert isinstance(decision, Forward)
    assert decision.view.edits.record is record
    assert not decision.view.edits.compacted_now


@pytest.mark.parametrize("later", range(1, 14))
def test_a_record_still_does_exactly_as_long_as_the_schedule_says_so(later: int) -> None:
    """What a record says of its view's size is enough to see that nothing new is due."""
    request = measured(LONG)
    need = decide(request, PLANNING, looked_up(request))
    assert isinstance(need, NeedBlock)
    record = written(request, need).record
    assert record is not None
    longer = measured([*LONG, *agent_session(later, 200)[2:]])
    layout, last = longer.lay_out(), record.compaction
    schedule = longer.schedule(PLANNING, layout, longer.budget)
    decision = decide(longer, PLANNING, LookedUp(layout, record, first=last))
    assert isinstance(decision, Forward) == (schedule.newest_compaction(last) == last)
    grown = layout.sums[layout.count] - layout.sums[last.boundary]
    assert schedule.view_tokens(layout.count, last) == last.view_tokens + grown


@pytest.mark.parametrize(("max_loss", "messages"), [("none", LONG), ("no_drop", [*chat_turn(1, 9000)[:1]])])
def test_what_would_lose_too_much_is_said_before_anything_is_written(max_loss: Any, messages: list[Message]) -> None:
    """A model that may not compact, or not clip, gets no view, and no block is asked for."""
    request = measured(messages, target=CompactionTarget(max_loss=max_loss))
    assert isinstance(decide(request, PLANNING, looked_up(request)), TooLossy)


def test_an_operators_request_compacts_what_would_fit() -> None:
    """Asked for, a compaction happens below the mark; not for a dry run; and once at one boundary."""
    request = measured(agent_session(8, 500))
    found = structs.replace(looked_up(request), requested=True)
    need = decide(request, PLANNING, found)
    assert isinstance(need, NeedBlock)
    assert need.target.wait_for_summary
    dry = structs.replace(request, target=CompactionTarget(dry_run=True))
    assert isinstance(decide(dry, PLANNING, found), Forward)
    again = structs.replace(found, record=written(request, need).record)
    assert isinstance(decide(request, PLANNING, again), Forward)


def test_an_operators_request_may_name_a_share() -> None:
    """The view goes down to the share that was asked for; a share in the request's own header wins."""
    request = measured(agent_session(8, 500))
    found = structs.replace(looked_up(request), requested=True, share=0.1)
    need = decide(request, PLANNING, found)
    assert isinstance(need, NeedBlock)
    assert need.target.share == 0.1
    usual = decide(request, PLANNING, structs.replace(found, share=None))
    assert isinstance(usual, NeedBlock)
    assert need.compaction.view_tokens < usual.compaction.view_tokens
    own = structs.replace(request, target=CompactionTarget(force=True, share=0.3))
    need = decide(own, PLANNING, found)
    assert isinstance(need, NeedBlock)
    assert need.target.share == 0.3


def test_what_the_provider_counts_is_what_must_fit() -> None:
    """A view inside our own count is compacted if the provider counts half as much again."""
    messages = agent_session(10, 500)
    assert isinstance(decide(measured(messages), PLANNING, looked_up(measured(messages))), Forward)
    dear = measured(messages, ratio=1.5)
    assert isinstance(decide(dear, PLANNING, looked_up(dear)), NeedBlock)


@pytest.mark.parametrize("output", [8_192, 3_000])
def test_a_lowered_output_figure_is_lowered_further_before_a_message_gives_way(output: int) -> None:
    """The provider counted more of this very conversation than our ratio says: a shorter answer is left, whole."""
    request = measured([{"role": "user", "content": prose(1, 5_000)}], max_tokens=output)
    counted = request.counts.total
    request = structs.replace(request, anchor=UsageAnchor(counted, counted + 800, -1))
    final = finish(request)
    assert isinstance(final, Forward)
    assert isinstance(final.view, CountedView)
    assert final.view.edits.record is None
    assert counted + 800 + (final.view.lowered_output or 0) <= WINDOW
    assert len(json.loads(final.view.body)["messages"][0]["content"]) == len(prose(1, 5_000))


@pytest.mark.parametrize("stated", [True, False])
def test_only_a_stated_window_refuses(stated: bool) -> None:
    """System text that nothing can shrink is refused if somebody stated the window; if not, the provider judges."""
    messages = [{"role": "system", "content": prose(1, 9000)}, {"role": "user", "content": "hi"}]
    request = measured(messages, max_tokens=100)
    if not stated:
        request = structs.replace(request, known=structs.replace(request.known, stated_window=None))
    final = finish(request)
    assert isinstance(final, Reject if stated else Forward)
    if isinstance(final, Reject):
        assert final.error.largest == "system messages"


def finish(request: MeasuredRequest, replica: Replica | None = None) -> Forward | TooLossy | Reject:
    """The final decision, with every target on the way at least as tight as the one before."""
    replica = replica or Replica(DictRecords())
    decision = decide(request, PLANNING)
    blocks: list[NeedBlock] = []
    while True:
        match decision:
            case NeedRecord():
                decision = decide(request, PLANNING, looked_up(request))
            case NeedBlock():
                blocks.append(decision)
                assert len(blocks) <= MOST_BLOCKS
                decision = decide(request, PLANNING, written(request, decision, replica))
            case Forward() | TooLossy() | Reject():
                for earlier, later in itertools.pairwise(blocks):
                    assert is_tighter(later.target, earlier.target)
                return decision


def is_tighter(target: CompactionTarget, than: CompactionTarget) -> bool:
    """True if *target* gives up something that *than* did not: room of the view, the reserve, or the addition."""
    if target.keep_addition != than.keep_addition or target.reserve != than.reserve:
        return not target.keep_addition or target.reserve is not None
    return target.limit is not None and target.tries < than.tries and (than.limit is None or target.limit <= than.limit)


@settings(max_examples=25, phases=UNSHRUNK)
@given(
    st.one_of(
        agent_sessions(), st.integers(2, 30).map(lambda turns: [m for t in range(turns) for m in chat_turn(t, 90)])
    ),
    st.sampled_from([1024, 2048, 4096, 16_384]),
    st.sampled_from([0.8, 1.0, 1.5, 2.5]),
    st.sampled_from([None, 100, 1500]),
)
def test_every_way_ends_in_a_view_that_fits_or_a_refusal(
    messages: list[Message], window: int, ratio: float, output: int | None
) -> None:
    """Whatever the conversation, the window and the provider's count: few blocks, each tighter, and then it fits."""
    members = {} if output is None else {"max_tokens": output}
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    request = measured(messages, window, ratio=ratio, tools=AGENT_TOOLS, **members)
    final = finish(request)
    assert not isinstance(final, TooLossy)
    if isinstance(final, Forward):
        reserve = final.view.edits.lowered_output or final.view.budget.reserve
        assert final.view.expected_tokens <= final.view.budget.input_budget(reserve) * ratio + ratio


def test_a_policy_without_stages_refuses_or_forwards() -> None:
    """With every stage off nothing is written: what is too large is refused."""
    off = replace(
        POLICY.rules,
        enabled_stages=replace(POLICY.rules.enabled_stages, fold=False, drop=False, clip=False, tools=False),
    )
    bare = Policy(replace(off, truncate=None, prune_pass=replace(off.prune_pass, dedup=None, prune=None)))
    request = measured(LONG)
    final = decide(request, bare, looked_up(request))
    assert isinstance(final, Reject)


def parallel_calls(number: int, result: str = "done") -> list[Message]:
    """One round of so many calls and their results."""
    calls = [{"id": f"c{at}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for at in range(number)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]
    return [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": calls}, *results]


def test_a_newest_round_that_cannot_fit_is_refused_at_once() -> None:
    """Where no try can help, none is made: one block is written, and the refusal says what is too large."""
    request, blocks = measured(parallel_calls(MANY_CALLS // 2), window=2_000), 0
    compactions, progress = Replica(DictRecords()).compactions, looked_up(request)
    decision = decide(request, PLANNING, progress)
    while isinstance(decision, NeedBlock):
        blocks += 1
        decision = decide(request, PLANNING, asyncio.run(compactions.write(request, decision)))
    assert isinstance(decision, Reject)
    assert blocks == 1


def test_thousands_of_calls_that_cannot_fit_are_refused_unwritten() -> None:
    """No facts are read and no block is written; the error states what no view goes below."""
    request = without_facts(measured(parallel_calls(MANY_CALLS)))
    decision = decide(request, PLANNING, looked_up(request))
    assert isinstance(decision, Reject)
    assert decision.error.largest == "newest messages"
    assert WINDOW < decision.error.tokens < request.counts.total
    assert decision.view.body == request.request.body


def test_thousands_of_calls_whose_results_can_be_cut_are_not_refused_unwritten() -> None:
    """The round is larger than the window, and the least of it is not."""
    request = measured(parallel_calls(MANY_CALLS, "one more line of a file\n" * 40), window=150_000)
    assert request.counts.total > 150_000
    assert refused_unwritten(request, PLANNING, request.lay_out()) is None


@pytest.mark.parametrize("change", ["window", "stated_window", "max_loss"])
def test_thousands_of_calls_are_not_refused_unwritten_if(change: str) -> None:
    """Another view may fit: in a larger window, in one that nobody stated, and in that of a fallback."""
    request = measured(parallel_calls(MANY_CALLS))
    if change == "window":
        request = measured(parallel_calls(MANY_CALLS), window=1_000_000)
    elif change == "stated_window":
        request = structs.replace(request, known=structs.replace(request.known, stated_window=None))
    else:
        request = structs.replace(request, target=CompactionTarget(max_loss="no_drop"))
    assert refused_unwritten(request, PLANNING, request.lay_out()) is None
