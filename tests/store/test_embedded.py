"""The private server: started, shared, handed over, adopted, restarted and stopped. Whole processes are killed here."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from proxy.store.backend import EmbeddedUnavailable
from proxy.store.embedded import STOP, EmbeddedServer, FileLock, is_answering, send_command
from proxy.tasks import Tasks
from tests.store.conftest import Opener, eventually

TENANT, ROOT, ROUTE, A = b"t" * 32, b"r" * 16, "openai,gpt-5", b"a" * 16
# A proxy reduced to its store: opens it, fixes one record, says so, waits.
PROCESS = """
import asyncio, sys
from pathlib import Path
from proxy.store import open_store
from proxy.tasks import Tasks

async def main():
    tasks = Tasks(lambda name, error: print(name, error, file=sys.stderr))
    store = await open_store(
        "embedded", directory=Path(sys.argv[1]), key=None, spawn=tasks.spawn, warn=lambda event, facts: None
    )
    held = await store.records.save(b"t" * 32, b"r" * 16, "openai,gpt-5", b"a" * 16, sys.argv[2].encode())
    print(store.state().owner, held.decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await store.close()

asyncio.run(main())
"""


def silent(event: str, facts: dict[str, object]) -> None:
    """Takes a warning that the test does not look at."""


class Process:
    """Another proxy process on the same directory."""

    def __init__(self, directory: Path, record: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(directory), record],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline().strip()

    def kill(self) -> None:
        """End it without a chance to tidy up."""
        self._process.kill()
        self._process.communicate()

    def leave(self) -> None:
        """Let it close its store and end."""
        self._process.communicate("", timeout=30)


@pytest.fixture
async def start(short_path: Path) -> AsyncIterator[Callable[..., object]]:
    """Starts (or joins) the server of one directory; closes what was started."""
    tasks, failed = Tasks(lambda name, error: failed.append(error)), []
    async with AsyncExitStack() as stack:

        async def started(directory: Path = short_path / "data") -> EmbeddedServer:
            server = await EmbeddedServer.start(directory, tasks.spawn, silent)
            stack.push_async_callback(server.close)
            return server

        yield started
    await tasks.finish(1)
    assert not failed


def _socket(server: EmbeddedServer) -> Path:
    return Path(server.url.removeprefix("unix://"))


def _pid(directory: Path) -> int:
    return int((directory / "valkey.pid").read_text() or 0)  # empty for a moment while a server writes its own


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie is dead; only its parent has not looked yet.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def _ask(server: EmbeddedServer, line: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(_socket(server)))
    writer.write(line + b"\r\n")
    answer = await reader.read(4096)
    writer.close()
    return answer


async def test_it_is_private(start: Callable[..., object], short_path: Path) -> None:
    """The server listens on no port, in a directory and on a socket for its owner only, in its own session."""
    server = await start()
    assert server.owner
    assert await is_answering(_socket(server))
    assert stat.S_IMODE((short_path / "data").stat().st_mode) == 0o700
    assert stat.S_IMODE(_socket(server).stat().st_mode) == 0o700
    assert b"\r\n0\r\n" in await _ask(server, b"CONFIG GET port")
    assert b"volatile-lru" in await _ask(server, b"CONFIG GET maxmemory-policy")
    assert str(256 * 1024 * 1024).encode() in await _ask(server, b"CONFIG GET maxmemory")
    assert b"everysec" in await _ask(server, b"CONFIG GET appendfsync")
    pid = _pid(short_path / "data")
    assert os.getsid(pid) == pid != os.getsid(0)


async def test_it_ends_with_its_owner(start: Callable[..., object], short_path: Path) -> None:
    """After the owner has closed, no server process and nobody on the socket is left."""
    server = await start()
    pid = _pid(short_path / "data")
    await server.close()
    assert not _alive(pid)
    assert not await is_answering(_socket(server))
    await server.close()


@pytest.mark.slow
async def test_a_frozen_server_does_not_outlive_its_owner(
    start: Callable[..., object], short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not react to being asked to stop is ended by force."""
    monkeypatch.setattr("proxy.store.embedded.STOP", 0.3)
    server = await start()
    pid = _pid(short_path / "data")
    os.kill(pid, signal.SIGSTOP)
    await server.close()
    assert not _alive(pid)


@pytest.mark.slow
async def test_an_owner_that_leaves_while_its_server_starts_again_does_not_wait_for_it(
    start: Callable[..., object], short_path: Path
) -> None:
    """A server that does not listen yet is ended as soon as one that does, and nothing is left."""
    server = await start()
    pid = _pid(short_path / "data")
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: server._child is not None and server._child.pid != pid)
    again = server._child.pid
    began = time.monotonic()
    await server.close()
    assert time.monotonic() - began < STOP / 2
    assert not _alive(again)


