"""Deterministic request bodies: a small chat, and agent sessions that grow by one round with every request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.support.sample_conversations import AGENT_SYSTEM, AGENT_TASK, AGENT_TOOLS, agent_round, prose

ROOMY, TIGHT = "bench-roomy", "bench-tight"
"""Models: with a window the bodies lie far below, and one for which 50 KB has to be counted, not compacted."""
WINDOWS = {ROOMY: 200_000, TIGHT: 32_768}


@dataclass(frozen=True)
class Kind:
    """A kind of traffic: *size* in bytes at a session's end, *grows* in bytes a request, over *connections*."""

    name: str
    size: int
    grows: int
    requests: int
    connections: int
    model: str = ROOMY
    stream: bool = False


KINDS = (
    Kind("1 KB chat", 1_000, 0, 240, 8),
    Kind("50 KB agent", 50_000, 1_200, 12, 8),
    Kind("50 KB agent, counted", 50_000, 1_200, 12, 8, TIGHT),
    Kind("400 KB agent", 400_000, 8_000, 20, 1),
    Kind("SSE chunk", 1_000, 0, 1, 20, stream=True),
)


def session(kind: Kind, seed: int) -> list[bytes]:
    """The bodies of one connection in order; the first one is sent to warm up and is not measured."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": AGENT_SYSTEM}]
    if not kind.grows:
        text = prose(seed, kind.size // 5)[: kind.size - 250]
        return [_body(kind, [*messages, {"role": "user", "content": text}])] * (kind.requests + 1)
    messages.append({"role": "user", "content": f"{AGENT_TASK} (session {seed})"})
    # A round's frame takes about 400 bytes; a line of a log about 80 bytes for what counts as 30 tokens.
    step = (kind.grows - 400) * 30 // 80
    bodies: list[bytes] = []
    size, rounds = len(_body(kind, messages)), 0
    while len(bodies) <= kind.requests:
        rounds += 1
        new = agent_round(seed * 1_000 + rounds, step)
        messages += new
        size += len(json.dumps(new))
        if size >= kind.size - (kind.requests - len(bodies)) * kind.grows:
            bodies.append(_body(kind, messages))
    return bodies


def _body(kind: Kind, messages: list[dict[str, Any]]) -> bytes:
    asked: dict[str, Any] = {"model": kind.model, "stream": kind.stream, "messages": messages}
    if kind.grows:
        asked["tools"] = AGENT_TOOLS
    return json.dumps(asked).encode()
