"""A fault of ours costs compression, never the request: an exception in every function on a request's way."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any

import httpx
import pytest

from tests.conftest import StartStub
from tests.stub import Answer, Call, Fault, Stub
from tests.stub.faults import error, events
from tests.support.api_formats import request_body
from tests.support.fault_injection import Injected, Injection, calls_seen, name_of
from tests.support.proxy_process import ROOT, Proxy
from tests.support.recall_fixtures import LOOK, recall_in_process
from tests.support.sample_conversations import AGENT_TOOLS, agent_round, agent_session, chat_turn
from tests.support.server_tool_fixtures import PATHS, ProxyInProcess, proxy_in_process

BROKEN = b"(the connection was closed before the end)"
PARTS = 4
"""Tests that share the functions of one API between them."""
TRUE = 2_000
"""What the server turns out to have in scenarios where it refuses."""
SAYS = f"This model's maximum context length is {TRUE} tokens. However, your messages resulted in %d tokens."
CLEARING = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1000}}]}
CHECKPOINT = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary."

SETTINGS: Mapping[str, Any] = {
    "models": [
        {"name": "first-*", "context_window": 4096, "overflow": ["compress", {"fallback": "large"}]},
        {"name": "other-*", "context_window": 4096, "overflow": [{"fallback": "large"}, "compress"]},
        {"name": "named", "model": "served"},
        {"name": "large", "context_window": 200_000},
        {"name": "unknown"},
        {"name": "*", "context_window": 4096},
    ],
    "archive": {"enabled": True},
}

EVERYTHING: Mapping[str, Any] = {
    "models": [{"name": "*", "context_window": 6_000}],
    "compression": {
        "recall": {"enabled": True, "sessions": True, "without_tools": True},
        "deferred_tools": {"enabled": True},
        "stages": {"truncate": {"always": True, "max_lines": 10}},
        "client_compaction": "answer",
    },
    "memories": {"enabled": True, "tools": ["*"], "extract": ["*"]},
    "budgets": {"enabled": True, "total": 1_000_000},
    "archive": {"enabled": True},
}
"""Settings that switch every optional feature on."""

MANY_TOOLS = tuple(
    {**AGENT_TOOLS[0], "function": {**AGENT_TOOLS[0]["function"], "name": f"read_{at}", "description": "Reads. " * 90}}
    for at in range(40)
)
"""Tools that take more than half of the window: some of them are deferred."""

# What carries the bytes and decides who may send them: without it there is no answer, or it must not be given.
CARRIES = (
    "proxy/tasks.py",
    "proxy/server/access.py",
    "proxy/server/admission.py",
    "proxy/server/closing_answers.py",
    "proxy/server/config.py",
    "proxy/server/connection.py",
    "proxy/server/handler.py",
    "proxy/server/incoming.py ArrivingBody.",
    "proxy/server/incoming.py BodyReader.",
    "proxy/server/incoming.py HeadLimit.",
    "proxy/server/incoming.py IncomingRequest.",
    "proxy/server/incoming.py Progress.",
    "proxy/server/incoming.py Upload.",
    "proxy/server/incoming.py _next",
    "proxy/server/incoming.py check_declared",
    "proxy/server/incoming.py parsed_request",
    "proxy/server/inflate.py",
    "proxy/server/request.py RequestHeaders.",
    "proxy/server/request.py _error_api",
    "proxy/server/request.py api_path",
    "proxy/server/request.py is_local",
    "proxy/server/request.py is_outside_apis",
    "proxy/server/request.py listed_model",
    "proxy/server/request.py ends_like_route",
    "proxy/server/request.py managed_path",
    "proxy/server/request.py plain_path",
    "proxy/server/request.py read_headers",
    "proxy/server/request.py read_path",
    "proxy/server/request.py request_target",
    "proxy/server/request.py send_continue",
    "proxy/server/request.py unread_request",
    "proxy/server/response.py",
    "proxy/server/server.py",
    "proxy/server/unknown_path.py",
    "proxy/tasks.py",
    "proxy/upstream/",
    "proxy/core/apis/gemini_path.py",
    "proxy/engine/engine.py Continuation.drop",
    "proxy/engine/engine.py Engine.exchange",
    "proxy/engine/engine.py Engine.untouched",
    "proxy/engine/fail_open.py",
    "proxy/engine/quick_check.py model_of",
    "proxy/engine/run.py",
    "proxy/engine/upstream_calls.py UpstreamCalls.send_bytes",
    "proxy/engine/replies.py DrainedReply.",
    "proxy/engine/replies.py LocalReply.",
    "proxy/engine/replies.py header_in",
    "proxy/server_tools/answer.py MergedReply.",
    "proxy/server_tools/answer.py RewrittenReply.",
)


@dataclass
class Scenario:
    """A request, what came before it, and how the upstream behaves: ``faults`` hit it first, ``answers`` follow."""

    name: str
    api: str
    talk: list[dict[str, Any]]
    members: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    before: list[dict[str, Any]] = field(default_factory=list)
    faults: tuple[Fault, ...] = ()
    answers: tuple[Answer, ...] = ()
    path: str = ""
    proxy: str = "plain"
    tools: Sequence[dict[str, Any]] = tuple(AGENT_TOOLS)
    items: tuple[dict[str, Any], ...] = ()

    def body(self, talk: list[dict[str, Any]], number: int) -> dict[str, Any]:
        """The request; *number* makes it one that nothing remembers."""
        said = [{**one, "content": f"{one['content']} #{number}"} if one.get("content") else one for one in talk]
        extra = {"store": False} if self.api == "responses" else {}
        body = request_body(self.api, said, self.tools, **extra, **self.members)
        if self.items:
            body["input"] += self.items
        return body


def refused(api: str, stream: bool) -> Fault:
    """An overflow in the API's own words, as a status or inside a 200."""
    whole = error(400, SAYS % 2600, "context_length_exceeded")
    if api == "messages":
        said = {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "prompt is too long: 2600 tokens > 2000 maximum"},
        }
        whole = Fault(status=400, headers=whole.headers, body=json.dumps(said).encode())
    return events(b"event: error\ndata: " + (whole.body or b"") + b"\n\n") if stream else whole


