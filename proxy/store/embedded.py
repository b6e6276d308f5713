"""A private Valkey on a unix socket, shared by every process that opens the same data directory.

Three file locks coordinate the processes. A lock ends with its holder, even after ``kill -9``:

- ``owner.lock``: its holder starts, monitors and stops the server. All other processes are guests. Each guest tries to
  acquire the lock from time to time, and so becomes the owner when the owner ends.
- ``server.lock``: the server process inherits it. A process that can acquire it knows that no server runs. So a running
  server is adopted, whichever process started it, and two servers never write the same files.
- ``users.lock``: owner and guests share it. Only the last one to leave stops the server.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from proxy.store.backend import EmbeddedUnavailable, Warn
from proxy.store.embedded_paths import binary, known_socket, private_directory, socket_path
from proxy.tasks import Spawn

START: Final = 20.0
"""Seconds to start a server: reading back a full append-only file takes a few."""

STOP = 10.0
"""Seconds that a server has to end after each signal."""

_SHUTDOWN: Final = 1.0
"""Seconds that a server has to end after ``SHUTDOWN``: an idle one takes milliseconds."""

_OWNER_POLL, _GUEST_POLL, _AFTER_FAILURE = 0.25, 1.0, 5.0
"""Seconds between two checks of the server: by its owner, by a guest, and after a failed start."""

_POLL: Final = 0.02
"""Seconds between two checks of a server that starts or ends."""

_MAX_LOG: Final = 1024 * 1024
"""Bytes of the server's log from which a new one is begun at the next start."""

_SETTINGS: Final = {
    "port": "0",
    "unixsocketperm": "700",
    "daemonize": "no",
    "save": "",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "maxmemory": "256mb",
    "maxmemory-policy": "volatile-lru",
    "databases": "1",
}
"""Settings of the server. ``volatile-lru`` evicts only keys that expire, so the master key and the naming secret stay:
https://redis.io/docs/latest/develop/reference/eviction/
"""


