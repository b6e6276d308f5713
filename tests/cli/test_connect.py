"""A client's configuration printed, written and taken back, as its user does it."""

from __future__ import annotations

import json
import re
import stat
import tomllib
from pathlib import Path

import pytest
import yaml
from dotenv import dotenv_values
from typer.testing import CliRunner

from proxy.cli import app
from proxy.cli.clients import ClientFacts, clients
from proxy.cli.connect import client_files

CODEX = '# mine\nmodel = "o3" # the old one\n\n[mcp_servers.x]\ncommand = "y"\n'
AIDER = "# mine\nauto-commits: false  # never\nmodel: o3\n"
QWEN = "# mine\nexport OPENAI_MODEL='o3'\nOTHER=\"a b\"\n"
CLAUDE = '{\n    "env": {\n        "HTTP_PROXY": "http://x"\n    },\n    "model": "opus"\n}\n'
OWN = {
    "codex": (".codex/config.toml", CODEX),
    "aider": (".aider.conf.yml", AIDER),
    "qwen-code": (".qwen/.env", QWEN),
    "claude-code": (".claude/settings.json", CLAUDE),
}
WITH_FILES = [name for name, client in clients().items() if client.files]


def connect(home: Path, *arguments: str, code: int = 0) -> str:
    """Return the output of ``ullage connect``; the exit code must be *code*."""
    environ: dict[str, str | None] = {"HOME": str(home), "XDG_DATA_HOME": None, "XDG_CONFIG_HOME": None}
    ran = CliRunner().invoke(app, ["connect", *arguments], env=environ)
    assert ran.exit_code == code, ran.output
    return ran.output


def test_without_a_client_all_are_listed(tmp_path: Path) -> None:
    """The list names every client and the API it speaks."""
    output = connect(tmp_path)
    assert [line.split()[0] for line in output.splitlines()] == list(clients())


def test_printing_changes_nothing(tmp_path: Path) -> None:
    """Without --write the configuration is printed, ready to paste, and no file is made."""
    output = connect(
        tmp_path, "codex", "--model", "gpt-5-mini", "--window", "32768", "--url", "http://10.0.0.1:9000/v1"
    )
    document = tomllib.loads(output)
    assert document["model_providers"]["ullage"]["base_url"] == "http://10.0.0.1:9000/v1"
    assert document["model_context_window"] == 32_768
    assert not list(tmp_path.rglob("config.toml"))


def test_the_window_is_the_known_one_and_roomy_writes_ten_times_that(tmp_path: Path) -> None:
    """For a model in the table its window is written; --roomy makes it ten times as large."""
    plain, roomy = (
        tomllib.loads(connect(tmp_path, "codex", "--model", "gpt-4o", *extra))["model_context_window"]
        for extra in ((), ("--roomy",))
    )
    assert (plain, roomy) == (128_000, 1_280_000)


@pytest.mark.parametrize("name", WITH_FILES)
@pytest.mark.slow
def test_written_files_hold_what_was_printed_and_undo_leaves_none(tmp_path: Path, name: str) -> None:
    """Without files, --write creates those that were printed, twice the same, and --undo removes them."""
    wanted = ("--model", "some-model", "--window", "32768")
    printed = connect(tmp_path, name, *wanted)
    connect(tmp_path, name, *wanted, "--write")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "connected.json"]
    before = {path: path.read_text() for path in files}
    assert files
    assert all(text.strip() in printed for text in before.values())
    connect(tmp_path, name, *wanted, "--write")
    assert {path: path.read_text() for path in files} == before
    connect(tmp_path, name, "--undo")
    assert not [path for path in files if path.exists()]


@pytest.mark.parametrize("name", OWN)
def test_what_was_there_stays_and_comes_back(tmp_path: Path, name: str) -> None:
    """A file of the user's own keeps its comments and other values, and is byte for byte the old one after --undo."""
    where, text = OWN[name]
    file = tmp_path / where
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(0o640)
    connect(tmp_path, name, "--model", "gpt-5-mini", "--write")
    changed = file.read_text()
    assert "gpt-5-mini" in changed
    assert "8484" in changed
    assert changed.count("mine") == text.count("mine")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    connect(tmp_path, name, "--undo")
    assert file.read_text() == text


def test_formats_are_read_back_by_their_own_readers(tmp_path: Path) -> None:
    """The values added beside the user's own are valid for other readers of the format."""
    for name, (where, text) in OWN.items():
        (tmp_path / where).parent.mkdir(exist_ok=True)
        (tmp_path / where).write_text(text)
        connect(tmp_path, name, "--model", "gpt-5-mini", "--write")
    assert tomllib.loads((tmp_path / OWN["codex"][0]).read_text())["mcp_servers"] == {"x": {"command": "y"}}
    assert yaml.safe_load((tmp_path / OWN["aider"][0]).read_text())["auto-commits"] is False
    assert dotenv_values(tmp_path / OWN["qwen-code"][0])["OTHER"] == "a b"
    assert json.loads((tmp_path / OWN["claude-code"][0]).read_text())["env"]["HTTP_PROXY"] == "http://x"


