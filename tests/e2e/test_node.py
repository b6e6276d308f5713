"""Clients for Node work through a tool session of several windows, over each of their APIs; opt-in.

They are OpenAI's, over both of its APIs, and the AI SDK, over these and Anthropic's. One command runs those of them
that were installed in a folder, with ``npm install openai`` and ``npm install ai @ai-sdk/openai-compatible
@ai-sdk/openai @ai-sdk/anthropic``::

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
from tests.e2e.test_clients import DONE, PATIENCE, ROUNDS, WINDOW, crossings, rounds
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

AI_SDK = r"""
const { createRequire } = require("node:module");
const get = createRequire(process.env.FOLDER + "/");
const { streamText, tool, jsonSchema, stepCountIs } = get("ai");
const { system, task, tools, results } = JSON.parse(process.env.SESSION);
const given = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };
const models = {
  chat: () => get("@ai-sdk/openai-compatible").createOpenAICompatible({ name: "ullage", ...given })("gpt-4o-mini"),
  responses: () => get("@ai-sdk/openai").createOpenAI(given)("gpt-4o-mini"),
  messages: () => get("@ai-sdk/anthropic").createAnthropic(given)("claude-sonnet-4-5"),
};
let read = 0;
const execute = async () => results[read++ % results.length];
const offered = tools.map(({ function: { name, description, parameters } }) => [
  name,
  tool({ description, inputSchema: jsonSchema(parameters), execute }),
]);

async function main() {
  const stopWhen = stepCountIs(60);
  const asked = { system, prompt: task, tools: Object.fromEntries(offered), maxOutputTokens: 400, maxRetries: 0 };
  const stream = streamText({ model: models[process.argv[2]](), ...asked, stopWhen });
  for await (const part of stream.fullStream) if (part.type === "error") throw part.error;
  return stream.text;
}

main().then((said) => console.log(JSON.stringify({ read, said })));
"""


def run(api: str, url: str, folder: Path, count: int, text: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    """A session of so many rounds over *api* with the server at *url*; *text* is the program."""
    script = folder / "session.cjs"
    script.write_text(text)
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
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openais_client_for_node(stub: StartStub, proxy: StartProxy, tmp_path: Path, api: str) -> None:
    """Every streamed answer arrives, every tool call is served once, and the upstream never has to refuse."""
    skip_without("openai")
    await work_through_windows(stub, proxy, tmp_path, api, SCRIPT)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_the_ai_sdk(stub: StartStub, proxy: StartProxy, tmp_path: Path, api: str) -> None:
    """The same with the AI SDK, which runs the loop itself."""
    skip_without("ai")
    await work_through_windows(stub, proxy, tmp_path, api, AI_SDK)


def skip_without(package: str) -> None:
    """Skip the test unless *package* is installed in the folder."""
    if not (Path(FOLDER) / "node_modules" / package).exists():
        pytest.skip(f"{package} is not installed in {FOLDER}")


async def work_through_windows(stub: StartStub, proxy: StartProxy, folder: Path, api: str, text: str) -> None:
    """One session of a program, of several windows."""
    server = await stub(window=WINDOW, wording="anthropic" if api == "messages" else "openai")
    server.script = rounds(ROUNDS, "read_file", lambda path: {"path": path})
    front = await proxy(server.url, window=WINDOW)
    done = await asyncio.to_thread(run, api, front.url, folder, ROUNDS, text)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"read": 2 * ROUNDS, "said": DONE}
    assert len(server.chats()) == len(server.chats("ok")) == ROUNDS + 1
    assert crossings(server) >= 2
