"""Records what real clients send: ``python -m tests.e2e.record_clients NAME...``, into ``tests/recorded``.

Each client works through a few rounds in front of the strict upstream alone, with a window that never fills; agents
are then told that it did, so that their own compaction is recorded, too. Credentials become placeholders, folders of
this machine become ``/home/user``. Of Claude Code, whose texts are not free, every longer text of its own keeps its
form, its marks and its first words, and has other words of the same length in place of the rest.

``ULLAGE_PYTHON`` names another interpreter for the libraries, ``ULLAGE_NODE`` a folder in which ``npm install openai``
was done.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.e2e import test_agent_clis, test_node
from tests.e2e.test_clients import rounds
from tests.stub import Answer, Rules, Seen, Stub
from tests.stub.faults import Fault
from tests.stub.rules import Verdict, overflow_error
from tests.support import library_agents
from tests.support.proxy_process import ROOT
from tests.support.sample_conversations import AGENT_SYSTEM, AGENT_TASK, AGENT_TOOLS, chat_turn, log
from tests.support.sdk_clients import SDK_CLIENTS

FOLDER = ROOT / "tests" / "recorded"
ROUNDS = 4
HOPS = frozenset({"host", "connection", "content-length", "transfer-encoding", "keep-alive"})
SECRETS = frozenset({"authorization", "x-api-key", "api-key"})
COMPACTING = re.compile(rb"TEXT ONLY|state_snapshot|CONTEXT CHECKPOINT|context summarization|component that summarizes")
LONG = 240
"""Characters from which a text of an unfree client is reworded; its first words stay."""
WORDS = ("lorem", "ipsum", "dolor", "amet", "consectetur", "adipiscing", "elit", "tempor", "labore", "magna", "quis")


def placeholders(folder: Path) -> Callable[[str], str]:
    """What takes this machine out of a text."""
    home = {str(folder.resolve()): "/home/user", str(folder): "/home/user", str(ROOT): "/home/user/ullage"}

    def scrubbed(text: str) -> str:
        for path, name in home.items():
            text = text.replace(path, name)
        text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:8484", text)
        text = re.sub(r"Linux \d[\w.+-]*", "Linux 6.1", text)
        return text.replace(os.uname().nodename, "machine").replace(test_agent_clis.KEY, "sk-recorded")

    return scrubbed


def reworded(value: Any) -> Any:
    """*value* with other words of the same length in its longer texts."""
    if isinstance(value, dict):
        return {key: reworded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [reworded(part) for part in value]
    if not isinstance(value, str) or len(value) < LONG:
        return value
    return value[: LONG // 2] + re.sub(r"[A-Za-z]{4,}", _word, value[LONG // 2 :])


def _word(found: re.Match[str]) -> str:
    said = found[0]
    if said == "summary":
        return said  # by this its compaction is known
    other = WORDS[hashlib.sha256(said.encode()).digest()[0] % len(WORDS)]
    made = (other * (len(said) // len(other) + 1))[: len(said)]
    return made.title() if said[:1].isupper() else made


def is_compaction(body: bytes) -> bool:
    """Whether a request is its client's own compaction, by the words of its newest item or of its operator."""
    parsed = json.loads(body)
    items = parsed.get("messages") or parsed["input"]
    system = items[0] if items[0].get("role") == "system" else ""
    return bool(COMPACTING.search(json.dumps([items[-1] if items[-1].get("role") == "user" else "", system]).encode()))


def request(seen: Seen, scrubbed: Callable[[str], str], *, free: bool) -> dict[str, Any]:
    """One request as it is kept."""
    headers = [
        (name, "sk-recorded" if name.lower() == "x-api-key" else "Bearer sk-recorded")
        if name.lower() in SECRETS
        else (name, scrubbed(value))
        for name, value in seen.headers
        if name.lower() not in HOPS
    ]
    body = scrubbed(seen.body.decode())
    if not free:
        parsed = json.loads(body)
        for message in parsed["messages"]:
            parts = message["content"] if message["role"] == "user" else []
            texts = [part for part in parts if isinstance(part, dict) and part["type"] == "text"]
            for part in texts:
                part["text"] = reworded(part["text"])
        parsed |= {key: reworded(parsed[key]) for key in ("system", "tools") if key in parsed}
        body = json.dumps(parsed, ensure_ascii=False, separators=(",", ":"))
    path = f"{seen.path}?{seen.query}" if seen.query else seen.path
    return {"path": path, "headers": headers, "body": body}


def keep(name: str, of: str, seen: Sequence[Seen], folder: Path, *, free: bool = True) -> None:
    """Write what a client sent: its first and last requests, its compactions, and those of other forms."""
    scrubbed = placeholders(folder)
    chats = [each for each in seen if each.method == "POST" and each.verdict in ("ok", "fault", "invalid")]
    shapes: dict[tuple[object, ...], Seen] = {}
    for each in chats:
        parsed = json.loads(each.body)
        shape = (each.path, *sorted(parsed), bool(parsed.get("tools")), is_compaction(each.body))
        shapes[shape] = each
    kept = {id(each): each for each in (*chats[:1], *shapes.values())}
    made = [request(each, scrubbed, free=free) for each in sorted(kept.values(), key=lambda each: each.number)]
    FOLDER.mkdir(exist_ok=True)
    packed = gzip.compress(json.dumps({"client": name, "version": of, "requests": made}).encode(), 9, mtime=0)
    (FOLDER / f"{name}.json.gz").write_bytes(packed)
    print(name, of, [(each["path"], len(each["body"])) for each in made], len(packed))


