"""What is told of conversations to whoever owns them."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy.core.errors import Conflict
from proxy.features.history.history import REQUEST_SECONDS, History
from proxy.features.history.notes import CompactionNote, RequestNote, dump, name_of
from proxy.features.history.pages import ITEM, Entry, Page, reference
from proxy.features.history.pages import dump as dump_list
from proxy.store.archive_table import ArchiveTable
from proxy.store.conversation_table import ConversationTable
from proxy.summaries.codec import NOTE_VERSION as VERSION
from proxy.summaries.codec import SummaryNote
from tests.support.server_fixture import a_register

TENANT, OTHER, NAME = b"t" * 32, b"o" * 32, "abcdefgh-_123456"
CHAIN = b"c" * 16


def told_of(register: ConversationTable, *, compacts: bool = True, summaries: str = "background") -> History:
    originals = ArchiveTable(register._access)
    return History(register, originals, lambda: 1_000_100.0, compacts=compacts, summaries=summaries)


async def fill(register: ConversationTable, *roots: bytes) -> None:
    """A conversation with an event, a summary and a last request at each of *roots*."""
    for at, root in enumerate(roots):
        register.save_conversation(TENANT, NAME, root, 1_000_000.0 + at, long_lived=True)
        for note in (
            RequestNote(
                VERSION, 1_000_000, "up,m", "chat", 30, 8192, 7000, 9000, 3500, "compacted", (), 20, CHAIN, 0, 0
            ),
            CompactionNote(VERSION, 1_000_000, "up,m", CHAIN, 20, 0, 10, 900, 90, "", 0, ("fold",), 0, 8192, 1024, 300),
            SummaryNote(
                VERSION,
                1_000_000,
                "up,m",
                b"p" * 8,
                CHAIN,
                CHAIN,
                8,
                "failed",
                "m",
                "up",
                "empty",
                1,
                1,
                1_000_160,
            ),
        ):
            register.save_note(TENANT, root, name_of(note), dump(note), long_lived=True)
    await asyncio.sleep(0.01)


async def test_each_thread_of_a_conversation_is_told() -> None:
    """A name with two beginnings has two threads, the newest first, each with folds, summaries and its last request."""
    register = a_register()
    await fill(register, b"r" * 16, b"s" * 16)
    shown = await told_of(register).show(TENANT, NAME)
    assert shown is not None
    threads = shown["threads"]
    assert isinstance(threads, list)
    assert len(threads) == 2
    assert threads[0]["folds"][0]["state"] == "lost", "its record is not in the store"
    assert threads[0]["summaries"][0]["state"] == "failed"
    assert threads[0]["last"][0]["pressure"] == 0.5
    assert (await told_of(register).list(TENANT))["conversations"] == [{"conversation": NAME, "age_seconds": 99}]


async def test_nothing_is_told_of_what_is_not_ones_own() -> None:
    """Another tenant, another name: nothing, whatever is asked."""
    register = a_register()
    await fill(register, b"r" * 16)
    told = told_of(register)
    assert await told.show(OTHER, NAME) is None
    assert await told.compact(OTHER, NAME) is None
    assert await told.show(TENANT, NAME[::-1]) is None
    assert await told.compact(TENANT, NAME[::-1]) is None
    assert await told.list(OTHER) == {"conversations": []}


@pytest.mark.parametrize(("summaries", "word"), [("background", "model"), ("inline", "model"), ("off", "rule alone")])
async def test_a_wish_says_what_will_happen(summaries: str, word: str) -> None:
    """Every thread is to be compacted at its next request, within the time that is told."""
    register = a_register()
    await fill(register, b"r" * 16, b"s" * 16)
    got = await told_of(register, summaries=summaries).compact(TENANT, NAME)
    assert got is not None
    assert (got["threads"], got["expires_in_seconds"]) == (2, REQUEST_SECONDS)
    assert word in str(got["message"])
    for root in (b"r" * 16, b"s" * 16):
        assert await register.which_exist(root, [("request", b"", b"")]) == [True]


async def test_where_nothing_is_compacted_a_wish_is_refused() -> None:
    """With compression off or observing only, saying yes would be a lie."""
    register = a_register()
    await fill(register, b"r" * 16)
    with pytest.raises(Conflict, match=r"compression\.mode"):
        await told_of(register, compacts=False).compact(TENANT, NAME)


async def test_originals_are_told_a_page_at_a_time() -> None:
    """A list shows how its items begin, an item its text; another tenant is told of neither."""
    register = a_register()
    originals = ArchiveTable(register._access)
    told, root = told_of(register), b"r" * 16
    entries = []
    for index in range(5):
        content = b'{"role":"tool","content":"%d"}' % index
        name = originals.name(TENANT, content)
        await originals.save(TENANT, root, name, ITEM + content, 60)
        entries.append(Entry(index, "tool", name, len(content)))
    await originals.save(TENANT, root, b"n" * 16, dump_list([*entries, Entry(9, "tool", b"", 10**6)]), 60)
    first = await told.original(TENANT, reference(root, b"n" * 16), Page())
    assert first is not None
    assert (first["total"], first["next_offset"]) == (6, 3)
    items = first["items"]
    assert isinstance(items, list)
    assert [json.loads(each["content"])["content"] for each in items] == ["0", "1", "2"]
    item = await told.original(TENANT, items[1]["ref"], Page(0, 7))
    assert item is not None
    assert (item["content"], item["next_offset"]) == ('{"role"', 7)
    last = await told.original(TENANT, reference(root, b"n" * 16), Page(4))
    assert last is not None
    assert [each["state"] for each in last["items"]] == ["kept", "too_big"]  # type: ignore[union-attr]
    for tenant, ref in (
        (OTHER, items[1]["ref"]),
        (OTHER, reference(root, b"n" * 16)),
        (TENANT, "x"),
        (TENANT, "A" * 43),
    ):
        assert await told.original(tenant, ref, Page()) is None
