"""Several worker processes under one parent, and the signals that end the parent and the workers.

The parent runs ``Supervisor(...).run()``, which starts workers, restarts those that crash, drains and ends them. Each
worker is a fresh interpreter that runs one coroutine function, named as ``module:function`` and called as
``await function(argument, worker)``; its result is the exit code.

Workers share a port with SO_REUSEPORT (https://man7.org/linux/man-pages/man7/socket.7.html): each listens on a socket
of its own (``Server.start``), so that the system spreads connections evenly. The parent listens on one more, which
every worker inherits and accepts from. It outlives them: while no worker runs, connections wait there and are not
refused.

The life of one worker's place, which ``Supervisor._restart_forever`` runs:

    state     event                                              next state
    --------  -------------------------------------------------  -----------------------------------------------------
    starting  it lives for ``SETTLED_SECONDS``                   running
    starting  it ends: a false start                             waiting, each time twice as long as before
    starting  every place has had ``MAX_FALSE_STARTS`` in a row  all end, with exit code 1: the configuration is wrong
    running   it ends: a crash                                   waiting, for ``FIRST_BACKOFF``
    waiting   the time is over                                   starting
    any       the first signal                                   draining: it gets SIGTERM and has *drain* seconds
    draining  it ends                                            ended
    draining  a second signal                                    it gets SIGTERM again; after ``KILL_GRACE``, SIGKILL
    draining  its time is over                                   killed, with exit code 1

The argument reaches a worker through a pipe, its length before it; so does each further one (``update``). The pipe is
the sign of life of the parent, too: a worker whose pipe is closed shuts down, since nothing would restart it.
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
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from proxy.addresses import BACKLOG
from proxy.imports import lean_imports

new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
try:
    import uvloop
except ImportError:  # no wheel for this platform (https://uvloop.readthedocs.io/): the standard loop is slower
    pass
else:
    new_event_loop = uvloop.new_event_loop

FIRST_BACKOFF: Final = 0.1
LONGEST_BACKOFF: Final = 10.0
"""Seconds before a crashed worker is started again: the first, doubled after each crash up to the longest."""

SETTLED_SECONDS: Final = 5.0
"""A worker that lived this long has started; after a later crash the backoff begins again at ``FIRST_BACKOFF``."""

MAX_FALSE_STARTS: Final = 5
"""Failed starts in a row of every worker after which the parent gives up: the configuration must be wrong."""

KILL_GRACE: Final = 2.0
"""Seconds after the end of the drain at which a worker is killed."""

_LENGTH: Final = struct.Struct(">Q")
"""The length of an argument in the pipe, before it."""

_MOST_READ: Final = 65_536
"""Bytes read from the pipe at once: as many as it holds (https://man7.org/linux/man-pages/man7/pipe.7.html)."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One of *count* workers; *index* counts from 0 and stays the same after a restart.

    ``updates`` gets each further argument that the parent sends, and on ``listener`` the parent listens for all
    workers; both are None if there is no parent.
    """

    index: int
    count: int
    updates: asyncio.Queue[Any] | None = field(default=None, compare=False)
    listener: socket.socket | None = field(default=None, compare=False)


LogEvent = Callable[..., None]
"""Logs what happens to workers: takes an event, and its facts by name. Must not block."""

WorkerMain = Callable[[Any, Worker], Awaitable[int]]
OnExit = Callable[[int], None]

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a process."""


@contextmanager
def last_runner() -> Iterator[asyncio.Runner]:
    """Provide the runner of a process that exits after it, with the exit code that it returns and not by a signal.

    A loop that is closed gives signals their default action back, and the interpreter takes some 50 ms to end: a second
    SIGTERM would kill it then, and its parent would see -15 after a drain without a fault.
    """
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        yield runner
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    # A thread that is left has a mask of its own.
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


class Shutdown:
    """The end of a process: the first signal requests a drain, a second one an immediate end.

    The first signal sets ``requested``, the second one ``immediate``.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.immediate = asyncio.Event()

    def handle_signals(self) -> None:
        """Handle SIGTERM, SIGINT and SIGHUP until the running loop is closed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        # ``nohup`` starts a process with SIGHUP ignored, and it must stay ignored:
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
        """Run *work* to its end, or cancel it when an immediate end is requested."""
        async with asyncio.TaskGroup() as group:
            drain = group.create_task(work, name="drain")
            immediate = group.create_task(self.immediate.wait(), name="second signal")
            await asyncio.wait({drain, immediate}, return_when=asyncio.FIRST_COMPLETED)
            drain.cancel()
            immediate.cancel()


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that listens on *host* and *port* (0: any free one), whose port workers can share.

    Keep it open while workers run. Raises ``OSError`` if another process listens there.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, proto, _, address = addresses[0]
    if port:
        # SO_REUSEPORT alone would let two proxies of one user share a port unnoticed.
        with socket.socket(family, kind, proto) as probe:
            _bind(probe, family, address, socket.SO_REUSEADDR)
    reserved = socket.socket(family, kind, proto)
    try:
        # Connections of an earlier process stay in TIME_WAIT for a minute, without having shared their port.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(reserved, family, address, socket.SO_REUSEPORT)
        reserved.listen(BACKLOG)
    except OSError:
        reserved.close()
        raise
    return reserved


def _bind(bound: socket.socket, family: int, address: Any, option: int) -> None:
    bound.setsockopt(socket.SOL_SOCKET, option, 1)
    if family == socket.AF_INET6:
        # As asyncio's own servers do: ``::`` must not take the port of 0.0.0.0 as well.
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    bound.bind(address)


class Supervisor:
    """Keeps *count* workers running until a signal ends them, or until none of them can be started.

    *main* is ``module:function``. *argument* is anything that can be pickled; it reaches the worker through a pipe, so
    that secrets show neither in the process list nor in the environment. Workers have *drain* seconds to end after the
    first signal of *shutdown*; a second one ends them immediately. *on_exit* is called with the pid of each worker that
    ended. All workers inherit *listener*, which is closed here at the shutdown: the last worker that ends closes the
    port.
    """

    def __init__(
        self,
        main: str,
        argument: object,
        count: int,
        *,
        environ: Mapping[str, str],
        drain: float,
        shutdown: Shutdown,
        log_event: LogEvent,
        on_exit: OnExit,
        listener: socket.socket,
    ) -> None:
        self._main = main
        self._payload = pickle.dumps(argument)
        self._count = count
        self._environ = dict(environ)
        self._drain = drain
        self._log_event = log_event
        self._on_exit = on_exit
        self._listener = listener
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._shutdown = shutdown
        self._false_starts = [0] * count

    async def run(self) -> int:
        """Run until shutdown. Return 1 if workers could not be started, or did not end in their time, else 0."""
        self._shutdown.handle_signals()
        try:
            async with asyncio.TaskGroup() as group:
                slots = [
                    group.create_task(self._restart_forever(index), name=f"worker-{index}")
                    for index in range(self._count)
                ]
                killed = await self._end_on_shutdown(slots)
        finally:
            self._signal_all(signal.SIGKILL)
        return int(killed or self._cannot_start)

    def update(self, argument: object) -> None:
        """Send *argument* to all workers, and start further ones with it."""
        self._payload = pickle.dumps(argument)
        for process in list(self._processes.values()):
            if process.stdin is not None and not process.stdin.is_closing():
                process.stdin.write(_LENGTH.pack(len(self._payload)) + self._payload)

    @property
    def _cannot_start(self) -> bool:
        return min(self._false_starts) >= MAX_FALSE_STARTS

    async def _restart_forever(self, index: int) -> None:
        """Run worker *index* again and again until the shutdown, or until no worker can be started."""
        backoff = FIRST_BACKOFF
        while not self._shutdown.requested.is_set():
            started = time.monotonic()
            code = await self._run_one(index)
            lifetime = time.monotonic() - started
            if self._shutdown.requested.is_set():
                return
            if lifetime >= SETTLED_SECONDS:
                self._false_starts[index], backoff = 0, FIRST_BACKOFF
            else:
                self._false_starts[index] += 1
            self._log_event("worker.ended", worker=index, exit_code=code, seconds=round(lifetime, 2))
            if self._cannot_start:
                self._log_event("worker.given_up", count=sum(self._false_starts))
                self._shutdown.requested.set()
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._shutdown.requested.wait(), backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)

    async def _run_one(self, index: int) -> int:
        """Start worker *index* and wait for its end; return its exit code."""
        inherited = self._listener.fileno()
        command = [sys.executable, "-m", "proxy.workers", self._main, str(index), str(self._count), str(inherited)]
        # A session of its own: Ctrl-C in a terminal reaches the parent alone, which then drains the workers.
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            env=self._environ,
            start_new_session=True,
            pass_fds=(inherited,),
        )
        self._processes[index] = process
        self._log_event("worker.started", worker=index, pid=process.pid)
        try:
            if process.stdin is not None:
                process.stdin.write(_LENGTH.pack(len(self._payload)) + self._payload)
            # A signal that arrived while the process was being created has not reached it.
            if self._shutdown.requested.is_set():
                self._signal(process)
            # The pipe stays open: the worker shuts down when it is closed, because the parent is gone then.
            return await process.wait()
        finally:
            self._processes.pop(index, None)
            if process.stdin is not None:
                process.stdin.close()
            self._on_exit(process.pid)

    async def _end_on_shutdown(self, slots: Sequence[asyncio.Task[None]]) -> bool:
        """Wait for the shutdown, then end the workers. Return True if some did not end in time.

        A second signal takes their time away: who is killed then, as a worker that still starts may be, is not late.
        """
        await self._shutdown.requested.wait()
        self._signal_all(signal.SIGTERM)
        self._listener.close()
        async with asyncio.TaskGroup() as group:
            immediate = group.create_task(self._shutdown.immediate.wait(), name="second-signal")
            ended = group.create_task(asyncio.wait(slots), name="workers-ended")
            seconds = self._drain + KILL_GRACE
            await asyncio.wait({immediate, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._shutdown.immediate.is_set():
                self._signal_all(signal.SIGTERM)
                await asyncio.wait({ended}, timeout=KILL_GRACE)
            immediate.cancel()
            running = list(self._processes)
            for index in running:
                self._log_event("worker.killed", worker=index)
            self._signal_all(signal.SIGKILL)
        return bool(running) and not self._shutdown.immediate.is_set()

    def _signal(self, process: asyncio.subprocess.Process) -> None:
        """End a worker that was started during the shutdown."""
        if self._shutdown.immediate.is_set():
            process.send_signal(signal.SIGKILL)
        else:
            process.send_signal(signal.SIGTERM)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in list(self._processes.values()):
            if process.returncode is None:
                process.send_signal(number)


def run_worker(name: str, worker: Worker) -> int:
    """Run ``module:function`` *name* with the argument read from standard input; return the exit code."""
    pipe = os.dup(0)
    # Standard input becomes empty, so that no other reader in the worker consumes the bytes of this pipe.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    (length,) = _LENGTH.unpack(_read_exactly(pipe, _LENGTH.size))
    # pickle runs code, so it is safe only for data that one trusts: https://docs.python.org/3/library/pickle.html
    argument = pickle.loads(_read_exactly(pipe, length))  # noqa: S301 - written by our own parent, over a private pipe
    module, _, function = name.partition(":")
    with lean_imports():
        main: WorkerMain = getattr(importlib.import_module(module), function)

    async def run_main() -> int:
        loop = asyncio.get_running_loop()
        # The signal tells the parent, and the parent alone, to read the configuration again.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        updates: asyncio.Queue[Any] = asyncio.Queue()
        loop.add_reader(pipe, _Updates(loop, pipe, updates).read)
        try:
            return await main(argument, replace(worker, updates=updates))
        finally:
            loop.remove_reader(pipe)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(run_main())


class _Updates:
    """Reads the arguments that the parent sends to a worker, and shuts the worker down if the parent is gone.

    The parent owned the store, and it alone would restart this worker.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pipe: int, updates: asyncio.Queue[Any]) -> None:
        self._loop = loop
        self._pipe = pipe
        self._updates = updates
        self._data = b""

    def read(self) -> None:
        """Read what has arrived. Each argument comes with its length before it."""
        arrived = os.read(self._pipe, _MOST_READ)
        if not arrived:
            self._loop.remove_reader(self._pipe)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._data += arrived
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            argument = pickle.loads(self._data[_LENGTH.size : end])  # noqa: S301 - written by our own parent
            self._data = self._data[end:]
            self._updates.put_nowait(argument)


def _read_exactly(pipe: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = os.read(pipe, length - len(data))
        if not chunk:
            raise EOFError("the parent ended before it had sent this worker its argument")
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    listener = socket.socket(fileno=int(sys.argv[4]))
    sys.exit(run_worker(sys.argv[1], Worker(int(sys.argv[2]), int(sys.argv[3]), listener=listener)))
