"""Callers read their own conversations, and no others."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy.core.errors import Conflict
from proxy.features.history.history import REQUEST_SECONDS, History
from proxy.features.history.notes import CompactionNote, RequestNote, encode_note, note_name
from proxy.features.history.pages import ITEM, Entry, Page, encode_list, reference
from proxy.store.archive_table import ArchiveTable
from proxy.store.conversation_table import ConversationTable
from proxy.summaries.codec import NOTE_VERSION as VERSION
from proxy.summaries.codec import SummaryNote
from tests.support.server_fixture import a_register

TENANT, OTHER, NAME = b"t" * 32, b"o" * 32, "abcdefgh-_123456"
PREFIX_HASH = b"c" * 16


def history_of(conversations: ConversationTable, *, compacts: bool = True, summaries: str = "background") -> History:
    originals = ArchiveTable(conversations._access)
    return History(conversations, originals, lambda: 1_000_100.0, compacts=compacts, summaries=summaries, budgets=False)


async def fill(conversations: ConversationTable, *root_hashes: bytes) -> None:
    """A conversation with an event, a summary and a last request at each of *root_hashes*."""
    for at, root_hash in enumerate(root_hashes):
        conversations.save_conversation(TENANT, NAME, root_hash, 1_000_000.0 + at, long_lived=True)
        for note in (
            RequestNote(
                VERSION, 1_000_000, "up,m", "chat", 30, 8192, 7000, 9000, 3500, "compacted", (), 20, PREFIX_HASH, 0, 0
            ),
            CompactionNote(
                VERSION, 1_000_000, "up,m", PREFIX_HASH, 20, 0, 10, 900, 90, "", 0, ("fold",), 0, 8192, 1024, 300
            ),
            SummaryNote(
                VERSION,
                1_000_000,
                "up,m",
                b"p" * 8,
                PREFIX_HASH,
                PREFIX_HASH,
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
            conversations.save_note(TENANT, root_hash, note_name(note), encode_note(note), long_lived=True)
    await asyncio.sleep(0.01)


async def test_each_thread_of_a_conversation_is_shown() -> None:
    """A name with two beginnings has two threads, the newest first, each with folds, summaries and its last request."""
    conversations = a_register()
    await fill(conversations, b"r" * 16, b"s" * 16)
    shown = await history_of(conversations).conversation(TENANT, NAME)
    assert shown is not None
    threads = shown["threads"]
    assert isinstance(threads, list)
    assert len(threads) == 2
    assert threads[0]["folds"][0]["state"] == "lost", "its record is not in the store"
    assert threads[0]["summaries"][0]["state"] == "failed"
    assert threads[0]["last"][0]["pressure"] == 0.5
    assert (await history_of(conversations).conversations(TENANT))["conversations"] == [
        {"conversation": NAME, "age_seconds": 99}
    ]


async def test_other_conversations_are_not_shown() -> None:
    """Another tenant and another name get nothing from any route."""
    conversations = a_register()
    await fill(conversations, b"r" * 16)
    history = history_of(conversations)
    assert await history.conversation(OTHER, NAME) is None
    assert await history.request_compaction(OTHER, NAME, share=None) is None
    assert await history.conversation(TENANT, NAME[::-1]) is None
    assert await history.request_compaction(TENANT, NAME[::-1], share=None) is None
    assert await history.conversations(OTHER) == {"conversations": []}


@pytest.mark.parametrize(("summaries", "word"), [("background", "model"), ("inline", "model"), ("off", "rule alone")])
async def test_a_requested_compaction_is_announced(summaries: str, word: str) -> None:
    """Every thread is to be compacted at its next request, within the time that the answer names."""
    conversations = a_register()
    await fill(conversations, b"r" * 16, b"s" * 16)
    got = await history_of(conversations, summaries=summaries).request_compaction(TENANT, NAME, share=None)
    assert got is not None
    assert (got["threads"], got["expires_in_seconds"]) == (2, REQUEST_SECONDS)
    assert word in str(got["message"])
    for root_hash in (b"r" * 16, b"s" * 16):
        assert await conversations.which_exist(root_hash, [("request", b"", b"")]) == [True]


async def test_a_compaction_is_refused_if_none_is_made_here() -> None:
    """With compression off or observing only, saying yes would be a lie."""
    conversations = a_register()
    await fill(conversations, b"r" * 16)
    with pytest.raises(Conflict, match=r"compression\.mode"):
        await history_of(conversations, compacts=False).request_compaction(TENANT, NAME, share=None)


async def test_originals_are_shown_a_page_at_a_time() -> None:
    """A list shows how its items begin, an item its text; another tenant sees neither."""
    conversations = a_register()
    originals = ArchiveTable(conversations._access)
    history, root_hash = history_of(conversations), b"r" * 16
    entries = []
    for index in range(5):
        content = b'{"role":"tool","content":"%d"}' % index
        name = originals.name(TENANT, content)
        await originals.save(TENANT, root_hash, name, ITEM + content, 60)
        entries.append(Entry(index, "tool", name, len(content)))
    await originals.save(TENANT, root_hash, b"n" * 16, encode_list([*entries, Entry(9, "tool", b"", 10**6)]), 60)
    first = await history.archived(TENANT, reference(root_hash, b"n" * 16), Page())
    assert first is not None
    assert (first["total"], first["next_offset"]) == (6, 3)
    items = first["items"]
    assert isinstance(items, list)
    assert [json.loads(each["content"])["content"] for each in items] == ["0", "1", "2"]
    item = await history.archived(TENANT, items[1]["ref"], Page(0, 7))
    assert item is not None
    assert (item["content"], item["next_offset"]) == ('{"role"', 7)
    last = await history.archived(TENANT, reference(root_hash, b"n" * 16), Page(4))
    assert last is not None
    assert [each["state"] for each in last["items"]] == ["kept", "too_big"]  # type: ignore[union-attr]
    for tenant, ref in (
        (OTHER, items[1]["ref"]),
        (OTHER, reference(root_hash, b"n" * 16)),
        (TENANT, "x"),
        (TENANT, "A" * 43),
    ):
        assert await history.archived(tenant, ref, Page()) is None
