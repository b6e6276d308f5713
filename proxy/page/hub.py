"""Joins the boards of all workers for the page, once a second while one is open.

Each worker answers with its changes since the version of its last answer. A conversation that several workers served is
one row: the newest request's figures, and sums over all workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from proxy.page.board import MOST_COMPACTIONS, MOST_POINTS, TREND, Board, Changes, Detail, Row, Totals
from proxy.page.workers import Question, ask
from proxy.settings.packaged_data import Prices

_SUMMED: Final = ("requests", "compactions", "removed_sum", "input_sum", "cached_sum", "output_sum")

PricesOf = Callable[[Iterable[str]], Mapping[str, Prices]]
"""The prices of those of some models that have one; reads a file."""

StatusOf = Callable[[], Mapping[str, object]]
"""The state of this process, as the admin API shows it."""


class _WorkerState:
    """The figures of one worker's newest answer."""

    def __init__(self) -> None:
        self.worker = ""
        self.version = 0
        self.rows: dict[str, Row] = {}
        self.models: dict[str, Totals] = {}
        self.windows: list[dict[str, Any]] = []
        self.lag = 0.0
        self.missed = 0

    def apply(self, changes: Changes) -> None:
        """Apply *changes*; a worker that was started again has lost its rows."""
        if changes.worker != self.worker:
            self.rows = {}
        self.worker, self.version = changes.worker, changes.version
        self.rows.update((row.name, row) for row in changes.rows)
        names = frozenset(changes.names)
        self.rows = {name: row for name, row in self.rows.items() if name in names}
        self.models, self.windows = changes.models, changes.windows
        self.lag, self.missed = changes.lag, changes.missed


class Snapshot(msgspec.Struct):
    """The page's figures beside the conversations.

    ``answered`` of ``workers`` processes answered. ``lag`` is the longest delay of their event loops in the last
    second, in seconds. At least ``saved`` US dollars were saved; None if no price is known. ``unpriced`` models have
    none.
    """

    workers: int
    answered: int
    lag: float
    missed: int
    models: dict[str, Totals]
    windows: list[dict[str, Any]]
    saved: float | None
    unpriced: list[str]
    status: Mapping[str, object]


class Hub:
    """All workers' conversations by name, and a tick for open pages. *others* are the sockets of the other workers."""

    def __init__(self, board: Board, others: Sequence[Path], status: StatusOf, prices_of: PricesOf) -> None:
        self._board = board
        self._others = others
        self._status = status
        self._prices_of = prices_of
        self._prices: dict[str, Prices | None] = {}
        self._own = _WorkerState()
        self._others_state = {path: _WorkerState() for path in others}
        self._answered = 1
        self._ticked = asyncio.Event()
        self.rows: dict[str, Row] = {}
        self.watchers = 0
        self.closing = False

    async def update_pages(self) -> None:
        """Refresh the figures, and send them to the open pages. Call it every second while there is one."""
        await self.refresh()
        self._tick()

    def close(self) -> None:
        """End the streams to open pages: their browsers connect again, to another worker if there is one."""
        self.closing = True
        self._tick()

    async def next_tick(self) -> None:
        """Wait until the figures were refreshed, or the process ends."""
        if not self.closing:
            await self._ticked.wait()

    def _tick(self) -> None:
        self._ticked.set()
        self._ticked = asyncio.Event()

    async def refresh(self) -> None:
        """Ask all workers for their changes, and join them."""
        self._board.update()
        questions = [ask(path, Question(self._others_state[path].version), Changes) for path in self._others]
        answers = await asyncio.gather(*questions)
        self._own.apply(self._board.changes(self._own.version))
        self._answered = 1
        for path, changes in zip(self._others, answers, strict=True):
            if changes is None:
                self._others_state[path] = _WorkerState()
                continue
            self._answered += 1
            state = self._others_state[path]
            if changes.worker != state.worker and state.version:
                # Restarted: the question was about a version of its predecessor. The next one is about all rows.
                self._others_state[path] = _WorkerState()
                continue
            state.apply(changes)
        self._join()
        await self._look_up_prices()

    def _join(self) -> None:
        """Join the rows of all workers. An unchanged row stays the same object."""
        by_name: dict[str, list[Row]] = {}
        for state in self._worker_states():
            for name, row in state.rows.items():
                by_name.setdefault(name, []).append(row)
        joined: dict[str, Row] = {}
        for name, rows in by_name.items():
            row = joined_row(rows)
            before = self.rows.get(name)
            joined[name] = row
            if before is not None and before == row:
                joined[name] = before
        self.rows = joined

    async def detail(self, name: str) -> Detail | None:
        """Return conversation *name*, joined from all workers; None if it is not live."""
        self._board.update()
        answers = await asyncio.gather(*(ask(path, Question(name=name), Detail) for path in self._others))
        details = [detail for detail in (self._board.detail(name), *answers) if detail is not None]
        if not details:
            return None
        points = sorted(point for detail in details for point in detail.points)
        compactions = sorted((entry for detail in details for entry in detail.compactions), key=lambda entry: entry.at)
        row = joined_row([detail.row for detail in details])
        return Detail(row, points[-MOST_POINTS:], compactions[-MOST_COMPACTIONS:])

    def snapshot(self) -> Snapshot:
        """Return the figures of all workers beside their conversations."""
        models: dict[str, Totals] = {}
        windows: dict[tuple[object, object], dict[str, Any]] = {}
        for state in self._worker_states():
            for name, totals in state.models.items():
                models.setdefault(name, Totals()).add(totals)
            windows.update(((window["upstream"], window["model"]), window) for window in state.windows)
        saved, unpriced = self._saved(models)
        return Snapshot(
            workers=1 + len(self._others),
            answered=self._answered,
            lag=max(state.lag for state in self._worker_states()),
            missed=sum(state.missed for state in self._worker_states()),
            models=models,
            windows=sorted(windows.values(), key=lambda window: (str(window["upstream"]), str(window["model"]))),
            saved=saved,
            unpriced=unpriced,
            status=self._status(),
        )

    def _worker_states(self) -> list[_WorkerState]:
        return [self._own, *self._others_state.values()]

    async def _look_up_prices(self) -> None:
        """Look up the prices of new models; each once."""
        new = {name for state in self._worker_states() for name in state.models} - self._prices.keys()
        if new:
            prices = await asyncio.to_thread(self._prices_of, new)
            self._prices.update((name, prices.get(name)) for name in new)

    def _saved(self, models: Mapping[str, Totals]) -> tuple[float | None, list[str]]:
        """Return the US dollars that compaction saved at least, and the models without a known price.

        At best, a token that was not sent would have come from the provider's cache. So the price of a cached token is
        the least that it would have cost.
        """
        saved: float | None = None
        unpriced = []
        for name, totals in models.items():
            price = self._prices.get(name)
            if price is None:
                unpriced.append(name)
            else:
                saved = (saved or 0.0) + totals.removed * price.cached
        return saved, sorted(unpriced)


def joined_row(rows: Sequence[Row]) -> Row:
    """Return one row for the *rows* that several workers have of one conversation."""
    if len(rows) == 1:
        return rows[0]
    newest = max(rows, key=lambda row: row.last)
    sums = {name: sum(getattr(row, name) for row in rows) for name in _SUMMED}
    trend = sorted(point for row in rows for point in row.trend)[-TREND:]
    return msgspec.structs.replace(newest, first=min(row.first for row in rows), trend=trend, **sums)
