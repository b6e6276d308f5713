"""Plans over Messages, Responses and Gemini's API: valid for a strict provider, in the window, of the client's own."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from proxy.core.compaction.schedule import CompactionTarget
from proxy.engine.retries import sent_prompt
from tests.stub import Rules, gemini, messages, responses, slices
from tests.support import conversation_strategies
from tests.support.api_formats import kind_of, request_body, text_of, to_messages
from tests.support.engine_fixtures import POLICY, UNSHRUNK, Planned, Replica
from tests.support.plan_checks import is_clip, outline_problems
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, chat_turn, log, prose, tool
from tests.support.view_checks import changed_items

API_FORMATS: dict[str, Any] = {"messages": messages, "responses": responses, "gemini": gemini}
WINDOW = 4096
FIGURES = {"messages": "max_tokens", "chat": "max_tokens", "responses": "max_output_tokens", "gemini": ""}
windows = st.sampled_from([512, 1024, 2048, 4096, 8192, 32768])


@st.composite
def requests(draw: st.DrawFn, api: str, **options: Any) -> bytes:
    """A request's bytes that a strict provider with an endless window accepts."""
    chat = draw(conversation_strategies.conversations(surrogates=False, max_size=20, **options))
    tools = draw(st.one_of(st.just([]), conversation_strategies.tools))
    figure = draw(st.sampled_from([16, 64, 300, 4000]))
    members: dict[str, Any] = {FIGURES[api]: figure}
    if api == "gemini":
        members = {"generationConfig": {"maxOutputTokens": figure}}
    body = request_body(api, chat, tools, **members)
    assume(API_FORMATS[api].judge(body, Rules(window=10**9)).kind == "ok")
    return conversation_strategies.encode(draw, body)


def problems(api: str, body: bytes, plan: Planned, window: int) -> list[str]:
    """One sentence for each promise that *plan* breaks against the client's *body*."""
    if plan.error is not None:
        return [] if plan.error.code == "context_length_exceeded" else [f"refused with {plan.error.code}"]
    if plan.report.outcome == "verbatim" and plan.body != body:
        return ["called verbatim and was changed"]
    verdict = API_FORMATS[api].judge(json.loads(plan.body), Rules(window=window))
    # No request is refused on a guess: the tokens of pictures, and those of encrypted reasoning.
    guessed = b"image" in plan.body or b'"encrypted_content"' in plan.body
    excused = verdict.kind == "ok" or (verdict.kind == "overflow" and guessed)
    found = [] if excused else [f"{verdict.kind} {verdict.message} {verdict.tokens} + {verdict.max_tokens}"]
    return found if plan.body == body else found + outline_problems(body, plan.body) + view_problems(body, plan)


def view_problems(body: bytes, plan: Planned) -> list[str]:
    """What of the view is neither the client's own bytes, nor the carrier, nor a clip."""
    raw, view = slices(body), slices(plan.body)
    was, now = [list(map(json.loads, pieces)) for pieces in (raw, view)]
    new = changed_items(raw, view)
    unclipped = [i for i in new if not any(is_clip(item, now[i]) or gave_way(item, now[i]) for item in was)]
    found = [f"[{i}] is a {kind_of(now[i])} item of ours" for i in unclipped if kind_of(now[i]) != "user"]
    found += ["more than one carrier"] if len(unclipped) > 1 else []
    shown = "\n".join(map(text_of, now))
    users = [text_of(item) for item in was if kind_of(item) == "user"]
    kept = [text for text in (*users[:1], *users[-1:]) if text not in shown and text[:4] not in shown]
    return found + [f"user text {text[:40]!r} is gone" for text in kept]


