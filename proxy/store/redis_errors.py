"""What can go wrong with an operation of the store, by a name, and what of it says that the server cannot serve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from redis import exceptions as errors

from proxy.store import key_names
from proxy.store.backend import Backend, Unavailable

# What the library stumbles over when a server does not speak the protocol.
_NONSENSE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError)
# The first that matches names the failure.
_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (errors.MaxConnectionsError, "pool"),
    (errors.OutOfMemoryError, "oom"),
    (errors.AuthenticationError, "auth"),
    (errors.AuthorizationError, "auth"),
    (errors.NoPermissionError, "permission"),
    (errors.BusyLoadingError, "loading"),
    (errors.ReadOnlyError, "readonly"),
    (errors.MasterDownError, "loading"),
    (errors.ClusterError, "cluster"),
    (errors.RedisClusterException, "cluster"),
    (errors.SlotNotCoveredError, "cluster"),
    (errors.TimeoutError, "slow"),
    (TimeoutError, "slow"),
    (errors.ConnectionError, "down"),
    (OSError, "down"),
    (errors.InvalidResponse, "protocol"),
    *((cause, "protocol") for cause in _NONSENSE),
)
# Answers whose first word the library knows no class for.
_WORDS = {"WRONGTYPE": "wrongtype", "MISCONF": "disk", "NOREPLICAS": "replicas"}
REFUSALS = {
    "oom": "give the server more memory, or set its maxmemory-policy to volatile-lru",
    "disk": "the server cannot write to its disk: make room there, or mend its directory",
    "readonly": "store.url leads to a read-only replica: name its master, or use redis+sentinel://",
    "permission": "grant the user of store.url the commands that docs/operations.md lists, on keys of ullage1:*",
    "replicas": "the server has fewer replicas than its min-replicas-to-write: bring them back, or lower that",
}
"""What a server says that answers but does not do what it is asked, and what its operator can do about each."""

BREAKING = frozenset({"slow", "down", "auth", "loading", "cluster", "protocol"})
"""What says that the server cannot serve. A full memory, a missing permission or a busy pool of ours do not."""
FAULTS = (errors.RedisError, OSError, TimeoutError, *_NONSENSE)
"""What an operation may raise."""


def kind_of(error: BaseException) -> str:
    """What *error* is called in metrics and in the log."""
    if isinstance(error, errors.ResponseError) and (named := _WORDS.get(str(error).partition(" ")[0])):
        return named
    return next((kind for cause, kind in _KINDS if isinstance(error, cause)), "error")


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
    await trial(backend, Refused("claim", "", key_names.TRIAL))


async def trial(backend: Backend, refused: Refused) -> None:
    """Do what was refused on a key of its own in the same hash slot. Raises ``Unavailable``."""
    await _TRIALS[refused.operation](backend, key_names.trial(refused.key, refused.operation))
