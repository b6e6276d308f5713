"""Facts about conversations for their owners: root hashes, notes, requests to compact. A tenant reads its own only.

Writes run in the background. Reads raise ``StoreUnavailable`` if the store does not answer, because an empty answer
would be wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from proxy.store.key_names import (
    COMPACTION_REQUEST,
    CONSUMED,
    CONVERSATIONS,
    FAILED_SUMMARY,
    LEASE,
    NOTES,
    ROOTS,
    STATE,
    SUMMARY,
    key_name,
    record_name,
)
from proxy.store.operations import Add, Claim, Read, ReadFields, ScoreMember, SetField, TopMembers, sum_of
from proxy.store.tables import LIFETIME, PAUSES, TableAccess

MOST_NOTES, MOST_ROOTS, MOST_LISTED = 64, 16, 200
"""Most notes of a root hash, root hashes of a conversation, and conversations of a tenant that are stored."""

SHORT_LIFETIME: Final = 24 * 3600.0
"""Seconds for which a conversation is known that was not compacted."""

Kind = Literal["record", "summary", "lease", "failure", "request"]
"""Kinds of keys of a conversation; ``record`` is a compaction record, ``request`` an operator's one to compact."""

_LISTED: Final = b"listed"
"""Its digest for a tenant names the list of that tenant's conversations."""

_STATE_FIELD: Final = "state"
"""The one field of the hash that holds a conversation's state."""


