"""Memories as values: their types and classes, the time for which they are valid, and the limits of a project."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec
from msgspec import structs

from proxy.core.errors import Conflict, OtherVersion

Type = Literal["project", "user", "decision", "session"]
"""A fact of the project, a preference of its user, something decided, or a conversation that was compacted."""

Class = Literal["priority", "durable", "working"]
"""``priority``: first in a block; ``durable``: the default; ``working``: valid for some days."""

Origin = Literal["caller", "model", "user"]
"""The source of a memory: a request to the API, a call of the model, or a line of the user's in a conversation."""

MOST: Final = 200
"""Memories of a project at most."""

MOST_SESSIONS: Final = 10
"""Memories of compacted conversations at most; the newest stay."""

MOST_FORGOTTEN: Final = 500
"""Forgotten memories whose ids are known, so that blocks given before lose them."""

LONGEST_TITLE: Final = 120
LONGEST_CONTENT: Final = 1_000
"""Characters of a memory."""

WORKING_DAYS: Final = 14
MOST_WORKING_DAYS: Final = 30
"""Days for which a working memory is valid by default, and at most."""

DAY_SECONDS: Final = 86_400
VERSION: Final = 1


class Memory(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """One memory. Times are Unix times; ``expires_at`` is 0 if it does not expire."""

    id: str
    type: Type
    title: str
    content: str
    class_: Class = "durable"
    pinned: bool = False
    origin: Origin = "caller"
    created_at: int = 0
    expires_at: int = 0

    def is_valid(self, now: float) -> bool:
        """True if it has not expired; a pinned memory never does."""
        return self.pinned or not self.expires_at or now < self.expires_at


class ProjectMemories(msgspec.Struct, frozen=True):
    """All memories of one project, and the ids of those that were forgotten lately, the newest last."""

    memories: tuple[Memory, ...] = ()
    forgotten: tuple[str, ...] = ()
    version: int = VERSION

    def valid(self, now: float) -> list[Memory]:
        """Return the memories that have not expired."""
        return [memory for memory in self.memories if memory.is_valid(now)]

    def with_memory(self, memory: Memory, now: float) -> ProjectMemories:
        """Return these with *memory*, and without expired ones.

        A memory of the same type, title and origin is replaced unless it is pinned. Raises ``Conflict`` if the project
        already has ``MOST`` memories.
        """
        others = [former for former in self.memories if not _is_replaced(former, memory)]
        remaining = _consolidated([*others, memory], now)
        if len(remaining) > MOST:
            oldest = _oldest_working(remaining, memory)
            if oldest is None:
                raise Conflict(f"This project has {MOST} memories, which is as many as it may: forget some first.")
            remaining.remove(oldest)
        return structs.replace(self, memories=tuple(remaining))

    def with_pin(self, name: str, *, pinned: bool) -> ProjectMemories:
        """Return these with the memory called *name* pinned, or not pinned."""
        memories = list(self.memories)
        for index, memory in enumerate(memories):
            if memory.id == name:
                memories[index] = structs.replace(memory, pinned=pinned)
        return structs.replace(self, memories=tuple(memories))

    def without(self, names: Iterable[str]) -> ProjectMemories:
        """Return these without the memories called *names*, which are then listed in ``forgotten``."""
        ids = set(names)
        forgotten = tuple(dict.fromkeys((*self.forgotten, *sorted(ids))))[-MOST_FORGOTTEN:]
        memories = tuple(memory for memory in self.memories if memory.id not in ids)
        return structs.replace(self, memories=memories, forgotten=forgotten)


def expiry(class_: Class, days: int | None, now: float) -> int:
    """Return the time at which a memory of *class_* expires; 0 if it does not. *days* are the requested ones."""
    if class_ != "working":
        return 0
    if days is None:
        days = WORKING_DAYS
    return int(now) + min(max(days, 1), MOST_WORKING_DAYS) * DAY_SECONDS


def shortened(text: str, most: int) -> str:
    """Return *text* in at most *most* characters; the last is an ellipsis if some are left out."""
    if len(text) <= most:
        return text
    return f"{text[: most - 1].rstrip()}…"


def encode(memories: ProjectMemories) -> bytes:
    """Return *memories* as they are stored."""
    return msgspec.msgpack.encode(memories)


class _Versioned(msgspec.Struct):
    version: int


def decode(value: bytes | None) -> ProjectMemories:
    """Return stored memories; none if there are none, or they are damaged. Raises ``OtherVersion``."""
    if value is None:
        return ProjectMemories()
    try:
        # The version first: the other members of another version may have other types.
        version = msgspec.msgpack.decode(value, type=_Versioned).version
        if version != VERSION:
            raise OtherVersion(version)
        return msgspec.msgpack.decode(value, type=ProjectMemories)
    except (msgspec.DecodeError, UnicodeError):
        return ProjectMemories()


def _is_replaced(former: Memory, memory: Memory) -> bool:
    """True if *memory* is a new version of *former*: one of the same type, origin and title."""
    if former.pinned or (former.type, former.origin) != (memory.type, memory.origin):
        return False
    return former.title.casefold() == memory.title.casefold()


def _consolidated(memories: Sequence[Memory], now: float) -> list[Memory]:
    """Return *memories* without expired ones, and with the newest of those of conversations; pinned ones all stay."""
    valid = [memory for memory in memories if memory.is_valid(now)]
    sessions = [memory for memory in valid if memory.type == "session" and not memory.pinned]
    sessions.sort(key=lambda memory: memory.created_at)
    surplus = {memory.id for memory in sessions[:-MOST_SESSIONS]}
    return [memory for memory in valid if memory.id not in surplus]


def _oldest_working(memories: Sequence[Memory], new: Memory) -> Memory | None:
    """Return the oldest working memory that *new* may replace; None if there is none."""
    working = [
        memory for memory in memories if memory.class_ == "working" and not memory.pinned and memory.id != new.id
    ]
    return min(working, key=lambda memory: memory.created_at, default=None)
