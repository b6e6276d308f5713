"""A private Valkey on a unix socket, shared by every process that opens the same data directory.

Three locks decide everything, and a lock ends with its holder, even by ``kill -9``:

- ``owner.lock``: its holder starts, watches and stops the server. Everybody else is a guest and tries for it.
- ``server.lock``: held by the server process itself, which inherits it. Who can take it knows that no server lives,
  whoever started it; so a live server is adopted and two servers never write the same files.
- ``users.lock``: held shared by owner and guests. Only the last to leave stops the server.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import quote

from proxy.store.backend import EmbeddedUnavailable
from proxy.store.embedded_paths import binary, known_socket, private_directory, socket_path
from proxy.store.state import Warn

Spawn = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]

START = 20.0  # seconds: reading a full append-only file back takes a few
STOP = 10.0
_PROMPT = 1.0  # an idle server ends within a few milliseconds of being told
_GUEST_POLL, _OWNER_POLL, _AFTER_FAILURE = 1.0, 0.25, 5.0
_MAX_LOG = 1024 * 1024


class Embedded:
    """The running server as one process sees it; made by ``start``."""

    def __init__(self, directory: Path, program: Path, warn: Warn) -> None:
        self._directory = directory.absolute()
        self._program = program
        self._warn = warn
        self._socket = directory  # known once joined
        self._ownership = FileLock(directory / "owner.lock")
        self._use = FileLock(directory / "users.lock")
        self._child: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[Any] | None = None
        self._closing = False
        self.restarts = 0

    @classmethod
    async def start(cls, directory: Path, spawn: Spawn, warn: Warn) -> Embedded:
        """The server of *directory*, answering: started, adopted, or joined as a guest.

        *warn* takes ``(event, facts)`` for the log.
        Raises ``EmbeddedUnavailable`` when there is no binary for this platform, the directory cannot be written, or
        the server does not come up.
        """
        program = binary()
        try:
            private_directory(directory)
            self = cls(directory, program, warn)
        except OSError as error:
            raise _unusable(directory, error) from error
        try:
            await self._join(time.monotonic() + START)
        except BaseException as error:
            self._let_go()
            if isinstance(error, OSError):
                raise _unusable(directory, error) from error
            raise
        self._watch = spawn(self._keep(), "embedded store")
        return self

    @property
    def url(self) -> str:
        """Where the server listens, as ``unix:///…``."""
        return "unix://" + quote(str(self._socket))

    @property
    def owner(self) -> bool:
        """Whether this process looks after the server."""
        return self._ownership.held

    async def close(self) -> None:
        """Stop the server if nobody else uses it; else leave it to them. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        self._use.release()
        # Others may be leaving at this moment; whoever tries last sees every other gone.
        for _ in range(3):
            if self._ownership.held or self._ownership.take():
                if self._use.take():
                    await self._stop()
                    break
                self._ownership.release()
        self._let_go()

    async def _join(self, deadline: float) -> None:
        # Not to be had while the last user of before is still stopping the server.
        while not self._use.take(shared=True):
            await self._pause(deadline)
        while True:
            if self._ownership.take():
                await self._raise_server(deadline)
                return
            socket = known_socket(self._directory)
            if socket is not None and await answers(socket):
                self._socket = socket
                return
            await self._pause(deadline)

    async def _pause(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise EmbeddedUnavailable(f"another process owns {self._directory} and has no server that answers")
        await asyncio.sleep(0.05)

    def _let_go(self) -> None:
        self._leave_child()
        self._ownership.close()
        self._use.close()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_OWNER_POLL if self.owner else _GUEST_POLL)
            if self.owner or self._ownership.take():
                try:
                    await self._look_after()
                except (EmbeddedUnavailable, OSError):
                    # The client in front gets no answer and says so; here it is only tried again, unhurried.
                    await asyncio.sleep(_AFTER_FAILURE)

    async def _look_after(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._child = None
        if not self._socket.exists() and not self._server_gone():
            await self._terminate()  # somebody cleaned its socket away: nobody can reach it any more
        if self._server_gone():
            self.restarts += 1
            private_directory(self._directory)
            await self._raise_server(time.monotonic() + START)

    def _server_gone(self) -> bool:
        lock = FileLock(self._directory / "server.lock")
        try:
            return lock.take()
        finally:
            lock.close()

    async def _raise_server(self, deadline: float) -> None:
        """Start the server, or adopt one that lives; if it cannot start with its data, start it with none.

        Only a server that starts without its data proves that the data was the reason: else that is put back.
        """
        try:
            await self._try_to_raise(deadline)
        except _EndedAtOnce:
            if not self._data.exists():
                raise
            _discard(self._aside)
            self._data.rename(self._aside)
            try:
                await self._try_to_raise(deadline)
            except BaseException:
                _discard(self._data)
                self._aside.rename(self._data)
                raise
            advice = "no request fails of this, texts are made again; remove what was moved aside once you have seen it"
            cause = f"its data cannot be read: {self._log} says why"
            self._warn("store.begun_anew", {"cause": cause, "moved_to": str(self._aside), "advice": advice})

    async def _try_to_raise(self, deadline: float) -> None:
        self._socket = socket_path(self._directory)
        lock = FileLock(self._directory / "server.lock")
        try:
            if lock.take():
                self._child = self._launch(lock.handle)
        finally:
            lock.close()
        while not await answers(self._socket):
            if self._child is not None and self._child.poll() is not None:
                self._child = None
                raise _EndedAtOnce(f"the private server ended at once; {self._log} says why")
            if time.monotonic() > deadline:
                raise EmbeddedUnavailable(f"the private server does not answer; {self._log} may say why")
            await asyncio.sleep(0.02)

    def _launch(self, lock: int) -> subprocess.Popen[bytes]:
        self._socket.unlink(missing_ok=True)
        if self._log.exists() and self._log.stat().st_size > _MAX_LOG:
            self._log.replace(self._log.with_suffix(".log.1"))
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._directory),
            "daemonize": "no",
            "pidfile": str(self._pid_file),
            "logfile": str(self._log),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory": "256mb",
            "maxmemory-policy": "volatile-lru",
            "databases": "1",
        }
        arguments = [text for name, value in settings.items() for text in (f"--{name}", value)]
        try:
            return subprocess.Popen(  # noqa: S603  # our own binary, our own arguments, no shell
                [str(self._program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C at the terminal must not end it before our own drain
                pass_fds=(lock,),
                umask=0o077,
            )
        except OSError as error:
            raise EmbeddedUnavailable(f"{self._program} does not run here: {error.strerror or error}") from error

    async def _stop(self) -> None:
        await say(self._socket, b"SHUTDOWN\r\n")
        # One that has only just been started does not listen yet: a signal reaches it, and ends it as cleanly.
        if not await self._gone_within(_PROMPT):
            await self._terminate()

    async def _terminate(self) -> None:
        for number, patience in ((signal.SIGTERM, STOP), (signal.SIGKILL, STOP)):
            self._signal(number)
            if await self._gone_within(patience):
                return

    def _signal(self, number: signal.Signals) -> None:
        try:
            pid = self._child.pid if self._child is not None else int(self._pid_file.read_text())
            os.kill(pid, number)
        except (OSError, ValueError):
            return  # it ended by itself, or never came so far as to write its number down

    async def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self._child is None or self._child.poll() is not None
            if ended and self._server_gone():
                return True
            await asyncio.sleep(0.02)
        return False

    def _leave_child(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.returncode = 0  # it lives on for others; without this its handle complains when collected
        self._child = None

    @property
    def _data(self) -> Path:
        return self._directory / "appendonlydir"

    @property
    def _aside(self) -> Path:
        return self._directory / "appendonlydir.damaged"

    @property
    def _log(self) -> Path:
        return self._directory / "valkey.log"

    @property
    def _pid_file(self) -> Path:
        return self._directory / "valkey.pid"


class _EndedAtOnce(EmbeddedUnavailable):
    """The server ended before it answered: its data, its directory or the platform is the reason."""


def _discard(path: Path) -> None:
    """Remove *path*, a file or a directory, if it is there. Raises ``OSError``."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _unusable(directory: Path, error: OSError) -> EmbeddedUnavailable:
    return EmbeddedUnavailable(f"store.path {directory} cannot be used: {error.strerror or error}")


