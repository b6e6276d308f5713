"""Several worker processes under one parent: started, restarted after a crash, drained and ended together.

The parent calls ``Supervisor(...).run()``. Each worker is a fresh interpreter that runs one coroutine function, named
as ``module:function`` and called as ``await function(argument, worker)``; what it returns is its exit code. Workers
share a port by SO_REUSEPORT: the parent holds a ``reserve``d socket, each worker binds its own.
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
except ImportError:  # no wheel for this platform: the standard loop does the same, slower
    pass
else:
    new_event_loop = uvloop.new_event_loop

FIRST_BACKOFF = 0.1
LONGEST_BACKOFF = 10.0
# A worker that lived this long did start; a crash after it is news, not a loop.
SETTLED_SECONDS = 5.0
# So many starts in a row that came to nothing, for every single worker: the set-up is wrong, restarting will not help.
MOST_FALSE_STARTS = 5
KILL_GRACE = 2.0
_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Worker:
    """Which of *count* workers a process is; *index* counts from 0 and is kept over restarts."""

    index: int
    count: int


class LogEvent(Protocol):
    """Told what happens to workers, in facts fit for a log line."""

    def __call__(self, event: str, **facts: int | float | str) -> None:
        """Note *event*; must not block."""


WorkerMain = Callable[[Any, Worker], Awaitable[int]]
OnExit = Callable[[int], None]


class Shutdown:
    """``requested`` is set when the process shall end, ``immediate`` when it shall not wait for anything."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.immediate = asyncio.Event()

    def handle_signals(self) -> None:
        """Heed signals from now on, until the running loop is closed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        # Under nohup it is ignored from the start, and has to stay so.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self.hang_up)

    def stop(self) -> None:
        """Ask for an end; called again: for one at once."""
        if self.requested.is_set():
            self.immediate.set()
        self.requested.set()

    def hang_up(self) -> None:
        """Ask for an end. A terminal that is closed tells so twice, by its shell and by the kernel."""
        self.requested.set()

    async def run_unless_immediate(self, work: Coroutine[Any, Any, None]) -> None:
        """Await *work* unless, or until, the end shall be at once."""
        async with asyncio.TaskGroup() as group:
            job = group.create_task(work, name="drain")
            alarm = group.create_task(self.immediate.wait(), name="second signal")
            await asyncio.wait({job, alarm}, return_when=asyncio.FIRST_COMPLETED)
            job.cancel()
            alarm.cancel()


def reserve(host: str, port: int) -> socket.socket:
    """A socket bound to *host* and *port* (0: any free one) that workers can share; it does not listen itself.

    Keep it open while workers run. Raises ``OSError`` when somebody else listens there: SO_REUSEPORT alone would let
    two proxies of one user share a port unnoticed.
    """
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    if port:
        with socket.socket(family, kind, proto) as probe:
            _bind(probe, family, address, socket.SO_REUSEADDR)
    held = socket.socket(family, kind, proto)
    try:
        # Connections that a single process closed wait for a minute (TIME_WAIT) and did not share their port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(held, family, address, socket.SO_REUSEPORT)
    except OSError:
        held.close()
        raise
    return held


def listen(host: str, port: int, backlog: int = 1024) -> socket.socket:
    """A listening socket that shares *port* with the other workers'. Raises ``OSError``."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
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


def _bind(held: socket.socket, family: int, address: Any, option: int) -> None:
    held.setsockopt(socket.SOL_SOCKET, option, 1)
    if family == socket.AF_INET6:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    held.bind(address)


