"""The items of a conversation, its rounds and boundaries, and the hashes that name its prefixes.

A *round* is a maximal run of items that the model produced plus all results of its calls; nothing below a round can be
cut, so a pair cannot be split. A *boundary* is a length of the conversation at which a request could have ended.
"""

from __future__ import annotations

import hmac
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call. ``same`` is equal for equal calls of tools that change nothing (0: not comparable).

    ``paths`` and ``names`` are digests of its targets and of their last parts. ``first`` and ``last`` are the lines it
    asks for (last 0: to the end; first 0: not known), ``most`` the lines it gives when not told how many.
    """

    kind: str
    same: int = 0
    paths: tuple[int, ...] = ()
    names: tuple[int, ...] = ()
    first: int = 0
    last: int = 0
    most: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """One tool result: digests of all of it and of its opening, its size, whether it tells of success.

    ``partial``: it says itself that something is missing. ``first`` and ``last`` are the line numbers it shows, if any.
    """

    digest: int
    opening: int
    ok: bool
    lines: int
    size: int
    partial: bool = False
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class WrittenResult:
    """A user's message that begins as a tool result written as text: ``head`` characters say so.

    ``name`` is a digest of the tool it names, 0 if none. The result takes the first ``parts`` of the content; the parts
    in ``said`` are the user's own words.
    """

    name: int
    head: int
    parts: int
    said: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemFacts:
    """What is known of one item's calls and results, in the order of their ids.

    ``mentions`` are packed 32-bit digests of the file names and quotations in what the model wrote; ``decides`` says
    that it draws a conclusion. ``wrote`` is the call that the model wrote as text, of the tools in ``asks``;
    ``written`` says that the item begins as a result of one.
    """

    calls: tuple[Call, ...] = ()
    results: tuple[Result, ...] = ()
    mentions: bytes = b""
    decides: bool = False
    wrote: Call | None = None
    asks: tuple[int, ...] = ()
    written: WrittenResult | None = None


NO_FACTS = ItemFacts()


@dataclass(frozen=True, slots=True)
class Item:
    """Numbers and names of one item; never its text, because a slice of a body keeps the whole body alive.

    ``tokens`` is its weight in the model's encoding, of which ``media`` cannot be clipped, ``guess`` is a guess (files,
    audio, images elsewhere) and ``memory`` was injected by an agent; ``sealed`` must not be edited (signed or encrypted
    reasoning), and ``said`` is what the user wrote beside tool results in one item. ``digest`` (16 bytes) is equal for
    items that mean the same however a client serialises them. ``calls`` and ``answers`` are tool call ids; ``facts``
    say what those calls and results are.
    """

    role: Role
    tokens: int
    media: int
    digest: bytes
    calls: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    guess: int = 0
    memory: int = 0
    sealed: int = 0
    said: int = 0
    facts: ItemFacts | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The structure of a conversation; all figures are item indexes.

    ``cuts`` are the starts of rounds and of user items at which a conversation may be cut without splitting a pair;
    ``places`` are lengths at which a request could have ended. ``sums`` are the tokens before each index of all items
    but system ones, ``user_sums`` and ``result_sums`` those of what users said and of items with tool results.
    ``waiting`` are unanswered calls by id, ``last`` the role of the last item that is no system item.
    """

    count: int = 0
    systems: tuple[int, ...] = ()
    users: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    sums: tuple[int, ...] = (0,)
    user_sums: tuple[int, ...] = (0,)
    result_sums: tuple[int, ...] = (0,)
    waiting: tuple[tuple[str, int], ...] = ()
    last: Role | None = None

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


EMPTY_LAYOUT = Layout()
"""The structure of no items at all."""


def lay_out(items: Sequence[Item], known: Layout = EMPTY_LAYOUT) -> Layout:
    """The structure of *items*, continued from that of a prefix of them; costs O(new)."""
    systems, users, cuts = list(known.systems), list(known.users), list(known.cuts)
    sums, user_sums, result_sums = list(known.sums), list(known.user_sums), list(known.result_sums)
    places = [place for place in known.places[-1:] if place < known.count]
    places = [*known.places[:-1], *places]  # whether the prefix's end is a place depends on what follows it
    waiting, last = dict(known.waiting), known.last
    for index in range(known.count, len(items)):
        item = items[index]
        user = item.role == "user"
        sums.append(sums[-1] + (item.tokens if item.role != "system" else 0))
        user_sums.append(user_sums[-1] + (item.tokens if user else item.said))
        result_sums.append(result_sums[-1] + (item.tokens if item.answers else 0))
        if item.role == "system":
            systems.append(index)
            continue
        if item.role == "assistant":
            if last not in (None, "assistant"):
                places.append(index)
            if last != "assistant":
                cuts.append(index)
            waiting.update(dict.fromkeys(item.calls, index))
        elif user:
            users.append(index)
            cuts.append(index)
        elif last is None:
            cuts.append(index)
        else:
            _join(cuts, item, waiting)
        last = item.role
    if last not in (None, "assistant"):
        places.append(len(items))
    return Layout(
        len(items),
        tuple(systems),
        tuple(users),
        tuple(cuts),
        tuple(places),
        tuple(sums),
        tuple(user_sums),
        tuple(result_sums),
        tuple(waiting.items()),
        last,
    )


def unread_from(items: Sequence[Item], place: int) -> int:
    """The index of the first item behind the model's last one before *place*: no model has read the results there."""
    while place and items[place - 1].role != "assistant":
        place -= 1
    return place


def _join(cuts: list[int], result: Item, waiting: dict[str, int]) -> None:
    """Forbid every cut between a call and *result*; a result without a call stays with what stands before it."""
    for name in result.answers:
        call = waiting.pop(name, None)
        while call is not None and cuts and cuts[-1] > call:
            cuts.pop()


HASH_BYTES = 16
"""Bytes of a link: 128 bits of HMAC-SHA256."""


def prefix_hashes(key: bytes, label: str, items: Sequence[Item], known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
    """The links after each item; ``links[i]`` names ``items[:i + 1]``. System items do not change the link.

    *known* are links of a prefix computed before. *label* (``x-ullage-conversation``) separates equal openings.
    """
    links = list(known)
    link = links[-1] if links else hmac.digest(key, b"ullage1\0" + label.encode(), "sha256")[:HASH_BYTES]
    keyed = hmac.new(key, digestmod="sha256")  # a copy costs less than to derive the key's two blocks for each item
    for item in items[len(links) :]:
        if item.role != "system":
            code = keyed.copy()
            code.update(link + item.digest)
            link = code.digest()[:HASH_BYTES]
        links.append(link)
    return tuple(links)


@dataclass(frozen=True, slots=True)
class ItemText:
    """The words of one item: its text, its tool calls as (name, arguments) and the kinds of its media parts.

    ``results`` are the texts of its tool results that a text may replace, each with whether the API itself says that it
    failed. ``reasoning`` is what the model thought before it spoke, where that is
    readable; ``said`` what the user wrote beside the tool results of the same item (``text`` holds it too).
    """

    role: Role
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    media: tuple[str, ...] = ()
    reasoning: str = ""
    said: str = ""
    results: tuple[tuple[str, bool], ...] = ()
