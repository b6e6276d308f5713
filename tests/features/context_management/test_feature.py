"""Context edits of requests to servers without them: done here, taken out of the body, and only there."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest

from proxy.core.models import Catalogue, ModelRule
from proxy.core.request import Options, Request
from proxy.engine.engine import BoundEngine
from proxy.engine.run import Run
from proxy.features.context_management.clearing import PLACEHOLDER
from proxy.features.context_management.feature import ContextManagement
from tests.stub import Rules, messages
from tests.support.api_formats import request_body
from tests.support.engine_fixtures import TENANT, FeaturesOf, Replica
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, prose
from tests.support.scripted_upstream import EngineFixture
from tests.support.transcript import play

CATALOGUE = Catalogue([ModelRule("*", "stub", window=200_000)], {}, "stub")
CLEAR = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 3000}}]}
COMPACT = {"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000}}]}


def body(rounds: int, management: Any) -> dict[str, Any]:
    made = request_body("messages", agent_session(rounds, 300), AGENT_TOOLS, max_tokens=1000)
    return made if management is None else {**made, "context_management": management}


def managing(owned: tuple[str, ...]) -> FeaturesOf:
    """The feature for the upstreams called *owned*."""
    return lambda replica: [ContextManagement(replica.reader, replica.catalogue.resolve, owned)]


async def served(raw: bytes, owned: tuple[str, ...] = ("stub",), **options: Any) -> Request:
    """The request as the engine plans it."""
    request = Request("messages", raw, TENANT, "r", Options(**options))
    replica = Replica(features=managing(owned), catalogue=CATALOGUE)
    engine = BoundEngine(replica.engine, Run(request, time.monotonic))
    for feature in replica.engine._features.concerned(request):
        request = await feature.prepare(request, engine)
    return request


async def test_results_are_cleared_and_the_member_is_gone() -> None:
    """Only old results are other bytes; the request is valid for a strict server, and smaller."""
    sent = body(40, CLEAR)
    made = json.loads((await served(json.dumps(sent).encode())).body)
    assert "context_management" not in made
    assert {**made, "messages": 0} == {**body(40, None), "messages": 0}
    pairs = list(zip(sent["messages"], made["messages"], strict=True))
    changed = [now["content"][0] for was, now in pairs if was != now]
    assert len(changed) > 20
    assert all(block["type"] == "tool_result" and block["content"] == PLACEHOLDER for block in changed)
    assert pairs[-1][0] == pairs[-1][1]
    verdict = messages.judge(made, Rules(window=8192))
    assert (verdict.kind, verdict.tokens < 8192) == ("ok", True)


async def test_a_growing_conversation_keeps_its_beginning() -> None:
    """From request to request the view grows at its end, but for the few times at which results are cleared."""
    wanted = {"edits": [{**CLEAR["edits"][0], "clear_at_least": {"type": "input_tokens", "value": 1500}}]}
    views = [(await served(json.dumps(body(rounds, wanted)).encode())).body for rounds in range(10, 40)]
    items = [json.loads(view)["messages"] for view in views]
    moved = sum(now[: len(was)] != was for was, now in pairwise(items))
    assert 2 <= moved <= 8


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
async def test_wherever_the_member_stands_it_is_taken_out(first: bool, indent: int | None) -> None:
    """First, last or alone beside the messages: what is left is the rest of the body, byte for byte."""
    plain = body(2, None)
    sent = {"context_management": COMPACT, **plain} if first else {**plain, "context_management": COMPACT}
    request = await served(json.dumps(sent, indent=indent).encode())
    assert json.loads(request.body) == plain
    assert request.body.count(b"\n") == json.dumps(plain, indent=indent).count("\n")
    only = {"context_management": {}, "messages": []} if first else {"messages": [], "context_management": {}}
    assert json.loads((await served(json.dumps(only).encode())).body) == {"messages": []}


async def test_a_size_to_compact_from_is_a_smaller_window() -> None:
    """The trigger and the answer's room are the window, unless the client's header says less."""
    raw = json.dumps(body(2, COMPACT)).encode()
    assert (await served(raw)).options.window == 51_000
    assert (await served(raw, window=9000)).options.window == 9000
    assert (await served(json.dumps(body(2, CLEAR)).encode())).options.window is None


async def test_what_does_not_concern_us_is_left_alone() -> None:
    """Servers that do their own edits, requests without any, and other APIs get their bytes as they came."""
    raw = json.dumps(body(40, CLEAR)).encode()
    assert (await served(raw, owned=())).body is raw
    assert (await served(raw, owned=("other",))).body is raw
    quoted = json.dumps({**body(2, None), "system": "Use context_management."}).encode()
    assert (await served(quoted)).body is quoted
    replica = Replica(features=managing(("stub",)), catalogue=CATALOGUE)
    for api in ("chat", "responses"):
        request = Request(api, raw, TENANT, "r")
        assert replica.engine._features.concerned(request) == []


COMPACT_EARLY = {"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 4000}}]}


@pytest.mark.parametrize(("system", "prompt"), [(6000, 10), (10, 6000)])
async def test_a_size_to_compact_from_refuses_and_clips_nothing(system: int, prompt: int) -> None:
    """A request within the window and above the size from which to compact goes up with every word."""
    body: dict[str, Any] = {"model": "m", "max_tokens": 500, "system": prose(1, system)}
    body["messages"] = [{"role": "user", "content": prose(2, prompt)}]
    (played,) = await play(
        """
        client   >> asked, api=messages
        upstream << stub
        upstream >> 200 answer
        client   << 200 answer
        report   : outcome=verbatim
        records  : 0
        """,
        EngineFixture(20_000, features=managing(("stub",))),
        asked=json.dumps({**body, "context_management": COMPACT_EARLY}).encode(),
        answer=b"{}",
    )
    assert json.loads(played.bodies[0]) == body
