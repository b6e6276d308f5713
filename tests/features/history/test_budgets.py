"""Budgets of conversations: counted as reported, written for every replica, and said above four fifths."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from proxy.core.decisions import Forward, UncountedView, View
from proxy.core.errors import StoreUnavailable
from proxy.core.report import Report, Usage
from proxy.features.history import budgets
from proxy.features.history.budgets import ConversationBudgets
from proxy.features.history.states import Budget, State, decode, encode
from proxy.store.conversation_table import ConversationTable
from proxy.tasks import Tasks
from tests.support.engine_fixtures import TENANT, chat_body
from tests.support.scripted_upstream import EngineFixture
from tests.support.server_fixture import a_register, eventually

NAME = "abcdefgh-_123456"
REPORT = Report("r", "chat", conversation=NAME)


class Counted:
    """A counter of what conversations use, on *table*, and what it logs."""

    def __init__(self, table: ConversationTable, default: int = 0) -> None:
        self.table = table
        self.logged: list[tuple[str, Mapping[str, object]]] = []
        self.tasks = Tasks(lambda name, error: None)
        self.feature = ConversationBudgets(
            table, default, {}, self.tasks.spawn, lambda event, facts: self.logged.append((event, facts))
        )

    def answer(self, view: View, tokens: int) -> Mapping[str, int | None]:
        """The budget in the report of one answer to *view*, which used so many tokens."""
        report = self.feature.amend(REPORT, view)
        self.feature.used(TENANT, NAME, Usage(tokens - 1, 1))
        return report.conversation_budget


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted is written at once."""
    monkeypatch.setattr(budgets, "WRITE_SECONDS", 0.0)


async def a_view(**options: Any) -> UncountedView:
    """The view of a request that fits."""
    from proxy.core.request import Options, Request

    body = chat_body([{"role": "user", "content": "hi"}])
    decision = await EngineFixture().plan(Request("chat", body, TENANT, "r1", Options(**options)))
    assert isinstance(decision, Forward)
    assert isinstance(decision.view, UncountedView)
    return decision.view


async def test_above_four_fifths_it_is_said() -> None:
    """Strictly above, on each answer from then on, and once in the log."""
    counted, view = Counted(a_register(), 10_000), await a_view()
    assert [counted.answer(view, tokens) for tokens in (8_000, 1, 5)] == [
        {},
        {},
        {"total": 10_000, "consumed": 8_001, "remaining": 1_999},
    ]
    assert counted.answer(view, 5)["consumed"] == 8_006
    facts = {"conversation": NAME, "budget": 10_000, "consumed": 8_001}
    assert counted.logged == [("conversation.budget_nearly_used", facts)]


async def test_the_headers_budget_wins() -> None:
    """Over the configured one, with each request."""
    counted = Counted(a_register(), 10_000)
    counted.answer(await a_view(), 900)
    assert counted.answer(await a_view(conversation_budget=1_000), 5)["total"] == 1_000
    assert counted.answer(await a_view(), 5) == {}


async def test_replicas_add_up_and_a_restart_forgets_nothing() -> None:
    """What one wrote the other reads, and so does a new process."""
    table, view = a_register(), await a_view()
    one, two = Counted(table, 1_000), Counted(table, 1_000)
    one.answer(view, 500)
    assert await eventually(lambda: one.feature._spendings[TENANT, NAME].stored == 500)
    two.answer(view, 400)
    assert await eventually(lambda: two.feature._spendings[TENANT, NAME].stored == 900)
    assert two.answer(view, 1)["consumed"] == 900
    await two.feature.finish(1.0)
    assert await table.add_consumed(TENANT, NAME, 0) == 901
    after = Counted(table, 1_000)
    assert after.answer(view, 1) == {}
    assert await eventually(lambda: after.feature._spendings[TENANT, NAME].was_read)
    assert after.answer(view, 1)["consumed"] == 902
    state = decode(await table.state(TENANT, NAME))
    assert state is not None
    assert state.budget.total == 1_000


async def test_a_lost_store_costs_no_figure() -> None:
    """What could not be written is written later."""
    counted, view = Counted(a_register(), 1_000), await a_view()
    access = counted.table._access
    access.ready = False
    counted.answer(view, 850)
    await asyncio.sleep(0.05)
    assert counted.answer(view, 1)["consumed"] == 850
    access.ready = True
    counted.answer(view, 1)
    assert await eventually(lambda: counted.feature._spendings[TENANT, NAME].stored == 852)


async def test_without_a_conversation_or_usage_nothing_is_counted() -> None:
    """A request without a name, or an answer without usage, has no part in it."""
    counted, view = Counted(a_register(), 1_000), await a_view()
    assert counted.feature.amend(Report("r", "chat"), view) == Report("r", "chat")
    counted.feature.used(TENANT, NAME, Usage(5, 5))
    counted.feature.amend(REPORT, view)
    counted.feature.used(TENANT, NAME, Usage())
    assert counted.feature._spendings[TENANT, NAME].unwritten == 0


async def test_an_imported_budget_holds_where_none_is_stated() -> None:
    """What another tool imported is warned of like any other; a header still wins."""
    counted, view = Counted(a_register()), await a_view()
    await counted.table.save_state(TENANT, NAME, encode(State(Budget(1_000), {"issue": 7})))
    counted.answer(view, 900)
    assert await eventually(lambda: counted.feature._spendings[TENANT, NAME].was_read)
    assert counted.answer(view, 1) == {"total": 1_000, "consumed": 900, "remaining": 100}
    assert counted.answer(await a_view(conversation_budget=5_000), 1) == {}


@pytest.mark.slow
async def test_a_total_that_cannot_be_stored_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens were written by then."""
    counted, view = Counted(a_register(), 1_000), await a_view()
    access = counted.table._access

    async def fails_once(*_: object) -> None:
        monkeypatch.undo()
        raise StoreUnavailable

    monkeypatch.setattr(counted.table, "save_state", fails_once)
    counted.answer(view, 500)
    assert await eventually(lambda: counted.feature._spendings[TENANT, NAME].stored == 500)
    counted.answer(view, 5)
    assert await eventually(lambda: counted.feature._spendings[TENANT, NAME].was_read)
    assert await counted.table.add_consumed(TENANT, NAME, 0) == 505
    assert access.ready


async def test_the_end_of_a_process_does_not_wait_for_a_hung_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes at once what was counted, and gives up in time, without an error."""
    monkeypatch.setattr(budgets, "WRITE_SECONDS", 60.0)
    counted, view = Counted(a_register(), 1_000), await a_view()
    counted.answer(view, 500)
    await counted.feature.finish(1.0)
    assert await counted.table.add_consumed(TENANT, NAME, 0) == 500
    hung = Counted(a_register(), 1_000)
    monkeypatch.setattr(hung.table, "add_consumed", lambda *_: asyncio.Event().wait())
    hung.answer(view, 500)
    await hung.feature.finish(0.05)
    await hung.tasks.finish(0.0)