def gave_way(was: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether *now* is the item of tool results *was* with lines, or heads and ends, in place of some of them."""
    return kind_of(was) == kind_of(now) == "tool" and _frame(was) == _frame(now) != was


def _frame(value: Any) -> Any:
    """What is left of an item without the words of its results."""
    if isinstance(value, list):
        return [_frame(each) for each in value]
    if not isinstance(value, dict):
        return value
    result = value.get("type") in ("tool_result", "function_call_output", "custom_tool_call_output")
    texts = ("content", "output") if result else ("response",)
    return {key: "" if key in texts else _frame(each) for key, each in value.items()}


@pytest.mark.parametrize("api", API_FORMATS)
@settings(max_examples=40, phases=UNSHRUNK)
@given(data=st.data(), window=windows, force=st.booleans())
@pytest.mark.slow
async def test_a_plan_is_valid_and_fits_or_refuses(api: str, data: st.DataObject, window: int, force: bool) -> None:
    """What a strict provider accepts it also accepts as a view that fits by its count, or it is refused for length."""
    body = data.draw(requests(api))
    plan = await Replica().plan(body, window, CompactionTarget(force=force), api=api)
    assert problems(api, body, plan, window) == []


def session(api: str, rounds: int = 20, **members: Any) -> bytes:
    """An agent's request far larger than the window."""
    return json.dumps(request_body(api, agent_session(rounds, 300), AGENT_TOOLS, **members)).encode()


async def view(api: str, body: dict[str, Any], replica: Replica | None = None, **options: Any) -> dict[str, Any]:
    """The parsed body that goes upstream."""
    plan = await (replica or Replica()).plan(json.dumps(body).encode(), WINDOW, api=api, **options)
    assert plan.error is None, plan.error
    found: dict[str, Any] = json.loads(plan.body)
    return found


@pytest.mark.parametrize("api", API_FORMATS)
async def test_a_view_only_grows_between_events(api: str) -> None:
    """Each view begins with the one before unless the plan says event, and a cold start sends the same."""
    chat, replica, before, events = agent_session(40, 300), Replica(), [], 0
    for end in range(2, len(chat) + 1, 2):
        body = json.dumps(request_body(api, chat[:end], AGENT_TOOLS)).encode()
        plan = await replica.plan(body, WINDOW, api=api)
        assert problems(api, body, plan, WINDOW) == []
        sent = slices(plan.body)
        assert sent[: len(before)] == before or plan.report.event
        events += plan.report.event
        before = sent
        if end % 12 == 0:
            assert (await Replica().plan(body, WINDOW, api=api)).body == plan.body
    assert 0 < events < 15


@pytest.mark.parametrize("api", API_FORMATS)
async def test_strict_alternation_survives(api: str) -> None:
    """Where user and assistant strictly alternate, so do they in every view, and no system message is added."""
    chat, replica, compacted = [{"role": "system", "content": "Be brief."}], Replica(), 0
    for turn in range(30):
        chat += chat_turn(turn, 150)
        sent = await view(api, request_body(api, chat[:-1]), replica)
        roles = [item["role"] for item in sent.get("messages") or sent.get("input") or sent["contents"]]
        assert roles[0] == "user"
        assert all(a != b for a, b in pairwise(roles))
        assert {"system", "instructions", "systemInstruction"} & sent.keys()
        compacted += len(roles) < 2 * turn + 1
    assert compacted > 10


async def test_what_a_user_says_beside_results_is_pinned() -> None:
    """An instruction in the same message as tool results survives the fold of its round, word for word."""
    chat = agent_session(20, 300)
    chat.insert(4, {"role": "user", "content": "You must never rename public functions."})
    body = request_body("messages", chat)
    body["messages"] = to_messages(chat, mixed=True)
    assert kind_of(body["messages"][2]) == "tool"
    sent = await view("messages", body)
    assert len(sent["messages"]) < len(body["messages"])
    assert "You must never rename public functions." in text_of(sent["messages"][0])


async def test_thoughts_are_kept_or_go_with_their_round() -> None:
    """A signed thought, empty or not, is in the view exactly as it was or not at all, even where all is clipped."""
    chat = agent_session(20, 300)
    body = request_body("messages", chat)
    for at, message in enumerate(body["messages"]):
        if message["role"] == "assistant":
            thought = "" if at % 4 else f"I think of step {at}. " * 40
            sealed = {"type": "thinking", "thinking": thought, "signature": messages.signature(thought)}
            message["content"].insert(0, sealed)
    for window in (WINDOW, 2048, 1024):
        plan = await Replica().plan(json.dumps(body).encode(), window, api="messages")
        assert plan.error is None
        assert messages.judge(json.loads(plan.body), Rules(window=window)).kind == "ok"


def marked(item: dict[str, Any], **more: str) -> None:
    """Put a cache mark on the last block of *item*."""
    if isinstance(item["content"], str):
        item["content"] = [{"type": "text", "text": item["content"]}]
    item["content"][-1]["cache_control"] = {"type": "ephemeral", **more}


async def test_cache_marks_stay_or_move_to_the_block() -> None:
    """A mark on what stays is kept, one on what goes moves to the block, and there are never more than four."""
    body = request_body("messages", agent_session(20, 300))
    for at, ttl in ((0, "1h"), (6, "5m"), (len(body["messages"]) - 1, "5m")):
        marked(body["messages"][at], ttl=ttl)
    body["system"] = [{"type": "text", "text": body["system"], "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    sent = await view("messages", body)
    carrier = sent["messages"][0]["content"]
    assert [block.get("cache_control", {}).get("ttl") for block in carrier] == ["1h", "5m"]
    assert sent["messages"][-1]["content"][-1]["cache_control"]["ttl"] == "5m"
    assert json.dumps(sent).count("cache_control") == 4
    bare = json.loads(json.dumps(body))
    del bare["messages"][6]["content"][-1]["cache_control"]
    assert "cache_control" not in (await view("messages", bare))["messages"][0]["content"][1]


async def test_a_truncated_result_has_no_mark_that_the_client_moved_on() -> None:
    """An agent marks its two newest turns. A mark that stayed on a truncated result would be a fifth one."""
    replica, chat, cut = Replica(), agent_session(6, 1500), 0
    for end in range(4, len(chat) + 1, 2):
        body = request_body("messages", chat[:end], AGENT_TOOLS)
        turns = [item for item in body["messages"] if item["role"] == "user"]
        for item in turns[-2:]:
            marked(item)
        sent = await view("messages", body, replica)
        cut += sent != body
        assert json.dumps(sent).count('"cache_control"') <= 2
    assert cut > 2


@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_a_clipped_text_has_the_mark_that_the_client_gives_it_now(api: str) -> None:
    """A clip is written once and sent again with the same request, whatever marks that has."""
    replica = Replica()
    body = request_body(api, [{"role": "user", "content": [{"type": "text", "text": prose(1, 6_000)}]}])
    with_mark = json.loads(json.dumps(body))
    marked(with_mark["messages"][0])
    first = await view(api, with_mark, replica)
    assert first["messages"][0]["content"][0].pop("cache_control") == {"type": "ephemeral"}
    assert await view(api, body, replica) == first


async def test_the_output_figure_stays_above_the_budget_for_thinking() -> None:
    """Where the figure is lowered, it stays larger than the thinking it includes."""
    thinking = {"type": "enabled", "budget_tokens": 2000}
    body = request_body("messages", [{"role": "user", "content": prose(1, 1600)}], max_tokens=3900, thinking=thinking)
    plan = await Replica().plan(json.dumps(body).encode(), WINDOW, api="messages")
    assert "output" in plan.report.stages
    assert 2000 < json.loads(plan.body)["max_tokens"] < 3900


THINKING: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 31_999}}, ("thinking", "budget_tokens")),
    ("chat", {"reasoning": {"max_tokens": 31_000, "exclude": True}}, ("reasoning", "max_tokens")),
    ("responses", {"reasoning": {"max_tokens": 31_000, "summary": "auto"}}, ("reasoning", "max_tokens")),
    ("chat", {"enable_thinking": True, "thinking_budget": 30_000}, ("thinking_budget",)),
    (
        "chat",
        {"extra_body": {"google": {"thinking_config": {"thinking_budget": 24_576}}}},
        ("extra_body", "google", "thinking_config", "thinking_budget"),
    ),
]
LARGE_TOOLS = [tool(f"tool_{at}", prose(at, 300), path="Where.") for at in range(20)]


