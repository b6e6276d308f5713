"""Reads a tenant's earlier conversations of one project from the store: archived items, and summaries by a model.

Results of tools are left out: instructions in a page or file that one conversation has read must not reach the next
one.
"""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

import msgspec

from proxy.core.conversation import ItemText
from proxy.core.decisions import API_FORMATS
from proxy.core.errors import InvalidRequest
from proxy.features.history.notes import CompactionNote, RequestNote, read_notes
from proxy.features.history.pages import ITEM, Entry, decode_list, parse_reference
from proxy.features.opening import EarlierItem
from proxy.store.archive_table import ArchiveTable
from proxy.store.conversation_table import ConversationTable
from proxy.store.summary_table import SummaryTable
from proxy.summaries.codec import SummaryNote
from proxy.summaries.codec import load as load_summary
from proxy.tasks import offload

MOST_SESSIONS: Final = 20
"""Conversations that are read at most, the newest first."""

AT_ONCE: Final = 16
"""Conversations whose notes are read at once, those of other projects included, which are then left out."""

MOST_BYTES: Final = 4 * 2**20
"""Bytes of originals that are read at most: ranking them takes about a second."""

NAME_BYTES: Final = 6
"""Bytes of a root hash that name a conversation to a model: eight characters."""


class _Reading:
    """The originals that one call reads: ``bytes_left`` may still be read."""

    def __init__(self, most: int) -> None:
        self.bytes_left = most

    def within(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the first *entries* whose originals may still be read; they count as read."""
        readable: list[Entry] = []
        for entry in entries:
            self.bytes_left -= entry.size
            if self.bytes_left < 0:
                break
            readable.append(entry)
        return readable


class EarlierSessions:
    """Reads one tenant's conversations at a time."""

    def __init__(self, conversations: ConversationTable, originals: ArchiveTable, summaries: SummaryTable) -> None:
        self._conversations = conversations
        self._originals = originals
        self._summaries = summaries

    async def items(self, tenant: bytes, project: str, without: bytes) -> list[EarlierItem]:
        """Return the stored items of the newest conversations of *project*, in their order, the newest last.

        The conversation with the root hash *without* is left out. Raises ``StoreUnavailable``.
        """
        sessions: list[list[EarlierItem]] = []
        reading = _Reading(MOST_BYTES)
        async for root_hash, notes in self._conversations_of(tenant, project, without):
            sessions.append(await self._session(tenant, root_hash, notes, reading))
            if len(sessions) == MOST_SESSIONS or reading.bytes_left <= 0:
                break
        # The newest session comes last, since later texts win ties.
        return [item for session in reversed(sessions) for item in session]

    async def _conversations_of(
        self, tenant: bytes, project: str, without: bytes
    ) -> AsyncIterator[tuple[bytes, Mapping[str, bytes]]]:
        """Yield the root hashes and notes of the conversations of *project*, the newest first."""
        names = [name for name, _ in await self._conversations.conversations(tenant)]
        for start in range(0, len(names), AT_ONCE):
            at_once = names[start : start + AT_ONCE]
            listed = await asyncio.gather(*(self._conversations.root_hashes(tenant, name) for name in at_once))
            root_hashes = [root_hash for threads in listed for root_hash in threads if root_hash != without]
            all_notes = await asyncio.gather(*(self._conversations.notes(tenant, name) for name in root_hashes))
            for root_hash, notes in zip(root_hashes, all_notes, strict=True):
                if is_of_project(notes, project):
                    yield root_hash, notes

    async def _session(
        self, tenant: bytes, root_hash: bytes, notes: Mapping[str, bytes], reading: _Reading
    ) -> list[EarlierItem]:
        """Return the summary of one conversation, if there is one, and its archived items in their order."""
        # An archived item is in the format of its client's API, which only the note on the request names.
        apis = {note.route: note.api for note in read_notes(notes, RequestNote)}
        items: dict[int, EarlierItem] = {}
        for note in read_notes(notes, CompactionNote):
            listed = [*await self._entries(tenant, note.anchors), *await self._entries(tenant, note.archive)]
            entries = reading.within([entry for entry in listed if entry.index + 1 not in items])
            values = await self._originals.read(tenant, root_hash, [entry.name for entry in entries])
            size = sum(entry.size for entry in entries)
            texts = await offload(size, _texts, values, apis.get(note.route, "chat"))
            for entry, text in zip(entries, texts, strict=True):
                if text is not None:
                    number = entry.index + 1
                    items[number] = EarlierItem(session_name(root_hash), note.written_at, number, text)
        summary = await self._summary(tenant, root_hash, read_notes(notes, SummaryNote))
        return [*summary, *(items[number] for number in sorted(items))]

    async def _entries(self, tenant: bytes, reference: str) -> Sequence[Entry]:
        """Return the entries of the archived list called *reference*; empty if there is none."""
        parts = parse_reference(reference)
        if parts is None:
            return ()
        root_hash, name = parts
        (value,) = await self._originals.read(tenant, root_hash, [name])
        if value is None:
            return ()
        return [entry for entry in decode_list(value) or () if entry.name]

    async def _summary(self, tenant: bytes, root_hash: bytes, notes: Sequence[SummaryNote]) -> list[EarlierItem]:
        """Return a list with the longest summary that a model wrote; empty if there is none."""
        for note in sorted(notes, key=lambda note: -note.length):
            stored = await self._summaries.newest(tenant, root_hash, note.policy, [note.prefix_hash])
            if stored is None:
                continue
            summary = load_summary(stored[1], note.length)
            if summary is not None:
                text = ItemText("assistant", summary.text)
                return [EarlierItem(session_name(root_hash), note.written_at, note.length, text, is_summary=True)]
        return []


def is_of_project(notes: Mapping[str, bytes], project: str) -> bool:
    """True if a conversation was compacted, and each time in requests of *project*."""
    projects = {note.project for note in read_notes(notes, CompactionNote)}
    return projects == {project}


def session_name(root_hash: bytes) -> str:
    """Return the name by which a model can refer to a conversation; no route of the API accepts it."""
    return urlsafe_b64encode(root_hash[:NAME_BYTES]).decode("ascii")


def _texts(values: Sequence[bytes | None], api: str) -> list[ItemText | None]:
    """Return the words of each archived item of an *api*, without results; None if none are left."""
    return [_words(value, api) for value in values]


def _words(value: bytes | None, api: str) -> ItemText | None:
    if value is None or value[:1] != ITEM:
        return None
    try:
        text = API_FORMATS[api].read_item_text(value[1:])
    except (InvalidRequest, KeyError):
        return None
    if text.role == "tool":
        # In the Messages API one item may have results and the user's own words.
        text = ItemText("user", text.user_text)
    if not text.text.strip() and not text.calls:
        return None
    return msgspec.structs.replace(text, results=(), reasoning="")
