"""Deterministic request bodies: a small chat, and agent sessions that grow by one round with every request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.support.sample_conversations import AGENT_SYSTEM, AGENT_TASK, AGENT_TOOLS, agent_round, prose

CHAT, ROOMY, TIGHT, LONG, SMALL = "bench-chat", "bench-roomy", "bench-tight", "bench-long", "bench-small"
"""Models: of chats; of 50 KB far below its window; of 50 KB and of 400 KB that have to be counted and not compacted;
and one whose window 400 KB outgrow."""

WINDOWS = {CHAT: 200_000, ROOMY: 200_000, TIGHT: 20_480, LONG: 180_000, SMALL: 63_488}
"""What is counted is above the soft mark with a session's first body, so that a summary is prepared before anything is
measured, and below the high mark with its last one."""

BYTES_A_TOKEN = {CHAT: 5.25, ROOMY: 3.41, TIGHT: 3.41, LONG: 2.91, SMALL: 2.91}
"""Bytes of a body for each of its tokens, as o200k_base counts them: the usage that the upstream reports."""


@dataclass(frozen=True)
class Kind:
    """Traffic over *connections*: bodies of up to *size* bytes, each *grows* bytes longer than the one before.

    With *fresh* every body is a session of its own, which nobody has seen.
    """

    name: str
    size: int
    grows: int
    requests: int
    connections: int
    model: str = ROOMY
    stream: bool = False
    fresh: bool = False

    @property
    def is_long(self) -> bool:
        """True if a session's first rounds are long ones."""
        return self.fresh or self.size > 100_000


LONG_ROUND = 8_000
"""Bytes of the rounds that a long session begins with."""


KINDS = (
    Kind("1 KB chat", 1_000, 0, 120, 8, CHAT),
    Kind("50 KB agent, fits", 50_000, 1_200, 6, 12),
    Kind("SSE event", 1_000, 0, 1, 20, CHAT, stream=True),
    Kind("50 KB agent, counted", 50_000, 1_200, 6, 12, TIGHT),
    Kind("400 KB agent, growing", 400_000, 8_000, 12, 1, LONG),
    Kind("400 KB agent, compacted before", 400_000, 600, 12, 1, SMALL),
    Kind("400 KB agent, never seen", 400_000, 0, 2, 1, SMALL, fresh=True),
)


def session(kind: Kind, seed: int) -> list[bytes]:
    """The bodies of one connection in order; the first one is sent to warm up and is not measured."""
    if kind.fresh:
        return [_grown(kind, seed * 100 + number, 0)[-1] for number in range(kind.requests + 1)]
    if kind.grows:
        return _grown(kind, seed, kind.requests)
    text = prose(seed, kind.size // 5)[: kind.size - 250]
    messages = [{"role": "system", "content": AGENT_SYSTEM}, {"role": "user", "content": text}]
    return [_body(kind, messages)] * (kind.requests + 1)


def _grown(kind: Kind, seed: int, requests: int) -> list[bytes]:
    """An agent's session: *requests* bodies behind a first one, the last one being *kind*'s size."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": AGENT_SYSTEM}]
    messages.append({"role": "user", "content": f"{AGENT_TASK} (session {seed})"})
    bodies: list[bytes] = []
    size, rounds, first = len(_body(kind, messages)), 0, kind.size - requests * kind.grows
    while len(bodies) <= requests:
        rounds += 1
        round_bytes = kind.grows if bodies or not kind.is_long else LONG_ROUND
        new = agent_round(seed * 1_000 + rounds, _result_tokens(round_bytes))
        messages += new
        size += len(json.dumps(new))
        if bodies or size >= first:
            bodies.append(_body(kind, messages))
    return bodies


def _result_tokens(round_bytes: int) -> int:
    """The tokens of a tool result that makes a round of *round_bytes*."""
    # A round's frame takes about 400 bytes; a line of a log about 80 bytes for what counts as 30 tokens.
    return (round_bytes - 400) * 30 // 80


def _body(kind: Kind, messages: list[dict[str, Any]]) -> bytes:
    request: dict[str, Any] = {"model": kind.model, "stream": kind.stream, "messages": messages}
    if kind.grows or kind.fresh:
        request["tools"] = AGENT_TOOLS
    return json.dumps(request).encode()
