"""Compactions for servers that have none: asked for by OpenAI's own client, carried by it, and opened again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError
from openai import DefaultAsyncHttpxClient as Web

from tests.conftest import StartProxy, StartStub
from tests.e2e.test_client_compaction import next_request
from tests.stub import Stub
from tests.stub.faults import error
from tests.support.api_formats import request_body
from tests.support.loopback import loopback_client
from tests.support.proxy_process import Proxy
from tests.support.sample_conversations import AGENT_TASK, AGENT_TOOLS, agent_session

WINDOW = 8192
ITEM = {"type": "compaction_trigger"}
SESSION = next_request("responses", agent_session(40, 300))
TASK = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": AGENT_TASK}]}
USER = {"type": "message", "role": "user", "content": "Go on with the next file."}


@asynccontextmanager
async def client(front: Proxy, key: str = "sk-1") -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's own client."""
    async with AsyncOpenAI(
        base_url=front.url, api_key=key, max_retries=0, http_client=Web(trust_env=False, timeout=30)
    ) as made:
        yield made


def sent(server: Stub) -> list[dict[str, Any]]:
    """The items of the last request upstream."""
    items: list[dict[str, Any]] = json.loads(server.seen[-1].body)["input"]
    return items


async def test_a_compaction_is_answered_where_the_server_has_none(
    stub: StartStub, proxy: StartProxy, tmp_path: Path
) -> None:
    """Path and item are answered in the shapes clients read; what they carry is opened for whoever sends it."""
    server = await stub(window=WINDOW)
    config = {
        "upstreams": [
            {"name": "plain", "base_url": server.url},
            {"name": "able", "base_url": server.url, "compaction": "relay"},
        ],
        "models": [
            {"name": "able*", "upstream": "able", "context_window": WINDOW},
            {"name": "*", "upstream": "plain", "context_window": WINDOW},
        ],
    }
    front = await proxy(server.url, config=config, home=tmp_path)
    async with client(front) as web:
        for step in (_server_first, _on_its_path, _as_an_item, _relayed):
            server.forget()
            await step(server, web)
        item = await streamed(web)
    await front.__aexit__(None, None, None)
    again = await proxy(server.url, config=config, home=tmp_path)
    async with client(again, "sk-other") as web:
        await opened(server, web, item, lambda text: text.startswith("[Summary"))
        packed = item["encrypted_content"]
        forged = {**item, "encrypted_content": packed[:9] + ("B" if packed[9] == "A" else "A") + packed[10:]}
        await opened(server, web, forged, lambda text: "Summary of the earlier" not in text)
        foreign = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAAABo"}
        await web.responses.create(model="m", input=[USER, foreign, USER], store=False)
        assert sent(server)[1] == foreign


async def _server_first(server: Stub, web: AsyncOpenAI) -> None:
    """A server that has the path is asked for what fits, byte for byte."""
    answer = await web.responses.with_raw_response.compact(model="gpt-4o-mini", input=[USER])
    assert server.seen[-1].path == "/v1/responses/compact"
    assert json.loads(answer.http_response.content)["sha256"]
    assert sent(server) == [USER]


async def _on_its_path(server: Stub, web: AsyncOpenAI) -> None:
    server.fail(error(404))
    answer = await web.responses.with_raw_response.compact(model="gpt-4o-mini", input=SESSION["input"])
    made = answer.parse()
    assert answer.headers["x-ullage-outcome"] == "compacted;served"
    assert (made.object, made.output[-1].type) == ("response.compaction", "compaction")
    assert made.usage.input_tokens > WINDOW > made.usage.output_tokens
    output = json.loads(answer.http_response.content)["output"]
    assert output[0] == TASK, "the user's messages stay as they are"
    await web.responses.create(model="gpt-4o-mini", input=[*output, USER], store=False)
    assert server.seen[-1].verdict == "ok"
    assert [entry["role"] for entry in sent(server)] == ["user"] * 3
    assert "read_file" in sent(server)[1]["content"][0]["text"]


