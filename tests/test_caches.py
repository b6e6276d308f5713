"""Memories bounded by bytes."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from types import ModuleType

import pytest
from cachebox import LRUCache

from proxy.caches import SizedCache, envelopes, items, prefixes
from proxy.core.apis.base import ApiFormat
from proxy.core.conversation import Item
from proxy.core.decisions import API_FORMATS
from proxy.engine.reading import Reader
from tests.bench.small import BOUNDS, SHARE
from tests.support.api_formats import request_body
from tests.support.engine_fixtures import tokenizers
from tests.support.sample_conversations import AGENT_TOOLS, agent_session

TENANT = b"t" * 32


def test_the_longest_unused_go_first() -> None:
    """The sum of what is kept never exceeds the limit, and what was used last stays."""
    memory: SizedCache[str, bytes] = SizedCache(10, lambda _, value: len(value))
    memory["a"], memory["b"] = b"1234", b"5678"
    assert memory["a"] == b"1234"
    memory["c"] = b"90ab"
    assert sorted(memory) == ["a", "c"]
    assert memory.current_size() == 8


def test_what_is_too_large_is_not_kept() -> None:
    """A value above the limit is no error and pushes nothing out."""
    memory: SizedCache[str, bytes] = SizedCache(10, lambda _, value: len(value))
    memory["a"] = b"1234"
    memory["a"] = b"x" * 11
    memory["b"] = b"x" * 11
    assert dict(memory) == {"a": b"1234"}
    memory.update({"c": b"12", "b": b"x" * 11, "d": b"34"})
    assert dict(memory) == {"a": b"1234", "c": b"12", "d": b"34"}


async def _read(reader: Reader, api_format: ApiFormat, body: bytes) -> None:
    reading = await reader.read(reader.locate(api_format, TENANT, body), "o200k_base")
    reading.layout()
    reading.prefix_hashes(b"k" * 32, "")
    reader.read_facts(api_format, reading, {})


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
@pytest.mark.slow
async def test_a_prefix_takes_what_it_is_thought_to(api: str) -> None:
    """What a long conversation leaves in memory, its items included, is no more than is reckoned for it."""
    seen: dict[bytes, Item] = {}
    known, around = prefixes(), envelopes()
    reader, api_format = Reader(tokenizers(), seen, around, {}, known), API_FORMATS[api]
    # The first one is nearly as long, so that what the process remembers of any text (names, classes) is there by then.
    warm, body = (json.dumps(request_body(api, agent_session(n, 30), AGENT_TOOLS)).encode() for n in (599, 600))
    await _read(reader, api_format, warm)
    for memory in (seen, known, around):
        memory.clear()
    gc.collect()
    tracemalloc.start()
    await _read(reader, api_format, body)
    seen.clear()
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(known) == len(around) == 1
    assert taken < known.current_size() + around.current_size() < 4 * taken


def _many_calls(count: int) -> tuple[str, list[dict[str, object]]]:
    """Return a body with so many calls in one message, each with its result in a message of its own."""
    calls = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": "read_file", "arguments": f'{{"path": "a/{n}.py"}}'},
        }
        for n in range(count)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"ok {call['id']}"} for call in calls]
    return "chat", [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}, *results]


def _many_results(count: int) -> tuple[str, list[dict[str, object]]]:
    """Return a body with so many calls in one message, and as many results in another."""
    calls = [{"type": "tool_use", "id": f"call_{n}", "name": "read_file", "input": {"n": n}} for n in range(count)]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": f"ok {call['id']}"} for call in calls]
    two = [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    return "messages", [{"role": "user", "content": "x"}, *two]


def _long_name(size: int) -> tuple[str, list[dict[str, object]]]:
    """Return a body with a call whose id is of so many characters."""
    call = {"id": "x" * size, "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    return "chat", [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, answer]


def _usual(count: int) -> tuple[str, list[dict[str, object]]]:
    """Return the body of a session of so many rounds."""
    return "chat", agent_session(count, 30)


@pytest.mark.parametrize(
    ("make", "size"), [(_usual, 600), (_many_calls, 3_000), (_many_results, 3_000), (_long_name, 500_000)]
)
@pytest.mark.slow
async def test_items_are_reckoned_by_what_a_client_put_into_them(
    make: Callable[[int], tuple[str, list[dict[str, object]]]], size: int
) -> None:
    """Neither memory that holds items can take more than its bytes, whatever is in one of them.

    By their number, a client had them hold any amount: a message has as many calls as it likes, with ids of any length.
    """
    api, messages = make(size)
    seen, known, around = items(), prefixes(), envelopes()
    reader, api_format = Reader(tokenizers(), seen, around, {}, known), API_FORMATS[api]
    warm, body = (json.dumps({"model": "m", "max_tokens": 5, "messages": each}) for each in (_usual(2)[1], messages))
    await _read(reader, API_FORMATS["chat"], warm.encode())
    for memory in (seen, known, around):
        memory.clear()
    gc.collect()
    tracemalloc.start()
    await _read(reader, api_format, body.encode())
    del body
    await asyncio.sleep(0)  # lets go of what a thread returned
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    by_items, by_prefixes = seen.current_size(), known.current_size() + around.current_size()
    for memory in (seen, known, around):
        memory.clear()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    taken = before - after
    assert taken < by_items + by_prefixes
    assert taken / 2 < by_prefixes < 4 * taken
    assert taken / 3 < by_items < 4 * taken


def test_a_memory_is_read_while_many_values_are_stored() -> None:
    """One that stores the items of a large body at once does not hold up the others between two of them."""
    waits: list[bool] = []

    def size(key: str, value: int) -> int:
        if key == "b":
            reader = threading.Thread(target=lambda: memory.get("a"), daemon=True)
            reader.start()
            reader.join(60)
            waits.append(reader.is_alive())
        return value

    memory: SizedCache[str, int] = SizedCache(10, size)
    memory.update({"a": 1, "b": 1})
    assert waits == [False]


def test_threads_may_share_a_memory() -> None:
    """What threads write and read at once neither breaks it nor grows it beyond its limit."""
    memory: LRUCache[int, int] = LRUCache(50)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for at in range(20_000):
                key = (at * seed) % 120
                memory[key] = key
                assert memory.get((key * 7) % 120) in (None, (key * 7) % 120)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(memory) == 50


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in BOUNDS for name in names])
def test_the_soak_shrinks_bounds_that_exist(module: ModuleType, name: str) -> None:
    """A bound that was renamed would stay as large as it is, and its filling would look like a leak."""
    assert getattr(module, name) >= SHARE


@pytest.mark.skipif(sys.platform != "linux", reason="the other C libraries have no malloc_trim")
@pytest.mark.slow
def test_free_memory_is_given_back() -> None:
    """What was freed leaves the process, although ``keep_large_blocks`` lets the C library keep it."""
    program = """
import ctypes
from pathlib import Path
from proxy.caches import keep_large_blocks, release_free_memory
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
keep_large_blocks()
blocks = [bytearray(100_000) for _ in range(500)]
del blocks
before = resident()
release_free_memory()
print(before - resident())
"""
    given_back = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert int(given_back.stdout) > 30_000_000
