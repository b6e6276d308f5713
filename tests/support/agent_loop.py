"""An agent at work through running proxies, in the form of any API; every view it causes is checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.conftest import StartProxy
from tests.stub import Stub
from tests.support.api_formats import kind_of, request_body, text_of
from tests.support.loopback import loopback_client
from tests.support.process_inspection import metrics, status, total
from tests.support.proxy_process import Proxy
from tests.support.sample_conversations import AGENT_TOOLS, agent_round, agent_session
from tests.support.view_checks import view_problems

WINDOW = 8192
KEY = "sk-test-0123456789abcdef"
PATHS = {"chat": "/chat/completions", "messages": "/messages", "responses": "/responses"}
GEMINI_PATH = "/v1beta/models/gemini-2.5-flash:generateContent"


@dataclass
class AgentLoop:
    """An agent at work: its history, what the upstream saw, and which answers were of a view with a summary.

    It speaks *api*, on *path* below the proxy's root if one is given. While it waits for an answer no summary is
    answered if it is *gated*: a request that waited for one would never end. Every third result has what is *planted*.
    """

    stub: Stub
    fronts: Sequence[Proxy]
    result: int = 300
    key: str = KEY
    api: str = "chat"
    path: str = ""
    model: str = "gpt-4o-mini"
    gated: bool = False
    planted: Sequence[str] = ()
    messages: list[dict[str, Any]] = field(default_factory=lambda: agent_session(0, 0))
    headers: list[Mapping[str, str]] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    rounds: int = 0
    answered: int = 0

    async def __aenter__(self) -> Self:
        self._client = loopback_client()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(
        self, *, settle: bool = True, text: str = "", more: Mapping[str, str] | None = None, again: bool = False
    ) -> None:
        """One more round: a result with a note, perhaps a word of the user's, and the model asked; the view checked.

        With *settle* the next round waits until summaries under way have come to something. *more* are header fields.
        *again*: the last request was never answered, and is sent once more.
        """
        if self.rounds and not again:
            new = agent_round(self.rounds, self.result)
            new[-1]["content"] += (
                f"\nNote {self.rounds}: the shard of ledger_{400 + self.rounds} is {9400 + self.rounds}."
            )
            if self.rounds % 3 == 1:
                new[-1]["content"] += "".join(f"\n{order}" for order in self.planted)
            self.messages += new
        if text:
            self.messages.append({"role": "user", "content": text})
        body = json.dumps(request_body(self.api, self.messages, AGENT_TOOLS, model=self.model)).encode()
        front = self.fronts[self.rounds % len(self.fronts)]
        before = len(self.stub.chats())
        if self.gated:
            self.stub.gate.clear()
        answer = await self._client.post(
            self.address(front), content=body, headers={**self._credentials(), **(more or {})}
        )
        self.stub.gate.set()
        assert answer.status_code == 200, answer.text
        (seen,) = self.stub.chats()[before:]
        assert seen.verdict == "ok", seen.why
        assert view_problems(body, seen) == []
        views = self.stub.chats()
        if before and seen.slices[: len(views[before - 1].slices)] != views[before - 1].slices:
            self.events.append(self.rounds)
        self.headers.append(answer.headers)
        self.rounds += 1
        if settle:
            await self.settled()

    def address(self, front: Proxy) -> str:
        """The address at which *front* is called."""
        if self.api == "gemini":
            return front.root + GEMINI_PATH
        return front.root + self.path if self.path else front.url + PATHS[self.api]

    def _credentials(self) -> dict[str, str]:
        if self.api == "messages":
            return {"x-api-key": self.key, "anthropic-version": "2023-06-01", "content-type": "application/json"}
        if self.api == "gemini":
            return {"x-goog-api-key": self.key, "content-type": "application/json"}
        return {"authorization": f"Bearer {self.key}", "content-type": "application/json"}

    async def settled(self) -> None:
        """Wait until every summary begun so far has come to something, also one whose call is not out yet.

        An agent that goes on meanwhile reaches its next compaction before that call: the jobs of both then call the
        model.
        """
        for front in self.fronts:
            while front.process is not None and (await status(front))["summaries"].get("running"):
                pass
        if len(self.stub.summaries) == self.answered:
            return

        async def calls() -> float:
            figures = [await metrics(front) for front in self.fronts if front.process is not None]
            return sum(total(each, "ullage_summary_calls_total") for each in figures)

        while await calls() < len(self.stub.summaries):
            pass
        self.answered = len(self.stub.summaries)

    def shown(self) -> str:
        """Everything the newest view says."""
        return "\n".join(map(text_of, self.stub.chats()[-1].messages))

    def outside_quotes(self) -> str:
        """What the newest view says in the user's or the operator's name, less what stands there as a quote."""
        items = [item for item in self.stub.chats()[-1].messages if kind_of(item) in ("user", "system")]
        return re.sub(r"“[^”]*”", "", "\n".join(map(text_of, items)))

    @property
    def spent(self) -> int:
        """What the last answer says that the summaries in its view cost."""
        return int(self.headers[-1].get("x-ullage-summary-tokens", 0)) if self.headers else 0


def _created_folder(path: Path) -> Path:
    path.mkdir()
    return path


async def replicas(
    proxy: StartProxy, stub: Stub, url: str, home: Path, names: str = "ab", **sections: Any
) -> list[Proxy]:
    """Proxies of one window that share the store at *url*, each with a home of its own; *sections* configure them."""
    config = {"store": {"url": url}, **sections}
    return [await proxy(stub.url, window=WINDOW, config=config, home=_created_folder(home / name)) for name in names]
