"""Lines for people, and the width of their terminal."""

from __future__ import annotations

import io

import pytest

from proxy.terminal import fold_lines

LONG = "  model        qwen*  window: stated by the server, else by the model table, else learned  -> upstream-2"


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """True."""
        return True


@pytest.mark.parametrize("width", [40, 60, 80])
def test_long_lines_are_folded_for_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """No line is wider, no word is lost, and what follows a fold stands under its text; short lines stay."""
    monkeypatch.setenv("COLUMNS", str(width))
    lines = fold_lines(f"short  line\n{LONG}", Terminal(), 13).split("\n")
    assert max(map(len, lines)) <= width
    assert " ".join(lines).split() == f"short line {LONG}".split()
    assert lines[0] == "short  line"
    assert all(line.startswith(" " * 15) for line in lines[2:])
    assert len(lines) > 2


def test_a_path_is_never_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be copied."""
    monkeypatch.setenv("COLUMNS", "40")
    path = "/a/long/path-with-hyphens/that/is/wider/than/the/terminal/ullage.yaml:12:"
    assert path in fold_lines(f"{path} models: there is no such key", Terminal()).split("\n")


def test_a_pipe_gets_the_lines_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One problem is one line for ``grep``."""
    monkeypatch.setenv("COLUMNS", "40")
    assert fold_lines(LONG, io.StringIO()) == LONG
