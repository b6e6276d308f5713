"""Views with the tool: their text and their tokens. Other views do not change."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from proxy.core.compaction.block import FOOTER
from proxy.core.views import view_without_addition
from proxy.engine.features import Feature
from proxy.engine.summary_requests import summary_request_of
from proxy.features.recall.feature import Recall
from proxy.features.recall.tool import MENTION, NAME, WINDOW_PART
from proxy.server_tools.answer import ServerTools
from tests.stub import chat, messages, responses
from tests.support.api_formats import request_body, tools_of
from tests.support.engine_fixtures import DictRecords, Planned, Replica
from tests.support.recall_fixtures import WINDOW, long_history
from tests.support.sample_conversations import AGENT_TOOLS, agent_round, agent_session
from tests.support.server_tool_fixtures import APIS

API_FORMATS: dict[str, Any] = {"chat": chat, "messages": messages, "responses": responses}


def offering(replica: Replica) -> list[Feature]:
    """The feature, as it is by default."""
    return [ServerTools(replica.reader, [Recall(replica.reader)], replica.faults)]


def offering_beside_tools(replica: Replica) -> list[Feature]:
    """The feature, for clients that send tools only."""
    return [ServerTools(replica.reader, [Recall(replica.reader, without_tools=False)], replica.faults)]


async def plan(
    api: str, chat: list[Any] | None = None, replica: Replica | None = None, window: int = WINDOW, **members: Any
) -> Planned:
    members = {"tools": AGENT_TOOLS, **members}
    tools = members.pop("tools")
    body = json.dumps(request_body(api, long_history() if chat is None else chat, tools, **members)).encode()
    return await (replica or Replica(features=offering)).plan(body, window, api=api, model="gpt-4o-mini")


@pytest.mark.parametrize("api", APIS)
async def test_a_view_that_leaves_something_out_offers_the_tool(api: str) -> None:
    """The tool stands behind the client's own, the block mentions it, and its tokens are counted."""
    found, without = await plan(api), await plan(api, replica=Replica())
    assert found.view is not None
    assert found.view.edits.addition
    assert found.report.stages[-1] == "recall"
    body, bare = json.loads(found.body), json.loads(without.body)
    assert body["tools"][:-1] == bare["tools"] == tools_of(AGENT_TOOLS, api)
    assert json.dumps(body["tools"][-1]).count(NAME) == 1
    assert found.body.count(MENTION.encode()) == 1
    assert found.tokens is not None
    tokens = API_FORMATS[api].request_tokens(body) if api != "chat" else None
    assert tokens is None or tokens <= found.tokens + found.tokens // 10
    assert NAME.encode() not in without.body


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "case", ["small", "no tools", "forced", "own name", "own compaction", "tiny window", "switched off"]
)
@pytest.mark.slow
async def test_a_request_without_it_never_hears_of_it(api: str, case: str) -> None:
    """If the tool is not offered to a request, its view is the same as without the feature."""
    members: dict[str, Any] = {}
    window, replica = WINDOW, Replica(features=offering)
    chat = long_history()
    if case == "small":
        chat = agent_session(3, 100)
    elif case == "no tools":
        members = {"tools": []}
        replica = Replica(features=offering_beside_tools)
    elif case == "forced":
        members = {"tool_choice": {"type": "any"} if api == "messages" else "required"}
    elif case == "own name":
        own = json.loads(json.dumps(AGENT_TOOLS))
        own[0]["function"]["name"] = NAME
        members = {"tools": own}
    elif case == "own compaction":
        chat = [*chat, {"role": "user", "content": "CRITICAL: Respond with TEXT ONLY. Write a summary."}]
    elif case == "tiny window":
        window = 2048
    else:
        replica = Replica()
    found = await plan(api, chat, replica, window, **members)
    assert found.view is not None
    assert not found.view.edits.addition
    assert "recall" not in found.report.stages
    assert found.body == (await plan(api, chat, Replica(), window, **members)).body
    assert MENTION.encode() not in found.body