class EmbeddedServer:
    """The private server as one process uses it; ``start`` builds it."""

    def __init__(self, directory: Path, program: Path, warn: Warn) -> None:
        self._directory = directory.absolute()
        self._program = program
        self._warn = warn
        self._socket = directory  # known once joined
        self._ownership = FileLock(directory / "owner.lock")
        self._usage = FileLock(directory / "users.lock")
        self._child: subprocess.Popen[bytes] | None = None
        self._monitoring: asyncio.Task[Any] | None = None
        self._closing = False
        self.restarts = 0

    @classmethod
    async def start(cls, directory: Path, spawn: Spawn, warn: Warn) -> EmbeddedServer:
        """The server of *directory*, ready: started, adopted, or joined as a guest.

        Raises ``EmbeddedUnavailable`` if there is no binary for this platform, the directory cannot be written, or the
        server does not start.
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
            self._close_locks()
            if isinstance(error, OSError):
                raise _unusable(directory, error) from error
            raise
        self._monitoring = spawn(self._monitor(), "embedded store")
        return self

    @property
    def url(self) -> str:
        """The server's address, as ``unix:///…``."""
        return "unix://" + quote(str(self._socket))

    @property
    def owner(self) -> bool:
        """True if this process starts, monitors and stops the server."""
        return self._ownership.is_held

    async def close(self) -> None:
        """Leave the server; stop it if no other process uses it. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        if self._monitoring is not None:
            self._monitoring.cancel()
            await asyncio.wait({self._monitoring})
        self._usage.release()
        # Others may leave at this moment. The last one to acquire both locks stops the server.
        for _ in range(3):
            if self._ownership.is_held or self._ownership.acquire():
                if self._usage.acquire():
                    await self._stop()
                    break
                self._ownership.release()
        self._close_locks()

    async def _join(self, deadline: float) -> None:
        # The lock is not free while the last user of a former server stops it.
        while not self._usage.acquire(shared=True):
            await self._pause(deadline)
        while True:
            if self._ownership.acquire():
                await self._start_server(deadline)
                return
            socket = known_socket(self._directory)
            if socket is not None and await is_answering(socket):
                self._socket = socket
                return
            await self._pause(deadline)

    async def _pause(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise EmbeddedUnavailable(f"another process owns {self._directory} and has no server that answers")
        await asyncio.sleep(0.05)

    def _close_locks(self) -> None:
        self._leave_child()
        self._ownership.close()
        self._usage.close()

    async def _monitor(self) -> None:
        while True:
            pause = _GUEST_POLL
            if self.owner:
                pause = _OWNER_POLL
            await asyncio.sleep(pause)
            if self.owner or self._ownership.acquire():
                try:
                    await self._restart_if_gone()
                except (EmbeddedUnavailable, OSError):
                    # The backend reports that the server does not answer. Here it is only tried again.
                    await asyncio.sleep(_AFTER_FAILURE)

    async def _restart_if_gone(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._child = None
        if not self._socket.exists() and not self._server_gone():
            await self._terminate()  # its socket was deleted, so no process can reach it any more
        if self._server_gone():
            self.restarts += 1
            private_directory(self._directory)
            await self._start_server(time.monotonic() + START)

    def _server_gone(self) -> bool:
        lock = FileLock(self._directory / "server.lock")
        try:
            return lock.acquire()
        finally:
            lock.close()

    async def _start_server(self, deadline: float) -> None:
        """Start the server, or adopt a running one. If it cannot start with its data, start it without.

        The data is moved aside for that. If the server does not start without it either, it is put back: the data was
        not the reason.
        """
        try:
            await self._start_or_adopt(deadline)
        except _EndedAtOnce:
            if not self._data.exists():
                raise
            _discard(self._aside)
            self._data.rename(self._aside)
            try:
                await self._start_or_adopt(deadline)
            except BaseException:
                _discard(self._data)
                self._aside.rename(self._data)
                raise
            advice = (
                "no request fails because of this: texts are written again; remove the moved data when you have seen it"
            )
            cause = f"its data cannot be read: {self._log} says why"
            self._warn("store.begun_anew", {"cause": cause, "moved_to": str(self._aside), "advice": advice})

    async def _start_or_adopt(self, deadline: float) -> None:
        self._socket = socket_path(self._directory)
        lock = FileLock(self._directory / "server.lock")
        try:
            if lock.acquire():
                self._child = self._launch(lock.handle)
        finally:
            lock.close()
        while not await is_answering(self._socket):
            if self._child is not None and self._child.poll() is not None:
                self._child = None
                raise _EndedAtOnce(f"the private server ended at once; {self._log} says why")
            if time.monotonic() > deadline:
                raise EmbeddedUnavailable(f"the private server does not answer; {self._log} may say why")
            await asyncio.sleep(_POLL)

    def _launch(self, lock: int) -> subprocess.Popen[bytes]:
        self._socket.unlink(missing_ok=True)
        if self._log.exists() and self._log.stat().st_size > _MAX_LOG:
            self._log.replace(self._log.with_suffix(".log.1"))
        settings = {
            **_SETTINGS,
            "unixsocket": str(self._socket),
            "dir": str(self._directory),
            "pidfile": str(self._pid_file),
            "logfile": str(self._log),
        }
        arguments = [text for name, value in settings.items() for text in (f"--{name}", value)]
        try:
            return subprocess.Popen(  # noqa: S603  # our own binary, our own arguments, no shell
                [str(self._program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C at the terminal must not end it before requests have drained
                pass_fds=(lock,),
                umask=0o077,
            )
        except OSError as error:
            raise EmbeddedUnavailable(f"{self._program} does not run here: {error.strerror or error}") from error

    async def _stop(self) -> None:
        await send_command(self._socket, b"SHUTDOWN\r\n")
        # A server that was started a moment ago does not listen yet: a signal ends it as cleanly.
        if not await self._gone_within(_SHUTDOWN):
            await self._terminate()

    async def _terminate(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
            if await self._gone_within(STOP):
                return

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.kill(self._server_pid(), number)
        except (OSError, ValueError):
            return  # it ended by itself, or before it wrote its process id

    def _server_pid(self) -> int:
        """The server's process id. Raises ``OSError`` or ``ValueError`` if it has not written one yet."""
        if self._child is not None:
            return self._child.pid
        return int(self._pid_file.read_text())

    async def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self._child is None or self._child.poll() is not None
            if ended and self._server_gone():
                return True
            await asyncio.sleep(_POLL)
        return False

    def _leave_child(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.returncode = 0  # it runs on for others; without this ``Popen`` warns when it is collected
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
    """The server ended before it answered, because of its data, its directory or the platform."""


def _discard(path: Path) -> None:
    """Remove *path*, a file or a directory, if it is there. Raises ``OSError``."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _unusable(directory: Path, error: OSError) -> EmbeddedUnavailable:
    return EmbeddedUnavailable(f"store.path {directory} cannot be used: {error.strerror or error}")


class FileLock:
    """A ``flock`` on *path*, created if missing; it ends with its process. Opening raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        # Not inherited by children: a server must not hold its owner's lock.
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.is_held = False

    def acquire(self, *, shared: bool = False) -> bool:
        """Acquire the lock without waiting. Return False if another process holds it."""
        mode = fcntl.LOCK_EX
        if shared:
            mode = fcntl.LOCK_SH
        try:
            fcntl.flock(self.handle, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.is_held = True
        return True

    def release(self) -> None:
        """Release the lock."""
        fcntl.flock(self.handle, fcntl.LOCK_UN)
        self.is_held = False

    def close(self) -> None:
        """Close the handle; the lock ends, unless a child inherited it."""
        os.close(self.handle)
        self.is_held = False


async def is_answering(socket: Path) -> bool:
    """True if a server on *socket* is ready."""
    return (await send_command(socket, b"PING\r\n")).startswith(b"+PONG")


async def is_running(directory: Path) -> bool:
    """True if *directory* has a server that is ready. Starts and changes nothing."""
    try:
        socket = known_socket(directory)
    except OSError:
        return False
    return socket is not None and await is_answering(socket)


async def send_command(socket: Path, line: bytes, patience: float = 1.0) -> bytes:
    """The first line of the reply to *line* from the server on *socket*; empty if there is no reply."""
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
