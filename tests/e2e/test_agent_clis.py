"""Agent command lines work headless, in front of the strict upstream, through a session of several windows; opt-in.

One command runs those that are installed, each as ``ullage connect`` configures it, in a home directory of its own and
with nothing but loopback to talk to. Programs are looked for on the ``PATH``::

    ULLAGE_AGENTS=1 PATH=/where/they/are/bin:$PATH python -m pytest tests/e2e/test_agent_clis.py -s

From npm come Codex, Claude Code, opencode, Qwen Code, Gemini CLI, pi, Continue and Cline (``@openai/codex``,
``@anthropic-ai/claude-code``, ``opencode-ai``, ``@qwen-code/qwen-code``, ``@google/gemini-cli``,
``@mariozechner/pi-coding-agent`` or, since 1.0, ``@earendil-works/pi-coding-agent``, ``@continuedev/cli``, ``cline``),
from PyPI mini-swe-agent (with ``litellm[mcp]``) and Aider (``aider-chat``).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from proxy.cli.clients import ClientFacts, clients, fill_in
from proxy.cli.connect import connect
from tests.conftest import StartProxy, StartStub
from tests.e2e.test_clients import crossings
from tests.stub import Answer, Call, Seen, Stub
from tests.support.process_inspection import kill_all

KEY = "sk-test-0123456789abcdef"
TASK = "Find out which of the part files mentions ledger 412, then say which one it is."
COMMAND = "cat part_{at}.txt"
LINES = 160
DONE = "It is part seven."
NOTES = "I was told that ledger 412 was closed in zone nine, and that nobody knows who did it. " * 20
"""What a person tells a program that uses no tools, again and again."""
PATIENCE = 240
NOWHERE = "http://127.0.0.1:9"
pytestmark = [
    pytest.mark.timeout(PATIENCE + 60),
    pytest.mark.skipif(not os.environ.get("ULLAGE_AGENTS"), reason="ULLAGE_AGENTS is not set"),
]


@dataclass(frozen=True)
class Agent:
    """A program: how it is called for one task, the tool that runs commands there, and what that tool is given."""

    program: str
    command: tuple[str, ...]
    tools: tuple[str, ...]
    window: int
    rounds: int = 24
    arguments: Callable[[str], Mapping[str, Any]] = lambda line: {"command": line}
    environment: Mapping[str, str] = field(default_factory=dict)
    model: str = "gpt-4o-mini"
    said: str = ""
    """What is typed, for a program that is told its tasks there."""


AGENTS = {
    "codex": Agent(
        "codex",
        ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK),
        ("shell_command", "exec_command", "shell"),
        24_000,
        model="gpt-5-codex",
    ),
    "claude-code": Agent(
        "claude",
        ("-p", TASK, "--allowedTools", "Bash", "--output-format", "json"),
        ("Bash",),
        80_000,
        rounds=36,
        environment={"DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        arguments=lambda line: {"command": line, "description": "Read a part"},
        model="claude-sonnet-4-5",
    ),
    "opencode": Agent(
        "opencode",
        ("run", TASK),
        ("bash",),
        24_000,
        environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        arguments=lambda line: {"command": line, "description": "Read a part"},
    ),
    "qwen-code": Agent(
        "qwen",
        ("-p", TASK, "--yolo", "--auth-type", "openai"),
        ("run_shell_command",),
        48_000,
        arguments=lambda line: {"command": line, "description": "Read a part", "is_background": False},
    ),
    "gemini-cli": Agent(
        "gemini",
        ("-p", TASK, "--yolo", "-m", "gemini-2.5-pro"),
        ("run_shell_command",),
        32_000,
        arguments=lambda line: {"command": line, "description": "Read a part"},
        environment={"GEMINI_CLI_TRUST_WORKSPACE": "true"},
        model="gemini-2.5-pro",
    ),
    "pi": Agent(
        "pi",
        ("-p", TASK, "--provider", "ullage", "--model", "gpt-4o-mini"),
        ("bash",),
        24_000,
        environment={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"},
    ),
    "cline": Agent("cline", (TASK,), ("run_commands",), 24_000, arguments=lambda line: {"commands": [line]}),
    "continue": Agent("cn", ("-p", TASK, "--auto"), ("Bash", "run_terminal_command"), 24_000),
    "aider": Agent(
        "aider",
        tuple(
            "--no-git --no-pretty --no-fancy-input --yes-always --no-show-model-warnings --no-check-update "  # noqa: SIM905
            "--analytics-disable --edit-format ask --max-chat-history-tokens 1000000 --map-tokens 0".split()
        ),
        (),
        8_192,
        rounds=0,
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        said="\n".join([*(f"Part {at}: {NOTES}" for at in range(24)), "Which part was it?", "/exit", ""]),
    ),
    "mini-swe-agent": Agent(
        "mini",
        ("-y", "--exit-immediately", "-t", TASK),
        ("bash",),
        24_000,
        environment={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
}


def working(agent: Agent) -> Callable[[Seen], Answer]:
    """A model that runs a command in each of its first answers to whoever may, and then is done."""
    made = iter(range(agent.rounds))

    def script(seen: Seen) -> Answer:
        if agent.said:
            return Answer(f"I have taken a note. {NOTES}") if b"Which part was it" not in seen.body else Answer(DONE)
        name = next((name for name in agent.tools if name in seen.tools), "")
        at = next(made, None) if name else -1
        if at is None:
            return _ending(agent, name)
        if at < 0:
            return Answer("Parts and ledgers")  # a title, or a summary
        line = COMMAND.format(at=at % 8)
        given: Mapping[str, Any] = {"cmd": line} if name == "exec_command" else agent.arguments(line)
        if name == "shell":
            given = {"command": ["bash", "-c", line]}
        thought = f"What is in part {at}?" if "thinking" in seen.parsed else ""
        return Answer(f"I read part {at}.", (Call(name, json.dumps(given)),), reasoning=thought)

    return script


def _ending(agent: Agent, name: str) -> Answer:
    if agent.program == "mini":  # it ends with a command that says so
        line = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {DONE}"
        return Answer(DONE, (Call(name, json.dumps(agent.arguments(line))),))
    return Answer(DONE)


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_works_through_windows(stub: StartStub, proxy: StartProxy, tmp_path: Path, name: str) -> None:
    """It ends with the model's last words, the window was crossed at least twice, and it never saw an overflow."""
    agent = AGENTS[name]
    if shutil.which(agent.program) is None:
        pytest.skip(f"{agent.program} is not installed")
    server = await stub(window=agent.window, wording="anthropic" if agent.program == "claude" else "openai")
    server.script = working(agent)
    front = await proxy(server.url, window=agent.window)
    try:
        done = await asyncio.to_thread(run, name, agent, front.root, tmp_path)
    finally:
        kill_all(tmp_path)  # Cline leaves a server of its own
    print(f"\n{name}: exit code {done.returncode}, {_summary(server)}")
    assert DONE in done.stdout, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert [seen.why for seen in server.chats("invalid")] == []
    assert crossings(server) >= 2, _summary(server)


