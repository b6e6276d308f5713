"""The contract every store keeps, whatever is behind it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from proxy.engine.ports import Records
from proxy.store import Store, key_names
from proxy.store.encryption import MAX_PLAIN, Sealer
from proxy.store.operations import MemoryBackend
from proxy.store.tables import WARN_EVERY, TableAccess, ThrottledWarnings
from proxy.tasks import Tasks, ignore_failure
from tests.store.conftest import Opener, Valkey, eventually

TENANT, OTHER, ROOT, ROUTE = b"t" * 32, b"o" * 32, b"r" * 16, "openai,gpt-5"
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


@pytest.fixture(params=["memory", "unix", "tcp", "embedded"])
async def store(request: pytest.FixtureRequest, opener: Opener) -> Store:
    """An open, empty store of each kind."""
    if request.param in ("memory", "embedded"):
        return await opener(request.param)
    server: Valkey = request.getfixturevalue("valkey" if request.param == "unix" else "valkey_on_tcp")
    return await opener(server.url if request.param == "unix" else f"redis://127.0.0.1:{server.port}")


async def test_it_holds_the_engines_records(store: Store) -> None:
    """The record table can stand where the engine asks for ``Records``."""
    records: Records = store.records
    assert await records.newest(TENANT, ROOT, ROUTE, []) is None
    assert await records.newest(TENANT, ROOT, ROUTE, [A, B]) is None
    assert len(records.prefix_key(TENANT)) == 32


async def test_the_first_record_at_a_boundary_is_valid(store: Store) -> None:
    """The first writer's record is what every later writer and reader gets."""
    assert await store.records.save(TENANT, ROOT, ROUTE, A, b"first") == b"first"
    assert await store.records.save(TENANT, ROOT, ROUTE, A, b"second") == b"first"
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"first")


async def test_the_first_prefix_hash_with_a_record_wins(store: Store) -> None:
    """Of several prefix hashes with a record, the first one's is returned, with its index."""
    await store.records.save(TENANT, ROOT, ROUTE, A, b"old")
    await store.records.save(TENANT, ROOT, ROUTE, B, b"new")
    assert await store.records.newest(TENANT, ROOT, ROUTE, [C, B, A]) == (1, b"new")
    assert await store.records.newest(TENANT, ROOT, ROUTE, [C, A]) == (1, b"old")
    many = [n.to_bytes(16, "big") for n in range(511)]
    assert await store.records.newest(TENANT, ROOT, ROUTE, [*many, A]) == (511, b"old")
    assert await store.records.newest(TENANT, ROOT, ROUTE, [*many, C, A]) is None


async def test_other_tenants_roots_and_routes_see_nothing(store: Store) -> None:
    """A record is found only by the tenant, conversation and route it was made for."""
    await store.records.save(TENANT, ROOT, ROUTE, A, b"mine")
    assert await store.records.newest(TENANT, b"x" * 16, ROUTE, [A]) is None
    assert await store.records.newest(TENANT, ROOT, "openai,gpt-4", [A]) is None
    # Same name, other tenant: cannot happen by chance, must not help on purpose.
    assert await store.records.newest(OTHER, ROOT, ROUTE, [A]) is None
    assert store.state().errors == {"integrity": 1}


async def test_any_bytes_come_back_as_they_were(store: Store) -> None:
    """Records of every size up to the limit are returned unchanged; a bigger one is returned but not kept."""
    for prefix_hash, record in ((A, b""), (B, bytes(range(256)) * 400), (C, bytes(MAX_PLAIN))):
        assert await store.records.save(TENANT, ROOT, ROUTE, prefix_hash, record) == record
        assert await store.records.newest(TENANT, ROOT, ROUTE, [prefix_hash]) == (0, record)
    huge = bytes(MAX_PLAIN + 1)
    assert await store.records.save(TENANT, ROOT, ROUTE, b"h" * 16, huge) == huge
    assert await store.records.newest(TENANT, ROOT, ROUTE, [b"h" * 16]) is None


async def test_many_at_once_agree(store: Store) -> None:
    """A hundred writers of one name at the same moment all get the same record, but for those cut by the deadline."""
    records = [str(n).encode() for n in range(100)]
    held = await asyncio.gather(*(store.records.save(TENANT, ROOT, ROUTE, A, record) for record in records))
    winner = Counter(held).most_common(1)[0][0]
    alone = [own for own, got in zip(records, held, strict=True) if got != winner]
    assert all(got in (winner, own) for own, got in zip(records, held, strict=True))
    assert len(alone) <= sum(store.state().errors.values())


async def test_its_state_tells_what_happened(store: Store) -> None:
    """Hits are counted, and a healthy store says that it is up."""
    await store.records.save(TENANT, ROOT, ROUTE, A, b"x")
    await store.records.newest(TENANT, ROOT, ROUTE, [A])
    await store.records.newest(TENANT, ROOT, ROUTE, [B])
    state = store.state()
    assert (state.up, state.breaker, state.hits, dict(state.errors)) == (True, "closed", 1, {})