@pytest.mark.parametrize("window", [16_384, 32_768, 40_960, 57_000])
@pytest.mark.parametrize(("api", "members", "path"), THINKING)
async def test_a_budget_for_thinking_is_lowered_with_the_output_figure(
    api: str, members: dict[str, Any], path: tuple[str, ...], window: int
) -> None:
    """An agent's turn whose thinking leaves its window no room is answered, and what is lowered is named."""
    name = FIGURES[api]
    body = request_body(api, agent_session(12, 600), tools=LARGE_TOOLS, **{name: 32_000}, **members)
    plan = await Replica().plan(json.dumps(body).encode(), window, api=api)
    assert plan.error is None
    sent, was = json.loads(plan.body), body
    assert 1_024 < sent[name] <= 32_000
    assert (plan.tokens or 0) + sent[name] <= window
    assert ("output" in plan.report.stages) == (sent[name] < 32_000)
    for key in path:
        sent, was = sent[key], was[key]
    budget: Any = sent
    assert 1_024 <= budget < json.loads(plan.body)[name]
    assert ("thinking" in plan.report.stages) == (budget != was)
    others = [{**json.loads(text), name: 0, path[0]: 0} for text in (json.dumps(body), plan.body)]
    assert others[0].keys() == others[1].keys()
    if len(path) == 2:
        assert {**json.loads(plan.body)[path[0]], path[1]: 0} == {**body[path[0]], path[1]: 0}