def _summary(server: Stub) -> str:
    paths = sorted({seen.path for seen in server.chats()})
    counts = {verdict: len(server.chats(verdict)) for verdict in ("ok", "overflow", "invalid")}
    sizes = [seen.tokens for seen in server.chats("ok")]
    told = f"{paths}, {counts}, crossings {crossings(server)}, summaries {len(server.summaries)}"
    return f"{told}, sizes {sizes}"


def run(name: str, agent: Agent, root: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One session of an agent with the server at *root*, in a home below *folder*."""
    home, work = folder / "home", folder / "work"
    for each in (home, work):
        each.mkdir()
    for at in range(8):
        (work / f"part_{at}.txt").write_text("\n".join(f"part {at} line {n}: ledger {at * n}" for n in range(LINES)))
    known = clients()[name]
    surroundings = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1", "TERM": "dumb"}
    surroundings |= {"HTTPS_PROXY": NOWHERE, "HTTP_PROXY": NOWHERE}
    facts = ClientFacts(root, known.key, agent.model, 10 * agent.window, 4_096)  # roomy: its own compaction rests
    own = os.environ.get("HOME")
    os.environ["HOME"] = str(home)
    try:
        connect(name, known, facts, surroundings, home / "journal.json")
    finally:
        os.environ["HOME"] = own or ""
    environment = {**surroundings, known.key: KEY, **(fill_in(known.environment, facts) or {}), **agent.environment}
    for line in known.commands:
        subprocess.run(["sh", "-c", fill_in(line, facts)], cwd=work, env=environment, check=True, timeout=PATIENCE)
    command = [agent.program, *agent.command]
    typed: Mapping[str, Any] = {"input": agent.said} if agent.said else {"stdin": subprocess.DEVNULL}
    return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=PATIENCE, **typed)
