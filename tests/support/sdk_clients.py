"""How a client of each API speaks: its real SDK, its form of a conversation, its way to answer tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import httpx
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
from google import genai
from google.genai import types
from openai import AsyncOpenAI, AsyncStream
from openai import DefaultAsyncHttpxClient as OpenAIWeb
from openai.types.chat import ChatCompletionChunk

from tests.stub import chat, gemini, messages, responses
from tests.support import api_formats

Item = dict[str, Any]

KEY = "sk-test-0123456789abcdef"


def as_it_is(name: str, items: list[Item]) -> dict[str, Any]:
    """The arguments by which an SDK sends *items* as the member *name*.

    Given as ``messages=items`` they are the same bytes, but the SDK looks through them for types to convert, of which
    JSON has none: three quarters of the CPU that the client of a long session takes.
    """
    return {name: [], "extra_body": {name: items}}


class SdkClient(Protocol):
    """A client of one API; an async context manager. ``api_format`` is the stub's module for the same API."""

    api_format: Any
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

    api_format = messages

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
            async with self.client.messages.stream(**options, **as_it_is("messages", items)) as events:
                answer = await events.get_final_message()
        else:
            answer = await self.client.messages.create(**options, **as_it_is("messages", items))
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

    api_format = responses

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
            async with self.client.responses.stream(**options, **as_it_is("input", items)) as events:
                answer = await events.get_final_response()
        else:
            answer = await self.client.responses.create(**options, **as_it_is("input", items))
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

    api_format = chat

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
            reply = await self.client.chat.completions.create(**options, **as_it_is("messages", items))
            return [reply.choices[0].message.model_dump(exclude_none=True, exclude_unset=True)]
        more = {"stream": True, "stream_options": {"include_usage": True}}
        events = await self.client.chat.completions.create(**options, **more, **as_it_is("messages", items))
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


class GoogleClient(_Web):
    """Gemini's own API, spoken by Google's own client; every part is sent back as it came."""

    api_format = gemini

    def __init__(self, url: str) -> None:
        super().__init__()
        self.web = httpx.AsyncClient(**self.hooks)
        options = types.HttpOptions(base_url=url.removesuffix("/v1"), httpx_async_client=self.web)
        self.google = genai.Client(api_key=KEY, http_options=options).aio

    async def __aexit__(self, *_: object) -> None:
        await self.google.aclose()
        await self.web.aclose()

    def opening(self, chat: Sequence[Item]) -> tuple[list[Item], dict[str, Any]]:
        """Contents, and the system text beside them."""
        system = api_formats.system_of(chat)
        return api_formats.to_gemini(chat), {"system_instruction": system} if system else {}

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Tools have another form, and the output figure another name."""
        made = {"max_output_tokens" if key == "max_tokens" else key: value for key, value in options.items()}
        return {**made, "tools": api_formats.tools_of(made["tools"], "gemini")} if "tools" in made else made

    async def ask(self, asked: Mapping[str, Any], items: list[Item], *, stream: bool) -> list[Item]:
        """The model's content; of a stream all parts of its chunks, as Google's own chats keep them."""
        config = {key: value for key, value in asked.items() if key != "model"}
        config["automatic_function_calling"] = {"disable": True}
        call = {"model": asked["model"], "contents": items, "config": config}
        chunks = []
        if stream:
            async for chunk in await self.google.models.generate_content_stream(**call):
                chunks.append(chunk)
        else:
            chunks = [await self.google.models.generate_content(**call)]
        assert chunks[-1].candidates[0].finish_reason == "STOP"
        assert chunks[-1].usage_metadata.prompt_token_count > 0
        contents = [chunk.candidates[0].content for chunk in chunks]
        made = [content.model_dump(mode="json", by_alias=True, exclude_none=True) for content in contents]
        return [{"role": "model", "parts": [part for content in made for part in content["parts"]]}]

    def calls(self, answer: Sequence[Item]) -> list[str]:
        """The names of the functions called, each with the id of its call if it has one."""
        parts = [part for item in answer for part in item["parts"]]
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        return [" ".join(filter(None, (call["name"], call.get("id")))) for call in calls]

    def results(self, names: Sequence[str], texts: Sequence[str]) -> list[Item]:
        """One user content with every result."""
        parts = []
        for called, text in zip(names, texts, strict=True):
            name, _, number = called.partition(" ")
            result = {"name": name, "response": {"output": text}}
            parts.append({"functionResponse": {**result, "id": number} if number else result})
        return [{"role": "user", "parts": parts}]


SDK_CLIENTS: Mapping[str, type[AnthropicClient] | type[OpenAIClient] | type[ResponsesClient]] = {
    "chat": OpenAIClient,
    "messages": AnthropicClient,
    "responses": ResponsesClient,
}
"""The clients of the APIs that every feature is for."""

ALL_CLIENTS: Mapping[str, Any] = {**SDK_CLIENTS, "gemini": GoogleClient}


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
