"""The replay's table: a row for each conversation, totals, and what stood in the way."""

from __future__ import annotations

import pytest

from proxy.commands.reckoning import replay_all, show
from proxy.commands.replay import Replayed, Turn
from proxy.core.conversation.sessions import Session
from proxy.settings import Prices, load
from tests.support.sample_conversations import agent_session


def test_rows_and_totals(capsys: pytest.CaptureFixture[str]) -> None:
    """Each conversation has its figures, all together theirs, and costs only where there are prices."""
    turns = (Turn(1000, 1000, 1500, 0, 0, False, ()), Turn(2000, 1200, 1500, 900, 1000, True, ("fold",)))
    priced = Replayed("first", "m", 1700, turns, Prices(0.001, 0.0001, 0.01))
    show([priced, Replayed("second", "n", 1700, turns), Replayed("third", "o", None, (), trouble="no window")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["first", "m", "1,700", "2", "2", "1", "1", "3,000", "2,200", "40.9%", "$2.10", "$1.39"]
    assert lines[2].split()[-2:] == ["-", "-"]
    assert lines[4].split()[:9] == ["3", "conversations", "4", "4", "2", "2", "6,000", "4,400", "40.9%"]
    assert lines[-1] == "third: no window"


def test_replaying_shows_a_bar_and_gives_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the table goes to standard output."""
    settings = load(None, {("models", "*", "context_window"): 4096}, {})
    found = replay_all(settings, [Session("s", "", agent_session(20, 300))], "gpt-4o")
    assert found[0].events > 0
    assert capsys.readouterr().out == ""
