"""The values of a decision: budgets as targets leave them, and what is expected of a provider's count."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from proxy.core.compaction.schedule import CompactionTarget
from proxy.core.decisions import UsageAnchor, verbatim
from tests.core.test_planner import measured
from tests.support.sample_conversations import agent_session


def test_a_target_changes_the_budget_and_nothing_else() -> None:
    """A smaller reserve gives the input more room; the addition's room is given back if it is not kept."""
    request = measured(agent_session(3, 100))
    assert request.budget_for(CompactionTarget()) == request.budget
    roomier = request.budget_for(CompactionTarget(reserve=10))
    assert roomier.input == request.budget.window - 10
    added = structs.replace(request, addition=replace(request.addition, tokens=7, note="n"))
    assert added.budget_for(CompactionTarget(keep_addition=False)).fixed == request.budget.fixed - 7


def test_an_anchor_speaks_for_its_own_compaction_only() -> None:
    """What was counted for a prefix says nothing of a view after another compaction, nor of a smaller one."""
    anchor = UsageAnchor(counted=1000, reported=1300, boundary=4)
    request = structs.replace(measured(agent_session(3, 100), ratio=1.5), anchor=anchor)
    assert request.expected_tokens(4, 1100) == 1450
    assert request.expected_tokens(-1, 1100) == 1650
    assert request.expected_tokens(4, 900) == 1350


def test_a_conversation_is_named_by_its_first_user_item() -> None:
    """The root hash is the prefix hash after the task, whatever follows; nothing names an empty one."""
    short, longer = measured(agent_session(3, 100)), measured(agent_session(6, 100))
    assert short.root_hash == longer.root_hash == short.prefix_hashes[1]
    assert measured([]).root_hash == b""


def test_a_value_prints_no_text_of_a_client() -> None:
    """Neither a body nor a text that was counted shows in what a log or an exception could quote."""
    request = measured([{"role": "user", "content": "the secret"}], tools=[{"type": "function", "name": "the secret"}])
    request.count("the secret")
    for value in (request, request.parsed, request.count, verbatim(request, None)):
        assert "secret" not in repr(value)
