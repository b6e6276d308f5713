"""The items of a conversation, its rounds and boundaries, and the hashes that name its prefixes.

A *round* is a maximal run of items that the model produced, with all results of its calls. No cut is inside a round,
so no pair of call and result can be split. A *boundary* is a length of the conversation at which a request could have
ended.

Items, calls and results are ``msgspec.Struct``: a body has thousands of them, each is created in a tenth of the time
of a frozen dataclass, and the garbage collector does not visit them.
https://jcristharif.com/msgspec/structs.html
"""

from __future__ import annotations

import hashlib
import hmac
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, cast

import msgspec

Count = Callable[[str], int]
"""Returns the tokens of a text."""

Role = Literal["system", "user", "assistant", "tool"]


class Call(msgspec.Struct, frozen=True, gc=False):
    """One tool call. ``repeat_key`` is equal for equal calls of tools that change nothing (0: not comparable).

    ``paths`` and ``names`` are digests of its targets and of their last parts. ``first`` and ``last`` are the requested
    lines (last 0: to the end; first 0: unknown), ``line_limit`` the tool's default number of lines. All digests are
    hashes as that of a result.
    """

    kind: str
    repeat_key: int = 0
    paths: tuple[int, ...] = ()
    names: tuple[int, ...] = ()
    first: int = 0
    last: int = 0
    line_limit: int = 0


class Result(msgspec.Struct, frozen=True, gc=False):
    """One tool result: digests of its text and of its opening, its number of lines, its size in bytes.

    ``digest`` is Python's own hash, equal in one process only: it is keyed, and takes a tenth of the time of a
    cryptographic one (https://docs.python.org/3/reference/datamodel.html#object.__hash__). ``ok`` is False if it
    reports a failure, ``partial`` is True if it states that a part is missing. ``first`` and ``last`` are the line
    numbers shown in it, zero if there are none. ``spare`` are the tokens of white space in JSON.
    """

    digest: int
    opening: int
    ok: bool
    lines: int
    size: int
    partial: bool = False
    first: int = 0
    last: int = 0
    spare: int = 0


class WrittenResult(msgspec.Struct, frozen=True, gc=False):
    """A tool result written as text at the beginning of a user's message; its heading is ``head`` characters long.

    ``tool`` is a digest of the tool that it names, 0 if none. The result is in the parts of the content from ``first``
    to ``parts``, which is left out; parts that the client added may come before. ``user_parts`` are the indexes of the
    parts with the user's own words.
    """

    tool: int
    head: int
    parts: int
    user_parts: tuple[int, ...] = ()
    first: int = 0


class WrittenCalls(msgspec.Struct, frozen=True, gc=False):
    """The calls that the model wrote as text in one message: the digests of their tools, 0 for one without a name.

    ``call`` is of an unknown kind if there are several: nothing shows which part of a result belongs to which call.
    """

    tools: tuple[int, ...]
    call: Call


class ItemFacts(msgspec.Struct, frozen=True, gc=False):
    """Facts of one item's calls and results, in the order of their ids.

    ``mentions`` are packed digests of the file names and quotations in the model's words; ``decides`` is True if
    these words draw a conclusion.
    """

    calls: tuple[Call, ...] = ()
    results: tuple[Result, ...] = ()
    mentions: bytes = b""
    decides: bool = False


NO_FACTS = ItemFacts()


class FactsMissing(Exception):
    """The facts of an item are needed and were not read yet."""


class _Unread:
    """Raises at any use, so that planning that needs facts stops and asks for them (``NeedFacts``)."""

    def __getattr__(self, name: str) -> object:
        raise FactsMissing


UNREAD = cast(ItemFacts, _Unread())
"""The facts of an item that were not read yet, since only a compaction needs them."""


class Injected(msgspec.Struct, frozen=True, gc=False):
    """A part of a text that an agent or a framework injected: its region and its tokens.

    ``digest`` is equal for parts of equal text in the same process.
    """

    region: str
    tokens: int
    digest: int


