from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.store.memory import MemoryBackend


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 900)), max_size=60))
async def test_it_never_holds_more_than_its_limit(writes: list[tuple[str, int]]) -> None:
    """After any writes, the stored bytes stay within the limit and are counted right."""
    memory = MemoryBackend(max_bytes=3000)
    for key, size in writes:
        await memory.claim(key, bytes(size), 60)
        held = [value for value in await memory.read("abcdefgh") if value is not None]
        assert sum(len(value) + 200 for value in held) == memory._bytes <= 3000


async def test_the_least_recently_used_goes_first() -> None:
    """Reading a value keeps it while others are pushed out."""
    memory = MemoryBackend(max_bytes=1500)
    for key in "abc":
        await memory.claim(key, bytes(200), 60)
    await memory.read("a")
    await memory.claim("d", bytes(200), 60)
    found = await memory.read("abcd")
    assert [value is not None for value in found] == [True, False, True, True]


async def test_values_end_with_their_time_unless_refreshed() -> None:
    """A value is gone when its time is over, counted from its last refresh."""
    now = 0.0
    memory = MemoryBackend(clock=lambda: now)
    await memory.claim("a", b"1", 10)
    await memory.claim("b", b"2", 10)
    await memory.claim("c", b"3", None)
    now = 9.0
    await memory.refresh("b", 10)
    now = 11.0
    assert await memory.read("abc") == [None, b"2", b"3"]
    assert await memory.claim("a", b"new", 10) is None
