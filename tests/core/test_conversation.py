"""Layout and prefix hashes: no cut splits a pair of call and result that the client sent whole."""

from __future__ import annotations

import hmac
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.core.apis.chat import read_item
from proxy.core.conversation import EMPTY_LAYOUT, HASH_BYTES, Item, Role, lay_out, prefix_hashes, unread_from
from tests.support import conversation_strategies
from tests.support.tool_pair_checks import pair_violations

Message = dict[str, Any]
ROLES: dict[str, Role] = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def items(messages: list[Message]) -> list[Item]:
    return [read_item(json.dumps(message).encode(), len) for message in messages]


def shorthand(text: str) -> list[Item]:
    """Items from words like ``u``, ``a12`` (calls 1 and 2) and ``t1`` (the result of 1), each weighing ten."""
    made = []
    for word in text.split():
        names = tuple(word[1:])
        calls, answers = (names, ()) if word[0] == "a" else ((), names)
        made.append(Item(ROLES[word[0]], 10, 0, word.encode(), calls, answers))
    return made


FILLER = {"role": "user", "content": ""}


def call(*names: str) -> Message:
    function = {"name": "look", "arguments": "{}"}
    return {
        "role": "assistant",
        "tool_calls": [{"id": name, "type": "function", "function": function} for name in names],
    }


def result(name: str) -> Message:
    return {"role": "tool", "tool_call_id": name, "content": "x"}


