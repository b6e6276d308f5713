"""Servers that hang, die, fill up, are too old or come late."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.store import Store, StoreMisconfigured, StoreUnsupported, key_names
from proxy.store.breaker import SERVER
from proxy.store.operations import Claim, ReadFields, Release, ScoreMember, SetField, TopMembers
from proxy.store.redis import POOL, RedisBackend
from proxy.tasks import Tasks
from tests.store.conftest import Opener, Valkey, eventually
from tests.support.ports import free_port

TENANT, ROOT, ROUTE, A = b"t" * 32, b"r" * 16, "openai,gpt-5", b"a" * 16


def _place(n: int) -> bytes:
    return n.to_bytes(16, "big")


async def _ask_in_vain(store: Store, calls: int) -> None:
    """Ask a store that will never answer: that each call returns is due to its deadline alone."""
    before = sum(store.state().errors.values())
    async with asyncio.timeout(60):
        for n in range(calls):
            assert await store.records.newest(TENANT, ROOT, ROUTE, [_place(n)]) is None
    assert sum(store.state().errors.values()) == before + calls


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_a_hung_server_costs_little_and_is_used_again_when_it_wakes(valkey: Valkey, opener: Opener) -> None:
    """A frozen server delays each call by its deadline only, opens the breaker, and is back in use after it wakes."""
    store = await opener(valkey.url)
    await store.records.save(TENANT, ROOT, ROUTE, A, b"x")
    valkey.signal(signal.SIGSTOP)
    try:
        await _ask_in_vain(store, 50)
        await eventually(lambda: store.state().breaker == "open")
        assert not store.state().up
        assert await store.records.save(TENANT, ROOT, ROUTE, A, b"mine meanwhile") == b"mine meanwhile"
        assert opener.events.count("store.down") == 1
    finally:
        valkey.signal(signal.SIGCONT)

    await eventually(lambda: store.state().up, 60)
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"x")
    assert opener.events.count("store.up") == 1


@pytest.mark.slow
async def test_a_killed_server_is_a_miss_and_its_data_is_back_after_restart(valkey: Valkey, opener: Opener) -> None:
    """Calls go on without a server that was killed, and find its records when it is back."""
    store = await opener(valkey.url)
    await store.records.save(TENANT, ROOT, ROUTE, A, b"x")
    await asyncio.sleep(1.2)  # the append-only file is written once a second
    valkey.kill()
    await _ask_in_vain(store, 20)
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) is None
    assert set(store.state().errors) <= {"down", "open"}
    valkey.start()
    await eventually(lambda: store.state().up, 60)
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"x")


@pytest.mark.slow
async def test_a_server_that_is_down_at_start_is_used_when_it_comes(short_path: Path, opener: Opener) -> None:
    """The store opens without its server, answers misses, and agrees on the key and works once the server is there."""
    server = Valkey(short_path)
    early, late = await opener(server.url), await opener(server.url)
    assert not early.state().up
    assert await early.records.newest(TENANT, ROOT, ROUTE, [A]) is None
    assert await early.records.save(TENANT, ROOT, ROUTE, A, b"mine") == b"mine"
    assert early.records.prefix_key(TENANT) != late.records.prefix_key(TENANT)
    assert "store.down" in opener.events
    server.start()
    try:
        await eventually(lambda: early.state().up and late.state().up)
        assert early.records.prefix_key(TENANT) == late.records.prefix_key(TENANT)
        assert (
            await early.records.save(TENANT, ROOT, ROUTE, A, b"x")
            == await late.records.save(TENANT, ROOT, ROUTE, A, b"y")
            == b"x"
        )
    finally:
        server.kill()


@asynccontextmanager
async def _slow_line(port: int) -> AsyncIterator[int]:
    """A loopback port that passes bytes to and from *port*, each read up to 8 ms late."""
    dice, pumps = random.Random(3), []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await asyncio.sleep(dice.random() * 0.008)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # one side hung up; the other learns it below
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection("127.0.0.1", port)
        pumps.extend(asyncio.ensure_future(way) for way in (pump(there, writer), pump(reader, onward)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_cancelled_calls_never_get_each_others_answers(valkey_on_tcp: Valkey, opener: Opener) -> None:
    """However many callers leave midway on a slow line, every answer belongs to the key that was read."""
    async with _slow_line(valkey_on_tcp.port) as port:
        store = await opener(f"redis://127.0.0.1:{port}")
        await _storm(store, 0.012)
        await store.close()


async def test_a_caller_that_leaves_says_nothing_about_the_server(valkey: Valkey, opener: Opener) -> None:
    """However many callers leave midway, the breaker stays closed, and no connection and no turn is lost."""
    store = await opener(valkey.url)
    await _storm(store, 0.003)
    assert store.state().breaker == "closed"
    for n in range(2 * POOL):
        assert await store.records.newest(TENANT, ROOT, ROUTE, [_place(n % 50)]) == (0, b"record %d" % (n % 50))


async def _storm(store: Store, patience: float) -> None:
    for n in range(50):
        await store.records.save(TENANT, ROOT, ROUTE, _place(n), b"record %d" % n)
    dice, wrong, answered, cancelled = random.Random(7), [], 0, 0

    async def ask(n: int) -> None:
        nonlocal answered
        found = await store.records.newest(TENANT, ROOT, ROUTE, [_place(n)])
        answered += found is not None
        if found not in (None, (0, b"record %d" % n)):
            wrong.append(found)

    rounds, deadline = 0, time.monotonic() + 60
    # On a busy machine the breaker may open for seconds: as many rounds as it takes to have tried both.
    while rounds < 40 or (min(answered, cancelled) <= 20 and time.monotonic() < deadline):
        rounds += 1
        calls = [asyncio.ensure_future(ask(dice.randrange(50))) for _ in range(20)]
        await asyncio.sleep(dice.random() * patience)
        for call in calls:
            if dice.random() < 0.5:
                cancelled += call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert not wrong
    assert answered > 20
    assert cancelled > 20


async def test_a_full_server_still_reads(valkey: Valkey, opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the server has no memory left, records are read on, writes return the given record, nothing opens."""
    # Once a second the monitor tries to write while writes are refused, and its own error is counted, too.
    monkeypatch.setattr("proxy.store.store._CHECK_BROKEN", 3600.0)
    store = await opener(valkey.url)
    await store.records.save(TENANT, ROOT, ROUTE, A, b"x")
    valkey.say("CONFIG SET maxmemory-policy noeviction")
    valkey.say("CONFIG SET maxmemory 1")
    for n in range(20):
        assert await store.records.save(TENANT, ROOT, ROUTE, _place(n), b"y") == b"y"
        assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"x")
    assert store.state().breaker == "closed"
    assert store.state().errors == {"oom": 20}
    assert opener.events.count("store.full") == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*x\r\n",
        b"$x\r\n",
        b":5\r\n",
        b"*0\r\n",
        b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
        b"*1\r\n*1\r\n$1\r\na\r\n",
        b"*1\r\n$99999999999\r\nabc",
        b"*1\r\n$1\r\nz\r\n",
        b"+OK\r\n+OK\r\n+OK\r\n",
        b"\x00\xff\xfe" * 50 + b"\r\n",
        b"-ERR something\r\n",
        b"",
    ],
)
@pytest.mark.usefixtures("impatient")
async def test_a_lying_server_is_a_miss(nonsense: bytes, opener: Opener) -> None:
    """A call returns in time with a miss or the given record, whatever the server answers."""

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = b"redis_version:7.4.0\r\n"
        try:
            while asked := await reader.read(65536):
                writer.write(b"$%d\r\n%s\r\n" % (len(info), info) if b"INFO" in asked else nonsense)
                if not nonsense:
                    break
        except ConnectionError:
            pass  # the client hung up; so do we
        finally:
            writer.close()

    server = await asyncio.start_server(lie, "127.0.0.1", 0)
    store = await opener(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", key=b"k" * 32)
    store.records.ready = True
    async with asyncio.timeout(60):
        for _ in range(10):
            assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) is None
            assert await store.records.save(TENANT, ROOT, ROUTE, A, b"mine") == b"mine"
    assert store.state().errors
    await store.close()
    server.close()
    await server.wait_closed()


