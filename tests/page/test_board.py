"""The board: bounded memory, and the figures that the page shows."""

from __future__ import annotations

import itertools
import sys

import pytest

from proxy.core.breakdown import ViewFacts
from proxy.core.compaction.record import VERSION, Compaction, CompactionRecord
from proxy.core.report import Report, Usage
from proxy.page.board import (
    LIVE_SECONDS,
    MOST_COMPACTIONS,
    MOST_MODELS,
    MOST_POINTS,
    MOST_REPORTS,
    OTHER,
    TREND,
    AdviceEntry,
    Board,
    ViewNote,
)

ADVICE = AdviceEntry("62 % is one tool result: read_file", "ask the tool for less", 0.62)


def report(conversation: str = "c", after: int = 600, **facts: object) -> Report:
    """A counted report of a window of 1,000 tokens."""
    known = {"tokens_before": 900, "tokens_after": after, "window": 1000, "budget": 900, "model": "m", **facts}
    return Report("r", "chat", conversation=conversation, status=200, **known)


RECORD = CompactionRecord(VERSION, Compaction(9, 4, 0), "", {}, 1000, 100, 0)


def note(at: float = 1.0, advice: AdviceEntry | None = None, *, name: str = "c") -> ViewNote:
    """A note on a view whose request was the first with a compaction."""
    return ViewNote(at, report(name, event=True), ViewFacts((), (), RECORD), advice)


def board_of(*reports: Report, most: int = 100, at: float = 100.0) -> Board:
    """A board that has read *reports*, one a second."""
    board = Board(most, now=lambda: at)
    board.reports.extend((at + second, each) for second, each in enumerate(reports))
    board.update()
    return board


def test_a_row_has_the_newest_figures_and_the_sums() -> None:
    """Figures of the view are those of the newest request, sums those of all requests."""
    usage = Usage(500, 20, 400)
    board = board_of(report(usage=usage, agent="codex"), report(after=300, event=True, usage=usage, agent="codex"))
    (row,) = board.changes().rows
    assert (row.tokens, row.before, row.window, row.requests, row.compactions) == (300, 900, 1000, 2, 1)
    assert (row.removed_sum, row.input_sum, row.cached_sum, row.output_sum) == (900, 1000, 800, 40)
    assert row.trend == [(100.0, 600, 0), (101.0, 300, 1)]
    assert (row.first, row.last, row.agent) == (100.0, 101.0, "codex")


def test_only_what_changed_is_given_again() -> None:
    """A page gets the rows that changed since it last looked, and the names of all."""
    board = board_of(report("a"), report("b"))
    version = board.changes().version
    board.reports.append((105.0, report("b")))
    board.update()
    changes = board.changes(version)
    assert [row.name for row in changes.rows] == ["b"]
    assert sorted(changes.names) == ["a", "b"]


def test_a_row_that_was_given_does_not_change_behind_its_reader() -> None:
    """The reader compares it with the next one."""
    board = board_of(report())
    (before,) = board.changes().rows
    board.reports.append((101.0, report(after=700)))
    board.update()
    assert (before.tokens, before.requests) == (600, 1)


def test_the_oldest_conversations_go_first() -> None:
    """At most so many are remembered, and one that is used stays."""
    board = board_of(report("a"), report("b"), report("a"), report("c"), most=2)
    assert board.changes().names == ["a", "c"]


def test_idle_conversations_are_not_live() -> None:
    """After an hour without a request they are forgotten, whatever else is noted of them."""
    now = 100.0
    board = Board(10, now=lambda: now)
    board.views.append(note(name="only noted"))
    board.reports.append((now, report("old")))
    board.update()
    now += LIVE_SECONDS + 1
    board.reports.append((now, report("new")))
    board.update()
    assert board.changes().names == ["new"]
    assert board.detail("old") is None


def test_a_conversation_takes_bounded_memory() -> None:
    """Its points and its compactions are those of its newest requests."""
    many = MOST_POINTS + 10
    board = Board(10, now=lambda: 0.0)
    for number in range(many):
        board.views.append(note(number))
        board.reports.append((number, report(event=True)))
    board.update()
    detail = board.detail("c")
    assert detail is not None
    assert [point[0] for point in detail.points] == list(range(10, many))
    assert [entry.at for entry in detail.compactions] == list(range(many - MOST_COMPACTIONS, many))
    assert len(detail.row.trend) == TREND
    assert sys.getsizeof(board._conversations["c"].points) < 16_000


