"""``ullage run``: what a client gets, and that proxy and client end together."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from proxy.cli.clients import ClientFacts, clients
from proxy.cli.run import (
    ANTHROPIC,
    BY_SIGNAL,
    COMMON_CLIENTS,
    GOOGLE,
    OPENAI,
    environment_of,
    launch_of,
    providers,
    run_child,
)
from tests.conftest import StartStub
from tests.support.forked_ullage import NOTHING, ROOT, ForkedProcess, StandardStreams, start_ullage
from tests.support.proxy_process import until

CLIENTS = clients()
USUAL_CLIENTS = [CLIENTS[name] for name in COMMON_CLIENTS]
PORT = "http://127.0.0.1:9"
FACTS = ClientFacts(PORT, "KEY", "some-model", 120_000, 4_096, 120_000)
BARE = ClientFacts(PORT, "KEY")
STARTED = [name for name, each in CLIENTS.items() if each.run is not None or each.environment]

ASK = """
import json, os, sys, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
request.add_header("content-type", "application/json")
with urllib.request.urlopen(request) as answer:
    print(answer.headers["x-ullage-outcome"], os.environ["ANTHROPIC_BASE_URL"], flush=True)
"""


@pytest.mark.parametrize("facts", [FACTS, BARE])
@pytest.mark.parametrize("name", STARTED)
def test_every_client_that_can_gets_the_address(name: str, facts: ClientFacts) -> None:
    """A variable or an argument has the address, no placeholder is left, and the user's own arguments come last."""
    launch = launch_of(CLIENTS[name], facts, ["program", "own"], USUAL_CLIENTS)
    assert (launch.command[0], launch.command[-1]) == ("program", "own")
    text = json.dumps([launch.command, dict(launch.environment)])
    assert PORT in text
    assert "{model}" not in text
    assert "None" not in text


def test_a_client_gets_what_its_files_would_say() -> None:
    """Variables have the names and values of its settings; a document is its whole file."""
    claude = launch_of(CLIENTS["claude-code"], FACTS, ["claude"], ()).environment
    assert claude["ANTHROPIC_BASE_URL"] == PORT
    assert claude["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "120000"
    document = json.loads(
        launch_of(CLIENTS["opencode"], FACTS, ["opencode"], ()).environment["OPENCODE_CONFIG_CONTENT"]
    )
    assert document["provider"]["ullage"]["options"]["baseURL"] == f"{PORT}/v1"
    codex = launch_of(CLIENTS["codex"], BARE, ["codex", "exec"], ()).command
    assert codex[1:3] == ("-c", "model_provider=ullage")
    assert not any("model_context_window" in word for word in codex)


def test_any_command_gets_the_usual_variables() -> None:
    """Those of the SDKs, beside what it had, and no HTTP proxy stands between."""
    launch = launch_of(None, BARE, ["python", "x.py"], USUAL_CLIENTS)
    environment = environment_of(launch, {"A": "1", "no_proxy": "example.com", "OPENAI_BASE_URL": "http://old"})
    assert (environment["OPENAI_BASE_URL"], environment["OPENAI_API_BASE"]) == (f"{PORT}/v1", f"{PORT}/v1")
    assert (environment["ANTHROPIC_BASE_URL"], environment["A"]) == (PORT, "1")
    assert environment["NO_PROXY"] == "example.com,127.0.0.1"


@pytest.mark.parametrize(
    ("client", "environ", "urls"),
    [
        ("claude-code", {}, [ANTHROPIC]),
        ("codex", {}, [OPENAI]),
        ("codex", {"OPENAI_BASE_URL": "http://mine/v1"}, ["http://mine/v1"]),
        ("gemini-cli", {}, [GOOGLE]),
        ("gemini-cli", {"GOOGLE_GEMINI_BASE_URL": "http://mine"}, ["http://mine"]),
        (None, {"ANTHROPIC_BASE_URL": "http://mine"}, [OPENAI, "http://mine"]),
    ],
)
def test_without_an_upstream_it_is_the_clients_own(
    client: str | None, environ: Mapping[str, str], urls: list[str]
) -> None:
    """The upstream is the address in its variables, else its provider; any command gets both providers."""
    overrides = providers(CLIENTS[client] if client else None, 9, environ)
    assert [each["base_url"] for each in overrides["upstreams",]] == urls  # type: ignore[attr-defined]


def environment_at(home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(home), "XDG_DATA_HOME": f"{home}/share", "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Running:
    """``ullage run``, whose output is written to files."""

    process: ForkedProcess | subprocess.Popen[bytes]
    output: Path
    errors: Path

    async def first_line(self) -> str:
        """The first line of its output, once that is complete."""
        await until(lambda: "\n" in self.output.read_text())
        return self.output.read_text().partition("\n")[0]

    async def code(self) -> int:
        """Its exit code, once it has ended."""
        return await asyncio.to_thread(self.process.wait, 60)


async def forked(home: Path, *words: str) -> Running:
    """``ullage run`` with *words*, in a home of its own."""
    streams = StandardStreams(NOTHING, home / "output", home / "errors")
    streams.output.touch()
    process = await asyncio.to_thread(start_ullage, ["run", *words], environment_at(home), home, streams)
    return Running(process, streams.output, streams.errors)


async def started(home: Path, *words: str, terminal: int = 0) -> asyncio.subprocess.Process:
    """``ullage run`` with *words* as its users start it; *terminal* is its terminal, if that is not 0."""
    log_in = None
    if terminal:
        log_in = partial(os.login_tty, terminal)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy.cli", "run", *words),
        env=environment_at(home),
        cwd=home,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=log_in,
    )


@pytest.mark.slow
async def test_a_command_runs_beside_a_proxy_and_nothing_is_written(stub: StartStub, tmp_path: Path) -> None:
    """It reaches the upstream through the proxy; its output, and nothing else, is there; its exit code is passed on."""
    server = await stub()
    words = ("--upstream", server.url, "--window", "8192", "--", sys.executable, "-c", f"{ASK}\nsys.exit(7)")
    process = await started(tmp_path, *words)
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, errors) == (7, b"")
    outcome, address = out.decode().split()
    assert (outcome, address.startswith("http://127.0.0.1:")) == ("verbatim", True)
    assert len(server.chats()) == 1
    assert os.listdir(tmp_path) == []


