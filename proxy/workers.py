"""Several worker processes under one parent, and the signals that end either.

The parent runs ``Supervisor(...).run()``, which starts workers, restarts those that crash, drains and ends them. Each
worker is a fresh interpreter that runs one coroutine function, named as ``module:function`` and called as
``await function(argument, worker)``; its result is the exit code. Workers share a port with SO_REUSEPORT
(https://man7.org/linux/man-pages/man7/socket.7.html): the parent keeps a ``reserve``d socket, each worker binds one.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
try:
    import uvloop
except ImportError:  # no wheel for this platform (https://uvloop.readthedocs.io/): the standard loop is slower
    pass
else:
    new_event_loop = uvloop.new_event_loop

FIRST_BACKOFF = 0.1
LONGEST_BACKOFF = 10.0
"""Seconds before a crashed worker is started again; doubled after each crash."""

SETTLED_SECONDS = 5.0
"""Lifetime from which on a worker counts as started; a crash after it begins again at ``FIRST_BACKOFF``."""

MOST_FALSE_STARTS = 5
"""Failed starts in a row of every worker after which the parent gives up: the set-up is wrong."""

KILL_GRACE = 2.0
"""Seconds beyond the drain after which a worker is killed."""

_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Worker:
    """One of *count* workers; *index* counts from 0 and stays the same after a restart."""

    index: int
    count: int


class LogEvent(Protocol):
    """Logs what happens to workers."""

    def __call__(self, event: str, **facts: int | float | str) -> None:
        """Log *event* with *facts*; must not block."""


WorkerMain = Callable[[Any, Worker], Awaitable[int]]
OnExit = Callable[[int], None]


class Shutdown:
    """The end of a process, as signals ask for it: the first one for a drain, a second one for an immediate end.

    ``requested`` is set by the first signal, ``immediate`` by the second.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.immediate = asyncio.Event()

    def handle_signals(self) -> None:
        """Handle SIGTERM, SIGINT and SIGHUP until the running loop is closed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        # ``nohup`` starts a process with SIGHUP ignored: it has to stay so.
        # https://pubs.opengroup.org/onlinepubs/9699919799/utilities/nohup.html
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self.hang_up)

    def stop(self) -> None:
        """Request a drain; called again, an immediate end."""
        if self.requested.is_set():
            self.immediate.set()
        self.requested.set()

    def hang_up(self) -> None:
        """Request a drain, also when called again: shell and kernel each send SIGHUP when a terminal is closed."""
        self.requested.set()

    async def run_unless_immediate(self, work: Coroutine[Any, Any, None]) -> None:
        """Run *work* to its end, or cancel it as soon as the end has to be immediate."""
        async with asyncio.TaskGroup() as group:
            job = group.create_task(work, name="drain")
            alarm = group.create_task(self.immediate.wait(), name="second signal")
            await asyncio.wait({job, alarm}, return_when=asyncio.FIRST_COMPLETED)
            job.cancel()
            alarm.cancel()


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket bound to *host* and *port* (0: any free one) that workers can share; it does not listen.

    Keep it open while workers run. Raises ``OSError`` if another process listens there: SO_REUSEPORT alone would let
    two proxies of one user share a port unnoticed.
    """
    family, kind, proto, _, address = _resolve(host, port)
    if port:
        with socket.socket(family, kind, proto) as probe:
            _bind(probe, family, address, socket.SO_REUSEADDR)
    reserved = socket.socket(family, kind, proto)
    try:
        # Connections that a single process closed wait for a minute (TIME_WAIT) and did not share their port.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(reserved, family, address, socket.SO_REUSEPORT)
    except OSError:
        reserved.close()
        raise
    return reserved


