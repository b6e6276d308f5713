"""An upstream whose window is smaller than the proxy was told, or never told: the client sees the answer."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from tests.conftest import StartProxy, StartStub
from tests.stub import Fault, Rules
from tests.stub.faults import error, events
from tests.stub.rules import Wording
from tests.stub.tokens import request_tokens
from tests.support.chat_client import read_chat_stream
from tests.support.loopback import loopback_client
from tests.support.proxy_process import Client
from tests.support.sample_conversations import agent_session, chat_turn
from tests.support.tool_pair_checks import pair_violations

TOLD, TRUE = 16_384, 8_192
WORDINGS = get_args(Wording)
CHAT = [message for turn in range(12) for message in chat_turn(turn, 450)] + chat_turn(99, 60)[:1]
AGENT = agent_session(24, 450)
UNHEARD = "a-model-nobody-has-heard-of"


def fitting_request(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A request that fits the window the proxy was told of, and not the true one."""
    assert TRUE < request_tokens({"messages": messages}) < 0.85 * TOLD
    return {"model": "gpt-4o-mini", "messages": messages, **more}


@pytest.mark.parametrize("messages", [CHAT, AGENT], ids=["chat", "agent"])
@pytest.mark.parametrize("how", ["whole", "stream", "inside_200"])
async def test_an_overflow_is_recovered_from(
    stub: StartStub, proxy: StartProxy, how: str, messages: list[dict[str, Any]]
) -> None:
    """In every provider's words, as a status or inside a 200 stream, streamed or not, the client sees only success."""
    server = await stub()
    front = await proxy(server.url, window=TOLD)
    for wording in WORDINGS:
        server.forget()
        server.rules = Rules(window=TRUE, wording=wording, overflow_in_stream=how == "inside_200")
        # A key of its own for each: nothing was learned for it.
        async with Client(front.url, api_key=f"sk-{wording}") as client:
            if how == "whole":
                raw = await client.chat.completions.with_raw_response.create(**fitting_request(messages))
                assert raw.parse().choices[0].message.content == "Understood."
                assert (raw.headers["x-ullage-outcome"], raw.headers["x-ullage-retries"]) == ("compacted", "1")
            else:
                stream = await client.chat.completions.create(
                    **fitting_request(messages), stream=True, stream_options={"include_usage": True}
                )
                answer, finish, usage = await read_chat_stream(stream)
                assert (answer["content"], finish, usage) == ("Understood.", "stop", True)
        first, second = server.chats()
        assert (first.verdict, second.verdict) == ("overflow", "ok"), wording
        assert second.tokens < first.tokens
        assert pair_violations(second.messages) == []


async def test_what_was_learned_holds_for_the_next_request(stub: StartStub, proxy: StartProxy) -> None:
    """After one overflow the conversation and the caller's others are fitted ahead, at the true window."""
    server = await stub(window=TRUE)
    front = await proxy(server.url, window=TOLD)
    async with Client(front.url) as client:
        for messages in (CHAT, AGENT, CHAT + chat_turn(50, 100)):
            await client.chat.completions.create(**fitting_request(messages))
    assert [seen.verdict for seen in server.chats()] == ["overflow", "ok", "ok", "ok"]


async def test_an_unknown_window_is_learned_from_the_first_overflow(stub: StartStub, proxy: StartProxy) -> None:
    """Of a model whose window nobody knows nothing is compressed ahead, until an overflow states it."""
    server = await stub()
    front = await proxy(server.url)
    for wording in WORDINGS:
        server.forget()
        server.rules = Rules(window=TRUE, wording=wording)
        async with Client(front.url, api_key=f"sk-{wording}") as client:
            raw = await client.chat.completions.with_raw_response.create(model=UNHEARD, messages=CHAT[:4])
            assert raw.headers["x-ullage-outcome"] == "verbatim;unknown-window"
            assert "x-ullage-window" not in raw.headers
            for messages in (CHAT, AGENT):
                raw = await client.chat.completions.with_raw_response.create(model=UNHEARD, messages=messages)
                assert raw.headers["x-ullage-outcome"] == "compacted"
                assert raw.headers["x-ullage-window"] == str(TRUE)
        assert [seen.verdict for seen in server.chats()] == ["ok", "overflow", "ok", "ok"], wording


