"""The bench's bodies are as large as their kind says, and the usage that its upstream reports fits them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from tests.bench.bodies import KINDS, WINDOWS, Kind, session
from tests.bench.mock import prompt_tokens, whole
from tests.support.engine_fixtures import count_tokens

FRAME = 4
"""Tokens that a message takes beside its text, about."""


def tokens_of(body: bytes) -> int:
    """The tokens of *body* by the real tokenizer, frames estimated."""
    request = json.loads(body)
    tokens = sum(count_tokens(json.dumps(tool)) for tool in request.get("tools", []))
    for message in request["messages"]:
        calls = message.get("tool_calls", [])
        tokens += count_tokens(message["content"]) + sum(count_tokens(json.dumps(call["function"])) for call in calls)
        tokens += FRAME
    return tokens


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_session_has_the_sizes_of_its_kind(kind: Kind) -> None:
    """The last body has the size, and each before it is shorter by what a request grows, give or take a tenth."""
    bodies = session(kind, 3)
    assert len(bodies) == kind.requests + 1
    assert len(bodies[-1]) == pytest.approx(kind.size, rel=0.05)
    if kind.grows:
        assert [len(b) - len(a) for a, b in pairwise(bodies)] == pytest.approx([kind.grows] * kind.requests, rel=0.15)
    if kind.fresh:
        assert len({body[:400] for body in bodies}) == len(bodies)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_usage_fits_the_body(kind: Kind) -> None:
    """The tokens that the upstream reports are those of the body, give or take a tenth."""
    for body in session(kind, 3)[:: kind.requests]:
        assert prompt_tokens(body) == pytest.approx(tokens_of(body), rel=0.1)
    usage = json.loads(whole(prompt_tokens(body)).partition(b"\r\n\r\n")[2])["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


def test_what_outgrows_its_window_is_far_above_it() -> None:
    """Bodies of the kinds that compact do not fit their window; all others do."""
    for kind in KINDS:
        is_compacted = "compacted" in kind.name or kind.fresh
        assert (prompt_tokens(session(kind, 1)[-1]) > 2 * WINDOWS[kind.model]) == is_compacted