def scenarios() -> Iterator[Scenario]:
    """Every way that a request can take."""
    small, counted, large = chat_turn(1, 30)[:1], agent_session(7, 200), agent_session(14, 300)
    grown = [*large, *agent_round(77, 200)]
    for api, stream in itertools.product(PATHS, (False, True)):
        said: dict[str, Any] = {"stream": True} if stream else {}
        yield Scenario(f"plain {stream}", api, small, said)
        yield Scenario(f"compacting {stream}", api, large, said)
        yield Scenario(f"retried {stream}", api, counted, said, faults=(refused(api, stream),))
        yield Scenario(f"refused {stream}", api, counted, said, faults=(refused(api, stream),) * 3)
        looked = (Answer("Let me look.", (LOOK,)), Answer("Understood."))
        yield Scenario(f"recalled {stream}", api, large, said, answers=looked, proxy="recalling")
        yield Scenario(f"not recalled {stream}", api, large, said, proxy="recalling")
        project = {"x-ullage-project": "p"}
        every = Scenario(f"everything {stream}", api, grown, said, project, before=large, proxy="everything")
        yield every
        found = (Answer("I look.", (Call("ullage_tools", json.dumps({"query": "read"})),)), Answer("Understood."))
        yield replace(every, name=f"deferred tools {stream}", answers=found, tools=MANY_TOOLS)
    for api in PATHS:
        yield Scenario("counted", api, counted, {"max_tokens": 64} if api == "chat" else {})
        yield Scenario("following", api, grown, before=large)
        yield Scenario("packed", api, counted, headers={"content-encoding": "gzip"})
        yield Scenario("observed", api, large, headers={"x-ullage-mode": "observe"})
        yield Scenario("off", api, small, headers={"x-ullage-mode": "off"})
        yield Scenario("at once", api, counted, headers={"x-ullage-compact": "now"})
        yield Scenario("another name", api, large, {"model": "named"})
        yield Scenario("unknown window", api, large, {"model": "unknown"})
        yield Scenario("fallback last", api, large, {"model": "first-1"})
        yield Scenario("fallback first", api, large, {"model": "other-1"})
        yield Scenario("fallback after", api, counted, {"model": "other-1"}, faults=(refused(api, False),))
        yield Scenario("own compaction", api, [*large, {"role": "user", "content": CHECKPOINT}])
        yield Scenario("error", api, small, faults=(error(500),))
    for verb in ("generateContent", "streamGenerateContent"):
        path = f"../v1beta/models/gpt-4o-mini:{verb}"
        yield Scenario(f"plain {verb}", "gemini", small, path=path)
        yield Scenario(f"counted {verb}", "gemini", counted, path=path)
        yield Scenario(f"compacting {verb}", "gemini", large, path=path)
        yield Scenario(f"following {verb}", "gemini", grown, before=large, path=path)
        yield Scenario(f"retried {verb}", "gemini", counted, faults=(refused("gemini", False),), path=path)
        yield Scenario(f"everything {verb}", "gemini", grown, headers=project, proxy="everything", path=path)
    yield Scenario("count, theirs", "messages", large, path="/messages/count_tokens")
    yield Scenario("count, ours", "messages", large, path="/messages/count_tokens", faults=(error(404),))
    yield Scenario("edits", "messages", counted, {"context_management": CLEARING})
    yield Scenario("trigger", "responses", large, items=({"type": "compaction_trigger"},))
    yield Scenario("compact", "responses", large, path="/responses/compact", faults=(error(404),))


