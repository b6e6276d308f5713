"""Notes on conversations: always on compactions, now and then on other requests; read back by kind, without texts."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, TypeVar

from msgspec import structs

from proxy.core.compaction.schedule import CompactionTarget
from proxy.features.history.notes import (
    CompactionNote,
    HistoryRecorder,
    RequestNote,
    encode_note,
    note_name,
    read_notes,
)
from proxy.store.conversation_table import MOST_LISTED
from proxy.store.operations import MemoryBackend, Operation, ScoreMember, SetField, Unavailable
from proxy.summaries.codec import NOTE_VERSION as VERSION
from proxy.summaries.codec import SummaryNote
from tests.support.engine_fixtures import TENANT, Planned, Replica, chat_body
from tests.support.sample_conversations import agent_session
from tests.support.sample_notes import compaction, last_request, summary
from tests.support.server_fixture import a_register

WINDOW = 8192
T = TypeVar("T")


class Disk(MemoryBackend):
    """A store whose disk may be full."""

    is_full = False

    async def run(self, operation: Operation[T]) -> T:
        """Run *operation*, if there is room for what it writes."""
        if self.is_full and isinstance(operation, ScoreMember | SetField):
            raise Unavailable("disk")
        return await super().run(operation)


class RecordedReplica:
    """A replica, and a recorder that gets its answered requests."""

    def __init__(self) -> None:
        self.disk = Disk()
        self.conversations = a_register(self.disk)
        self.recent: dict[tuple[object, ...], int] = {}
        self.now = 1_000_000.0
        self.recorder = HistoryRecorder(self.conversations, self.recent, lambda: self.now, archive=None)
        self.replica = Replica()

    async def plan(self, rounds: int, target: CompactionTarget = CompactionTarget()) -> Planned:  # noqa: B008 - frozen
        body = chat_body(agent_session(rounds, 300))
        plan = await self.replica.plan(body, WINDOW, target)
        self.recorder.answered(plan.view, plan.report, 200)
        await asyncio.sleep(0.01)
        return plan

    async def notes(self, plan: Planned) -> dict[str, bytes]:
        assert plan.view is not None
        return dict(await self.conversations.notes(TENANT, plan.view.measured.root_hash))


async def test_compactions_are_noted_with_what_they_folded() -> None:
    """Each event has a note with its range, its sizes and where the one before it ended."""
    recorded = RecordedReplica()
    plans = [await recorded.plan(rounds) for rounds in range(1, 50)]
    notes = await recorded.notes(plans[-1])
    events = read_notes(notes, CompactionNote)
    assert len(events) == sum(plan.report.event for plan in plans) > 1
    assert events[0].new_from == 0
    for before, after in itertools.pairwise(events):
        assert after.new_from == before.cut < after.cut <= after.boundary
        assert after.tokens_in > before.tokens_in > before.tokens_out > 0
    (last,) = read_notes(notes, RequestNote)
    assert last.prefix_hash == events[-1].prefix_hash
    assert (last.tokens_before, last.window) == (plans[last.items // 2 - 2].report.tokens_before, WINDOW)
    assert b"src/" not in b"".join(notes.values())


async def test_the_note_on_a_request_is_that_of_the_newest() -> None:
    """Below the low mark nothing is noted."""
    recorded = RecordedReplica()
    quiet = await recorded.plan(3)
    assert quiet.report.conversation == ""
    first = await recorded.plan(12)
    (last,) = read_notes(await recorded.notes(first), RequestNote)
    assert first.view is not None
    assert last.items == len(first.view.measured.parsed.items)
    later = await recorded.plan(14)
    (last,) = read_notes(await recorded.notes(first), RequestNote)
    assert later.view is not None
    assert last.items == len(later.view.measured.parsed.items)
    assert await recorded.conversations.root_hashes(TENANT, first.report.conversation)


async def test_the_time_of_a_conversation_is_saved_once_in_a_while() -> None:
    """With its first note, with each compaction, and after a while; other notes leave it as it is."""
    recorded = RecordedReplica()

    async def saved_after(rounds: int) -> tuple[bool, float]:
        recorded.now += 10
        plan = await recorded.plan(rounds)
        ((name, at),) = await recorded.conversations.conversations(TENANT)
        assert name == plan.report.conversation
        return plan.report.event, at - 1_000_000

    assert await saved_after(12) == (False, 10)
    assert await saved_after(13) == (False, 10)
    assert await saved_after(30) == (True, 30)
    recorded.recent.clear()
    assert await saved_after(31) == (False, 40)


async def test_a_busy_tenants_conversation_stays_listed() -> None:
    """If so many others were saved that it is about to leave the list, it is saved again before the minute is over."""
    recorded = RecordedReplica()
    first = await recorded.plan(12)
    for other in range(MOST_LISTED):
        recorded.now += 0.01
        recorded.recent[(TENANT,)] += 1
        name = f"other-{other}"
        recorded.conversations.save_conversation(TENANT, name, b"r" * 16, recorded.now, long_lived=False)
    await asyncio.sleep(0.05)
    listed = [name for name, _ in await recorded.conversations.conversations(TENANT)]
    assert first.report.conversation not in listed
    recorded.now += 1
    await recorded.plan(13)
    listed = [name for name, _ in await recorded.conversations.conversations(TENANT)]
    assert listed[0] == first.report.conversation


async def test_a_conversation_that_the_store_refused_is_saved_with_its_next_request() -> None:
    """What was not saved does not count as saved."""
    recorded = RecordedReplica()
    recorded.disk.is_full = True
    plan = await recorded.plan(12)
    recorded.disk.is_full = False
    assert await recorded.conversations.conversations(TENANT) == []
    await recorded.plan(13)
    ((name, _),) = await recorded.conversations.conversations(TENANT)
    assert name == plan.report.conversation


async def test_an_event_that_had_to_go_further_is_noted_from_the_view_before_it() -> None:
    """A second attempt of the same request does not hide what the first one folded."""
    recorded = RecordedReplica()
    plan = await recorded.plan(20, CompactionTarget(force=True, limit=2500))
    (event,) = read_notes(await recorded.notes(plan), CompactionNote)
    assert event.new_from == 0 < event.cut


async def test_summaries_are_noted_and_passed_over_ones_once() -> None:
    """A note on a summary replaces the one before; a reason for skipping is noted once in a while."""
    recorded = RecordedReplica()

    def note(state: Any, cut: int = 8, reason: str = "") -> SummaryNote:
        return SummaryNote(VERSION, 1, "a,b", b"p" * 8, b"s" * 16, b"c" * 16, cut, state, "m", "up", reason)

    for state in ("pending", "ready"):
        recorded.recorder.note_summary(TENANT, b"r" * 16, note(state))
        await asyncio.sleep(0.01)
    for cut in (20, 21):
        recorded.recorder.note_summary(TENANT, b"r" * 16, note("skipped", cut, "budget"))
        await asyncio.sleep(0.01)
    found = read_notes(await recorded.conversations.notes(TENANT, b"r" * 16), SummaryNote)
    assert [(each.length, each.state) for each in found] == [(8, "ready"), (20, "skipped")]


def test_notes_come_back_by_kind_in_order_of_their_places() -> None:
    """Each kind is read back as it was, oldest boundary first; what cannot be read is passed over."""
    notes = [compaction(200, 100), compaction(20, 10), summary(15, "ready"), last_request(200)]
    values = {note_name(note): encode_note(note) for note in notes}
    assert len(values) == 4
    values["00000001:e:broken"] = b"\xc1"
    values["00000001:j:newer"] = encode_note(structs.replace(summary(1, "ready"), version=VERSION + 1))
    assert read_notes(values, CompactionNote) == [notes[1], notes[0]]
    assert read_notes(values, SummaryNote) == [notes[2]]
    assert read_notes(values, RequestNote) == [notes[3]]
    assert sorted(values)[-1].startswith("z:"), "the last request goes last when there are too many"
