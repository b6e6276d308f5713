"""Models behind the clouds' own credentials: Bedrock's Converse API with its event frames, and Vertex AI."""

import binascii
import json
import struct

import pytest

from proxy.core.errors import InvalidRequest
from tests.support.litellm_fixture import JSON, ROUND, TOOLS, LiteLLMFixture, candidate
from tests.support.server_fixture import raw_answer

pytestmark = [
    pytest.mark.slow,  # importing LiteLLM takes seconds
    # LiteLLM's own types, and how it copies them in streams.
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
]

FRAMES = "Content-Type: application/vnd.amazon.eventstream"
CLAUDE, NOVA = "anthropic.claude-sonnet-4-5-20250929-v1:0", "amazon.nova-pro-v1:0"
ROLE = {"aws_region_name": "eu-central-1", "aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "example"}
USAGE = {"usage": {"inputTokens": 10, "outputTokens": 5, "totalTokens": 15}, "metrics": {"latencyMs": 1}}
CALL = {"toolUse": {"toolUseId": "tooluse_1", "name": "read_file", "input": {"path": "a"}}}
SAID = {
    "output": {"message": {"role": "assistant", "content": [{"text": "Hm."}, CALL]}},
    "stopReason": "tool_use",
    **USAGE,
}


def bedrock():
    pytest.importorskip("boto3", reason="Bedrock needs boto3")
    return LiteLLMFixture("bedrock", options=ROLE, ambient=True)


def frame(kind, payload, message="event"):
    """One event of a stream as AWS frames it: lengths, headers, payload, and checksums of both."""
    named = ((f":{message}-type", kind), (":content-type", "application/json"), (":message-type", message))
    head = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
        for name, value in named
    )
    body = json.dumps(payload).encode()
    opening = struct.pack(">II", 16 + len(head) + len(body), len(head))
    rest = opening + struct.pack(">I", binascii.crc32(opening)) + head + body
    return rest + struct.pack(">I", binascii.crc32(rest))


def block(index, **delta):
    return frame("contentBlockDelta", {"contentBlockIndex": index, "delta": delta})


OPENED = frame("messageStart", {"role": "assistant"}) + block(0, text="Hm") + block(0, text=".")
CALLED = (
    frame("contentBlockStop", {"contentBlockIndex": 0})
    + frame(
        "contentBlockStart", {"contentBlockIndex": 1, "start": {"toolUse": {"toolUseId": "t1", "name": "read_file"}}}
    )
    + block(1, toolUse={"input": '{"path"'})
    + block(1, toolUse={"input": ': "a"}'})
    + frame("contentBlockStop", {"contentBlockIndex": 1})
)
ENDED = frame("messageStop", {"stopReason": "tool_use"}) + frame("metadata", USAGE)


@pytest.mark.parametrize("model", [CLAUDE, NOVA])
async def test_a_tool_round_with_a_picture_over_converse(model):
    """System text, picture, calls and results go out as Converse writes them, signed; usage comes back."""
    async with bedrock() as across:
        across.stage.reply = raw_answer(json.dumps(SAID).encode(), JSON)
        _, got = await across.ask(model=model, messages=ROUND, tools=TOOLS, max_tokens=50)
        heard, sent = across.stage.heard[-1], across.request
        assert heard.line.startswith("POST /model/")
        assert heard.all("authorization")[0].startswith("AWS4-HMAC-SHA256 Credential=AKIAEXAMPLE/")
        assert sent["system"] == [{"text": "You are terse."}]
        assert sent["messages"][0]["content"][1]["image"] == {"source": {"bytes": "iVBORw0KGgo="}, "format": "png"}
        assert [part["toolUse"]["toolUseId"] for part in sent["messages"][1]["content"]] == ["call_1", "call_2"]
        assert [part["toolResult"]["toolUseId"] for part in sent["messages"][2]["content"]] == ["call_1", "call_2"]
        assert (sent["inferenceConfig"], len(sent["toolConfig"]["tools"])) == ({"maxTokens": 50}, 1)
        choice, usage = got["choices"][0], got["usage"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Hm.")
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "read_file", "arguments": '{"path": "a"}'}
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, 5)


