"""Options as settings, and the end of a command that cannot go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from proxy.cli.options import MISUSED, REFUSED, fail, overrides_of, settings_of


def test_an_upstream_replaces_the_files_list_and_a_window_is_added(tmp_path: Path) -> None:
    """A key configured for one server never goes to another."""
    file = tmp_path / "ullage.yaml"
    file.write_text("upstreams: [{name: a, base_url: 'http://a', api_key: secret}, {name: b, base_url: 'http://b'}]\n")
    settings = settings_of(file, overrides_of("http://127.0.0.1:9/v1", 8_192))
    assert [(each.base_url, each.api_key) for each in settings.upstreams] == [("http://127.0.0.1:9/v1", None)]
    assert settings.model("any").context_window == 8_192
    assert overrides_of() == {}


def test_problems_end_the_command_and_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its line; the code says that the file is wrong and not the command."""
    file = tmp_path / "ullage.yaml"
    file.write_text("sever: {}\nstore: {urll: x}\n")
    with pytest.raises(typer.Exit) as ended:
        settings_of(file, {})
    assert ended.value.exit_code == REFUSED
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(":1: sever: there is no such key")
    assert lines[-1] == "2 problems."


def test_an_end_has_its_code_and_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence goes to standard error."""
    with pytest.raises(typer.Exit) as ended:
        fail(MISUSED, "Give a file.")
    assert (ended.value.exit_code, capsys.readouterr().err) == (2, "Give a file.\n")
