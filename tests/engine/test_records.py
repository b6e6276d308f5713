"""Events: the same on every replica, found again, kept apart, written anew where they are damaged."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from msgspec import structs

from proxy.core.compaction.prune import PrunePassRules
from proxy.core.compaction.schedule import CompactionTarget
from proxy.core.compaction.stages import CompactionRules, EnabledStages
from proxy.core.decisions import Policy
from proxy.core.models import Route
from proxy.core.request import Options, Request
from proxy.core.tokens.budget import Marks, Shares
from proxy.engine.ports import Summary, SummaryRequest
from proxy.engine.records import LARGE_LOOK
from proxy.store import open_store
from proxy.tasks import Tasks
from tests.support.conversation_strategies import growing_conversations
from tests.support.engine_fixtures import (
    POLICY,
    UNSHRUNK,
    WINDOW,
    DictRecords,
    Message,
    Replica,
    chat_body,
    message_slices,
)
from tests.support.sample_conversations import AGENT_TOOLS, SESSIONS, agent_round, agent_session, request_lengths

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # else it hides what failed


@settings(max_examples=25, phases=UNSHRUNK)
@given(growing_conversations())
@pytest.mark.slow
async def test_replicas_agree(case: tuple[list[Message], list[int], int]) -> None:
    """Two replicas that take turns, and one that starts cold with their records, send the same view."""
    messages, ends, window = case
    book = DictRecords()
    two = [Replica(book), Replica(book)]
    for at, end in enumerate(ends):
        body = chat_body(messages[:end])
        plan = await two[at % 2].plan(body, window)
        again = await two[1 - at % 2].plan(body, window)
        cold = await Replica(book).plan(body, window)
        assert plan.body == again.body == cold.body


@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("members", [{}, {"max_tokens": 64}, {"tools": AGENT_TOOLS}], ids=["plain", "figure", "tools"])
@pytest.mark.slow
async def test_a_cold_start_equals_having_watched(session: str, members: dict[str, Any]) -> None:
    """With no record at all, a proxy that sees a conversation first at its n-th request sends what others send."""
    messages, replica = SESSIONS[session], Replica()
    for end in request_lengths(messages):
        body = chat_body(messages[:end], **members)
        watched = await replica.plan(body, WINDOW)
        cold = await Replica().plan(body, WINDOW)
        assert cold.body == watched.body
    assert len(replica.book.records()) > 1  # type: ignore[attr-defined]


async def test_another_text_policy_adopts_the_record_that_was_sent() -> None:
    """A replica with other shares repeats the recorded block byte for byte instead of writing its own."""
    other = Policy(CompactionRules(Marks(), Shares(pins=0.05, digest=0.05, steps=0.01), EnabledStages()))
    book, messages = DictRecords(), agent_session(20, 300)
    sent = await Replica(book).view(messages, WINDOW)
    assert await Replica(book, other).view(messages, WINDOW) == sent
    assert await Replica(DictRecords(), other).view(messages, WINDOW) != sent


async def test_a_smaller_window_is_a_new_event() -> None:
    """A window that became smaller compacts again, and going back undoes nothing."""
    messages, replica = agent_session(20, 300), Replica()
    before = await replica.view(messages, WINDOW)
    plan = await replica.plan(chat_body(messages), WINDOW // 2)
    assert plan.report.event
    smaller = message_slices(plan.body)
    assert len(smaller) < len(before)
    assert await replica.view(messages, WINDOW) == smaller


@pytest.mark.parametrize("edited", [1, 8, -3])
async def test_a_fork_does_not_use_the_others_record(edited: int) -> None:
    """An edited message makes another chain: its view is that of a proxy that never saw the original."""
    messages = agent_session(20, 300)
    fork = [dict(message) for message in messages]
    fork[edited]["content"] = "Something else was said here, about ledger_777."
    replica = Replica()
    original = await replica.view(messages, WINDOW)
    assert await replica.view(fork, WINDOW) == await Replica().view(fork, WINDOW)
    assert await replica.view(messages, WINDOW) == original


async def test_a_regenerated_branch_keeps_the_common_past() -> None:
    """Another answer to the same request goes on from the event before it."""
    messages, replica = agent_session(20, 300), Replica()
    view = await replica.view(messages, WINDOW)
    branches = [await replica.view([*messages, *agent_round(seed, 30)], WINDOW) for seed in (201, 202)]
    assert [branch[: len(view)] for branch in branches] == [view, view]
    assert branches[0] != branches[1]


@pytest.mark.parametrize("reverse", [False, True], ids=["left out", "added"])
async def test_a_conversation_with_and_without_its_system_text_has_two_records(reverse: bool) -> None:
    """System text changes no prefix hash but each index: a record made with it says nothing of items without it."""
    messages = agent_session(20, 300)
    both = [messages, [message for message in messages if message["role"] != "system"]]
    assert len(both[1]) == len(messages) - 1
    if reverse:
        both.reverse()
    replica = Replica()
    first = await replica.view(both[0], WINDOW)
    assert await replica.view(both[1], WINDOW) == await Replica().view(both[1], WINDOW)
    assert await replica.view(both[0], WINDOW) == first


async def test_tenants_and_labels_share_nothing() -> None:
    """The same conversation of two tenants, or under two labels, is recorded under keys without a common part."""
    book, body = DictRecords(), chat_body(agent_session(20, 300))
    for tenant, label in ((b"a" * 32, ""), (b"b" * 32, ""), (b"a" * 32, "x")):
        await Replica(book).plan(body, WINDOW, tenant=tenant, options=Options(conversation=label))
    keys = list(book.values)
    assert len(keys) == 3
    assert len({key[1] for key in keys}) == len({key[3] for key in keys}) == 3


async def test_the_memory_store_holds_the_records(tmp_path: Path) -> None:
    """Over the real store in memory an engine that has just started sends the same views as one that knows all."""
    faults: list[str] = []
    tasks = Tasks(lambda name, error: faults.append(name))
    store = await open_store(
        "memory", directory=tmp_path, key=b"k" * 32, spawn=tasks.spawn, warn=lambda event, facts: faults.append(event)
    )
    try:
        old = Replica(store.records)
        messages = agent_session(30, 300)
        for end in request_lengths(messages):
            views = [await replica.view(messages[:end], WINDOW) for replica in (old, Replica(store.records))]
            assert views[0] == views[1]
        assert store.state().hits > 0
    finally:
        await store.close()
        await tasks.finish(1.0)
    assert faults == []


async def test_a_record_that_the_cache_dropped_is_read_from_the_store_again(tmp_path: Path) -> None:
    """A process alone on its store asks it for nothing it wrote itself, until its cache has lost a record."""
    tasks = Tasks(lambda name, error: None)
    store = await open_store(
        "memory", directory=tmp_path, key=b"k" * 32, spawn=tasks.spawn, warn=lambda event, facts: None
    )
    try:
        replica, messages = Replica(store.records), agent_session(30, 300)
        lengths = list(request_lengths(messages))
        for end in lengths[:-1]:
            await replica.view(messages[:end], WINDOW)
        assert replica.records
        assert store.state().hits == 0
        replica.records.clear()
        await replica.view(messages[: lengths[-1]], WINDOW)
        assert store.state().hits == 1
    finally:
        await store.close()
        await tasks.finish(1.0)


class CountedReads(DictRecords):
    """Records that others may write, which counts how often they are read; ``state`` is their version."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.state: tuple[int, ...] | None = (1,)

    def version(self) -> tuple[int, ...] | None:
        return self.state

    async def newest(self, tenant: bytes, root: bytes, route: str, chains: Sequence[bytes]) -> tuple[int, bytes] | None:
        self.reads += 1
        return await super().newest(tenant, root, route, chains)


