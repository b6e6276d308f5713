"""Which operations a server refuses although it answers, and how each is tried again without touching a record.

A full server still reads, a user may have one command and lack another: only the operation that was refused tells,
when it works again, that nothing is wrong any more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from proxy.store import keys
from proxy.store.backend import Backend
from proxy.store.errors import Unavailable
from proxy.store.failures import REFUSALS

LIFETIME: Final = 60.0
"""Seconds for which a key lives that a trial writes."""

_TRIALS: Final[Mapping[str, Callable[[Backend, str], Awaitable[object]]]] = {
    "read": lambda backend, key: backend.read([key]),
    "claim": lambda backend, key: backend.claim(key, b"", LIFETIME),
    "refresh": lambda backend, key: backend.refresh(key, LIFETIME),
    "remove": lambda backend, key: backend.remove(key),
    "extend": lambda backend, key: backend.extend(key, b"", LIFETIME),
    "release": lambda backend, key: backend.release(key, b""),
    "swap": lambda backend, key: backend.swap(key, b"", b"", LIFETIME),
    "add": lambda backend, key: backend.add(key, 1, LIFETIME),
    "note": lambda backend, key: backend.note(key, "trial", b"", 1, LIFETIME),
    "table": lambda backend, key: backend.table(key),
    "rank": lambda backend, key: backend.rank(key, b"trial", 0.0, 1, LIFETIME),
    "ranked": lambda backend, key: backend.ranked(key, 1),
}


@dataclass(frozen=True, slots=True)
class Refused:
    """An *operation*, by its name in ``Backend``, that *node* refused for *key*; one of a kind for each node."""

    operation: str
    node: str
    key: str = field(compare=False)


class Refusals:
    """The operations that are refused now, each with the kind of its refusal."""

    def __init__(self) -> None:
        self._kinds: dict[Refused, str] = {}

    @property
    def kind(self) -> str:
        """The kind of the oldest refusal that stands; empty if there is none."""
        return next(iter(self._kinds.values()), "")

    def all(self) -> list[Refused]:
        """Return everything that is refused now."""
        return list(self._kinds)

    def note(self, refused: Refused, kind: str) -> None:
        """Remember that *refused* was refused."""
        self._kinds[refused] = kind

    def forget(self, refused: Refused) -> None:
        """Note that the operation works."""
        if self._kinds:
            self._kinds.pop(refused, None)


async def try_again(backend: Backend, refusals: Refusals) -> None:
    """Repeat everything that is refused, and forget what works."""
    for refused in refusals.all():
        try:
            await trial(backend, refused)
        except Unavailable as error:
            if error.kind in REFUSALS:
                continue
            return  # it does not answer at all now: the breaker deals with that
        refusals.forget(refused)


async def try_writing(backend: Backend) -> None:
    """Write a key that nothing else uses, so that a refusal is noticed before a request needs it.

    Raises ``Unavailable``.
    """
    await trial(backend, Refused("claim", "", keys.TRIAL))


async def trial(backend: Backend, refused: Refused) -> None:
    """Do what was refused on a key of its own in the same hash slot. Raises ``Unavailable``."""
    await _TRIALS[refused.operation](backend, keys.trial(refused.key, refused.operation))
