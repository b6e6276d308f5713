"""Memories of a project: how long they hold, which give way, and what is stored of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from proxy.core.errors import Conflict, OtherVersion
from proxy.features.memories.memory import (
    DAY_SECONDS,
    MOST,
    MOST_FORGOTTEN,
    MOST_SESSIONS,
    Memory,
    ProjectMemories,
    decode,
    encode,
    expiry,
)

NOW = 1_795_392_000


def memory(number: int, **fields: Any) -> Memory:
    """One memory among many."""
    values = {"type": "project", "title": f"Title {number}", "content": "c", "created_at": NOW + number, **fields}
    return Memory(f"{number:012x}", **values)


def with_all(*memories: Memory, now: float = NOW) -> ProjectMemories:
    """A project to which *memories* were added one after the other."""
    project = ProjectMemories()
    for each in memories:
        project = project.with_memory(each, now)
    return project


def titles(project: ProjectMemories) -> list[str]:
    return [each.title for each in project.memories]


def test_only_working_ones_expire_and_pinned_ones_never() -> None:
    """In fourteen days, or as many as were asked for, thirty at most."""
    assert expiry("durable", 5, NOW) == expiry("priority", 5, NOW) == 0
    days = [(expiry("working", asked, NOW) - NOW) // DAY_SECONDS for asked in (None, 1, 30, 31, 0)]
    assert days == [14, 1, 30, 30, 1]
    short = memory(1, class_="working", expires_at=NOW + 10)
    assert [short.is_valid(NOW + after) for after in (9, 10)] == [True, False]
    assert memory(1, expires_at=NOW + 10, pinned=True).is_valid(NOW + 11)
    assert ProjectMemories((short, memory(2))).valid(NOW + 20) == [memory(2)]


def test_expired_ones_are_removed_with_the_next_that_is_added() -> None:
    """Pinned ones stay."""
    short = memory(1, class_="working", expires_at=NOW + 10)
    kept = memory(2, class_="working", expires_at=NOW + 10, pinned=True)
    assert titles(with_all(short, kept).with_memory(memory(3), NOW + 20)) == ["Title 2", "Title 3"]


def test_the_same_said_anew_replaces_what_was_said() -> None:
    """By type, title and origin; what is pinned, or from somebody else, stays."""
    first = memory(1, title="Queue")
    assert with_all(first, memory(2, title="queue")).memories == (memory(2, title="queue"),)
    for other in ({"type": "user"}, {"origin": "model"}):
        assert len(with_all(first, memory(2, **{"title": "Queue", **other})).memories) == 2
    assert len(with_all(memory(1, title="Queue", pinned=True), memory(2, title="Queue")).memories) == 2


def test_the_newest_conversations_stay() -> None:
    """Ten of them; pinned ones beside."""
    pinned = memory(0, type="session", pinned=True)
    project = with_all(pinned, *(memory(number, type="session") for number in range(1, 15)), memory(20))
    sessions = [each for each in project.memories if each.type == "session" and not each.pinned]
    assert [each.title for each in sessions] == [f"Title {number}" for number in range(15 - MOST_SESSIONS, 15)]
    assert {"Title 0", "Title 20"} <= set(titles(project))


def test_a_full_project_lets_the_oldest_working_one_go_or_refuses() -> None:
    """Nothing durable or pinned is ever dropped for a new one."""
    full = ProjectMemories(tuple(memory(number) for number in range(MOST - 2)))
    working = [memory(MOST + number, class_="working", pinned=not number) for number in range(2)]
    full = full.with_memory(working[0], NOW).with_memory(working[1], NOW)
    after = full.with_memory(memory(999), NOW)
    assert len(after.memories) == MOST
    assert set(titles(full)) - set(titles(after)) == {working[1].title}
    with pytest.raises(Conflict):
        after.with_memory(memory(1_000), NOW)


def test_forgetting_and_pinning() -> None:
    """What is forgotten is gone, and its id is known for a while; pins are set and removed."""
    project = with_all(memory(1), memory(2))
    forgotten = project.without([memory(1).id])
    assert (titles(forgotten), forgotten.forgotten) == (["Title 2"], (memory(1).id,))
    pinned = project.with_pin(memory(2).id, pinned=True)
    assert [each.pinned for each in pinned.memories] == [False, True]
    assert pinned.with_pin(memory(2).id, pinned=False) == project
    for number in range(MOST_FORGOTTEN):
        forgotten = forgotten.without([f"f{number:011d}"])
    assert len(forgotten.forgotten) == MOST_FORGOTTEN
    assert memory(1).id not in forgotten.forgotten


def test_what_is_stored_is_read_and_what_is_damaged_is_not() -> None:
    """Another release may add members; what is of another version is no damage."""
    project = with_all(memory(1, class_="working", expires_at=9), memory(2)).without(["0" * 12])
    assert decode(encode(project)) == ProjectMemories(project.memories, project.forgotten)
    members = msgspec.msgpack.decode(encode(project))
    assert decode(msgspec.msgpack.encode({**members, "later": 1})) == project
    for damaged in (None, b"", b"x" * 40, encode(project)[:-1], msgspec.msgpack.encode([1])):
        assert decode(damaged) == ProjectMemories()
    for later in ({**members, "version": 2}, {"version": 7, "memories": "elsewhere"}):
        with pytest.raises(OtherVersion):
            decode(msgspec.msgpack.encode(later))
