"""Items, rounds and places: what may be cut where.

A *round* is a maximal run of items the model produced plus all results of its calls; nothing below a round can be
cut, so a pair cannot be split. A *place* is where a request could have ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Item:
    """Numbers and names of one item; never its text, because a slice of a body keeps the whole body alive.

    ``tokens`` is its weight in the model's encoding, of which ``media`` cannot be clipped and ``guess`` is a guess
    (files, audio, images elsewhere). ``digest`` (16 bytes) is equal for items that mean the same however a client
    serialises them. ``calls`` and ``answers`` are tool call ids.
    """

    role: Role
    tokens: int
    media: int
    digest: bytes
    calls: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    guess: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """The structure of a conversation; all figures are item indexes.

    ``cuts`` are the starts of rounds and of user items at which a conversation may be cut without splitting a pair;
    ``places`` are lengths at which a request could have ended.
    """

    count: int
    systems: tuple[int, ...]
    users: tuple[int, ...]
    cuts: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def task(self) -> int | None:
        """The first user item: what the conversation is about."""
        return self.users[0] if self.users else None

    def anchors(self, place: int, cut: int) -> tuple[int, ...]:
        """The folded user items that stay verbatim all the same: the task, and the newest user item at *place*."""
        folded = bisect_left(self.users, min(place, cut))
        newest = bisect_left(self.users, place) - 1
        if not folded:
            return ()
        return (self.users[0], self.users[newest]) if 0 < newest < folded else self.users[:1]


def lay_out(items: Sequence[Item]) -> Layout:
    """The structure of *items*, in one walk."""
    cuts: list[int] = []
    places: list[int] = []
    users: list[int] = []
    waiting: dict[str, int] = {}
    previous: Item | None = None
    for index, item in enumerate(items):
        if item.role == "system":
            continue
        if item.role == "assistant" and previous is not None and previous.role != "assistant":
            places.append(index)
        if item.role == "user":
            users.append(index)
            cuts.append(index)
        elif item.role == "assistant":
            if previous is None or previous.role != "assistant":
                cuts.append(index)
            waiting.update(dict.fromkeys(item.calls, index))
        elif previous is None:
            cuts.append(index)
        else:
            _join(cuts, item, waiting)
        previous = item
    if previous is not None and previous.role != "assistant":
        places.append(len(items))
    systems = tuple(index for index, item in enumerate(items) if item.role == "system")
    return Layout(len(items), systems, tuple(users), tuple(cuts), tuple(places))


def _join(cuts: list[int], result: Item, waiting: dict[str, int]) -> None:
    """Forbid every cut between a call and *result*; a result without a call stays with what stands before it."""
    for name in result.answers:
        call = waiting.pop(name, None)
        while call is not None and cuts and cuts[-1] > call:
            cuts.pop()
