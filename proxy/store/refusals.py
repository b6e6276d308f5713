"""The operations that a store's server refuses at present, remedies for its operator, and errors that open the breaker.

A full server still reads, and a user may have one command and lack another. So each refused operation is tried again
on a key of its own: nothing else proves that it works.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from proxy.store import key_names
from proxy.store.backend import Backend, Unavailable

REFUSALS: Final = {
    "oom": "give the server more memory, or set its maxmemory-policy to volatile-lru",
    "disk": "the server cannot write to its disk: make room there, or mend its directory",
    "readonly": "store.url leads to a read-only replica: name its master, or use redis+sentinel://",
    "permission": "grant the user of store.url the commands that docs/operations.md lists, on keys of ullage1:*",
    "replicas": "the server has fewer replicas than its min-replicas-to-write: bring them back, or lower that",
}
"""Kinds of refusals of a server that answers, each with a remedy for its operator."""

BREAKING: Final = frozenset({"slow", "down", "auth", "loading", "cluster", "protocol"})
"""Kinds that open the breaker. A full memory, a missing permission or a busy pool of ours do not."""

TRIAL_LIFETIME: Final = 60.0
"""Seconds that the key of a trial lives."""

_TRIALS: Final[Mapping[str, Callable[[Backend, str], Awaitable[object]]]] = {
    "read": lambda backend, key: backend.read([key]),
    "claim": lambda backend, key: backend.claim(key, b"", TRIAL_LIFETIME),
    "refresh": lambda backend, key: backend.refresh(key, TRIAL_LIFETIME),
    "remove": lambda backend, key: backend.remove(key),
    "extend": lambda backend, key: backend.extend(key, b"", TRIAL_LIFETIME),
    "release": lambda backend, key: backend.release(key, b""),
    "swap": lambda backend, key: backend.swap(key, b"", b"", TRIAL_LIFETIME),
    "add": lambda backend, key: backend.add(key, 1, TRIAL_LIFETIME),
    "set_field": lambda backend, key: backend.set_field(key, "trial", b"", 1, TRIAL_LIFETIME),
    "read_fields": lambda backend, key: backend.read_fields(key),
    "score_member": lambda backend, key: backend.score_member(key, b"trial", 0.0, 1, TRIAL_LIFETIME),
    "top_members": lambda backend, key: backend.top_members(key, 1),
}
"""How each operation is repeated, on a key that nothing else uses."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An *operation*, by its name in ``Backend``, that *node* refused for *key*; equal for all keys of a node."""

    operation: str
    node: str
    key: str = field(compare=False)


class Refusals:
    """The operations that are refused at present, each with its kind."""

    def __init__(self) -> None:
        self._kinds: dict[Refused, str] = {}

    @property
    def kind(self) -> str:
        """The kind of the oldest refusal; empty if there is none."""
        return next(iter(self._kinds.values()), "")

    def all(self) -> list[Refused]:
        """Every operation that is refused at present."""
        return list(self._kinds)

    def add(self, refused: Refused, kind: str) -> None:
        """Add a refused operation."""
        self._kinds[refused] = kind

    def remove(self, refused: Refused) -> None:
        """Remove an operation that works."""
        if self._kinds:
            self._kinds.pop(refused, None)


async def try_again(backend: Backend, refusals: Refusals) -> None:
    """Repeat every refused operation, and remove those that work."""
    for refused in refusals.all():
        try:
            await trial(backend, refused)
        except Unavailable as error:
            if error.kind in REFUSALS:
                continue
            return  # the server does not answer at all: the breaker's concern
        refusals.remove(refused)


async def try_writing(backend: Backend) -> None:
    """Write a key that nothing else uses, so that a refusal is noticed before a request needs it.

    Raises ``Unavailable``.
    """
    await trial(backend, Refused("claim", "", key_names.TRIAL))


async def trial(backend: Backend, refused: Refused) -> None:
    """Repeat the refused operation on a key of its own in the same hash slot. Raises ``Unavailable``."""
    await _TRIALS[refused.operation](backend, key_names.trial(refused.key, refused.operation))
