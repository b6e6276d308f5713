"""``ullage fit``: the view of a request without an upstream, and where its tokens are."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from proxy.cli.explain import CannotFit, api_of, breakdown, fit_request, render
from proxy.core.errors import InvalidRequest
from proxy.features.settings import AllSettings
from proxy.settings import Settings
from tests.support import api_formats
from tests.support.engine_fixtures import Replica, chat_body, count_tokens
from tests.support.plan_checks import message_problems
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, prose, tool

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo", "detail": "low"}}


def long_session(**members: Any) -> bytes:
    """An agent's session with a picture in its task, readable reasoning, and tools."""
    messages = agent_session(20, 300)
    messages[1] = {"role": "user", "content": [{"type": "text", "text": messages[1]["content"]}, PICTURE]}
    messages[-2]["reasoning_content"] = prose(1, 30)
    return chat_body(messages, **{"tools": AGENT_TOOLS, "max_tokens": 400, "model": "gpt-4o", **members})


async def test_the_view_is_what_the_proxy_would_send() -> None:
    """The printed view is the fitter's own, byte for byte, and faithful to the request."""
    body = long_session()
    fitted = await fit_request(Settings(), body, window=4096)
    assert fitted.error is None
    assert message_problems(body, fitted.view.body) == []
    assert fitted.view.body == (await Replica().plan(body, 4096, model="gpt-4o")).body


async def test_small_requests_pass_and_are_counted_all_the_same() -> None:
    """A request that fits by its bytes alone comes out as it is, and its tokens are counted exactly."""
    body = chat_body([{"role": "user", "content": "Hello."}])
    fitted = await fit_request(Settings(), body, window=None)
    assert fitted.view.body == body
    shown = breakdown(fitted)
    assert shown.steps == ()
    assert shown.regions["user"][0] == shown.roles["user"][0] > 0


@pytest.mark.parametrize("factor", [1.0, 1.5])
@pytest.mark.parametrize("recall", [False, True])
@pytest.mark.slow
async def test_every_breakdown_adds_up(factor: float, recall: bool) -> None:
    """Regions, kinds and the table of stages add up to the same size, before and after, whatever the model."""
    model = "gpt-4o" if factor == 1.0 else "claude-sonnet-4-5"
    settings = AllSettings.model_validate({"compression": {"recall": {"enabled": recall}}})
    fitted = await fit_request(settings, long_session(), model=model, window=6000)
    assert ("recall" in fitted.report.stages) is recall
    shown, report = breakdown(fitted), fitted.report
    assert fitted.measured.known.token_ratio == factor
    for at, total in ((0, report.tokens_before), (1, report.tokens_after)):
        by_region = sum(pair[at] for name, pair in shown.regions.items() if name != "reserve")
        by_kind = sum(pair[at] for pair in shown.kinds.values())
        assert total is not None
        assert abs(by_region - total) <= len(shown.regions)
        assert abs(by_kind - total) <= len(shown.kinds)
    assert {"text", "reasoning", "tool call", "tool result", "image", "tool definition"} <= shown.kinds.keys()
    assert shown.regions["summary"][0] == 0
    assert shown.regions["summary"][1] > 0
    steps = shown.steps
    assert [step.stage for step in steps] == list(report.stages)
    assert steps[0].before == report.tokens_before
    assert steps[-1].after == report.tokens_after
    assert all(step.after <= step.before for step in steps if step.stage != "recall")
    assert 0 < steps[0].touched < 42


@pytest.mark.parametrize("api", ["messages", "responses"])
@pytest.mark.slow
async def test_system_text_counts_as_such_in_every_member(api: str) -> None:
    """The text of ``system`` and ``instructions`` is in the system's region and role, and text by its kind."""
    text = prose(3, 500)
    messages = [{"role": "system", "content": text}, *agent_session(3, 100)[1:]]
    body = json.dumps(api_formats.request_body(api, messages)).encode()
    shown = breakdown(await fit_request(Settings(), body, window=20_000))
    assert shown.regions["system"] == shown.roles["system"]
    assert count_tokens(text) <= shown.regions["system"][0] <= shown.kinds["text"][0]
    assert "format" not in shown.kinds


