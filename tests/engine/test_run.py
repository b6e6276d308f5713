"""What is in hand of an answer while a request is under way."""

from __future__ import annotations

import itertools
import json

import pytest
from msgspec import structs

from proxy.core.request import Request
from proxy.engine.run import Run
from tests.stub.tokens import count_json
from tests.support import api_formats
from tests.support.engine_fixtures import (
    POLICY,
    TENANT,
    WINDOW,
    Replica,
    chat_body,
    count_tokens,
)
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, coding_session, prose
from tests.support.scripted_upstream import ScriptedReply


def run() -> Run:
    return Run(Request("chat", b"{}", TENANT, "r"), itertools.count().__next__)


def test_only_planning_is_overhead() -> None:
    """Time between a pause and the next resumption is not counted."""
    under_way = run()
    under_way.pause_planning()
    under_way.resume_planning()
    under_way.pause_planning()
    assert under_way.overhead == 2


async def test_the_first_overflow_is_what_the_client_gets_if_nothing_follows() -> None:
    """Every byte of the first refusal is held, later ones are not, and nothing stays open."""
    view = (await Replica().plan(chat_body([{"role": "user", "content": "Hi"}]), WINDOW)).view
    under_way, replies = run(), [ScriptedReply(400, []), ScriptedReply(400, [])]
    for number, reply in enumerate(replies):
        under_way.sending("stub")
        under_way.reply, under_way.chunks = reply, [b"no ", b"%d" % number]
        under_way.overflowed(view)
    assert under_way.reply is None
    assert under_way.first_refusal is not None
    assert (under_way.first_refusal.head, under_way.overflows) == (b"no 0", 2)
    assert under_way.earlier_reply is not None
    assert under_way.earlier_reply[1] == b"no 0"
    assert all(reply.closed for reply in replies)


def test_the_generation_before_is_what_the_client_gets_if_the_next_one_fails() -> None:
    """A reply that was read and set aside is given back while another body is sent."""
    under_way, reply = run(), ScriptedReply(200, [])
    under_way.reply, under_way.chunks = reply, [b"first"]
    under_way.set_aside()
    under_way.sending("stub")
    assert under_way.earlier_reply is not None
    assert (under_way.earlier_reply[0].status, under_way.earlier_reply[1]) == (200, b"first")
    assert reply.closed


pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # else it hides what failed


async def test_a_refusal_names_what_is_too_big() -> None:
    """System text above the window is refused with the figures that show it."""
    messages = [{"role": "system", "content": prose(1, 5000)}, {"role": "user", "content": "hi"}]
    plan = await Replica().plan(chat_body(messages), WINDOW)
    assert plan.error is not None
    assert plan.error.status == 400
    assert "system messages" in plan.error.message
    assert str(WINDOW) in plan.error.message


async def test_a_large_fresh_result_is_reported_once() -> None:
    """A newest result of more than 30 % of the room left is reported; when it is no longer the newest it is not."""
    messages = [*coding_session(3, 10), *coding_session(1, 300)[1:]]
    plan = await Replica().plan(chat_body(messages), 12_000)
    assert 0.3 < plan.report.large_result < 1
    later = await Replica().plan(chat_body([*messages, *coding_session(1, 10)[1:]]), 12_000)
    assert later.report.large_result == 0


async def test_fresh_results_are_weighed_alone_and_together() -> None:
    """Each of them may be small and all together large; what is neither is no waste."""
    small = await Replica().plan(chat_body(agent_session(3, 300)), 12_000)
    assert small.report.waste == {}
    together = await Replica().plan(chat_body(agent_session(1, 800, parallel=5)), 12_000)
    assert together.report.waste.keys() == {"fresh_results"}
    assert 3800 < together.report.waste["fresh_results"] < 4500
    alone = await Replica().plan(chat_body(agent_session(1, 4000)), 12_000)
    assert alone.report.waste.keys() == {"fresh_results", "fresh_result"}
    assert alone.report.waste["fresh_result"] == alone.report.waste["fresh_results"]


async def test_a_compaction_counts_what_was_not_needed() -> None:
    """Results that repeat an earlier one are counted when the calls are read, and only then."""
    again = coding_session(24, 40)
    compacted = await Replica().plan(chat_body(again), 6_000)
    assert compacted.report.event
    assert compacted.report.waste["repeated_result"] > 300


