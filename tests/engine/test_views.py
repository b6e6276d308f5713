"""Plans: what goes upstream fits, keeps its pairs and its bytes, grows at its end, and is the same on every replica."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from proxy.core.compaction.schedule import CompactionTarget
from proxy.core.compaction.stages import EnabledStages
from proxy.core.conversation import lay_out
from proxy.core.decisions import Policy
from proxy.core.tokens.allocation import Allocation
from proxy.core.tokens.budget import SCALED_BELOW, Buffers
from proxy.engine.retries import sent_prompt
from tests.bench.unread import Counts, replay, work
from tests.stub.tokens import fixed_tokens, message_tokens, request_tokens
from tests.support import conversation_strategies
from tests.support.api_formats import SYSTEMS, text_of
from tests.support.conversation_strategies import growing_conversations, request_bytes, windows
from tests.support.engine_fixtures import (
    POLICY,
    SPARING_RULES,
    UNSHRUNK,
    WINDOW,
    Message,
    Replica,
    chat_body,
    message_slices,
)
from tests.support.plan_checks import message_problems, plan_problems
from tests.support.recorded_conversations import read_all
from tests.support.sample_conversations import (
    AGENT_TASK,
    AGENT_TOOLS,
    SESSIONS,
    agent_round,
    agent_session,
    chat_turn,
    coding_session,
    log,
    prose,
    request_lengths,
    tool,
)

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # else it hides what failed


@settings(max_examples=120, phases=UNSHRUNK)
@given(request_bytes(with_orphans=True, max_size=24), windows, st.booleans())
@pytest.mark.slow
async def test_a_plan_fits_or_refuses(body: bytes, window: int, force: bool) -> None:
    """Whatever comes, a plan is a faithful view that fits by an independent count, or a refusal for length."""
    plan = await Replica().plan(body, window, CompactionTarget(force=force))
    assert plan_problems(body, plan, window) == []


@settings(max_examples=60, phases=UNSHRUNK)
@given(request_bytes(with_orphans=True, max_size=24), st.integers(4096, 32768))
@pytest.mark.slow
async def test_only_what_cannot_shrink_is_refused(body: bytes, window: int) -> None:
    """A request whose system text and tools take less than half the window is not refused."""
    asks = json.loads(body)
    system = sum(message_tokens(message) for message in asks["messages"] if message["role"] in SYSTEMS)
    assume(fixed_tokens(asks) + system < window // 2)
    assume("image_url" not in json.dumps(asks))
    plan = await Replica().plan(body, window)
    assert plan.error is None


@pytest.mark.parametrize("window", [WINDOW, 8192])
async def test_under_the_mark_the_body_is_the_very_same_object(window: int) -> None:
    """While nothing has to go, what goes upstream is the client's own bytes, not a copy."""
    body = b' { "messages" : [ { "role":"user", "content":"caf\\u00e9" } ] , "model":"gpt-4o-mini","x":1.0 } '
    plan = await Replica().plan(body, window)
    assert plan.body is body
    assert plan.report.outcome == "verbatim"


