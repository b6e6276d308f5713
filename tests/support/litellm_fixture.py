"""A bridge in front of a scripted provider, and answers of Anthropic and Gemini in their own APIs."""

import json

from proxy.tasks import Tasks
from proxy.upstream import Bridge, Bridged
from tests.support.server_fixture import ScriptedServer, listening, raw_answer
from tests.support.upstream_fixture import read_body

KEY = [("Authorization", "Bearer sk-client")]
JSON = "Content-Type: application/json"
SSE = "Content-Type: text/event-stream"
CLAUDE = "claude-sonnet-4-5"
HELLO = {"model": CLAUDE, "messages": [{"role": "user", "content": "hello"}]}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]

ROUND = [
    {"role": "system", "content": "You are terse."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Compare them."},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        ],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "b"}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "one"},
    {"role": "tool", "tool_call_id": "call_2", "content": "two"},
]


class LiteLLMFixture:
    """A bridge to one provider played by ``stage``; ``failed`` holds what background tasks died of."""

    def __init__(self, provider="anthropic", path="", **given):
        self.provider, self.path, self.given = provider, path, given
        self.failed = []

    async def __aenter__(self):
        self.stage = ScriptedServer()
        self._listening = listening(self.stage)
        port = await self._listening.__aenter__()
        self.tasks = Tasks(lambda name, error: self.failed.append((name, error)))
        base = f"http://127.0.0.1:{port}{self.path}"
        self.bridge = Bridge([Bridged("up", self.provider, base, **self.given)], self.tasks.spawn)
        return self

    async def __aexit__(self, *failure):
        await self.bridge.close()
        await self.tasks.finish(1.0)
        await self._listening.__aexit__(*failure)

    async def send(self, headers=KEY, **members):
        return await self.bridge.send("up", headers, json.dumps({**HELLO, **members}).encode())

    async def ask(self, headers=KEY, **members):
        """The whole answer, parsed."""
        reply = await self.send(headers, **members)
        return reply, json.loads(await read_body(reply))

    async def stream(self, **members):
        """The events of a streamed answer, parsed, and whether ``[DONE]`` was the last."""
        return read_events(await read_body(await self.send(stream=True, **members)))

    @property
    def request(self):
        """The body of the last request the provider got, parsed."""
        return json.loads(self.stage.heard[-1].body)


def read_events(body):
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    done = events[-1:] == ["[DONE]"]
    return [json.loads(event) for event in events[: -1 if done else None]], done


def message(*content, stop="end_turn", **usage):
    """What Anthropic answers."""
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": CLAUDE, "stop_sequence": None}
    used = {"input_tokens": 10, "output_tokens": 5, **usage}
    return {**head, "content": list(content), "stop_reason": stop, "usage": used}


def sse(*events):
    return b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events)


def opened(*texts):
    """The events of an answer that consists of *texts* so far."""
    events = [{"type": "message_start", "message": message(stop=None)}]
    events.append({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    for text in texts:
        events.append({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})
    return sse(*events)


def called(index, name, *pieces):
    """The events of one tool call."""
    block = {"type": "tool_use", "id": f"toolu_{index}", "name": name, "input": {}}
    yield {"type": "content_block_start", "index": index, "content_block": block}
    for piece in pieces:
        delta = {"type": "input_json_delta", "partial_json": piece}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def ended(stop="end_turn", output=5):
    """The last events of an answer."""
    delta = {"stop_reason": stop, "stop_sequence": None}
    return sse({"type": "message_delta", "delta": delta, "usage": {"output_tokens": output}}, {"type": "message_stop"})


def refusal(kind, text, status, *headers):
    """An error as Anthropic words it."""
    document = {"type": "error", "error": {"type": kind, "message": text}}
    return raw_answer(json.dumps(document).encode(), JSON, *headers, status=status)


def candidate(*parts, finish="STOP"):
    """What Gemini answers."""
    used = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
    content = {"role": "model", "parts": list(parts)}
    return {"candidates": [{"content": content, "finishReason": finish, "index": 0}], "usageMetadata": used}