def listen(host: str, port: int, backlog: int = 1024) -> socket.socket:
    """Return a listening socket that shares *port* with other workers. Raises ``OSError``."""
    family, kind, proto, _, address = _resolve(host, port)
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(listener, family, address, socket.SO_REUSEPORT)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _resolve(host: str, port: int) -> tuple[Any, ...]:
    """Return the first address of *host*: family, kind, protocol, canonical name and socket address."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]


def _bind(bound: socket.socket, family: int, address: Any, option: int) -> None:
    bound.setsockopt(socket.SOL_SOCKET, option, 1)
    if family == socket.AF_INET6:
        # As asyncio's own servers do: ``::`` must not take the port of 0.0.0.0 as well.
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    bound.bind(address)


class Supervisor:
    """Keeps *count* workers running until a signal ends them, or until none of them can be started.

    *main* is ``module:function``. *argument* is anything that can be pickled; it reaches the worker through a pipe, so
    that secrets show neither in the process list nor in the environment. *drain* is the time in seconds that workers
    have to end after the first signal; a second signal ends them immediately (*shutdown*). *on_exit* is called with the
    pid of each worker that ended.
    """

    def __init__(
        self,
        main: str,
        argument: object,
        count: int,
        *,
        environ: Mapping[str, str],
        drain: float,
        log_event: LogEvent,
        shutdown: Shutdown | None = None,
        on_exit: OnExit | None = None,
    ) -> None:
        self._main = main
        self._payload = pickle.dumps(argument)
        self._count = count
        self._environ = dict(environ)
        self._drain = drain
        self._log_event = log_event
        self._on_exit = on_exit
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._shutdown = shutdown or Shutdown()
        self._false_starts = [0] * count

    async def run(self) -> int:
        """Run until shutdown. Return 0 after a clean end, 1 if workers could not be started or had to be killed."""
        self._shutdown.handle_signals()
        try:
            async with asyncio.TaskGroup() as group:
                slots = [
                    group.create_task(self._restart_forever(index), name=f"worker-{index}")
                    for index in range(self._count)
                ]
                killed = await self._end_on_shutdown(slots)
        finally:
            self._send(signal.SIGKILL)
        return 1 if killed or self._hopeless else 0

    def stop(self) -> None:
        """Drain and end the workers; called again, end them immediately."""
        self._shutdown.stop()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the running workers by index."""
        return {index: process.pid for index, process in self._processes.items()}

    @property
    def _hopeless(self) -> bool:
        return min(self._false_starts) >= MOST_FALSE_STARTS

    async def _restart_forever(self, index: int) -> None:
        backoff = FIRST_BACKOFF
        while not self._shutdown.requested.is_set():
            began = time.monotonic()
            code = await self._run_one(index)
            lived = time.monotonic() - began
            if self._shutdown.requested.is_set():
                return
            if lived >= SETTLED_SECONDS:
                self._false_starts[index], backoff = 0, FIRST_BACKOFF
            else:
                self._false_starts[index] += 1
            self._log_event("worker.ended", worker=index, exit_code=code, seconds=round(lived, 2))
            if self._hopeless:
                self._log_event("worker.given_up", count=sum(self._false_starts))
                self._shutdown.requested.set()
                return
            await _wait(self._shutdown.requested, backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)

    async def _run_one(self, index: int) -> int:
        command = [sys.executable, "-m", "proxy.workers", self._main, str(index), str(self._count)]
        # A session of its own: Ctrl-C in a terminal reaches the parent alone, which then drains the workers.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, env=self._environ, start_new_session=True
        )
        self._processes[index] = process
        self._log_event("worker.started", worker=index, pid=process.pid)
        try:
            if process.stdin is not None:
                process.stdin.write(_LENGTH.pack(len(self._payload)) + self._payload)
            # A signal that came while the process was being made has not reached it.
            if self._shutdown.requested.is_set():
                process.send_signal(signal.SIGKILL if self._shutdown.immediate.is_set() else signal.SIGTERM)
            # The pipe stays open: its end tells the worker that the parent is gone.
            return await process.wait()
        finally:
            self._processes.pop(index, None)
            if process.stdin is not None:
                process.stdin.close()
            if self._on_exit is not None:
                self._on_exit(process.pid)

    async def _end_on_shutdown(self, slots: Sequence[asyncio.Task[None]]) -> bool:
        """Wait for the shutdown, then end the workers. Return True if some had to be killed."""
        await self._shutdown.requested.wait()
        self._send(signal.SIGTERM)
        async with asyncio.TaskGroup() as group:
            hurry = group.create_task(self._shutdown.immediate.wait(), name="second-signal")
            ended = group.create_task(_all(slots), name="workers-ended")
            await asyncio.wait({hurry, ended}, timeout=self._drain + KILL_GRACE, return_when=asyncio.FIRST_COMPLETED)
            if self._shutdown.immediate.is_set():
                self._send(signal.SIGTERM)
                await asyncio.wait({ended}, timeout=KILL_GRACE)
            hurry.cancel()
            late = list(self._processes)
            for index in late:
                self._log_event("worker.killed", worker=index)
            self._send(signal.SIGKILL)
        return bool(late)

    def _send(self, number: signal.Signals) -> None:
        for process in list(self._processes.values()):
            if process.returncode is None:
                process.send_signal(number)


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        pass


def run_worker(name: str, worker: Worker) -> int:
    """Run ``module:function`` *name* with the argument read from standard input; return the exit code."""
    pipe = os.dup(0)
    # Nothing that reads standard input in the worker may take the bytes of this pipe, or its end.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    (length,) = _LENGTH.unpack(_read(pipe, _LENGTH.size))
    argument = pickle.loads(_read(pipe, length))  # noqa: S301 - written by our own parent, over a private pipe
    module, _, function = name.partition(":")
    main: WorkerMain = getattr(importlib.import_module(module), function)

    async def body() -> int:
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe, _orphaned, loop, pipe)
        try:
            return await main(argument, worker)
        finally:
            loop.remove_reader(pipe)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(body())


def _orphaned(loop: asyncio.AbstractEventLoop, pipe: int) -> None:
    """Shut down when the parent has gone: it owned the store, and it alone would restart this worker."""
    if not os.read(pipe, 1):
        loop.remove_reader(pipe)
        os.kill(os.getpid(), signal.SIGTERM)


def _read(pipe: int, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = os.read(pipe, length - len(parts))
        if not part:
            raise EOFError("the parent ended before it had sent this worker its argument")
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1], Worker(int(sys.argv[2]), int(sys.argv[3]))))