class FileLock:
    """A ``flock`` on *path*, which is created when missing. Opening raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        # Not inherited by children: a server we start must not keep our ownership alive.
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.held = False

    def take(self, *, shared: bool = False) -> bool:
        """Whether the lock is ours now; never waits."""
        try:
            fcntl.flock(self.handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.held = True
        return True

    def release(self) -> None:
        """Let others have the lock."""
        fcntl.flock(self.handle, fcntl.LOCK_UN)
        self.held = False

    def close(self) -> None:
        """Close our handle; the lock stays with a child that was given it, and ends otherwise."""
        os.close(self.handle)
        self.held = False


async def answers(socket: Path) -> bool:
    """Whether a server on *socket* is ready to serve."""
    return (await say(socket, b"PING\r\n")).startswith(b"+PONG")


async def is_running(directory: Path) -> bool:
    """Whether *directory* has a server that answers. Starts nothing and touches nothing."""
    try:
        socket = known_socket(directory)
    except OSError:
        return False
    return socket is not None and await answers(socket)


async def say(socket: Path, line: bytes, patience: float = 1.0) -> bytes:
    """The first line the server on *socket* says to *line*; empty when it says nothing or is not there."""
    writer = None
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_unix_connection(str(socket))
            writer.write(line)
            return await reader.readline()
    except (OSError, TimeoutError):
        return b""
    finally:
        if writer is not None:
            writer.close()