@pytest.mark.parametrize("inside", [False, True], ids=["status", "inside_200"])
async def test_after_two_failed_retries_the_first_error_is_passed_verbatim(
    stub: StartStub, proxy: StartProxy, inside: bool
) -> None:
    """A provider that is never satisfied is asked three times; its first answer reaches the client byte for byte."""
    server = await stub(window=TOLD)
    bodies = []
    for number in range(3):
        message = f"This model's maximum context length is {6000 - 1000 * number} tokens. However, you sent more."
        made = error(400, message, "context_length_exceeded").body or b""
        bodies.append(b"data: " + made + b"\n\n" if inside else made)
        spaced = (("content-type", "application/json"), ("x-attempt", str(number)))
        server.fail(events(bodies[-1]) if inside else Fault(status=400, headers=spaced, body=bodies[-1]))
    front = await proxy(server.url, window=TOLD)
    async with loopback_client() as client:
        answer = await client.post(f"{front.url}/chat/completions", json=fitting_request(CHAT, stream=inside))
    assert answer.content == bodies[0]
    assert answer.status_code == (200 if inside else 400)
    assert answer.headers.get("x-attempt") == (None if inside else "0")
    assert answer.headers["x-ullage-outcome"] == "degraded;overflow"
    sizes = [len(seen.body) for seen in server.chats()]
    assert len(sizes) == 3
    assert sizes[0] > sizes[1] > sizes[2]


async def test_every_other_error_is_passed_verbatim_and_never_retried(stub: StartStub, proxy: StartProxy) -> None:
    """What is no overflow reaches the client as it came, once."""
    server = await stub(window=TOLD)
    front = await proxy(server.url, window=TOLD)
    body = json.dumps({"error": {"message": "no context here", "type": "x", "code": "y"}, "odd": 1.10}).encode()
    headers = (("content-type", "application/json"), ("retry-after", "7"), ("x-ratelimit-remaining-tokens", "0"))
    async with loopback_client() as client:
        for status in (400, 401, 404, 422, 429, 500, 503, 529):
            server.forget()
            server.fail(Fault(status=status, headers=headers, body=body))
            answer = await client.post(f"{front.url}/chat/completions", json=fitting_request(CHAT))
            assert (answer.status_code, answer.content) == (status, body)
            assert [answer.headers[name] for name, _ in headers] == [value for _, value in headers]
            assert len(server.chats()) == 1, status


async def test_off_and_observe_pass_the_overflow_on(stub: StartStub, proxy: StartProxy) -> None:
    """A caller that asked for no change gets none, not even after an overflow."""
    server = await stub(window=TRUE)
    front = await proxy(server.url, window=TOLD)
    async with loopback_client() as client:
        for mode in ("off", "observe"):
            answer = await client.post(
                f"{front.url}/chat/completions", json=fitting_request(CHAT), headers={"x-ullage-mode": mode}
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(server.chats()) == 2
    assert server.chats()[0].body == server.chats()[1].body


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"Well"},"finish_reason":null}]}\n\n'
SAID = f"This model's maximum context length is {TRUE} tokens. However, your messages resulted in 11000 tokens."
STATED = error(400, SAID, "context_length_exceeded").body or b""
FULL = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"model_context_window_exceeded"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(b"data: " + STATED + b"\n\n", id="an_error_that_states_it"),
        pytest.param(FULL + USAGE % (TRUE - 100, 100, TRUE) + DONE, id="a_stop_reason_and_usage"),
    ],
)
async def test_an_overflow_after_content_passes_and_teaches(stub: StartStub, proxy: StartProxy, ending: bytes) -> None:
    """What the client has begun to read is passed on to its end, once; the next request fits ahead."""
    server = await stub(window=TRUE)
    server.fail(events(ROLE, WORD, ending))
    front = await proxy(server.url)
    request = {"model": UNHEARD, "stream": True}
    async with loopback_client() as client:
        first = await client.post(f"{front.url}/chat/completions", json={**request, "messages": CHAT})
        assert first.content == ROLE + WORD + ending
        assert len(server.chats()) == 1
        second = await client.post(f"{front.url}/chat/completions", json={**request, "messages": AGENT})
    assert second.headers["x-ullage-outcome"] == "compacted"
    assert second.headers["x-ullage-window"] == str(TRUE)
    assert [seen.verdict for seen in server.chats()] == ["fault", "ok"]