async def test_the_first_request_of_a_conversation_is_known() -> None:
    """Its tokens are a share of the window; a later request of the conversation has none."""
    messages = [{"role": "system", "content": prose(1, 3000)}, {"role": "user", "content": prose(2, 3000)}]
    first = (await Replica().plan(chat_body(messages), 8_000)).report
    assert first.first_fill == pytest.approx((first.tokens_before or 0) / 8_000)
    assert first.repeated_prefix is None
    later = [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
    assert (await Replica().plan(chat_body(later), 8_000)).report.first_fill is None


async def test_the_prefix_that_repeats_is_known() -> None:
    """All but the newest round of a conversation that goes on; system text and tools after a compaction."""
    replica = Replica()
    rounds = 12
    report = (await replica.plan(chat_body(agent_session(rounds, 300), tools=AGENT_TOOLS), 8_192)).report
    assert not report.event
    assert report.repeated_prefix == pytest.approx(1 - 1 / (rounds + 1.5), abs=0.03)
    compacted = (await replica.plan(chat_body(agent_session(30, 300), tools=AGENT_TOOLS), 8_192)).report
    assert compacted.event
    fixed = compacted.regions["system"] + compacted.regions["tools"] + compacted.regions.get("format", 0)
    assert compacted.repeated_prefix == pytest.approx(fixed / (compacted.tokens_after or 1), abs=0.01)


@pytest.mark.parametrize("ratio", [1.0, 1.5])
async def test_the_newest_items_are_those_behind_the_models_last_words(ratio: float) -> None:
    """Results that were just fetched, a question just asked; system text goes with every request."""
    system = {"role": "system", "content": prose(1, 50)}
    body = chat_body([*agent_session(5, 300, parallel=2), system])
    plan = await Replica().plan(body, 8192, factor=ratio)
    *_, first, second, _ = plan.view.measured.parsed.items
    assert plan.report.newest_tokens == int(ratio * (first.tokens + second.tokens))


@pytest.mark.parametrize("messages", [[{"role": "system", "content": "s"}], [{"role": "assistant", "content": "a"}]])
async def test_odd_conversations_have_a_report_too(messages: list[dict[str, str]]) -> None:
    """Without a user's message there is no boundary, and nothing breaks."""
    large = [{**message, "content": prose(1, 6_000)} for message in messages]
    report = (await Replica().plan(chat_body(large), 8_192)).report
    assert report.repeated_prefix is None or 0 <= report.repeated_prefix <= 1


async def test_tools_that_were_made_smaller_count_as_the_client_sent_them() -> None:
    """What the stage takes is known without a compaction of the history, too."""
    tools = [
        {"type": "function", "function": {"name": f"t{at}", "description": prose(at, 150), "parameters": {}}}
        for at in range(40)
    ]
    report = (await Replica().plan(chat_body([{"role": "user", "content": "Hi"}], tools=tools), 8_192)).report
    assert report.stages == ("tools",)
    before = await Replica().plan(chat_body([{"role": "user", "content": "Hi"}], tools=tools), 200_000)
    assert report.tokens_before == before.report.tokens_after
    assert report.tokens_removed > 0


async def test_the_files_that_a_view_shows_are_counted() -> None:
    """Each file counts once, however often it was read; what was folded or left the view shows none."""
    asking = structs.replace(POLICY, reads_calls=True)
    session = coding_session(20, 30)
    whole = await Replica(policy=asking).plan(chat_body(session), 100_000)
    assert whole.report.files_read == 5
    small = await Replica(policy=asking).plan(chat_body(session), 5_000)
    assert small.report.outcome == "compacted"
    assert 0 < (small.report.files_read or 0) < 5
    no_calls = await Replica(policy=asking).plan(chat_body([{"role": "user", "content": prose(1, 9_000)}]), 20_000)
    assert no_calls.report.files_read == 0


async def test_without_a_need_calls_are_not_read_for_it() -> None:
    """The number is known if a compaction had to read the calls, and not known below the mark."""
    session = coding_session(20, 30)
    assert (await Replica().plan(chat_body(session), 100_000)).report.files_read is None
    assert (await Replica().plan(chat_body(session), 5_000)).report.files_read is not None


@pytest.mark.parametrize("rounds", [6, 20])
async def test_regions_add_up_to_what_goes_upstream(rounds: int) -> None:
    """A report's regions without the reserve are the view's tokens, whether messages were folded or not."""
    messages = agent_session(rounds, 300)
    messages[0] = {"role": "system", "content": f"{messages[0]['content']}\n\n# Memories\n- likes tabs\n"}
    plan = await Replica().plan(chat_body(messages, tools=AGENT_TOOLS, max_tokens=300), WINDOW)
    found = dict(plan.report.regions)
    assert found.pop("reserve") == 300
    assert sum(found.values()) == plan.tokens
    assert ("summary" in found) == (rounds == 20)
    assert {"system", "tools", "memory", "user", "assistant", "tool"} <= found.keys()
    assert found["tools"] == count_json(AGENT_TOOLS)
    assert plan.report.borrowed == {}


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_system_text_is_the_system_region_wherever_it_stands(api: str) -> None:
    """``system`` and ``instructions`` are as much system text as a system message is, with memories of their own."""
    messages = agent_session(6, 300)
    text = prose(3, 500)
    messages[0] = {"role": "system", "content": f"{text}\n\n# Memories\n- likes tabs\n"}
    body = json.dumps(api_formats.request_body(api, messages, AGENT_TOOLS)).encode()
    plan = await Replica().plan(body, WINDOW, api=api)
    found = dict(plan.report.regions)
    assert 0 <= found["system"] - count_tokens(text) < 8
    assert 4 < found["memory"] < 12
    assert found.get("format", 0) < 400  # with the text by which Messages' models are told how to call tools
    assert found.pop("reserve") > 0
    assert sum(found.values()) == plan.tokens


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_a_refusal_blames_large_system_text_wherever_it_stands(api: str) -> None:
    """A ``system`` or ``instructions`` above the window is what the refusal names."""
    messages = [{"role": "system", "content": prose(1, 5000)}, {"role": "user", "content": "hi"}]
    plan = await Replica().plan(json.dumps(api_formats.request_body(api, messages)).encode(), WINDOW, api=api)
    assert plan.error is not None
    assert "system messages" in plan.error.message


SKILL = f"Base directory for this skill: /skills/tables\n\n# Tables\n\n{prose(11, 150)}"


@pytest.mark.parametrize("api", ["chat", "messages", "responses", "gemini"])
async def test_what_agents_inject_are_regions_of_their_own(api: str) -> None:
    """R003.4: skills, knowledge and related results in system text and messages are counted apart from these."""
    system = f"You are careful.\n\n<available_skills>\n{prose(12, 80)}\n</available_skills>\n"
    asked = f"# Related issues\n\n{prose(13, 60)}\n\n# Task\n\n<knowledge>{prose(14, 70)}</knowledge>\nFix the table."
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "I read the skill."},
        {"role": "user", "content": SKILL},
    ]
    body = json.dumps(api_formats.request_body(api, messages)).encode()
    plan = await Replica().plan(body, WINDOW, api=api)
    found = plan.report.regions
    assert found["skills"] == pytest.approx(count_tokens(system) + count_tokens(SKILL) - 4, abs=8)
    assert found["related"] == pytest.approx(count_tokens(prose(13, 60)), abs=8)
    assert found["knowledge"] == pytest.approx(count_tokens(prose(14, 70)), abs=8)
    assert sum(found.values()) - found["reserve"] == plan.report.tokens_after