class Lab:
    """Proxies by the name of what is on, in front of one upstream that takes everything but what scenarios say."""

    def __init__(self, server: Stub, **proxies: ProxyInProcess) -> None:
        self.server = server
        self.proxies = proxies
        self._numbers = itertools.count(1)
        self.unhandled: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.unhandled.append(context["exception"]))

    def front(self, scenario: Scenario) -> ProxyInProcess:
        """The proxy that a scenario is about."""
        return self.proxies[scenario.proxy]

    def reported(self, scenario: Scenario) -> list[BaseException]:
        """Everything that was reported: of requests, of background tasks, of callbacks of the loop."""
        front_ = self.front(scenario)
        return [*(fault for _, _, fault in front_.faults), *front_.failures, *self.unhandled]

    async def _asked(
        self, front_: ProxyInProcess, path: str, packed: bytes, headers: Mapping[str, str]
    ) -> httpx.Response:
        """The answer to a request, with what came of its body if that was broken off."""
        came = b""
        async with front_.client.stream("POST", path, content=packed, headers=headers) as answer:
            try:
                async for chunk in answer.aiter_raw():
                    came += chunk
            except httpx.RemoteProtocolError:
                came += BROKEN
        return httpx.Response(
            answer.status_code, headers={"x-ullage-outcome": answer.headers["x-ullage-outcome"]}, content=came
        )

    async def run(self, scenario: Scenario, inside: Callable[[], Any]) -> tuple[bytes, httpx.Response]:
        """The body that was sent and its answer; what *inside* makes is entered around that one request."""
        number, front_, server = next(self._numbers), self.front(scenario), self.server
        path = scenario.path or PATHS[scenario.api]
        if path.startswith("../"):
            path = front_.url.removesuffix("v1") + path.removeprefix("../")
        headers = {"authorization": f"Bearer sk-{number}", "content-type": "application/json", **scenario.headers}
        server.forget()
        if scenario.before:
            before = await front_.client.post(path, json=scenario.body(scenario.before, number), headers=headers)
            assert before.status_code == 200
            server.forget()
        for fault in scenario.faults:
            server.fail(fault)
        server.queue(*scenario.answers)
        body = json.dumps(scenario.body(scenario.talk, number)).encode()
        for reports in (front_.faults, front_.failures, self.unhandled):
            reports.clear()
        packed = body
        if "content-encoding" in scenario.headers:
            packed = gzip.compress(body)
        with inside():
            answer = await self._asked(front_, path, packed, headers)
            for _ in range(5):
                await asyncio.sleep(0)  # what is noted behind the answer
        return packed, answer


@pytest.fixture
async def lab(stub: StartStub, tmp_path: Path) -> AsyncIterator[Lab]:
    """A lab."""
    server = await stub(window=200_000, counts=True)
    async with AsyncExitStack() as stack:
        owned = {"upstreams": [{"name": "stub", "base_url": server.url, "probe": False, "context_management": "own"}]}
        first = await stack.enter_async_context(
            recall_in_process(server, tmp_path / "a", enabled=False, usage=True, **owned, **SETTINGS)
        )
        second = await stack.enter_async_context(
            recall_in_process(server, tmp_path / "b", usage=True, models=[{"name": "*", "context_window": 4096}])
        )
        third = await stack.enter_async_context(proxy_in_process(server, tmp_path / "c", usage=True, **EVERYTHING))
        lab = Lab(server, plain=first, recalling=second, everything=third)
        yield lab
        for proxy in lab.proxies.values():
            proxy.failures.clear()


def is_way(code: CodeType) -> bool:
    """Whether a function reads, measures, plans or watches: an answer can do without it."""
    return not name_of(code).startswith(CARRIES)


async def ways_of(lab: Lab, scenario: Scenario) -> tuple[set[CodeType], set[CodeType]]:
    """The functions that a scenario calls, and those of them that it calls once the upstream was asked."""
    found: set[CodeType] = set()
    late: set[CodeType] = set()
    _, answer = await lab.run(scenario, lambda: calls_seen(lambda code: (late if lab.server.seen else found).add(code)))
    assert answer.status_code in {200, *(fault.status for fault in scenario.faults)}, (scenario, answer.text)
    assert lab.reported(scenario) == []
    return {code for code in found | late if is_way(code)}, {code for code in late if is_way(code)}


