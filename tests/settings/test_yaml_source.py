"""YAML as it stands in a file: variables, positions, and what cannot be read."""

import time

import pytest

from proxy.settings import Settings, SettingsError, load
from proxy.settings.yaml_source import read_yaml
from tests.support.settings_files import UPSTREAM, only_problem, problems, write_settings


def test_variables_are_filled_in_anywhere(tmp_path):
    """${NAME}, ${NAME:-default} and $${ work in plain, quoted and flow values, unquoted as well."""
    text = (
        "server: {port: ${PORT}, admin_key: ${ADMIN:-}, access_keys: [${KEY}]}\n"
        'upstreams:\n  - {name: ${NAME:-a}, base_url: "http://${HOST}/v1", headers: {x-raw: "$${KEY}"}}\n'
    )
    settings = load(write_settings(tmp_path, text), {}, {"PORT": "99", "KEY": "s3cret", "HOST": "h:1"})
    assert (settings.server.port, settings.server.admin_key, settings.upstreams[0].name) == (99, None, "a")
    assert settings.server.access_keys[0].get_secret_value() == "s3cret"
    assert settings.upstreams[0].base_url == "http://h:1/v1"
    assert settings.upstreams[0].headers["x-raw"].get_secret_value() == "${KEY}"


def test_a_missing_variable_is_named_with_its_key(tmp_path):
    """An unset or empty variable without a default is an error that names it, its key and its line."""
    found = only_problem(tmp_path, UPSTREAM + "server:\n  admin_key: ${ULLAGE_ADMN}\n", {"ULLAGE_ADMIN": "x"})
    assert (found.line, found.key) == (4, "server.admin_key")
    assert "ULLAGE_ADMN is not set (did you mean ULLAGE_ADMIN?)" in found.message
    assert "is empty" in only_problem(tmp_path, "store: {key: '${EMPTY}'}", {"EMPTY": ""}).message


def test_an_empty_file_is_the_defaults(tmp_path):
    """A file with nothing but comments changes nothing."""
    assert load(write_settings(tmp_path, "# nothing\n"), {}, {}) == Settings()


def test_an_unreadable_file_is_a_problem(tmp_path):
    """A file that is missing, a folder or no text gives one problem with a remedy."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none", tmp_path, tmp_path / "binary"):
        with pytest.raises(SettingsError) as caught:
            load(path, {}, {})
        assert "cannot be read" in caught.value.problems[0].message


def test_aliases_cannot_blow_up(tmp_path):
    """A few lines that unfold into billions of values, or into themselves, are refused at once."""
    bomb = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
    )
    began = time.monotonic()
    for text in (bomb, "server: &s\n  limits: *s\n"):
        assert any("nested values" in problem.message for problem in problems(tmp_path, text))
    assert time.monotonic() - began < 30


def test_a_file_of_too_many_values_has_one_problem(tmp_path):
    """Aliases that expand into more values than are read, and a list nested too deeply, are one problem each."""
    many = "a: &a [" + "1, " * 1000 + "1]\nb: &b [" + "*a, " * 30 + "*a]\n"
    deep = "a: " + "[" * 40 + "]" * 40 + "\n"
    for text in (many, deep):
        file = tmp_path / "many.yaml"
        file.write_text(text)
        assert [problem.message for problem in read_yaml(file, {}).problems] == ["too many or too deeply nested values"]


def test_a_list_that_is_too_long_has_one_problem(tmp_path):
    """The part of a file that was not read is not validated."""
    upstreams = "".join(f"  - {{name: u{number}, base_url: 'http://h/v1'}}\n" for number in range(9_000))
    assert len(problems(tmp_path, f"upstreams:\n{upstreams}")) == 1


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (b'store: {path: "C:\\Users\\me"}\n', "single quotes"),
        (b'store: {path: "C:\\models"}\n', "single quotes"),
        ("server: {port: 1}\n".encode("utf-16"), "Save it as UTF-8"),
        (b"store: {path: '/home/jos\xe9'}\n", "Save it as UTF-8"),
    ],
)
def test_files_from_windows_get_advice_that_helps(tmp_path, content, advice):
    """A path in double quotes and a file in another encoding say what to change."""
    file = tmp_path / "ullage.yaml"
    file.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        load(file, {}, {})
    assert advice in caught.value.problems[0].remedy