async def test_a_stream_of_frames_is_openais():
    """Binary frames become chunks: text, the call in pieces, the reason to stop, usage, and ``[DONE]``."""
    async with bedrock() as across:
        across.stage.reply = raw_answer(OPENED + CALLED + ENDED, FRAMES)
        events, done = await across.stream(model=CLAUDE, tools=TOOLS, stream_options={"include_usage": True})
        assert done
        *chunks, last = events
        assert (last["choices"], last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == ([], 10, 5)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Hm."
        calls = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert json.loads("".join(calls)) == {"path": "a"}
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "text", "kind", "code"),
    [
        (400, "prompt is too long: 200251 tokens > 200000 maximum", "invalid_request_error", "context_length_exceeded"),
        (400, "Input is too long for requested model.", "invalid_request_error", "context_length_exceeded"),
        (429, "Too many tokens, please wait before trying again.", "rate_limit_error", None),
        (403, "The security token included in the request is invalid.", "permission_error", None),
        (500, "The system encountered an unexpected error.", "server_error", None),
    ],
)
async def test_amazons_refusals(status, text, kind, code, stream):
    """Status and words are Amazon's, an overflow has OpenAI's code, and a limit on the rate is none."""
    async with bedrock() as across:
        across.stage.reply = raw_answer(json.dumps({"message": text}).encode(), JSON, status=f"{status} X")
        reply, got = await across.ask(model=CLAUDE, stream=stream)
        assert reply.status == status
        assert got["error"] == {"message": text, "type": kind, "param": None, "code": code}


async def test_an_exception_among_the_frames_ends_the_stream():
    """An exception of Amazon's in the middle ends the stream in its words, without ``[DONE]``."""
    async with bedrock() as across:
        failed = frame("throttlingException", {"message": "Too many requests"}, "exception")
        across.stage.reply = raw_answer(OPENED + failed, FRAMES)
        events, done = await across.stream(model=CLAUDE)
        assert not done
        assert events[-1]["error"]["message"] == "Too many requests"


@pytest.mark.parametrize(
    ("provider", "model", "members", "named"),
    [
        ("anthropic", "claude-sonnet-4-5", {"response_format": {"type": "json_object"}}, "json_object"),
        ("bedrock", NOVA, {"response_format": {"type": "json_object"}}, "json_object"),
        ("bedrock", NOVA, {"parallel_tool_calls": False, "tools": TOOLS}, "parallel_tool_calls"),
        ("gemini", "gemini-2.5-pro", {"parallel_tool_calls": False, "tools": TOOLS}, "parallel_tool_calls"),
        ("gemini", "gemini-2.5-pro", {"web_search_options": {}, "tools": TOOLS}, "web_search_options"),
        ("vertex_ai", "claude-sonnet-4-5", {"response_format": {"type": "json_object"}}, "json_object"),
    ],
)
async def test_what_would_be_left_out_in_silence_is_refused(provider, model, members, named):
    """Members that LiteLLM takes for a provider and then does not send are a 400 that names them."""
    async with LiteLLMFixture(provider, options=ROLE, ambient=provider != "anthropic") as across:
        with pytest.raises(InvalidRequest, match=named):
            await across.send(model=model, **members)
        assert across.stage.heard == []


async def test_vertex_ai(tmp_path, monkeypatch):
    """A service account's token pays; pictures, calls and usage are Gemini's, an overflow is known."""
    pytest.importorskip("google.auth", reason="Vertex AI needs google-auth")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    made = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    options = {"vertex_project": "example", "vertex_location": "europe-west1"}
    async with (
        LiteLLMFixture("vertex_ai", "/v1/x:generateContent", options=options, ambient=True) as across,
        LiteLLMFixture() as bank,
    ):
        token = json.dumps({"access_token": "ya29.example", "expires_in": 3600, "token_type": "Bearer"}).encode()
        bank.stage.reply = raw_answer(token, JSON)
        account = {"type": "service_account", "project_id": "example", "private_key": pem.decode(), "client_id": "1"}
        account |= {"client_email": "a@example.iam.gserviceaccount.com", "private_key_id": "k"}
        account |= {"token_uri": f"http://127.0.0.1:{bank.stage.port}/token"}
        file = tmp_path / "account.json"
        file.write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        call = {"functionCall": {"name": "read_file", "args": {"path": "a"}}}
        across.stage.reply = raw_answer(json.dumps(candidate({"text": "Hm."}, call)).encode(), JSON)
        _, got = await across.ask(model="gemini-2.5-pro", messages=ROUND, tools=TOOLS)
        assert across.stage.heard[-1].all("authorization") == ["Bearer ya29.example"]
        assert across.request["contents"][0]["parts"][1]["inline_data"]["mime_type"] == "image/png"
        assert got["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "read_file"
        assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]) == (10, 5)
        text = "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."
        failed = {"error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT"}}
        across.stage.reply = raw_answer(json.dumps(failed).encode(), JSON, status="400 Bad Request")
        reply, got = await across.ask(model="gemini-2.5-pro")
        assert (reply.status, got["error"]["message"]) == (400, text)
