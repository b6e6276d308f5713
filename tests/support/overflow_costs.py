"""What an error costs that an upstream answers once to an ordinary conversation, with the whole engine around it.

The classifier's own scores hold an error against the request that it was written down with. Here every error meets the
same conversation, of some 7,400 tokens, so an overflow's figures are far from it more often than not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from proxy.core.models import Catalogue, ModelLimits, ModelRule
from proxy.core.report import Usage
from proxy.core.request import Options, Request
from proxy.engine.learned_routes import load
from proxy.engine.ports import Answer
from tests.support.engine_fixtures import DictRecords, Replica, chat_body
from tests.support.overflow_claims import OverflowClaim
from tests.support.sample_conversations import chat_turn
from tests.support.scripted_upstream import JSON, SSE, ScriptedReply, Switch, upstream_replying

CONVERSATION = [message for turn in range(13) for message in chat_turn(turn, 230)] + chat_turn(99, 200)[:1]
"""27 messages of a chat."""

WINDOW = 128_000
ROUTES = {
    "stated": Catalogue([ModelRule("*", "stub", WINDOW)], {}, "stub"),
    "table": Catalogue([ModelRule("*", "stub")], {"house-model": ModelLimits(WINDOW)}, "stub"),
    "unknown": Catalogue([ModelRule("*", "stub")], {}, "stub"),
}
"""Catalogues by what they know of the model's window: a person states it, a published table does, or nothing does."""

BYTES_PER_TOKEN = 5
"""Bytes of the conversation for each token that its upstream reports, JSON included."""

WORD = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}]}'


@dataclass(frozen=True)
class Cost:
    """What one error cost: requests sent beside the first, and whether a window was learned."""

    retries: int
    taught: bool


class Meter:
    """One engine whose upstream answers each conversation with one error, and then with a message."""

    def __init__(self, known: str) -> None:
        """*known* is a key of ``ROUTES``."""
        self._switch = Switch()
        self._records = DictRecords()
        self._replica = Replica(self._records, upstream=self._switch, catalogue=ROUTES[known])
        self._sent = 0

    async def cost(self, claim: OverflowClaim) -> Cost:
        """Return what *claim* costs; nothing is learned from it for the next one."""
        self._sent += 1
        tenant = self._sent.to_bytes(32)
        upstream = upstream_replying(_refusal(claim), ScriptedReply(200, [WORD], JSON))
        self._switch.upstream = upstream
        outcome = await self._replica.engine.exchange(Request("chat", _body(claim), tenant, "r1", Options()))
        if isinstance(outcome, Answer) and outcome.reply.status == 200:
            outcome.learn(Usage(input_tokens=len(upstream.bodies[-1]) // BYTES_PER_TOKEN))
        return Cost(len(upstream.bodies) - 1, self._is_taught(tenant))

    def _is_taught(self, tenant: bytes) -> bool:
        """True if a window was learned for *tenant*; one refusal without a figure leaves none."""
        learned = [load(value) for (owner, _), value in self._records.routes.items() if owner == tenant]
        windows = [route.learned_window for route in learned if route is not None]
        return any(window.stated is not None or window.inferred is not None for window in windows)


def _body(claim: OverflowClaim) -> bytes:
    messages = [*CONVERSATION]
    if claim.request:
        messages[-1] = {"role": "user", "content": claim.request}
    members = {"model": "house-model", "stream": claim.status == 200}
    if claim.output is not None:
        members["max_tokens"] = claim.output
    return chat_body(messages, **members)


def _refusal(claim: OverflowClaim) -> ScriptedReply:
    body = claim.body.encode()
    if claim.status == 200:
        return ScriptedReply(200, [b"data: " + json.dumps(json.loads(body)).encode() + b"\n\n"], SSE)
    return ScriptedReply(claim.status, [body], (("content-type", "application/json"),))
