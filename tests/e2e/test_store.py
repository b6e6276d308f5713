"""The store behind a running proxy: shared, killed, frozen, full, absent; conversations go on, and go on alike."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.conftest import StartProxy, StartStub
from tests.store.conftest import Valkey
from tests.store.test_redis import old_server
from tests.stub import Answer, Stub, slices
from tests.support.chat_client import ChatClient
from tests.support.ports import free_port
from tests.support.process_inspection import (
    log_lines,
    metrics,
    processes_below,
    request_lines,
    total,
    until_gone,
)
from tests.support.proxy_process import Proxy
from tests.support.sample_conversations import AGENT_SYSTEM, chat_turn, prose

pytestmark = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks at processes through /proc")

WINDOW = 8192
BOUNDED, USUAL = 30.0, 3.0
"""Seconds that no request and that half of the requests may not exceed, whatever the store does; generous, because the
machine may be busy.
"""


@asynccontextmanager
async def chatting(stub: StartStub) -> AsyncIterator[tuple[Stub, ChatClient]]:
    """A strict upstream and a conversation that does not know its proxy yet."""
    server = await stub(window=WINDOW)
    server.script = lambda seen: Answer(prose(seen.number, 150))
    async with ChatClient(server.url, server, [{"role": "system", "content": AGENT_SYSTEM}]) as talk:
        yield server, talk


async def ask(talk: ChatClient, front: Proxy, turn: int) -> float:
    """Ask the conversation's next question through *front*; returns the seconds until it was answered."""
    if talk.url != front.url:
        await talk.__aexit__()
        talk.url = front.url
        await talk.__aenter__()
    began = time.monotonic()
    await talk.ask(chat_turn(turn, 300)[0])
    return time.monotonic() - began


async def over_an_event(talk: ChatClient, front: Proxy, more: int = 2) -> int:
    """Talk until a compaction was sent and *more* requests with it; returns the number of the next turn."""
    turn = 0
    while talk.ledger.compacted < 1 + more:
        await ask(talk, front, turn)
        turn += 1
        assert turn < 60, "no compaction was ever needed"
    return turn


def grows(talk: ChatClient, before: int = -2, after: int = -1) -> bool:
    """Whether the view *after* begins with all of the view *before*, byte for byte."""
    old, new = slices(talk.views[before].body), slices(talk.views[after].body)
    return len(new) > len(old) and new[: len(old)] == old


@pytest.mark.parametrize("ended", ["stopped", "killed", "wiped"])
async def test_a_restart_changes_no_byte_of_what_was_sent_before(
    stub: StartStub, home: Path, proxy: StartProxy, ended: str
) -> None:
    """Stopped or killed at any moment, the next proxy sends the same view, grown at its end.

    It is told of a larger window, so that only what was stored can say where the cut is: without the data it moves.
    """
    async with chatting(stub) as (server, talk):
        front = await proxy(server.url, window=WINDOW, home=home)
        turn = await over_an_event(talk, front)
        assert grows(talk)
        front.end(signal.SIGTERM if ended in ("stopped", "wiped") else signal.SIGKILL)
        await until_gone(home)
        if ended == "wiped":
            shutil.rmtree(home / ".local")
        front.window = WINDOW + 1500
        await front.start()
        await ask(talk, front, turn)
        assert grows(talk) is (ended != "wiped")
        for more in (1, 2):
            await ask(talk, front, turn + more)
            assert grows(talk), f"request {more} after the restart does not begin as the one before"
        assert talk.overflows == 0


async def test_a_new_master_key_changes_no_byte_of_what_was_sent_before(
    stub: StartStub, home: Path, proxy: StartProxy
) -> None:
    """From one key to the next beside it, to that one alone: the same view, grown at its end.

    Each proxy is told of a larger window, so that only what was stored under the key before can say where the cut is.
    """
    one, two, three = "first-master-key-0123", "second-master-key-012", "third-master-key-0123"
    async with chatting(stub) as (server, talk):
        front = await proxy(server.url, window=WINDOW, home=home, config={"store": {"key": one}})
        turn = await over_an_event(talk, front)
        # For the last one nobody prepared anything: it has lost what the others had.
        for store in ({"key": two, "other_keys": [one]}, {"key": two}, {"key": three}):
            front.end()
            await until_gone(home)
            front.window = (front.window or 0) + 1000
            front.config = {"store": store}
            await front.start()
            await ask(talk, front, turn)
            assert grows(talk) is (store != {"key": three}), f"with {store}"
            turn += 1
        assert talk.overflows == 0
        assert "master-key" not in front.log.read_text()
        assert not [line for line in log_lines(front) if line["event"] == "store.integrity"]


