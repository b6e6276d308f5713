"""Events as bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.recall.events import Events, data_of, dumped, value_of, written

ENDS = ("\n\n", "\r\n\r\n", "\r\r")


@given(
    st.lists(st.sampled_from(["data: a", "event: x\ndata: {}", ": ping", "data: b\ndata: c", "id: 1\r\ndata: d"])),
    st.sampled_from(ENDS),
    st.integers(1, 9),
)
def test_events_are_cut_apart_alike_in_any_chunking(events: list[str], end: str, size: int) -> None:
    """However a stream arrives, its events come out whole, in order, and no byte is lost."""
    stream = "".join(event + end for event in events).encode() + b"data: rest"
    splitter, found = Events(), []
    for at in range(0, len(stream), size):
        found += splitter.feed(stream[at : at + size])
    assert found == [(event + end).encode() for event in events]
    assert splitter.rest() == b"data: rest"
    assert splitter.rest() == b""


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"event: x\ndata: {}\n\n", b"{}"),
        (b"data:{}\r\n\r\n", b"{}"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b": comment\n\n", b""),
    ],
)
def test_the_data_of_an_event_is_found(event: bytes, data: bytes) -> None:
    """Data lines are joined; what is no data is not."""
    assert data_of(event) == data


@pytest.mark.parametrize(
    ("data", "value"),
    [(b'{"a":1}', {"a": 1}), (b'{"a":"\\ud800"}', {"a": "\ud800"}), (b"[1]", None), (b"[DONE]", None)],
)
def test_only_objects_are_values(data: bytes, value: object) -> None:
    """An object is read, lone surrogates included; anything else is none."""
    assert value_of(data) == value


def test_what_is_written_can_be_read_again() -> None:
    """An event of any value is valid UTF-8 and says that value."""
    for value in ({"a": "é\n"}, {"a": "\ud800"}):
        event = written(value, "kind")
        assert event.startswith(b"event: kind\ndata: ")
        assert json.loads(data_of(event)) == value == json.loads(dumped(value))
