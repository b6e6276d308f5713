"""A client's side of a conversation: the real OpenAI client, the growing history, and what the upstream made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from openai import AsyncOpenAI, AsyncStream
from openai.types.chat import ChatCompletionChunk

from tests.e2e.checks import Ledger, view_problems
from tests.harness import Client
from tests.stub import Seen, Stub

MODEL = "gpt-4o-mini"
RETRIES = 2
"""How many overflows may stand between a client's request and its answer."""


@dataclass
class Talk:
    """A conversation through *url*, whose upstream is *stub*; every answer is checked and entered in ``ledger``."""

    url: str
    stub: Stub
    messages: list[dict[str, Any]] = field(default_factory=list)
    options: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    clipped: bool = False
    model: str = MODEL
    ledger: Ledger = field(default_factory=Ledger)
    overflows: int = 0
    views: list[Seen] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self._web = Client(self.url)
        self._client: AsyncOpenAI = await self._web.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._web.__aexit__()

    async def ask(self, *new: dict[str, Any]) -> dict[str, Any]:
        """Append *new*, send the whole history, check the view, append and return the assistant's message."""
        self.messages += new
        before = len(self.stub.chats())
        asked: dict[str, Any] = {"model": self.model, "messages": self.messages, **self.options}
        if self.stream:
            answer = await self._streamed(asked)
        else:
            reply = await self._client.chat.completions.create(**asked)
            answer = reply.choices[0].message.model_dump(exclude_none=True, exclude_unset=True)
        self._settle(self.stub.chats()[before:])
        self.messages.append(answer)
        return answer

    async def results(self, answer: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
        """Answer every call of *answer* with one of *texts* and ask on."""
        calls = answer["tool_calls"]
        new = [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]
        return await self.ask(*new)

    def _settle(self, seen: Sequence[Seen]) -> None:
        raw = self._web.bodies[-1]
        tried, last = seen[:-1], seen[-1]
        assert last.verdict == "ok", f"answered without the upstream's consent: {last.verdict} {last.why}"
        assert len(tried) <= RETRIES, f"{len(tried)} attempts for one request"
        assert all(attempt.verdict == "overflow" for attempt in tried)
        sizes = [attempt.tokens for attempt in seen]
        assert sizes == sorted(sizes, reverse=True), f"a retry was not smaller: {sizes}"
        problems = view_problems(raw, last, clipped=self.clipped)
        assert not problems, "; ".join(problems)
        self.overflows += len(tried)
        self.ledger.note(raw, last)
        self.views.append(last)

    async def _streamed(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        stream = await self._client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        answer, finish, usage = await gather(stream)
        assert finish, "the stream ended without a finish reason"
        assert usage, "the usage that was asked for did not come"
        return answer


async def gather(stream: AsyncStream[ChatCompletionChunk]) -> tuple[dict[str, Any], str, bool]:
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
