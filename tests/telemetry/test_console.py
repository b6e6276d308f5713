"""Lines for people on a terminal: short, in figures, as wide as the terminal, coloured unless nobody wants that."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator

import pytest

from proxy.core.report import Report
from proxy.telemetry.console import BOLD, NO_WIDTH, Part, fitting, shortened, terminal_width, uses_colors
from proxy.telemetry.logs import Logs

COMPACTED = Report(
    "r", "chat", model="gpt-4o", upstream="u", status=200, outcome="compacted", window=4096, budget=3000,
    tokens_before=17_076, tokens_after=1510, stages=("fold",), conversation="c", source="table", event=True,
)  # fmt: skip
SENTENCE = "200 chat gpt-4o compacted fold 17,076 → 1,510 of 4,096 (37 %) 285 ms"


class Terminal:
    """A real terminal of *columns*, and the lines that a log wrote to it."""

    def __init__(self, columns: int) -> None:
        self._main, self.fd = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def lines(self, *reports: Report, seconds: float = 0.285) -> list[str]:
        logs = Logs("info", "auto", self.fd)
        for report in reports:
            logs.request_done(report, seconds)
        logs.close()
        return os.read(self._main, 65_536).decode().splitlines()

    def close(self) -> None:
        os.close(self._main)
        os.close(self.fd)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """A terminal of 80 columns, or of the test's parameter, whose user has said nothing about colours."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    opened = Terminal(getattr(request, "param", 80))
    yield opened
    opened.close()


def plain(line: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", line)


def test_a_request_is_one_sentence_in_colour(terminal: Terminal) -> None:
    """Status, API, model, outcome, stages, tokens, window and time, and nothing else."""
    (line,) = terminal.lines(COMPACTED)
    assert plain(line) == SENTENCE
    assert line.count("\x1b[0m") >= 5


def test_a_bound_is_rounded_up(terminal: Terminal) -> None:
    """At most so many tokens: the share of the window is never less than what they may take."""
    bounded = COMPACTED.with_(bounded=True, tokens_before=1272, tokens_after=1272)
    (line,) = terminal.lines(bounded)
    assert "<1,272 of 4,096 (<32 %)" in plain(line)


def test_no_color_is_respected(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR, and on a terminal without colours, the line is plain."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert not uses_colors(terminal.fd)
    assert terminal.lines(COMPACTED) == [SENTENCE]
    monkeypatch.delenv("NO_COLOR")
    assert uses_colors(terminal.fd)
    monkeypatch.setenv("TERM", "dumb")
    assert not uses_colors(terminal.fd)


@pytest.mark.parametrize(
    ("terminal", "expected"),
    [
        (64, "200 gpt-4o compacted fold 17,076 → 1,510 of 4,096 (37 %) 285 ms"),
        (60, "200 gpt-4o compacted 17,076 → 1,510 of 4,096 (37 %) 285 ms"),
        (52, "200 gpt-4o compacted 17,076 → 1,510 of 4,096 (37 %)"),
        (20, "200 gpt-4o compacted 17,076 → 1,510 of 4,096 (37 %)"),
    ],
    indirect=["terminal"],
)
def test_a_narrow_terminal_gets_less(terminal: Terminal, expected: str) -> None:
    """The API goes first, then the stages, then the time; the figures stay."""
    assert [plain(line) for line in terminal.lines(COMPACTED)] == [expected]


@pytest.mark.parametrize("terminal", [56], indirect=True)
def test_a_long_name_loses_its_middle(terminal: Terminal) -> None:
    """A model's name is shortened only when nothing else is left to leave out."""
    (line,) = terminal.lines(COMPACTED.with_(model="meta-llama/Llama-4-Scout-17B-16E-Instruct"))
    assert len(plain(line)) <= 57
    assert "…" in line
    assert plain(line).endswith("17,076 → 1,510 of 4,096 (37 %)")


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (Report("r", "chat", model="m", status=200), "200 chat m verbatim 285 ms"),
        (
            Report(
                "r", "chat", model="m", status=200, window=128_000, tokens_before=812, tokens_after=812, bounded=True
            ),
            "200 chat m verbatim <812 of 128,000 (<1 %) 285 ms",
        ),
        (
            Report("r", "chat", model="m", status=200, tokens_before=812, tokens_after=812),
            "200 chat m verbatim 812 tokens 285 ms",
        ),
        (
            COMPACTED.with_(outcome="degraded", reason="fallback", fallback="big", retries=1),
            "200 chat gpt-4o by big degraded (fallback) fold 17,076 → 1,510 of 4,096 (37 %) sent 2 times 285 ms",
        ),
        (
            COMPACTED.with_(outcome="refused", reason="context_length_exceeded", status=400, tokens_after=4000),
            "400 chat gpt-4o refused (context_length_exceeded) fold 17,076 → 4,000 of 4,096 (98 %) 285 ms",
        ),
        (Report("r", "", status=404, outcome="refused"), "404 refused 285 ms"),
    ],
)
@pytest.mark.parametrize("terminal", [200], indirect=True)
def test_what_is_known_is_shown(terminal: Terminal, report: Report, expected: str) -> None:
    """Bounds are marked, a reason and a fallback are named, and what is not known is left out."""
    assert [plain(line) for line in terminal.lines(report)] == [expected]


def test_a_long_answer_takes_seconds(terminal: Terminal) -> None:
    """From ten seconds on the time is in seconds."""
    assert plain(terminal.lines(COMPACTED, seconds=61.27)[0]).endswith("(37 %) 61.3 s")


def test_what_is_no_terminal_has_no_width() -> None:
    """A pipe gets everything."""
    reader, writer = os.pipe()
    assert terminal_width(writer) == NO_WIDTH
    parts = [Part("word", "", 3)] * 50
    assert fitting(parts, NO_WIDTH) == parts
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(("length", "expected"), [(10, "abcdefghij"), (9, "abcd…ghij"), (4, "ab…j"), (2, "a…")])
def test_shortening_keeps_both_ends(length: int, expected: str) -> None:
    """A shortened text has the length that was asked for."""
    assert shortened("abcdefghij", length) == expected


def test_only_the_models_name_is_shortened() -> None:
    """Other parts stay whole however narrow it is."""
    parts = [Part("x" * 40), Part("m" * 40, BOLD)]
    assert [len(part.text) for part in fitting(parts, 60)] == [40, 19]