async def test_a_skill_beside_the_result_of_a_tool_is_no_part_of_the_result() -> None:
    """Claude Code sends the text of a loaded skill in the message that answers the call for it."""
    loaded = [{"type": "tool_result", "tool_use_id": "t1", "content": "Launching skill: tables"}]
    messages = [
        {"role": "user", "content": "Fix the table."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "Skill", "input": {"skill": "tables"}}],
        },
        {"role": "user", "content": [*loaded, {"type": "text", "text": SKILL}]},
    ]
    body = json.dumps({"model": "m", "max_tokens": 300, "messages": messages}).encode()
    found = (await Replica().plan(body, WINDOW, api="messages")).report.regions
    assert found["skills"] == count_tokens(SKILL)
    assert found["tool"] < 60


async def test_a_skill_that_is_sent_again_is_waste() -> None:
    """R000.15: a compaction counts a skill that stood in an earlier message, and not the first one."""
    session = agent_session(25, 300)
    once = [*session[:-1], {"role": "user", "content": f"{SKILL}"}]
    plan = await Replica().plan(chat_body(once), WINDOW)
    assert plan.report.event
    assert "skill" not in plan.report.waste
    session[1] = {**session[1], "content": f"{session[1]['content']}\n{SKILL}"}
    again = [*session[:-1], {"role": "user", "content": f"Go on.\n{SKILL}"}]
    plan = await Replica().plan(chat_body(again), WINDOW)
    assert plan.report.waste["skill"] == count_tokens(SKILL)