def test_what_the_user_changed_since_is_left_alone(tmp_path: Path) -> None:
    """--undo takes back only what still is as it was written, and names the rest."""
    file = tmp_path / ".codex" / "config.toml"
    file.parent.mkdir()
    file.write_text(CODEX)
    connect(tmp_path, "codex", "--model", "gpt-5-mini", "--write")
    file.write_text(file.read_text().replace('"gpt-5-mini"', '"o4"'))
    output = connect(tmp_path, "codex", "--undo")
    assert "left alone" in output
    assert tomllib.loads(file.read_text()) == {"model": "o4", "mcp_servers": {"x": {"command": "y"}}}
    assert "Nothing" in connect(tmp_path, "codex", "--undo")


def test_a_file_that_cannot_be_kept_whole_is_not_touched(tmp_path: Path) -> None:
    """JSON with comments is refused with the reason, and stays as it is."""
    file = tmp_path / ".claude" / "settings.json"
    file.parent.mkdir()
    file.write_text('{\n  // mine\n  "model": "opus"\n}\n')
    output = connect(tmp_path, "claude-code", "--write", code=1)
    assert str(file) in output
    assert "by hand" in output
    assert "// mine" in file.read_text()


@pytest.mark.parametrize(
    "content",
    [b'{"a": "\\ud83d"}', b'{\r\n  "a": 1\r\n}\r\n', '{"名": "値"}'.encode()],
    ids=["half a surrogate pair", "CRLF", "any letters"],
)
def test_every_byte_comes_back(tmp_path: Path, content: bytes) -> None:
    """What UTF-8 cannot write stays escaped, and an undo restores the file byte for byte."""
    file = tmp_path / ".claude" / "settings.json"
    file.parent.mkdir()
    file.write_bytes(content)
    connect(tmp_path, "claude-code", "--model", "m", "--write")
    written = json.loads(file.read_bytes())
    assert {name: written[name] for name in json.loads(content)} == json.loads(content)
    connect(tmp_path, "claude-code", "--undo")
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "reason"), [(b'{"a": "\xe9"}', "it is not UTF-8 text"), (None, "cannot be changed: Is a directory.")]
)
def test_a_file_that_is_no_text_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """A file in another encoding, or a directory in its place, is refused in words and stays as it is."""
    file = tmp_path / ".claude" / "settings.json"
    file.parent.mkdir()
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    output = connect(tmp_path, "claude-code", "--write", code=1)
    assert str(file) in output
    assert reason in output
    assert content is None or file.read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["nobody"], "No client is called nobody"),
        (["codx"], "Did you mean codex?"),
        (["cline"], "--model NAME"),
        (["llama-index"], "--model NAME"),
        (["codex", "--write", "--undo"], "not both"),
        (["opencode"], "--model NAME"),
    ],
)
def test_a_wrong_use_says_what_is_right(tmp_path: Path, arguments: list[str], output: str) -> None:
    """An unknown client, contradicting options and a missing model end with code 2 and the remedy."""
    assert output in connect(tmp_path, *arguments, code=2)


@pytest.mark.slow
def test_the_document_shows_what_is_printed(tmp_path: Path) -> None:
    """docs/clients.md holds exactly what ``ullage connect`` prints for each client it shows, and names only those."""
    text = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    tested = dict.fromkeys(re.findall(r"^\| [^|]+ \| `([a-z-]+)` \|", text, re.MULTILINE))
    assert len(tested) >= 7
    assert tested.keys() <= clients().keys()
    for name in tested:
        output = connect(tmp_path, name, "--model", "MODEL", "--window", "32768").replace(str(tmp_path), "~").rstrip()
        assert f"```text\n{output}\n```\n" in text, name


def test_what_a_file_must_have_is_only_added_where_it_is_missing(tmp_path: Path) -> None:
    """Continue's file gets the name and version it needs; one that has them keeps its own, and undo takes back ours."""
    file = tmp_path / ".continue/config.yaml"
    connect(tmp_path, "continue", "--write", "--model", "m")
    document = yaml.safe_load(file.read_text())
    assert (document["name"], document["version"], document["schema"]) == ("Ullage", "1.0.0", "v1")
    connect(tmp_path, "continue", "--undo")
    assert not file.exists()
    own = "name: mine\nversion: 2.0.0\nmodels: []\n"
    file.write_text(own)
    connect(tmp_path, "continue", "--write", "--model", "m")
    document = yaml.safe_load(file.read_text())
    assert (document["name"], document["version"], document["schema"]) == ("mine", "2.0.0", "v1")
    connect(tmp_path, "continue", "--undo")
    assert file.read_text() == own


