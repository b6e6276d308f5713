"""How long the way of one request is: files, functions and calls of ``proxy`` that run for it.

    python -m tests.bench.way            prints one JSON object a kind of request

The proxy serves in this process, on its main thread, with a profile hook on every thread; a client and an upstream run
beside it and are not counted. Nothing is timed, so that any machine gives the same figures, give or take a call.
Comprehensions and lambdas belong to the function they stand in. Each kind is asked three times and the shortest way
counts: housekeeping that happens to run beside a request is none of it.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
import yaml

import proxy
from proxy.cli import main
from tests.support.ports import free_port
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, chat_turn

ROOT = str(Path(proxy.__file__).parent) + os.sep
HOUSEKEEPING = frozenset(
    {
        "ConfigWatch.run",
        "ConnectionPool._check_all",
        "LagWatch._on_beat",
        "LagWatch._schedule_beats",
        "Process.update_gauges",
        "StoreMonitor.run",
    }
)
"""Functions that run by the clock, whether there are requests or not. What they call is not counted either."""

SETTLED = 0.3
"""Seconds after an answer in which what happens behind it still belongs to its request."""

LONGEST_SETTLE = 10.0
"""Seconds after which a busy machine is waited for no longer: the proxy closes a connection that is idle for 15."""

LOOKS, BETWEEN_LOOKS = 3, 0.02
"""How often in a row a process is looked at that seems to do nothing, and seconds between."""

OTHER_ROUNDS = 40
"""Rounds by which conversations differ: more than any has."""

BYTES_A_TOKEN = 3.5
"""Of the usage that the upstream reports: a figure that no count of ours is far from."""


@dataclass
class Way:
    """What ran: distinct files and functions, calls, and how often a call was in another file than the one before."""

    files: set[str] = field(default_factory=set)
    functions: set[CodeType] = field(default_factory=set)
    calls: int = 0
    changes: int = 0
    last: str = ""

    def take(self, code: CodeType) -> None:
        """Note one call."""
        self.calls += 1
        self.files.add(code.co_filename)
        self.functions.add(code)
        self.changes += code.co_filename != self.last
        self.last = code.co_filename

    def figures(self) -> dict[str, int]:
        """The counts."""
        return {
            "files": len(self.files),
            "functions": len(self.functions),
            "calls": self.calls,
            "changes": self.changes,
        }


class Hook:
    """Notes the calls of the package in ``way`` while there is one, but for those of housekeeping.

    ``calls`` counts all that are not housekeeping.
    """

    def __init__(self) -> None:
        self.way: Way | None = None
        self.calls = 0
        self._thread = threading.local()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Take one event of ``sys.setprofile``: a coroutine that goes on is called, and one that waits returns."""
        code = frame.f_code
        if not code.co_filename.startswith(ROOT) or event not in ("call", "return"):
            return
        keeps_house = getattr(self._thread, "keeps_house", None)
        if keeps_house is not None:
            if event == "return" and frame is keeps_house:
                self._thread.keeps_house = None
        elif event == "call" and code.co_qualname in HOUSEKEEPING:
            self._thread.keeps_house = frame
        elif event == "call" and not code.co_name.startswith("<"):
            self.calls += 1
            if self.way is not None:
                self.way.take(code)


@dataclass(frozen=True)
class Kind:
    """One kind of request: its name, and the bodies of one conversation, of which the last one is counted.

    With *connects* that is the first one of a connection, otherwise its head repeats an earlier one. If it *differs*,
    no other conversation has its rounds, so that all of them are read, and not found in a cache.
    """

    name: str
    model: str
    conversations: tuple[tuple[int, ...], ...]
    agent: bool = True
    connects: bool = False
    differs: bool = False

    def bodies(self, number: int) -> Iterator[bytes]:
        """The requests of conversation *number*, in order."""
        for rounds in self.conversations[number]:
            skipped = OTHER_ROUNDS * (number + 1) if self.differs else 0
            messages = agent_session(skipped + rounds, 260) if self.agent else chat_turn(7, 420)[:1]
            messages = [*messages[:2], *messages[2 + 2 * skipped :]]
            messages = [{"role": "user", "content": f"Task {self.name} {number}."}, *messages[1:]]
            tools = {"tools": AGENT_TOOLS} if self.agent else {}
            yield json.dumps({"model": self.model, "messages": messages, **tools}).encode()


