"""What real clients were recorded to send passes byte for byte while it fits, and is a valid smaller view when not."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import StartProxy, StartStub
from tests.e2e.record_clients import FOLDER, HOPS, is_compaction
from tests.stub import Rules, Stub, chat, messages, responses
from tests.stub.rules import Wording
from tests.support.loopback import loopback_client
from tests.support.proxy_process import Proxy

API_FORMATS: dict[str, Any] = {"chat/completions": chat, "messages": messages, "responses": responses}
ENDLESS = 1_000_000
MARGIN = 1.45
"""What of a window fits with a high mark of .9 and a reserve where none is asked for."""


@dataclass(frozen=True)
class Recorded:
    """One request of a client: its path, its headers, its body, and what the strict upstream makes of it."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def api_format(self) -> Any:
        """The API it speaks."""
        return API_FORMATS[self.path.partition("?")[0].removeprefix("/v1/")]

    @property
    def factor(self) -> float:
        """How many tokens its model makes of one of ours."""
        return 1.5 if b'"model":"claude' in self.body else 1.0

    @property
    def compacting(self) -> bool:
        """Whether the client compacts its conversation with it."""
        return is_compaction(self.body)


def recorded(file: Path) -> tuple[str, list[Recorded]]:
    """The client's name and its requests."""
    found = json.loads(gzip.decompress(file.read_bytes()))
    made = [
        Recorded(each["path"], [(n, v) for n, v in each["headers"]], each["body"].encode())
        for each in found["requests"]
    ]
    return found["client"], made


FILES = sorted(FOLDER.glob("*.json.gz"))
AGENTS = {"claude-code", "codex", "opencode", "qwen-code"}


def test_there_is_something_of_every_client() -> None:
    """Libraries and programs over all three APIs, and the own compaction of each program that has one."""
    found = dict(map(recorded, FILES))
    assert found.keys() >= AGENTS | {
        "openai",
        "anthropic",
        "langchain",
        "litellm",
        "mini-swe-agent",
        "openai-node-chat",
    }
    assert {request.api_format for requests in found.values() for request in requests} == set(API_FORMATS.values())
    assert {name for name in AGENTS if any(request.compacting for request in found[name])} == AGENTS
    assert sum(file.stat().st_size for file in FILES) < 1_000_000


async def test_recorded_requests(stub: StartStub, proxy: StartProxy) -> None:
    """Bounded or counted, what fits arrives as it was sent, headers and all; what does not is a valid view."""
    server = await stub(window=ENDLESS)
    front = await proxy(server.url, window=ENDLESS, arguments=("--workers", "1"))
    async with loopback_client() as web:
        for file in FILES:
            name, requests = recorded(file)
            for at, request in enumerate(requests):
                where = f"{name}[{at}]"
                await _fits(where, request, server, front, web)
                await _too_small(where, request, server, front, web)


async def _send(
    where: str, request: Recorded, server: Stub, front: Proxy, web: httpx.AsyncClient, window: int | None
) -> httpx.Response:
    """The answer to *request* in a *window* that only the header and the upstream know of."""
    wording: Wording = "anthropic" if request.api_format is messages else "openai"
    server.rules = Rules(window=window or ENDLESS, factor=request.factor, wording=wording)
    server.forget()
    own = [("x-ullage-conversation", where), *([("x-ullage-window", str(window))] if window else [])]
    asked = httpx.Request("POST", front.root + request.path, headers=[*request.headers, *own], content=request.body)
    return await web.send(asked)


async def _fits(where: str, request: Recorded, server: Stub, front: Proxy, web: httpx.AsyncClient) -> None:
    verdict = request.api_format.judge(json.loads(request.body), Rules(window=ENDLESS, factor=request.factor))
    assert verdict.kind == "ok", f"{where}: {verdict.message}"
    most = int(verdict.tokens * MARGIN) + 2_000
    for window in (None, verdict.max_tokens + most):
        answer = await _send(where, request, server, front, web, window)
        assert answer.status_code == 200, f"{where}: {answer.text}"
        assert answer.headers["x-ullage-outcome"] == "verbatim", where
        (seen,) = server.chats()
        assert seen.body == request.body, f"{where} in {window}: other bytes"
        path, _, query = request.path.partition("?")
        assert (seen.path, seen.query) == (path, query)
        told = [(key.lower(), value) for key, value in seen.headers if key.lower() not in HOPS]
        assert sorted(told) == sorted((key.lower(), value) for key, value in request.headers), where


async def _too_small(where: str, request: Recorded, server: Stub, front: Proxy, web: httpx.AsyncClient) -> None:
    parsed = json.loads(request.body)
    tokens = request.api_format.judge(parsed, Rules(window=ENDLESS, factor=request.factor)).tokens
    fixed = request.api_format.fixed(parsed)
    first = next(iter(request.api_format.items(parsed)))
    fixed += request.api_format.weigh(first) if first.get("role") in ("system", "developer") else 0
    fixed = int(fixed * request.factor)
    if "thinking" in parsed:
        fixed += parsed["max_tokens"]  # it cannot be lowered below what may be thought
        tokens += parsed["max_tokens"]
    for share in (0.9, 0.5):
        window = fixed + int(share * (tokens - fixed)) + 700
        if window >= tokens:
            continue  # hardly anything but system text and tools
        answer = await _send(where, request, server, front, web, window)
        why = [(seen.verdict, seen.why, seen.tokens, seen.max_tokens) for seen in server.chats()]
        assert answer.status_code == 200, f"{where} in {window}: {answer.text[:500]} {why}"
        assert [seen.verdict for seen in server.chats()] == ["ok"], f"{where} in {window}: {why}"
        assert answer.headers["x-ullage-outcome"] == "compacted", where


async def test_recorded_compactions_are_known(stub: StartStub, proxy: StartProxy) -> None:
    """Each program's own compaction is known for what it is, and nothing else is taken for one."""
    server = await stub(window=ENDLESS)
    front = await proxy(server.url, window=ENDLESS)
    wanted = []
    async with loopback_client() as web:
        for name, requests in map(recorded, FILES):
            for request in requests if name in AGENTS else ():
                verdict = request.api_format.judge(
                    json.loads(request.body), Rules(window=ENDLESS, factor=request.factor)
                )
                window = verdict.max_tokens + int(verdict.tokens * MARGIN) + 2_000
                assert (await _send(name, request, server, front, web, window)).status_code == 200
                wanted.append((name, name if request.compacting else ""))
    assert front.end() == 0
    done = [json.loads(line) for line in front.log.read_text().splitlines() if "proxy.request_done" in line]
    assert [line["client_compaction"] for line in done] == [client for _, client in wanted], wanted
