"""The embedded store: several processes, ``kill -9``, slow and full disks, files that vanish or break while open."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from proxy.store import key_names
from proxy.store.backend import EmbeddedUnavailable
from proxy.store.operations import Claim, Read, Remove, Unavailable
from proxy.store.sqlite import SqliteBackend, kind_of
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
    print(held.decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await store.close()

asyncio.run(main())
"""

# Claims every key, once the other process is there, and prints the number of those that it won.
CLAIMS = """
import asyncio, sys
from pathlib import Path
from proxy.store import deadlines
from proxy.store.operations import Claim, Read
from proxy.store.sqlite import SqliteBackend

deadlines.OPERATION = deadlines.REQUEST = deadlines.CONNECT = 30.0
folder, mine, theirs = sys.argv[1:]

async def main():
    backend = SqliteBackend(Path(folder), warn=lambda event, facts: None)
    await backend.connect()
    await backend.run(Claim(mine, b"here", None))
    while await backend.run(Read([theirs])) == [None]:
        await asyncio.sleep(0.001)
    won, numbers = 0, range(3000)
    if mine == "two":
        numbers = reversed(numbers)  # they meet in the middle
    for number in numbers:
        won += await backend.run(Claim(f"k{number}", mine.encode(), 60)) is None
    print(won, flush=True)
    await backend.close()

asyncio.run(main())
"""

# Holds the lock of the file's writers until its input ends.
LOCKER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


class Process:
    """Another process on the same directory."""

    def __init__(self, code: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.line = self._process.stdout.readline().strip()

    def kill(self) -> None:
        """End it without a chance to tidy up."""
        self._process.kill()
        self._process.communicate()

    def leave(self) -> None:
        """Let it close its store and end."""
        self._process.communicate("", timeout=60)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[SqliteBackend]:
    """An open store."""
    opened = SqliteBackend(tmp_path / "data", warn=lambda event, facts: None)
    await opened.connect()
    yield opened
    await opened.close()


async def until_in_place(backend: SqliteBackend) -> None:
    """Read until that is done in place: a read that was slow leaves it to the next one to open the connection."""
    for _ in range(3_000):
        if backend._reader is not None:
            return
        await backend.run(Read(["none"]))
        await asyncio.sleep(0.02)
    raise AssertionError("reads are never done in place")


@pytest.mark.slow
async def test_two_processes_win_each_claim_once(tmp_path: Path) -> None:
    """Of 3,000 claims that two processes make at once, each is won by one of them."""
    names = ("one", "two")
    pairs = zip(names, reversed(names), strict=True)
    both = (asyncio.to_thread(Process, CLAIMS, tmp_path / "data", *pair) for pair in pairs)
    processes = await asyncio.gather(*both)
    won = [int(process.line) for process in processes]
    for process in processes:
        process.leave()
    assert sum(won) == 3000
    assert min(won) > 0


@pytest.mark.slow
async def test_kill_9_loses_nothing(opener: Opener) -> None:
    """What a process was told is stored is there after its ``kill -9``, at once."""
    process = await asyncio.to_thread(Process, PROCESS, opener.directory, "from before")
    assert process.line == "from before"
    await asyncio.to_thread(process.kill)
    store = await opener("embedded")
    assert await store.records.save(TENANT, ROOT, ROUTE, A, b"from now") == b"from before"
    assert opener.events == []


@pytest.mark.slow
async def test_processes_share_a_directory(opener: Opener) -> None:
    """What one writes another reads at once, and one that leaves or is killed takes nothing along."""
    store = await opener("embedded")
    await store.records.save(TENANT, ROOT, ROUTE, A, b"first")
    for end in (Process.leave, Process.kill):
        process = await asyncio.to_thread(Process, PROCESS, opener.directory, "second")
        assert process.line == "first"
        await asyncio.to_thread(end, process)
        assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"first")
        assert store.state().up
    await store.close()
    assert await (await opener("embedded")).records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"first")


