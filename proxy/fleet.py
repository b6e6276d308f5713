"""Starts the proxy: one process, or several workers under a parent that owns the port and the configuration."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path

from msgspec.structs import replace

from proxy.app import TASK_SECONDS, Companion, serve, start_logging
from proxy.process import StartOptions
from proxy.reload import ConfigSource, ConfigWatch, Loaded, log_configuration
from proxy.settings import Overrides, Settings
from proxy.startup import CannotListen, cannot_start, print_summary, warn_of_unreachable
from proxy.store import INSTEAD, StoreMisconfigured, StoreUnsupported, describe_store
from proxy.tasks import Tasks
from proxy.telemetry import multiprocess
from proxy.telemetry.logs import Logs
from proxy.upstream_wiring import open_catalogue
from proxy.wiring import open_configured_store
from proxy.workers import Shutdown, Supervisor, Worker, last_runner, new_event_loop, reserve


def run(settings: Settings, config: Path | None, overrides: Overrides) -> int:
    """Serve until a signal ends the process; return the exit code. Afterwards signals are ignored.

    The *settings* are read again from the file *config* and the *overrides* when there is a reason to.
    """
    source = ConfigSource(config, overrides, settings)
    with last_runner() as runner:
        if settings.server.workers > 1:
            return runner.run(_supervise(settings, source))
        return runner.run(serve(StartOptions(settings, state=source.state), Worker(0, 1), source=source))


def run_with(settings: Settings, companion: Companion) -> int:
    """Serve on a free port while *companion* runs; return its exit code."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(serve(StartOptions(settings), Worker(0, 1), companion))


async def _supervise(settings: Settings, source: ConfigSource) -> int:
    """Own the port, restart workers that crash, and send all of them a changed configuration; return the exit code."""
    logs, tasks = start_logging(settings)
    # From here on a signal does not kill this process, because it must first end the workers that it starts.
    shutdown = Shutdown()
    shutdown.handle_signals()
    async with AsyncExitStack() as opened:
        opened.callback(logs.close)
        opened.push_async_callback(tasks.finish, TASK_SECONDS)
        try:
            reserved = opened.enter_context(_reserve_port(settings))
            options, store = await _shared_store(settings, logs, tasks)
        except (CannotListen, StoreMisconfigured, StoreUnsupported) as error:
            return cannot_start(error)
        try:
            folder = multiprocess.make_directory()
        except OSError as error:
            reason = f"workers share metrics in a temporary directory: {error.strerror or error}"
            return cannot_start(f"{reason}. Set TMPDIR, or use one worker.")
        opened.callback(multiprocess.remove_directory, folder)
        port = reserved.getsockname()[1]
        options = _at_port(options, port, source)
        supervisor = _supervisor(options, reserved, folder, shutdown, logs)
        catalogue = await asyncio.to_thread(open_catalogue, settings)
        if shutdown.requested.is_set():
            return 0
        print_summary(settings, catalogue, port, store)
        tasks.spawn(warn_of_unreachable(settings, logs.warn), "look for the upstreams")

        async def send(loaded: Loaded) -> None:
            """Send the configuration that was read to all workers, and to those that are started later."""
            nonlocal options
            log_configuration(logs, loaded)
            options = _with_loaded(options, loaded)
            supervisor.update(options)

        watch = ConfigWatch(source)
        watch.handle_signal()
        watching = tasks.spawn(watch.run(send), "watch the configuration")
        opened.callback(watching.cancel)
        return await supervisor.run()


def _at_port(options: StartOptions, port: int, source: ConfigSource) -> StartOptions:
    """Return *options* for workers: with the *port* that is reserved for them, and the state of *source*."""
    server = options.settings.server.model_copy(update={"port": port})
    return replace(options, settings=options.settings.model_copy(update={"server": server}), state=source.state)


def _supervisor(
    options: StartOptions, reserved: socket.socket, folder: Path, shutdown: Shutdown, logs: Logs
) -> Supervisor:
    """Return the supervisor of workers that start with *options* and write their metrics into *folder*."""
    server = options.settings.server
    return Supervisor(
        "proxy.app:serve",
        options,
        server.workers,
        environ={**os.environ, multiprocess.VARIABLE: str(folder)},
        drain=server.drain,
        shutdown=shutdown,
        log_event=lambda event, **facts: logs.log.info(event, **facts),
        on_exit=lambda pid: multiprocess.forget_worker(folder, pid),
        listener=reserved,
    )


def _with_loaded(options: StartOptions, loaded: Loaded) -> StartOptions:
    """Return *options* with the *loaded* settings, except the port and the store that workers have already."""
    settings, before = loaded.settings, options.settings
    if settings is None:
        return replace(options, state=loaded.state)
    server = settings.server.model_copy(update={"port": before.server.port})
    settings = settings.model_copy(update={"server": server, "store": before.store})
    return replace(options, settings=settings, state=loaded.state)


def _reserve_port(settings: Settings) -> socket.socket:
    server = settings.server
    try:
        return reserve(server.host, server.port)
    except OSError as error:
        raise CannotListen(server.host, server.port, error) from error


async def _shared_store(settings: Settings, logs: Logs, tasks: Tasks) -> tuple[StartOptions, str]:
    """Return the options that workers start with, and a description of their store.

    If the embedded store cannot be used, each worker has a store in memory.
    """
    options, path, note = StartOptions(settings), settings.store.path, ""
    if settings.store.url != "memory":
        # The parent opens the store once, so that a mistake is reported once and not by every worker at each start.
        store = await open_configured_store(settings, tasks, logs.warn, is_fallback=False)
        await store.close()
        state = store.state()
        if not state.instead:
            return options, describe_store(state, path)
        in_memory = settings.store.model_copy(update={"url": "memory"})
        options, note = StartOptions(settings.model_copy(update={"store": in_memory}), is_fallback=True), INSTEAD
    logs.log.warning("store.memory_per_worker", advice="workers may word the same compaction differently")
    return options, f"memory  (each worker its own{note})"
