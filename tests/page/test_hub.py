"""The hub: one page for all workers, and what it says of those that do not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.page.board import LIVE_SECONDS, Board, Row
from proxy.page.hub import Hub, joined_row
from proxy.page.workers import WorkerSocket
from proxy.settings import Prices
from tests.page.test_board import report

PRICES = {"m": Prices(4e-6, 1e-6, 8e-6)}


class Workers:
    """Two workers that share a folder; the first one's hub is looked at."""

    def __init__(self, folder: Path) -> None:
        self.time = 0.0
        self.boards = [Board(10, now=lambda: self.time) for _ in range(2)]
        self.sockets = [WorkerSocket(board, folder, index, 2) for index, board in enumerate(self.boards)]
        status = {"version": "test", "models": []}
        self.hub = Hub(self.boards[0], self.sockets[0].others, lambda: status, lambda models: PRICES)

    async def __aenter__(self) -> Workers:
        for socket in self.sockets:
            await socket.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for socket in self.sockets:
            socket.close()

    def served(self, worker: int, at: float, name: str, **facts: object) -> None:
        self.boards[worker].reports.append((at, report(name, **facts)))


async def test_a_page_shows_the_conversations_of_all_workers(folder: Path) -> None:
    """Conversations of every worker have a row, and one that two workers served has one row."""
    async with Workers(folder) as workers:
        workers.served(0, 1.0, "a")
        workers.served(0, 2.0, "both", after=500)
        workers.served(1, 3.0, "both", after=400, event=True)
        await workers.hub.refresh()
        both = workers.hub.rows["both"]
        assert sorted(workers.hub.rows) == ["a", "both"]
        assert (both.tokens, both.requests, both.compactions, both.first, both.last) == (400, 2, 1, 2.0, 3.0)
        assert [fill for _, fill, _ in both.trend] == [500, 400]
        shown = workers.hub.snapshot()
        assert (shown.workers, shown.answered, shown.models["m"].requests) == (2, 2, 3)
        detail = await workers.hub.detail("both")
        assert detail is not None
        assert [point[2] for point in detail.points] == [500, 400]
        assert await workers.hub.detail("nowhere") is None


async def test_rows_that_did_not_change_stay_the_same_object(folder: Path) -> None:
    """Open pages are sent the rows whose objects are new."""
    async with Workers(folder) as workers:
        for worker in (0, 1):
            workers.served(worker, 1.0, "both")
        workers.served(1, 1.0, "other")
        await workers.hub.refresh()
        before = dict(workers.hub.rows)
        workers.served(1, 2.0, "other", after=700)
        await workers.hub.refresh()
        assert workers.hub.rows["both"] is before["both"]
        assert workers.hub.rows["other"] is not before["other"]


async def test_a_conversation_that_is_not_live_any_more_has_no_row(folder: Path) -> None:
    """Each worker says which of its conversations are live; a row of all others goes."""
    async with Workers(folder) as workers:
        workers.served(0, 0.0, "idle")
        workers.served(1, 0.0, "idle too")
        workers.served(1, LIVE_SECONDS, "live")
        await workers.hub.refresh()
        assert sorted(workers.hub.rows) == ["idle", "idle too", "live"]
        workers.time = LIVE_SECONDS + 1
        await workers.hub.refresh()
        assert list(workers.hub.rows) == ["live"]


async def test_a_worker_that_does_not_answer_is_said_to_be_missing(folder: Path) -> None:
    """Conversations that it alone served are not shown any more."""
    async with Workers(folder) as workers:
        workers.served(1, 1.0, "gone")
        await workers.hub.refresh()
        assert "gone" in workers.hub.rows
        workers.sockets[1].close()
        await workers.hub.refresh()
        assert workers.hub.rows == {}
        assert (workers.hub.snapshot().answered, workers.hub.snapshot().workers) == (1, 2)


async def test_a_restarted_worker_is_asked_for_all_rows(folder: Path) -> None:
    """Its versions begin anew with it."""
    async with Workers(folder) as workers:
        for second in range(5):
            workers.served(1, second, f"old{second}")
            await workers.hub.refresh()
        workers.sockets[1].close()
        board = Board(10, now=lambda: 0.0)
        board.reports.append((9.0, report("new")))
        workers.sockets[1] = WorkerSocket(board, workers.sockets[1]._path.parent, 1, 2)
        await workers.sockets[1].start()
        await workers.hub.refresh()
        await workers.hub.refresh()
        assert list(workers.hub.rows) == ["new"]


@pytest.mark.parametrize("answer", [b"", b"{", b'{"rows": 1}'])
async def test_a_broken_answer_is_no_answer(folder: Path, answer: bytes) -> None:
    """A process that dies while it writes counts as one that does not answer."""
    async with Workers(folder) as workers:
        workers.sockets[1].close()

        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(answer)
            writer.close()

        server = await asyncio.start_unix_server(reply, workers.sockets[1]._path)
        await workers.hub.refresh()
        server.close()
        assert workers.hub.snapshot().answered == 1


async def test_money_is_counted_at_the_price_of_cached_input_and_only_if_it_is_known(folder: Path) -> None:
    """The least that the tokens kept back would have cost."""
    async with Workers(folder) as workers:
        await workers.hub.refresh()
        assert workers.hub.snapshot().saved is None
        workers.served(0, 1.0, "a")
        workers.served(0, 1.0, "b", model="house-model")
        await workers.hub.refresh()
        shown = workers.hub.snapshot()
        assert shown.saved == pytest.approx(300 * 1e-6)
        assert shown.unpriced == ["house-model"]


async def test_pages_are_woken_by_the_tick_and_by_the_end(folder: Path) -> None:
    """An open page must not keep a process from ending."""
    async with Workers(folder) as workers:
        waiting = asyncio.ensure_future(workers.hub.next_tick())
        await asyncio.sleep(0)
        assert not waiting.done()
        workers.hub.close()
        await asyncio.wait_for(waiting, 60)
        await asyncio.wait_for(workers.hub.next_tick(), 60)


def test_one_worker_s_row_is_taken_as_it_is() -> None:
    """Nothing is copied for the usual case."""
    row = Row("a")
    assert joined_row([row]) is row