async def test_a_store_that_nobody_wrote_to_is_read_once_for_a_conversation() -> None:
    """Once somebody has written, or if that cannot be told, every request reads it."""
    records, messages = CountedReads(), agent_session(14, 300)
    replica, lengths = Replica(records), list(request_lengths(messages))
    window = 16 * WINDOW  # nothing is compacted; all of it is above the level from which the store is asked
    for end in lengths[-8:-4]:
        await replica.plan(chat_body(messages[:end]), window // 8)
    assert records.reads == 1
    records.state = (2,)
    for end in lengths[-4:-2]:
        await replica.plan(chat_body(messages[:end]), window // 8)
    assert records.reads == 2
    records.state = None
    for end in lengths[-2:]:
        await replica.plan(chat_body(messages[:end]), window // 8)
    assert records.reads == 4


async def test_a_compaction_further_back_than_the_last_look_is_found() -> None:
    """A client went back, was compacted there, and goes on from where it had been: with its record."""
    replica, messages, window = Replica(CountedReads()), agent_session(14, 300), 2 * WINDOW
    lengths = list(request_lengths(messages))
    longest = chat_body(messages[: lengths[-1]])
    assert (await replica.plan(longest, window)).body == longest
    behind = await replica.plan(chat_body(messages[: lengths[-4]]), window, CompactionTarget(force=True))
    assert behind.report.event
    assert (await replica.plan(longest, window)).body != longest


async def test_a_look_at_the_same_words_behind_other_system_items_says_nothing() -> None:
    """System text changes no prefix hash: that there is no record with it is not that there is none without it."""
    replica, messages, window = Replica(CountedReads()), agent_session(14, 300), 2 * WINDOW
    lengths, others = list(request_lengths(messages)), [message for message in messages if message["role"] != "system"]
    fewer = len(messages) - len(others)
    behind = chat_body(others[: lengths[-4] - fewer])
    assert (await replica.plan(behind, window, CompactionTarget(force=True))).report.event
    with_system = chat_body(messages[: lengths[-1]])
    assert (await replica.plan(with_system, window)).body == with_system
    longest = chat_body(others[: lengths[-1] - fewer])
    assert (await replica.plan(longest, window)).body != longest


@pytest.mark.parametrize("kind", ["embedded", "memory"])
async def test_what_another_process_wrote_is_found(kind: str, tmp_path: Path) -> None:
    """Two engines on one store send the same, request by request, although each reads it only after a write."""
    tasks = Tasks(lambda name, error: None)
    stores = [
        await open_store(kind, directory=tmp_path, key=b"k" * 32, spawn=tasks.spawn, warn=lambda event, facts: None)
        for _ in range(1 + (kind == "embedded"))
    ]
    try:
        replicas = [Replica(store.records) for store in stores] * (3 - len(stores))
        messages = agent_session(40, 300)
        for number, end in enumerate(request_lengths(messages)):
            order = replicas if number % 2 else replicas[::-1]
            views = [await replica.view(messages[:end], WINDOW) for replica in order]
            assert views[0] == views[1]
        assert sum(store.state().hits for store in stores) > (0 if kind == "embedded" else -1)
    finally:
        for store in stores:
            await store.close()
        await tasks.finish(1.0)


async def test_a_damaged_record_is_written_anew() -> None:
    """Garbage under a record's key is as good as no record."""
    book, messages = DictRecords(), agent_session(20, 300)
    view = await Replica(book).view(messages, WINDOW)
    book.values = dict.fromkeys(book.values, b"\xc1 garbage")
    assert await Replica(book).view(messages, WINDOW) == view


class Forgetful(DictRecords):
    """A recorder that is so slow that a process has forgotten every event by the time it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: MutableMapping[Any, Any] = {}

    async def newest(self, tenant: bytes, root: bytes, route: str, chains: Sequence[bytes]) -> tuple[int, bytes] | None:
        found = await super().newest(tenant, root, route, chains)
        self.forgotten.clear()
        return found


async def test_a_record_may_be_evicted_while_the_store_is_read() -> None:
    """The memory of events is bounded: what other requests push out of it meanwhile is still this request's view."""
    book, messages = Forgetful(), agent_session(22, 300)
    replica = Replica(book)
    before = await replica.view(messages[:-2], WINDOW)
    book.forgotten = replica.records
    assert (await replica.view(messages, WINDOW))[: len(before)] == before
    assert not replica.records


class ReadySummaries:
    """A ready summary for every request, each costlier than the one before."""

    inline = False

    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def ready(self, request: SummaryRequest) -> Summary | None:
        self.lengths.append(request.prefix.length)
        return Summary("## Goal\n- The tests are to pass.", request.prefix.length, 1000 * len(self.lengths))

    async def write(self, request: SummaryRequest) -> Summary | None:
        return await self.ready(request)

    def is_due(self, request: Request, route: Route, since: bytes) -> bool:
        return False

    def prepare(self, request: SummaryRequest) -> None:
        raise AssertionError(request)

    def sent(self, tenant: bytes, tokens: int) -> None:
        raise AssertionError(tokens)

    def limited(self, tenant: bytes) -> None:
        raise AssertionError(tenant)


async def test_a_block_that_stays_keeps_its_summary_and_its_cost() -> None:
    """If a compaction leaves the block as it was, no summary is written, and the cost of the block stays."""
    summaries = ReadySummaries()
    small_block = replace(POLICY.rules, shares=Shares(digest=0.10, steps=0.03))
    replica = Replica(summaries=summaries, policy=structs.replace(POLICY, rules=small_block))
    messages: list[Message] = []
    for at, number in enumerate([*range(12), *[9, 10, 11] * 8]):
        arguments = json.dumps({"file_path": f"src/mod{number}.py"})
        call = {"id": f"c{at}", "type": "function", "function": {"name": "Read", "arguments": arguments}}
        text = "\n".join(f"{n}\tvalue_{n} = compute({n}, {number})" for n in range(100))
        messages.append({"role": "assistant", "content": f"Step {at}.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{at}", "content": text})
    messages.insert(0, {"role": "user", "content": "Make the tests pass. Never touch vendor/."})
    for end in request_lengths(messages):
        await replica.plan(chat_body(messages[:end]), 12_000)
    records = replica.book.records()  # type: ignore[attr-defined]
    unchanged = [(old, new) for old, new in pairwise(records) if new.block and new.block == old.block]
    assert unchanged
    assert all(
        "The tests are to pass." in new.block and new.summary_spent == old.summary_spent > 0 for old, new in unchanged
    )
    assert len(summaries.lengths) == len({record.block for record in records if record.block})


async def test_no_summary_is_paid_for_where_nothing_would_hold_it() -> None:
    """What is dropped bare has no room for a summary: none is asked for, even by a request that waits for one."""
    summaries, rules = ReadySummaries(), POLICY.rules
    bare = structs.replace(
        POLICY, rules=replace(rules, prune_pass=PrunePassRules(None, None), enabled_stages=EnabledStages(fold=False))
    )
    plan = await Replica(policy=bare, summaries=summaries).plan(
        chat_body(agent_session(40, 300)), WINDOW, CompactionTarget(force=True, wait_for_summary=True)
    )
    assert "drop" in plan.report.stages
    assert summaries.lengths == []


class Waiting(ReadySummaries):
    """Summaries that are due whenever they are asked for, none of which is ever there."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[int] = []
        self.begun = asyncio.Event()
        self.tokens = 0
        self.paused = 0

    async def ready(self, request: SummaryRequest) -> Summary | None:
        return None

    def is_due(self, request: Request, route: Route, since: bytes) -> bool:
        return True

    def prepare(self, request: SummaryRequest) -> None:
        self.prepared.append(request.prefix.length)
        self.begun.set()

    def sent(self, tenant: bytes, tokens: int) -> None:
        self.tokens += tokens

    def limited(self, tenant: bytes) -> None:
        self.paused += 1


async def _pressures(
    replica: Replica, waiting: Waiting, messages: list[Message], window: int
) -> list[tuple[float, bool, int]]:
    """Each request's pressure, whether it was compacted anew, and how many summaries had been begun behind it."""
    found = []
    for end in request_lengths(messages):
        body = chat_body(messages[:end])
        plan = await replica.plan(body, window)
        replica.compactions.answered(plan.view, 200)
        assert plan.report.pressure is not None
        found.append((plan.report.pressure, plan.report.event, len(waiting.prepared)))
    return found


async def test_a_summary_is_begun_above_the_soft_mark_for_the_next_event() -> None:
    """Below the soft mark none is begun; above it one of what an event would fold now, which grows until it does."""
    waiting = Waiting()
    talked = await _pressures(Replica(summaries=waiting), waiting, agent_session(24, 300), WINDOW)
    begun = [
        pressure for (pressure, _, after), (_, _, before) in zip(talked[1:], talked, strict=False) if after > before
    ]
    assert begun
    assert min(begun) > 0.55
    assert [pressure for pressure, event, _ in talked if event], "no event was ever needed"
    assert all(after == 0 for pressure, _, after in talked[:3] if pressure < 0.5)
    assert waiting.prepared == sorted(waiting.prepared)
    assert waiting.tokens > WINDOW


async def test_a_chat_that_keeps_more_than_the_soft_mark_begins_its_summary_later() -> None:
    """A view that is past the mark right after its compaction waits until half of the way to the next one."""
    waiting = Waiting()
    messages: list[Message] = [{"role": "user", "content": "Let us plan a trip."}]
    for at in range(200):
        messages.append({"role": "assistant", "content": f"Stop number {at} is a village with {at * 7} people."})
        messages.append({"role": "user", "content": f"Then {at * 3} kilometres to the lake, please."})
    talked = await _pressures(Replica(summaries=waiting), waiting, messages, WINDOW)
    first = next(at for at, (_, event, _) in enumerate(talked) if event)
    begun = [
        pressure
        for (pressure, _, after), (_, _, before) in zip(talked[first + 1 :], talked[first:], strict=False)
        if after > before
    ]
    assert talked[first][0] > 0.6
    assert begun
    assert min(begun) > 0.75


async def test_no_summary_is_begun_where_doubles_can_go() -> None:
    """Where what later results repeat makes enough room by itself, no model is asked, however full it is."""
    waiting = Waiting()
    messages: list[Message] = [{"role": "user", "content": "Make the tests pass."}]
    for at in range(20):
        number = at % 3
        given = json.dumps({"file_path": f"src/mod{number}.py"})
        call = {"id": f"c{at}", "type": "function", "function": {"name": "Read", "arguments": given}}
        text = "\n".join(f"{n}\tvalue_{n} = compute({n}, {number})" for n in range(60))
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{at}", "content": text})
    talked = await _pressures(Replica(summaries=waiting), waiting, messages, 16_000)
    assert max(pressure for pressure, _, _ in talked) > 0.7
    assert talked[-1][1] or talked[-2][1], "it never came to a compaction"
    assert waiting.prepared == []


@pytest.mark.parametrize(("size", "on_loop"), [(LARGE_LOOK // 4, True), (LARGE_LOOK * 2, False)])
async def test_the_look_ahead_of_a_large_conversation_runs_on_a_thread(size: int, on_loop: bool) -> None:
    """What the next compaction would fold is found beside other requests; of a small one, at once."""
    ran: set[str] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            ran.add(frame.f_code.co_name)

    waiting = Waiting()
    replica, body = Replica(summaries=waiting), chat_body(agent_session(size // 1_300, 400))
    tokens = (await Replica().plan(body, 10**6)).report.tokens_before
    assert tokens is not None
    plan = await replica.plan(body, int(tokens / 0.76))
    assert not plan.report.event
    sys.setprofile(watch)
    try:
        replica.compactions.answered(plan.view, 200)
        await asyncio.wait_for(waiting.begun.wait(), 60)
    finally:
        sys.setprofile(None)
    assert ("newest_compaction" in ran) is on_loop


async def test_a_limit_and_an_error_begin_nothing() -> None:
    """A 429 pauses the client's summaries; of what was not answered nothing is counted and nothing is begun."""
    waiting = Waiting()
    replica, body = Replica(summaries=waiting), chat_body(agent_session(9, 600))
    plan = await replica.plan(body, WINDOW)
    for status in (429, 500, 400):
        replica.compactions.answered(plan.view, status)
    assert (waiting.paused, waiting.tokens, waiting.prepared) == (1, 0, [])
    replica.compactions.answered(plan.view, 200)
    assert (waiting.paused, waiting.tokens) == (1, plan.report.tokens_after)
