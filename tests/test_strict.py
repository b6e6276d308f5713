"""Upstreams whose template wants user and assistant to take turns, and one system message first, accept every view."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from proxy.core.compaction.schedule import CompactionTarget
from tests.stub import Rules, chat, gemini, messages, responses
from tests.support import conversation_strategies
from tests.support.api_formats import kind_of, request_body
from tests.support.engine_fixtures import UNSHRUNK, Replica

API_FORMATS: dict[str, Any] = {"chat": chat, "messages": messages, "responses": responses, "gemini": gemini}
ENDLESS = 10**9
Message = dict[str, Any]


@st.composite
def turns(draw: st.DrawFn) -> tuple[list[Message], list[int]]:
    """A conversation in which user and assistant take turns, and the lengths at which it was a request."""
    text = conversation_strategies.texts(surrogates=False)
    found: list[Message] = draw(st.lists(conversation_strategies.systems(text), max_size=1))
    ends = []
    for _ in range(draw(st.integers(2, 14))):
        found.append(draw(conversation_strategies.users(text)))
        ends.append(len(found))
        for _ in range(draw(st.integers(0, 3))):
            found += draw(conversation_strategies.rounds(text))
            ends.append(len(found))
        found.append(draw(conversation_strategies.assistants(text)))
    return found[:-1], ends


def problems(api: str, body: bytes, window: int) -> list[str]:
    """Why a strict upstream of *api* does not take *body*; empty where it does."""
    parsed = json.loads(body)
    verdict = API_FORMATS[api].judge(parsed, Rules(window=window, alternation=True, one_leading_system=True))
    excused = verdict.kind == "overflow" and b"image" in body  # their size is a guess on both sides
    found = [] if verdict.kind == "ok" or excused else [f"{verdict.kind}: {verdict.message}"]
    kinds = [kind_of(item) for item in parsed.get("messages") or parsed.get("input") or parsed["contents"]]
    spoken = [kind for kind in kinds if kind in ("user", "assistant")]
    found += ["it does not begin with the user"] if spoken[:1] != ["user"] else []
    found += ["two users in a row"] if any(one == two == "user" for one, two in pairwise(spoken)) else []
    return found + (["a system message stands behind others"] if "system" in kinds[1:] else [])


@pytest.mark.parametrize("api", API_FORMATS)
@settings(max_examples=15, phases=UNSHRUNK)
@given(talk=turns(), share=st.sampled_from([0.15, 0.3, 0.6]), force=st.booleans())
@pytest.mark.slow
async def test_every_view_alternates(
    api: str, talk: tuple[list[Message], list[int]], share: float, force: bool
) -> None:
    """At each request of a growing conversation, in windows of a part of its size, forced or not."""
    found, ends = talk
    whole = json.dumps(request_body(api, found)).encode()
    assume(problems(api, whole, ENDLESS) == [])
    window = max(600, int(share * API_FORMATS[api].judge(json.loads(whole), Rules(window=ENDLESS)).tokens))
    replica = Replica()
    for end in ends[-12:]:
        body = json.dumps(request_body(api, found[:end])).encode()
        plan = await replica.plan(body, window, CompactionTarget(force=force and end % 5 == 0), api=api)
        if plan.error is None:
            assert problems(api, plan.body, window) == [], plan.report.stages


@pytest.mark.parametrize("api", API_FORMATS)
async def test_the_strategy_crosses_windows(api: str) -> None:
    """The property above is about something: long conversations of this kind are compacted at most requests."""
    text = "It is said that the ledger of zone nine is closed. " * 12
    found: list[Message] = [{"role": "system", "content": "Be brief."}]
    replica, compacted = Replica(), 0
    for turn in range(24):
        found.append({"role": "user", "content": f"Turn {turn}: {text}"})
        body = json.dumps(request_body(api, found)).encode()
        plan = await replica.plan(body, 2048, api=api)
        assert problems(api, plan.body, 2048) == []
        compacted += plan.body != body
        found.append({"role": "assistant", "content": f"Answer {turn}: {text}"})
    assert compacted > 10
