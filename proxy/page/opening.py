"""Builds the page of one process from the settings: its figures, its routes, its socket for other workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from proxy import settings as configuration
from proxy.engine.features import Feature
from proxy.page.board import Board, Reports
from proxy.page.hub import Hub, StatusOf
from proxy.page.recorder import ViewRecorder
from proxy.page.routes import open_page
from proxy.page.workers import WorkerSocket
from proxy.server.admin import OpenPage
from proxy.settings import Settings
from proxy.tasks import Spawn, Warn
from proxy.workers import Worker


class LivePage:
    """The page of one process: its figures and its routes. It does nothing if the settings switch the page off.

    *folder* is shared by all workers, None if there is one process only. ``features`` record each answered request.
    """

    def __init__(self, settings: Settings, worker: Worker, folder: Path | None, warn: Warn) -> None:
        telemetry, page = settings.telemetry, settings.telemetry.page
        self._warn = warn
        self._board: Board | None = None
        self._socket: WorkerSocket | None = None
        self._hub: Hub | None = None
        self._spawn: Spawn | None = None
        self._updating: asyncio.Task[None] | None = None
        self.features: Sequence[Feature] = ()
        if page.enabled:
            self._board = Board(page.conversations, text=page.text)
        if self._board is not None and folder is not None:
            self._socket = WorkerSocket(self._board, folder, worker.index, worker.count)
        if self._board is not None or telemetry.advice:
            log = None
            if telemetry.advice:
                log = warn
            tools = configuration.tool_map(settings.tools)
            self.features = (ViewRecorder(self._board, tools, log, text=page.text),)

    @property
    def reports(self) -> Reports | None:
        """The queue for reports of finished requests; None if there is no page."""
        if self._board is None:
            return None
        return self._board.reports

    def show_lag(self, worst_lag: Callable[[], float]) -> None:
        """Show the event loop's lag: *worst_lag* returns the longest since its last call, in seconds."""
        if self._board is not None:
            self._board.worst_lag = worst_lag

    def routes(self, status: StatusOf) -> OpenPage | None:
        """Return a function that opens the page's routes. *status* returns the state that the admin API shows."""
        board = self._board
        if board is None:
            return None
        board.windows = partial(_windows, status)
        others: Sequence[Path] = ()
        if self._socket is not None:
            others = self._socket.others
        if self._hub is not None:
            self._hub.close()  # open pages connect again, to the new routes
        self._hub = Hub(board, others, status, configuration.prices)
        return open_page(self._hub)

    async def start(self, spawn: Spawn) -> None:
        """Answer other workers and, at each ``tick``, update open pages from now on."""
        self._spawn = spawn
        if self._socket is None:
            return
        try:
            await self._socket.start()
        except OSError as error:
            advice = "the page of another worker lacks this one's conversations: set TMPDIR to a shorter path"
            self._warn("page.worker_apart", {"cause": error.strerror or "", "advice": advice})

    def tick(self) -> None:
        """Read the reports, and update the open pages if there are any. Call it every second."""
        if self._board is None or self._hub is None or self._spawn is None:
            return
        self._board.tick()
        is_updating = self._updating is not None and not self._updating.done()
        if self._hub.watchers and not is_updating:
            self._updating = self._spawn(self._hub.update_pages(), "update the page")

    def close(self) -> None:
        """End the streams to open pages, and stop answering other workers."""
        if self._hub is not None:
            self._hub.close()
        if self._socket is not None:
            self._socket.close()


def _windows(status: StatusOf) -> list[dict[str, Any]]:
    """Return the windows in force."""
    return cast("list[dict[str, Any]]", status()["models"])
