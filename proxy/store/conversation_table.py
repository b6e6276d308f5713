"""Facts about conversations for their owners: root hashes, notes, requests to compact; each tenant its own.

Writing happens in the background and is not waited for. Reading raises ``StoreUnavailable`` if the store does not
answer: an empty answer would be a lie.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from proxy.core.errors import StoreUnavailable
from proxy.store import key_names
from proxy.store.backend import Unavailable
from proxy.store.tables import LIFETIME, TableAccess

NOTES, ROOTS, LISTED = 64, 16, 200
"""Most notes of a root hash, root hashes of a conversation, and conversations of a tenant that are stored."""

SHORT_LIFETIME: Final = 24 * 3600.0
"""Seconds that a conversation is known which was not compacted."""

Kind = Literal["event", "summary", "lease", "refused", "mark"]
"""Kinds of keys for a prefix of a conversation; ``event`` is a compaction record, ``mark`` a request to compact."""

T = TypeVar("T")


class ConversationTable:
    """Facts about every conversation."""

    def __init__(self, access: TableAccess) -> None:
        self._access = access
        self._backend = access.backend

    def save_conversation(
        self, tenant: bytes, conversation: str, root_hash: bytes, now: float, *, long_lived: bool
    ) -> None:
        """Save that a request of the conversation called *conversation* began at *root_hash*; *now* is Unix time.

        *long_lived*: it was compacted, so that it is known for as long as its records.
        """
        seconds = LIFETIME if long_lived else SHORT_LIFETIME
        roots = key_names.known(self._name(tenant, conversation))
        listed = key_names.listed(self._list_name(tenant))
        self._write(lambda: self._backend.score_member(roots, root_hash, now, ROOTS, seconds))
        self._write(lambda: self._backend.score_member(listed, conversation.encode(), now, LISTED, LIFETIME))

    def save_note(self, tenant: bytes, root_hash: bytes, field: str, value: bytes, *, long_lived: bool) -> None:
        """Save *value* as the note called *field*; of more than ``NOTES`` the one whose name sorts first is removed."""
        name = key_names.notes(root_hash)
        sealed = self._access.sealer.seal(tenant, _sealed_to(name, field), value)
        seconds = LIFETIME if long_lived else SHORT_LIFETIME
        self._write(lambda: self._backend.set_field(name, field, sealed, NOTES, seconds))

    async def conversations(self, tenant: bytes) -> list[tuple[str, float]]:
        """Names of the tenant's newest conversations with the time of their last request (Unix time), newest first."""
        name = key_names.listed(self._list_name(tenant))
        members = await self._read(lambda: self._backend.top_members(name, LISTED))
        return [(member.decode("ascii", "replace"), at) for member, at in members]

    async def root_hashes(self, tenant: bytes, conversation: str) -> list[bytes]:
        """Root hashes of the conversation called *conversation*, the one used last first."""
        name = key_names.known(self._name(tenant, conversation))
        members = await self._read(lambda: self._backend.top_members(name, ROOTS))
        return [root_hash for root_hash, _ in members if len(root_hash) == 16]

    async def notes(self, tenant: bytes, root_hash: bytes) -> Mapping[str, bytes]:
        """The notes on *root_hash* by name, without those of other tenants and those that were tampered with."""
        name, sealer = key_names.notes(root_hash), self._access.sealer
        notes: dict[str, bytes] = {}
        for raw, sealed in (await self._read(lambda: self._backend.read_fields(name))).items():
            field = raw.decode("ascii", "replace")
            value = sealer.open(tenant, _sealed_to(name, field), sealed)
            if value is not None:
                notes[field] = value
        return notes

    async def which_exist(self, root_hash: bytes, wanted: Sequence[tuple[Kind, str | bytes, bytes]]) -> list[bool]:
        """For each of *wanted*, True if it exists.

        A compaction record is named by its route and prefix hash, a mark by nothing more, the others by text policy and
        prefix hash.
        """
        if not wanted:
            return []
        names = [_key_name(root_hash, kind, scope, prefix_hash) for kind, scope, prefix_hash in wanted]
        return [value is not None for value in await self._read(lambda: self._backend.read(names))]

    async def request_compaction(self, tenant: bytes, root_hash: bytes, seconds: float, extent: str = "now") -> None:
        """Have the conversation's next request compacted, if it comes within *seconds*.

        *extent* is ``now``, or the share of its room that it is compacted to.
        """
        name = key_names.mark(root_hash)
        sealed = self._access.sealer.seal(tenant, name, extent.encode())
        await self._read(lambda: self._backend.claim(name, sealed, seconds))

    def _write(self, operation: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._access.run_in_background(self._access.run_with_retries(operation), "conversation")

    async def _read(self, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._access.run_with_retries(operation)
        except Unavailable as error:
            self._access.count_failure(error)
            raise StoreUnavailable from error

    def _name(self, tenant: bytes, conversation: str) -> bytes:
        message = b"conversation\0" + conversation.encode("utf-8", "surrogatepass")
        return hmac.digest(self._access.sealer.prefix_key(tenant), message, "sha256")[:16]

    def _list_name(self, tenant: bytes) -> bytes:
        return hmac.digest(self._access.sealer.prefix_key(tenant), b"listed", "sha256")[:16]


def _sealed_to(name: str, field: str) -> str:
    """The name a note is sealed to, so that no value of another conversation or note passes for it."""
    return f"{name}#{field}"


def _key_name(root_hash: bytes, kind: Kind, scope: str | bytes, prefix_hash: bytes) -> str:
    if isinstance(scope, str):
        return key_names.event(root_hash, scope, prefix_hash)
    if kind == "mark":
        return key_names.mark(root_hash)
    names = {"summary": key_names.summary, "lease": key_names.lease, "refused": key_names.refused}
    return names[kind](root_hash, scope, prefix_hash)
