"""Another model in place of the one that was asked, through real proxies and two strict upstreams."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.conftest import StartProxy, StartStub
from tests.e2e.test_recovery import AGENT
from tests.support.loopback import loopback_client
from tests.support.proxy_process import Client, until
from tests.support.sample_conversations import prose

SMALL, LARGE = 8_192, 65_536
LONG = [{"role": "user", "content": prose(1, 12_000)}]


def config(own: str, other: str, *steps: Any, told: int = SMALL) -> dict[str, Any]:
    """Two upstreams, of which the other has a key of its own."""
    return {
        "upstreams": [{"name": "own", "base_url": own}, {"name": "other", "base_url": other, "api_key": "sk-other"}],
        "models": [
            {"name": "big", "upstream": "other", "context_window": LARGE},
            {"name": "*", "upstream": "own", "context_window": told, "overflow": list(steps)},
        ],
    }


async def test_the_bigger_window_takes_what_would_be_clipped(stub: StartStub, proxy: StartProxy) -> None:
    """The fallback is asked with its own name and key, and header, log and metrics name it."""
    own, other = await stub(window=SMALL), await stub(window=LARGE)
    front = await proxy(own.url, config=config(own.url, other.url, "compress", {"fallback": "big"}))
    async with Client(front.url, api_key="sk-client") as client:
        for messages in (AGENT, LONG):
            raw = await client.chat.completions.with_raw_response.create(model="small", messages=messages)
    answer = raw.parse()
    assert answer.model == "big"
    assert (raw.headers["x-ullage-fallback"], raw.headers["x-ullage-outcome"]) == ("big", "degraded;fallback")
    assert raw.headers["x-ullage-window"] == str(LARGE)
    assert ([seen.verdict for seen in own.chats()], [seen.verdict for seen in other.chats()]) == (["ok"], ["ok"])
    (seen,) = other.chats()
    assert seen.header("authorization") == "Bearer sk-other"
    assert seen.parsed == {"model": "big", "messages": LONG}
    async with loopback_client() as web:
        metrics = (await web.get(f"{front.root}/metrics")).text
    assert 'ullage_fallbacks_total{fallback="big",model="small"} 1.0' in metrics
    await until(lambda: front.log.read_text().count("proxy.request_done") == 2)
    lines = [json.loads(line) for line in front.log.read_text().splitlines() if line.startswith("{")]
    assert [line["fallback"] for line in lines if line["event"] == "proxy.request_done"] == ["", "big"]


async def test_a_server_that_fails_is_stood_in_for(stub: StartStub, proxy: StartProxy) -> None:
    """With `fallback_on` a server that is gone costs no request, streaming or not; without it the client is told."""
    other = await stub(window=LARGE)
    setting = config("http://127.0.0.1:9/v1", other.url, "compress", {"fallback": "big"})
    setting["models"].insert(0, {**setting["models"][1], "name": "rescued", "fallback_on": ["unavailable"]})
    front = await proxy("http://127.0.0.1:9/v1", config=setting)
    short: Any = [{"role": "user", "content": "hi"}]
    async with Client(front.url, api_key="sk-client") as client:
        answer = await client.chat.completions.create(model="rescued", messages=short)
        stream = await client.chat.completions.create(model="rescued", messages=short, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        with pytest.raises(openai.InternalServerError, match="could not be reached"):
            await client.chat.completions.create(model="small", messages=short)
    assert (answer.model, text) == ("big", "Understood.")
    assert [seen.header("authorization") for seen in other.chats()] == ["Bearer sk-other"] * 2


async def test_a_client_key_stays_with_its_upstream(stub: StartStub, proxy: StartProxy) -> None:
    """A fallback at another upstream that has no key of its own gets none, and neither cookie nor organisation."""
    own, other = await stub(window=SMALL), await stub(window=LARGE)
    setting = config(own.url, other.url, {"fallback": "big"}, "compress")
    del setting["upstreams"][1]["api_key"]
    front = await proxy(own.url, config=setting)
    headers = {"authorization": "Bearer sk-secret", "cookie": "a=b", "openai-organization": "org", "x-trace": "t"}
    async with loopback_client() as web:
        body = {"model": "small", "messages": LONG}
        answer = await web.post(f"{front.url}/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    (seen,) = other.chats()
    assert [seen.header(name) for name in headers] == ["", "", "", "t"]


async def test_a_stream_is_rescued_by_the_fallback(stub: StartStub, proxy: StartProxy) -> None:
    """A stream whose model refuses whatever it is sent comes from the fallback, and the client sees no error."""
    own, other = await stub(window=100), await stub(window=LARGE)
    front = await proxy(own.url, config=config(own.url, other.url, "compress", {"fallback": "big"}, told=20_000))
    async with Client(front.url) as client:
        stream = await client.chat.completions.create(model="small", messages=AGENT, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert text == "Understood."
    assert {seen.verdict for seen in own.chats()} == {"overflow"}
    assert [seen.verdict for seen in other.chats()] == ["ok"]