async def _as_an_item(server: Stub, web: AsyncOpenAI) -> None:
    asking = {**SESSION, "input": [*SESSION["input"], ITEM]}
    whole = await web.responses.create(**asking, store=False)
    assert server.seen == [], "nobody is paid for an answer that no client can use"
    assert whole.status == "completed"
    assert [entry.type for entry in whole.output] == ["compaction"]
    item = await streamed(web)
    assert item == whole.output[0].model_dump(exclude_none=True)
    await opened(server, web, item, lambda text: AGENT_TASK in text)


async def _relayed(server: Stub, web: AsyncOpenAI) -> None:
    """A server that is said to make such items is asked, and its answer and its errors are the client's."""
    asking = {**SESSION, "model": "able-1", "input": [USER, ITEM]}
    await web.responses.create(**asking, store=False)
    assert sent(server)[-1] == ITEM
    server.fail(error(400, "Invalid value: 'compaction_trigger'", "invalid_value"))
    with pytest.raises(BadRequestError, match="invalid_value"):
        await web.responses.create(**asking, store=False)


async def streamed(web: AsyncOpenAI) -> dict[str, Any]:
    """The one item of a streamed compaction, read as Codex reads it."""
    asking = {**SESSION, "input": [*SESSION["input"], ITEM], "stream": True}
    events = [event async for event in await web.responses.create(**asking, store=False)]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == ["created", "output_item.added", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == [0, 1, 2, 3]
    done = events[-1].response
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens > WINDOW
    item: dict[str, Any] = events[2].item.model_dump(exclude_none=True)
    assert [entry.model_dump(exclude_none=True) for entry in done.output] == [item]
    return item


async def opened(server: Stub, web: AsyncOpenAI, item: dict[str, Any], says: Callable[[str], bool]) -> None:
    """What the upstream sees for *item* is a user message that *says* so."""
    await web.responses.create(model="gpt-4o-mini", input=[USER, item, USER], store=False)
    assert server.seen[-1].verdict == "ok"
    view = sent(server)
    assert [view[0], view[2]] == [USER, USER]
    assert view[1]["role"] == "user"
    assert says(view[1]["content"][0]["text"])


async def test_context_edits_are_done_for_servers_without_them(stub: StartStub, proxy: StartProxy) -> None:
    """The edits reach no server that cannot do them, what they ask for is done, and counts speak of that view."""
    server = await stub(window=200_000, wording="anthropic", counts=True)
    upstreams = [
        {"name": "own", "base_url": server.url, "context_management": "own"},
        {"name": "pass", "base_url": server.url},
    ]
    models = [{"name": f"{name}*", "upstream": name, "context_window": 200_000} for name in ("own", "pass")]
    front = await proxy(server.url, config={"upstreams": upstreams, "models": models})
    clearing = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 4000}}
    compacting = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 6000}}
    talk = agent_session(40, 300)
    headers = {"x-api-key": "sk-1", "anthropic-version": "2023-06-01"}
    async with loopback_client(headers=headers) as web:

        async def sent_body(path: str, model: str, **members: Any) -> tuple[dict[str, Any], httpx.Response]:
            body = request_body("messages", talk, AGENT_TOOLS, model=model, **members)
            answer = await web.post(front.url + path, content=json.dumps(body))
            assert answer.status_code == 200, answer.text
            return json.loads(server.seen[-1].body), answer

        passed, _ = await sent_body("/messages", "pass-1", context_management={"edits": [clearing]})
        assert passed["context_management"] == {"edits": [clearing]}
        made, _ = await sent_body("/messages", "own-1", context_management={"edits": [clearing]})
        assert made.keys() == passed.keys() - {"context_management"}
        assert len(made["messages"]) == len(passed["messages"])
        assert "result content cleared" in json.dumps(made["messages"][2])
        counted, answer = await sent_body("/messages/count_tokens", "own-1", context_management={"edits": [clearing]})
        assert counted["messages"] == made["messages"]
        assert answer.json()["input_tokens"] == server.seen[-1].tokens < 8000
        _, answer = await sent_body("/messages", "own-1", context_management={"edits": [compacting]})
        assert answer.headers["x-ullage-outcome"] == "compacted"
        assert server.seen[-1].tokens < 6000
