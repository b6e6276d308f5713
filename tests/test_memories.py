"""Memories bounded by bytes."""

from __future__ import annotations

import gc
import json
import threading
import tracemalloc

import pytest

from proxy.core.conversation.dialect import Dialect
from proxy.core.conversation.items import Item
from proxy.core.decisions import DIALECTS
from proxy.engine.reading import Reader
from proxy.memories import ByBytes, Locked, outlines, prefixes
from tests.fits import tokenizers
from tests.forms import body_of
from tests.material import AGENT_TOOLS, agent_session

TENANT = b"t" * 32


def test_the_longest_unused_go_first() -> None:
    """The sum of what is kept never exceeds the limit, and what was used last stays."""
    memory: ByBytes[str, bytes] = ByBytes(10, len)
    memory["a"], memory["b"] = b"1234", b"5678"
    assert memory["a"] == b"1234"
    memory["c"] = b"90ab"
    assert sorted(memory) == ["a", "c"]
    assert memory.currsize == 8


def test_what_is_too_large_is_not_kept() -> None:
    """A value above the limit is no error and pushes nothing out."""
    memory: ByBytes[str, bytes] = ByBytes(10, len)
    memory["a"] = b"1234"
    memory["a"] = b"x" * 11
    memory["b"] = b"x" * 11
    assert dict(memory) == {"a": b"1234"}


async def _read(reader: Reader, dialect: Dialect, body: bytes) -> None:
    reading = await reader.read(dialect, "o200k_base", TENANT, reader.locate(dialect, TENANT, body))
    reading.layout()
    reading.links(b"k" * 32, "")


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_a_prefix_takes_what_it_is_thought_to(api: str) -> None:
    """What a long conversation leaves in memory, its items included, is no more than is reckoned for it."""
    seen: dict[bytes, Item] = {}
    known, around = prefixes(), outlines()
    reader, dialect = Reader(tokenizers(), seen, around, {}, known), DIALECTS[api]
    warm, body = (json.dumps(body_of(api, agent_session(n, 30), AGENT_TOOLS)).encode() for n in (2, 600))
    await _read(reader, dialect, warm)
    for memory in (seen, known, around):
        memory.clear()
    gc.collect()
    tracemalloc.start()
    await _read(reader, dialect, body)
    seen.clear()
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(known) == len(around) == 1
    assert taken < known.currsize + around.currsize < 4 * taken


def test_threads_may_share_a_memory() -> None:
    """What threads write and read at once neither breaks it nor grows it beyond its limit."""
    memory: Locked[int, int] = Locked(50)
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
