"""When a client's own compaction is answered here: only from a summary of nearly all, and only with a plain text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.request import Request
from proxy.core.tokens.budget import Shares
from proxy.engine.ports import Summary, SummaryRequest
from proxy.engine.reading import Reader
from proxy.features.client_compaction.summary_answer import LEAST_COVERED_SHARE, SummaryAnswers
from tests.support.engine_fixtures import TENANT, Message, Replica, chat_body, tokenizers, tool_map_of_package
from tests.support.sample_conversations import AGENT_TOOLS, agent_session

WINDOW = 8192
PROMPT = {"role": "user", "content": "You are performing a CONTEXT CHECKPOINT COMPACTION."}


class Ready:
    """Summaries of which one is ready, of a *share* of the conversation's items."""

    inline = False

    def __init__(self, share: float, text: str = "## Goal\n- ledger_417 is to be found.") -> None:
        self._share = share
        self._text = text

    async def ready(self, request: SummaryRequest) -> Summary | None:
        most = self._share * request.prefix.length
        cuts = [cut.length for cut in request.prefixes if cut.length <= most]
        return Summary(self._text, cuts[-1], 1234) if cuts else None

    async def write(self, request: SummaryRequest) -> Summary | None:
        raise AssertionError(request)

    def is_due(self, *_: object) -> bool:
        return False

    def prepare(self, request: SummaryRequest) -> None:
        raise AssertionError(request)

    def sent(self, tenant: bytes, tokens: int) -> None: ...

    def limited(self, tenant: bytes) -> None: ...


async def answered(
    share: float, messages: list[Message], text: str = "## Goal\n- ledger_417 is to be found.", **members: Any
) -> tuple[str, dict[str, Any]] | None:
    """The text that is answered and the whole body, if it is answered here."""
    replica = Replica(summaries=Ready(share, text))
    raw = chat_body(messages, tools=AGENT_TOOLS, **members)
    planned = await replica.plan(raw, WINDOW)
    reader = Reader(tokenizers(), {}, {}, {}, {}, tool_map_of_package())
    own = SummaryAnswers(replica.compactions, reader, Shares(), lambda: 1_760_000_000.0)
    served = await own.answer_planned(Request("chat", raw, TENANT, "r1"), planned.view, planned.report)
    if served is None:
        return None
    assert served.report.summary_tokens == 1234
    found = json.loads(await served.reply.next_chunk())
    return found["choices"][0]["message"]["content"], found


TALK = [*agent_session(30, 300), PROMPT]


async def test_later_items_are_described_behind_the_summary() -> None:
    """The summary stands in it, the user's words do, and of what came later the identifiers."""
    talk = json.loads(json.dumps(TALK))
    talk.insert(20, {"role": "user", "content": "Never rename a ledger."})
    talk[-3]["content"] = "I found that ledger_90017 is broken."
    found = await answered(0.9, talk)
    assert found is not None
    assert "ledger_417 is to be found" in found[0]
    assert talk[1]["content"] in found[0]
    assert "Never rename a ledger." in found[0]
    assert "ledger_90017" in found[0]
    assert "CHECKPOINT" not in found[0]


@pytest.mark.parametrize("share", [0.0, 0.3, LEAST_COVERED_SHARE - 0.1])
async def test_a_summary_of_less_stands_for_nothing(share: float) -> None:
    """If a good part of the conversation is in no summary, the client's model reads it."""
    assert await answered(share, TALK) is None


@pytest.mark.parametrize(
    "members",
    [
        {"n": 2},
        {"logprobs": True},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "read_file"}}},
        {"max_tokens": 40},
    ],
)
async def test_more_than_a_text_is_the_models(members: dict[str, Any]) -> None:
    """A request that a plain text cannot answer, or only a longer one, is not answered here."""
    assert await answered(1.0, TALK, **members) is None
    assert await answered(1.0, TALK, **dict.fromkeys(members, None)) is not None


async def test_what_is_no_compaction_is_the_models() -> None:
    """An ordinary request goes to its model, whatever is ready."""
    assert await answered(1.0, TALK[:-1]) is None


async def test_a_lone_surrogate_hurts_nothing() -> None:
    """A lone surrogate is replaced by a sign for it."""
    talk = [TALK[0], {"role": "user", "content": "a \ud83d b"}, *TALK[2:]]
    found = await answered(1.0, talk)
    assert found is not None
    found[0].encode()
