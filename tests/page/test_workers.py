"""The sockets by which workers ask each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.page.board import Board, Changes, Detail
from proxy.page.workers import Question, WorkerSocket, ask
from tests.page.test_board import report


async def test_a_worker_answers_about_what_it_serves(folder: Path) -> None:
    """Changes since a version, and one conversation; what waits to be read is read first."""
    board = Board(10, now=lambda: 0.0)
    socket = WorkerSocket(board, folder, 1, 3)
    await socket.start()
    board.reports.append((1.0, report("a")))
    path = folder / "page-1.sock"
    changes = await ask(path, Question(), Changes)
    assert changes is not None
    assert [row.name for row in changes.rows] == ["a"]
    again = await ask(path, Question(since=changes.version), Changes)
    assert again is not None
    assert (again.rows, again.names) == ([], ["a"])
    detail = await ask(path, Question(name="a"), Detail)
    assert detail is not None
    assert detail.points[0][1:3] == (900, 600)
    assert await ask(path, Question(name="b"), Detail) is None
    assert socket.others == [folder / "page-0.sock", folder / "page-2.sock"]
    socket.close()
    assert not path.exists()


async def test_a_socket_that_a_killed_worker_left_is_replaced(folder: Path) -> None:
    """A worker has the same name after a restart."""
    left = WorkerSocket(Board(1), folder, 0, 2)
    await left.start()
    socket = WorkerSocket(Board(1), folder, 0, 2)
    await socket.start()
    assert await ask(folder / "page-0.sock", Question(), Changes) is not None
    left.close()
    socket.close()


async def test_a_question_that_cannot_be_read_gets_no_answer(folder: Path) -> None:
    """The connection is closed, and the next question is answered."""
    socket = WorkerSocket(Board(1), folder, 0, 2)
    await socket.start()
    reader, writer = await asyncio.open_unix_connection(folder / "page-0.sock")
    writer.write(b"what?\n")
    assert await reader.read() == b""
    writer.close()
    assert await ask(folder / "page-0.sock", Question(), Changes) is not None
    socket.close()


async def test_a_missing_worker_has_no_answer(folder: Path) -> None:
    """None if nothing listens on its socket."""
    assert await ask(folder / "page-7.sock", Question(), Changes) is None


async def test_a_stuck_worker_has_no_answer_after_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is shown without it."""
    monkeypatch.setattr("proxy.page.workers.ANSWER_SECONDS", 0.05)
    was_left = asyncio.Event()

    async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        was_left.set()

    server = await asyncio.start_unix_server(stuck, folder / "page-1.sock")
    async with asyncio.timeout(60):
        assert await ask(folder / "page-1.sock", Question(), Changes) is None
        await was_left.wait()
    server.close()