KINDS = (
    Kind("fits", "roomy", ((1, 1), (1, 1), (1, 1)), agent=False),
    Kind("fits_first", "roomy", ((1, 1), (1, 1), (1, 1)), agent=False, connects=True),
    Kind("counted", "small", ((13, 14, 15), (13, 14, 15), (13, 14, 15))),
    Kind("compacts", "small", ((2, 26), (2, 26), (2, 26))),
    Kind("follows", "small", ((2, 26, 27), (2, 26, 27), (2, 26, 27))),
    Kind("compacts_new", "small", ((2, 26), (2, 26), (2, 26)), differs=True),
)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r", 1)[0])
            await reader.readexactly(size)
            tokens = int(size / BYTES_A_TOKEN)
            choice = {"index": 0, "message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}
            usage = {"prompt_tokens": tokens, "completion_tokens": 2, "total_tokens": tokens + 2}
            reply = {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
            body = json.dumps(reply).encode()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _serve_upstream(port: int) -> None:
    async def serve() -> None:
        server = await asyncio.start_server(_answer, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(serve())


def _configuration(folder: Path, upstream: int) -> Path:
    rules = [{"name": name, "context_window": window} for name, window in (("roomy", 200_000), ("small", 8192))]
    config = {
        "store": {"url": "memory", "path": str(folder)},
        "summaries": {"mode": "off"},
        "upstreams": [{"name": "up", "base_url": f"http://127.0.0.1:{upstream}/v1", "probe": False}],
        "models": [{**rule, "upstream": "up", "tokenizer": "o200k_base"} for rule in rules],
    }
    file = folder / "ullage.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
    "Connection: keep-alive\r\nUser-Agent: way/1.0\r\nAuthorization: Bearer sk-way\r\n"
    "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n"
)


class Client:
    """A client with one connection that writes each request at once.

    Others write head and body one after the other, and the proxy reads them together or not.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))

    def post(self, body: bytes) -> str:
        """Send *body* and read the answer; return its outcome."""
        self._socket.sendall(HEAD.format(len(body)).encode() + body)
        answer = http.client.HTTPResponse(self._socket, method="POST")
        answer.begin()
        text = answer.read()
        assert answer.status == 200, text
        return answer.headers["x-ullage-outcome"]


def _measure(hook: Hook, port: int) -> dict[str, dict[str, int | str]]:
    client = Client(port)
    found: dict[str, dict[str, int | str]] = {}
    for kind in KINDS:
        ways = []
        for number in range(len(kind.conversations)):
            *earlier, last = kind.bodies(number)
            for body in earlier:
                client.post(body)
            _settle(hook)
            way = hook.way = Way()
            if kind.connects:
                client = Client(port)
            outcome = client.post(last)
            _settle(hook)
            hook.way = None
            ways.append((way, outcome))
        shortest, outcome = min(ways, key=lambda pair: pair[0].calls)
        found[kind.name] = {**shortest.figures(), "outcome": outcome}
    return found


def _settle(hook: Hook) -> None:
    """Return after ``SETTLED`` seconds, and as a rule not before the proxy has nothing left to do."""
    latest = time.monotonic() + LONGEST_SETTLE
    time.sleep(SETTLED)
    looks = 0
    while looks < LOOKS and time.monotonic() < latest:
        before = hook.calls
        time.sleep(BETWEEN_LOOKS)
        looks = looks + 1 if hook.calls == before and _all_others_sleep() else 0


def _all_others_sleep() -> bool:
    """True if every other thread waits for something; one that waits for a processor is called running."""
    own = str(threading.get_native_id())
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != own]
    try:
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in others]
    except OSError:  # a thread ended meanwhile
        return False
    return all(state == "S" for state in states)


def _drive(hook: Hook, port: int) -> None:
    code = 1
    try:
        for _ in range(600):
            try:
                httpx.get(f"http://127.0.0.1:{port}/health/ready", trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.05)
        time.sleep(1.0)
        print(json.dumps(_measure(hook, port)), file=sys.stderr, flush=True)
        code = 0
    except Exception:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def run() -> None:
    """Serve, measure, print to standard error (the log has standard output), and end the process."""
    hook, upstream, port = Hook(), free_port(), free_port()
    folder = Path(tempfile.mkdtemp(prefix="ulg-"))
    threading.Thread(target=_serve_upstream, args=(upstream,), daemon=True).start()
    threading.Thread(target=_drive, args=(hook, port), daemon=True).start()
    threading.setprofile(hook)
    sys.setprofile(hook)
    sys.argv = ["ullage", "serve", "--config", str(_configuration(folder, upstream)), "--port", str(port)]
    main()


if __name__ == "__main__":
    run()
