"""Starts the proxy as its users do: a real ``ullage serve`` process on a free loopback port."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import yaml

from tests.support.forked_ullage import CAN_FORK, ROOT, WITHOUT_GIGATOKEN, ForkedProcess, fork_proxy
from tests.support.loopback import loopback_client
from tests.support.ports import free_port

if TYPE_CHECKING:
    from openai import AsyncOpenAI

READY_WITHIN = 90.0
ENDED_WITHIN = 60.0

_READ_AT_START = ("PYTHON", "LD_")
"""Names with which variables begin that the interpreter or the system's loader reads: a fork comes too late."""


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return as soon as *condition* holds; raises ``TimeoutError`` when it does not within *seconds*."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the thing watched lives in another process or server
            await asyncio.sleep(0.01)


@dataclass
class Proxy:
    """A running proxy: an async context manager around one ``ullage serve`` process group.

    ``under`` is a command that runs another, the rest of its arguments. Unless ``fast``, gigatoken counts as missing.
    Without ``config`` everything is set on the command line. With it the file has that, completed by a private data
    directory, so that no test meets another's store.

    A proxy is forked, unless it is ``fast``, runs ``under`` a command, or has in its ``environment`` what changes the
    start of an interpreter.
    """

    upstream: str
    window: int | None = None
    config: Mapping[str, Any] | None = None
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    home: Path | None = None
    process: subprocess.Popen[bytes] | ForkedProcess | None = None
    under: Sequence[str] = ()
    fast: bool = True

    async def __aenter__(self) -> Self:
        self._own_home = self.home is None
        self.home = self.home or Path(tempfile.mkdtemp(prefix="ulg-"))
        self.port = self.port or free_port()
        try:
            await self.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.end)
        if self._own_home and self.home is not None:
            shutil.rmtree(self.home, ignore_errors=True)

    async def start(self) -> None:
        """Start the process and return once it says that it is ready; raises ``RuntimeError`` with the log's end."""
        environment = {**os.environ, "HOME": str(self.home), "XDG_DATA_HOME": f"{self.home}/share"}
        path = [str(ROOT)]
        if not self.fast:
            path.append(str(WITHOUT_GIGATOKEN))
        environment |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", **self.environment}
        await asyncio.to_thread(self._spawn, environment)
        await self._ready()

    def end(self, how: signal.Signals = signal.SIGTERM) -> int | None:
        """Send *how* to the process, wait for it, and return its exit code; what is left of its group is killed."""
        if self.process is None:
            return None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, how)
        try:
            code: int | None = self.process.wait(ENDED_WITHIN)
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(ENDED_WITHIN)
        self.process = None
        return code

    @property
    def pid(self) -> int:
        """The process id of ``ullage serve``."""
        if self.process is None:
            raise RuntimeError("the proxy is not running")
        return self.process.pid

    @property
    def root(self) -> str:
        """The proxy's address without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The base URL for a client."""
        return f"{self.root}/v1"

    @property
    def log(self) -> Path:
        """Everything the process wrote to its standard streams."""
        if self.home is None:
            raise RuntimeError("the proxy has not been started")
        return self.home / "ullage.log"

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "proxy.cli", *self._arguments()]

    def _arguments(self) -> list[str]:
        arguments = ["serve", "--host", "127.0.0.1", "--port", str(self.port)]
        if self.config is not None:
            config = {**self.config}
            config["store"] = {"path": f"{self.home}/data", **config.get("store", {})}
            config.setdefault("upstreams", [{"name": "stub", "base_url": self.upstream}])
            file = Path(f"{self.home}/ullage.yaml")
            file.write_text(yaml.safe_dump(config, sort_keys=False))
            arguments += ["--config", str(file)]
        else:
            arguments += ["--upstream", self.upstream]
        if self.window is not None:
            arguments += ["--window", str(self.window)]
        return [*arguments, *self.arguments]

    def _spawn(self, environment: Mapping[str, str]) -> None:
        if self.home is not None and self._is_forked():
            self.process = fork_proxy(self._arguments(), environment, self.home, self.log)
            return
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.under, *self._command()],
                cwd=self.home,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _is_forked(self) -> bool:
        if any(name.startswith(_READ_AT_START) for name in self.environment):
            return False
        return CAN_FORK and not self.under and not self.fast

    async def _ready(self) -> None:
        until = time.monotonic() + READY_WITHIN
        async with loopback_client(base_url=self.root) as client:
            while time.monotonic() < until:
                if self.process is None or self.process.poll() is not None:
                    break
                with suppress(httpx.TransportError):
                    if (await client.get("/health/ready", timeout=2.0)).status_code == 200:
                        return
                await asyncio.sleep(0.05)
        log, ended = (
            self.log.read_text(errors="replace")[-3000:],
            self.process is None or self.process.poll() is not None,
        )
        what = "ended before it was ready" if ended else f"was not ready within {READY_WITHIN:.0f} s"
        raise RuntimeError(f"the proxy {what}; its log ends:\n{log}")


@dataclass
class Client:
    """The real OpenAI client, with the bytes of every request body it sent in ``bodies``."""

    base_url: str
    api_key: str = "sk-test-0123456789abcdef"
    timeout: float = 60.0
    bodies: list[bytes] = field(default_factory=list)

    async def __aenter__(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI  # not above: it takes a second, and most tests have no client

        async def note(request: httpx.Request) -> None:
            self.bodies.append(await request.aread())

        web = loopback_client(event_hooks={"request": [note]}, timeout=self.timeout)
        self._client = AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=web, max_retries=0)
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
