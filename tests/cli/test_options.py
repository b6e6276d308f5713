"""Options as settings, and the end of a command that cannot go on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from proxy.cli import app
from proxy.cli.options import (
    MISUSED,
    REFUSED,
    fail,
    http_address,
    model_name,
    overrides_of,
    picture_file,
    settings_of,
    variable_name,
    writable_file,
)


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


@pytest.mark.parametrize("command", ["connect codex", "run", "fit", "replay", "doctor"])
@pytest.mark.parametrize("name", ["", " ", "a\nb"])
def test_an_empty_model_is_none(command: str, name: str, tmp_path: Path) -> None:
    """It would be written into a client's file, or sent: a variable of a script that is not set."""
    words = [*command.split(), "--model", name, *{"run": ["true"]}.get(command, [])]
    if command in ("fit", "replay"):
        words.append(str(tmp_path))
    ran = CliRunner().invoke(app, words)
    assert (ran.exit_code, ran.output) == (MISUSED, "--model needs the name of a model.\n")


@pytest.mark.parametrize(
    "words", ["connect codex --model m --key", "models --key-env", "doctor --key-env", "top --key-env"]
)
@pytest.mark.parametrize("value", ["", "sk-proj-0123", "A B", "1A"])
def test_a_key_in_place_of_its_variable_is_refused_and_not_repeated(words: str, value: str) -> None:
    """A client's file would have it as a name, in plain text."""
    ran = CliRunner().invoke(app, [*words.split(), value])
    assert ran.exit_code == MISUSED
    assert "the name of the environment variable" in ran.output
    assert value not in ran.output.split() or not value


@pytest.mark.parametrize(
    "value", ["", "foo", "localhost:8484", "//host", "ftp://host", "http://", "http://a b", "http://a:x", "http://[a"]
)
def test_an_address_has_scheme_and_host(value: str) -> None:
    """A client's file would get an address that no client can call."""
    ran = CliRunner().invoke(app, ["connect", "codex", "--model", "m", "--url", value])
    assert ran.exit_code == MISUSED
    assert "give scheme and host" in ran.output


def test_right_values_stay() -> None:
    """Also those of other notations."""
    assert model_name("accounts/x/models/Llama 3:8b@q4") == "accounts/x/models/Llama 3:8b@q4"
    assert variable_name("_MY_KEY2") == "_MY_KEY2"
    assert http_address("https://[::1]:8484/prefix/v1") == "https://[::1]:8484/prefix/v1"
    assert model_name(None) is variable_name(None) is http_address(None) is None


@pytest.mark.parametrize("command", ["replay", "fit"])
@pytest.mark.parametrize("at", ["no/page.html", "."])
def test_a_file_that_cannot_be_written_ends_the_command_before_its_work(
    tmp_path: Path, command: str, at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path of the conversations is not even looked at."""
    ran = CliRunner().invoke(app, [command, str(tmp_path / "missing"), "--html", str(tmp_path / at)])
    assert ran.exit_code == MISUSED
    assert f"{tmp_path / at}: cannot be written" in ran.stderr
    assert "missing" not in ran.stderr


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    """Neither is an old one emptied nor a new one left behind by the check."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("page")
    assert (writable_file(old), writable_file(new), writable_file(None)) == (old, new, None)
    assert (old.read_text(), new.exists()) == ("page", False)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert writable_file(pipe) == pipe


def test_a_picture_needs_its_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without matplotlib the error says what to install before hours of conversations are planned; no file is left."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(typer.Exit) as ended:
        picture_file(tmp_path / "p.png")
    assert ended.value.exit_code == REFUSED
    assert "pip install 'ullage[plot]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
