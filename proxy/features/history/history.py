"""Reads a tenant's own conversations from the store, so that every worker and replica gives the same answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from proxy.core.errors import Conflict
from proxy.features.history.note_json import compaction_json, request_json, summary_json
from proxy.features.history.notes import CompactionNote, RequestNote, read_notes
from proxy.features.history.pages import (
    ITEM,
    Page,
    decode_list,
    entries_on,
    item_page,
    list_page,
    parse_reference,
)
from proxy.features.history.states import NOTHING, Budget, State, decode, encode, export, history_tail, read_import
from proxy.store.archive_table import ArchiveTable
from proxy.store.conversation_table import ConversationTable, Kind
from proxy.summaries.codec import SummaryNote

REQUEST_SECONDS: Final = 3600.0
"""Seconds for which a requested compaction waits for the conversation's next request."""

_Key = tuple[Kind, str | bytes, bytes]
"""A value that the store may have of a conversation: its kind, its route or text policy, and its prefix hash."""

_REQUESTED_COMPACTION: Final[_Key] = ("request", b"", b"")


class History:
    """Reads the conversations of one tenant at a time; *now* returns Unix time.

    *compacts* is True if the mode of compression is ``on``. *summaries* is the mode in which summaries are written:
    ``background``, ``inline`` or ``off``. *budgets* is True if the tokens that conversations use are counted.
    """

    def __init__(
        self,
        conversations: ConversationTable,
        originals: ArchiveTable,
        now: Callable[[], float],
        *,
        compacts: bool,
        summaries: str,
        budgets: bool,
    ) -> None:
        self._conversations = conversations
        self._originals = originals
        self._now = now
        self._compacts = compacts
        self._summaries = summaries
        self._budgets = budgets

    async def conversations(self, tenant: bytes) -> Mapping[str, object]:
        """Return the tenant's newest conversations. Raises ``StoreUnavailable``."""
        now = self._now()
        return {
            "conversations": [
                {"conversation": name, "age_seconds": max(0, int(now - requested_at))}
                for name, requested_at in await self._conversations.conversations(tenant)
            ]
        }

    async def conversation(self, tenant: bytes, name: str) -> Mapping[str, object] | None:
        """Return the last requests, compactions and summaries of one conversation; None if the tenant has no such one.

        Raises ``StoreUnavailable``.
        """
        notes = await self._notes(tenant, name)
        threads = await asyncio.gather(*map(self._thread, notes, notes.values()))
        readable = [thread for thread in threads if thread is not None]
        if not readable:
            return None
        tail = history_tail(_compactions(notes))
        answer: dict[str, object] = {"conversation": name, "threads": readable, "history_tail": tail}
        if self._budgets:
            answer["budget"] = (await self._state(tenant, name)).budget.as_json()
        return answer

    async def exported(self, tenant: bytes, name: str) -> Mapping[str, object] | None:
        """Return the state of the conversation called *name*; None if nothing is known of it.

        Raises ``StoreUnavailable``.
        """
        notes, state = await self._notes(tenant, name), await self._state(tenant, name)
        if not notes and state == NOTHING:
            return None
        return export(name, state.budget, _compactions(notes), state.others)

    async def imported(self, tenant: bytes, name: str, body: bytes) -> Mapping[str, object]:
        """Save the state in *body*, and return the one that is valid from now on. Raises ``StoreUnavailable``.

        A damaged state changes nothing: the answer is the stored state, or a new one, and says so.
        """
        stored, imported = await self._state(tenant, name), read_import(body)
        compactions = _compactions(await self._notes(tenant, name))
        if imported is None:
            repaired = "What was sent could not be read. This is the stored state."
            if stored == NOTHING:
                repaired = "What was sent could not be read, and none was stored. The state begins anew."
            return {**export(name, stored.budget, compactions, stored.others), "repaired": repaired}
        await self._conversations.save_state(tenant, name, encode(imported))
        # The difference, since requests of any replica may add to the counter meanwhile.
        added = imported.budget.consumed - stored.budget.consumed
        consumed = await self._conversations.add_consumed(tenant, name, added)
        return export(name, Budget(imported.budget.total, consumed), compactions, imported.others)

    async def _state(self, tenant: bytes, name: str) -> State:
        """Return the conversation's stored state, with the tokens that it has used by now."""
        state = decode(await self._conversations.state(tenant, name)) or NOTHING
        consumed = await self._conversations.add_consumed(tenant, name, 0)
        return State(Budget(state.budget.total, max(0, consumed)), state.others)

    async def _notes(self, tenant: bytes, name: str) -> dict[bytes, Mapping[str, bytes]]:
        """Return the notes on the conversation called *name*, by the root hashes of its threads that have any."""
        root_hashes = await self._conversations.root_hashes(tenant, name)
        notes = await asyncio.gather(*(self._conversations.notes(tenant, root_hash) for root_hash in root_hashes))
        return {root_hash: by_name for root_hash, by_name in zip(root_hashes, notes, strict=True) if by_name}

    async def request_compaction(
        self, tenant: bytes, conversation: str, share: float | None
    ) -> Mapping[str, object] | None:
        """Request that the conversation's next request compacts it; return None if the tenant has no such conversation.

        The compaction goes down to *share* of the room, or to half of the low mark if that is None. Raises ``Conflict``
        if compression is off, and ``StoreUnavailable``.
        """
        if not self._compacts:
            raise Conflict("Nothing is compacted here: compression.mode is not on.")
        threads = await self._notes(tenant, conversation)
        if not threads:
            return None
        extent, goal = "now", ""
        if share is not None:
            extent, goal = f"{share:g}", f" to {share:g} of its room"
        await asyncio.gather(
            *(
                self._conversations.request_compaction(tenant, root_hash, REQUEST_SECONDS, extent)
                for root_hash in threads
            )
        )
        writer = "with a model's summary"
        if self._summaries == "off":
            writer = "by rule alone, since summaries.mode is off"
        return {
            "conversation": conversation,
            "status": "accepted",
            "threads": len(threads),
            "expires_in_seconds": int(REQUEST_SECONDS),
            "message": f"The next request of this conversation is compacted{goal}, {writer}.",
        }

    async def archived(self, tenant: bytes, ref: str, page: Page) -> Mapping[str, object] | None:
        """Return one page of the list or item that was archived as *ref*; None if the tenant has nothing of that name.

        Raises ``StoreUnavailable``.
        """
        parts = parse_reference(ref)
        if parts is None:
            return None
        root_hash, name = parts
        (value,) = await self._originals.read(tenant, root_hash, [name])
        if value is None:
            return None
        if value[:1] == ITEM:
            return item_page(ref, value, page)
        entries = decode_list(value)
        if entries is None:
            return None
        names = [entry.name for entry in entries_on(page, entries)]
        archived = [name for name in names if name]
        values = dict(zip(archived, await self._originals.read(tenant, root_hash, archived), strict=True))
        return list_page(ref, root_hash, entries, [values.get(name) for name in names], page)

    async def _thread(self, root_hash: bytes, notes: Mapping[str, bytes]) -> dict[str, object] | None:
        """Return the conversation that begins with *root_hash* as callers see it; None if no note is readable."""
        requests = read_notes(notes, RequestNote)
        compactions = read_notes(notes, CompactionNote)
        summaries = read_notes(notes, SummaryNote)
        if not requests and not compactions and not summaries:
            return None
        keys = [_REQUESTED_COMPACTION, *map(_record_key, compactions)]
        for summary in summaries:
            keys += _summary_keys(summary)
        present = await self._conversations.which_exist(root_hash, keys)
        stored = {key for key, is_present in zip(keys, present, strict=True) if is_present}
        now = self._now()
        return {
            "last": [request_json(note, now) for note in requests],
            "compaction_wished": _REQUESTED_COMPACTION in stored,
            "folds": [
                compaction_json(note, requests, now, is_stored=_record_key(note) in stored) for note in compactions
            ],
            "summaries": [_summary_json(note, compactions, now, stored) for note in summaries],
        }


def _compactions(notes: Mapping[bytes, Mapping[str, bytes]]) -> list[CompactionNote]:
    """Return the notes on compactions among the *notes* of all threads."""
    return [note for by_name in notes.values() for note in read_notes(by_name, CompactionNote)]


def _record_key(note: CompactionNote) -> _Key:
    return ("record", note.route, note.prefix_hash)


def _summary_keys(note: SummaryNote) -> tuple[_Key, _Key, _Key]:
    """Return the keys of a summary's text, of its writer's lease, and of the mark of its failure."""
    return (
        ("summary", note.policy, note.prefix_hash),
        ("lease", note.policy, note.last_compaction),
        ("failure", note.policy, note.last_compaction),
    )


def _summary_json(
    note: SummaryNote, compactions: Sequence[CompactionNote], now: float, stored: Collection[_Key]
) -> dict[str, object]:
    text, lease, failure = _summary_keys(note)
    return summary_json(
        note, compactions, now, has_text=text in stored, has_lease=lease in stored, has_failure=failure in stored
    )
