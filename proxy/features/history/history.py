"""What is told of conversations to whoever owns them: the same from every worker and replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from proxy.core.errors import Conflict
from proxy.features.history.notes import CompactionNote, RequestNote, load, show_compaction, show_request, show_summary
from proxy.features.history.pages import ITEM, ITEMS, MOST_ITEMS, Page, read_reference, show_item, show_list
from proxy.features.history.pages import load as load_list
from proxy.store.archive_table import ArchiveTable
from proxy.store.conversation_table import ConversationTable, Kind
from proxy.summaries.codec import SummaryNote

REQUEST_SECONDS = 3600.0
"""Seconds for which a wish for a compaction waits for the conversation's next request."""


class History:
    """Answers for the conversations of one tenant at a time; *now* gives Unix time.

    *compacts* says whether anything is compacted here at all, *summaries* who writes summaries: ``background``,
    ``inline`` or ``off``.
    """

    def __init__(
        self,
        register: ConversationTable,
        originals: ArchiveTable,
        now: Callable[[], float],
        *,
        compacts: bool,
        summaries: str,
    ) -> None:
        self._register = register
        self._originals = originals
        self._now = now
        self._compacts = compacts
        self._summaries = summaries

    async def list(self, tenant: bytes) -> Mapping[str, object]:
        """The tenant's newest conversations. Raises ``StoreUnavailable``."""
        now = self._now()
        found = await self._register.conversations(tenant)
        shown = [{"conversation": name, "age_seconds": max(0, int(now - at))} for name, at in found]
        return {"conversations": shown}

    async def show(self, tenant: bytes, conversation: str) -> Mapping[str, object] | None:
        """What became of one conversation; ``None`` where the tenant has none of that name.

        Raises ``StoreUnavailable``.
        """
        roots = await self._register.root_hashes(tenant, conversation)
        threads = await asyncio.gather(*(self._thread(tenant, root) for root in roots))
        known = [thread for thread in threads if thread is not None]
        return {"conversation": conversation, "threads": known} if known else None

    async def compact(
        self, tenant: bytes, conversation: str, share: float | None = None
    ) -> Mapping[str, object] | None:
        """Have the conversation's next request compact it; ``None`` where the tenant has none of that name.

        It goes down to *share* of the room, or to half of the low mark if that is None.
        Raises ``Conflict`` where nothing is compacted here, and ``StoreUnavailable``.
        """
        if not self._compacts:
            raise Conflict("Nothing is compacted here: compression.mode is not on.")
        roots = await self._register.root_hashes(tenant, conversation)
        found = await asyncio.gather(*(self._register.notes(tenant, root) for root in roots))
        known = [root for root, notes in zip(roots, found, strict=True) if notes]
        if not known:
            return None
        extent = "now" if share is None else f"{share:g}"
        await asyncio.gather(
            *(self._register.request_compaction(tenant, root, REQUEST_SECONDS, extent) for root in known)
        )
        goal = "" if share is None else f" to {share:g} of its room"
        writes = "by rule alone, since summaries.mode is off" if self._summaries == "off" else "with a model's summary"
        return {
            "conversation": conversation,
            "status": "accepted",
            "threads": len(known),
            "expires_in_seconds": int(REQUEST_SECONDS),
            "message": f"The next request of this conversation is compacted{goal}, {writes}.",
        }

    async def original(self, tenant: bytes, ref: str, page: Page) -> Mapping[str, object] | None:
        """One page of what was archived as *ref*, a list or an item; ``None`` where the tenant has no such thing.

        Raises ``StoreUnavailable``.
        """
        parts = read_reference(ref)
        if parts is None:
            return None
        root, name = parts
        (value,) = await self._originals.read(tenant, root, [name])
        if value is None:
            return None
        if value[:1] == ITEM:
            return show_item(ref, value, page)
        entries = load_list(value)
        if entries is None:
            return None
        start, stop, _ = page.span(len(entries), ITEMS, MOST_ITEMS)
        shown = entries[start:stop]
        found = iter(await self._originals.read(tenant, root, [each.name for each in shown if each.name]))
        values = [next(found) if each.name else None for each in shown]
        return show_list(ref, root, entries, values, page)

    async def _thread(self, tenant: bytes, root: bytes) -> dict[str, object] | None:
        notes = await self._register.notes(tenant, root)
        last, events, jobs = (
            load(notes, RequestNote, "z"),
            load(notes, CompactionNote, "e"),
            load(notes, SummaryNote, "j"),
        )
        if not last and not events and not jobs:
            return None
        wanted: list[tuple[Kind, str | bytes, bytes]] = [("request", b"", b"")]
        wanted += [("record", note.route, note.chain) for note in events]
        for note in jobs:
            wanted += [("summary", note.policy, note.prefix_hash)]
            wanted += [("lease", note.policy, note.last_compaction), ("failure", note.policy, note.last_compaction)]
        there = await self._register.which_exist(root, wanted)
        return self._shown(last, events, jobs, there)

    def _shown(
        self,
        last: Sequence[RequestNote],
        events: Sequence[CompactionNote],
        jobs: Sequence[SummaryNote],
        there: Sequence[bool],
    ) -> dict[str, object]:
        now, first = self._now(), 1 + len(events)
        folds = [
            show_compaction(note, last, now, there=held) for note, held in zip(events, there[1:first], strict=True)
        ]
        states = [there[at : at + 3] for at in range(first, len(there), 3)]
        summaries = [
            show_summary(note, events, now, text=text, lease=lease, refused=refused)
            for note, (text, lease, refused) in zip(jobs, states, strict=True)
        ]
        return {
            "last": [show_request(note, now) for note in last],
            "compaction_wished": there[0],
            "folds": folds,
            "summaries": summaries,
        }
