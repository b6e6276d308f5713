"""The strategies themselves: what they make must be what they say, or every property built on them proves little."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.stub import Rules, judge
from tests.support import conversation_strategies
from tests.support.tool_pair_checks import pair_violations

WIDE = Rules(window=10**9)


@given(conversation_strategies.conversations())
@pytest.mark.slow
def test_pairs_are_whole(messages: list[dict[str, Any]]) -> None:
    """A conversation without orphans has no broken pair and ends where the model speaks next."""
    assert pair_violations(messages) == []
    assert messages[-1]["role"] != "assistant"


@given(conversation_strategies.bodies(surrogates=False))
@pytest.mark.slow
def test_bodies_are_accepted(body: bytes) -> None:
    """Whatever the whitespace and key order, the strict upstream accepts the request."""
    verdict = judge(json.loads(body), WIDE)
    assert verdict.kind == "ok", verdict.message


@given(conversation_strategies.requests(), st.data())
@pytest.mark.slow
def test_bytes_say_what_was_drawn(request: dict[str, Any], data: st.DataObject) -> None:
    """Writing a request in any style and reading it again gives the same request."""
    assert json.loads(conversation_strategies.encode(cast(st.DrawFn, data.draw), request)) == request


@settings(max_examples=200, phases=(Phase.generate,), suppress_health_check=list(HealthCheck), database=None)
@given(conversation_strategies.conversations(with_orphans=True))
def _sample(shapes_seen: set[str], messages: list[dict[str, Any]]) -> None:
    text = json.dumps(messages)
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    shapes = {
        "orphan": bool(pair_violations(messages)),
        "image": "image_url" in text,
        "lone surrogate": "\\udfff end" in text,
        "reused id": len(ids) != len(set(ids)),
        "legacy call": "function_call" in text,
        "late system": "system" in [message["role"] for message in messages[3:]],
    }
    shapes_seen.update(shape for shape, present in shapes.items() if present)


@pytest.mark.slow
def test_awkward_shapes_occur() -> None:
    """Orphans, images, lone surrogates, reused ids, legacy calls and late system messages come up by themselves."""
    shapes_seen: set[str] = set()
    _sample(shapes_seen)
    assert shapes_seen >= {"orphan", "image", "lone surrogate", "reused id", "legacy call", "late system"}
