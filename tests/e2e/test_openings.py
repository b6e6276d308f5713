"""Overflows that open a 200 stream, in the shapes of servers and gateways, where too large a window is believed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import StartProxy, StartStub
from tests.e2e.test_recovery import CHAT
from tests.stub.faults import events
from tests.stub.tokens import request_tokens
from tests.support.api_formats import request_body
from tests.support.loopback import loopback_client

BELIEVED, TRUE = 400_000, 8_192
"""What the proxy was told, and what the server has: our count is a thirtieth of the one and above the other."""
COUNTED = request_tokens({"messages": CHAT})
PATHS = {"chat": "/chat/completions", "messages": "/messages", "responses": "/responses"}
DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any], name: str = "") -> bytes:
    """A server-sent event that holds *value*."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(value).encode() + b"\n\n"


def numbered(at: int, **value: Any) -> bytes:
    """An event of Responses."""
    return event({**value, "sequence_number": at}, value["type"])


RESPONSE = {"id": "resp_1", "object": "response", "status": "in_progress", "error": None, "output": [], "usage": None}
SAYS = "Your input exceeds the context window of this model. Please adjust your input and try again."
CODE = {"code": "context_length_exceeded", "message": SAYS}
BEGUN = numbered(0, type="response.created", response=RESPONSE)
BEGUN += numbered(1, type="response.in_progress", response=RESPONSE) + numbered(2, type="keepalive")
FAILED = numbered(3, type="response.failed", response={**RESPONSE, "status": "failed", "error": CODE})
FLAT = numbered(3, type="error", **CODE, param="input")
NESTED = numbered(3, type="error", error={"type": "invalid_request_error", **CODE, "param": "input"})
ROLE = event({"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
TGI = f"`inputs` tokens + `max_new_tokens` must be <= {TRUE}. Given: {COUNTED} `inputs` tokens and 100 `max_new_tokens`"
SGLANG = f"The input ({COUNTED} tokens) is longer than the model's context length ({TRUE} tokens)."
MLC = f"Request prompt has {COUNTED} tokens in total, larger than the model input length limit {TRUE}."
CLAUDE = f"prompt is too long: {COUNTED} tokens > {TRUE} maximum"

OPENINGS = {
    "responses: failed": ("responses", FAILED),
    "responses: preamble, failed": ("responses", BEGUN + FAILED),
    "responses: error": ("responses", FLAT),
    "responses: preamble, error": ("responses", BEGUN + FLAT),
    "responses: preamble, nested error, failed": ("responses", BEGUN + NESTED + FAILED),
    "tgi": ("chat", event({"error": {"message": f"Input validation error: {TGI}", "http_status_code": 422}})),
    "tgi, older": ("chat", event({"error": f"Input validation error: {TGI}", "error_type": "validation"})),
    "sglang": ("chat", event({"error": {"object": "error", "message": SGLANG, "code": 400}}) + DONE),
    "sglang behind a role": (
        "chat",
        ROLE + event({"error": {"object": "error", "message": SGLANG, "code": 400}}) + DONE,
    ),
    "mlc": ("chat", event({"object": "error", "message": MLC, "code": None})),
    "vercel": (
        "chat",
        b": ping\n\n" + event({"error": {"message": CLAUDE, "type": "AI_APICallError", "param": {"statusCode": 400}}}),
    ),
    "figures in no known words": (
        "chat",
        event({"error": {"message": f"This one takes {TRUE} tokens, that is {COUNTED} tokens."}}),
    ),
    "figures behind an empty choice": (
        "chat",
        json.dumps({"choices": [], "error": {"message": f"{COUNTED} tokens sent, {TRUE} is what we take"}}).encode(),
    ),
    "llama.cpp of 2025": (
        "chat",
        ROLE + b"error: " + json.dumps({"message": CLAUDE, "type": "invalid_request_error"}).encode() + b"\n\n" + DONE,
    ),
    "openrouter": (
        "chat",
        event({"choices": [{"delta": {"content": ""}, "finish_reason": "error", "error": {"message": CLAUDE}}]}),
    ),
    "responses: items begun": (
        "responses",
        BEGUN
        + numbered(3, type="response.output_item.added", item={"type": "message", "content": []})
        + numbered(4, type="response.content_part.added", part={"type": "output_text", "text": ""})
        + FAILED,
    ),
    "messages: a block begun": (
        "messages",
        event({"type": "message_start", "message": {"id": "m", "content": [], "usage": {"input_tokens": 0}}})
        + event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
        + event({"type": "error", "error": {"type": "invalid_request_error", "message": CLAUDE}}, "error"),
    ),
    "vercel: messages": (
        "messages",
        event({"type": "message_start", "message": {"id": "m", "content": [], "usage": {"input_tokens": 0}}})
        + event({"type": "ping"}, "ping")
        + event({"type": "error", "error": {"type": "invalid_request_error", "message": CLAUDE}}, "error"),
    ),
}


async def test_an_overflow_far_below_the_believed_window_is_recovered_from(stub: StartStub, proxy: StartProxy) -> None:
    """Whatever the pressure, what opens a 200 stream with an overflow is answered with something smaller."""
    server = await stub(window=TRUE)
    front = await proxy(server.url, window=BELIEVED)
    became: dict[str, object] = {}
    async with loopback_client(base_url=front.url) as client:
        for at, (name, (api, opening)) in enumerate(OPENINGS.items()):
            server.forget()
            server.fail(events(opening))
            # A key of its own for each: nothing was learned for it.
            keys = {"authorization": f"Bearer sk-{at}", "anthropic-version": "2023-06-01"}
            answer = await client.post(PATHS[api], json=request_body(api, CHAT, stream=True), headers=keys)
            seen = [(one.verdict, len(one.body)) for one in server.chats()]
            became[name] = (answer.status_code, [verdict for verdict, _ in seen], answer.headers["x-ullage-outcome"])
            assert "Understood" in answer.text.replace('"}}]}\n\ndata: ', ""), (name, answer.text)
            assert seen[-1][1] < seen[0][1], name
    assert became == dict.fromkeys(OPENINGS, (200, ["fault", "ok"], "compacted"))


@pytest.mark.parametrize("api", PATHS)
async def test_a_watched_opening_passes_byte_for_byte(stub: StartStub, proxy: StartProxy, api: str) -> None:
    """A small request's stream, and an error that is no overflow, reach the client as the upstream wrote them."""
    server = await stub(window=TRUE)
    front = await proxy(server.url, window=BELIEVED)
    said = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded", "code": "overloaded"}}
    word = event(
        {"id": "c", "choices": [{"index": 0, "delta": {"content": "prompt is too long: 9 tokens > 8 maximum"}}]}
    )
    body = request_body(api, CHAT[:2], stream=True)
    async with loopback_client() as client:
        for stream in (BEGUN + event(said), BEGUN + ROLE + word + event({"error": CODE}), ROLE + word + DONE, ROLE[:9]):
            server.forget()
            server.fail(events(stream))
            passed = await client.post(f"{front.url}{PATHS[api]}", json=body)
            assert (passed.status_code, passed.content) == (200, stream)
            assert passed.headers["x-ullage-outcome"] == "verbatim"
            assert len(server.chats()) == 1