class Supervisor:
    """Keeps *count* workers running until a signal ends them, or until they turn out not to start at all.

    *main* is ``module:function``, *argument* anything that can be pickled; it reaches the worker through a pipe, so
    secrets show neither in the process list nor in the environment. *drain* is how many seconds workers get to end
    after the first signal; a second signal ends them at once (*ending*). *on_exit* is called with the pid of
    each ended worker.
    """

    def __init__(
        self,
        main: str,
        argument: object,
        count: int,
        *,
        environ: Mapping[str, str],
        drain: float,
        events: LogEvent,
        ending: Shutdown | None = None,
        on_exit: OnExit | None = None,
    ) -> None:
        self._main = main
        self._payload = pickle.dumps(argument)
        self._count = count
        self._environ = dict(environ)
        self._drain = drain
        self._events = events
        self._on_exit = on_exit
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ending = ending or Shutdown()
        self._false_starts = [0] * count

    async def run(self) -> int:
        """The exit code: 0 after a signal and a clean end, 1 when workers do not start or had to be killed."""
        self._ending.handle_signals()
        try:
            async with asyncio.TaskGroup() as group:
                slots = [group.create_task(self._keep(index), name=f"worker-{index}") for index in range(self._count)]
                killed = await self._end_when_told(slots)
        finally:
            self._send(signal.SIGKILL)
        return 1 if killed or self._hopeless else 0

    def stop(self) -> None:
        """Drain and end; called again: end at once."""
        self._ending.stop()

    @property
    def pids(self) -> dict[int, int]:
        """The running workers' process ids by index."""
        return {index: process.pid for index, process in self._processes.items()}

    @property
    def _hopeless(self) -> bool:
        return min(self._false_starts) >= MOST_FALSE_STARTS

    async def _keep(self, index: int) -> None:
        backoff = FIRST_BACKOFF
        while not self._ending.requested.is_set():
            began = time.monotonic()
            code = await self._run_one(index)
            lived = time.monotonic() - began
            if self._ending.requested.is_set():
                return
            if lived >= SETTLED_SECONDS:
                self._false_starts[index], backoff = 0, FIRST_BACKOFF
            else:
                self._false_starts[index] += 1
            self._events("worker.ended", worker=index, exit_code=code, seconds=round(lived, 2))
            if self._hopeless:
                self._events("worker.given_up", count=sum(self._false_starts))
                self._ending.requested.set()
                return
            await _wait(self._ending.requested, backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)

    async def _run_one(self, index: int) -> int:
        command = [sys.executable, "-m", "proxy.workers", self._main, str(index), str(self._count)]
        # A session of its own: Ctrl-C in a terminal reaches the parent alone, which then drains the workers.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, env=self._environ, start_new_session=True
        )
        self._processes[index] = process
        self._events("worker.started", worker=index, pid=process.pid)
        try:
            if process.stdin is not None:
                process.stdin.write(_LENGTH.pack(len(self._payload)) + self._payload)
            # A signal that came while the process was being made has not reached it.
            if self._ending.requested.is_set():
                process.send_signal(signal.SIGKILL if self._ending.immediate.is_set() else signal.SIGTERM)
            # The pipe stays open: its end tells the worker that the parent is gone.
            return await process.wait()
        finally:
            self._processes.pop(index, None)
            if process.stdin is not None:
                process.stdin.close()
            if self._on_exit is not None:
                self._on_exit(process.pid)

    async def _end_when_told(self, slots: Sequence[asyncio.Task[None]]) -> bool:
        """Whether workers had to be killed."""
        await self._ending.requested.wait()
        self._send(signal.SIGTERM)
        async with asyncio.TaskGroup() as group:
            hurry = group.create_task(self._ending.immediate.wait(), name="second-signal")
            ended = group.create_task(_all(slots), name="workers-ended")
            await asyncio.wait({hurry, ended}, timeout=self._drain + KILL_GRACE, return_when=asyncio.FIRST_COMPLETED)
            if self._ending.immediate.is_set():
                self._send(signal.SIGTERM)
                await asyncio.wait({ended}, timeout=KILL_GRACE)
            hurry.cancel()
            late = list(self._processes)
            for index in late:
                self._events("worker.killed", worker=index)
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
    """Run ``module:function`` of *name* with the argument that standard input carries; returns the exit code."""
    pipe = os.dup(0)
    # The pipe is ours: nothing that reads standard input in the worker may swallow the parent's end.
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
    """End as if told to when the parent is gone: it owned the store and nobody would restart this worker."""
    if not os.read(pipe, 1):
        loop.remove_reader(pipe)
        os.kill(os.getpid(), signal.SIGTERM)


def _read(pipe: int, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = os.read(pipe, length - len(parts))
        if not part:
            raise EOFError("the parent ended before it had told this worker what to do")
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1], Worker(int(sys.argv[2]), int(sys.argv[3]))))
