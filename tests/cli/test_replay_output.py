"""The replay's output: the total, a row for each conversation, the findings, and what stood in the way."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from proxy.cli.findings import Findings, FreshResult
from proxy.cli.replay import NearlyFull, PlannedRequest, Replay
from proxy.cli.replay_output import (
    COLUMNS,
    LONG_JOB,
    MAX_PANELS,
    advice_lines,
    dollars,
    draw_replays,
    replay_all,
    replays_as_json,
    show_replays,
    totals,
)
from proxy.cli.session_files import Session
from proxy.core.advice import Advice
from proxy.core.waste import RepeatedParagraph
from proxy.settings import Prices, load
from tests.support.sample_conversations import agent_session

REQUESTS_OF_TWO = (
    PlannedRequest(1000, 1000, 1500, 0, 0, False, ()),
    PlannedRequest(2000, 1200, 1500, 900, 1000, True, ("fold",)),
)
FOUND = Findings(
    (RepeatedParagraph("You are careful", 12, 3400),),
    (FreshResult("read_file bundle.js", 900, 0.62, 2), FreshResult("bash", 100, 0.0, 1)),
    {"system": 300},
    0.2,
)
THREE = (
    Replay("second", "n", 1700, REQUESTS_OF_TWO),
    Replay("first", "m", 1700, (*REQUESTS_OF_TWO, REQUESTS_OF_TWO[1]), Prices(0.001, 0.0001, 0.01), findings=FOUND),
    Replay("third", "o", None, (), problem="no window", skipped=4),
)


def test_the_total_leads(capsys: pytest.CaptureFixture[str]) -> None:
    """The total comes first, then a row for each conversation, the largest first, the findings, and the problems."""
    show_replays(THREE, 20)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "3 conversations, 5 requests: 5 answered, 2 fitted as sent",
        "4 requests of 1 conversation could not be planned: see the reasons",
        "3 compactions; 48.2% of what goes upstream repeats the request before",
        "8,000 tokens as sent, 5,600 upstream (30% fewer)",
        "$3.20 as sent, $1.78 upstream",
        "first requests fill 20% of the window at the median, 20% at most",
    ]
    assert lines[7].split() == " ".join(COLUMNS).split()
    assert lines[8].split() == ["first", "3", "1", "2", "5,000", "3,400", "$1.78"]
    assert lines[9].split() == ["second", "2", "1", "1", "3,000", "2,200", "-"]
    text = "\n".join(lines)
    assert re.search(r"You are careful +12 +3,400", text)
    assert re.search(r"read_file bundle.js +900 +62%\nbash +100 +-", text)
    assert lines[-1] == "third: no window"


def test_only_the_largest_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """There are as many rows as --top says, and a line with the number of all others; the total is that of all."""
    show_replays(THREE, 1)
    out = capsys.readouterr().out
    assert out.startswith("3 conversations")
    assert "second" not in out
    assert "and 2 smaller ones: --top 3 or --json shows them" in out


def test_tables_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long name is folded; millions of tokens and long findings fit, too."""
    request = PlannedRequest(98_765_432, 12_345_678, 10**8, 0, 0, True, ("fold",))
    long = Replay("folder/" * 20, "m", 1700, (request,) * 9, Prices(1e-6, 1e-7, 1e-5), findings=FOUND)
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    monkeypatch.setattr("proxy.cli.replay_output.table_console", lambda: console)
    show_replays([long], 20)
    assert max(map(len, console.file.getvalue().splitlines())) <= 80  # type: ignore[attr-defined]


def test_a_narrow_terminal_shows_fewer_columns_each_of_them_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 40 columns the names of conversations and their tokens are there, as the client sent them and upstream."""
    million = PlannedRequest(2_366_790, 872_742, 10**6, 0, 0, True, ("fold",))
    replay = Replay("all.jsonl:32", "m", 1700, (million,), Prices(1e-6, 1e-7, 1e-5))
    console = Console(file=io.StringIO(), width=40, highlight=False, markup=False)
    monkeypatch.setattr("proxy.cli.replay_output.table_console", lambda: console)
    show_replays([replay], 20)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 40
    (row,) = [line.split() for line in lines if line.startswith("all.jsonl:32")]
    assert row == ["all.jsonl:32", "2,366,790", "872,742", "$0.87"]


def test_what_to_do_is_said_once_for_conversations_that_need_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a line with what fills it, the fullest first."""
    results, block = Advice("tool", 0.84, 900), Advice("summary", 0.5, 600)
    full = [
        Replay(f"c{number}", "m", 1700, REQUESTS_OF_TWO, nearly_full=NearlyFull(number, 0.9 + number / 100, advice))
        for number, advice in enumerate((results, block, results))
    ]
    show_replays(full, 20)
    parts = capsys.readouterr().out.split("\n\n")[-2:]
    assert [line.split(",")[0] for line in parts[0].splitlines()[:-1]] == ["c2", "c0"]
    assert [part.count("What to do: ") for part in parts] == [1, 1]
    assert parts[1].startswith("c1, request 1 at 91%: ")