async def record_agent(name: str) -> None:
    """A command line, which is told in the middle that the window is full."""
    agent = replace(test_agent_clis.AGENTS[name], rounds=2 * ROUNDS)
    async with Stub(Rules(window=10**6, wording="anthropic" if agent.program == "claude" else "openai")) as server:
        server.script = _filling(server, test_agent_clis.working(agent))
        with tempfile.TemporaryDirectory(prefix="ulg-") as folder:
            done = await asyncio.to_thread(test_agent_clis.run, name, agent, server.root, Path(folder))
            print(name, done.returncode, done.stdout[-200:], done.stderr[-500:])
            keep(
                name,
                await asyncio.to_thread(_version, agent.program),
                server.seen,
                Path(folder),
                free=agent.program != "claude",
            )


def _version(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"\d+\.\d+\.\d+", said.stdout + said.stderr)
    return found[0] if found else ""


def _filling(server: Stub, work: Callable[[Seen], Answer]) -> Callable[[Seen], Answer]:
    turns = iter(range(10**6))

    def script(seen: Seen) -> Answer:
        if is_compaction(seen.body):
            server.rules = replace(server.rules, usage_factor=1.0)
            return Answer("The session so far: parts were read, ledger 412 was not found yet. Read on.")
        if seen.parsed.get("tools") and next(turns) == ROUNDS:
            server.rules = replace(server.rules, usage_factor=230_000 / max(1, seen.tokens))
            if "responses" not in seen.path:  # of those the only one known believes its usage alone
                verdict = Verdict("overflow", tokens=210_000, max_tokens=4096, window=200_000)
                status, body = overflow_error(verdict, server.rules)
                server.fail(Fault(status=status, body=body, headers=(("content-type", "application/json"),)))
        return work(seen)

    return script


async def record_library(name: str) -> None:
    """A library, in the loop that the tests have for it."""
    packages = {"langchain": "langchain-openai", "pydantic_ai": "pydantic-ai-slim", "litellm": "litellm"}
    async with Stub(Rules(window=10**6)) as server:
        server.script = rounds(ROUNDS, "read_file", lambda path: {"path": path})
        with tempfile.TemporaryDirectory(prefix="ulg-") as folder:
            python = os.environ.get("ULLAGE_PYTHON", sys.executable)
            command = [python, "-m", "tests.support.library_agents", name, server.url]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": folder, "NO_PROXY": "127.0.0.1"}
            await asyncio.to_thread(subprocess.run, command, cwd=folder, env=environment, check=True)
            asking = f"import importlib.metadata as m; print(m.version({packages[name.removesuffix('_responses')]!r}))"
            said = await asyncio.to_thread(subprocess.run, [python, "-c", asking], capture_output=True, text=True)
            keep(name, said.stdout.strip(), server.seen, Path(folder))


async def record_sdk(api: str) -> None:
    """A provider's own SDK, streaming and not."""
    async with Stub(Rules(window=10**6)) as server:
        for stream in (False, True):
            server.script = rounds(ROUNDS, "read_file", lambda path: {"path": path})
            async with SDK_CLIENTS[api](server.url) as sdk:
                task = [{"role": "system", "content": AGENT_SYSTEM}, {"role": "user", "content": AGENT_TASK}]
                history, beside = sdk.opening(task)
                asked = {"model": "gpt-4o-mini", **beside, **sdk.options({"max_tokens": 512, "tools": AGENT_TOOLS})}
                for at in range(ROUNDS + 1):
                    answer = await sdk.ask(asked, history, stream=stream)
                    called = sdk.calls(answer)
                    results = [log(2 * at + number, 300) for number in range(len(called))]
                    history += [*answer, *(sdk.results(called, results) if called else [])]
                history += sdk.opening(chat_turn(1, 60)[:1])[0]
                await sdk.ask(asked, history, stream=stream)
        name = {"chat": "openai", "responses": "openai-responses", "messages": "anthropic"}[api]
        keep(name, version(name.partition("-")[0]), server.seen, ROOT)


async def record_node(api: str) -> None:
    """OpenAI's client for Node."""
    async with Stub(Rules(window=10**6)) as server:
        server.script = rounds(ROUNDS, "read_file", lambda path: {"path": path})
        with tempfile.TemporaryDirectory(prefix="ulg-") as folder:
            await asyncio.to_thread(test_node.run, api, server.url, Path(folder), ROUNDS)
            package = Path(test_node.FOLDER) / "node_modules/openai/package.json"
            keep(f"openai-node-{api}", json.loads(package.read_text())["version"], server.seen, Path(folder))


RECORDERS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: record_agent(name) for name in test_agent_clis.AGENTS},
    **{each.__name__: lambda name=each.__name__: record_library(name) for each in library_agents.INSTALLED},
    **{api: lambda api=api: record_sdk(api) for api in SDK_CLIENTS},
    **{f"node-{api}": lambda api=api: record_node(api) for api in ("chat", "responses")},
}


def main() -> None:
    """Record the clients that are named, or all that are installed."""
    for name in sys.argv[1:] or RECORDERS:
        agent = test_agent_clis.AGENTS.get(name)
        if (agent and not shutil.which(agent.program)) or (name.startswith("node-") and not test_node.FOLDER):
            print(f"{name}: not installed")
            continue
        asyncio.run(RECORDERS[name]())


if __name__ == "__main__":
    main()