@pytest.mark.parametrize("window", [16_384, 40_960])
async def test_geminis_budget_for_thinking_is_lowered_with_the_output_figure(window: int) -> None:
    """Both stand in a member of a member, of which nothing else changes."""
    config = {"temperature": 1.0, "maxOutputTokens": 32_000, "thinkingConfig": {"thinkingBudget": 24_576, "x": 1}}
    body = request_body("gemini", agent_session(12, 600), tools=LARGE_TOOLS, generationConfig=config)
    plan = await Replica().plan(json.dumps(body).encode(), window, api="gemini")
    assert plan.error is None
    sent = json.loads(plan.body)["generationConfig"]
    assert {"output", "thinking"} <= set(plan.report.stages)
    assert 1_024 <= sent["thinkingConfig"]["thinkingBudget"] < sent["maxOutputTokens"] < 32_000
    assert (plan.tokens or 0) + sent["maxOutputTokens"] <= window
    sent["maxOutputTokens"], sent["thinkingConfig"]["thinkingBudget"] = 32_000, 24_576
    assert sent == config


async def test_signed_calls_stay_or_go_with_their_round() -> None:
    """A signed call is in the view exactly as it was or not at all, with or without ids, even where all is clipped."""
    chat = [{**each, "reasoning": "hm"} if each["role"] == "assistant" else each for each in agent_session(20, 300)]
    for window in (WINDOW, 2048, 1024):
        plan = await Replica().plan(json.dumps(request_body("gemini", chat)).encode(), window, api="gemini")
        assert plan.error is None
        sent = json.loads(plan.body)
        assert gemini.judge({"model": "gemini-3-pro", **sent}, Rules(window=window)).kind == "ok"
        assert len(sent["contents"]) < 40


async def test_a_refusal_names_the_output_figure_if_that_is_too_big() -> None:
    """With a figure that may not be lowered the answer's room is named, not the tools beside it."""
    body = request_body("messages", agent_session(3, 100), tools=LARGE_TOOLS, max_tokens=32_000)
    policy = structs.replace(POLICY, lower_output="never")
    plan = await Replica(policy=policy).plan(json.dumps(body).encode(), 32_768, api="messages")
    assert plan.error is not None
    assert "output figure" in plan.error.message
    assert "32000" in plan.error.message
    assert "tools" not in plan.error.message


@pytest.mark.parametrize("mode", ["first", "last"])
@pytest.mark.parametrize("figure", [3_000, 3_900, 2_000, 1_200])
async def test_the_same_request_gets_the_same_output_figure(mode: Any, figure: int) -> None:
    """A request sent again, here or through another replica, is the same bytes; its pressure is of what was sent."""
    replica = Replica(policy=structs.replace(POLICY, lower_output=mode))
    for rounds in (4, 8, 14):
        body = request_body("chat", agent_session(rounds, 300), max_tokens=figure)
        first = await replica.plan(json.dumps(body).encode(), WINDOW)
        again = await replica.plan(json.dumps(body).encode(), WINDOW)
        other = await Replica(replica.book, structs.replace(POLICY, lower_output=mode)).plan(
            json.dumps(body).encode(), WINDOW
        )
        assert first.error is None
        assert first.body == again.body == other.body
        assert again.report.budget == first.report.budget == WINDOW - json.loads(first.body)["max_tokens"]
        assert first.report.pressure is not None
        assert first.report.pressure <= 1


@pytest.mark.parametrize("api", API_FORMATS)
async def test_asking_what_would_be_sent_records_nothing(api: str) -> None:
    """A peek tells the view of the next request and makes it no fact."""
    replica, body = Replica(), session(api)
    peeked = await replica.plan(body, WINDOW, CompactionTarget(dry_run=True), api=api)
    assert replica.book.records() == []  # type: ignore[attr-defined]
    assert not replica.records
    assert (await replica.plan(body, WINDOW, api=api)).body == peeked.body
    assert len(replica.book.records()) == 1  # type: ignore[attr-defined]


