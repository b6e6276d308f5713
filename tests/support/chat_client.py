"""A client's side of a conversation: the real OpenAI client, the growing history, and what the upstream got of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tests.stub import Seen, Stub
from tests.support.sdk_clients import ALL_CLIENTS, read_chat_stream
from tests.support.view_checks import CacheTally, view_problems

__all__ = ["MODEL", "RETRIES", "ChatClient", "read_chat_stream"]

MODEL = "gpt-4o-mini"
RETRIES = 2
"""How many overflows may stand between a client's request and its answer."""


@dataclass
class ChatClient:
    """A conversation through *url*, whose upstream is *stub*; every answer is checked and entered in ``ledger``.

    It begins with ``messages`` of the chat API; from then on they have the form of ``api``.
    """

    url: str
    stub: Stub
    messages: list[dict[str, Any]] = field(default_factory=list)
    options: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    clipped: bool = False
    model: str = MODEL
    api: str = "chat"
    ledger: CacheTally = field(default_factory=CacheTally)
    overflows: int = 0
    views: list[Seen] = field(default_factory=list)
    answer: list[dict[str, Any]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self.sdk = ALL_CLIENTS[self.api](self.url)
        await self.sdk.__aenter__()
        self.messages, beside = self.sdk.opening(self.messages)
        self._request = {"model": self.model, **beside, **self.sdk.options(self.options)}
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sdk.__aexit__()

    @property
    def tokens(self) -> int:
        """What the whole history weighs, by the upstream's count."""
        return sum(map(self.sdk.api_format.weigh, self.messages))

    async def ask(self, *new: dict[str, Any]) -> dict[str, Any]:
        """Append *new* (chat messages), send the whole history, check the view, append and return the answer's end."""
        return await self._go_on(self.sdk.opening(new)[0])

    async def results(self, _answer: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
        """Answer every call of the last answer with one of *texts* and ask on."""
        return await self._go_on(self.sdk.results(self.calls, texts))

    @property
    def calls(self) -> list[str]:
        """The ids of the calls in the last answer."""
        return self.sdk.calls(self.answer)

    async def _go_on(self, new: Sequence[dict[str, Any]]) -> dict[str, Any]:
        self.messages += new
        before = len(self.stub.chats())
        self.answer = await self.sdk.ask(self._request, self.messages, stream=self.stream)
        self._settle(self.stub.chats()[before:])
        self.messages += self.answer
        return self.answer[-1]

    def _settle(self, seen: Sequence[Seen]) -> None:
        raw = self.sdk.bodies[-1]
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
