"""The life of a process: start, listen, change with its configuration, drain, close.

A process ends on SIGTERM. Kubernetes and systemd send SIGKILL after a grace period, which must be longer than
``server.drain``: https://kubernetes.io/docs/concepts/workloads/pods/pod-termination/ and
https://www.freedesktop.org/software/systemd/man/latest/systemd.kill.html.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from msgspec.structs import replace

from proxy import caches, garbage
from proxy.process import Process, StartOptions, Surroundings
from proxy.reload import ConfigSource, ConfigWatch, Loaded, log_configuration
from proxy.settings import Settings
from proxy.startup import CannotListen, cannot_start
from proxy.store import StoreMisconfigured, StoreUnsupported
from proxy.tasks import SWITCH_SECONDS, Tasks
from proxy.telemetry.exports import CannotExport
from proxy.telemetry.lag import LagWatch
from proxy.telemetry.logs import Logs
from proxy.wiring import open_exports
from proxy.workers import Shutdown, Worker

TASK_SECONDS: Final = 1.0
"""Time for background tasks to end before they are cancelled."""

STANDARD_OUTPUT: Final = 1
"""The file descriptor of log lines, except those of a proxy that runs beside a client."""


class Companion(msgspec.Struct, frozen=True):
    """Work that a proxy is started for, and ends with. ``run`` gets its port; it returns the exit code.

    Log lines go to the file descriptor ``log``. Signals are left to ``run``, and nothing is printed.
    """

    run: Callable[[int], Awaitable[int]]
    log: int


async def serve(
    options: StartOptions, worker: Worker, companion: Companion | None = None, source: ConfigSource | None = None
) -> int:
    """Run one process from its start to its end; return the exit code.

    Its configuration comes from *source*, or is sent by its parent.
    """
    settings = options.settings
    caches.keep_large_blocks()
    sys.setswitchinterval(SWITCH_SECONDS)
    log_fd = STANDARD_OUTPUT
    if companion is not None:
        log_fd = companion.log
    logs, tasks = start_logging(settings, log_fd)
    shutdown = Shutdown()
    if companion is None:
        # Before the process is built: a signal that arrives meanwhile must drain it and not kill it half open.
        shutdown.handle_signals()
    try:
        exports = open_exports(settings, worker.index)
        surroundings = Surroundings(worker, logs, tasks, exports)
        process = await Process.build(options, surroundings, quiet=companion is not None)
    except (CannotExport, CannotListen, StoreMisconfigured, StoreUnsupported) as error:
        await tasks.finish(TASK_SECONDS)
        logs.close()
        return cannot_start(error)
    reloads = Reloads(process, options)
    if companion is None:
        reloads.watch(source)
    lag = LagWatch(process.server.under_way, process.telemetry.loop_lag, logs.loop_lagged)
    process.page.show_lag(lag.pop_worst)
    garbage.collect_rarely()
    lag.start()
    code = 0
    if companion is None:
        await shutdown.requested.wait()
        reloads.stop()
        await shutdown.run_unless_immediate(reloads.process.drain(reloads.options.settings.server.drain))
    else:
        code = await companion.run(process.port)
        await process.drain(0.0)
    lag.stop()
    reloads.stop()
    await reloads.process.close()
    await tasks.finish(TASK_SECONDS)
    if dropped := exports.close():
        logs.log.warning("budget_log.lines_dropped", count=dropped)
    logs.close()
    return code


class Reloads:
    """The present ``process``, and the change to one with another configuration: ``options`` are those in force."""

    def __init__(self, process: Process, options: StartOptions) -> None:
        self.process = process
        self.options = options
        self._tasks = process.surroundings.tasks
        # The two tasks never end by themselves and are cancelled: ``Tasks.finish`` would wait for them.
        self._housekeeping = self._tasks.spawn(process.update_gauges(), "housekeeping")
        self._watching: asyncio.Task[None] | None = None

    def watch(self, source: ConfigSource | None) -> None:
        """Change whenever *source* does, or when the parent sends other options."""
        updates = self.process.surroundings.worker.updates
        if source is not None:
            watch = ConfigWatch(source)
            watch.handle_signal()
            self._watching = self._tasks.spawn(watch.run(self._loaded), "watch the configuration")
        elif updates is not None:
            self._watching = self._tasks.spawn(self._apply_updates(updates), "apply updates")

    def stop(self) -> None:
        """Change no more."""
        self._housekeeping.cancel()
        if self._watching is not None:
            self._watching.cancel()

    async def _apply_updates(self, updates: asyncio.Queue[StartOptions]) -> None:
        while True:
            await self._change(await updates.get())

    async def _loaded(self, loaded: Loaded) -> None:
        log_configuration(self.process.surroundings.logs, loaded)
        settings = loaded.settings or self.options.settings
        await self._change(replace(self.options, settings=settings, state=loaded.state))

    async def _change(self, options: StartOptions) -> None:
        """Put a process with *options* in the place of the present one, which stays after a fault."""
        if options.settings != self.options.settings:
            try:
                process = await self.process.changed(options)
            except Exception as fault:
                self.process.surroundings.logs.log.exception("config.failed", exc_info=fault)
                return
            self._replace(process, options.settings.server.drain)
        self.process.config.state = options.state
        self.options = options

    def _replace(self, process: Process, seconds: float) -> None:
        """Have *process* answer from now on; summaries of the one before it get *seconds* to end."""
        before, self.process = self.process, process
        self._housekeeping.cancel()
        self._housekeeping = self._tasks.spawn(process.update_gauges(), "housekeeping")
        self._tasks.spawn(before.retire(process.server.take_over(), seconds), "retire")


def start_logging(settings: Settings, fd: int = STANDARD_OUTPUT) -> tuple[Logs, Tasks]:
    """Return the process's log, which goes to *fd*, and its background tasks. Libraries and the loop report to it."""
    logs = Logs(settings.telemetry.log.level, settings.telemetry.log.format, fd)
    logs.adopt_libraries()
    asyncio.get_running_loop().set_exception_handler(logs.loop_failed)
    return logs, Tasks(logs.task_failed)
