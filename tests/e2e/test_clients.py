"""Real client libraries work through a tool session that is several windows long, each in its own process.

Those that the tests do not install are opt-in. One command runs them, given a folder with an environment for each, in
which its packages were installed (``OTHERS`` names them)::

    python -m venv FOLDER/strands && FOLDER/strands/bin/pip install 'strands-agents[anthropic]'
    ULLAGE_LIBRARIES=FOLDER python -m pytest tests/e2e/test_clients.py
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import StartProxy, StartStub
from tests.stub import Answer, Call, Seen, Stub
from tests.support.library_agents import INSTALLED
from tests.support.proxy_process import ROOT

WINDOW = 8192
ROUNDS = 20
PATIENCE = 300
FOLDER = os.environ.get("ULLAGE_LIBRARIES", "")
pytestmark = pytest.mark.timeout(PATIENCE + 60)
DONE = "Done: the rows are kept."
ENDING = "final_answer"
"""The tool with which agents of smolagents end."""


def rounds(
    count: int, tool: str, arguments: Callable[[str], dict[str, object]], parallel: int = 2
) -> Callable[[Seen], Answer]:
    """A model that calls *tool* in each of its first *count* answers, and then is done."""
    made = iter(range(count))

    def script(seen: Seen) -> Answer:
        at = next(made, None)
        if at is None and ENDING in seen.tools:
            return Answer("", (Call(ENDING, json.dumps({"answer": DONE})),))
        if at is None:
            return Answer(DONE)
        files = [arguments(f"src/part_{at}_{number}.py") for number in range(parallel)]
        return Answer(f"Step {at}.", tuple(Call(tool, json.dumps(file)) for file in files))

    return script


def crossings(server: Stub) -> int:
    """How often the views that were answered became much smaller: the window had been full."""
    return sum(now.tokens < 0.85 * before.tokens for before, now in pairwise(server.chats("ok")))


LIBRARIES = {"langchain": "langchain_openai", "pydantic_ai_responses": "pydantic_ai"}
"""What the agents are made with, where it is not called like them."""


OTHERS = {
    "smolagents": "smolagents[openai]",
    "llama_index": "llama-index-core llama-index-llms-openai-like",
    "llm": "llm",
    "openai_agents": "openai-agents",
    "strands": "strands-agents[anthropic]",
    "google_adk": "google-adk",
    "autogen": "autogen-agentchat autogen-ext[openai]",
    "haystack": "haystack-ai",
}
"""The packages of each agent that needs an environment of its own."""
WORDINGS = {"strands": "anthropic"}


@pytest.mark.parametrize("agent", [each.__name__ for each in INSTALLED])
async def test_a_library_works_through_windows(stub: StartStub, proxy: StartProxy, tmp_path: Path, agent: str) -> None:
    """Every answer arrives, every tool call is served once, and the upstream never has to refuse."""
    if importlib.util.find_spec(LIBRARIES.get(agent, agent)) is None:
        pytest.skip("it is not installed: pip install '.[test]'")
    await work_through_windows(sys.executable, stub, proxy, tmp_path, agent)


@pytest.mark.parametrize("agent", OTHERS)
@pytest.mark.skipif(not FOLDER, reason="ULLAGE_LIBRARIES is not set")
async def test_another_library_works_through_windows(
    stub: StartStub, proxy: StartProxy, tmp_path: Path, agent: str
) -> None:
    """The same for libraries in environments of their own."""
    python = Path(FOLDER) / agent / "bin" / "python"
    if not python.exists():
        pytest.skip(f"it is not installed: {OTHERS[agent]}")
    await work_through_windows(str(python), stub, proxy, tmp_path, agent)


async def work_through_windows(python: str, stub: StartStub, proxy: StartProxy, folder: Path, agent: str) -> None:
    """One session of *agent* in the environment of *python*, of several windows."""
    server = await stub(window=WINDOW, wording=WORDINGS.get(agent, "openai"))
    server.script = rounds(ROUNDS, "read_file", lambda path: {"path": path})
    front = await proxy(server.url, window=WINDOW)
    command = [python, "-m", "tests.support.library_agents", agent, front.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"read": 2 * ROUNDS, "said": DONE}
    assert len(server.chats()) == len(server.chats("ok")) == ROUNDS + 1
    assert crossings(server) >= 2
