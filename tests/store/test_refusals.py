"""A refused operation is tried again on a key of its own, until it works."""

from __future__ import annotations

import pytest

from proxy.store import key_names
from proxy.store.backend import Unavailable
from proxy.store.memory import MemoryBackend
from proxy.store.refusals import Refusals, Refused, trial, try_again
from tests.store.conftest import Opener, Valkey

TENANT, ROOT, ROUTE, A = b"t" * 32, b"r" * 16, "openai,gpt-5", b"a" * 16
OPERATIONS = [
    "read", "claim", "refresh", "remove", "extend", "release", "swap", "add",
    "set_field", "read_fields", "score_member", "top_members",
]  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.slow
async def test_every_operation_has_a_trial_that_touches_no_record(
    valkey: Valkey, opener: Opener, operation: str
) -> None:
    """A trial works on a server that is well, more than once, and on a key of its own that ends."""
    store = await opener(valkey.url, key=b"k" * 32)
    key = key_names.record(ROOT, ROUTE, A)
    await store.records.save(TENANT, ROOT, ROUTE, A, b"x")
    for _ in range(2):
        await trial(store._access.backend, Refused(operation, "", key))
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"x")
    tried = key_names.trial(key, operation)
    assert valkey.say(f"PTTL {tried}").strip() in (":-2", ":60000") or 0 < int(valkey.say(f"PTTL {tried}")[1:]) <= 60000


async def test_only_what_works_is_forgotten() -> None:
    """A refusal stands until its own operation works, and a server that does not answer changes nothing."""

    class Halting(MemoryBackend):
        kind = "oom"

        async def claim(self, key: str, value: bytes, seconds: float | None) -> bytes | None:
            raise Unavailable(self.kind)

    refusals, backend = Refusals(), Halting()
    refusals.add(Refused("claim", "", "k"), "oom")
    refusals.add(Refused("read", "", "k"), "permission")
    await try_again(backend, refusals)
    assert [refused.operation for refused in refusals.all()] == ["claim"]
    assert refusals.kind == "oom"
    backend.kind = "slow"
    await try_again(backend, refusals)
    assert refusals.kind == "oom"
    refusals.remove(Refused("claim", "", "another key"))
    assert refusals.kind == ""