async def test_a_data_directory_that_is_deleted_costs_no_request(
    stub: StartStub, home: Path, proxy: StartProxy
) -> None:
    """The store's directory deleted in mid-conversation costs no request; what is written afterwards is there."""
    async with chatting(stub) as (server, talk):
        front = await proxy(server.url, window=WINDOW, home=home, config={"store": {"key": "a-master-key-0123"}})
        turn = await over_an_event(talk, front)
        shutil.rmtree(home / "data")
        took: list[float] = []
        while talk.ledger.compacted < 12:
            took.append(await ask(talk, front, turn))
            turn += 1
        assert max(took) < BOUNDED, took
        assert median(took) < USUAL, took
        await until_up(front, True)
        assert [line for line in log_lines(front) if line["event"] == "store.names_changed"] == []
        front.end()
        front.window = WINDOW + 1500  # so that only what was stored can say where the cut is
        await front.start()
        await ask(talk, front, turn)
        assert talk.overflows == 0
        assert grows(talk)


def garble(path: Path) -> None:
    path.write_bytes(b"nonsense" + path.read_bytes()[8:])


@pytest.mark.parametrize("count", [1, 2])
async def test_damaged_data_costs_a_recomputation_and_nothing_else(
    stub: StartStub, home: Path, proxy: StartProxy, count: int
) -> None:
    """If the embedded store's data cannot be read it is begun anew, said so, up, and shared by the workers."""
    async with chatting(stub) as (server, talk):
        front = await proxy(server.url, window=WINDOW, arguments=["--workers", str(count)], home=home)
        turn = await over_an_event(talk, front)
        front.end()
        await until_gone(home)
        data = home / ".local" / "share" / "ullage"
        garble(data / "store.db")
        await front.start()
        for more in range(4):
            await ask(talk, front, turn + more)
        assert talk.overflows == 0
        await until_up(front, True)
        (line,) = [line for line in log_lines(front) if line["event"] == "store.begun_anew"]
        assert line["moved_to"] == str(data / "store.db.damaged")


async def until_up(front: Proxy, up: bool) -> None:
    """Return once the metrics say that the store is *up* or not."""
    async with asyncio.timeout(60):
        while total(await metrics(front), "ullage_store_up") != up:  # noqa: ASYNC110 - another process's figure
            await asyncio.sleep(0.1)


def _embedded_stores(home: Path) -> list[Path]:
    return list(home.rglob("store.db"))


async def test_two_proxies_on_one_redis_send_the_same_bytes(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey
) -> None:
    """Requests that alternate between two proxies get the views that one proxy would have sent."""
    async with chatting(stub) as (server, talk):
        fronts = [
            await proxy(server.url, window=WINDOW, arguments=["--store", remote.url], home=_made(home / name))
            for name in ("a", "b")
        ]
        turn = await over_an_event(talk, fronts[0], more=1)
        flips = 0
        for more in range(24):
            await ask(talk, fronts[more % 2], turn + more)
            flips += not grows(talk)
        compactions = sum(line["compaction"] for front in fronts for line in request_lines(front))
        assert flips <= compactions <= 6, "only a new compaction may change what was sent before"
        assert talk.ledger.compacted > 20
        # The same request once more, to the other one: the same bytes.
        last = talk.views[-1].body
        talk.messages = talk.messages[:-1]
        for front in fronts:
            del talk.messages[-1:]
            await ask(talk, front, turn + 23)
            assert talk.views[-1].body == last
            talk.messages = talk.messages[:-1]
        assert not _embedded_stores(home), "an embedded store was opened beside the configured one"


def _made(path: Path) -> Path:
    path.mkdir()
    return path


