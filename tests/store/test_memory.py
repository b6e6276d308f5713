from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.store.memory import MemoryBackend
from proxy.store.operations import Claim, Read, Refresh


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 900)), max_size=60))
async def test_it_never_holds_more_than_its_limit(writes: list[tuple[str, int]]) -> None:
    """After any writes, the stored bytes stay within the limit and are counted right."""
    memory = MemoryBackend(max_bytes=3000)
    for key, size in writes:
        await memory.run(Claim(key, bytes(size), 60))
        held = [value for value in await memory.run(Read("abcdefgh")) if value is not None]
        assert sum(len(value) + 200 for value in held) == memory._bytes <= 3000


async def test_the_least_recently_used_goes_first() -> None:
    """Reading a value keeps it while others are pushed out."""
    memory = MemoryBackend(max_bytes=1500)
    for key in "abc":
        await memory.run(Claim(key, bytes(200), 60))
    await memory.run(Read("a"))
    await memory.run(Claim("d", bytes(200), 60))
    found = await memory.run(Read("abcd"))
    assert [value is not None for value in found] == [True, False, True, True]


async def test_values_end_with_their_time_unless_refreshed() -> None:
    """A value is gone when its time is over, counted from its last refresh."""
    now = 0.0
    memory = MemoryBackend(clock=lambda: now)
    await memory.run(Claim("a", b"1", 10))
    await memory.run(Claim("b", b"2", 10))
    await memory.run(Claim("c", b"3", None))
    now = 9.0
    await memory.run(Refresh("b", 10))
    now = 11.0
    assert await memory.run(Read("abc")) == [None, b"2", b"3"]
    assert await memory.run(Claim("a", b"new", 10)) is None
