"""What a request may use: its window, the limits beside it, and what it costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from msgspec import structs

from proxy.core.models import ModelRule
from proxy.core.request import Options
from proxy.core.tokens.budget import Marks
from tests.stub.tokens import request_tokens
from tests.support.engine_fixtures import POLICY, WINDOW, Replica, chat_body, message_slices
from tests.support.plan_checks import plan_problems
from tests.support.sample_conversations import agent_round, agent_session
from tests.support.scripted_upstream import EngineFixture, accepting_upstream

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # else it hides what failed


async def test_the_factor_scales_the_window() -> None:
    """For a provider that counts twice what we count, the view takes half as many of our tokens."""
    body = chat_body(agent_session(30, 300))
    plan = await Replica().plan(body, WINDOW, factor=2.0)
    assert request_tokens(json.loads(plan.body), 2.0) + WINDOW // 32 <= WINDOW
    assert plan.report.window == WINDOW


async def test_an_input_limit_beside_the_window_is_kept() -> None:
    """Where inputs have a limit of their own, the view keeps it however much of the window is left for the answer."""
    body = chat_body(agent_session(30, 300), max_tokens=16)
    limit = WINDOW // 2
    plan = await Replica().plan(body, WINDOW, max_input=limit)
    assert plan.error is None
    assert plan.report.budget == limit
    assert limit // 4 < request_tokens(json.loads(plan.body)) <= limit
    assert request_tokens(json.loads((await Replica().plan(body, WINDOW)).body)) > limit // 4


async def test_economy_compacts_where_it_gets_dear() -> None:
    """Under the policy economy a session is compacted at half the window, deeper than by fit, and never refused."""
    messages, window = agent_session(60, 300), 32_768
    economy = structs.replace(POLICY, rules=replace(POLICY.rules, marks=Marks(low=0.35)), economy=True)
    thrifty, fit = Replica(policy=economy), Replica()
    sizes = [
        ((await thrifty.plan(chat_body(messages[:end]), window)).tokens or 0)
        for end in range(2, len(messages), 2)
        if messages[end - 1]["role"] == "tool"
    ]
    assert max(sizes) <= 0.5 * window
    assert max(sizes) > 0.4 * window
    assert len((await fit.plan(chat_body(messages[:84]), window)).body) == len(chat_body(messages[:84]))
    big = chat_body([*messages[:2], *agent_round(777, 20_000)])
    plan = await thrifty.plan(big, window)
    assert plan.error is None
    assert plan.body == big


SIZED = structs.replace(POLICY, sizes={"tiny": 2_000, "large": 8_000})
TINY = Options(task_size="tiny")


async def test_a_small_task_gets_a_small_history() -> None:
    """By header or by the model's rule; the header wins, and a size without a figure is a label."""
    body, replica = chat_body(agent_session(40, 200)), Replica(policy=SIZED)
    whole = await replica.plan(body, 65_536)
    tiny = await replica.plan(body, 65_536, options=TINY)
    large = await Replica(policy=SIZED).plan(body, 65_536, options=Options(task_size="large"))
    assert whole.body == body
    assert [each.report.outcome for each in (whole, tiny, large)] == ["verbatim", "compacted", "compacted"]
    assert (tiny.tokens or 0) < 2_000 < (large.tokens or 0) < 8_000
    assert tiny.report.task_size == "tiny"
    assert not plan_problems(body, tiny, 65_536)
    assert (await Replica(policy=SIZED).plan(body, 65_536, options=Options(task_size="small"))).body == body


async def test_the_size_of_a_models_tasks_is_that_of_its_rule() -> None:
    """An alias of a model states it; a request's header wins."""
    rules = [ModelRule("quick", "stub", model="m", task_size="tiny"), ModelRule("m", "stub", 65_536)]
    body = chat_body(agent_session(20, 200), model="quick")
    for task_size, outcome in (("", "compacted"), ("large", "verbatim")):
        answer = await EngineFixture(rules=rules, policy=SIZED).ask(body, accepting_upstream(), task_size=task_size)
        assert answer.report.outcome == outcome
        assert answer.report.task_size == (task_size or "tiny")


async def test_what_no_size_can_hold_goes_on() -> None:
    """The newest messages are neither cut nor refused for a size: the outcome says that it could not be reached."""
    messages = [*agent_session(30, 100), *agent_round(777, 12_000)]
    plan = await Replica(policy=SIZED).plan(chat_body(messages), 65_536, options=TINY)
    assert plan.error is None
    assert (plan.report.outcome, plan.report.reason) == ("degraded", "budget_unreachable")
    assert message_slices(plan.body)[-1] == message_slices(chat_body(messages))[-1]


async def test_a_quick_check_does_not_pass_over_a_size() -> None:
    """A body that fits its window by its bytes is counted, if its task may be too large for its size."""
    body = chat_body(agent_session(10, 300))
    engine = EngineFixture(200_000, policy=SIZED)
    sized = await engine.ask(body, accepting_upstream(), task_size="tiny")
    plain = await engine.ask(body, accepting_upstream())
    assert (sized.report.outcome, plain.report.outcome, plain.report.bounded) == ("compacted", "verbatim", True)