@pytest.mark.slow
async def test_a_killed_server_is_back_soon_with_its_data(opener: Opener) -> None:
    """After ``kill -9`` of the server the owner starts it again, and its records are there."""
    store = await opener("embedded")
    await store.records.save(TENANT, ROOT, ROUTE, A, b"x")
    await asyncio.sleep(1.2)  # the append-only file is written once a second
    first = _pid(opener.directory)
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: _pid(opener.directory) not in (0, first))

    async def found() -> bool:
        return await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"x")

    deadline = time.monotonic() + 15
    while not await found():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def test_the_server_of_a_killed_process_is_adopted_with_its_data(opener: Opener) -> None:
    """After ``kill -9`` of the proxy its server lives on, and the next proxy owns the same one and its records."""
    before = await asyncio.to_thread(Process, opener.directory, "from before")
    assert before.said == "True from before"
    pid = _pid(opener.directory)
    await asyncio.to_thread(before.kill)
    store = await opener("embedded")
    assert store.state().owner
    assert _pid(opener.directory) == pid
    assert await store.records.save(TENANT, ROOT, ROUTE, A, b"from now") == b"from before"
    os.kill(pid, signal.SIGKILL)  # not our child: its end has to be noticed all the same
    await eventually(lambda: _pid(opener.directory) not in (0, pid))
    second = _pid(opener.directory)
    await store.close()
    assert not _alive(second)


@pytest.mark.slow
async def test_a_guest_takes_over_when_the_owner_is_killed(opener: Opener) -> None:
    """A second process shares the server as a guest, and looks after it once the first is gone."""
    first = await asyncio.to_thread(Process, opener.directory, "first")
    store = await opener("embedded")
    assert store.state().owner is False
    assert await store.records.save(TENANT, ROOT, ROUTE, A, b"second") == b"first"
    pid = _pid(opener.directory)
    await asyncio.to_thread(first.kill)
    await eventually(lambda: bool(store.state().owner))
    assert _pid(opener.directory) == pid
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"first")
    await store.close()
    assert not _alive(pid)


async def test_an_owner_that_leaves_hands_the_running_server_over(opener: Opener) -> None:
    """While a guest is there the owner leaves without stopping the server, and the last one stops it."""
    first = await asyncio.to_thread(Process, opener.directory, "first")
    second = await asyncio.to_thread(Process, opener.directory, "second")
    assert (first.said, second.said) == ("True first", "False first")
    pid = _pid(opener.directory)
    await asyncio.to_thread(first.leave)
    assert _alive(pid)
    await asyncio.to_thread(second.leave)
    assert not _alive(pid)


async def test_many_that_leave_together_leave_no_server(short_path: Path) -> None:
    """However owner and guests interleave when all leave at once, the server is stopped."""
    tasks = Tasks(lambda name, error: None)
    directory = short_path / "data"
    for _ in range(5):
        servers = [await EmbeddedServer.start(directory, tasks.spawn, silent) for _ in range(4)]
        assert [server.owner for server in servers] == [True, False, False, False]
        pid = _pid(directory)
        await asyncio.gather(*(server.close() for server in servers))
        assert not _alive(pid)


