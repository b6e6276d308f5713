"""What varies in the life of a conversation, one thing at a time: past cuts never move.

Each test lets a conversation be compacted, changes something between two requests, and compares what is sent: the view
must begin with the very bytes of the one before, whatever changed, until a new event is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from proxy.core.compaction import block, digest
from proxy.core.compaction.schedule import CompactionTarget
from proxy.core.compaction.stages import CompactionRules, EnabledStages
from proxy.core.decisions import Policy
from proxy.core.tokens.budget import Buffers, Marks, Shares
from tests.support.engine_fixtures import POLICY, DictRecords, Message, Replica, chat_body, message_slices, tokenizers
from tests.support.sample_conversations import AGENT_TOOLS, agent_round, agent_session, tool

WINDOW = 4096
BEFORE = agent_session(20, 300)
AFTER = [*BEFORE, *agent_round(99, 20)]
ONE_MORE = tool("look_up", "Look a word up.", word="The word.")
OTHER_WORDS = Policy(CompactionRules(Marks(), Shares(pins=0.05, digest=0.05, steps=0.01), EnabledStages()))
OTHER_MARKS = Policy(CompactionRules(Marks(high=0.95, soft=0.7, low=0.5), Shares(), EnabledStages()))
BUFFERED = structs.replace(POLICY, buffers=Buffers(reserve=500, warning=600, auto_compact=200, blocking=100))


@dataclass(frozen=True)
class Life:
    """How one request of the conversation is made and looked at."""

    window: int = WINDOW
    factor: float = 1.0
    policy: Policy = POLICY
    system: str = "You are a careful engineer."
    members: Mapping[str, Any] = field(default_factory=lambda: {"tools": AGENT_TOOLS})
    fresh: bool = False
    """Whether another process answers, which knows only the store."""


def body(messages: Sequence[Message], life: Life) -> bytes:
    first = [{"role": "system", "content": life.system}]
    return chat_body([*first, *(m for m in messages if m["role"] != "system")], **life.members)


async def views(*requests: tuple[Sequence[Message], Life]) -> list[list[bytes]]:
    """What goes upstream for each request in turn, its system message left out."""
    book, found = DictRecords(), []
    replica: Replica | None = None
    for messages, life in requests:
        if replica is None or life.fresh or life.policy is not POLICY:
            replica = Replica(book, life.policy)
        plan = await replica.plan(body(messages, life), life.window, factor=life.factor)
        assert plan.error is None, plan.error
        found.append(message_slices(plan.body)[1:])
    return found


CHANGES: dict[str, Life] = {
    "nothing": Life(),
    "the clock in the system text": Life(system="You are a careful engineer. It is 10:01."),
    "a longer system text": Life(system="You are a careful engineer. " + "Answer in short sentences. " * 8),
    "a tool added": Life(members={"tools": [*AGENT_TOOLS, ONE_MORE]}),
    "the tools gone": Life(members={}),
    "an output figure": Life(members={"tools": AGENT_TOOLS, "max_tokens": 300}),
    "another name for it": Life(members={"tools": AGENT_TOOLS, "max_completion_tokens": 300}),
    "a factor learned, larger": Life(factor=1.1),
    "a factor learned, smaller": Life(factor=0.8),
    "a window raised": Life(window=WINDOW * 4),
    "a window lowered a little": Life(window=WINDOW * 7 // 8),
    "another process": Life(fresh=True),
    "other shares in the settings": Life(policy=OTHER_WORDS),
    "other marks in the settings": Life(policy=OTHER_MARKS),
    "buffers in the settings": Life(policy=BUFFERED),
    "another policy in the settings": Life(policy=structs.replace(POLICY, economy=True), window=WINDOW * 4),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_past_cuts_never_move(change: str) -> None:
    """Whatever changes between two requests, the second view begins with the bytes of the first."""
    before, after = await views((BEFORE, Life()), (AFTER, CHANGES[change]))
    assert len(before) < len(BEFORE) - 1
    assert after[: len(before)] == before
    assert len(after) == len(before) + 2


@pytest.mark.parametrize("change", CHANGES)
async def test_going_back_moves_nothing_either(change: str) -> None:
    """After a request under other figures the conversation goes on where it was."""
    later = [*AFTER, *agent_round(100, 20)]
    before, between, after = await views((BEFORE, Life()), (AFTER, CHANGES[change]), (later, Life(fresh=True)))
    assert between[: len(before)] == before
    assert after[: len(between)] == between


async def test_a_window_lowered_by_half_is_one_new_event() -> None:
    """What no longer fits is compacted once, further on; raised again, nothing comes back."""
    small = Life(window=WINDOW // 2 + 400)
    later = [*AFTER, *agent_round(100, 20)]
    before, smaller, back = await views((BEFORE, Life()), (BEFORE, small), (AFTER, Life()))
    assert len(smaller) < len(before)
    assert back[: len(smaller)] == smaller
    (again,) = (await views((BEFORE, Life()), (BEFORE, small), (later, Life(window=WINDOW * 4))))[2:]
    assert again[: len(smaller)] == smaller


async def test_far_under_the_mark_nothing_is_looked_up() -> None:
    """In a window so large that the whole conversation is under its low mark, the client's own bytes go upstream."""
    book, large = DictRecords(), Life(window=WINDOW * 16)
    await Replica(book).plan(body(BEFORE, Life()), WINDOW)
    plan = await Replica(book).plan(body(AFTER, large), large.window)
    assert plan.body == body(AFTER, large)


