"""A refused operation is tried again on a key of its own, until it works."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import pytest

from proxy.store import key_names
from proxy.store.backend import TRIAL_LIFETIME, SharedBackend, trial
from proxy.store.operations import Claim, MemoryBackend, Operation, Read, Unavailable
from tests.store.conftest import Opener, Valkey

T = TypeVar("T")

TENANT, ROOT, ROUTE, A = b"t" * 32, b"r" * 16, "openai,gpt-5", b"a" * 16
OPERATIONS = Operation.__subclasses__()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.slow
async def test_every_operation_has_a_trial_that_touches_no_record(
    valkey: Valkey, opener: Opener, operation: type[Operation[Any]]
) -> None:
    """A trial works on a server that is well, more than once, and on a key of its own that ends."""
    store = await opener(valkey.url, key=b"k" * 32)
    key = key_names.record_name(ROOT, ROUTE, A)
    await store.records.save(TENANT, ROOT, ROUTE, A, b"x")
    for _ in range(2):
        await store._access.backend.run(trial(operation, key))
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"x")
    tried = trial(operation, key).key
    assert tried != key
    most = int(TRIAL_LIFETIME * 1000)
    left = int(valkey.say(f"PTTL {tried}")[1:])
    assert left == -2 or 0 < left <= most


class Refusing(SharedBackend):
    """In memory; refuses the operations of *refused* with the kinds there."""

    breaker = "closed"

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.memory = MemoryBackend()
        self.refused: dict[type[Operation[Any]], str] = {}

    async def _attempt(self, operation: Operation[T], node: str, seconds: float) -> T:
        if type(operation) in self.refused:
            raise Unavailable(self.refused[type(operation)])
        return await self.memory.run(operation)


async def test_only_what_works_is_forgotten() -> None:
    """A refusal stands until its own operation works, and a server that does not answer changes nothing."""
    backend = Refusing()
    backend.refused = {Claim: "oom", Read: "permission"}
    for operation in (Claim("k", b"1", 60), Read(["k"])):
        with pytest.raises(Unavailable):
            await backend.run(operation)
    assert backend.refusal == "oom"
    backend.refused.pop(Read)
    await backend.try_again()
    assert [operation for operation, _ in backend._refused] == [Claim]
    assert backend.refusal == "oom"
    backend.refused[Claim] = "slow"
    await backend.try_again()
    assert backend.refusal == "oom"
    backend.refused.clear()
    await backend.run(Claim("another key", b"1", 60))
    assert backend.refusal == ""


async def test_a_write_is_tried_before_a_request_needs_it() -> None:
    """A server that takes no writes is noticed by a trial."""
    backend = Refusing()
    backend.refused = {Claim: "readonly"}
    with pytest.raises(Unavailable, match="readonly"):
        await backend.try_writing()
    assert backend.refusal == "readonly"
    backend.refused.clear()
    await backend.try_again()
    assert backend.refusal == ""