async def test_skills_are_a_region_and_one_sent_again_is_named() -> None:
    """The configured marks count, and the tokens of a skill that stood before it have a table of their own."""
    skill = f"# Recipes\n\n{prose(5, 90)}"
    messages = [
        {"role": "system", "content": skill},
        {"role": "user", "content": f"Cook.\n{skill}"},
    ]
    settings = Settings.model_validate({"injected": {"skills": {"headings": ["recipes"]}}})
    shown = breakdown(await fit_request(settings, chat_body(messages), window=20_000))
    assert shown.regions["skills"] == (2 * count_tokens(skill), 2 * count_tokens(skill))
    assert shown.findings.skill_tokens == count_tokens(skill)
    out = io.StringIO()
    render(shown, Console(file=out, width=200))
    assert "sent again" in out.getvalue()


async def test_each_stage_has_its_line() -> None:
    """Shrunk tools and clipped items have lines with the tokens saved and the number touched."""
    tools = [tool(f"tool_{n}", prose(n, 300), path="Path.") for n in range(9)]
    messages = [*agent_session(3, 300), {"role": "user", "content": prose(7, 4000)}]
    fitted = await fit_request(Settings(), chat_body(messages, tools=tools), window=3000)
    shown = breakdown(fitted)
    lines = {step.stage: step for step in shown.steps}
    assert {"tools", "clip"} <= lines.keys()
    assert lines["tools"].touched == 9
    assert lines["tools"].before - lines["tools"].after > 1000
    assert lines["clip"].touched >= 1
    assert lines["clip"].after < lines["clip"].before
    assert shown.steps[-1].after == fitted.view.tokens


@pytest.mark.slow
async def test_the_tables_are_readable_without_a_terminal() -> None:
    """The rendering has the window with its source, the marks, and a line for each region, kind and stage."""
    fitted = await fit_request(Settings(), long_session(), window=4096)
    out = io.StringIO()
    shown = breakdown(fitted)
    render(shown, Console(file=out, width=200))
    text = out.getvalue()
    for word in ("4,096  (configured)", "high ", "low ", "pressure", *shown.regions, *shown.kinds, "fold"):
        assert word in text
    render(breakdown(await fit_request(Settings(), long_session(), window=400_000)), Console(file=out, width=200))
    assert "No stage was needed" in out.getvalue()


async def test_what_cannot_be_fitted_says_what_to_do() -> None:
    """No JSON, no messages, another API, an unknown window: each has a sentence with a remedy."""
    for body, words in [
        (b"{", "is no JSON"),
        (b"[]", "Give the body of one request"),
        (b'{"model":"m"}', "no list of messages"),
        (b'{"messages":[1]}', "must be an object"),
    ]:
        with pytest.raises(InvalidRequest, match=words):
            await fit_request(Settings(), body, window=1000)
    with pytest.raises(CannotFit, match="--window"):
        await fit_request(Settings(), chat_body([], model="nobody-knows"), window=None)
    off = Settings.model_validate({"compression": {"mode": "off"}})
    with pytest.raises(CannotFit, match="mode is off"):
        await fit_request(off, chat_body([{"role": "user", "content": "x"}]), window=1000)


@pytest.mark.parametrize(
    ("members", "api"),
    [
        ({"messages": []}, "chat"),
        ({"input": "hello"}, "responses"),
        ({"messages": [], "system": "Be brief."}, "messages"),
        ({"messages": [], "tools": [{"name": "x", "input_schema": {}}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "tools": [{}]}, "chat"),
    ],
)
def test_the_api_is_known_by_the_shape(members: dict[str, Any], api: str) -> None:
    """Members and blocks that only one API has tell which it is."""
    assert api_of(json.dumps(members).encode()) == api
