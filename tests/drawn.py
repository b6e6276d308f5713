"""Requests and growing conversations, drawn and made, that fitting is tested with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from proxy.core.compaction.prune import DedupRules, PrunePassRules, PruneRules
from tests import strategies
from tests.fits import (
    POLICY,
    Message,
)
from tests.material import agent_session, chat_turn
from tests.stub.tokens import request_tokens

WINDOW = 4096
SCHEMA = {"type": "object", "properties": {f"member_{n}": {"type": "string"} for n in range(6)}}
windows = st.one_of(st.sampled_from([256, 512, 1024, 2048, 4096, 8192, 32768]), st.integers(256, 32768))
figures = st.sampled_from([None, None, 1, 64, 300, 1024, 4000, 100_000])


@st.composite
def asked(draw: st.DrawFn, **options: Any) -> bytes:
    """A request's bytes with tools or none and any output figure."""
    request = draw(strategies.requests(**options))
    request.pop("max_tokens", None)
    if (figure := draw(figures)) is not None:
        request[draw(st.sampled_from(["max_tokens", "max_completion_tokens"]))] = figure
    return strategies.encode(draw, request)


@st.composite
def growing(draw: st.DrawFn) -> tuple[list[Message], list[int], int]:
    """A conversation of some length, the lengths at which it was a request, and a window of a part of its size."""
    messages = draw(strategies.conversations(min_size=8, max_size=30, surrogates=False))
    ends = [i for i, m in enumerate(messages, 1) if m["role"] in ("user", "tool", "function")]
    ends = [i for i in ends if i == len(messages) or messages[i]["role"] == "assistant"]
    size = request_tokens({"messages": messages})
    share = draw(st.sampled_from([0.2, 0.35, 0.5, 0.8]))
    return messages, ends, max(1024, int(size * share))


def requests_of(messages: Sequence[Message]) -> list[int]:
    """The lengths at which *messages* was a request."""
    return [
        i
        for i, message in enumerate(messages, 1)
        if message["role"] != "assistant"
        and (i == len(messages) or messages[i]["role"] == "assistant")
        and message["role"] != "system"
    ]


def coding_session(rounds: int, lines: int = 60) -> list[Message]:
    """An agent that reads a few files again and again between changes, and runs the tests."""
    messages: list[Message] = [{"role": "user", "content": "Make the tests pass. Never touch vendor/."}]
    for number in range(rounds):
        path = f"src/mod{number % 5}.py"
        name = ("Read", "Read", "Edit", "Bash")[number % 4]
        given = {"command": "pytest -q"} if name == "Bash" else {"file_path": path}
        text = "\n".join(f"{n + 1}\tvalue_{n} = compute({n}, {number // 4})" for n in range(lines))
        said = {"Edit": "The file was updated.", "Bash": f"{number} passed\n" + "ok\n" * 40}.get(name, text)
        call = {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        messages.append({"role": "assistant", "content": f"Step {number}.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": said})
    return messages


SPARING = replace(POLICY.rules, mild=PrunePassRules(DedupRules(), PruneRules(protect_tokens=5_000, min_saving=5_000)))


SESSIONS: dict[str, list[Message]] = {
    "agent": agent_session(40, 300),
    "parallel": agent_session(16, 120, parallel=6),
    "chat": [m for turn in range(40) for m in chat_turn(turn, 150)][:-1],
}
