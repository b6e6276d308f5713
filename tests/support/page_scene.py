"""Conversations for the page to show: agents and chats on several models, at all degrees of fill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.loopback import loopback_client
from tests.support.proxy_process import Proxy
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, chat_turn, log, prose

MODELS: Mapping[str, int] = {
    "gpt-4o-mini": 16_384,
    "claude-sonnet-4-5": 32_768,
    "qwen3-coder": 8_192,
    "gpt-5-mini": 65_536,
}


def configuration(upstream: str, **more: Any) -> dict[str, Any]:
    """The configuration of a proxy in front of *upstream*, with the windows of ``MODELS``."""
    rules = [{"name": name, "context_window": window, "tokenizer": "o200k_base"} for name, window in MODELS.items()]
    return {
        "store": {"url": "memory"},
        "summaries": {"mode": "off"},
        "upstreams": [{"name": "openai", "base_url": upstream, "probe": False}],
        "models": [{**rule, "upstream": "openai"} for rule in rules],
        **more,
    }


@dataclass(frozen=True)
class Scene:
    """One conversation of the scene; ``steps`` are the rounds at which it asks."""

    name: str
    model: str
    project: str
    steps: tuple[int, ...]
    result: int = 320
    bundle: int = 0
    agent: bool = True

    def bodies(self) -> Iterator[bytes]:
        """Its requests, in order."""
        for rounds in self.steps:
            if self.agent:
                messages = agent_session(rounds, self.result)
            else:
                messages = [each for turn in range(rounds) for each in chat_turn(turn, self.result)][:-1]
            task = {"role": "user", "content": f"{prose(len(self.name), 60)} This is {self.name}."}
            messages = [{"role": "system", "content": prose(3, 300)}, task, *messages[1:]]
            if self.bundle:
                messages += reading("dist/bundle.js", log(7, self.bundle))
            tools = {"tools": AGENT_TOOLS} if self.agent else {}
            yield json.dumps({"model": self.model, "max_tokens": 800, "messages": messages, **tools}).encode()

    @property
    def headers(self) -> dict[str, str]:
        """The headers of its requests."""
        return {"x-ullage-conversation": self.name, "x-ullage-project": self.project}


def reading(path: str, text: str) -> list[dict[str, Any]]:
    """A call that reads *path*, and its result."""
    function = {"name": "read_file", "arguments": json.dumps({"path": path})}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "z1", "type": "function", "function": function}]}
    return [call, {"role": "tool", "tool_call_id": "z1", "content": text}]


SCENES = (
    Scene("checkout", "gpt-4o-mini", "shop", tuple(range(4, 60, 2))),
    Scene("bundle", "gpt-4o-mini", "shop", (6, 8), 200, bundle=11_200),
    Scene("migrate", "qwen3-coder", "billing", tuple(range(2, 50, 2))),
    Scene("flaky-test", "qwen3-coder", "billing", tuple(range(2, 14))),
    Scene("review", "claude-sonnet-4-5", "platform", tuple(range(6, 60, 3)), 420),
    Scene("docs", "claude-sonnet-4-5", "platform", (8, 14, 20, 26), 420),
    Scene("refactor", "gpt-5-mini", "platform", tuple(range(20, 100, 8)), 500),
    Scene("support", "gpt-4o-mini", "desk", tuple(range(3, 24)), 260, agent=False),
    Scene("triage", "qwen3-coder", "desk", tuple(range(2, 30, 2)), 240, agent=False),
    Scene("release", "gpt-4o-mini", "shop", (8, 12, 16, 20, 24, 25, 26, 27, 28)),
)


async def play(proxy: Proxy, scenes: tuple[Scene, ...] = SCENES, pause: float = 0.0) -> None:
    """Send the requests of *scenes*, one of each in turn."""
    async with loopback_client(base_url=proxy.url) as client:
        client.headers.update({"authorization": "Bearer sk-scene", "content-type": "application/json"})
        running = {scene: scene.bodies() for scene in scenes}
        while running:
            for scene, bodies in list(running.items()):
                body = next(bodies, None)
                if body is None:
                    del running[scene]
                    continue
                answer = await client.post("/chat/completions", content=body, headers=scene.headers)
                answer.raise_for_status()
                await asyncio.sleep(pause)