class Item(msgspec.Struct, frozen=True, gc=False):
    """Numbers and names of one item; never its text, because items are cached and no cache may hold a conversation.

    ``tokens`` are counted in the model's encoding. Parts of them: ``media`` cannot be clipped; ``guess`` is only an
    estimate (files, audio, images at a URL); ``injected`` was added by an agent or a framework; ``sealed`` must not be
    edited (signed or encrypted reasoning); ``user_tokens`` are the user's own words beside tool results.

    ``digest`` (16 bytes) is equal for items of equal meaning, however a client serialises them. ``calls`` are the ids
    of the tool calls in it, ``answers`` those of the calls that it answers, ``facts`` their facts, or ``UNREAD``.

    ``written_result`` is set if a user's item begins like a result that is written as text; ``written_calls`` if the
    model's item before it was searched for the call.
    """

    role: Role
    tokens: int
    media: int
    digest: bytes
    calls: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    guess: int = 0
    injected: tuple[Injected, ...] = ()
    sealed: int = 0
    user_tokens: int = 0
    facts: ItemFacts | None = None
    written_result: WrittenResult | None = None
    written_calls: WrittenCalls | None = None


LINKED = 400
"""Bytes in memory of a call or result, without its id; for the limits of caches."""

_CALLS, _ANSWERS = attrgetter("calls"), attrgetter("answers")


def linked_size(items: Sequence[Item]) -> int:
    """Return the bytes in memory of calls and results in *items* beyond one for each item."""
    # ``map`` over ``attrgetter`` runs in C: bodies have thousands of items.
    names = [*chain.from_iterable(map(_CALLS, items)), *chain.from_iterable(map(_ANSWERS, items))]
    return LINKED * max(0, len(names) - len(items)) + sum(map(len, names))


class ItemText(msgspec.Struct, frozen=True, gc=False):
    """The texts of one item, read from its bytes when a compaction writes about it; the same for every API.

    ``calls`` are (name, arguments) of its tool calls, ``media`` the types of its media parts. ``results`` are the texts
    of tool results that another text may replace, each with True if the API marks it as failed. ``reasoning`` is the
    model's readable reasoning. ``user_text`` are the user's own words beside tool results (``text`` contains them too).
    """

    role: Role
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    media: tuple[str, ...] = ()
    reasoning: str = ""
    user_text: str = ""
    results: tuple[tuple[str, bool], ...] = ()


class Layout(msgspec.Struct, frozen=True):
    """The structure of a conversation; all figures are item indexes.

    ``cuts`` are the starts of rounds and of user items at which a conversation may be cut without splitting a pair;
    ``boundaries`` are lengths at which a request could have ended. ``sums`` are the tokens before each index of all
    items but system ones, ``user_sums`` those of users' words, ``result_sums`` those of items with tool results.
    ``open_calls`` are unanswered calls by id, ``last_role`` is the role of the last item that is no system item.
    """

    count: int = 0
    systems: tuple[int, ...] = ()
    users: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    sums: tuple[int, ...] = (0,)
    user_sums: tuple[int, ...] = (0,)
    result_sums: tuple[int, ...] = (0,)
    open_calls: tuple[tuple[str, int], ...] = ()
    last_role: Role | None = None

    @property
    def task(self) -> int | None:
        """The first user item, which states the task; None if there is none."""
        if not self.users:
            return None
        return self.users[0]

    def verbatim_users(self, boundary: int, cut: int) -> tuple[int, ...]:
        """Return the folded user items that stay verbatim: the task, and the newest user item at *boundary*."""
        folded = bisect_left(self.users, min(boundary, cut))
        newest = bisect_left(self.users, boundary) - 1
        if not folded:
            return ()
        if 0 < newest < folded:
            return self.users[0], self.users[newest]
        return self.users[:1]


EMPTY_LAYOUT = Layout()
"""The structure of a conversation without items."""


