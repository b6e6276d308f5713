"""The console of commands that print tables, and the words for the source of a window."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.cli.output import table_console, window_source
from proxy.settings import Settings
from proxy.upstream_wiring import open_catalogue


def test_nothing_is_folded_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """A long line stays one line, and brackets are printed as they are unless markup is wanted."""
    table_console().print("[b]" + "word " * 200)
    table_console(markup=True).print("[b]word[/b]")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("[b]word")
    assert len(first) > 900
    assert second == "word"


def test_a_window_that_a_server_states_names_the_member() -> None:
    """The source is followed by the route and member that the figure was read from, if there is one."""
    route = open_catalogue(Settings()).resolve("gpt-4o")
    assert window_source(route) == "table"
    assert window_source(replace(route, source="server", window_origin="/props n_ctx")) == "server: /props n_ctx"