@pytest.mark.usefixtures("impatient")
async def test_a_crowd_on_a_hung_server_leaves_together(valkey: Valkey, opener: Opener) -> None:
    """Five hundred calls at once on a frozen server all return a miss, and only as many as may try it find it slow."""
    store = await opener(valkey.url)
    valkey.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            found = await asyncio.gather(*(store.records.newest(TENANT, ROOT, ROUTE, [_place(n)]) for n in range(500)))
        assert found == [None] * 500
        assert sum(store.state().errors.values()) == 500
        # The calls of a full pool do not give up at the same moment. Each that does leaves its place to another one,
        # until enough have failed to open the breaker; one more may try after its pause, if the machine stands still.
        assert store.state().errors["slow"] <= POOL + SERVER.failures
    finally:
        valkey.signal(signal.SIGCONT)


async def old_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says that it is Redis 6.2."""
    info = b"# Server\r\nredis_version:6.2.14\r\n"
    try:
        while line := await reader.readline():
            if line.strip().upper() == b"AUTH":
                writer.write(b"+OK\r\n")
            elif line.strip().upper() == b"INFO":
                writer.write(b"$%d\r\n%s\r\n" % (len(info), info))
                await writer.drain()
    except ConnectionError:
        pass  # the client hung up; so do we
    finally:
        writer.close()


async def test_a_server_that_is_too_old_is_refused_with_its_version(opener: Opener) -> None:
    """Opening a store on Redis 6.2 fails and says which version it found and which it needs."""
    server = await asyncio.start_server(old_server, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(StoreUnsupported, match=r"6\.2\.14.*7\.0"):
        await opener(f"redis://:hush@127.0.0.1:{port}/0")
    server.close()


async def test_a_wrong_password_is_reported_and_never_shown(valkey_on_tcp: Valkey, opener: Opener) -> None:
    """A refused password is reported as such, without the password, and the store goes on without its server."""
    valkey_on_tcp.say("CONFIG SET requirepass right")
    store = await opener(f"redis://:wrong-secret@127.0.0.1:{valkey_on_tcp.port}")
    assert await store.records.save(TENANT, ROOT, ROUTE, A, b"x") == b"x"
    assert store.state().url_redacted == f"redis://***@127.0.0.1:{valkey_on_tcp.port}"
    assert opener.warned[0] == ("store.down", {"cause": "auth"})
    assert "secret" not in repr(opener.warned) + repr(store.state())
    right = await opener(f"redis://:right@127.0.0.1:{valkey_on_tcp.port}")
    assert right.state().up


@pytest.mark.parametrize(
    "url",
    [
        "http://:hush@h",
        "redis://:hush@h:notaport",
        "redis://:hush@h?what=is-this",
        "redis+sentinel://:hush@h:1",
        "redis+sentinel://:hush@h:1/m?what=x",
        "redis+cluster://",
        "nonsense",
    ],
)
async def test_a_url_that_cannot_be_used_is_refused_without_its_secret(url: str, opener: Opener) -> None:
    """A bad URL fails at start with the setting's name and none of its secrets."""
    with pytest.raises(StoreMisconfigured, match=r"store\.url") as refusal:
        await opener(url)
    assert "hush" not in str(refusal.value)
    assert refusal.value.__suppress_context__