def test_json_has_every_conversation() -> None:
    """The total and each conversation have the same members, in figures, and the findings are with them."""
    document = json.loads(json.dumps(replays_as_json(THREE)))
    total, (first, second, third) = document["total"], document["conversations"]
    assert (total["conversations"], total["requests"], total["tokens_before"], total["tokens_after"]) == (
        3,
        5,
        8000,
        5600,
    )
    assert total.keys() - {"conversations"} <= first.keys()
    assert (first["name"], first["model"], first["window"], first["first_fill"]) == ("first", "m", 1700, 0.2)
    assert first["repeated_paragraphs"] == [{"excerpt": "You are careful", "times": 12, "wasted": 3400}]
    assert first["fresh_results"][0] == {"call": "read_file bundle.js", "tokens": 900, "share": 0.62, "request": 2}
    assert (second["cost"], third["problem"]) == (None, "no window")


def test_replaying_gives_the_figures_and_the_findings(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing goes to standard output, and the progress of a short job is not shown in a pipe."""
    settings = load(None, {("models", "*", "context_window"): 4096}, {})
    messages = agent_session(20, 300)
    rule = "Always run the tests before you say that something works, and name the file that you changed. " * 5
    messages[0]["content"] = rule
    messages[1]["content"] += f"\n\n{rule}"
    (replayed,) = replay_all(settings, [Session("s", "", messages)], "gpt-4o")
    assert totals([replayed]).compactions > 0
    findings = replayed.findings
    assert [(each.times, each.excerpt[:20]) for each in findings.paragraphs] == [(2, "Always run the tests")]
    assert 70 < findings.paragraphs[0].wasted < 130
    assert len(findings.results) == 5
    assert all(each.call.startswith("read_file src/") and each.tokens > 250 for each in findings.results)
    assert findings.first_fill == pytest.approx(sum(findings.first_tokens.values()) / 4096, abs=0.01)
    assert findings.first_tokens.keys() >= {"system", "user"}
    full = replayed.nearly_full
    assert full is not None
    assert full.pressure == pytest.approx(max(each.pressure or 0.0 for each in replayed.requests), abs=0.001)
    assert replayed.requests[full.request - 1].pressure == pytest.approx(full.pressure, abs=0.001)
    (line,) = advice_lines([replayed])
    assert line.startswith(f"s, request {full.request} at {full.pressure:.0%}: ")
    assert full.advice.remedy in line
    assert capsys.readouterr() == ("", "")


def test_a_long_job_prints_a_line_a_tenth_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten lines on standard error, the last one with all requests."""
    settings = load(None, {("models", "*", "context_window"): 32_768}, {})
    sessions = [Session(f"s{at}", "", agent_session(6, 10)) for at in range(20)]
    replays = replay_all(settings, sessions, "gpt-4o")
    total = sum(len(each.requests) for each in replays)
    lines = capsys.readouterr().err.splitlines()
    assert total >= LONG_JOB
    assert len(lines) == 10
    assert lines[-1] == f"{total:,} of {total:,} requests done"


def test_progress_and_total_agree_on_conversations_that_cannot_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a known window no request is planned: the progress ends with all of them, and the total names them."""
    sessions = [Session(f"s{at}", "", agent_session(6, 10)) for at in range(20)]
    replays = replay_all(load(None, {}, {}), sessions, "a-model-nobody-knows")
    total = totals(replays)
    assert total.requests == 0
    assert total.skipped >= LONG_JOB
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"{total.skipped:,} of {total.skipped:,} requests done"


@pytest.mark.parametrize(
    ("amount", "text"),
    [(None, "-"), (0.0, "$0.00"), (0.000123, "$0.00012"), (0.0426, "$0.043"), (0.8841, "$0.88"), (1234.5, "$1,234.50")],
)
def test_money_has_cents_or_two_significant_digits(amount: float | None, text: str) -> None:
    """Below ten cents two digits are shown, else cents; an unknown amount is a dash."""
    assert dollars(amount) == text


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
