import asyncio
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from proxy.core.errors import InvalidRequest, UllageError, Unauthorized, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream import Timeouts
from tests.support.litellm_fixture import (
    HELLO,
    JSON,
    KEY,
    ROUND,
    SSE,
    TOOLS,
    LiteLLMFixture,
    called,
    candidate,
    ended,
    message,
    opened,
    read_events,
    refusal,
    sse,
)
from tests.support.proxy_process import until
from tests.support.server_fixture import chunk, raw_answer
from tests.support.upstream_fixture import read_body

pytestmark = [
    pytest.mark.slow,  # importing LiteLLM takes seconds
    # LiteLLM's own types, the first time it builds one.
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning"),
]
ROOT = Path(__file__).parents[2]
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CALLS = [
    {"type": "tool_use", "id": "toolu_1", "name": "read_file", "input": {"path": "c"}},
    {"type": "tool_use", "id": "toolu_2", "name": "read_file", "input": {"path": "b"}},
]


def json_answer(document):
    return raw_answer(json.dumps(document).encode(), JSON)


async def test_a_tool_round_with_a_picture_in_anthropics_words():
    """System text, picture, parallel calls and their results arrive as the provider writes them, calls come back."""
    async with LiteLLMFixture() as across:
        across.stage.reply = json_answer(message({"type": "text", "text": "Hm."}, *CALLS, stop="tool_use"))
        _, got = await across.ask(messages=ROUND, tools=TOOLS, max_tokens=50)
        sent = across.request
        assert [block["text"] for block in sent["system"]] == ["You are terse."]
        first, second, third = sent["messages"]
        assert first["content"][1]["source"] == {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
        assert [block["input"] for block in second["content"]] == [{"path": "a"}, {"path": "b"}]
        assert [block["tool_use_id"] for block in third["content"]] == ["call_1", "call_2"]
        assert (sent["max_tokens"], sent["tools"][0]["name"]) == (50, "read_file")
        choice = got["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Hm."
        assert [(call["id"], call["function"]) for call in choice["message"]["tool_calls"]] == [
            ("toolu_1", {"name": "read_file", "arguments": '{"path": "c"}'}),
            ("toolu_2", {"name": "read_file", "arguments": '{"path": "b"}'}),
        ]
        assert all(call.keys() == {"id", "type", "function"} for call in choice["message"]["tool_calls"])


async def test_usage_is_the_providers():
    """Tokens read from the provider's cache are part of the prompt and named so; the model is the requested one."""
    async with LiteLLMFixture() as across:
        cached = {"cache_read_input_tokens": 3, "cache_creation_input_tokens": 4}
        across.stage.reply = json_answer(message({"type": "text", "text": "Yes."}, **cached))
        _, got = await across.ask()
        usage = got["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (17, 5, 22)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 3
        assert got["model"] == HELLO["model"]


async def test_a_stream_is_openais():
    """Text, parallel calls, the reason to stop, then usage with no choices, then ``[DONE]``."""
    async with LiteLLMFixture() as across:
        calls = [*called(1, "read_file", '{"path"', ': "a"}'), *called(2, "read_file", '{"path": "b"}')]
        body = opened("Hm", ".") + sse({"type": "content_block_stop", "index": 0}, *calls) + ended("tool_use", 9)
        across.stage.reply = raw_answer(body, SSE)
        events, done = await across.stream(stream_options={"include_usage": True}, tools=TOOLS)
        assert done
        *chunks, last = events
        assert last["choices"] == []
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (10, 9)
        assert "usage" not in chunks[0]
        deltas = [event["choices"][0]["delta"] for event in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Hm."
        arguments = {0: "", 1: ""}
        for delta in deltas:
            for call in delta.get("tool_calls", ()):
                arguments[call["index"]] += call["function"]["arguments"]
        assert [json.loads(text) for text in arguments.values()] == [{"path": "a"}, {"path": "b"}]
        assert [event["choices"][0]["finish_reason"] for event in chunks][-2:] == [None, "tool_calls"]


async def test_usage_that_was_not_requested_does_not_come():
    """A stream without ``include_usage`` has no usage, as OpenAI's has none."""
    async with LiteLLMFixture() as across:
        across.stage.reply = raw_answer(opened("Hm.") + ended(), SSE)
        events, done = await across.stream()
        assert done
        assert all("usage" not in event and event["choices"] for event in events)


@pytest.mark.parametrize(
    ("stop", "reason"), [("end_turn", "stop"), ("max_tokens", "length"), ("stop_sequence", "stop")]
)
async def test_reasons_to_stop(stop, reason):
    """The provider's reason to stop becomes OpenAI's word for it."""
    async with LiteLLMFixture() as across:
        across.stage.reply = json_answer(message({"type": "text", "text": "x"}, stop=stop))
        _, got = await across.ask()
        assert got["choices"][0]["finish_reason"] == reason


async def test_thoughts_come_and_go_back_sealed():
    """A thought's seal reaches the client, and the provider again with the next request."""
    thought = {"type": "thinking", "thinking": "Let me see.", "signature": "c2VhbA=="}
    async with LiteLLMFixture() as across:
        across.stage.reply = json_answer(message(thought, CALLS[0], stop="tool_use"))
        request = {"tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 4096}
        _, got = await across.ask(**request)
        spoken = got["choices"][0]["message"]
        assert spoken["reasoning_content"] == "Let me see."
        result = {"role": "tool", "tool_call_id": "toolu_1", "content": "one"}
        await across.ask(messages=[*HELLO["messages"], spoken, result], **request)
        assert across.request["messages"][1]["content"][0] == thought


@pytest.mark.parametrize("stream", [False, True])
async def test_another_provider(stream):
    """Gemini's API is bridged, too: calls, results and pictures out, calls, usage and the stop reason back."""
    async with LiteLLMFixture("gemini", "/v1beta") as across:
        call = {"functionCall": {"name": "read_file", "args": {"path": "a"}}}
        document = json.dumps(candidate({"text": "Hm."}, call)).encode()
        across.stage.reply = raw_answer(b"data: %b\r\n\r\n" % document, SSE) if stream else raw_answer(document, JSON)
        members = {"model": "gemini-2.5-pro", "messages": ROUND, "tools": TOOLS}
        if stream:
            events, done = await across.stream(stream_options={"include_usage": True}, **members)
            assert done
            assert events[-1]["choices"] == []
            spoken, usage = events[0]["choices"][0]["delta"], events[-1]["usage"]
            finish = events[-2]["choices"][0]["finish_reason"]
        else:
            _, got = await across.ask(**members)
            choice, usage = got["choices"][0], got["usage"]
            spoken, finish = choice["message"], choice["finish_reason"]
        contents = across.request["contents"]
        assert contents[0]["parts"][1]["inline_data"]["mime_type"] == "image/png"
        assert [part["function_response"]["response"] for part in contents[2]["parts"]] == [
            {"content": "one"},
            {"content": "two"},
        ]
        assert across.stage.heard[-1].all("x-goog-api-key") == ["sk-client"]
        assert json.loads(spoken["tool_calls"][0]["function"]["arguments"]) == {"path": "a"}
        assert (usage["prompt_tokens"], usage["completion_tokens"], finish) == (10, 5, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("400 Bad Request", "invalid_request_error"),
        ("401 Unauthorized", "authentication_error"),
        ("404 Not Found", "not_found_error"),
        ("429 Too Many Requests", "rate_limit_error"),
        ("500 Internal Server Error", "api_error"),
        ("529 Overloaded", "overloaded_error"),
    ],
)
async def test_a_refusal_keeps_status_words_and_pause(status, kind, stream):
    """The provider's own status, words, pause and request id reach the client, after one call."""
    async with LiteLLMFixture() as across:
        text = "Number of requests has exceeded your limit."
        across.stage.reply = refusal(kind, text, status, "retry-after: 7", "request-id: req_9", "x-secret: no")
        reply, got = await across.ask(stream=stream)
        assert reply.status == int(status[:3])
        assert got == {"error": {"message": text, "type": kind, "param": None, "code": None}}
        assert (reply.header("retry-after"), reply.header("request-id"), reply.header("x-secret")) == ("7", "req_9", "")
        assert len(across.stage.heard) == 1


@pytest.mark.parametrize("in_stream", [False, True])
async def test_an_overflow_is_recognised(in_stream):
    """A provider's refusal over its window is an overflow in OpenAI's code and its own words, in a stream too."""
    text = "prompt is too long: 200251 tokens > 200000 maximum"
    async with LiteLLMFixture() as across:
        if in_stream:
            error = {"type": "error", "error": {"type": "invalid_request_error", "message": text}}
            across.stage.reply = raw_answer(sse(error), SSE)
            (event,), done = await across.stream()
            assert not done
            got = event["error"]
        else:
            across.stage.reply = refusal("invalid_request_error", text, "400 Bad Request")
            got = (await across.ask())[1]["error"]
        assert (got["message"], got["code"]) == (text, "context_length_exceeded")


async def test_words_that_are_no_json():
    """A gateway's page instead of an answer is passed on with its status."""
    async with LiteLLMFixture() as across:
        across.stage.reply = raw_answer(b"<h1>Bad gateway</h1>", "Content-Type: text/html", status="502 Bad Gateway")
        reply, got = await across.ask()
        assert (reply.status, got["error"]["message"]) == (502, "<h1>Bad gateway</h1>")


async def test_an_answer_that_is_none_of_the_providers():
    """A 200 that cannot be read is the upstream's fault and says so, without a trace of the code."""
    async with LiteLLMFixture() as across:
        across.stage.reply = json_answer({"unexpected": True})
        with pytest.raises(UpstreamUnreachable, match="not one of anthropic's"):
            await across.ask()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", ["anthropic", "gemini", "mistral", "groq"])
async def test_redirects_are_not_followed(provider, stream):
    """Nobody whom an answer names gets the key or the prompt."""
    async with LiteLLMFixture(provider) as across, LiteLLMFixture() as thief:
        location = f"Location: http://127.0.0.1:{thief.stage.port}/v1/messages"
        across.stage.reply = raw_answer(b"{}", JSON, location, status="307 Temporary Redirect")
        with pytest.raises(UpstreamUnreachable, match="redirect"):
            await across.send(stream=stream, model="any-model")
        assert len(across.stage.heard) == 1
        assert thief.stage.heard == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", ["anthropic", "groq"])
async def test_a_request_that_may_have_arrived_is_not_repeated(provider, stream):
    """When the connection breaks before the answer, the request is not sent again."""

    async def script(heard, reader, writer):
        writer.close()

    async with LiteLLMFixture(provider) as across:
        across.stage.script = script
        with pytest.raises(UpstreamUnreachable, match="before it answered"):
            await across.send(stream=stream)
        assert len(across.stage.heard) == 1


async def test_a_stream_that_breaks_raises_an_error():
    """Events before the break are returned, then ``UpstreamUnreachable`` is raised."""

    async def script(heard, reader, writer):
        writer.write(CHUNKED + chunk(opened("Hm")))
        await writer.drain()
        writer.close()

    async with LiteLLMFixture() as across:
        across.stage.script = script
        reply = await across.send(stream=True)
        assert b'"Hm"' in await reply.next_chunk()
        with pytest.raises(UpstreamUnreachable, match="complete"):
            await read_body(reply)


async def test_an_error_inside_a_stream_ends_it():
    """A provider that gives up in the middle is heard in its own words, and there is no ``[DONE]``."""
    async with LiteLLMFixture() as across:
        error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
        across.stage.reply = raw_answer(opened("Hm") + sse(error), SSE)
        events, done = await across.stream()
        assert not done
        assert [event.get("error", {}).get("message") for event in events] == [None, "Overloaded"]


async def test_a_stream_that_cannot_be_closed_is_at_its_end(monkeypatch):
    """Whatever else goes wrong in a stream is reported, and ends the answer instead of leaving its reader waiting."""
    async with LiteLLMFixture() as across:
        across.stage.reply = raw_answer(opened("Hm") + ended(), SSE)
        reply = await across.send(stream=True)

        async def aclose(self):
            raise RuntimeError("not to be closed")

        monkeypatch.setattr(sys.modules["litellm"].CustomStreamWrapper, "aclose", aclose)
        with pytest.raises(UllageError):
            await asyncio.wait_for(read_body(reply), 60)
        assert [name for name, _ in across.failed] == ["bridged stream"]
        across.failed.clear()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_provider_that_says_nothing(stream):
    """Silence ends with ``UpstreamTimeout``, before the head and inside a stream."""

    async def script(heard, reader, writer):
        if stream:
            writer.write(CHUNKED + chunk(opened("Hm")))
        await reader.read()

    async with LiteLLMFixture(timeouts=Timeouts(1.0, 0.3, 0.3)) as across:
        across.stage.script = script
        with pytest.raises(UpstreamTimeout):
            await read_body(await across.send(stream=stream))


async def test_a_provider_that_is_not_there():
    """A closed port is ``UpstreamUnreachable``."""
    async with LiteLLMFixture() as across:
        across.bridge._targets["up"] = type(across.bridge._targets["up"])("up", "anthropic", "http://127.0.0.1:1")
        with pytest.raises(UpstreamUnreachable, match="could not be connected"):
            await across.send()


@pytest.mark.parametrize("moment", ["before", "within"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_call(stream, moment):
    """The provider's connection is dropped at once, so that nothing more is paid for."""
    if moment == "within" and not stream:
        return
    left = asyncio.Event()

    async def script(heard, reader, writer):
        if moment == "within":
            writer.write(CHUNKED + chunk(opened("Hm")))
        await reader.read()
        left.set()

    async with LiteLLMFixture() as across:
        across.stage.script = script
        if moment == "within":
            reply = await across.send(stream=True)
            await reply.next_chunk()
            reply.close()
        else:
            sending = asyncio.ensure_future(across.send(stream=stream))
            await until(lambda: bool(across.stage.heard))
            sending.cancel()
        async with asyncio.timeout(60):
            await left.wait()


async def test_a_cancelled_read_loses_nothing():
    """Events that arrive after a read was given up are given to the next one."""
    go = asyncio.Event()

    async def script(heard, reader, writer):
        writer.write(CHUNKED + chunk(opened("one")))
        await go.wait()
        writer.write(chunk(opened("two") + ended()) + b"0\r\n\r\n")

    async with LiteLLMFixture() as across:
        across.stage.script = script
        reply = await across.send(stream=True)
        first = await reply.next_chunk()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reply.next_chunk(), 0.05)
        go.set()
        events, done = read_events(first + await read_body(reply))
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert (text, done) == ("onetwo", True)


@pytest.mark.parametrize(
    "members",
    [
        {"api_base": "http://127.0.0.1:1"},
        {"base_url": "http://127.0.0.1:1"},
        {"api_key": "sk-other"},
        {"mock_response": "Hello."},
        {"extra_headers": {"x": "y"}},
        {"extra_body": {"x": "y"}},
        {"fallbacks": ["gpt-4o"]},
        {"custom_llm_provider": "openai"},
        {"metadata": {"a": "b"}},
        {"logprobs": True},
        {"a_member_of_tomorrow": 1},
    ],
)
async def test_what_cannot_be_passed_on_is_refused_by_name(members):
    """A member that the provider has no place for, or that means something to LiteLLM, is a 400 that names it."""
    async with LiteLLMFixture() as across:
        with pytest.raises(InvalidRequest, match=next(iter(members))):
            await across.send(**members)
        assert across.stage.heard == []


async def test_null_members_are_as_if_absent():
    """Clients that spell out every unset member are served."""
    async with LiteLLMFixture() as across:
        across.stage.reply = json_answer(message({"type": "text", "text": "x"}))
        reply, _ = await across.ask(logprobs=None, metadata=None, tools=None)
        assert reply.status == 200


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model":"m"}', b'{"messages":[{"role":"user","content":"x"}]}'])
async def test_a_body_that_is_no_request(body):
    """A request that LiteLLM cannot read is a 400."""
    async with LiteLLMFixture() as across:
        with pytest.raises(InvalidRequest):
            await across.bridge.send("up", KEY, body)


async def test_no_key_is_401_and_the_environments_is_never_spent(monkeypatch):
    """Without a key of the client's or the upstream's nothing is sent, whatever keys the proxy's environment holds."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-the-operators")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the-operators")
    async with LiteLLMFixture() as across:
        for headers in ([], [("Authorization", "Bearer ")], [("Authorization", "Basic abc")]):
            with pytest.raises(Unauthorized):
                await across.send(headers)
        assert across.stage.heard == []


@pytest.mark.parametrize(
    ("header", "own", "sent"),
    [
        (("Authorization", "Bearer sk-client"), None, "sk-client"),
        (("x-api-key", "sk-client"), None, "sk-client"),
        (("Authorization", "Bearer sk-client"), "sk-own", "sk-own"),
    ],
)
async def test_whose_key_is_spent(header, own, sent, monkeypatch):
    """The upstream's own key replaces the client's; without one the client's goes on."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-the-operators")
    async with LiteLLMFixture(api_key=own) as across:
        across.stage.reply = json_answer(message({"type": "text", "text": "x"}))
        await across.ask([header])
        assert across.stage.heard[0].all("x-api-key") == [sent]
        assert across.stage.heard[0].all("authorization") == []


async def test_headers_of_the_upstream_and_betas_of_the_client():
    """Configured headers, the client's betas and its name are sent; its other headers are not."""
    async with LiteLLMFixture(headers={"x-team": "blue"}) as across:
        across.stage.reply = json_answer(message({"type": "text", "text": "x"}))
        sent = [*KEY, ("Anthropic-Beta", "context-1m-2025-08-07"), ("x-other", "no"), ("Cookie", "a=b")]
        sent.append(("User-Agent", "agent/1"))
        body = json.dumps(HELLO).encode()
        await read_body(await across.bridge.send("up", sent, body, {"x-tier": "flex"}))
        heard = across.stage.heard[0]
        assert heard.all("x-tier") == ["flex"]
        assert heard.all("user-agent") == ["agent/1"]
        assert heard.all("x-team") == ["blue"]
        assert heard.all("anthropic-beta") == ["context-1m-2025-08-07"]
        assert heard.all("x-other") == heard.all("cookie") == []


@pytest.mark.parametrize("provider", ["anthropic", "gemini"])
async def test_nothing_is_fetched_for_a_client(provider):
    """The address of a picture that the provider will not fetch itself is refused, not fetched from here."""
    async with LiteLLMFixture(provider) as across:
        url = f"http://127.0.0.1:{across.stage.port}/secret.png"
        part = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(InvalidRequest, match="data: URL"):
            await across.send(messages=[{"role": "user", "content": [part]}], model="gemini-2.5-pro")
        assert across.stage.heard == []


async def test_room_for_the_answer_is_what_was_kept_free():
    """If the provider demands an output limit and the client named none, it is the reserve of the budget."""
    async with LiteLLMFixture() as across:
        across.stage.reply = json_answer(message({"type": "text", "text": "x"}))
        await across.ask()
        assert across.request["max_tokens"] == 16_384


async def test_tools_of_a_proxy_are_not_called():
    """A tool that LiteLLM would run through its own proxy is the provider's to judge."""
    async with LiteLLMFixture() as across:
        across.stage.reply = refusal("invalid_request_error", "no such tool", "400 Bad Request")
        tool = {"type": "mcp", "server_label": "x", "server_url": "litellm_proxy/mcp/x", "require_approval": "never"}
        reply, _ = await across.ask(tools=[tool])
        assert reply.status == 400
        assert "litellm.proxy.proxy_server" not in sys.modules


async def test_an_unknown_provider():
    """A provider that LiteLLM has not heard of is named."""
    async with LiteLLMFixture("nosuch") as across:
        with pytest.raises(InvalidRequest, match="nosuch"):
            await across.send()


GUARDED = """
    import asyncio, json, socket, sys

    def refuse(*given, **named):
        sys.exit(f"the network was touched: {given}")

    socket.socket.connect = socket.getaddrinfo = refuse
    socket.create_connection = refuse

    import proxy.app
    assert "litellm" not in sys.modules and "httpx" not in sys.modules
    from proxy.core.errors import UllageError
    from proxy.tasks import Tasks
    from proxy.upstream import Bridge, Bridged

    async def main():
        tasks = Tasks(lambda name, error: sys.exit(f"{name}: {error!r}"))
        bridge = Bridge([Bridged("up", "anthropic", "http://127.0.0.1:9")], tasks.spawn)
        await bridge.warm()
        assert "litellm" in sys.modules and "litellm.proxy.proxy_server" not in sys.modules
        body = {"model": "claude-sonnet-4-5", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
        try:
            await bridge.send("up", [("authorization", "Bearer k")], json.dumps(body).encode())
        except UllageError as error:
            print("refused", error.status)
        await bridge.close()
        await tasks.finish(1)

    asyncio.run(main())
"""


def test_nothing_is_fetched_and_nothing_loaded_early(tmp_path):
    """Importing the proxy loads no LiteLLM, loading LiteLLM touches no network, reads no .env, and ends in silence."""
    (tmp_path / ".env").write_text("ANTHROPIC_API_KEY=sk-from-a-file\nLITELLM_LOG=DEBUG\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(GUARDED)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused 400\n", "")