def test_writing_again_with_another_model_is_undone_whole(tmp_path: Path) -> None:
    """After two models were written, --undo takes back both, also if the user edited the file meanwhile."""
    file = tmp_path / ".config" / "opencode" / "opencode.json"
    file.parent.mkdir(parents=True)
    own = '{\n  "theme": "dark"\n}\n'
    file.write_text(own)
    for model in ("first", "second"):
        connect(tmp_path, "opencode", "--write", "--model", model)
    connect(tmp_path, "opencode", "--undo")
    assert file.read_text() == own
    for model in ("first", "second"):
        connect(tmp_path, "opencode", "--write", "--model", model)
    file.write_text(file.read_text().replace('"dark"', '"light"'))
    connect(tmp_path, "opencode", "--undo")
    assert json.loads(file.read_text()) == {"theme": "light"}


def test_what_the_user_added_between_two_writes_stays(tmp_path: Path) -> None:
    """A setting added after the first --write and before the second one is still there after --undo."""
    file = tmp_path / ".codex" / "config.toml"
    file.parent.mkdir()
    file.write_text(CODEX)
    connect(tmp_path, "codex", "--model", "gpt-5-mini", "--write")
    file.write_text(file.read_text() + '\n[mcp_servers.new]\ncommand = "z"\n')
    connect(tmp_path, "codex", "--model", "gpt-5-nano", "--write")
    connect(tmp_path, "codex", "--undo")
    restored = tomllib.loads(file.read_text())
    assert restored == {"model": "o3", "mcp_servers": {"x": {"command": "y"}, "new": {"command": "z"}}}


def test_a_value_that_the_user_changed_between_two_writes_is_restored(tmp_path: Path) -> None:
    """If the user replaced a written value and --write replaced it again, --undo restores the user's."""
    file = tmp_path / ".codex" / "config.toml"
    file.parent.mkdir()
    file.write_text(CODEX)
    connect(tmp_path, "codex", "--model", "gpt-5-mini", "--write")
    file.write_text(file.read_text().replace('"gpt-5-mini"', '"o4"'))
    connect(tmp_path, "codex", "--model", "gpt-5-nano", "--write")
    connect(tmp_path, "codex", "--undo")
    assert tomllib.loads(file.read_text()) == {"model": "o4", "mcp_servers": {"x": {"command": "y"}}}


def test_a_value_in_the_way_is_named(tmp_path: Path) -> None:
    """A text where a table should be is left as it is, and the message names the file and the value."""
    file = tmp_path / ".codex" / "config.toml"
    file.parent.mkdir()
    file.write_text('model_providers = "none"\n')
    output = connect(tmp_path, "codex", "--write", code=1)
    assert f"{file} has another kind of value where model_providers.ullage should be" in output
    assert file.read_text() == 'model_providers = "none"\n'


def test_the_address_is_the_one_that_the_proxys_file_configures(tmp_path: Path) -> None:
    """With --config the client is pointed at the host and port of that file."""
    config = tmp_path / "ullage.yaml"
    config.write_text("server: {host: 0.0.0.0, port: 9000}\n")
    output = connect(tmp_path, "openai", "--config", str(config))
    assert "export OPENAI_BASE_URL=http://127.0.0.1:9000/v1\n" in output


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["codex"], "Without --model NAME"),
        (["opencode", "--model", "unknown-model"], "The window of unknown-model is not known: give --window N"),
        (["llama-index", "--model", "unknown-model"], "The window of unknown-model is not known: give --window N"),
        (["codex", "--model", "unknown-model", "--window", "9000"], ""),
        (["codex", "--model", "gpt-4o"], ""),
        (["openai"], ""),
    ],
)
def test_a_missing_window_is_pointed_out(tmp_path: Path, arguments: list[str], advice: str) -> None:
    """If a client's settings include a window and it is not known, the last line says which option gives it."""
    last = connect(tmp_path, *arguments).splitlines()[-1]
    if advice:
        assert advice in last
    else:
        assert "--" not in last


def test_files_are_where_the_environment_moves_them() -> None:
    """A client's own variable moves its folder, XDG_CONFIG_HOME whatever is below ~/.config, and nothing else."""
    known = clients()
    facts = ClientFacts("http://127.0.0.1:8484", "KEY", "some-model", 32_768)
    environ = {"XDG_CONFIG_HOME": "/moved", "LLM_USER_PATH": "/own", "HOME": "/home/user"}
    paths = {name: [str(file.path) for file in client_files(known[name], facts, environ)] for name in known}
    assert paths["crush"] == ["/moved/crush/crush.json"]
    assert paths["llm"] == ["/own/extra-openai-models.yaml"]
    assert paths["qwen-code"] == [str(Path("~/.qwen/.env").expanduser())]