def test_models_are_bounded() -> None:
    """Their names come from clients: those beyond the limit are counted together."""
    board = board_of(*(report(model=f"m{number}") for number in range(MOST_MODELS + 5)))
    models = board.changes().models
    assert len(models) == MOST_MODELS + 1
    assert models[OTHER].requests == 5


def test_more_reports_than_are_read_are_dropped_and_said_so() -> None:
    """Memory is bounded whatever the rate is."""
    board = board_of(*itertools.repeat(report(), MOST_REPORTS + 50))
    changes = board.changes()
    assert (changes.models["m"].requests, changes.missed) == (MOST_REPORTS, 1)


def test_what_was_refused_or_only_observed_saved_nothing() -> None:
    """The sums are of what went upstream."""
    board = board_of(report(outcome="refused", event=True), report(observed=True, event=True))
    (row,) = board.changes().rows
    totals = board.changes().models["m"]
    assert (row.removed_sum, row.compactions) == (0, 0)
    assert (totals.removed, totals.compactions, totals.refused, totals.requests) == (0, 0, 1, 2)
    assert totals.sent == 900


@pytest.mark.parametrize("nameless", [report(""), report().with_(api="count_tokens")])
def test_requests_without_a_conversation_are_only_counted(nameless: Report) -> None:
    """A request far below its window has no conversation's name, and a question for a count sends nothing."""
    board = board_of(nameless)
    assert board.changes().rows == []
    assert board.changes().models["m"].requests == 1


def test_a_question_for_a_count_removes_nothing() -> None:
    """It sends no view, so that its compaction saves no tokens."""
    question = report().with_(api="count_tokens", outcome="compacted", event=True)
    totals = board_of(question).changes().models["m"]
    assert (totals.requests, totals.removed, totals.compactions) == (1, 0, 0)
    answered = board_of(report().with_(outcome="compacted", event=True)).changes().models["m"]
    assert (answered.removed, answered.compactions) == (300, 1)


def test_an_answer_without_figures_keeps_those_before() -> None:
    """A request that could not be sent leaves the conversation's figures as they were."""
    failed = Report("r", "chat", model="m", conversation="c", outcome="degraded", reason="upstream_timeout", status=504)
    (row,) = board_of(report(), failed).changes().rows
    assert (row.tokens, row.window, row.status, row.requests) == (600, 1000, 504, 2)


def test_advice_stays_until_there_is_room_again() -> None:
    """It is worked out once while a conversation is nearly full."""
    board = Board(10, now=lambda: 0.0)

    def shown(tokens: int, *notes: ViewNote) -> AdviceEntry | None:
        board.views.extend(notes)
        board.reports.append((1.0, report().with_(tokens_after=tokens, budget=1000)))
        board.update()
        return board.changes().rows[0].advice

    assert shown(900, note(advice=ADVICE)) == ADVICE
    assert shown(910) == shown(920, note()) == ADVICE
    assert shown(300) is None


def test_the_newest_tokens_are_those_of_the_newest_request() -> None:
    """A request that was not counted has none."""
    board = board_of(report().with_(newest_tokens=70))
    assert board.changes().rows[0].newest == 70
    board.reports.append((2.0, report()))
    board.update()
    assert board.changes().rows[0].newest == 0


def test_the_lag_is_that_of_the_second_that_ended() -> None:
    """However often others ask, the figure stands for a whole second."""
    board, lags = Board(1), iter([0.5, 0.25])
    board.worst_lag = lambda: next(lags)
    board.tick()
    assert (board.changes().lag, board.changes().lag) == (0.5, 0.5)
    board.tick()
    assert board.changes().lag == 0.25


def test_an_older_report_of_the_same_second_takes_no_advice_away() -> None:
    """Notes are read before reports: one that had room before the advice was given does not clear it."""
    board = Board(10, now=lambda: 100.0)
    advice = AdviceEntry("62 % are tool results", "ask for less", 0.62)
    room = Report("r", "chat", conversation="c", window=1000, budget=900, tokens_before=400, tokens_after=400)
    full = room.with_(tokens_before=880, tokens_after=880)
    board.views.append(ViewNote(100.2, full, ViewFacts((), (), None), advice))
    board.reports.extend([(100.1, room), (100.3, full)])
    board.update()
    assert board.changes().rows[0].advice == advice
    board.reports.append((100.4, room))
    board.update()
    assert board.changes().rows[0].advice is None
