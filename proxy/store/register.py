"""What is told of conversations: which roots they have, notes on what became of them, wishes; each tenant its own.

What is written here goes in the background and is never waited for. What people ask for raises ``StoreUnavailable``
where the store cannot say: that there is nothing would be a lie.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

from proxy.core.errors import StoreUnavailable
from proxy.store import keys
from proxy.store.backend import Backend
from proxy.store.errors import Unavailable
from proxy.store.records import LIFETIME, Records

NOTES, ROOTS, LISTED = 64, 16, 200
"""Notes of a conversation's root, roots of a conversation, and conversations of a tenant that are kept at most."""

SHORT = 24 * 3600.0
"""Seconds for which a conversation is known that was not compacted."""

T = TypeVar("T")
Kind = Literal["event", "summary", "lease", "refused", "mark"]
"""What the store may have of a boundary."""


class Register:
    """Notes on conversations, over *records* and their *backend*."""

    def __init__(self, backend: Backend, records: Records) -> None:
        self._backend = backend
        self._records = records

    def seen(self, tenant: bytes, conversation: str, root: bytes, now: float, *, lasting: bool) -> None:
        """Note that a request of the conversation called *conversation* began at *root*; *now* is Unix time.

        *lasting*: it has been compacted, so that it stays known as long as its records.
        """
        seconds, rank = LIFETIME if lasting else SHORT, self._backend.rank
        known, listed = keys.known(self._name(tenant, conversation)), keys.listed(self._listed(tenant))
        self._later(lambda: rank(known, root, now, ROOTS, seconds))
        self._later(lambda: rank(listed, conversation.encode(), now, LISTED, LIFETIME))

    def note(self, tenant: bytes, root: bytes, field: str, value: bytes, *, lasting: bool) -> None:
        """Keep *value* as the note called *field*; of too many the one whose name sorts first goes."""
        name = keys.notes(root)
        sealed = self._records.sealer.seal(tenant, _bound(name, field), value)
        seconds = LIFETIME if lasting else SHORT
        self._later(lambda: self._backend.note(name, field, sealed, NOTES, seconds))

    async def conversations(self, tenant: bytes) -> list[tuple[str, float]]:
        """The names of the tenant's newest conversations and when each was last heard of (Unix time), newest first."""
        found = await self._ask(lambda: self._backend.ranked(keys.listed(self._listed(tenant)), LISTED))
        return [(name.decode("ascii", "replace"), at) for name, at in found]

    async def roots(self, tenant: bytes, conversation: str) -> list[bytes]:
        """The roots of the conversation called *conversation*, the one heard of last first."""
        name = keys.known(self._name(tenant, conversation))
        found = await self._ask(lambda: self._backend.ranked(name, ROOTS))
        return [root for root, _ in found if len(root) == 16]

    async def notes(self, tenant: bytes, root: bytes) -> Mapping[str, bytes]:
        """The notes on *root* by their names; what another tenant wrote, or somebody changed, is not among them."""
        name, sealer = keys.notes(root), self._records.sealer
        found: dict[str, bytes] = {}
        for raw, sealed in (await self._ask(lambda: self._backend.table(name))).items():
            field = raw.decode("ascii", "replace")
            value = sealer.open(tenant, _bound(name, field), sealed)
            if value is not None:
                found[field] = value
        return found

    async def there(self, root: bytes, wanted: Sequence[tuple[Kind, str | bytes, bytes]]) -> list[bool]:
        """Which of *wanted* are there: an event by route and place, a mark, the others by text policy and place."""
        if not wanted:
            return []
        names = [_named(root, kind, scope, place) for kind, scope, place in wanted]
        return [value is not None for value in await self._ask(lambda: self._backend.read(names))]

    async def mark(self, tenant: bytes, root: bytes, seconds: float, extent: str = "now") -> None:
        """Have *root* compacted at its next request, if that comes within *seconds*; *extent*: ``now``, or a share."""
        name = keys.mark(root)
        sealed = self._records.sealer.seal(tenant, name, extent.encode())
        await self._ask(lambda: self._backend.claim(name, sealed, seconds))

    def _later(self, write: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._records.behind(self._records.patiently(write), "conversation")

    async def _ask(self, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._records.patiently(read)
        except Unavailable as error:
            self._records.failed(error)
            raise StoreUnavailable from error

    def _name(self, tenant: bytes, conversation: str) -> bytes:
        said = b"conversation\0" + conversation.encode("utf-8", "surrogatepass")
        return hmac.digest(self._records.prefix_key(tenant), said, "sha256")[:16]

    def _listed(self, tenant: bytes) -> bytes:
        return hmac.digest(self._records.prefix_key(tenant), b"listed", "sha256")[:16]


def _bound(name: str, field: str) -> str:
    """What a note is sealed to: neither another conversation's nor another note's value is taken for it."""
    return f"{name}#{field}"


def _named(root: bytes, kind: Kind, scope: str | bytes, place: bytes) -> str:
    if isinstance(scope, str):
        return keys.event(root, scope, place)
    if kind == "mark":
        return keys.mark(root)
    names = {"summary": keys.summary, "lease": keys.lease, "refused": keys.refused}
    return names[kind](root, scope, place)