@pytest.mark.parametrize("api", APIS)
async def test_a_client_without_tools_is_offered_it(api: str) -> None:
    """The view gets an array of tools with the declaration alone; everything else is as without it."""
    found = await plan(api, long_history(90), window=16_384, tools=[])
    without = await plan(api, long_history(90), Replica(), 16_384, tools=[])
    body = json.loads(found.body)
    assert found.report.stages[-1] == "recall"
    assert [NAME in json.dumps(tool) for tool in body["tools"]] == [True]
    assert found.body.count(MENTION.encode()) == 1
    assert body.keys() - {"tools"} == json.loads(without.body).keys() - {"tools"}
    tokens = API_FORMATS[api].request_tokens(body) if api != "chat" else None
    assert tokens is None or tokens <= found.tokens + found.tokens // 10


async def test_views_only_grow_between_two_events() -> None:
    """From the first event on the tools are the same on every request and replica, and the view grows at its end."""
    book = DictRecords()
    replicas = [Replica(book, features=offering), Replica(book, features=offering)]
    messages = agent_session(6, 300)
    tools, views = [], []
    for at in range(30):
        found = await plan("chat", messages, replicas[at % 2])
        tools.append(
            (
                found.view is not None and found.view.edits.record is not None,
                json.dumps(json.loads(found.body)["tools"]),
            )
        )
        views.append((found.report.event, json.loads(found.body)["messages"]))
        messages = [*messages, *agent_round(100 + at, 300)]
    assert len(set(tools)) == 2, "one array before the first event, another one from then on"
    assert [NAME in text for live, text in tools] == [live for live, text in tools]
    pairs = [(a, b) for (_, a), (event, b) in pairwise(views) if not event]
    assert len(pairs) > 15
    assert all(b[: len(a)] == a for a, b in pairs)


async def test_no_request_is_refused_for_want_of_room_for_the_tool() -> None:
    """A request that fits only without the tool is sent without it."""
    for size in range(7000, 7180, 20):
        chat = [*agent_session(4, 300), {"role": "user", "content": "word " * size}]
        found = await plan("chat", chat, max_tokens=64)
        without = await plan("chat", chat, Replica(), max_tokens=64)
        assert (found.error is None) >= (without.error is None)


async def test_the_block_ends_with_a_note_on_the_recall_tool() -> None:
    """The model reads of the tool where it reads what was folded."""
    found = await plan("chat", long_history(90), window=16_384, tools=[])
    [carrier] = [each["content"] for each in json.loads(found.body)["messages"] if MENTION in str(each["content"])]
    assert f"{FOOTER}\n{MENTION}" in carrier
    assert WINDOW_PART > 1


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_a_warm_prompt_has_the_tools_that_were_sent(api: str) -> None:
    """If the view offers the tool, a prompt that must hit the provider's cache offers it too."""
    body = json.dumps(request_body(api, agent_session(30, 300), AGENT_TOOLS)).encode()
    plan = await Replica(features=offering).plan(body, 8192, api=api, model="gpt-4o-mini")
    assert plan.view is not None
    assert plan.view.layout is not None
    record, measured = plan.view.edits.record, plan.view.measured
    assert record is not None
    summary_request = summary_request_of(measured, plan.view.layout, record.compaction.boundary, record, 0.05)
    assert summary_request is not None
    warm = summary_request.cached_prompt(len(measured.parsed.items))
    assert warm is not None
    sent = json.loads(plan.body)
    assert json.loads(warm.envelope_json)["tools"] == sent["tools"]
    assert plan.body.count(warm.items) == 1
    assert NAME in warm.envelope_json


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("tools", [AGENT_TOOLS, []], ids=["tools", "no tools"])
async def test_a_view_without_the_addition_is_the_one_that_recall_did_not_touch(api: str, tools: list[Any]) -> None:
    """No tool of ours and no mention of it; the same compaction, and its tokens."""
    found = await plan(api, long_history(90), window=16_384, tools=tools)
    assert found.view.edits.addition
    bare = view_without_addition(found.view)
    assert NAME.encode() not in bare.body
    assert json.loads(bare.body).get("tools") == (tools_of(tools, api) or None)
    assert bare.edits.record == found.view.edits.record
    assert not bare.edits.addition
    assert bare.counted < found.view.counted
