"""The replay's table: a row for each conversation, totals, and what stood in the way."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from proxy.cli.replay import PlannedRequest, Replay
from proxy.cli.replay_output import MAX_PANELS, CannotPlot, draw_replays, replay_all, show_replays
from proxy.cli.session_files import Session
from proxy.settings import Prices, load
from tests.support.sample_conversations import agent_session


def test_rows_and_totals(capsys: pytest.CaptureFixture[str]) -> None:
    """Each conversation has its figures, all together theirs, and costs only where there are prices."""
    requests = (
        PlannedRequest(1000, 1000, 1500, 0, 0, False, ()),
        PlannedRequest(2000, 1200, 1500, 900, 1000, True, ("fold",)),
    )
    priced = Replay("first", "m", 1700, requests, Prices(0.001, 0.0001, 0.01))
    show_replays([priced, Replay("second", "n", 1700, requests), Replay("third", "o", None, (), problem="no window")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["first", "m", "1,700", "2", "2", "1", "1", "3,000", "2,200", "40.9%", "$2.10", "$1.39"]
    assert lines[2].split()[-2:] == ["-", "-"]
    assert lines[4].split()[:9] == ["3", "conversations", "4", "4", "2", "2", "6,000", "4,400", "40.9%"]
    assert lines[-1] == "third: no window"


def test_replaying_shows_a_bar_and_gives_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the table goes to standard output."""
    settings = load(None, {("models", "*", "context_window"): 4096}, {})
    replays = replay_all(settings, [Session("s", "", agent_session(20, 300))], "gpt-4o")
    assert replays[0].compactions > 0
    assert capsys.readouterr().out == ""


REQUESTS = tuple(
    PlannedRequest(900 * at, 700 if at == 5 else 600 + at, 1000, 0, 0, at == 5, ("fold",)) for at in range(1, 9)
)
REFUSED = PlannedRequest(5000, None, 1000, 0, 0, False, ())


@pytest.mark.parametrize("count", [0, 1, 3, MAX_PANELS + 2])
@pytest.mark.slow
def test_a_picture_is_drawn(count: int, tmp_path: Path) -> None:
    """Any number of conversations makes a PNG, also with refused requests and with none at all."""
    replays = [Replay(f"s{at}", "m", 1200, (*REQUESTS, REFUSED)) for at in range(count)]
    draw_replays([*replays, Replay("none", "m", None, (), problem="unknown")], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the error says what to install, and no file is left."""
    whole = importlib.import_module

    def without(name: str) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return whole(name)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(CannotPlot, match=r"ullage\[plot\]"):
        draw_replays([], tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()
