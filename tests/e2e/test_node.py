"""OpenAI's client for Node works through a tool session of several windows, over both of its APIs; opt-in.

One command runs it, given a folder in which ``npm install openai`` was done::

    ULLAGE_NODE=/that/folder python -m pytest tests/e2e/test_node.py
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import StartProxy, StartStub
from tests.e2e.test_clients import ROUNDS, WINDOW, crossings, rounds
from tests.support.sample_conversations import AGENT_SYSTEM, AGENT_TASK, AGENT_TOOLS, log

FOLDER = os.environ.get("ULLAGE_NODE", "")
pytestmark = pytest.mark.skipif(not (FOLDER and shutil.which("node")), reason="ULLAGE_NODE is not set, or no node")

SCRIPT = r"""
const { createRequire } = require("node:module");
const OpenAI = createRequire(process.env.FOLDER + "/")("openai").default;
const { system, task, tools, results } = JSON.parse(process.env.SESSION);
const client = new OpenAI({ maxRetries: 0 });
let read = 0;
const result = () => results[read++ % results.length];

async function chat() {
  const messages = [{ role: "system", content: system }, { role: "user", content: task }];
  for (;;) {
    const stream = client.chat.completions.stream({ model: "gpt-4o-mini", messages, tools });
    const answer = (await stream.finalChatCompletion()).choices[0].message;
    messages.push(answer);
    if (!answer.tool_calls?.length) return answer.content;
    for (const call of answer.tool_calls) {
      JSON.parse(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: result() });
    }
  }
}

async function responses() {
  const input = [{ role: "user", content: task }];
  const flat = tools.map((tool) => ({ type: "function", strict: false, ...tool.function }));
  for (;;) {
    const asked = { model: "gpt-4o-mini", instructions: system, input, tools: flat, store: false };
    const answer = await client.responses.stream(asked).finalResponse();
    input.push(...answer.output.map(({ parsed_arguments, ...item }) => item));
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls.length) return answer.output_text;
    for (const call of calls) input.push({ type: "function_call_output", call_id: call.call_id, output: result() });
  }
}

({ chat, responses })[process.argv[2]]().then((said) => console.log(JSON.stringify({ read, said })));
"""


def run(api: str, url: str, folder: Path, count: int) -> subprocess.CompletedProcess[str]:
    """A session of so many rounds over *api* with the server at *url*."""
    script = folder / "session.cjs"
    script.write_text(SCRIPT)
    results = [log(at, 400) for at in range(2 * count)]
    session = {"system": AGENT_SYSTEM, "task": AGENT_TASK, "tools": AGENT_TOOLS, "results": results}
    environment = {
        "PATH": os.environ["PATH"],
        "FOLDER": FOLDER,
        "SESSION": json.dumps(session),
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "sk-test-0123456789abcdef",
    }
    command = ["node", str(script), api]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openais_client_for_node(stub: StartStub, proxy: StartProxy, tmp_path: Path, api: str) -> None:
    """Every streamed answer arrives, every tool call is served once, and the upstream never has to refuse."""
    server = await stub(window=WINDOW)
    server.script = rounds(ROUNDS, "read_file", lambda path: {"path": path})
    front = await proxy(server.url, window=WINDOW)
    done = await asyncio.to_thread(run, api, front.url, tmp_path, ROUNDS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["read"] == 2 * ROUNDS
    assert len(server.chats()) == len(server.chats("ok")) == ROUNDS + 1
    assert crossings(server) >= 2