async def test_a_clients_own_orphans_pass() -> None:
    """A broken pair that the client sent is neither repaired nor refused."""
    body = chat_body([{"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "gone", "content": "x"}])
    plan = await Replica().plan(body, WINDOW)
    assert plan.body is body


@pytest.mark.parametrize(("window", "result"), [(8192, 300), (8192, 700), (WINDOW, 300), (32768, 2500)])
@pytest.mark.slow
async def test_an_agent_loop_is_compacted_rarely_and_deeply(window: int, result: int, record_property: Any) -> None:
    """Sixty rounds: each view begins with the one before but at an event, events are rare, the window is well used."""
    replica, before, events, fills = Replica(), [], 0, []
    repeated = sent = 0
    messages = agent_session(0, 0)
    room = window - request_tokens({"messages": messages[:1], "tools": AGENT_TOOLS})
    for at in range(60):
        messages += agent_round(at, result) if at else []
        body = chat_body(messages, tools=AGENT_TOOLS)
        plan = await replica.plan(body, window)
        assert plan_problems(body, plan, window) == []
        view = message_slices(plan.body)
        same = next((i for i, (a, b) in enumerate(zip(before, view, strict=False)) if a != b), len(before))
        assert same == len(before) or plan.report.event, "a view changed without an event"
        events += plan.report.event
        weights = list(map(message_tokens, map(json.loads, view)))
        frame = fixed_tokens({"tools": AGENT_TOOLS})
        repeated += frame + sum(weights[:same]) if at else 0
        sent += frame + sum(weights)
        fills.append((frame + sum(weights)) / window)
        before = view
    growth = request_tokens({"messages": messages})
    assert events <= growth / (0.25 * room) + 1
    assert 0.45 <= sum(fills) / len(fills) <= 0.95
    record_property("events", events)
    record_property("fill", round(sum(fills) / len(fills), 3))
    record_property("repeated_prefix", round(repeated / sent, 3))


@settings(max_examples=25, phases=UNSHRUNK)
@given(growing_conversations())
@pytest.mark.slow
async def test_a_view_only_grows_between_events(case: tuple[list[Message], list[int], int]) -> None:
    """For any growing conversation each view is the one before with more behind it, unless the plan says event."""
    messages, ends, window = case
    replica, before = Replica(), None
    for end in ends:
        plan = await replica.plan(chat_body(messages[:end]), window)
        if plan.error is not None:
            before = None
            continue
        view = message_slices(plan.body)
        if before is not None and not plan.report.event:
            assert view[: len(before)] == before
        before = view


CHANGES: dict[str, dict[str, Any]] = {
    "window": {},
    "output": {"max_tokens": 300},
    "tool": {"tools": [*AGENT_TOOLS, tool("look_up", "Look a word up.", word="The word.")]},
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_figure_moves_no_past_cut(change: str) -> None:
    """A larger window, another output figure or one more tool leaves the view of what was sent before as it was."""
    messages, replica = agent_session(20, 300), Replica()
    before = await replica.view(messages, WINDOW, tools=AGENT_TOOLS)
    assert len(before) < len(messages)
    grown = [*messages, *agent_round(99, 20)]
    members = {"tools": AGENT_TOOLS, **CHANGES[change]}
    after = await replica.view(grown, WINDOW * 4 if change == "window" else WINDOW, **members)
    assert after[: len(before)] == before
    assert len(after) == len(before) + 2


async def test_a_clock_in_the_system_text_moves_no_cut() -> None:
    """A system text that changes with every request changes its own message and nothing behind it."""
    messages, replica = agent_session(20, 300), Replica()

    def at(clock: str, history: list[Message]) -> list[Message]:
        return [{"role": "system", "content": f"It is {clock}."}, *history[1:]]

    before = await replica.view(at("09:59", messages), WINDOW)
    after = await replica.view(at("10:00", [*messages, *agent_round(99, 20)]), WINDOW)
    assert after[0] != before[0]
    assert after[1 : len(before)] == before[1:]


async def test_compacting_now_is_an_event_that_lasts() -> None:
    """A forced compaction is a record like any other: the next request goes on from it."""
    messages, replica = agent_session(8, 300), Replica()
    plan = await replica.plan(chat_body(messages), 5000, CompactionTarget(force=True))
    assert plan.report.event
    view = message_slices(plan.body)
    assert len(view) < len(messages)
    grown = await replica.view([*messages, *agent_round(99, 20)], 5000)
    assert grown[: len(view)] == view


@pytest.mark.parametrize("system", [True, False])
async def test_alternation_survives(system: bool) -> None:
    """Where user and assistant strictly alternate, so do they in every view, and there is no second system message."""
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    replica = Replica()
    compacted = 0
    for turn in range(40):
        messages += chat_turn(turn, 150)
        plan = await replica.plan(chat_body(messages[:-1]), WINDOW)
        roles = [json.loads(piece)["role"] for piece in message_slices(plan.body)]
        compacted += plan.report.outcome == "compacted"
        assert roles.count("system") == system
        spoken = roles[system:]
        assert spoken[0] == "user"
        assert all(a != b for a, b in pairwise(spoken))
    assert compacted > 10


@settings(max_examples=25, phases=UNSHRUNK)
@given(growing_conversations())
@pytest.mark.slow
async def test_no_system_message_is_added(case: tuple[list[Message], list[int], int]) -> None:
    """A view holds exactly the system messages the client sent, in order."""
    messages, _, window = case
    plan = await Replica().plan(chat_body(messages), window)
    assume(plan.error is None)
    raw, view = (
        [piece for piece in message_slices(body) if json.loads(piece)["role"] in SYSTEMS]
        for body in (chat_body(messages), plan.body)
    )
    assert view == raw


async def test_images_of_an_anchored_message_move_with_it() -> None:
    """A task that is folded into the block keeps its image, as a part of the carrier."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo", "detail": "low"}}
    first = {"role": "user", "content": [{"type": "text", "text": "What is in this picture?"}, image]}
    chat = [m for turn in range(20) for m in chat_turn(turn, 150)][:-1]
    plan = await Replica().plan(chat_body([first, {"role": "assistant", "content": "A pond."}, *chat]), WINDOW)
    carrier = json.loads(message_slices(plan.body)[0])
    assert image in carrier["content"]
    assert "What is in this picture?" in text_of(carrier)


async def test_an_output_figure_is_lowered_before_anything_is_dropped() -> None:
    """A figure of nearly the whole window is spliced down in place; with lower_output never, it is respected."""
    messages = [{"role": "user", "content": prose(1, 2000)}]
    body = chat_body(messages, max_tokens=3900, top_p=1)
    plan = await Replica().plan(body, WINDOW)
    assert "output" in plan.report.stages
    assert plan_problems(body, plan, WINDOW) == []
    assert message_slices(plan.body) == message_slices(body)
    assert json.loads(plan.body)["max_tokens"] >= 1024
    stubborn = await Replica(policy=structs.replace(POLICY, lower_output="never")).plan(body, WINDOW)
    assert stubborn.error is not None or json.loads(stubborn.body)["max_tokens"] == 3900


async def test_only_guesses_in_the_view_excuse_it() -> None:
    """An image of unknown size that was folded away does not let a view that is too big go upstream."""
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    seen = [
        {"role": "user", "content": [{"type": "text", "text": "See."}, image]},
        {"role": "assistant", "content": "."},
    ]
    newest = [
        {"role": "user", "content": "ok " * 20},
        *({"role": "tool", "tool_call_id": str(i), "content": "x " * 60} for i in range(9)),
    ]
    messages = [{"role": "user", "content": "Begin."}, *seen, *seen, *newest]
    body = chat_body(messages, max_tokens=100)
    for window in range(256, 800, 32):
        plan = await Replica().plan(body, window, CompactionTarget(force=True))
        assert plan_problems(body, plan, window) == []


async def test_a_lone_surrogate_in_the_history_is_survived() -> None:
    """Half a surrogate pair, which no record could hold, is replaced in the block and untouched elsewhere."""
    messages = [{"role": "user", "content": "cut \ud83d off"}, *agent_session(20, 300)[2:]]
    messages.append({"role": "user", "content": "and \udc00 again"})
    replica = Replica()
    plan = await replica.plan(chat_body(messages), WINDOW)
    assert plan.report.outcome == "compacted"
    assert message_problems(chat_body(messages), plan.body) == []
    assert len(replica.book.records()) == 1  # type: ignore[attr-defined]


async def test_twice_the_window_in_one_message() -> None:
    """A pasted log and a tool result that are each larger than the window lose their middle, and the rest stays."""
    for newest in ([{"role": "user", "content": log(5, 2 * WINDOW)}], agent_round(7, 2 * WINDOW)):
        body = chat_body([*agent_session(3, 200), *newest])
        plan = await Replica().plan(body, WINDOW)
        assert plan_problems(body, plan, WINDOW) == []
        assert request_tokens(json.loads(plan.body)) > WINDOW // 3, "far more was cut than had to be"


def test_the_strategy_of_growing_conversations_makes_places() -> None:
    """The lengths taken as requests in these tests are the places the layout finds."""
    messages = SESSIONS["agent"]
    assert len(request_lengths(messages)) == 41
    assert lay_out(()).count == 0


async def test_old_results_give_way_before_anything_is_folded() -> None:
    """Where repeated and old results are enough, a line stands for each, every round stays, and so it does later."""
    messages, replica = coding_session(18, 100), Replica(policy=Policy(SPARING_RULES))
    plan = await replica.plan(chat_body(messages), 12_000)
    assert plan.report.stages == ("dedup", "prune")
    view = message_slices(plan.body)
    assert len(view) == len(messages)
    assert plan_problems(chat_body(messages), plan, 12_000) == []
    changed = [
        json.loads(raw)["content"]
        for raw, own in zip(view, message_slices(chat_body(messages)), strict=True)
        if raw != own
    ]
    assert all(text.startswith(("[Left out: ", "[Old ")) for text in changed)
    assert any("mod0.py" in text for text in changed)
    grown = await replica.view([*messages, *coding_session(19, 100)[-2:]], 12_000)
    assert grown[: len(view)] == view


async def test_a_fold_after_a_mild_event_digests_the_originals() -> None:
    """What gave way to a line is in the block as the client sent it, and no line of ours is."""
    messages, replica = coding_session(40, 100), Replica(policy=Policy(SPARING_RULES))
    seen = set()
    for end in request_lengths(messages):
        plan = await replica.plan(chat_body(messages[:end]), 12_000)
        assert plan_problems(chat_body(messages[:end]), plan, 12_000) == []
        seen |= set(plan.report.stages)
    assert {"prune", "fold"} <= seen
    blocks = [record.block for record in replica.book.records() if record.block]  # type: ignore[attr-defined]
    assert blocks
    assert all("[Old " not in block and "[Left out" not in block for block in blocks)
    assert any("value_1" in block for block in blocks)


@settings(max_examples=25, phases=UNSHRUNK)
@given(conversation_strategies.agent_sessions(max_rounds=30), st.sampled_from([1500, 3000, 6000]))
@pytest.mark.slow
async def test_an_agents_view_only_grows_between_events(messages: list[Message], window: int) -> None:
    """Coding sessions fit at every request, cold and watched alike; between events the view grows at its end."""
    replica = Replica()
    before: list[bytes] = []
    for end in request_lengths(messages):
        body = chat_body(messages[:end])
        plan = await replica.plan(body, window)
        assert plan_problems(body, plan, window) == []
        if plan.error is None:
            view = message_slices(plan.body)
            assert plan.report.event or view[: len(before)] == before
            before = view
    assert (await Replica().plan(body, window)).body == plan.body


USUAL = Buffers(reserve=16_000, warning=24_000, auto_compact=12_000, blocking=3_000)
LARGE_TOOLS = [tool(f"tool_{at}", prose(at, 900), path="Where.") for at in range(18)]


@pytest.mark.parametrize(
    ("window", "tools"), [(4096, []), (8192, AGENT_TOOLS), (32_768, AGENT_TOOLS), (32_768, LARGE_TOOLS)]
)
@pytest.mark.slow
async def test_buffers_made_for_large_windows_work_in_small_ones(window: int, tools: list[Message]) -> None:
    """With the usual buffers a long session is answered to its end, compacted rarely, and keeps them free."""
    policy = structs.replace(POLICY, buffers=USUAL)
    replica, events, fills = Replica(policy=policy), 0, []
    messages = agent_session(0, 0)
    for at in range(40):
        messages += agent_round(at, window // 24) if at else []
        body = chat_body(messages, tools=tools) if tools else chat_body(messages)
        plan = await replica.plan(body, window)
        assert plan_problems(body, plan, window) == []
        assert plan.error is None
        events += plan.report.event
        fills.append((plan.tokens or 0) / window)
    fixed = request_tokens({"messages": [], "tools": tools}) / window
    scale = min(1.0, (1 - fixed) * window / SCALED_BELOW)
    assert max(fills) * window <= window - scale * 19_000 + 3 * window / 64
    assert 1 <= events <= 20
    assert fixed < 0.55 or sum(fills) / len(fills) > fixed + 0.05


async def test_what_the_provider_counted_compacts_before_it_refuses() -> None:
    """A conversation whose exact count so far leaves no room is compacted ahead, though our own count still fits."""
    messages, replica = agent_session(6, 400), Replica()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo", "detail": "low"}}
    messages[1] = {"role": "user", "content": [{"type": "text", "text": AGENT_TASK}, image]}
    plan = await replica.plan(chat_body(messages), WINDOW)
    assert plan.report.outcome == "verbatim"
    sent = sent_prompt(plan.view)
    assert sent is not None
    assert not sent.is_text, "the factor learns nothing from pictures, so only the conversation's own count tells"
    replica.learned.learn_usage(sent, plan.tokens + 1500)
    grown = [*messages, *agent_round(50, 20)]
    after = await replica.plan(chat_body(grown), WINDOW)
    assert after.report.event
    assert after.report.outcome == "compacted"
    assert (after.report.tokens_after or 0) <= WINDOW - WINDOW // 8
    again = await replica.plan(chat_body([*grown, *agent_round(51, 20)]), WINDOW)
    assert message_slices(again.body)[: len(message_slices(after.body))] == message_slices(after.body), (
        "a record like any other"
    )
    other = await Replica().plan(chat_body(grown), WINDOW)
    assert other.report.outcome == "verbatim", "our own count has no reason"


@settings(max_examples=40, phases=UNSHRUNK)
@given(request_bytes(with_orphans=True, max_size=24), windows)
@pytest.mark.slow
async def test_an_allocation_refuses_nothing(body: bytes, window: int) -> None:
    """Whatever the shares, a plan is a faithful view that fits, and is refused only where it is without shares."""
    for shares in (Allocation(recent=1.0), Allocation(system=0.5, reserve=0.5)):
        replica = Replica(policy=structs.replace(POLICY, rules=replace(POLICY.rules, allocation=shares)))
        plan = await replica.plan(body, window)
        assert plan_problems(body, plan, window) == []
        if plan.error is not None:
            assert (await Replica().plan(body, window)).error is not None


@pytest.mark.parametrize(("mode", "stages"), [("first", ("output",)), ("last", ("fold",)), ("never", ("fold",))])
async def test_when_an_output_figure_is_lowered(mode: Any, stages: tuple[str, ...]) -> None:
    """Where messages and output do not fit together: first lowers the figure, last folds before it, never folds."""
    body = chat_body(agent_session(6, 300), max_tokens=2000)
    plan = await Replica(policy=structs.replace(POLICY, lower_output=mode)).plan(body, WINDOW)
    assert plan.report.stages == stages
    assert plan_problems(body, plan, WINDOW) == []
    assert (json.loads(plan.body)["max_tokens"] < 2000) == (mode == "first")
    assert (message_slices(plan.body) == message_slices(body)) == (mode == "first")


async def test_json_in_results_loses_its_white_space_before_anything_else() -> None:
    """That alone is enough here: every value is there, and the next request repeats the very same bytes."""
    messages = agent_session(0, 0)
    for at in range(8):
        rows = [{"id": at * 100 + row, "name": f"row {row}", "tags": ["a", "b"]} for row in range(12)]
        spoken, result = agent_round(at, 1)
        messages += [spoken, {**result, "content": json.dumps(rows, indent=8)}]
    window = int(request_tokens({"messages": messages}) * 1.05)
    replica = Replica()
    plan = await replica.plan(chat_body(messages), window)
    assert plan.report.stages == ("minify",)
    view = json.loads(plan.body)["messages"]
    assert len(view) == len(messages)
    for before, after in zip(messages, view, strict=True):
        if before["role"] == "tool":
            assert json.loads(after["content"]) == json.loads(before["content"])
            assert "\n" not in after["content"]
        else:
            assert after == before
    more = [*messages, {"role": "assistant", "content": "well"}, {"role": "user", "content": "go on"}]
    later = await replica.plan(chat_body(more), window)
    assert message_slices(later.body)[: len(messages)] == message_slices(plan.body)
    off = structs.replace(POLICY, rules=replace(POLICY.rules, enabled_stages=EnabledStages(minify=False)))
    assert "minify" not in (await Replica(policy=off).plan(chat_body(messages), window)).report.stages


@pytest.mark.parametrize("drop", [True, False])
async def test_without_folds_old_rounds_are_dropped(drop: bool) -> None:
    """Many small messages: with folds turned off a note stands for the oldest; with both off nothing can help."""
    messages = [{"role": "system", "content": "s"}, *(m for turn in range(200) for m in chat_turn(turn, 12))][:-1]
    policy = structs.replace(POLICY, rules=replace(POLICY.rules, enabled_stages=EnabledStages(fold=False, drop=drop)))
    plan = await Replica(policy=policy).plan(chat_body(messages), 2048)
    assert (plan.error is None) == drop
    if drop:
        assert plan.report.stages == ("drop",)
        assert request_tokens(json.loads(plan.body)) < 2048
        assert json.loads(plan.body)["messages"][-3:] == messages[-3:]


@pytest.mark.slow
@pytest.mark.shared("transcripts")
async def test_no_unread_result_is_cut_that_would_fit() -> None:
    """In recorded conversations, results at the end stay whole wherever older things can give way for them."""
    counts = Counts()
    for recording, window, ends in work(read_all(), 3, (3072, 6144, 16_384)):
        await replay(recording, window, ends, counts)
    assert counts.requests > 100
    assert counts.needless == []
