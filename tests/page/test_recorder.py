"""What the page is told of a view, and the one line for a conversation that is nearly full."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from proxy.core.advice import NEARLY_FULL
from proxy.page.board import Board, ViewNote
from proxy.page.recorder import ViewRecorder
from tests.support.engine_fixtures import Planned, Replica, chat_body, tool_map_of_package
from tests.support.page_scene import reading
from tests.support.sample_conversations import agent_session, log
from tests.support.scripted_upstream import EngineFixture, ScriptedReply, upstream_replying

WINDOW = 8192
BUNDLE = [*agent_session(5, 100), *reading("dist/bundle.js", log(1, 5600))]


class Recorded:
    """A replica whose answered requests a recorder gets."""

    def __init__(self, board: Board | None = None, *, text: bool = False) -> None:
        self.board = board or Board(10, now=lambda: 0.0)
        self.lines: list[tuple[str, Mapping[str, object]]] = []
        self.recorder = ViewRecorder(
            self.board, tool_map_of_package(), lambda event, facts: self.lines.append((event, facts)), text=text
        )
        self.replica = Replica()

    async def ask(self, messages: list[dict[str, Any]], **facts: object) -> Planned:
        plan = await self.replica.plan(chat_body(messages), WINDOW)
        self.recorder.answered(plan.view, plan.report.with_(**facts), 200)
        return plan

    def notes(self) -> list[ViewNote]:
        views = list(self.board.views)
        self.board.views.clear()
        return views


async def test_a_compaction_is_noted_once_with_what_it_took_and_made() -> None:
    """Its sizes, its stages, and the shape of its block, without a word of its text."""
    recorded = Recorded()
    plan = await recorded.ask(agent_session(40, 300))
    await recorded.ask([*agent_session(40, 300), *agent_session(1, 40)[2:]])
    first, second = recorded.notes()
    entry = first.compaction(text=False)
    assert entry is not None
    assert second.compaction(text=False) is None
    assert (entry.before, entry.after) == (plan.report.tokens_before, plan.report.tokens_after)
    assert entry.before - entry.after == pytest.approx(sum(stage.tokens for stage in entry.stages), abs=2)
    assert {"digest", "steps"} <= {part.kind for part in entry.parts}
    assert entry.block == ""


async def test_the_block_is_shown_if_the_settings_say_so() -> None:
    """Only then does the page hold a text."""
    recorded = Recorded(text=True)
    plan = await recorded.ask(agent_session(40, 300))
    (note,) = recorded.notes()
    entry = note.compaction(text=True)
    assert entry is not None
    assert plan.view.edits.record is not None
    assert entry.block == plan.view.edits.record.block


async def test_a_conversation_that_is_nearly_full_gets_one_line() -> None:
    """It says what fills it and what to do; the target of the call is content, and stays out."""
    recorded = Recorded()
    await recorded.ask(BUNDLE)
    await recorded.ask(BUNDLE)
    ((event, facts),) = recorded.lines
    assert event == "conversation.nearly_full"
    assert str(facts["advice"]).endswith("% is one tool result: read_file")
    assert "truncate.always" in str(facts["remedy"])
    assert "bundle.js" not in str(facts)
    first, second = recorded.notes()
    assert first.advice is not None
    assert second.advice is None
    assert first.advice.text == facts["advice"]


async def test_targets_are_named_if_texts_may_be_shown() -> None:
    """Both in the log and on the page."""
    recorded = Recorded(text=True)
    await recorded.ask(BUNDLE)
    assert str(recorded.lines[0][1]["advice"]).endswith("read_file dist/bundle.js")


async def test_it_gets_another_line_once_it_had_room_again() -> None:
    """After a compaction it may fill up anew."""
    recorded = Recorded()
    for rounds in range(1, 60):
        await recorded.ask(agent_session(rounds, 300))
    pressures = [note.report.pressure or 0.0 for note in recorded.notes()]
    filled_up = sum(before <= NEARLY_FULL < after for before, after in pairwise([0.0, *pressures]))
    assert len(recorded.lines) == filled_up > 1


async def test_what_has_no_conversation_is_not_noted() -> None:
    """Nobody could look it up."""
    recorded = Recorded()
    await recorded.ask(BUNDLE, conversation="")
    assert (recorded.notes(), recorded.lines) == ([], [])


async def test_without_a_page_there_is_still_the_line() -> None:
    """The log does not depend on the page."""
    lines: list[str] = []
    recorder = ViewRecorder(None, tool_map_of_package(), lambda event, facts: lines.append(event), text=False)
    plan = await Replica().plan(chat_body(BUNDLE), WINDOW)
    recorder.answered(plan.view, plan.report, 200)
    assert lines == ["conversation.nearly_full"]


async def test_a_refused_conversation_gets_advice_too() -> None:
    """What fills it matters most where nothing could be sent."""
    recorded = Recorded()
    fixture = EngineFixture(window=WINDOW, features=lambda _: [recorded.recorder])
    body = chat_body([{"role": "system", "content": "Rule. " * 9000}, {"role": "user", "content": "Hi"}])
    answer = await fixture.ask(body, upstream_replying())
    await asyncio.sleep(0)  # it is noted behind the answer
    assert answer.report.outcome == "refused"
    ((event, facts),) = recorded.lines
    assert event == "conversation.nearly_full"
    assert "is system text" in str(facts["advice"])
    (note,) = recorded.notes()
    assert note.advice is not None


async def test_a_conversation_that_fills_up_again_after_a_compaction_gets_advice_again() -> None:
    """However soon: the engine notes an answer when its conversation has become nearly full since its compaction."""
    recorded = Recorded()
    fixture = EngineFixture(window=WINDOW, features=lambda _: [recorded.recorder])
    advised = []
    for rounds in range(2, 44):
        body = chat_body(agent_session(rounds, 300))
        answer = await fixture.ask(body, upstream_replying(ScriptedReply(200, [b"{}"])))
        await asyncio.sleep(0)
        notes = recorded.notes()
        if any(note.advice for note in notes):
            advised.append(answer.report.tokens_removed > 0)
    assert True in advised, "after a compaction"
    assert False in advised, "before the first one"