async def test_many_that_come_together_share_one_server(short_path: Path) -> None:
    """Of several that start at once exactly one is the owner, and all reach the same server."""
    tasks = Tasks(lambda name, error: None)
    servers = await asyncio.gather(*(EmbeddedServer.start(short_path / "data", tasks.spawn, silent) for _ in range(5)))
    assert sum(server.owner for server in servers) == 1
    assert len({server.url for server in servers}) == 1
    for server in servers:
        await server.close()


async def test_a_long_path_gets_a_socket_elsewhere(start: Callable[..., object], short_path: Path) -> None:
    """When the directory's path is too long for a socket, one in a private directory is used, also by guests."""
    deep = short_path / ("d" * 60) / ("e" * 60)
    owner, guest = await start(deep), await start(deep)
    assert (owner.owner, guest.owner) == (True, False)
    assert owner.url == guest.url
    assert len(os.fsencode(_socket(owner))) < 104
    assert stat.S_IMODE(_socket(owner).parent.stat().st_mode) == 0o700
    assert await is_answering(_socket(guest))
    where = _socket(owner).parent
    await guest.close()
    await owner.close()
    again = await start(deep)
    assert _socket(again).parent == where
    await again.close()
    where.rmdir()


async def test_a_socket_that_was_cleaned_away_comes_back(start: Callable[..., object], short_path: Path) -> None:
    """If the socket is removed, the server that cannot be reached any more is replaced by one that can."""
    server = await start()
    _socket(server).unlink()
    await eventually(lambda: _socket(server).exists())
    deadline = time.monotonic() + 10
    while not await is_answering(_socket(server)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_a_path_that_cannot_be_used_is_memory_with_a_warning(opener: Opener, short_path: Path) -> None:
    """A data directory that cannot be made turns the store into memory, says so, and everything works."""
    (short_path / "file").write_text("in the way")
    store = await opener("embedded", directory=short_path / "file" / "data")
    assert (store.state().kind, store.state().up, store.records.reachable()) == ("memory", False, True)
    assert opener.events == ["store.memory_instead"]
    assert str(short_path) in str(opener.warned[0][1]["cause"])
    assert await store.records.save(TENANT, ROOT, ROUTE, A, b"x") == b"x"


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may write everywhere")
async def test_a_directory_without_write_permission_is_refused(short_path: Path) -> None:
    """A directory that may not be written is named in the error."""
    with pytest.raises(EmbeddedUnavailable, match="/proc"):
        await EmbeddedServer.start(Path("/proc/1"), Tasks(lambda name, error: None).spawn, silent)


async def test_a_platform_without_a_binary_is_memory_with_a_warning(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a server for the platform the store is memory, and the warning names the platform."""
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    store = await opener("embedded")
    assert store.state().kind == "memory"
    assert "linux-riscv64" in str(opener.warned[0][1]["cause"]) or "darwin-riscv64" in str(opener.warned[0][1])


async def test_a_server_that_cannot_start_says_where_the_reason_is(short_path: Path) -> None:
    """When the server ends at once, the error names its log, and the data is where it was."""
    data = short_path / "data"
    (data / "valkey.log").mkdir(parents=True)
    (data / "appendonlydir").mkdir()
    (data / "appendonlydir" / "kept").write_text("x")
    with pytest.raises(EmbeddedUnavailable, match=r"valkey\.log"):
        await EmbeddedServer.start(data, Tasks(lambda name, error: None).spawn, silent)
    assert (data / "appendonlydir" / "kept").read_text() == "x"
    assert not (data / "appendonlydir.damaged").exists()


def _garbled(data: Path) -> None:
    (increments,) = data.glob("*.incr.aof")
    increments.write_bytes(b"*3\r\nnonsense" + increments.read_bytes()[20:])


def _a_file(data: Path) -> None:
    shutil.rmtree(data)
    data.write_text("in the way")


def _of_a_later_version(data: Path) -> None:
    (base,) = data.glob("*.base.rdb")
    base.write_bytes(b"REDIS9999" + base.read_bytes()[9:])


def _without_its_manifest_readable(data: Path) -> None:
    next(data.glob("*.manifest")).write_text("nonsense\n")


@pytest.mark.parametrize("spoil", [_garbled, _a_file, _of_a_later_version, _without_its_manifest_readable])
@pytest.mark.slow
async def test_damaged_data_is_moved_aside_and_begun_anew(opener: Opener, spoil: Callable[[Path], None]) -> None:
    """A store whose data cannot be read is embedded and up again, empty, says where the old data is, and lasts."""
    data, aside = opener.directory / "appendonlydir", opener.directory / "appendonlydir.damaged"
    for damaged in (1, 2):
        store = await opener("embedded")
        await store.records.save(TENANT, ROOT, ROUTE, A, b"old")
        await store.close()
        spoil(data)
        store = await opener("embedded")
        assert (store.state().kind, store.state().up) == ("embedded", True)
        assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) is None
        assert opener.events == ["store.begun_anew"] * damaged
        assert opener.warned[-1][1]["moved_to"] == str(aside)
        assert aside.exists()
        await store.records.save(TENANT, ROOT, ROUTE, A, b"new")
        await store.close()
        store = await opener("embedded")
        assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"new")
        await store.close()


@pytest.mark.slow
async def test_data_that_is_damaged_under_a_running_proxy_is_begun_anew(opener: Opener) -> None:
    """A server that died and cannot read its data comes back without it, and nobody has to restart the proxy."""
    store = await opener("embedded")
    await store.records.save(TENANT, ROOT, ROUTE, A, b"old")
    await asyncio.sleep(1.2)  # the append-only file is written once a second
    os.kill(_pid(opener.directory), signal.SIGSTOP)
    _garbled(opener.directory / "appendonlydir")
    os.kill(_pid(opener.directory), signal.SIGKILL)
    await eventually(lambda: "store.begun_anew" in opener.events, 30)
    await eventually(lambda: store.state().up, 30)
    deadline = time.monotonic() + 15
    while await store.records.save(TENANT, ROOT, ROUTE, A, b"new") != b"new" or not store.state().up:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def test_a_missing_server_gives_no_reply(short_path: Path) -> None:
    """Asking a socket without a server is an empty answer, not an error."""
    assert await send_command(short_path / "nobody", b"PING\r\n") == b""


def test_one_holder_at_a_time_and_many_that_share(tmp_path: Path) -> None:
    """An exclusive lock keeps everybody out; shared ones keep only the exclusive one out."""
    one, two, three = (FileLock(tmp_path / "lock") for _ in range(3))
    assert one.acquire()
    assert not two.acquire()
    assert not two.acquire(shared=True)
    one.release()
    assert two.acquire(shared=True)
    assert three.acquire(shared=True)
    assert not one.acquire()
    assert (one.is_held, two.is_held, three.is_held) == (False, True, True)
    two.close()
    three.release()
    assert one.acquire()
    one.close()
    three.close()


def test_a_lock_that_was_handed_to_a_child_lasts_as_long_as_the_child(tmp_path: Path) -> None:
    """Closing our handle leaves the lock with the child that inherited it, and only with that one."""
    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert lock.acquire()
    wait = [sys.executable, "-c", "input()"]
    heir = subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=(lock.handle,))
    stranger = subprocess.Popen(wait, stdin=subprocess.PIPE)
    lock.close()
    assert not other.acquire()
    heir.communicate(b"\n")
    assert other.acquire()
    stranger.communicate(b"\n")
    other.close()
