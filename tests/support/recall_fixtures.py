"""A whole proxy in this process, with recall on, in front of a strict upstream; and a model that uses the tool."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from proxy.features.recall.tool import NAME
from tests.stub import Call, Stub
from tests.support.answer_parser import ParsedAnswer, parse_answer
from tests.support.api_formats import request_body
from tests.support.sample_conversations import AGENT_TOOLS, agent_session
from tests.support.server_tool_fixtures import ProxyInProcess, proxy_in_process

WINDOW = 8192
FACT = "The vault's code word is kingfisher-4711."
LOOK = Call(NAME, json.dumps({"query": "vault code word"}))
READ = Call("read_file", json.dumps({"path": "src/next.py"}))

Message = dict[str, Any]


def long_history(rounds: int = 30, size: int = 300) -> list[Message]:
    """An agent's session, larger than the window, whose second result says what nothing else does."""
    messages = agent_session(rounds, size)
    at = [index for index, message in enumerate(messages) if message["role"] == "tool"][1]
    lines = messages[at]["content"].splitlines()
    messages[at] = {**messages[at], "content": "\n".join([*lines[:4], FACT.lower().replace("-", " "), *lines[4:]])}
    return messages


SAID = FACT.lower().replace("-", " ")
"""The fact as it stands in the history."""


def compacted_request(api: str, messages: Sequence[Message] | None = None, **members: Any) -> dict[str, Any]:
    """A request of *api* that is compacted, with the agent's tools."""
    extra = {"store": False} if api == "responses" else {}
    tools = json.loads(json.dumps(AGENT_TOOLS))  # for the caller to change
    return request_body(api, long_history() if messages is None else messages, tools, **extra, **members)


@contextlib.asynccontextmanager
async def recall_in_process(
    stub: Stub, folder: Path, *, enabled: bool = True, usage: bool = False, **more: Mapping[str, Any] | Sequence[Any]
) -> AsyncIterator[ProxyInProcess]:
    """A proxy in front of *stub*, with recall on; *more* are settings."""
    settings: dict[str, Any] = {"compression": {"recall": {"enabled": enabled}}, **more}
    async with proxy_in_process(stub, folder, usage=usage, **settings) as proxy:
        yield proxy


StartRecall = Callable[..., Awaitable[tuple[Stub, ProxyInProcess]]]
"""Starts an upstream whose model gives the answers, and a proxy in front of it."""


def request(api: str, stream: bool, **members: Any) -> dict[str, Any]:
    more: dict[str, Any] = {"stream": True} if stream else {}
    more |= {"stream_options": {"include_usage": True}} if stream and api == "chat" else {}
    return compacted_request(api, **more, **members)


def read_answer(api: str, answer: httpx.Response, stream: bool) -> ParsedAnswer:
    """The answer as the client has it: a valid one in which nothing tells of the tool."""
    assert answer.status_code == 200, answer.text
    assert NAME not in answer.text
    return parse_answer(api, answer.content, stream=stream)
