"""An engine with real parts around it, and upstreams that answer by a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.core.decisions import Forward, Policy, Reject
from proxy.core.errors import UllageError
from proxy.core.models import Catalogue, ModelRule, Route
from proxy.core.report import Report, Usage
from proxy.core.request import Mode, Options, Request
from proxy.engine.ports import Answer, Outcome, Refusal, Reply, Upgradable
from proxy.engine.token_counts import CountedBy
from proxy.tasks import FaultPhase, Faults
from tests.stub import Rules, judge
from tests.stub.rules import Wording, overflow_error
from tests.support import api_formats
from tests.support.engine_fixtures import POLICY, TENANT, DictRecords, FeaturesOf, Replica, chat_body, without_features
from tests.support.sample_conversations import AGENT_TOOLS, agent_session

WINDOW = 8192
ROUTE = Route("stub", "gpt-4o-mini", WINDOW, None, "o200k_base", "configured")
WORDINGS: tuple[Wording, ...] = ("openai", "anthropic", "vllm", "llamacpp")
JSON = (("Content-Type", "application/json"), ("x-request-id", "up-1"), ("retry-after", "7"))
SSE = (("content-type", "text/event-stream"),)
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"Hello"},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


class ScriptedReply:
    """An upstream's answer of which everything is given: status, headers, and the chunks in which the body comes.

    A number among them is a pause in seconds; an error breaks the body off.
    """

    close_delimited = False
    pour = None

    def __init__(
        self, status: int, chunks: Sequence[bytes | float | UllageError], headers: Sequence[tuple[str, str]] = JSON
    ) -> None:
        self.status = status
        self.headers = headers
        self.closed = False
        self.chunks_read = 0
        self._chunks = list(chunks)

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")

    async def next_chunk(self) -> bytes:
        while self._chunks and isinstance(self._chunks[0], float):
            await asyncio.sleep(self._chunks[0])
            self._chunks.pop(0)
        if self._chunks and isinstance(self._chunks[0], UllageError):
            raise self._chunks[0]
        self.chunks_read += 1
        chunk = self._chunks.pop(0) if self._chunks else b""
        assert isinstance(chunk, bytes)
        return chunk

    def close(self) -> None:
        self.closed = True


class ScriptedUpstream:
    """Answers by *script*, a reply for each body; its lists are what it was sent, in order."""

    def __init__(self, script: Callable[[bytes], ScriptedReply]) -> None:
        self.bodies: list[bytes] = []
        self.names: list[str] = []
        self.paths: list[str] = []
        self.headers: list[Sequence[tuple[str, str]]] = []
        self.replies: list[ScriptedReply] = []
        self._script = script

    async def send(
        self, target: str, method: str, path_qs: str, headers: Sequence[tuple[str, str]], body: Any, added: Any = ()
    ) -> Reply:
        self.names.append(target)
        self.paths.append(path_qs)
        self.bodies.append(body)
        self.headers.append(headers)
        self.replies.append(self._script(body))
        return self.replies[-1]

    async def upgrade(self, target: str, path_qs: str, headers: object) -> Upgradable:
        raise AssertionError(f"a tunnel to {target} was wanted")


def strict_upstream(stream: bool = False, **rules: Any) -> ScriptedUpstream:
    """An upstream that judges as the strict stub does."""
    agent_request = Rules(**rules)

    def script(body: bytes) -> ScriptedReply:
        verdict = judge(json.loads(body), agent_request)
        if verdict.kind == "ok":
            return ScriptedReply(200, [ROLE, WORD, DONE], SSE) if stream else ScriptedReply(200, [b'{"ok":true}'])
        assert verdict.kind == "overflow", verdict.message
        status, error = overflow_error(verdict, agent_request)
        return (
            ScriptedReply(200, [b"data: " + error + b"\n\n", DONE], SSE)
            if agent_request.overflow_in_stream
            else ScriptedReply(status, [error])
        )

    return ScriptedUpstream(script)


def upstream_replying(*replies: ScriptedReply) -> ScriptedUpstream:
    """An upstream that gives *replies* in turn, the last one for ever."""
    left = list(replies)

    def script(_: bytes) -> ScriptedReply:
        return left.pop(0) if len(left) > 1 else left[0]

    return ScriptedUpstream(script)


@dataclass(frozen=True)
class Exchanged:
    """What came of a request, answered or refused, for tests to look at."""

    outcome: Outcome

    @property
    def report(self) -> Report:
        return self.outcome.report

    @property
    def error(self) -> UllageError | None:
        return self.outcome.error if isinstance(self.outcome, Refusal) else None

    @property
    def answer(self) -> Answer:
        assert isinstance(self.outcome, Answer), self.error
        return self.outcome

    @property
    def reply(self) -> Reply:
        return self.answer.reply

    @property
    def head(self) -> bytes:
        return self.answer.head

    @property
    def learn(self) -> Callable[[Usage], bool]:
        return self.answer.learn


class Switch:
    """Sends to whatever upstream was plugged in last."""

    def __init__(self) -> None:
        self.upstream: Any = None

    async def send(self, *call: Any) -> Reply:
        reply: Reply = await self.upstream.send(*call)
        return reply

    async def upgrade(self, *call: Any) -> Upgradable:
        raise AssertionError("a tunnel was wanted")


class EngineFixture:
    """An engine with real parts around it."""

    def __init__(
        self,
        window: int | None = WINDOW,
        mode: Mode = "on",
        counting: CountedBy = "auto",
        rules: Sequence[ModelRule] = (),
        policy: Policy = POLICY,
        features: FeaturesOf = without_features,
    ) -> None:
        self.book = DictRecords()
        self.time = 0.0
        self.faults: list[tuple[FaultPhase, type[Exception]]] = []
        self.catalogue = Catalogue([*rules, ModelRule("*", "stub", window)], {}, "stub")
        self.switch = Switch()
        self.replica = Replica(
            self.book,
            policy,
            upstream=self.switch,
            catalogue=self.catalogue,
            mode=mode,
            counting={"stub": counting},
            features=features,
            clock=self.clock,
            faults=Faults(self._failed),
        )
        self.engine = self.replica.engine

    def _failed(self, phase: FaultPhase, request_id: str, fault: Exception) -> None:
        assert request_id == "r1"
        self.faults.append((phase, type(fault)))

    def clock(self) -> float:
        self.time += 0.25
        return self.time

    async def ask(self, body: bytes, upstream: Any, api: str = "chat", **options: Any) -> Exchanged:
        return await self.exchange(Request(api, body, TENANT, "r1", Options(**options)), upstream)

    async def exchange(self, request: Request, upstream: Any) -> Exchanged:
        self.switch.upstream = upstream
        return Exchanged(await self.engine.exchange(request))

    async def count(self, body: bytes, upstream: Any) -> Exchanged:
        return await self.exchange(Request("messages", body, TENANT, "r1", purpose="count"), upstream)

    async def plan(self, request: Request) -> Forward | Reject:
        return await self.engine.first_plan(request)


async def read_whole(answer: Exchanged) -> bytes:
    """Every byte of the answer, as the client gets them."""
    chunks = [answer.head]
    while chunk := await answer.reply.next_chunk():
        chunks.append(chunk)
    return b"".join(chunks)


def agent_body(tokens: int, **members: Any) -> bytes:
    """An agent's request of about so many tokens."""
    return chat_body(agent_session(tokens // 370, 300), **members)


def agent_request(api: str, rounds: int, **members: Any) -> bytes:
    """An agent's request of another API."""
    return json.dumps(api_formats.request_body(api, agent_session(rounds, 300), AGENT_TOOLS, **members)).encode()


STORED = {"previous_response_id": "resp_1"}
TOO_LONG = (
    b'{"error":{"message":"Your input exceeds the context window of this model.","code":"context_length_exceeded"}}'
)


def accepting_upstream() -> ScriptedUpstream:
    """An upstream that takes everything."""
    return upstream_replying(ScriptedReply(200, [b"{}"]))
