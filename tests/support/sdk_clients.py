"""How a client of each API speaks: its real SDK, its form of a conversation, its way to answer tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
from openai import AsyncOpenAI, AsyncStream
from openai import DefaultAsyncHttpxClient as OpenAIWeb
from openai.types.chat import ChatCompletionChunk

from tests.stub import chat, messages, responses
from tests.support import api_formats

Item = dict[str, Any]

KEY = "sk-test-0123456789abcdef"


class SdkClient(Protocol):
    """A client of one API; an async context manager. ``wire`` is the stub's side of the same API."""

    wire: Any
    bodies: list[bytes]

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    def opening(self, chat: Sequence[Item]) -> tuple[list[Item], dict[str, Any]]:
        """A chat conversation as items, and the members of the body that say the rest of it."""

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Chat's members of a body in this API's spelling."""

    async def ask(self, options: Mapping[str, Any], items: list[Item], *, stream: bool) -> list[Item]:
        """The answer to a conversation, as items to go on from."""

    def calls(self, answer: Sequence[Item]) -> list[str]:
        """The ids of the calls in an answer."""

    def results(self, names: Sequence[str], texts: Sequence[str]) -> list[Item]:
        """The items that answer calls."""


class _Web:
    """Keeps the bytes of every body its client sent in ``bodies``."""

    client: AsyncAnthropic | AsyncOpenAI

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.hooks = {"event_hooks": {"request": [self._note]}, "trust_env": False, "timeout": 60.0}

    async def _note(self, request: Any) -> None:
        self.bodies.append(await request.aread())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()


class AnthropicClient(_Web):
    """The Messages API, spoken by Anthropic's own client."""

    wire = messages

    def __init__(self, url: str) -> None:
        super().__init__()
        web = DefaultAsyncHttpxClient(**self.hooks)
        self.client = AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=KEY, http_client=web, max_retries=0)

    def opening(self, chat: Sequence[Item]) -> tuple[list[Item], dict[str, Any]]:
        """Items, and the system text beside them."""
        system = api_formats.system_of(chat)
        return api_formats.to_messages(chat), {"system": system} if system else {}

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Tools have another form, and an output figure there must be."""
        members = {"max_tokens": 256, **options}
        if "tools" in members:
            members["tools"] = api_formats.tools_of(members["tools"], "messages")
        return members

    async def ask(self, options: Mapping[str, Any], items: list[Item], *, stream: bool) -> list[Item]:
        """The assistant's message."""
        if stream:
            async with self.client.messages.stream(**options, messages=items) as events:
                answer = await events.get_final_message()
        else:
            answer = await self.client.messages.create(**options, messages=items)
        assert answer.stop_reason in ("end_turn", "tool_use")
        assert answer.usage.output_tokens > 0
        keep = {"text": ("text",), "tool_use": ("id", "name", "input"), "thinking": ("thinking", "signature")}
        blocks = [{"type": b.type, **{key: getattr(b, key) for key in keep[b.type]}} for b in answer.content]
        return [{"role": "assistant", "content": blocks}]

    def calls(self, answer: Sequence[Item]) -> list[str]:
        """The ids of the tool uses."""
        return [block["id"] for item in answer for block in item["content"] if block["type"] == "tool_use"]

    def results(self, names: Sequence[str], texts: Sequence[str]) -> list[Item]:
        """One user message with every result."""
        pairs = zip(names, texts, strict=True)
        blocks = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in pairs]
        return [{"role": "user", "content": blocks}]


class ResponsesClient(_Web):
    """The Responses API, spoken by OpenAI's own client; every output item is sent back as it came."""

    wire = responses

    def __init__(self, url: str) -> None:
        super().__init__()
        self.client = AsyncOpenAI(base_url=url, api_key=KEY, http_client=OpenAIWeb(**self.hooks), max_retries=0)

    def opening(self, chat: Sequence[Item]) -> tuple[list[Item], dict[str, Any]]:
        """Items, and the instructions beside them."""
        system = api_formats.system_of(chat)
        return api_formats.to_responses(chat), {"instructions": system} if system else {}

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Tools have another form, and the output figure another name."""
        members = {"max_output_tokens" if key == "max_tokens" else key: value for key, value in options.items()}
        members |= {"tools": api_formats.tools_of(members["tools"], "responses")} if "tools" in members else {}
        return {"store": False, **members}

    async def ask(self, options: Mapping[str, Any], items: list[Item], *, stream: bool) -> list[Item]:
        """The output items."""
        if stream:
            async with self.client.responses.stream(**options, input=items) as events:
                answer = await events.get_final_response()
        else:
            answer = await self.client.responses.create(**options, input=items)
        assert answer.status == "completed"
        assert answer.usage is not None
        return [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]

    def calls(self, answer: Sequence[Item]) -> list[str]:
        """The ids of the function calls."""
        return [item["call_id"] for item in answer if item["type"] == "function_call"]

    def results(self, names: Sequence[str], texts: Sequence[str]) -> list[Item]:
        """An output item for each."""
        pairs = zip(names, texts, strict=True)
        return [{"type": "function_call_output", "call_id": name, "output": text} for name, text in pairs]


class OpenAIClient(_Web):
    """Chat completions, spoken by OpenAI's own client."""

    wire = chat

    def __init__(self, url: str) -> None:
        super().__init__()
        self.client = AsyncOpenAI(base_url=url, api_key=KEY, http_client=OpenAIWeb(**self.hooks), max_retries=0)

    def opening(self, chat: Sequence[Item]) -> tuple[list[Item], dict[str, Any]]:
        """The conversation as it is."""
        return list(chat), {}

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """As they are."""
        return dict(options)

    async def ask(self, options: Mapping[str, Any], items: list[Item], *, stream: bool) -> list[Item]:
        """The assistant's message."""
        if not stream:
            reply = await self.client.chat.completions.create(**options, messages=items)
            return [reply.choices[0].message.model_dump(exclude_none=True, exclude_unset=True)]
        more = {"stream": True, "stream_options": {"include_usage": True}}
        events = await self.client.chat.completions.create(**options, **more, messages=items)
        answer, finish, usage = await read_chat_stream(events)
        assert finish, "the stream ended without a finish reason"
        assert usage, "the usage that was asked for did not come"
        return [answer]

    def calls(self, answer: Sequence[Item]) -> list[str]:
        """The ids of the tool calls."""
        return [call["id"] for item in answer for call in item.get("tool_calls", ())]

    def results(self, names: Sequence[str], texts: Sequence[str]) -> list[Item]:
        """A tool message for each."""
        pairs = zip(names, texts, strict=True)
        return [{"role": "tool", "tool_call_id": name, "content": text} for name, text in pairs]


SDK_CLIENTS: Mapping[str, type[AnthropicClient] | type[OpenAIClient] | type[ResponsesClient]] = {
    "chat": OpenAIClient,
    "messages": AnthropicClient,
    "responses": ResponsesClient,
}


async def read_chat_stream(stream: AsyncStream[ChatCompletionChunk]) -> tuple[dict[str, Any], str, bool]:
    """The assistant message a stream spells, its finish reason, and whether usage came."""
    text, finish, usage = "", "", False
    calls: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        usage = usage or chunk.usage is not None
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(piece.index, {"type": "function", "function": {"name": "", "arguments": ""}})
                if piece.id:
                    call["id"] = piece.id
                if piece.function is not None:
                    call["function"]["name"] += piece.function.name or ""
                    call["function"]["arguments"] += piece.function.arguments or ""
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        answer["tool_calls"] = [calls[index] for index in sorted(calls)]
    return answer, finish, usage