@pytest.mark.parametrize(
    "url", ["redis://h?socket_timeout=30&retry_on_timeout=yes&protocol=3", "unix:///s?socket_timeout=30"]
)
async def test_a_url_cannot_bring_back_slow_defaults(url: str, opener: Opener) -> None:
    """Timeouts and retries are ours whatever the URL says: the connections really have them."""
    servers = RedisBackend(url, spawn=opener.tasks.spawn)
    connection = servers._client.connection_pool.make_connection()
    assert (connection.socket_timeout, connection.socket_connect_timeout) == (1.0, 1.0)
    assert connection.retry.get_retries() == 0
    assert connection.retry_on_error == []
    await servers.close()


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_a_cluster_keeps_conversations_and_its_breaker_is_per_node(short_path: Path, opener: Opener) -> None:
    """On a cluster records are fixed and found, hung nodes open their own breaker, and it recovers."""
    bus = ("--cluster-port", str(free_port()))  # by default 10,000 above the port, which may not exist
    settings = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", *bus)
    server = Valkey(short_path, *settings, port=free_port())
    server.start()
    try:
        server.say("CLUSTER ADDSLOTSRANGE 0 16383")
        await eventually(lambda: "cluster_state:ok" in server.say("CLUSTER INFO"))
        store = await opener(f"redis+cluster://127.0.0.1:{server.port}")
        assert store.state().up
        assert await store.records.save(TENANT, ROOT, ROUTE, A, b"x") == b"x"
        assert await store.records.save(TENANT, ROOT, ROUTE, A, b"y") == b"x"
        assert await store.records.newest(TENANT, ROOT, ROUTE, [_place(1), A]) == (1, b"x")
        server.signal(signal.SIGSTOP)
        await _ask_in_vain(store, 20)
        await eventually(lambda: store.state().breaker == "open")
        server.signal(signal.SIGCONT)
        await eventually(lambda: store.state().up, 60)
        assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"x")
        await store.close()
    finally:
        server.kill()