PRINT_ARGUMENTS = "import os, sys; print(sys.argv[1:], 'OPENAI_BASE_URL' in os.environ)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (("qwen-code", "--", "-p", "x", "--", "y"), ["-p", "x", "--", "y"]),
        (("qwen-code", "-p", "x"), ["-p", "x"]),
        (("openai", "--", "qwen", "-p"), ["-p"]),
        (("--", "qwen-code", "--", "-p"), ["-p"]),
        (("env", "--", "qwen", "x"), ["x"]),
    ],
)
async def test_a_client_is_set_apart_from_its_arguments(
    words: tuple[str, ...], arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `--` behind a client is no argument of it; behind another command it is that command's own."""
    program = tmp_path / "qwen"
    program.write_text(f"#!{sys.executable}\n{PRINT_ARGUMENTS}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    running = await forked(tmp_path, "--upstream", "http://127.0.0.1:9/v1", *words)
    code = await running.code()
    assert (code, running.output.read_text().strip()) == (0, f"{arguments} True"), running.errors.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_is_passed_on_and_both_end(stub: StartStub, tmp_path: Path, number: signal.Signals) -> None:
    """The command decides what a signal means."""
    server = await stub()
    handle = f"import signal, time; signal.signal({int(number)}, lambda *_: print('heard', flush=True) or exit(3))"
    ready = "print(__import__('os').getppid(), flush=True); time.sleep(60)"
    running = await forked(tmp_path, "--upstream", server.url, "--", sys.executable, "-c", f"{handle}; {ready}")
    parent = await running.first_line()
    os.kill(int(parent), number)
    assert (await running.code(), running.output.read_text()) == (3, f"{parent}\nheard\n")


COUNT_SIGNALS = """
import signal, sys, time
signals = []
signal.signal(signal.SIGINT, lambda *_: signals.append(1))
print("ready", flush=True)
deadline = time.monotonic() + 1.0
while time.monotonic() < deadline:
    time.sleep(0.1)
sys.exit(40 + len(signals))
"""


async def test_a_signal_before_the_command_runs_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until there is a process to send it to."""
    start = asyncio.create_subprocess_exec

    async def start_late(*command: str, **options: Any) -> asyncio.subprocess.Process:
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.05)
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_late)
    assert await run_child(["sleep", "5"], os.environ) == BY_SIGNAL + signal.SIGUSR1


@pytest.mark.slow
async def test_a_typed_signal_reaches_the_command_once(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to every process in its foreground: the command has it already."""
    main, terminal = pty.openpty()
    words = ("--upstream", "http://127.0.0.1:9/v1", "--", sys.executable, "-c", COUNT_SIGNALS)
    process = await started(tmp_path, *words, terminal=terminal)
    seen = b""
    async with asyncio.timeout(60):
        while b"ready" not in seen:
            seen += await asyncio.to_thread(os.read, main, 1024)
    os.write(main, b"\x03")
    await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 41
    os.close(main)
    os.close(terminal)


@pytest.mark.slow
async def test_a_command_that_a_signal_ended_has_its_shells_code(tmp_path: Path) -> None:
    """128 and the signal's number."""
    running = await forked(tmp_path, "--upstream", "http://127.0.0.1:9/v1", "--", "sh", "-c", "kill -KILL $$")
    assert await running.code() == 128 + signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("--model", "m", "pi", "x"), 2, "from files only"),
        (("--model", "m", "cline", "x"), 2, "`ullage connect cline` says how"),
        (("opencode",), 2, "give --model"),
        (("openai",), 2, "Give the command"),
        (("no-such-command-at-all",), 127, "is no command"),
        (("--log", "/no/such/folder/x", "--upstream", "http://127.0.0.1:9/v1", "true"), 2, "cannot be written"),
    ],
)
async def test_what_cannot_be_started_is_said(tmp_path: Path, words: tuple[str, ...], code: int, sentence: str) -> None:
    """One sentence, and an exit code that says whose fault it is."""
    running = await forked(tmp_path, *words)
    assert await running.code() == code
    assert sentence in running.errors.read_text()


async def test_a_command_whose_interpreter_is_gone_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A script of a removed environment is on the PATH, and cannot be started."""
    script = tmp_path / "agent"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    assert await run_child([str(script)], os.environ) == 126
    assert capfd.readouterr().err == f"{script} cannot be started: No such file or directory.\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process that its parent is gone")
@pytest.mark.slow
async def test_a_killed_proxy_takes_its_command_along(stub: StartStub, tmp_path: Path) -> None:
    """``kill -9`` leaves no client behind that would only get connection errors."""
    server = await stub()
    code = "import os, time; print(os.getppid(), os.getpid(), flush=True); time.sleep(600)"
    running = await forked(tmp_path, "--upstream", server.url, "--", sys.executable, "-c", code)
    parent, pid = map(int, (await running.first_line()).split())
    os.kill(parent, signal.SIGKILL)
    assert await running.code() == -signal.SIGKILL
    for _ in range(600):
        if not is_running(pid):
            return
        await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the command outlives the proxy")


def is_running(pid: int) -> bool:
    """True if the process *pid* exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
