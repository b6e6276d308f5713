"""The breakdown: what each stage took, and what a block holds."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.core.breakdown import StageSaving, ViewFacts, block_parts, stage_savings
from proxy.core.compaction.block import FoldedItems, render_block
from proxy.core.compaction.record import VERSION, Compaction, CompactionRecord
from proxy.core.conversation import Item, ItemText
from tests.support.engine_fixtures import POLICY, SPARING_RULES, Planned, Replica, chat_body, count_tokens
from tests.support.sample_conversations import agent_session, coding_session


def facts_of(plan: Planned) -> ViewFacts:
    """The figures of the view of *plan*."""
    parsed = plan.view.measured.parsed
    return ViewFacts(parsed.items, parsed.scan.spans, plan.view.edits.record)


def savings_of(plan: Planned) -> tuple[StageSaving, ...]:
    """What its stages took."""
    return stage_savings(facts_of(plan), plan.report.stages, plan.report.tokens_removed)


async def test_what_is_folded_is_all_that_no_other_stage_took() -> None:
    """The stages together took what the view is smaller."""
    plan = await Replica().plan(chat_body(agent_session(40, 300)), 8192)
    savings = {each.stage: each for each in savings_of(plan)}
    assert list(savings) == list(plan.report.stages)
    assert plan.view.edits.record is not None
    assert savings["fold"].items == plan.view.edits.record.compaction.cut
    removed = plan.view.measured.counts.total - plan.view.tokens
    assert sum(each.tokens for each in savings.values()) == removed


async def test_placeholders_are_charged_to_their_stage() -> None:
    """Results that a later one repeats are deduplicated, old ones are pruned."""
    replica = Replica(policy=structs.replace(POLICY, rules=SPARING_RULES))
    request = chat_body(coding_session(80, 120))
    plan = await replica.plan(request, 60_000)
    savings = {each.stage: each for each in savings_of(plan)}
    assert list(savings) == list(plan.report.stages)
    assert "dedup" in savings
    assert all(each.tokens > 0 and each.items > 0 for each in savings.values())
    removed = plan.view.measured.counts.total - plan.view.tokens
    assert sum(each.tokens for each in savings.values()) == pytest.approx(removed, rel=0.05)


async def test_a_view_that_is_the_clients_own_took_nothing() -> None:
    """There is no stage to name."""
    plan = await Replica().plan(chat_body(agent_session(2, 100)), 8192)
    assert savings_of(plan) == ()


def test_an_edit_of_a_folded_item_saves_nothing_more() -> None:
    """The fold took the whole item."""
    items = [Item("tool", 100, 0, b"")] * 3
    spans = [(0, 100), (100, 200), (200, 300)]
    record = CompactionRecord(VERSION, Compaction(3, 2, 0), "", {0: b"x" * 50, 2: b"x" * 50}, 1000, 100, 0)
    savings = stage_savings(ViewFacts(items, spans, record), ("fold", "clip"), 150)
    assert savings == (StageSaving("fold", 100, 2), StageSaving("clip", 50, 1))


def test_each_section_of_a_block_is_recognised() -> None:
    """Sections are recognised by the block's own headings, and together they are the whole block."""
    entries = (
        ItemText("assistant", "I read the ledger.", calls=(("read_file", '{"path": "src/ledger.py"}'),)),
        ItemText("tool", "", results=(("Error: rotate_ledger_412 failed at 10:42", False),)),
        ItemText("assistant", "Now I run the tests.", calls=(("run", '{"command": "pytest -q"}'),)),
    )
    folded = FoldedItems(entries, ("Never touch vendor/.",), task="Fix the ledger.", newest="And be quick.")
    block = render_block(folded, 600, 400, count_tokens, summary="The ledger loses rows.\n\nIt is the clock.")
    parts = {part.kind: part for part in block_parts(block, 1000)}
    kinds = {"frame", "first request", "user's words", "latest message", "summary", "digest", "steps"}
    assert set(parts) == kinds
    assert parts["summary"].lines == 3
    assert 990 <= sum(part.tokens for part in parts.values()) <= 1000


@pytest.mark.parametrize("block", ["", "\n\n"])
def test_no_block_has_no_parts(block: str) -> None:
    """When nothing was folded."""
    assert block_parts(block, 0) == ()