async def test_the_master_a_sentinel_names_is_used(short_path: Path, valkey_on_tcp: Valkey, opener: Opener) -> None:
    """A store opened through Sentinels finds the master, one dead Sentinel notwithstanding."""
    home = short_path / "sentinel"
    home.mkdir()
    settings = home / "sentinel.conf"
    settings.write_text(f"sentinel monitor main 127.0.0.1 {valkey_on_tcp.port} 1\n")
    sentinel = Valkey(home, port=free_port())
    sentinel.start_as(str(settings), "--sentinel", "--port", str(sentinel.port), "--unixsocket", str(sentinel.socket))
    try:
        store = await opener(f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/main/0")
        assert store.state().up
        assert await store.records.save(TENANT, ROOT, ROUTE, A, b"x") == b"x"
        assert valkey_on_tcp.say(f"EXISTS {key_names.record_name(ROOT, ROUTE, A)}").startswith(":1")
        await store.close()
    finally:
        sentinel.kill()


async def test_a_table_loses_the_field_that_sorts_first_and_keeps_its_longest_life(valkey: Valkey) -> None:
    """Of more fields than it may have the first goes; a note of short life shortens no longer one."""
    tasks = Tasks(lambda name, error: None)
    servers = RedisBackend(valkey.url, spawn=tasks.spawn)
    for number in (3, 1, 2):
        await servers.run(SetField("t", f"{number}", b"%d" % number, 3, 100))
    await servers.run(SetField("t", "4", b"4", 3, 10))
    assert await servers.run(ReadFields("t")) == {b"2": b"2", b"3": b"3", b"4": b"4"}
    assert int(valkey.say("PTTL t").strip().lstrip(":")) > 20_000
    await servers.run(SetField("t", "4", b"four", 3, 10))
    assert (await servers.run(ReadFields("t")))[b"4"] == b"four"
    await servers.close()


async def test_a_list_keeps_the_newest(valkey: Valkey) -> None:
    """Of more members than it may have the lowest scores go; a member's score is its last one."""
    tasks = Tasks(lambda name, error: None)
    servers = RedisBackend(valkey.url, spawn=tasks.spawn)
    for score, member in enumerate((b"a", b"b", b"c", b"a", b"d")):
        await servers.run(ScoreMember("l", member, float(score), 3, 100))
    assert await servers.run(TopMembers("l", 9)) == [(b"d", 4.0), (b"a", 3.0), (b"c", 2.0)]
    assert await servers.run(TopMembers("l", 1)) == [(b"d", 4.0)]
    assert 0 < int(valkey.say("PTTL l").strip().lstrip(":")) <= 100_000
    await servers.close()


async def test_only_who_holds_a_value_gives_it_back(valkey: Valkey) -> None:
    """A value goes once, and whoever names another one is told so."""
    tasks = Tasks(lambda name, error: None)
    servers = RedisBackend(valkey.url, spawn=tasks.spawn)
    await servers.run(Claim("k", b"mine", 100))
    assert not await servers.run(Release("k", b"yours"))
    assert await servers.run(Release("k", b"mine"))
    assert not await servers.run(Release("k", b"mine"))
    await servers.close()