MANAGING: list[tuple[str, dict[str, Any], bool]] = [
    ("messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, False),
    ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, False),
    ("messages", {"context_management": {"edits": [{"type": "compact_20260112", "trigger": {"value": 3000}}]}}, True),
    ("responses", {"truncation": "disabled"}, False),
    ("responses", {"truncation": "auto"}, True),
    ("responses", {"context_management": [{"type": "compaction", "compact_threshold": 3000}]}, True),
]


@pytest.mark.parametrize(("api", "members", "left"), MANAGING)
async def test_a_conversation_the_provider_shortens_is_left_to_it(
    api: str, members: dict[str, Any], left: bool
) -> None:
    """Where the client asked the provider to act below the window, nothing is done ahead; after an overflow it is."""
    body, replica = session(api, **members), Replica()
    plan = await replica.plan(body, WINDOW, api=api)
    assert (plan.body == body) == left
    forced = await replica.plan(body, WINDOW, CompactionTarget(force=True), api=api)
    assert len(forced.body) < len(body)
    assert (await replica.plan(body, WINDOW, api=api)).body == forced.body


async def test_a_stored_history_is_never_folded() -> None:
    """Results whose calls the provider keeps all stay; what is too big of them is cut short."""
    outputs = [{"type": "function_call_output", "call_id": f"c{n}", "output": log(n, 900)} for n in range(6)]
    newest = {"role": "user", "content": "Go on."}
    body = {"model": "m", "previous_response_id": "resp_1", "input": [*outputs, newest]}
    plan = await Replica().plan(json.dumps(body).encode(), WINDOW, api="responses")
    assert plan.error is None
    sent = json.loads(plan.body)["input"]
    assert [item.get("call_id") for item in sent] == [item.get("call_id") for item in body["input"]]
    assert set(plan.report.stages) <= {"truncate", "clip"}
    assert plan.report.stages
    assert sent_prompt(plan.view) is None, "nothing can be learned from what is reported for it"


async def test_encrypted_reasoning_and_compaction_items_stay_whole() -> None:
    """Reasoning goes with its call or stays with it, and the provider's own compaction never goes."""
    items: list[dict[str, Any]] = [{"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA" * 50}]
    items.append({"role": "user", "content": "Find the bug."})
    for at in range(24):
        items.append({"type": "reasoning", "id": f"rs_{at}", "summary": [], "encrypted_content": "gAAA" + "x" * 600})
        items.append({"type": "function_call", "call_id": f"c{at}", "name": "run", "arguments": '{"cmd":"ls"}'})
        items.append({"type": "custom_tool_call", "call_id": f"d{at}", "name": "patch", "input": log(at, 60)})
        items.append({"type": "function_call_output", "call_id": f"c{at}", "output": log(at, 150)})
        items.append({"type": "custom_tool_call_output", "call_id": f"d{at}", "output": "done"})
    body = {"model": "m", "input": items, "store": False, "include": ["reasoning.encrypted_content"]}
    plan = await Replica().plan(json.dumps(body).encode(), WINDOW, api="responses")
    sent = json.loads(plan.body)
    assert sent["input"][0] == items[0]
    assert responses.judge(sent, Rules(window=WINDOW)).kind == "ok"
    assert len(sent["input"]) < len(items)
    assert (sent["store"], sent["include"]) == (False, ["reasoning.encrypted_content"])


@pytest.mark.parametrize("size", [20, 9000])
async def test_an_input_that_is_a_text(size: int) -> None:
    """A text passes as it came while it fits; one that is too long becomes a message that lost its middle."""
    body = json.dumps({"model": "m", "input": "First line.\n" + prose(3, size)}).encode()
    plan = await Replica().plan(body, WINDOW, api="responses")
    assert (plan.body == body) == (size == 20)
    sent = json.loads(plan.body)
    assert responses.judge(sent, Rules(window=WINDOW)).kind == "ok"
    assert "First line." in str(sent["input"])


async def test_a_request_without_input_passes() -> None:
    """A stored prompt may bring all of the input."""
    body = b'{"model":"m","prompt":{"id":"pmpt_1"}}'
    plan = await Replica().plan(body, WINDOW, api="responses")
    assert plan.body == body