async def test_the_view_survives_both_proxies_of_a_redis(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey
) -> None:
    """A conversation goes on byte for byte on a proxy that never saw it, when the first one is gone for good."""
    async with chatting(stub) as (server, talk):
        first = await proxy(server.url, window=WINDOW, arguments=["--store", remote.url], home=_made(home / "a"))
        turn = await over_an_event(talk, first)
        first.end(signal.SIGKILL)
        # Of another window, so that only what was stored can say where the cut is.
        arguments = ["--store", remote.url]
        second = await proxy(server.url, window=WINDOW + 1500, arguments=arguments, home=_made(home / "b"))
        await ask(talk, second, turn)
        assert grows(talk)


def frozen(remote: Valkey) -> None:
    remote.signal(signal.SIGSTOP)


def dead(remote: Valkey) -> None:
    remote.kill()


def full(remote: Valkey) -> None:
    assert remote.say("CONFIG SET maxmemory-policy noeviction").startswith("+OK")
    assert remote.say("CONFIG SET maxmemory 1").startswith("+OK")


def lost(remote: Valkey) -> None:
    assert remote.say("FLUSHALL").startswith("+OK")


def replica(remote: Valkey) -> None:
    assert remote.say(f"REPLICAOF 127.0.0.1 {free_port()}").startswith("+OK")


def forbidden(remote: Valkey) -> None:
    assert remote.say("ACL SETUSER default -@write").startswith("+OK")


def alone(remote: Valkey) -> None:
    assert remote.say("CONFIG SET min-replicas-to-write 1").startswith("+OK")


MENDED = {
    full: "CONFIG SET maxmemory 0",
    replica: "REPLICAOF NO ONE",
    forbidden: "ACL SETUSER default +@write",
    alone: "CONFIG SET min-replicas-to-write 0",
}


@pytest.mark.parametrize("spoil", [frozen, dead, full, lost, replica, forbidden, alone])
async def test_a_broken_store_costs_no_request(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey, spoil: Callable[[Valkey], None]
) -> None:
    """A store frozen, dead, full or emptied in mid-conversation: every request is answered, soon, and it is said."""
    async with chatting(stub) as (server, talk):
        front = await proxy(server.url, window=WINDOW, arguments=["--store", remote.url], home=home)
        turn = await over_an_event(talk, front)
        spoil(remote)
        took = [await ask(talk, front, turn + more) for more in range(12)]
        assert max(took) < BOUNDED, took
        assert median(took) < USUAL, took
        other = ChatClient(front.url, server, [{"role": "system", "content": AGENT_SYSTEM}])
        async with other:
            for more in range(16):
                await ask(other, front, 100 + more)
        assert other.ledger.compacted > 0
        if spoil in MENDED:
            await until_up(front, False)
            (line,) = [line for line in log_lines(front) if line["event"] in ("store.full", "store.refused")]
            assert line["advice"]
            assert remote.say(MENDED[spoil]).startswith("+OK")
            await until_up(front, True)
        if spoil in (frozen, dead):
            await until_up(front, False)
            assert [line["event"] for line in log_lines(front)].count("store.down") == 1
            if spoil is frozen:
                remote.signal(signal.SIGCONT)
            else:
                remote.start()
            # Through the half-open breaker and back: the figures go on being told.
            await until_up(front, True)
            assert "store.up" in [line["event"] for line in log_lines(front)]
        assert not [line for line in log_lines(front) if line["event"] in ("proxy.task_failed", "proxy.loop_error")]


async def test_a_store_that_is_down_at_the_start_is_used_when_it_comes(
    stub: StartStub, home: Path, proxy: StartProxy, remote: Valkey
) -> None:
    """The proxy starts and serves without its store, says so, and shares it as soon as it is there."""
    remote.kill()
    async with chatting(stub) as (server, talk):
        front = await proxy(server.url, window=WINDOW, arguments=["--store", remote.url], home=home)
        assert "not reachable" in front.log.read_text()
        await ask(talk, front, 0)
        remote.start()
        await until_up(front, True)
        await over_an_event(talk, front)
        assert "ullage1:" in remote.say("KEYS ullage1:*e:*")


