"""Bodies that clients do send and nobody expects: none breaks us, and none becomes an invalid view."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx

from tests.conftest import StartProxy, StartStub
from tests.stub import Rules, Stub, chat, messages, responses
from tests.stub.messages import signature
from tests.stub.rules import Wording
from tests.support.api_formats import request_body
from tests.support.loopback import loopback_client
from tests.support.sample_conversations import chat_turn, log, prose

API_FORMATS: dict[str, Any] = {"chat": chat, "messages": messages, "responses": responses}
WINDOW = 4096
LONG = [message for turn in range(10) for message in chat_turn(turn, 240)]
PIXEL = base64.b64encode(
    bytes.fromhex("89504e470d0a1a0a0000000d4948445200000001000000010806000000") + bytes(40)
).decode()
PICTURE = f"data:image/png;base64,{PIXEL}"
MARK = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": prose(1, 60)}}, "required": ["a"]}
TOOLS = [{"name": f"t{at}", "description": prose(at, 150)} for at in range(12)]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def call(name: Any, arguments: Any = '{"path": "a"}') -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "read_file", "arguments": arguments}}


def calls(*made: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(made), **more}


def result(name: Any, content: Any = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": content}


def use(name: str, given: Any = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "read_file", "input": given or {"path": "a"}}


def used(name: str, content: Any = "ok", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": content, **more}


def function(name: str, arguments: str = '{"path": "a"}') -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "read_file", "arguments": arguments}


def output(name: str, said: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": said}


GO = user("Go on.")
FORM = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": signature("Hm.")}
SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"encrypted_content": "E" * 2000}]}
REASON = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA" + "x" * 400}

ODD: dict[str, list[tuple[list[Any], dict[str, Any]]]] = {
    "chat": [
        ([calls(call("c1")), result("c1"), GO], {}),
        ([{"role": "assistant", "tool_calls": [call("c1")]}, result("c1", [{"type": "text", "text": "ok"}])], {}),
        ([calls(call("c1")), result("c1", "")], {}),
        ([{"role": "assistant", "content": "", "tool_calls": None, "function_call": None, "refusal": None}, GO], {}),
        ([{"role": "assistant", "content": "x", "tool_calls": []}, GO], {}),
        ([calls(call("c1"), call("c1")), result("c1", "1"), result("c1", "2"), GO], {}),
        ([calls(call("c1"), call("c2")), result("c2"), result("c1"), GO], {}),
        ([result("nobodys"), GO], {}),
        ([calls(call("c1")), GO], {}),
        ([{"role": "assistant", "content": "prefilled"}], {}),
        ([assistant({"type": "refusal", "refusal": "no"}), GO], {}),
        (
            [
                {"role": "developer", "content": "Be kind."},
                {**user([{"type": "text", "text": "x"}]), "role": "system"},
                GO,
            ],
            {},
        ),
        ([GO], {"tools": [{"type": "function", "function": {**tool, "parameters": SCHEMA}} for tool in TOOLS]}),
        ([user([{"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "low"}}])], {}),
        ([user([{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "x"}])], {}),
        ([user([{"type": "file", "file": {"file_id": "f-1"}}, {"type": "text", "text": "x"}])], {}),
        ([user([{"type": "input_audio", "input_audio": {"data": PIXEL, "format": "wav"}}])], {}),
        ([user([{"type": "unheard-of", "x": 1}, {"type": "text", "text": "x"}])], {}),
        ([GO], {"n": 3, "logprobs": True, "top_logprobs": 2, "stop": ["a"], "seed": 1, "response_format": FORM}),
        ([GO], {"parallel_tool_calls": False, "prediction": {"type": "content", "content": prose(1, 300)}}),
        ([calls(call("c1", json.dumps({"x": prose(1, 5_000)}))), result("c1")], {}),
        ([calls(*(call(f"c{at}") for at in range(24))), *(result(f"c{at}", log(at, 150)) for at in range(24))], {}),
        ([user(prose(1, 8_000))], {}),
        ([user([{"type": "text", "text": prose(at, 300)} for at in range(40)])], {}),
        ([GO], {"max_tokens": None, "tools": None, "stop": None, "stream_options": None}),
        ([user(None)], {}),
        ([user(5), "x", None, {"content": "x"}, {"role": "critic", "content": {}}], {}),
        ([calls(None, {"id": "a"}, call(5), call("o", {"a": 1})), result(5), result(None)], {}),
        ([user([{"type": "text"}, {"type": "image_url", "image_url": None}, "x", [None]])], {"max_tokens": "64"}),
    ],
    "messages": [
        ([GO, assistant(use("t1")), user([{"type": "tool_result", "tool_use_id": "t1"}])], {}),
        ([GO, assistant(use("t1")), user([used("t1", [])])], {}),
        (
            [
                GO,
                assistant(use("t1"), use("t2")),
                user([used("t2"), used("t1", "no", is_error=True), {"type": "text", "text": "x"}]),
            ],
            {},
        ),
        (
            [GO, assistant(THOUGHT, use("t1")), user([used("t1")])],
            {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
        ),
        ([GO, assistant({"type": "redacted_thinking", "data": "abc" * 300}, use("t1")), user([used("t1")])], {}),
        ([GO, assistant(SEARCH, FOUND, {"type": "text", "text": "Found."}), GO], {}),
        (
            [
                user(
                    [
                        {"type": "document", "source": {"type": "url", "url": "https://x/y.pdf"}},
                        {"type": "text", "text": "x"},
                    ]
                )
            ],
            {},
        ),
        (
            [
                user(
                    [
                        {"type": "document", "source": {"type": "text", "data": prose(1, 5_000)}, "title": "t"},
                        {"type": "text", "text": "x"},
                    ]
                )
            ],
            {},
        ),
        ([user([{"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}])], {}),
        (
            [
                user(
                    [
                        {
                            "type": "search_result",
                            "source": "s",
                            "title": "t",
                            "content": [{"type": "text", "text": prose(1, 5_000)}],
                        }
                    ]
                )
            ],
            {},
        ),
        ([GO, assistant({"type": "text", "text": "{"})], {}),
        ([GO, GO], {"system": [{"type": "text", "text": "s", **MARK}]}),
        (
            [
                user([{"type": "text", "text": "a", **MARK}]),
                assistant({"type": "text", "text": "b", **MARK}),
                user([{"type": "text", "text": "c", **MARK}]),
            ],
            {"system": [{"type": "text", "text": "s", **MARK}]},
        ),
        ([GO], {"tools": [{**tool, "input_schema": SCHEMA} for tool in TOOLS]}),
        ([GO, assistant(use("t1")), user([used("t1", log(1, 8_000))])], {}),
        ([GO, assistant(use("t1")), user([used("t1", [{"type": "text", "text": log(1, 8_000)}])])], {}),
        ([user([used("nobodys")])], {}),
        ([GO, assistant(use("t1")), GO], {}),
        ([user(None), user([]), user(5), user(["x", None, {"text": "x"}]), {"role": "system", "content": "x"}], {}),
        ([GO], {"system": 5, "thinking": 5, "context_management": 5, "metadata": {"user_id": {"a": 1}}}),
    ],
    "responses": [
        ([user("x"), assistant({"type": "output_text", "text": "y"}), GO], {}),
        ([GO, REASON, function("a"), function("b"), output("b"), output("a")], {}),
        ([GO, function("a"), output("a", [{"type": "input_text", "text": "x"}])], {}),
        (
            [
                GO,
                {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            ],
            {},
        ),
        (
            [
                GO,
                {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
                {"type": "local_shell_call_output", "call_id": "c", "output": "x"},
            ],
            {},
        ),
        (
            [
                GO,
                {"type": "web_search_call", "id": "ws_1", "status": "completed"},
                assistant({"type": "output_text", "text": "y"}),
                GO,
            ],
            {},
        ),
        ([assistant({"type": "refusal", "refusal": "no"}), GO], {}),
        ([{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]}, GO], {}),
        ([{"type": "item_reference", "id": "msg_1"}, GO], {}),
        (
            [
                user(
                    [
                        {"type": "input_image", "image_url": PICTURE, "detail": "low"},
                        {"type": "input_text", "text": "x"},
                    ]
                )
            ],
            {},
        ),
        ([user([{"type": "input_file", "file_id": "f"}, {"type": "input_text", "text": "x"}])], {}),
        ([GO], {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}, "truncation": "disabled"}),
        ([GO], {"tools": [{"type": "function", **tool, "parameters": SCHEMA} for tool in TOOLS]}),
        ([GO, function("a"), output("a", log(1, 8_000))], {}),
        ([GO, function("a", json.dumps({"x": prose(1, 8_000)})), output("a")], {}),
        ([GO, function("a"), output("a"), GO, function("a"), output("a"), GO], {}),
        ([GO, output("nobodys"), function("a"), GO, REASON], {}),
        ([{"type": "unheard-of", "a": 1}, {"type": "mcp_call", "id": "m", "arguments": "{}", "output": "x"}, GO], {}),
        (["x", None, user([{"type": "input_text", "text": 5}]), GO], {"instructions": [{"type": "message"}]}),
        ([GO], {"max_output_tokens": 1, "previous_response_id": None, "conversation": None, "prompt": None}),
    ],
}
PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}


async def test_odd_bodies(stub: StartStub, proxy: StartProxy) -> None:
    """What fits passes byte for byte, what a strict server takes it takes as a view too, and nothing breaks us."""
    server = await stub(window=10**6)
    front = await proxy(server.url, window=10**6)
    async with loopback_client(base_url=front.url) as web:
        for api in ODD:
            await _all(api, server, web)
    assert "Traceback" not in front.log.read_text()


async def _all(api: str, server: Stub, web: httpx.AsyncClient) -> None:
    wording: Wording = "anthropic" if api == "messages" else "openai"
    api_format, valid = API_FORMATS[api], 0
    for at, (items, members) in enumerate(ODD[api]):
        body = request_body(api, [{"role": "system", "content": "Be brief."}, *LONG], model="gpt-4o")
        body[api_format.LIST] = [*body[api_format.LIST], *items]
        raw = json.dumps({**body, **members}).encode()
        try:
            whole = api_format.judge(json.loads(raw), Rules(window=10**6)).kind
        except (AttributeError, TypeError, KeyError):
            whole = "odd"  # stranger than the strict server can think
        valid += whole == "ok"
        for window, stream in ((10**6, False), (WINDOW, at % 2 == 1)):
            sent = raw[:-1] + b', "stream": true}' if stream else raw
            server.rules = Rules(window=window, wording=wording)
            server.forget()
            headers = {
                "x-ullage-window": str(window),
                "authorization": f"Bearer sk-{api}-{at}",
                "anthropic-version": "1",
            }
            answer = await web.post(f"/{PATHS[api]}", content=sent, headers=headers)
            where = f"{items} {members} in {window}: {answer.text[:300]} {[seen.why for seen in server.chats()]}"
            assert "internal_error" not in answer.text, where[-900:]
            if window != WINDOW and answer.status_code != 400:
                assert server.chats()[-1].body == sent, where[-900:]
            if whole == "ok":
                assert answer.status_code == 200, where[-900:]
                assert server.chats("invalid") == [], where[-900:]
    assert valid >= len(ODD[api]) // 2