async def test_reads_are_in_place_and_see_what_was_written(
    backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read after a write has it, also from another connection of another process."""
    monkeypatch.setattr("proxy.store.sqlite.SLOW_READ", 60.0)  # a busy machine makes any read a slow one
    await until_in_place(backend)
    for number in range(50):
        assert await backend.run(Claim(f"k{number}", b"%d" % number, 60)) is None
        assert backend._read_in_place(Read([f"k{number}"])) == [b"%d" % number]


async def test_the_version_changes_with_what_others_write(
    backend: SqliteBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays as it is with this process's own writes, and changes with one of another process, before or behind."""
    monkeypatch.setattr("proxy.store.sqlite.LOOK_AGAIN", 3600.0)
    await until_in_place(backend)
    before = backend.version()
    assert before is not None
    await backend.run(Read(["k"]))
    await backend.run(Claim("k", b"1", 60))
    assert backend.version() == before
    other = SqliteBackend(tmp_path / "data", warn=lambda event, facts: None)
    seen = {before}
    for number in range(3):
        await other.run(Claim(f"l{number}", b"1", 60))
        await backend.run(Claim(f"k{number}", b"1", 60))
        now = backend.version()
        assert now is not None
        assert now not in seen
        seen.add(now)
    await other.close()


async def test_the_version_changes_with_what_nobody_counted(
    backend: SqliteBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What writes without counting is noticed at the next look at the file itself."""
    await until_in_place(backend)
    monkeypatch.setattr("proxy.store.sqlite.LOOK_AGAIN", 0.0)
    before = backend.version()
    with sqlite3.connect(tmp_path / "data" / "store.db") as connection:
        connection.execute("DELETE FROM entries")
    connection.close()
    assert backend.version() not in (None, before)


def make_unwritable(path: Path) -> None:
    """Let every descriptor of this process that has *path* open only read it."""
    folder = Path("/proc/self/fd")
    opened = [int(each.name) for each in folder.iterdir() if each.exists() and each.samefile(path)]
    assert opened
    readable = os.open(path, os.O_RDONLY)
    for descriptor in opened:
        os.dup2(readable, descriptor, inheritable=False)
    os.close(readable)


async def test_a_write_that_cannot_be_counted_is_done(backend: SqliteBackend, tmp_path: Path) -> None:
    """What is in the file is not reported as failed; another process sees it at its next look at the file."""
    counts = tmp_path / "data" / "store.lock"
    make_unwritable(counts)
    before = counts.read_bytes()
    assert await backend.run(Claim("k", b"1", 60)) is None
    assert await backend.run(Claim("k", b"2", 60)) == b"1"
    assert counts.read_bytes() == before


async def test_the_version_is_unknown_where_no_read_is_in_place(
    backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause, and while the connection is opened anew, the store has to be read."""
    await until_in_place(backend)
    before = backend.version()
    backend._retire_reader()
    assert backend.version() is None
    assert await backend.run(Read(["k"])) == [None]
    await until_in_place(backend)
    assert backend.version() not in (None, before)
    monkeypatch.setattr("proxy.store.sqlite.IDLE", 0.05)
    await asyncio.sleep(0.1)
    assert backend.version() is None


async def test_a_slow_read_sends_the_next_ones_to_the_thread(
    backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slow read in place is enough; values are found all the same, and the loop is not held up again."""
    await until_in_place(backend)
    await backend.run(Claim("k", b"1", 60))
    monkeypatch.setattr("proxy.store.sqlite.SLOW_READ", 0.0)
    assert backend._read_in_place(Read(["k"])) == [b"1"]
    assert backend._read_in_place(Read(["k"])) is None
    assert await backend.run(Read(["k"])) == [b"1"]
    assert backend.breaker == "closed"


async def test_a_look_at_the_version_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on after a slow read, and leaves the trial whether reads are fast again to a read."""
    ahead = [0.0]
    backend = SqliteBackend(
        tmp_path / "data", warn=lambda event, facts: None, clock=lambda: time.monotonic() + ahead[0]
    )
    await backend.connect()
    await until_in_place(backend)
    monkeypatch.setattr("proxy.store.sqlite.IDLE", 3600.0)
    monkeypatch.setattr("proxy.store.sqlite.SLOW_READ", 0.0)
    before = backend.version()
    assert backend._read_in_place(Read(["k"])) == [None]
    assert backend._read_in_place(Read(["k"])) is None
    assert backend.version() == before
    monkeypatch.setattr("proxy.store.sqlite.SLOW_READ", 3600.0)
    ahead[0] = 60.0
    assert backend.version() is not None
    assert backend._read_in_place(Read(["k"])) == [None]
    await backend.close()


async def test_a_read_after_a_pause_goes_through_the_thread(
    backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may have dropped the file from memory; after that one, reads are in place again."""
    await until_in_place(backend)
    await backend.run(Claim("k", b"1", 60))
    monkeypatch.setattr("proxy.store.sqlite.IDLE", 0.05)
    await asyncio.sleep(0.1)
    assert backend._read_in_place(Read(["k"])) is None
    assert await backend.run(Read(["k"])) == [b"1"]
    assert backend._read_in_place(Read(["k"])) == [b"1"]


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_a_disk_that_hangs_costs_its_deadline_only(backend: SqliteBackend, tmp_path: Path) -> None:
    """While the file cannot be written, each write waits its deadline, soon none does, and reads go on."""
    await backend.run(Claim("before", b"1", 60))
    locker = await asyncio.to_thread(Process, LOCKER, tmp_path / "data" / "store.db")
    for number in range(20):
        async with asyncio.timeout(60):
            with pytest.raises(Unavailable, match=r"slow|open"):
                await backend.run(Claim(f"k{number}", b"1", 60))
    await eventually(lambda: backend.breaker == "open")
    await asyncio.to_thread(locker.kill)
    deadline = time.monotonic() + 60
    while backend.breaker != "closed":
        assert time.monotonic() < deadline
        await backend.probe()
        await asyncio.sleep(0.1)
    assert await backend.run(Read(["before"])) == [b"1"]
    assert await backend.run(Claim("after", b"1", 60)) is None


@pytest.mark.slow
async def test_a_full_disk_refuses_writes_and_goes_on(opener: Opener) -> None:
    """Writes and removals are refused, which the state says; records are read on, and all is well with room again."""
    store = await opener("embedded")
    await store.records.save(TENANT, ROOT, ROUTE, A, b"x")
    log = (opener.directory / "store.db-wal").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log, hard))
    try:
        assert await store.records.save(TENANT, ROOT, ROUTE, b"b" * 16, b"y") == b"y"
        with pytest.raises(Unavailable, match="disk"):
            await store._access.backend.run(Remove(key_names.record_name(ROOT, ROUTE, A)))
        assert (store.state().up, store.state().refusal, store.state().breaker) == (False, "disk", "closed")
        assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"x")
        assert "store.refused" in opener.events
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await eventually(lambda: store.state().up, 60)
    assert await store.records.save(TENANT, ROOT, ROUTE, b"c" * 16, b"z") == b"z"
    assert await store.records.newest(TENANT, ROOT, ROUTE, [b"c" * 16, A]) == (0, b"z")


async def test_a_directory_that_is_deleted_while_open_is_begun_anew(opener: Opener) -> None:
    """The next write creates it again, and every reader of this and other processes sees the new file."""
    one, two = await opener("embedded"), await opener("embedded")
    await one.records.save(TENANT, ROOT, ROUTE, A, b"old")
    shutil.rmtree(opener.directory)
    assert await one.records.save(TENANT, ROOT, ROUTE, A, b"new") == b"new"
    assert await one.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"new")
    assert await two.records.save(TENANT, ROOT, ROUTE, A, b"other") == b"new"
    assert await two.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"new")
    assert one.state().up
    assert two.state().up


def _garbled(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * (len(content) - 100))


def _emptied(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(0)


@pytest.mark.parametrize("spoil", [_garbled, _emptied])
@pytest.mark.slow
async def test_damage_while_open_is_moved_aside(opener: Opener, spoil: Callable[[Path], None]) -> None:
    """A file that breaks under a running proxy costs its records and nothing else."""
    store = await opener("embedded")
    for number in range(400):
        await store.records.save(TENANT, ROOT, ROUTE, number.to_bytes(16, "big"), b"old" * 400)
    await store.close()
    store = await opener("embedded")
    await store.records.save(TENANT, ROOT, ROUTE, A, b"old")
    spoil_in_another_process(spoil, opener.directory / "store.db")
    for number in range(400):
        await store.records.newest(TENANT, ROOT, ROUTE, [number.to_bytes(16, "big")])
    await eventually(lambda: "store.begun_anew" in opener.events)
    assert opener.events.count("store.begun_anew") == 1
    assert (opener.directory / "store.db.damaged").exists()
    assert await store.records.save(TENANT, ROOT, ROUTE, b"n" * 16, b"new") == b"new"
    assert await store.records.newest(TENANT, ROOT, ROUTE, [b"n" * 16]) == (0, b"new")
    assert store.state().up


def spoil_in_another_process(spoil: Callable[[Path], None], path: Path) -> None:
    """Run *spoil* elsewhere: closing the file here would end SQLite's locks on it."""
    code = f"import sys; from pathlib import Path; from {__name__} import {spoil.__name__} as spoil; "
    subprocess.check_call([sys.executable, "-c", code + "spoil(Path(sys.argv[1]))", str(path)])


async def test_a_path_that_cannot_be_used_is_memory_with_a_warning(opener: Opener, short_path: Path) -> None:
    """A data directory that cannot be made turns the store into memory, says so, and everything works."""
    (short_path / "file").write_text("in the way")
    store = await opener("embedded", directory=short_path / "file" / "data")
    assert (store.state().kind, store.state().up, store.records.reachable()) == ("memory", False, True)
    assert opener.events == ["store.memory_instead"]
    assert str(short_path) in str(opener.warned[0][1]["cause"])
    assert await store.records.save(TENANT, ROOT, ROUTE, A, b"x") == b"x"


async def test_a_directory_without_write_permission_is_named() -> None:
    """A directory that may not be written is named in the error."""
    backend = SqliteBackend(Path("/proc/1/data"), warn=lambda event, facts: None)
    with pytest.raises(EmbeddedUnavailable, match=r"store\.path /proc/1/data cannot be used"):
        await backend.open()
    with pytest.raises(Unavailable, match="down"):
        await backend.connect()
    await backend.close()


async def test_the_log_is_copied_into_the_file(backend: SqliteBackend, tmp_path: Path) -> None:
    """However much is written, the log stays small."""
    for number in range(40):
        await backend.run(Claim(f"k{number}", bytes(1_000_000), 60))
    assert (tmp_path / "data" / "store.db-wal").stat().st_size < 30_000_000
    assert (tmp_path / "data" / "store.db").stat().st_size > 20_000_000


async def test_nothing_readable_is_in_the_file(opener: Opener) -> None:
    """Neither a record nor a tenant can be read from the disk."""
    store = await opener("embedded")
    await store.records.save(TENANT, ROOT, ROUTE, A, b"the secret summary " * 50)
    await store.close()
    content = (opener.directory / "store.db").read_bytes()
    assert b"ullage1:" in content
    for text in (b"secret", TENANT, b"gpt-5", b"ullage1:master"):
        assert text not in content


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_FULL, "disk"),
        (sqlite3.SQLITE_READONLY, "disk"),
        (sqlite3.SQLITE_IOERR_WRITE, "disk"),
        (sqlite3.SQLITE_IOERR_READ, "down"),
        (sqlite3.SQLITE_CANTOPEN, "down"),
        (sqlite3.SQLITE_BUSY, "slow"),
        (sqlite3.SQLITE_BUSY_RECOVERY, "slow"),
    ],
)
def test_every_failure_has_a_name(code: int, kind: str) -> None:
    """Errors of the file have the kinds that servers have."""
    error = sqlite3.OperationalError()
    error.sqlite_errorcode = code
    assert kind_of(error) == kind
    assert kind_of(OSError()) == "down"
    assert kind_of(ValueError()) == "wrongtype"


@pytest.mark.slow
async def test_a_file_that_is_locked_at_the_start_is_used_once_it_is_free(opener: Opener, short_path: Path) -> None:
    """Another program that has the file locked for longer than a start may wait does not make the store memory."""
    path = short_path / "data" / "store.db"
    first = await opener("embedded")
    await first.records.save(TENANT, ROOT, ROUTE, A, b"x")
    await first.close()
    hold = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('PRAGMA journal_mode=DELETE'); "
    hold += "c.execute('PRAGMA locking_mode=EXCLUSIVE'); c.execute('BEGIN EXCLUSIVE'); print('held', flush=True); "
    holder = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"{hold} sys.stdin.read()",
        str(path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    store = await opener("embedded")
    assert (store.state().kind, store.state().instead) == ("embedded", False)
    holder.stdin.close()
    await holder.wait()
    await eventually(lambda: store.state().up, 60)
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"x")
    assert "store.memory_instead" not in opener.events
