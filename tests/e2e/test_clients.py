"""Real client libraries work through a tool session that is several windows long, each in its own process."""

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
from tests.support.library_agents import AGENTS
from tests.support.proxy_process import ROOT

WINDOW = 8192
ROUNDS = 20
PATIENCE = 100


def rounds(
    count: int, tool: str, arguments: Callable[[str], dict[str, object]], parallel: int = 2
) -> Callable[[Seen], Answer]:
    """A model that calls *tool* in each of its first *count* answers, and then is done."""
    made = iter(range(count))

    def script(_seen: Seen) -> Answer:
        at = next(made, None)
        if at is None:
            return Answer("Done: the rows are kept.")
        files = [arguments(f"src/part_{at}_{number}.py") for number in range(parallel)]
        return Answer(f"Step {at}.", tuple(Call(tool, json.dumps(file)) for file in files))

    return script


def crossings(server: Stub) -> int:
    """How often the views that were answered became much smaller: the window had been full."""
    return sum(now.tokens < 0.85 * before.tokens for before, now in pairwise(server.chats("ok")))


LIBRARIES = {"langchain": "langchain_openai", "pydantic_ai_responses": "pydantic_ai"}
"""What the agents are made with, where it is not called like them."""


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_library_works_through_windows(stub: StartStub, proxy: StartProxy, tmp_path: Path, agent: str) -> None:
    """Every answer arrives, every tool call is served once, and the upstream never has to refuse."""
    if importlib.util.find_spec(LIBRARIES.get(agent, agent)) is None:
        pytest.skip("it is not installed: pip install '.[test]'")
    server = await stub(window=WINDOW)
    server.script = rounds(ROUNDS, "read_file", lambda path: {"path": path})
    front = await proxy(server.url, window=WINDOW)
    command = [sys.executable, "-m", "tests.support.library_agents", agent, front.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"read": 2 * ROUNDS, "said": "Done: the rows are kept."}
    assert len(server.chats()) == len(server.chats("ok")) == ROUNDS + 1
    assert crossings(server) >= 2