async def test_code_that_writes_other_blocks_repeats_the_recorded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update that words blocks in another way, conversations keep the block they were sent with."""
    book = DictRecords()
    before = message_slices((await Replica(book).plan(body(BEFORE, Life()), WINDOW)).body)
    monkeypatch.setattr(block, "HEADER", "[Another beginning.]")
    monkeypatch.setattr(digest, "NUMBER_SHARE", 0.5)
    after = message_slices((await Replica(book).plan(body(AFTER, Life()), WINDOW)).body)
    assert after[: len(before)] == before
    fresh = message_slices((await Replica(DictRecords()).plan(body(AFTER, Life()), WINDOW)).body)
    assert fresh[: len(before)] != before


async def test_another_model_has_a_past_of_its_own() -> None:
    """A model switched in mid-conversation is compacted for its own window; switched back, the first goes on."""
    book = DictRecords()
    replica = Replica(book)
    first = await replica.plan(body(BEFORE, Life()), WINDOW)
    large = await replica.plan(body(AFTER, Life()), WINDOW * 8, model="another-model")
    assert large.report.outcome == "verbatim"
    later = [*AFTER, *agent_round(100, 20)]
    back = await replica.plan(body(later, Life()), WINDOW)
    assert message_slices(back.body)[: len(message_slices(first.body))] == message_slices(first.body)
    assert not back.report.event


@pytest.mark.parametrize("rounds", [8, 20])
async def test_compacting_now_is_recorded_and_idempotent(rounds: int) -> None:
    """Asked for twice, also of another process, one compaction happens; the conversation goes on from it."""
    book, messages = DictRecords(), agent_session(rounds, 300)
    now = CompactionTarget(force=True)
    first = await Replica(book).plan(chat_body(messages), WINDOW, now)
    assert first.report.event
    assert len(book.records()) == 1
    replica = Replica(book)
    for target in (now, CompactionTarget(), now):
        again = await replica.plan(chat_body(messages), WINDOW, target)
        assert again.body == first.body
        assert not again.report.event
    grown = await replica.plan(chat_body([*messages, *agent_round(99, 20)]), WINDOW)
    assert message_slices(grown.body)[: len(message_slices(first.body))] == message_slices(first.body)


@pytest.mark.parametrize(("rounds", "size", "window"), [(20, 300, 4096), (60, 300, 8192), (60, 700, 16_384)])
async def test_a_view_that_is_fed_back_is_left_alone(rounds: int, size: int, window: int) -> None:
    """What was made small enough is, sent as a request of its own, passed on byte for byte."""
    replica = Replica()
    view = (await replica.plan(chat_body(agent_session(rounds, size), tools=AGENT_TOOLS), window)).body
    assert (await replica.plan(view, window)).body == view
    assert (await Replica().plan(view, window)).body == view


async def test_work_grows_with_what_is_new() -> None:
    """A conversation twice as long, watched from its beginning, has at most a little over twice the text counted."""
    counted = {rounds: await characters_counted(rounds) for rounds in (60, 120)}
    assert counted[120] < 2.5 * counted[60]


async def characters_counted(rounds: int) -> int:
    """How many characters are given to the tokenizer while a session of *rounds* is sent round by round."""
    replica, total = Replica(), 0

    class Meter:
        loaded = ("o200k_base",)

        def counter(self, encoding: str) -> Callable[[str], int]:
            count_tokens = tokenizers().counter(encoding)

            def count(text: str) -> int:
                nonlocal total
                total += len(text)
                return count_tokens(text)

            return count

    replica.reader._counter = Meter()
    session = agent_session(rounds, 300)
    for end in range(4, len(session) + 1, 2):
        await replica.plan(chat_body(session[:end], tools=AGENT_TOOLS), 8192)
    return total
