"""``Backend``, the interface between the tables and the server, file or memory that has their bytes.

``SharedBackend`` is what servers and a file have in common: they may be slow, down, or refuse operations. A full server
still reads, and a user may have one command and lack another. So each refused operation is tried again on a key of its
own: nothing else proves that it works.

No error reaches a request. The tables handle ``Unavailable``; every other error stops the start of the process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeVar

from proxy.store import deadlines
from proxy.store.breaker import State
from proxy.store.deadlines import WaitBudget
from proxy.store.key_names import TRIAL, trial_name
from proxy.store.operations import (
    Add,
    Claim,
    Extend,
    Operation,
    Put,
    Read,
    ReadFields,
    Refresh,
    Release,
    Remove,
    ScoreMember,
    SetField,
    Swap,
    TopMembers,
    Unavailable,
)

T = TypeVar("T")

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

TRIALS: Final[Mapping[type[Operation[Any]], Callable[[str], Operation[Any]]]] = {
    Read: lambda key: Read([key]),
    Claim: lambda key: Claim(key, b"", TRIAL_LIFETIME),
    Put: lambda key: Put(key, b"", TRIAL_LIFETIME),
    Refresh: lambda key: Refresh(key, TRIAL_LIFETIME),
    Remove: Remove,
    Extend: lambda key: Extend(key, b"", TRIAL_LIFETIME),
    Release: lambda key: Release(key, b""),
    Swap: lambda key: Swap(key, b"", b"", TRIAL_LIFETIME),
    Add: lambda key: Add(key, 1, TRIAL_LIFETIME),
    SetField: lambda key: SetField(key, "trial", b"", 1, TRIAL_LIFETIME),
    ReadFields: ReadFields,
    ScoreMember: lambda key: ScoreMember(key, b"trial", 0.0, 1, TRIAL_LIFETIME),
    TopMembers: lambda key: TopMembers(key, 1),
}
"""How each operation is tried on a key that nothing else uses."""


class StoreError(Exception):
    """Base of the errors that stop the start of the process."""


class StoreMisconfigured(StoreError):
    """The store's URL or key cannot be used; the text names the setting and never the secret."""


class StoreUnsupported(StoreError):
    """The server is too old; the text names its version and the one that is needed."""


class EmbeddedUnavailable(StoreError):
    """The embedded store cannot be used: its directory is not writable, or on a network file system."""


class Backend(Protocol):
    """Runs operations on the bytes of the store: on servers, in a file, or in the memory of this process."""

    async def run(self, operation: Operation[T]) -> T:
        """Run *operation* and return its result. Raises ``Unavailable`` if there is none within the deadline."""

    @property
    def shared(self) -> bool:
        """True if other processes may write here."""

    def version(self) -> tuple[int, ...] | None:
        """A value that changes at least when another process writes; None if that would take a request to a server."""

    @property
    def breaker(self) -> State:
        """``closed``, ``open`` or ``half-open``: the worst over all servers."""

    @property
    def refusal(self) -> str:
        """The kind of refusal if a server answers but refuses operations, else an empty string."""

    async def close(self) -> None:
        """Close every connection and file."""


class SharedBackend(ABC):
    """A ``Backend`` that other processes use, too; *clock* gives monotonic seconds."""

    shared: bool = True

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wait_budget = WaitBudget(clock)
        self._refused: dict[tuple[type[Operation[Any]], str], tuple[str, str]] = {}
        """Each operation that a node refuses, with the kind of the refusal and the key that it was refused for."""

    async def run(self, operation: Operation[T]) -> T:
        """Run *operation* within the deadline. Remember it if it is refused. Raises ``Unavailable``."""
        began, seconds = self._clock(), self._wait_budget.remaining(deadlines.OPERATION)
        node = self._node_of(operation.key)
        try:
            result = await self._attempt(operation, node, seconds)
        except Unavailable as error:
            self._wait_budget.spend(self._clock() - began)
            if error.kind in REFUSALS:
                self._refused[type(operation), node] = error.kind, operation.key
            raise
        if self._refused:
            self._refused.pop((type(operation), node), None)
        return result

    def _node_of(self, key: str) -> str:
        """The name of the node of a cluster that has *key*; empty if there is no cluster."""
        del key
        return ""

    @abstractmethod
    async def _attempt(self, operation: Operation[T], node: str, seconds: float) -> T:
        """Run *operation* within *seconds*, if the breaker of *node* admits it. Raises ``Unavailable``."""

    @property
    def refusal(self) -> str:
        """The kind of the oldest refusal that stands; empty if there is none."""
        return next((kind for kind, _ in self._refused.values()), "")

    async def try_again(self) -> None:
        """Try every refused operation on a key of its own, and forget the refusals of those that work."""
        for (operation, node), (_, key) in list(self._refused.items()):
            try:
                await self.run(trial(operation, key))
            except Unavailable as error:
                if error.kind in REFUSALS:
                    continue
                return  # the server does not answer at all: the breaker's concern
            # The key may be on another node by now, whose refusal alone ``run`` has forgotten.
            self._refused.pop((operation, node), None)

    async def try_writing(self) -> None:
        """Write a key that nothing else uses, so that a refusal is noticed before a request needs it.

        Raises ``Unavailable``.
        """
        await self.run(trial(Claim, TRIAL))


def trial(operation: type[Operation[Any]], key: str) -> Operation[Any]:
    """Return *operation* on a key that nothing else uses, in the same hash slot as *key*."""
    return TRIALS[operation](trial_name(key, operation.__name__))