words = st.one_of(
    st.sampled_from([FILLER, {"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]),
    st.lists(st.sampled_from("123"), min_size=1, max_size=3, unique=True).map(lambda names: call(*names)),
    st.sampled_from("123").map(result),
    st.sampled_from("123").map(result),
    st.sampled_from([{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]),
    st.sampled_from(["f", "g"]).map(lambda name: {"role": "function", "name": name, "content": "x"}),
)
"""Any order at all: late results, users between call and result, ids used again before they were answered."""

talks = st.one_of(conversation_strategies.conversations(with_orphans=True, long=False), st.lists(words, max_size=12))


@settings(max_examples=250)
@given(talks)
@example([FILLER, call("1"), FILLER, result("1"), call("2"), result("2"), FILLER])
@example([call("1"), call("1"), FILLER, result("1"), FILLER, result("1")])
@pytest.mark.slow
def test_a_cut_breaks_no_pair(messages: list[Message]) -> None:
    """Before and after any cut, only pairs are broken that the client broke."""
    raw = set(pair_violations(messages))
    count = len(messages)
    for cut in lay_out(items(messages)).cuts:
        # As many fillers as messages taken away, so that violations are named alike.
        assert set(pair_violations([FILLER] * cut + messages[cut:])) <= raw
        assert set(pair_violations(messages[:cut] + [FILLER] * (count - cut))) <= raw


@settings(max_examples=100)
@given(conversation_strategies.conversations())
@pytest.mark.slow
def test_whole_conversations_can_be_cut_at_every_round(messages: list[Message]) -> None:
    """If every pair is whole, each user item and each beginning of a round is a cut."""
    roles = [item.role for item in items(messages)]
    spoken = [(at, role) for at, role in enumerate(roles) if role != "system"]
    before = [None, *(role for _, role in spoken)]
    starts = [
        at
        for (at, role), last in zip(spoken, before, strict=False)
        if role == "user" or (role == "assistant" and last != "assistant")
    ]
    assert list(lay_out(items(messages)).cuts) == starts


@settings(max_examples=100)
@given(talks)
@pytest.mark.slow
def test_places_are_where_a_request_could_have_ended(messages: list[Message]) -> None:
    """A place follows an item that is not the model's and stands last or before one of the model's."""
    read = items(messages)
    layout = lay_out(read)
    spoken = [(at, item.role) for at, item in enumerate(read) if item.role != "system"]
    expected = [
        at for (at, role), (_, last) in zip(spoken[1:], spoken, strict=False) if role == "assistant" != last
    ] + ([len(read)] if spoken and spoken[-1][1] != "assistant" else [])
    assert list(layout.boundaries) == expected


@settings(max_examples=100)
@given(talks)
@pytest.mark.slow
def test_indexes_and_sums(messages: list[Message]) -> None:
    """Systems, users and the sums before each index are those of the items."""
    read = items(messages)
    layout = lay_out(read)
    assert layout.count == len(read)
    assert [read[at].role for at in layout.systems + layout.users] == ["system"] * len(layout.systems) + ["user"] * len(
        layout.users
    )
    assert len(layout.systems) + len(layout.users) == sum(item.role in ("system", "user") for item in read)
    assert layout.task == (layout.users[0] if layout.users else None)
    for at in range(len(read) + 1):
        assert layout.sums[at] == sum(item.tokens for item in read[:at] if item.role != "system")
        assert layout.user_sums[at] == sum(item.tokens for item in read[:at] if item.role == "user")


@settings(max_examples=150)
@given(talks, st.lists(st.integers(0, 40), max_size=3))
@pytest.mark.slow
def test_a_layout_continues_that_of_a_prefix(messages: list[Message], stops: list[int]) -> None:
    """Laying out step by step, wherever one stops, gives what one walk gives."""
    read = items(messages)
    known = EMPTY_LAYOUT
    for stop in sorted(stop for stop in stops if stop <= len(read)):
        known = lay_out(read[:stop], known)
        assert known == lay_out(read[:stop])
    assert lay_out(read, known) == lay_out(read)


@pytest.mark.parametrize(
    ("conversation", "cuts", "places"),
    [
        ("", (), ()),
        ("s", (), ()),
        ("u", (0,), (1,)),
        ("s u a", (1, 2), (2,)),
        ("u a1 t1", (0, 1), (1, 3)),
        ("u a12 t2 t1 a u", (0, 1, 4, 5), (1, 4, 6)),
        ("u a a1 t1 u", (0, 1, 4), (1, 5)),
        ("u a1 u t1 a", (0, 1, 4), (1, 4)),
        ("u a1 a2 t1 t2", (0, 1), (1, 5)),
        ("u a1 t1 a1 t1", (0, 1, 3), (1, 3, 5)),
        ("u a1 s t1 s a u", (0, 1, 5, 6), (1, 5, 7)),
        ("t1 u a", (0, 1, 2), (2,)),
        ("u t9 a", (0, 2), (2,)),
        ("u a1 u a2 t2 t1 u", (0, 1, 6), (1, 3, 7)),
    ],
)
def test_cuts_and_places(conversation: str, cuts: tuple[int, ...], places: tuple[int, ...]) -> None:
    """Small conversations, worked out by hand."""
    layout = lay_out(shorthand(conversation))
    assert (layout.cuts, layout.boundaries) == (cuts, places)


@pytest.mark.parametrize(
    ("conversation", "place", "cut", "anchors"),
    [
        ("u a u a u a u", 7, 6, (0, )),
        ("u a u a u a1 t1", 7, 5, (0, 4)),
        ("u a u a u a1 t1", 7, 4, (0,)),
        ("u a u a u a1 t1", 7, 0, ()),
        ("u a1 t1 a2 t2", 5, 3, (0,)),
        ("s a1 t1 a2 t2", 5, 3, ()),
        ("u a u a u a u", 3, 6, (0, 2)),
    ],
)  # fmt: skip
def test_anchors(conversation: str, place: int, cut: int, anchors: tuple[int, ...]) -> None:
    """Of the folded user items the task stays, and the one that was newest at the place."""
    assert lay_out(shorthand(conversation)).verbatim_users(place, cut) == anchors


@settings(max_examples=100)
@given(talks, st.data())
def test_anchors_are_folded_user_items(messages: list[Message], data: st.DataObject) -> None:
    """Anchors stand before the cut, are the user's, and include the task whenever it was folded."""
    read = items(messages)
    layout = lay_out(read)
    place, cut = data.draw(st.integers(0, len(read))), data.draw(st.integers(0, len(read)))
    anchors = layout.verbatim_users(place, cut)
    assert all(at < min(place, cut) and read[at].role == "user" for at in anchors)
    assert list(anchors) == sorted(set(anchors))
    if layout.task is not None and layout.task < min(place, cut):
        assert anchors[0] == layout.task


def test_an_item_is_a_value() -> None:
    """Items are compared by what they hold and cannot be changed."""
    one = Item("user", 5, 0, b"x")
    assert one == replace(one)
    with pytest.raises(AttributeError):
        one.tokens = 6  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "border"), [("u a1 t1", 2), ("u a12 t1 t2 u", 2), ("u a1 t1 a", 4), ("s u", 0), ("", 0)]
)
def test_what_stands_behind_the_models_last_words_is_unread(text: str, border: int) -> None:
    """Everything after the last assistant item is new to the model."""
    found = shorthand(text)
    assert unread_from(found, len(found)) == border


ANN, BOB = b"a" * 32, b"b" * 32


def people(text: str) -> list[Item]:
    return [Item("system" if c == "s" else "user", 1, 0, c.encode() * HASH_BYTES) for c in text]


letters = st.text("sabc", max_size=10)


@given(letters, letters, st.integers(0, 10))
def test_a_known_prefix_is_continued(head: str, tail: str, stop: int) -> None:
    """Continuing from a prefix's links gives those of the whole, and a prefix has the links of its own."""
    items = people(head + tail)
    links = prefix_hashes(ANN, "x", items)
    assert len(links) == len(items)
    assert links[: len(head)] == prefix_hashes(ANN, "x", people(head))
    assert prefix_hashes(ANN, "x", items, links[:stop]) == links


@given(letters, letters)
def test_a_prefix_hash_names_the_content(one: str, two: str) -> None:
    """Two conversations share their last link exactly when they agree in everything but system items."""
    first, second = prefix_hashes(ANN, "", people("a" + one)), prefix_hashes(ANN, "", people("a" + two))
    assert (first[-1] == second[-1]) == (one.replace("s", "") == two.replace("s", ""))


def test_system_items_leave_the_link_alone() -> None:
    """A clock in the system text renames no conversation; each system item has the link before it."""
    links = prefix_hashes(ANN, "", people("sasb"))
    assert links[1] == links[2]
    assert links[0] not in links[1:]
    assert prefix_hashes(ANN, "", people("ab")) == (links[1], links[3])
    assert prefix_hashes(ANN, "", people("ssab"))[2:] == (links[1], links[3])


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.text(), st.text())
def test_keys_and_labels_separate(one: bytes, two: bytes, label: str, other: str) -> None:
    """Another key or another label names every prefix differently, the empty one included."""
    items = people("sab")
    alike = set(prefix_hashes(one, label, items)) & set(prefix_hashes(two, other, items))
    assert bool(alike) == ((one, label) == (two, other))


@pytest.mark.parametrize("label", ["", "é", "\0", "a" * 500])
def test_links_are_short(label: str) -> None:
    """Every link has the stated length, whatever the label."""
    assert {len(link) for link in prefix_hashes(BOB, label, people("sab"))} == {HASH_BYTES}


@given(
    st.binary(min_size=1, max_size=64), st.text(max_size=8), st.lists(st.binary(min_size=16, max_size=16), max_size=6)
)
def test_prefix_hashes_are_hmacs(key: bytes, label: str, digests: list[bytes]) -> None:
    """Each is the HMAC-SHA256 of the one before and the item's digest, cut to 16 bytes."""
    expected, last = [], hmac.digest(key, b"ullage1\0" + label.encode(), "sha256")[:16]
    for digest in digests:
        last = hmac.digest(key, last + digest, "sha256")[:16]
        expected.append(last)
    items = [Item("user", 1, 0, digest) for digest in digests]
    assert prefix_hashes(key, label, items) == tuple(expected)
    assert prefix_hashes(key, label, items, expected[:2]) == tuple(expected)