def lay_out(items: Sequence[Item], prefix: Layout = EMPTY_LAYOUT) -> Layout:
    """Return the structure of *items*, continued from that of a prefix of them; costs O(new)."""
    # Tuples that only grow are extended by the new part at the end. Cuts and boundaries may lose their last entries,
    # so they are copied as a whole.
    systems: list[int] = []
    users: list[int] = []
    sums, user_sums, result_sums = [prefix.sums[-1]], [prefix.user_sums[-1]], [prefix.result_sums[-1]]
    cuts, boundaries = list(prefix.cuts), list(prefix.boundaries)
    if boundaries and boundaries[-1] >= prefix.count:
        boundaries.pop()  # the loop adds it again if the next item shows that a request could have ended there
    open_calls, last = dict(prefix.open_calls), prefix.last_role
    for index in range(prefix.count, len(items)):
        item = items[index]
        is_user = item.role == "user"
        user_sums.append(user_sums[-1] + (item.tokens if is_user else item.user_tokens))
        result_sums.append(result_sums[-1] + (item.tokens if item.answers else 0))
        if item.role == "system":
            sums.append(sums[-1])
            systems.append(index)
            continue
        sums.append(sums[-1] + item.tokens)
        if item.role == "assistant":
            if last not in (None, "assistant"):
                boundaries.append(index)
            if last != "assistant":
                cuts.append(index)
            open_calls.update(dict.fromkeys(item.calls, index))
        elif is_user:
            users.append(index)
            cuts.append(index)
        elif last is None:
            cuts.append(index)
        else:
            _forbid_cuts(cuts, item, open_calls)
        last = item.role
    if last not in (None, "assistant"):
        boundaries.append(len(items))
    return Layout(
        len(items),
        prefix.systems + tuple(systems),
        prefix.users + tuple(users),
        tuple(cuts),
        tuple(boundaries),
        prefix.sums + tuple(sums[1:]),
        prefix.user_sums + tuple(user_sums[1:]),
        prefix.result_sums + tuple(result_sums[1:]),
        tuple(open_calls.items()),
        last,
    )


def unread_from(items: Sequence[Item], boundary: int) -> int:
    """Return the index after the model's last item before *boundary*: no model has read the items from there on."""
    index = boundary
    while index and items[index - 1].role != "assistant":
        index -= 1
    return index


def _forbid_cuts(cuts: list[int], result: Item, open_calls: dict[str, int]) -> None:
    """Remove every cut between a call and *result*; a result without a call stays with the items before it."""
    for name in result.answers:
        call = open_calls.pop(name, None)
        while call is not None and cuts and cuts[-1] > call:
            cuts.pop()


HASH_BYTES = 16
"""Bytes of a prefix hash: 128 bits of HMAC-SHA256 (https://www.rfc-editor.org/rfc/rfc2104#section-5)."""

_BLOCK = 64
"""Bytes of a block of SHA-256."""

_MOST_KEYS = 1_024


@lru_cache(_MOST_KEYS)
def _keyed(key: bytes) -> tuple[Any, Any]:
    """Return the inner and the outer hash of HMAC-SHA256 once they have read *key* (at most a block).

    A copy of both takes a third of the time of ``hmac.digest``, which looks its algorithm up each time.
    """
    padded = key.ljust(_BLOCK, b"\0")
    inner, outer = (bytes(byte ^ pad for byte in padded) for pad in (0x36, 0x5C))
    return hashlib.sha256(inner), hashlib.sha256(outer)


def prefix_hashes(key: bytes, label: str, items: Sequence[Item], earlier: Sequence[bytes] = ()) -> tuple[bytes, ...]:
    """Return the keyed rolling hash after each item: ``hashes[i]`` names ``items[:i + 1]``.

    System items do not change the hash: clients put clocks and file lists into them. *earlier* are the hashes of a
    prefix, computed before. *key* belongs to one tenant, so that no other can form the names. *label*
    (``x-ullage-conversation``) separates conversations with equal openings.
    """
    hashes = list(earlier)
    if hashes:
        last = hashes[-1]
    else:
        last = hmac.digest(key, b"ullage1\0" + label.encode(), "sha256")[:HASH_BYTES]
    inner, outer = _keyed(key)
    for item in items[len(hashes) :]:
        if item.role != "system":
            message, code = inner.copy(), outer.copy()
            message.update(last + item.digest)
            code.update(message.digest())
            last = code.digest()[:HASH_BYTES]
        hashes.append(last)
    return tuple(hashes)
