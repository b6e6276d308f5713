"""The archive: exactly what left the view, in the background, bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from proxy.core.compaction.record import Compaction, Placeholder
from proxy.core.conversation import Item
from proxy.features.history.archive import PAUSE_SECONDS, Archive, ArchiveLimits, items_removed
from proxy.features.history.pages import decode_list, parse_reference
from tests.support.engine_fixtures import Planned, Replica, chat_body, message_slices
from tests.support.sample_conversations import agent_session

WINDOW = 8192


class OriginalsInMemory:
    """A table of originals that accepts *most* of them, and none while it is not open."""

    def __init__(self, most: int = 10**6) -> None:
        self.values: dict[tuple[bytes, bytes], bytes] = {}
        self.calls = 0
        self.most = most
        self.open = asyncio.Event()
        self.open.set()

    def name(self, tenant: bytes, content: bytes) -> bytes:
        return Replica().book.prefix_key(tenant + content)[:16]

    async def save(self, tenant: bytes, root: bytes, name: bytes, plain: bytes, seconds: float) -> bool:
        await self.open.wait()
        self.calls += 1
        if len(self.values) >= self.most:
            return False
        self.values[root, name] = plain
        return True

    async def read(self, tenant: bytes, root: bytes, names: Any) -> list[bytes | None]:
        return [self.values.get((root, name)) for name in names]


class ArchiveFixture:
    """An archive, its originals, and the outcomes it counted."""

    def __init__(self, originals: OriginalsInMemory, **changes: Any) -> None:
        self.originals = originals
        self.outcomes: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []
        limits = structs.replace(ArchiveLimits(60.0, 10**6), **changes)
        self.now = 0.0
        self.archive = Archive(originals, limits, {}, self.spawn, self.observe, lambda: self.now)

    def spawn(self, work: Any, name: str) -> Any:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.append(task)
        return task

    def observe(self, outcome: str, count: int) -> None:
        self.outcomes[outcome] += count

    def add(self, plan: Planned) -> str:
        assert plan.view is not None
        assert plan.view.layout is not None
        assert plan.view.edits.record is not None
        measured, edits = plan.view.measured, plan.view.edits
        removed = items_removed(plan.view.edits.record.compaction, edits.previous, measured.parsed.items)
        return self.archive.add(plan.view, measured.root_hash, removed)


async def plans(rounds: int) -> list[tuple[bytes, Planned]]:
    """The bodies and plans of an agent's requests that compacted."""
    replica, found = Replica(), []
    for count in range(1, rounds):
        body = chat_body(agent_session(count, 300))
        plan = await replica.plan(body, WINDOW)
        if plan.report.event:
            found.append((body, plan))
    return found


async def test_each_item_that_left_is_archived_once_as_it_was() -> None:
    """The items that are not in the last view of a session are archived byte for byte, each listed once."""
    fixture = ArchiveFixture(OriginalsInMemory())
    events = await plans(60)
    assert len(events) > 2
    listed: list[int] = []
    for body, plan in events:
        parts = parse_reference(fixture.add(plan))
        assert parts is not None
        await fixture.archive.finish(5)
        entries = decode_list(fixture.originals.values[parts])
        assert entries
        for entry in entries:
            assert fixture.originals.values[parts[0], entry.name] == b"I" + message_slices(body)[entry.index]
            assert entry.size == len(message_slices(body)[entry.index])
        listed += [entry.index for entry in entries]
    body, plan = events[-1]
    gone = {i for i, raw in enumerate(message_slices(body)) if raw not in message_slices(plan.body) and i > 1}
    assert gone <= set(listed)
    assert len(listed) == len(set(listed))
    assert fixture.outcomes == {"kept": fixture.originals.calls}


async def test_what_does_not_fit_into_the_queue_is_dropped() -> None:
    """While the store hangs, no more waits than may; what is dropped has no reference and is counted."""
    fixture = ArchiveFixture(OriginalsInMemory(), queue=30_000)
    fixture.originals.open.clear()
    refs = [fixture.add(plan) for _, plan in await plans(60)]
    assert refs[0]
    assert not refs[-1]
    assert fixture.outcomes["dropped"] > 0
    fixture.originals.open.set()
    await fixture.archive.finish(5)
    assert fixture.add((await plans(30))[0][1]), "there is room again"
    await fixture.archive.finish(5)


async def test_a_store_that_refuses_is_left_alone_for_a_while() -> None:
    """After a failure that compaction, what waits behind it and what comes soon is given up, and counted."""
    fixture = ArchiveFixture(OriginalsInMemory(most=3))
    (_, first), (_, second), (_, third), *_ = await plans(60)
    fixture.add(first)
    fixture.add(second)
    await fixture.archive.finish(5)
    assert fixture.originals.calls == 4
    assert fixture.outcomes["kept"] == 3
    assert fixture.outcomes["failed"] > 1
    assert fixture.outcomes["dropped"] > 1
    fixture.originals.most = 10**6
    assert fixture.add(third) == ""
    fixture.now = PAUSE_SECONDS + 1
    assert fixture.add(third)
    await fixture.archive.finish(5)
    assert fixture.outcomes["kept"] > 4


async def test_items_over_the_limit_are_listed_and_not_archived() -> None:
    """An item that is too big has an entry without a name."""
    fixture = ArchiveFixture(OriginalsInMemory(), max_item=400)
    ((_, plan), *_) = await plans(40)
    parts = parse_reference(fixture.add(plan))
    assert parts is not None
    await fixture.archive.finish(5)
    entries = decode_list(fixture.originals.values[parts])
    assert entries
    assert fixture.outcomes["too_big"] == sum(not entry.name for entry in entries) > 0
    assert all(bool(entry.name) == (entry.size <= 400) for entry in entries)


async def test_an_end_drops_what_still_waits() -> None:
    """A process that ends does not wait for a store that hangs."""
    fixture = ArchiveFixture(OriginalsInMemory())
    fixture.originals.open.clear()
    fixture.add((await plans(40))[0][1])
    await asyncio.sleep(0)
    await fixture.archive.finish(0.01)
    await asyncio.wait(fixture.tasks, timeout=60)
    assert all(task.cancelled() for task in fixture.tasks)
    assert fixture.originals.calls == 0


cuts = st.integers(0, 12)


@given(cuts, cuts, st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_what_left_is_what_no_view_had_taken_before(
    first: int, second: int, early: set[int], late: set[int], shortened: set[int]
) -> None:
    """The items that two compactions removed are, together, all that is not whole in the last view."""
    first, second = sorted((first, second))
    items = [Item("system", 1, 0, b""), *[Item("user", 1, 0, b"")] * 11]
    one = Compaction(12, first, 10, anchors=tuple(sorted(i for i in early if i < first)))
    two = Compaction(
        12, second, 10, anchors=tuple(sorted(i for i in late if i < second and i in (*one.anchors, *range(first, 12))))
    )
    two = structs.replace(two, placeholders=tuple(Placeholder(i, "old") for i in sorted(shortened) if i >= second))
    gone = {i for i in range(1, second) if i not in two.anchors} | {swap.index for swap in two.placeholders}
    took = [items_removed(one, None, items), items_removed(two, one, items)]
    assert set(took[0]) | set(took[1]) == gone | set(took[0])
    assert not set(took[0]) & set(took[1])
