"""The archive: exactly what left the view, in the background, bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from proxy.core.compaction.record import Compaction, Placeholder
from proxy.features.history.archive import REST, Archive, ArchiveLimits, left_by
from proxy.features.history.pages import load, read_reference
from tests.support.engine_fixtures import Planned, Replica, chat_body, message_slices
from tests.support.sample_conversations import agent_session

WINDOW = 8192


class Shelf:
    """Where originals go: as many as it takes, once it is open."""

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


class House:
    """An archive, its shelf, and what it told."""

    def __init__(self, shelf: Shelf, **terms: Any) -> None:
        self.shelf = shelf
        self.told: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []
        given_terms = replace(ArchiveLimits(60.0, 10**6), **terms)
        self.now = 0.0
        self.archive = Archive(shelf, given_terms, {}, self.spawn, self.observe, lambda: self.now)

    def spawn(self, work: Any, name: str) -> Any:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.append(task)
        return task

    def observe(self, outcome: str, count: int) -> None:
        self.told[outcome] += count

    def keep(self, plan: Planned) -> str:
        assert plan.view is not None
        assert plan.view.layout is not None
        assert plan.view.edits.record is not None
        root = plan.view.measured.root_hash(plan.view.layout)
        return self.archive.keep(plan.view, root, plan.view.edits.record.compaction)


async def plans(rounds: int) -> list[tuple[bytes, Planned]]:
    """The bodies and plans of an agent's requests that compacted."""
    desk, found = Replica(), []
    for count in range(1, rounds):
        body = chat_body(agent_session(count, 300))
        plan = await desk.plan(body, WINDOW)
        if plan.report.event:
            found.append((body, plan))
    return found


async def test_each_item_that_left_is_kept_once_as_it_was() -> None:
    """Over all events, the items that are not in the last view are on the shelf, byte for byte, each listed once."""
    house = House(Shelf())
    events = await plans(60)
    assert len(events) > 2
    listed: list[int] = []
    for body, plan in events:
        parts = read_reference(house.keep(plan))
        assert parts is not None
        await house.archive.finish(5)
        entries = load(house.shelf.values[parts])
        assert entries
        for entry in entries:
            assert house.shelf.values[parts[0], entry.name] == b"I" + message_slices(body)[entry.index]
            assert entry.size == len(message_slices(body)[entry.index])
        listed += [entry.index for entry in entries]
    body, plan = events[-1]
    gone = {i for i, raw in enumerate(message_slices(body)) if raw not in message_slices(plan.body) and i > 1}
    assert gone <= set(listed)
    assert len(listed) == len(set(listed))
    assert house.told == {"kept": house.shelf.calls}


async def test_what_does_not_fit_into_the_queue_is_dropped() -> None:
    """While the store hangs, no more waits than may; what is dropped has no reference and is counted."""
    house = House(Shelf(), queue=30_000)
    house.shelf.open.clear()
    refs = [house.keep(plan) for _, plan in await plans(60)]
    assert refs[0]
    assert not refs[-1]
    assert house.told["dropped"] > 0
    house.shelf.open.set()
    await house.archive.finish(5)
    assert house.keep((await plans(30))[0][1]), "there is room again"
    await house.archive.finish(5)


async def test_a_store_that_refuses_is_left_alone_for_a_while() -> None:
    """After a failure that compaction, what waits behind it and what comes soon is given up, and counted."""
    house = House(Shelf(most=3))
    (_, first), (_, second), (_, third), *_ = await plans(60)
    house.keep(first)
    house.keep(second)
    await house.archive.finish(5)
    assert house.shelf.calls == 4
    assert house.told["kept"] == 3
    assert house.told["failed"] > 1
    assert house.told["dropped"] > 1
    house.shelf.most = 10**6
    assert house.keep(third) == ""
    house.now = REST + 1
    assert house.keep(third)
    await house.archive.finish(5)
    assert house.told["kept"] > 4


async def test_items_over_the_limit_are_listed_and_not_kept() -> None:
    """What is too big is told as that, without a name."""
    house = House(Shelf(), most=400)
    ((_, plan), *_) = await plans(40)
    parts = read_reference(house.keep(plan))
    assert parts is not None
    await house.archive.finish(5)
    entries = load(house.shelf.values[parts])
    assert entries
    assert house.told["too_big"] == sum(not entry.name for entry in entries) > 0
    assert all(bool(entry.name) == (entry.size <= 400) for entry in entries)


async def test_an_end_drops_what_still_waits() -> None:
    """A process that ends does not wait for a store that hangs."""
    house = House(Shelf())
    house.shelf.open.clear()
    house.keep((await plans(40))[0][1])
    await asyncio.sleep(0)
    await house.archive.finish(0.01)
    await asyncio.wait(house.tasks, timeout=5)
    assert all(task.cancelled() for task in house.tasks)
    assert house.shelf.calls == 0


cuts = st.integers(0, 12)


@given(cuts, cuts, st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_what_left_is_what_no_view_had_taken_before(
    first: int, second: int, early: set[int], late: set[int], shortened: set[int]
) -> None:
    """What the first event took and what the second one took, together, are all that is not whole in the last view."""
    first, second = sorted((first, second))
    roles = ["system", *["user"] * 11]
    one = Compaction(12, first, 10, anchors=tuple(sorted(i for i in early if i < first)))
    two = Compaction(
        12, second, 10, anchors=tuple(sorted(i for i in late if i < second and i in (*one.anchors, *range(first, 12))))
    )
    two = structs.replace(two, placeholders=tuple(Placeholder(i, "old") for i in sorted(shortened) if i >= second))
    gone = {i for i in range(1, second) if i not in two.anchors} | {swap.index for swap in two.placeholders}
    took = [left_by(one, None, roles), left_by(two, one, roles)]
    assert set(took[0]) | set(took[1]) == gone | set(took[0])
    assert not set(took[0]) & set(took[1])
