"""The console of commands that print tables, and the words for the source of a window."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.cli.output import fitting_columns, table_console, window_source
from proxy.settings import Settings
from proxy.upstream_wiring import open_catalogue


def test_nothing_is_folded_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """A long line stays one line, and brackets are printed as they are."""
    table_console().print("[b]" + "word " * 200)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[b]word")
    assert len(line) > 900


def test_columns_that_matter_least_go_until_the_others_fit() -> None:
    """A column whose texts are folded counts with twelve cells at most, and its place stays."""
    rows = [("name", "one", "two"), ("n" * 30, "1" * 9, "2" * 9)]
    assert fitting_columns(rows, 34, expendable=(2, 1)) == [0, 1, 2]
    assert fitting_columns(rows, 33, expendable=(2, 1)) == [0, 1]
    assert fitting_columns(rows, 33, expendable=(1, 2)) == [0, 2]
    assert fitting_columns(rows, 5, expendable=(1, 2)) == [0]
    assert fitting_columns(rows, 34, expendable=(2, 1), folded=()) == [0]


def test_a_window_that_a_server_states_names_the_member() -> None:
    """The source is followed by the route and member that the figure was read from, if there is one."""
    route = open_catalogue(Settings()).resolve("gpt-4o")
    assert window_source(route) == "table"
    assert window_source(replace(route, source="server", window_origin="/props n_ctx")) == "server: /props n_ctx"
