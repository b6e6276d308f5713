"""The thread: batches, errors, and its end."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.store.operations import Add, Claim
from proxy.store.sqlite_entries import SqliteEntries
from proxy.store.sqlite_file import StoreFile
from proxy.store.sqlite_worker import Worker

MB = 1024 * 1024


@pytest.fixture
async def writer(tmp_path: Path) -> AsyncIterator[Worker]:
    """A thread that writes."""
    worker = Worker("test writer", StoreFile(tmp_path / "data", lambda event, facts: None), MB)
    yield worker
    await worker.close(10)
    assert "test writer" not in [thread.name for thread in threading.enumerate()]


async def test_what_waits_is_one_transaction(writer: Worker) -> None:
    """While one operation holds the thread up, others gather; all of them are done together, in order."""
    going = threading.Event()
    held = writer.submit(lambda file: going.wait(60))
    while writer.busy_since is None:  # noqa: ASYNC110 - the state of a thread
        await asyncio.sleep(0.001)
    changes: list[int] = []

    def count(file: SqliteEntries) -> None:
        changes.append(file._connection.total_changes)
        Add("k", 1, 60).on_entries(file)

    waiting = [writer.submit(count) for _ in range(20)]
    going.set()
    await asyncio.gather(held, *waiting)
    assert await writer.submit(lambda file: file.read(["k"])) == [b"20"]
    assert changes == list(range(20)), "in order, on one connection"


async def test_an_error_fails_its_batch_and_the_next_one_goes_on(writer: Worker, tmp_path: Path) -> None:
    """If the directory cannot be created, operations fail; once it can be, they work."""
    await writer.submit(Claim("k", b"1", 60).on_entries)
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "data").write_text("in the way")
    for _ in range(2):
        with pytest.raises(OSError, match="data"):
            await writer.submit(Claim("k", b"2", 60).on_entries)
    (tmp_path / "data").unlink()
    assert await writer.submit(Claim("k", b"3", 60).on_entries) is None


async def test_the_file_stays_within_its_bound(writer: Worker, tmp_path: Path) -> None:
    """However much is written, old entries make room, and the newest is there."""
    for number in range(400):
        await writer.submit(Claim(f"k{number}", bytes(10_000), 60).on_entries)
    used = await writer.submit(lambda file: file.bytes_used())
    assert used < MB + 64 * 1024
    assert await writer.submit(lambda file: file.read(["k399"])) == [bytes(10_000)]


async def test_a_caller_that_left_is_no_error(writer: Worker) -> None:
    """The result of a cancelled operation is dropped; it was done all the same."""
    writer.submit(Claim("k", b"1", 60).on_entries).cancel()
    assert await writer.submit(lambda file: file.read(["k"])) == [b"1"]


async def test_what_was_submitted_is_done_before_the_end(tmp_path: Path) -> None:
    """Closing waits for what waits."""
    file = StoreFile(tmp_path / "data", lambda event, facts: None)
    worker = Worker("test writer", file, MB)
    waiting = [worker.submit(Add("k", 1, 60).on_entries) for _ in range(600)]
    await worker.close(10)
    await asyncio.gather(*waiting)
    entries = file.open()
    assert entries.read(["k"]) == [b"600"]
    entries.close()
