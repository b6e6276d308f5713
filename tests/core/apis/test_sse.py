from hypothesis import given
from hypothesis import strategies as st

from proxy.core.apis.sse import EventCutter
from tests.growth import is_linear

ENDS = ("\n\n", "\r\n\r\n", "\r\r")


@given(
    st.lists(st.sampled_from(["data: a", "event: x\ndata: {}", ": ping", "data: b\ndata: c", "id: 1\r\ndata: d"])),
    st.sampled_from(ENDS),
    st.integers(1, 9),
)
def test_events_are_cut_apart_alike_in_any_chunking(events: list[str], end: str, size: int) -> None:
    """However a stream arrives, its events come out whole, in order, and no byte is lost."""
    stream = "".join(event + end for event in events).encode() + b"data: rest"
    splitter, found = EventCutter(), []
    for at in range(0, len(stream), size):
        found += splitter.feed(stream[at : at + size])
    assert found == [(event + end).encode() for event in events]
    assert splitter.begun == len(b"data: rest")
    assert splitter.rest() == b"data: rest"
    assert splitter.rest() == b""


def test_a_long_event_costs_no_more_per_byte_than_a_short_one() -> None:
    """An event that comes in many pieces is cut in time that grows with it and no faster."""

    def one_event(size: int) -> None:
        events = EventCutter()
        for _ in range(size // 1000):
            assert not events.feed(b"x" * 1000)
        assert len(events.feed(b"\n\n")) == 1

    def many_events(size: int) -> None:
        assert len(EventCutter().feed(b":\n\n" * (size // 3))) == size // 3

    assert is_linear(one_event, 10_000_000)
    assert is_linear(many_events, 300_000)
