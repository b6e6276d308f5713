"""What is written down of conversations: compactions always, other requests now and then, and never their words."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from proxy.core.compaction.schedule import CompactionTarget
from proxy.features.history.notes import CompactionNote, RequestNote, load
from proxy.features.history.recorder import HistoryRecorder
from proxy.summaries.codec import NOTE_VERSION as VERSION
from proxy.summaries.codec import SummaryNote
from tests.support.engine_fixtures import TENANT, Planned, Replica, chat_body
from tests.support.sample_conversations import agent_session
from tests.support.server_fixture import a_register

WINDOW = 8192


class Book:
    """A chronicle over a register of this process, and a desk whose plans it is told of."""

    def __init__(self) -> None:
        self.register = a_register()
        self.recent: dict[tuple[str, bytes], bool] = {}
        self.chronicle = HistoryRecorder(self.register, self.recent, lambda: 1_000_000.0)
        self.desk = Replica()

    async def ask(self, rounds: int, target: CompactionTarget = CompactionTarget()) -> Planned:  # noqa: B008 - frozen
        body = chat_body(agent_session(rounds, 300))
        plan = await self.desk.plan(body, WINDOW, target)
        self.chronicle.answered(plan.view, plan.report, 200)
        await asyncio.sleep(0.01)
        return plan

    async def notes(self, plan: Planned) -> dict[str, bytes]:
        assert plan.view is not None
        return dict(await self.register.notes(TENANT, plan.view.measured.root_hash(plan.view.measured.lay_out())))


async def test_compactions_are_noted_with_what_they_folded() -> None:
    """Each event has a note with its range, its sizes and where the one before it ended."""
    book = Book()
    plans = [await book.ask(rounds) for rounds in range(1, 50)]
    notes = await book.notes(plans[-1])
    events = load(notes, CompactionNote, "e")
    assert len(events) == sum(plan.report.event for plan in plans) > 1
    assert events[0].since == 0
    for before, after in itertools.pairwise(events):
        assert after.since == before.cut < after.cut <= after.place
        assert after.taken > before.taken > before.left > 0
    (last,) = load(notes, RequestNote, "z")
    assert last.chain == events[-1].chain
    assert (last.before, last.window) == (plans[last.items // 2 - 2].report.tokens_before, WINDOW)
    assert b"src/" not in b"".join(notes.values())


async def test_other_requests_are_noted_once_in_a_while() -> None:
    """Below the low mark nothing is noted; above it the first request is, and the next ones after a while."""
    book = Book()
    quiet = await book.ask(3)
    assert quiet.report.conversation == ""
    first = await book.ask(12)
    await book.ask(13)
    (last,) = load(await book.notes(first), RequestNote, "z")
    assert first.view is not None
    assert last.items == len(first.view.measured.parsed.items)
    book.recent.clear()
    later = await book.ask(14)
    (last,) = load(await book.notes(first), RequestNote, "z")
    assert later.view is not None
    assert last.items == len(later.view.measured.parsed.items)
    assert await book.register.root_hashes(TENANT, first.report.conversation)


async def test_an_event_that_had_to_go_further_is_noted_from_the_view_before_it() -> None:
    """A second attempt of the same request does not hide what the first one folded."""
    book = Book()
    plan = await book.ask(20, CompactionTarget(force=True, limit=2500))
    (event,) = load(await book.notes(plan), CompactionNote, "e")
    assert event.since == 0 < event.cut


async def test_summaries_are_noted_and_passed_over_ones_once() -> None:
    """What became of a summary takes the place of what was said of it before; a reason is told once in a while."""
    book = Book()

    def note(state: Any, cut: int = 8, reason: str = "") -> SummaryNote:
        return SummaryNote(VERSION, 1, "a,b", b"p" * 8, b"s" * 16, b"c" * 16, cut, state, "m", "up", reason)

    for state in ("pending", "ready"):
        book.chronicle.note_summary(TENANT, b"r" * 16, note(state))
        await asyncio.sleep(0.01)
    for cut in (20, 21):
        book.chronicle.note_summary(TENANT, b"r" * 16, note("skipped", cut, "budget"))
        await asyncio.sleep(0.01)
    found = load(await book.register.notes(TENANT, b"r" * 16), SummaryNote, "j")
    assert [(each.length, each.state) for each in found] == [(8, "ready"), (20, "skipped")]
