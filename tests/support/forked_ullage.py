"""Starts ``ullage`` in a fork of an interpreter that has imported it: saves two seconds of CPU for each command.

What runs is the command itself, in a process that has a session, an environment, a folder and standard streams of its
own, and is killed and waited for like any other. Only the interpreter's start, the imports and the vocabulary are not
its own, nor does it free modules at its end. ``tests/cli/test_main.py``, ``tests/test_packaging.py`` and the
tests of several workers start interpreters as its users do.

There are two such interpreters, which fork proxies in turn. Each orders the members of sets in its own way
(https://docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED), and what a proxy writes must not depend on it: a
proxy that is restarted, or a second one with the same store, has another order than the first.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import itertools
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_GIGATOKEN = Path(__file__).parent / "without_gigatoken"
NOTHING = Path(os.devnull)
POLL_SECONDS = 0.01
COMMAND_SECONDS = 60.0

CAN_FORK = sys.platform == "linux"
"""macOS ends forks of programs that used its frameworks: https://github.com/python/cpython/issues/77906"""


class StandardStreams(NamedTuple):
    """The files that a fork reads and appends to; one file may be both outputs."""

    input: Path
    output: Path
    errors: Path


class ForkedProcess:
    """A child of a prepared interpreter, with what tests use of a ``subprocess.Popen``."""

    def __init__(self, interpreter: PreparedInterpreter, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._interpreter = interpreter

    def poll(self) -> int | None:
        """Return the exit code (minus the number of the signal that ended the process); None while it runs."""
        if self.returncode is None:
            self.returncode = self._interpreter.request({"exit_code_of": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code once the process has ended; raises ``subprocess.TimeoutExpired``."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            time.sleep(POLL_SECONDS)
        return code


class PreparedInterpreter:
    """An interpreter that has imported the proxy and forks on request: one line of JSON each way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, streams: StandardStreams
    ) -> ForkedProcess:
        """Return the running ``ullage`` with *arguments*; the interpreter is started by the first request."""
        with self._lock:
            if self._process is None:
                self._process = _start()
        start = {"arguments": list(arguments), "environment": dict(environment), "folder": str(folder)}
        return ForkedProcess(self, self.request({"start": {**start, "streams": list(map(str, streams))}}))

    def request(self, message: dict[str, Any]) -> Any:
        """Return the answer to *message*."""
        with self._lock:
            assert self._process is not None
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        """End the interpreter if it was started; what it forked goes on."""
        if self._process is not None:
            self._process.communicate()


def fork_proxy(arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> ForkedProcess:
    """Start ``ullage`` with *arguments* in *folder*, by the next interpreter. *log* gets its standard streams."""
    return next(_TURNS).fork(arguments, environment, folder, StandardStreams(NOTHING, log, log))


def start_ullage(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, streams: StandardStreams
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start ``ullage`` with *arguments* in *folder*: as a fork, or with an interpreter where forks are ended."""
    if CAN_FORK:
        return _INTERPRETERS[0].fork(arguments, environment, folder, streams)
    command = [sys.executable, "-m", "proxy.cli", *arguments]
    with streams.input.open() as given, streams.output.open("ab") as output, streams.errors.open("ab") as errors:
        return subprocess.Popen(command, cwd=folder, env=environment, stdin=given, stdout=output, stderr=errors)


def run_ullage(
    *arguments: str, environment: Mapping[str, str] | None = None, stdin: Path = NOTHING
) -> subprocess.CompletedProcess[str]:
    """Run ``ullage`` with *arguments* to its end, at the root of the repository, with the file *stdin* as its input.

    Of the variables whose names begin with ``ULLAGE_`` it has those of *environment* only.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ULLAGE_")}
    environment = {**inherited, "PYTHONPATH": str(ROOT), **(environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        streams = StandardStreams(stdin, Path(folder, "output"), Path(folder, "errors"))
        process = start_ullage(arguments, environment, ROOT, streams)
        try:
            code = process.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(
            ["ullage", *arguments], code, streams.output.read_text(), streams.errors.read_text()
        )


_INTERPRETERS = (PreparedInterpreter(), PreparedInterpreter())
_TURNS = itertools.cycle(_INTERPRETERS)


@atexit.register
def _end_interpreters() -> None:
    for interpreter in _INTERPRETERS:
        interpreter.end()


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), str(WITHOUT_GIGATOKEN)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "tests.support.forked_ullage"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)


def serve_forks() -> None:
    """Answer requests until the pipe is closed. In a fork, run ``ullage`` instead, and end the process with it."""
    _prepare()
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if "start" in message:
            answer: int | None = os.fork()
            if answer == 0:
                _become_ullage(**message["start"])
                _end(_run())
        else:
            pid, status = os.waitpid(message["exit_code_of"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        sys.stdout.write(f"{json.dumps(answer)}\n")


def _prepare() -> None:
    """Import what ``ullage serve`` imports, now or when a feature is on, and load the usual vocabulary.

    The packaged tables are read, too, and the compiled patterns of the tools are in the cache of ``re``.
    """
    for name in ("proxy.cli.commands", "proxy.fleet", "proxy.telemetry.metrics", "proxy.features"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(sys.modules["proxy.features"].__path__, "proxy.features."):
        importlib.import_module(module.name)
    from proxy.core.models import DEFAULT_ENCODING
    from proxy.features.settings import AllSettings
    from proxy.settings import injected_rules, load, overflow_rules, tool_map
    from proxy.tokenizers import Tokenizers
    from proxy.upstream_wiring import open_catalogue

    Tokenizers(fast=False).counter(DEFAULT_ENCODING)
    settings = load(None, {}, {}, AllSettings)
    open_catalogue(settings)
    tool_map(settings.tools)
    injected_rules(settings.injected)
    overflow_rules(settings.overflow_rules)
    assert threading.active_count() == 1, "threads do not survive a fork"
    gc.freeze()


def _become_ullage(
    arguments: Sequence[str], environment: Mapping[str, str], folder: str, streams: Sequence[str]
) -> None:
    """Give this process its own session, folder, environment, arguments and standard streams."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["ullage", *arguments]
    files = StandardStreams(*map(Path, streams))
    with files.input.open() as given, files.output.open("ab") as output, files.errors.open("ab") as errors:
        os.dup2(given.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)


def _run() -> int:
    """Return the exit code of the command. What else it raises ends the interpreter as ever."""
    try:
        runpy.run_module("proxy.cli", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    assert isinstance(code, int)
    return code


def _end(code: int) -> NoReturn:
    """End this process as ``multiprocessing`` ends its forks: threads and exit functions first, but no module freed.

    Freeing them writes to every page that is shared with the interpreter: 0.07 s of CPU, half of what a command takes.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve_forks()