def _opened(body: bytes) -> bytes:
    """A body without its compression."""
    return gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body


def problem(lab: Lab, scenario: Scenario, injection: Injection, sent: bytes, answer: httpx.Response) -> str:
    """What is wrong with an answer after a fault; empty if nothing is."""
    reported, seen = lab.reported(scenario), lab.server.seen
    if answer.status_code != 200 and answer.content not in [fault.body for fault in scenario.faults]:
        return f"{answer.status_code} {answer.text[:200]}"
    if not answer.content:
        return "an empty answer"
    # Of a later generation the client has the beginning in another form: there is nothing that could pass as it came.
    if BROKEN in answer.content and not (scenario.answers and b"internal error" in answer.content):
        return f"broken off: {answer.text[-200:]}"
    if not injection.met:
        return ""
    if not reported:
        return "nothing was reported"
    if any(not isinstance(fault, Injected) for fault in reported):
        return f"another fault: {reported}"
    if "request" in [where for where, _, _ in lab.front(scenario).faults] and injection.early:
        outcome = answer.headers["x-ullage-outcome"]
        # Once a compressed body was opened, what it held is the client's own.
        own = seen[0].body in (sent, _opened(sent)) or scenario.members.get("model") == "named"
        if outcome != "degraded;internal_error" or len(seen) > 1 or not own:
            return f"{outcome}, sent {len(seen)} times, the client's own bytes: {own}"
    return ""


async def found_in(lab: Lab, scenario: Scenario, code: CodeType, late: bool) -> tuple[str, bool]:
    """What is wrong after faults in one function, from the start or once the upstream was asked, and if any was met."""
    injection = Injection(code, lambda: not late or bool(lab.server.seen), lambda: not lab.server.seen)
    try:
        async with asyncio.timeout(60):
            sent, answer = await lab.run(scenario, lambda: injection)
    except (httpx.HTTPError, TimeoutError) as failure:
        return repr(failure), bool(injection.met)
    return problem(lab, scenario, injection, sent, answer), bool(injection.met)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("api", [*PATHS, "gemini"])
async def test_a_fault_anywhere_on_its_way_costs_no_request(lab: Lab, api: str, part: int) -> None:
    """Each function that a request calls fails in turn, from the start and once the upstream has answered.

    Every function in the first scenario that calls it; all of them in all with ``ULLAGE_FAULTS=all``.
    """
    everything = os.environ.get("ULLAGE_FAULTS") == "all"
    wrong: dict[str, str] = {}
    met = tried = 0
    done: set[tuple[CodeType, bool]] = set()
    for scenario in scenarios():
        if scenario.api != api:
            continue
        way, after = await ways_of(lab, scenario)
        cases = {(code, False) for code in way} | {(code, True) for code in after}
        chosen = sorted(cases if everything else cases - done, key=lambda case: (name_of(case[0]), case[1]))
        for code, late in chosen[part::PARTS]:
            told, was_met = await found_in(lab, scenario, code, late)
            tried += 1
            met += was_met
            if told:
                wrong[f"{scenario.name}{' late' if late else ''}: {name_of(code)}"] = told
        done |= cases
    assert len(done) > 500
    assert met > 0.9 * tried
    assert wrong == {}


BREAKS = """
from proxy.engine import engine

async def broken(*_, **__):
    raise ZeroDivisionError("CANARY")

engine.Engine.first_plan = broken
"""
"""Run by the interpreter before the proxy's own code."""


async def test_a_fault_is_seen_by_client_and_operator(stub: StartStub, tmp_path: Path) -> None:
    """The outcome names it, the log has type and frames and nothing of the request, a metric counts it."""
    server = await stub(window=200_000)
    (tmp_path / "sitecustomize.py").write_text(BREAKS)
    surroundings = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    body = json.dumps(request_body("chat", [{"role": "user", "content": "CANARY " * 9000}])).encode()
    async with (
        Proxy(server.url, window=8192, environment=surroundings) as proxy,
        httpx.AsyncClient(timeout=60) as client,
    ):
        answer = await client.post(f"{proxy.url}/chat/completions", content=body)
        metrics = await client.get(f"{proxy.root}/metrics")
        proxy.end()
        log = proxy.log.read_text()
    assert (answer.status_code, answer.headers["x-ullage-outcome"]) == (200, "degraded;internal_error")
    assert [seen.body for seen in server.chats()] == [body]
    assert 'ullage_internal_errors_total{where="request"} 1.0' in metrics.text
    assert "CANARY" not in log
    (line,) = [json.loads(line) for line in log.splitlines() if '"proxy.internal_error"' in line]
    assert (line["error"], line["where"]) == ("ZeroDivisionError", "request")
    assert any("broken" in frame for frame in line["frames"])