@pytest.mark.parametrize("count", ["1", "2"])
async def test_a_store_that_is_too_old_is_refused_at_the_start(stub: StartStub, proxy: StartProxy, count: str) -> None:
    """In front of Redis 6.2 the proxy does not start, and says which version it found and which it needs."""
    server = await stub(window=WINDOW)
    old = await asyncio.start_server(old_server, "127.0.0.1", 0)
    url = f"redis://:hush@127.0.0.1:{old.sockets[0].getsockname()[1]}/0"
    with pytest.raises(RuntimeError, match=r"cannot start: .*6\.2\.14.*7\.0") as refusal:
        await proxy(server.url, window=WINDOW, arguments=["--store", url, "--workers", count])
    assert "hush" not in str(refusal.value)
    old.close()


@pytest.mark.parametrize("count", [1, 2])
async def test_memory_is_enough(stub: StartStub, home: Path, proxy: StartProxy, count: int) -> None:
    """Without a store a conversation is kept inside its window all the same; several workers warn of it."""
    async with chatting(stub) as (server, talk):
        arguments = ["--store", "memory", "--workers", str(count)]
        front = await proxy(server.url, window=WINDOW, arguments=arguments, home=home)
        for turn in range(20):
            await ask(talk, front, turn)
        assert talk.ledger.compacted > 0
        warned = [line for line in log_lines(front) if line["event"] == "store.memory_per_worker"]
        assert len(warned) == count - 1


@pytest.mark.parametrize("count", [1, 2])
async def test_a_data_directory_that_cannot_be_used_is_memory_with_a_warning(
    stub: StartStub, home: Path, proxy: StartProxy, count: int
) -> None:
    """Where the data directory cannot be written the proxy serves from memory, and both summary and log say so."""
    async with chatting(stub) as (server, talk):
        # Below a file and not below a directory without permissions: root, too, must fail here.
        (home / "file").write_text("in the way")
        config = {"store": {"path": str(home / "file" / "data")}}
        front = await proxy(server.url, window=WINDOW, config=config, arguments=["--workers", str(count)], home=home)
        (line,) = [line for line in log_lines(front) if line["event"] == "store.memory_instead"]
        assert line["level"] == "warning"
        assert "store.path" in line["cause"]
        assert "store.path" in line["advice"], "it says what to do"
        (store,) = [text for text in front.log.read_text().splitlines() if text.startswith("  store ")]
        assert "memory" in store
        assert "embedded" not in store
        assert "in place of the configured store" in store
        await until_up(front, False)
        for turn in range(20):
            await ask(talk, front, turn)
        assert talk.ledger.compacted > 0


@pytest.mark.parametrize("count", [1, 2])
async def test_a_damaged_key_file_does_not_stop_the_proxy(
    stub: StartStub, home: Path, proxy: StartProxy, count: int
) -> None:
    """A master key file of the wrong size means memory, a warning that names the file, and nothing left over."""
    server = await stub(window=WINDOW)
    data = home / "data"
    data.mkdir(mode=0o700)
    (data / "master.key").write_bytes(b"short")
    config: dict[str, Any] = {"store": {"path": str(data)}}
    front = await proxy(server.url, window=WINDOW, config=config, arguments=["--workers", str(count)], home=home)
    (line,) = [line for line in log_lines(front) if line["event"] == "store.memory_instead"]
    assert "master.key" in line["cause"]
    assert front.end() == 0
    assert not processes_below(home)


async def test_two_proxies_of_one_data_directory_share_its_store(
    stub: StartStub, home: Path, proxy: StartProxy
) -> None:
    """A second proxy continues what the first one decided, also when the first is killed."""
    async with chatting(stub) as (server, talk):
        first = await proxy(server.url, window=WINDOW, config={"server": {}}, home=home)
        second = Proxy(server.url, WINDOW + 1500, {"store": {"path": f"{home}/data"}}, home=_made(home / "b"))
        async with second:
            turn = await over_an_event(talk, first)
            await ask(talk, second, turn)
            assert grows(talk)
            first.end(signal.SIGKILL)
            await ask(talk, second, turn + 1)
            assert grows(talk)
            assert second.end() == 0
        await until_gone(home)