class ConversationTable:
    """Facts about every conversation."""

    def __init__(self, access: TableAccess) -> None:
        self._access = access

    def save_conversation(
        self,
        tenant: bytes,
        conversation: str,
        root_hash: bytes,
        now: float,
        *,
        long_lived: bool,
        on_failure: Callable[[], object] | None = None,
    ) -> None:
        """Save that a request of the conversation called *conversation* began at *root_hash*; *now* is Unix time.

        *long_lived*: it was compacted, so that it is known for as long as its records. *on_failure* is called if the
        store refuses.
        """
        seconds = LIFETIME if long_lived else SHORT_LIFETIME
        roots = key_name(self._name(tenant, conversation), ROOTS)
        conversations = key_name(self._access.sealer.digest(tenant, _LISTED), CONVERSATIONS)
        for operation in (
            ScoreMember(roots, root_hash, now, MOST_ROOTS, seconds),
            ScoreMember(conversations, conversation.encode(), now, MOST_LISTED, LIFETIME),
        ):
            self._access.run_in_background(operation, "conversation", PAUSES, on_failure)

    def save_note(self, tenant: bytes, root_hash: bytes, field: str, value: bytes, *, long_lived: bool) -> None:
        """Save *value* as the note called *field*; of over ``MOST_NOTES`` the one whose name sorts first is removed."""
        name = key_name(root_hash, NOTES)
        sealed = self._access.sealer.seal(tenant, _sealed_to(name, field), value)
        seconds = LIFETIME if long_lived else SHORT_LIFETIME
        self._access.run_in_background(SetField(name, field, sealed, MOST_NOTES, seconds), "conversation", PAUSES)

    async def conversations(self, tenant: bytes) -> list[tuple[str, float]]:
        """Names of the tenant's newest conversations with the time of their last request (Unix time), newest first."""
        name = key_name(self._access.sealer.digest(tenant, _LISTED), CONVERSATIONS)
        members = await self._access.run_or_raise(TopMembers(name, MOST_LISTED), PAUSES)
        return [(member.decode("ascii", "replace"), at) for member, at in members]

    async def root_hashes(self, tenant: bytes, conversation: str) -> list[bytes]:
        """Root hashes of the conversation called *conversation*, the one used last first."""
        name = key_name(self._name(tenant, conversation), ROOTS)
        members = await self._access.run_or_raise(TopMembers(name, MOST_ROOTS), PAUSES)
        return [root_hash for root_hash, _ in members if len(root_hash) == 16]

    async def add_consumed(self, tenant: bytes, conversation: str, tokens: int) -> int:
        """Add *tokens* to those that the conversation has used; return their sum. Raises ``StoreUnavailable``."""
        name = key_name(self._name(tenant, conversation), CONSUMED)
        if tokens:
            # Not repeated: an addition whose reply was lost may have been carried out.
            await self._access.run_or_raise(Add(name, tokens, LIFETIME))
        (value,) = await self._access.run_or_raise(Read([name]))
        return sum_of(value)

    async def save_state(self, tenant: bytes, conversation: str, value: bytes) -> None:
        """Save *value* as the conversation's state. Raises ``StoreUnavailable``."""
        name = key_name(self._name(tenant, conversation), STATE)
        sealed = self._access.sealer.seal(tenant, _sealed_to(name, _STATE_FIELD), value)
        await self._access.run_or_raise(SetField(name, _STATE_FIELD, sealed, 1, LIFETIME), PAUSES)

    async def state(self, tenant: bytes, conversation: str) -> bytes | None:
        """The conversation's state; None if there is none. Raises ``StoreUnavailable``."""
        name = key_name(self._name(tenant, conversation), STATE)
        fields = await self._access.run_or_raise(ReadFields(name), PAUSES)
        return self._access.sealer.open(tenant, _sealed_to(name, _STATE_FIELD), fields.get(_STATE_FIELD.encode()))

    async def notes(self, tenant: bytes, root_hash: bytes) -> Mapping[str, bytes]:
        """The notes on *root_hash* by name, without those of other tenants and those that were tampered with."""
        name, sealer = key_name(root_hash, NOTES), self._access.sealer
        notes: dict[str, bytes] = {}
        for field_bytes, sealed in (await self._access.run_or_raise(ReadFields(name), PAUSES)).items():
            field = field_bytes.decode("ascii", "replace")
            value = sealer.open(tenant, _sealed_to(name, field), sealed)
            if value is not None:
                notes[field] = value
        return notes

    async def which_exist(self, root_hash: bytes, keys: Sequence[tuple[Kind, str | bytes, bytes]]) -> list[bool]:
        """Return for each of *keys*, in order, True if it exists. A key is a kind, a scope and a prefix hash.

        The scope of a compaction record is its route, that of the other kinds the digest of their text policy. A
        request has neither scope nor prefix hash: a conversation has one at most.
        """
        if not keys:
            return []
        names = [_key_name(root_hash, kind, scope, prefix_hash) for kind, scope, prefix_hash in keys]
        return [value is not None for value in await self._access.run_or_raise(Read(names), PAUSES)]

    async def request_compaction(self, tenant: bytes, root_hash: bytes, seconds: float, extent: str = "now") -> None:
        """Request that the conversation's next request is compacted, if it comes within *seconds*.

        *extent* is ``now``, or the share of its room that it is compacted to.
        """
        self._access.requested_until = max(self._access.requested_until, time.monotonic() + seconds)
        name = key_name(root_hash, COMPACTION_REQUEST)
        sealed = self._access.sealer.seal(tenant, name, extent.encode())
        await self._access.run_or_raise(Claim(name, sealed, seconds), PAUSES)

    def _name(self, tenant: bytes, conversation: str) -> bytes:
        message = b"conversation\0" + conversation.encode("utf-8", "surrogatepass")
        return self._access.sealer.digest(tenant, message)


def _sealed_to(name: str, field: str) -> str:
    """Return the name that a note is bound to by its encryption, so that no other note's value opens in its place."""
    return f"{name}#{field}"


def _key_name(root_hash: bytes, kind: Kind, scope: str | bytes, prefix_hash: bytes) -> str:
    if isinstance(scope, str):  # the route of a record: all other scopes are digests
        return record_name(root_hash, scope, prefix_hash)
    if kind == "request":
        return key_name(root_hash, COMPACTION_REQUEST)
    kinds = {"summary": SUMMARY, "lease": LEASE, "failure": FAILED_SUMMARY}
    return key_name(root_hash, kinds[kind], scope, prefix_hash)