async def test_two_replicas_race_and_agree(valkey: Valkey, opener: Opener) -> None:
    """Two stores on one server, with no key configured, agree on keys and records."""
    one, two = await asyncio.gather(opener(valkey.url), opener(valkey.url))
    assert one.records.prefix_key(TENANT) == two.records.prefix_key(TENANT)
    for n in range(50):
        prefix_hash = n.to_bytes(16, "big")
        first, second = await asyncio.gather(
            one.records.save(TENANT, ROOT, ROUTE, prefix_hash, b"one"),
            two.records.save(TENANT, ROOT, ROUTE, prefix_hash, b"two"),
        )
        assert first == second
        assert await one.records.newest(TENANT, ROOT, ROUTE, [prefix_hash]) == await two.records.newest(
            TENANT, ROOT, ROUTE, [prefix_hash]
        )


async def test_a_spoiled_value_is_a_miss_an_alarm_and_gone(valkey: Valkey, opener: Opener) -> None:
    """Bytes nobody sealed under our name are never an answer: they are reported, removed and replaced."""
    store = await opener(valkey.url)
    name = key_names.record_name(ROOT, ROUTE, A)
    valkey.say(f"SET {name} poison")
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) is None
    assert "store.integrity" in opener.events
    await eventually(lambda: valkey.say(f"EXISTS {name}").startswith(":0"))
    valkey.say(f"SET {name} poison")
    assert await store.records.save(TENANT, ROOT, ROUTE, A, b"good") == b"good"
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"good")


async def test_a_value_of_another_type_is_cleared_once(valkey: Valkey, opener: Opener) -> None:
    """A list under our name is a miss for readers, and a writer replaces it by its record."""
    store = await opener(valkey.url)
    valkey.say(f"LPUSH {key_names.record_name(ROOT, ROUTE, A)} x")
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) is None
    assert await store.records.save(TENANT, ROOT, ROUTE, A, b"good") == b"good"
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"good")
    assert store.state().errors == {"wrongtype": 1}
    assert store.state().breaker == "closed"


async def test_records_live_seven_days_from_their_last_use(valkey: Valkey, opener: Opener) -> None:
    """A record starts with seven days, and a reader gives it seven days again."""
    writer, reader = await opener(valkey.url), await opener(valkey.url)
    await writer.records.save(TENANT, ROOT, ROUTE, A, b"x")
    name, week = key_names.record_name(ROOT, ROUTE, A), 7 * 24 * 3600

    def left() -> int:
        return int(valkey.say(f"TTL {name}")[1:])

    assert week - 60 < left() <= week
    valkey.say(f"EXPIRE {name} 100")
    await reader.records.newest(TENANT, ROOT, ROUTE, [A])
    await eventually(lambda: left() > week - 60)
    valkey.say(f"EXPIRE {name} 100")
    await reader.records.newest(TENANT, ROOT, ROUTE, [A])
    await asyncio.sleep(0.1)
    assert left() <= 100, "renewed at most once an hour"


async def test_nothing_readable_is_in_the_store(short_path: Path, valkey: Valkey, opener: Opener) -> None:
    """Neither a record nor a tenant can be read from what the server keeps."""
    store = await opener(valkey.url, key=b"k" * 32)
    await store.records.save(TENANT, ROOT, ROUTE, A, b"the secret summary " * 50)
    await store.close()
    valkey.say("SHUTDOWN")
    kept = b"".join(file.read_bytes() for file in (short_path / "appendonlydir").iterdir())
    assert b"ullage1:" in kept
    assert b"secret" not in kept
    assert TENANT not in kept
    assert b"gpt-5" not in kept
    assert b"ullage1:master" not in kept


def test_changes_are_logged_once_and_repeated_errors_once_a_minute() -> None:
    """Every error is counted; the log has every change, and repeated errors once a minute."""
    logged, now = [], 0.0
    warnings = ThrottledWarnings(lambda event, facts: logged.append((event, facts)), lambda: now)
    for state in (True, False, False, False, True):
        warnings.change("store", state, "up" if state else "down")
    for _ in range(100):
        warnings.count("oom", "full")
    warnings.count("slow")
    now = WARN_EVERY
    warnings.count("oom", "full")
    assert logged == [("down", {}), ("up", {}), ("full", {"kind": "oom"}), ("full", {"kind": "oom"})]
    assert warnings.snapshot() == {"oom": 101, "slow": 1}


async def test_a_store_that_was_down_at_start_only_is_reported_up() -> None:
    """The first report says so, although no operation failed in between."""
    logged: list[str] = []
    tasks = Tasks(ignore_failure)
    warnings = ThrottledWarnings(lambda event, facts: logged.append(event), time.monotonic)
    access = TableAccess(MemoryBackend(), Sealer(b"k" * 32), spawn=tasks.spawn, warnings=warnings)
    access.ready = False
    warnings.change("store", False, "store.down")
    access.ready = True
    access.report_state()
    access.report_state()
    assert logged == ["store.down", "store.up"]
