"""Plans over Messages and Responses: valid for a strict provider, inside the window, and made of the client's bytes."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from proxy.core.compression.schedule import Demand
from proxy.fitting import Plan
from tests import strategies
from tests.e2e.checks import changed
from tests.fits import UNSHRUNK, Desk, is_clip, outline_problems
from tests.forms import body_of, kind_of, text_of
from tests.material import AGENT_TOOLS, agent_session, chat_turn, log, prose
from tests.stub import Rules, messages, responses, slices

WIRES: dict[str, Any] = {"messages": messages, "responses": responses}
WINDOW = 4096
windows = st.sampled_from([512, 1024, 2048, 4096, 8192, 32768])


@st.composite
def asked(draw: st.DrawFn, api: str, **options: Any) -> bytes:
    """A request's bytes that a strict provider with an endless window accepts."""
    chat = draw(strategies.conversations(surrogates=False, max_size=20, **options))
    tools = draw(st.one_of(st.just([]), strategies.tools))
    figure = "max_tokens" if api == "messages" else "max_output_tokens"
    body = body_of(api, chat, tools, **{figure: draw(st.sampled_from([16, 64, 300, 4000]))})
    assume(WIRES[api].judge(body, Rules(window=10**9)).kind == "ok")
    return strategies.encode(draw, body)


def problems(api: str, body: bytes, plan: Plan, window: int) -> list[str]:
    """One sentence for each promise that *plan* breaks against the client's *body*."""
    if plan.error is not None:
        return [] if plan.error.code == "context_length_exceeded" else [f"refused with {plan.error.code}"]
    if plan.report.outcome == "verbatim" and plan.body != body:
        return ["called verbatim and was changed"]
    verdict = WIRES[api].judge(json.loads(plan.body), Rules(window=window))
    pictures = b"image" in plan.body  # their size is a guess on both sides
    found = [f"{verdict.kind} {verdict.message}"] if verdict.kind != "ok" and not (pictures and not verdict.message) else []
    return found if plan.body == body else found + outline_problems(body, plan.body) + view_problems(body, plan)


def view_problems(body: bytes, plan: Plan) -> list[str]:
    """What of the view is neither the client's own bytes, nor the carrier, nor a clip."""
    raw, view = slices(body), slices(plan.body)
    was, now = [list(map(json.loads, pieces)) for pieces in (raw, view)]
    new = changed(raw, view)
    unclipped = [i for i in new if not any(is_clip(item, now[i]) for item in was)]
    found = [f"[{i}] is a {kind_of(now[i])} item of ours" for i in unclipped if kind_of(now[i]) != "user"]
    found += ["more than one carrier"] if len(unclipped) > 1 else []
    shown = "\n".join(map(text_of, now))
    users = [text_of(item) for item in was if kind_of(item) == "user"]
    kept = [text for text in (*users[:1], *users[-1:]) if text not in shown and text[:4] not in shown]
    return found + [f"user text {text[:40]!r} is gone" for text in kept]


@pytest.mark.parametrize("api", WIRES)
@settings(max_examples=60, phases=UNSHRUNK)
@given(data=st.data(), window=windows, force=st.booleans())
async def test_a_plan_is_valid_and_fits_or_refuses(api: str, data: st.DataObject, window: int, force: bool) -> None:
    """Whatever a strict provider accepts it also accepts as a view, which fits by its count or is refused for length."""
    body = data.draw(asked(api))
    plan = await Desk().plan(body, window, Demand(force=force), api=api)
    assert problems(api, body, plan, window) == []
