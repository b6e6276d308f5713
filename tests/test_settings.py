"""Settings: layers, defaults, and every way of being wrong."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proxy.settings import Settings, SettingsError, load, model_table, packaged, refuse_open, summary, version

EXAMPLE = Path(__file__).parents[1] / "config" / "ullage.yaml"
UPSTREAM = "upstreams:\n  - {name: a, base_url: 'http://127.0.0.1:1/v1'}\n"


def written(folder, text):
    file = folder / "ullage.yaml"
    file.write_text(text, "utf-8")
    return file


def problems(folder, text, environ=None, overrides=None):
    with pytest.raises(SettingsError) as caught:
        load(written(folder, text), overrides or {}, environ or {})
    return caught.value.problems


def one(folder, text, environ=None):
    found = problems(folder, text, environ)
    assert len(found) == 1, found
    return found[0]


def test_the_example_is_the_defaults():
    """The commented example loads as it is and sets every key to its default."""
    example = load(EXAMPLE, {}, {})
    upstreams = [{"name": "openai", "base_url": "https://api.openai.com/v1"}]
    assert example == load(None, {("upstreams",): upstreams, ("models",): [{"name": "*"}]}, {})


def keys(schema, definitions, path=()):
    for branch in schema.get("anyOf", ()):
        yield from keys(branch, definitions, path)
    if "$ref" in schema:
        yield from keys(definitions[schema["$ref"].rpartition("/")[2]], definitions, path)
    if isinstance(schema.get("items"), dict):
        yield from keys(schema["items"], definitions, path)
    for name, inner in schema.get("properties", {}).items():
        yield (*path, name)
        yield from keys(inner, definitions, (*path, name))


def test_the_example_shows_every_key_of_the_schema():
    """A key that can be set is explained in the example, and nothing else is."""
    import yaml

    def spelt(value, path=()):
        if isinstance(value, list):
            for entry in value:
                yield from spelt(entry, path)
        elif isinstance(value, dict):
            for name, inner in value.items():
                yield (*path, name)
                yield from spelt(inner, (*path, name))

    schema = Settings.model_json_schema()
    declared = set(keys(schema, schema["$defs"]))
    assert set(spelt(yaml.safe_load(EXAMPLE.read_text()))) == declared
    assert ("server", "limits", "body") in declared
    assert json.dumps(schema)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path):
    """Each layer overrides the ones below it, key by key."""
    file = written(tmp_path, "server: {port: 1000, workers: 2, drain: 5}\n" + UPSTREAM)
    environ = {"ULLAGE_SERVER__PORT": "2000", "ULLAGE_SERVER__WORKERS": "3"}
    server = load(file, {("server", "port"): 3000}, environ).server
    assert (server.port, server.workers, server.drain, server.host) == (3000, 3, 5, "127.0.0.1")


def test_list_entries_are_addressed_by_name_in_the_environment(tmp_path):
    """ULLAGE_UPSTREAMS__NAME__KEY reaches that entry, adds one if there is none, and leaves the others alone."""
    file = written(tmp_path, "upstreams:\n  - {name: my-api, base_url: 'http://h/v1'}\n")
    environ = {
        "ULLAGE_UPSTREAMS__MY_API__API_KEY": "k1",
        "ULLAGE_UPSTREAMS__LOCAL__BASE_URL": "http://l/v1",
        "ULLAGE_UPSTREAMS__0__TIMEOUTS__IDLE": "7",
        "ULLAGE_UPSTREAMS__0__HEADERS__X_TEAM": "red",
    }
    settings = load(file, {("models", "*", "context_window"): 8192}, environ)
    first, second = settings.upstreams
    assert first.api_key is not None
    assert first.api_key.get_secret_value() == "k1"
    assert first.headers["x-team"].get_secret_value() == "red"
    assert (first.timeouts.idle, second.name, second.base_url) == (7, "local", "http://l/v1")
    assert settings.model("anything").context_window == 8192


def test_lists_from_the_environment():
    """A list can be given as words between commas or as YAML on one line; a secret is taken literally."""
    upstreams = "[{name: a, base_url: 'http://h/v1', headers: {x-team: red}}]"
    environ = {
        "ULLAGE_UPSTREAMS": upstreams,
        "ULLAGE_SERVER__ACCESS_KEYS": "one, two",
        "ULLAGE_STORE__KEY": "[not-a-list]${HOME}",
    }
    settings = load(None, {}, environ)
    assert [key.get_secret_value() for key in settings.server.access_keys] == ["one", "two"]
    assert settings.upstreams[0].headers["x-team"].get_secret_value() == "red"
    assert settings.store.key is not None
    assert settings.store.key.get_secret_value() == "[not-a-list]${HOME}"


def test_the_environment_of_a_kubernetes_service_is_not_configuration():
    """Variables such as ULLAGE_PORT, which a cluster sets by itself, are left alone."""
    assert load(None, {}, {"ULLAGE_PORT": "tcp://10.0.0.1:80", "ULLAGE_SERVICE_HOST": "10.0.0.1"}) == Settings()


def test_variables_are_filled_in_anywhere(tmp_path):
    """${NAME}, ${NAME:-default} and $${ work in plain, quoted and flow values, unquoted as well."""
    text = (
        "server: {port: ${PORT}, admin_key: ${ADMIN:-}, access_keys: [${KEY}]}\n"
        'upstreams:\n  - {name: ${NAME:-a}, base_url: "http://${HOST}/v1", headers: {x-raw: "$${KEY}"}}\n'
    )
    settings = load(written(tmp_path, text), {}, {"PORT": "99", "KEY": "s3cret", "HOST": "h:1"})
    assert (settings.server.port, settings.server.admin_key, settings.upstreams[0].name) == (99, None, "a")
    assert settings.server.access_keys[0].get_secret_value() == "s3cret"
    assert settings.upstreams[0].base_url == "http://h:1/v1"
    assert settings.upstreams[0].headers["x-raw"].get_secret_value() == "${KEY}"


def test_a_missing_variable_is_named_with_its_key(tmp_path):
    """An unset or empty variable without a default is an error that names it, its key and its line."""
    found = one(tmp_path, UPSTREAM + "server:\n  admin_key: ${ULLAGE_ADMN}\n", {"ULLAGE_ADMIN": "x"})
    assert (found.line, found.key) == (4, "server.admin_key")
    assert "ULLAGE_ADMN is not set (did you mean ULLAGE_ADMIN?)" in found.message
    assert "is empty" in one(tmp_path, "store: {key: '${EMPTY}'}", {"EMPTY": ""}).message


def test_secrets_come_from_files(tmp_path):
    """*_file keys read the secret, relative to the configuration file, without its line end."""
    (tmp_path / "up").write_text("upstream-key\n")
    (tmp_path / "access").write_text("one\ntwo\n")
    text = (
        "server: {access_keys_file: access}\nstore: {key_file: up}\n"
        "upstreams: [{name: a, base_url: 'http://h', api_key_file: up}]"
    )
    settings = load(written(tmp_path, text), {}, {})
    assert [key.get_secret_value() for key in settings.server.access_keys] == ["one", "two"]
    assert settings.upstreams[0].api_key == settings.store.key
    assert settings.store.key is not None
    assert settings.store.key.get_secret_value() == "upstream-key"


def test_words_that_yaml_1_1_takes_for_booleans(tmp_path):
    """mode: on, off and the true or false that a YAML 1.1 tool made of them all mean what they say."""
    for word, mode in (("on", "on"), ("off", "off"), ("true", "on"), ("false", "off"), ("observe", "observe")):
        text = f"compression: {{mode: {word}}}\nsummaries: {{mode: off}}\n"
        assert load(written(tmp_path, text), {}, {}).compression.mode == mode


def test_an_empty_file_is_the_defaults(tmp_path):
    """A file with nothing but comments changes nothing."""
    assert load(written(tmp_path, "# nothing\n"), {}, {}) == Settings()


WRONG = {
    "unknown key": ("server:\n  prot: 1\n", 2, "server.prot", "no such key", "Did you mean 'port'?"),
    "key of another section": ("port: 1\n", 1, "port", "no such key", "Did you mean 'server.port'?"),
    "unlike any": ("server: {zzz: 1}", 1, "server.zzz", "no such key", "Known here: host, port"),
    "in a list": (UPSTREAM + "    # c\n  - {name: b}\n", 4, "upstreams[1].base_url", "required", "Add `base_url"),
    "set twice": ("server:\n  port: 1\n  port: 2\n", 3, "server.port", "first in line 2", "Keep one"),
    "port too big": ("server: {port: 65536}", 1, "server.port", "less than or equal to 65535", "TCP port"),
    "no number": ("server:\n\n  port: x\n", 3, "server.port", "valid integer", "default is 8484"),
    "text as section": ("server: 5", 1, "server", "valid dictionary", "Write it as a section with: host"),
    "number as text": ("server: {host: 5}", 1, "server.host", "valid string", "in quotes"),
    "mark order": ("compression:\n  low_mark: 0.95\n", 2, "compression.low_mark", "not below high_mark", "Keep low"),
    "soft mark": ("compression:\n  soft_mark: 0.3\n", 2, "compression.soft_mark", "not between", "Keep low_mark"),
    "share": ("compression: {high_mark: 90}", 1, "compression.high_mark", "less than or equal to 1", "default is 0.9"),
    "shares": ("compression: {shares: {pins: .4}}", 1, "compression.shares", "add up to 0.53", "at 0.40 or less"),
    "policy to come": ("compression: {policy: economy}", 1, "compression.policy", "input should be 'fit'", "Write"),
    "summaries to come": ("summaries: {mode: background}", 1, "summaries.mode", "input should be", "not available"),
    "duplicate glob": ("models:\n- name: 'a*'\n- name: 'a*'\n", 3, "models[1].name", "never reached", "first match"),
    "hidden glob": ("models:\n- name: '*'\n- name: gpt-5\n", 3, "models[1].name", "'*' stands before", "move it up"),
    "upstream missing": (
        UPSTREAM + "models:\n- name: m\n  upstream: b\n", 5, "models[0].upstream", "no upstream 'b'", "Use one of: a"
    ),
    "default missing": ("server: {default_upstream: x}", 1, "server.default_upstream", "no upstream 'x'", "Add it"),
    "same name": (UPSTREAM + UPSTREAM[11:], 3, "upstreams[1].name", "a second upstream", "its own name"),
    "bad name": ("upstreams: [{name: 'a b', base_url: 'http://h'}]", 1, "upstreams[0].name", "cannot be", "letters"),
    "ftp": ("upstreams:\n- name: a\n  base_url: ftp://h\n", 3, "upstreams[0].base_url", "no http(s) URL", "Write it"),
    "query": ("upstreams: [{name: a, base_url: 'http://h/v1?k=1'}]", 1, "upstreams[0].base_url", "query", "Leave out"),
    "user": ("upstreams: [{name: a, base_url: 'http://u:p@h'}]", 1, "upstreams[0].base_url", "user", "api_key"),
    "bad port": ("upstreams: [{name: a, base_url: 'http://h:99999'}]", 1, "upstreams[0].base_url", "no URL", "Write"),
    "own header": (
        "upstreams: [{name: a, base_url: 'http://h', headers: {Host: x}}]", 1, "upstreams[0].headers.Host", "sets",
        "Take",
    ),
    "bad header": (
        "upstreams: [{name: a, base_url: 'http://h', headers: {'a b': x}}]", 1, "upstreams[0].headers.a b", "no header",
        "Use letters",
    ),
    "key with line end": ('store: {key: "a\\nb"}', 1, "store.key", "no HTTP header", "Remove spaces"),
    "empty access key": ("server:\n  access_keys:\n  - ok\n  - ''\n", 4, "server.access_keys[1]", "everybody", "Give"),
    "store": ("store: {url: mysql://h}", 1, "store.url", "no kind of store", "Use embedded"),
    "origin": ("server: {origins: ['https://h/path']}", 1, "server.origins[0]", "no origin", "scheme, host and port"),
    "size": ("server: {limits: {body: 3 apples}}", 1, "server.limits.body", "valid integer", "default is 67108864"),
    "body over all": ("server: {limits: {body: 1GiB}}", 1, "server.limits.in_flight_bytes", "less than one", "Raise"),
    "window": ("models: [{name: m, unknown_window: big}]", 1, "models[0].unknown_window", "neither learn", "131072"),
    "encoding": ("models: [{name: m, tokenizer: gpt2}]", 1, "models[0].tokenizer", "input should be", "o200k_base"),
    "zero window": ("models: [{name: m, context_window: 0}]", 1, "models[0].context_window", "greater than 0", "Input"),
    "secret file": ("store: {key_file: /nowhere}", 1, "store.key_file", "cannot be read", "Give the path"),
    "secret twice": ("store: {key: a, key_file: b}", 1, "store.key_file", "key is set as well", "Keep key or"),
    "bare star": ("models:\n  - {name: *}\n", 2, "", "not valid YAML", "in quotes"),
    "tab": ("server:\n\tport: 1\n", 2, "", "not valid YAML", "Indent with spaces"),
    "open bracket": ("server: {port: 1\n", 2, "", "not valid YAML", "brackets"),
    "no mapping": ("- a\n", 1, "", "not a mapping", "sections"),
    "python tag": ("store: {key: !!python/name:os.system x}", 1, "store.key", "not supported", "Leave the tag out"),
    "key is a list": ("? [a]\n: 1\n", 1, "?", "must be a word", "name: value"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_file_line_key_and_remedy(tmp_path, name):
    """Every mistake is reported where it stands, with what to do about it."""
    text, line, key, message, remedy = WRONG[name]
    found = one(tmp_path, text)
    assert (found.file, found.line, found.key) == (str(tmp_path / "ullage.yaml"), line, key)
    assert message in found.message
    assert remedy in found.remedy
    assert str(found).startswith(f"{found.file}:{line}: ")


def test_all_problems_are_reported_together_in_file_order(tmp_path):
    """One run names everything that is wrong."""
    found = problems(tmp_path, "server:\n  prot: 1\n  port: x\ncompression:\n  high_mark: 7\n  mdoe: on\n")
    assert [problem.line for problem in found] == [2, 3, 5, 6]


def test_wrong_values_are_traced_to_the_variable_or_flag(tmp_path):
    """A problem with a value from the environment or the command line says so instead of naming the file."""
    environ = {"ULLAGE_SERVER__PORT": "x", "ULLAGE_SERVR__PORT": "1"}
    found = {problem.file: problem for problem in problems(tmp_path, UPSTREAM, environ, {("store", "url"): "x"})}
    assert set(found) == {*(f"environment variable {name}" for name in environ), "the command line"}
    assert found["environment variable ULLAGE_SERVR__PORT"].remedy == "Did you mean 'server'?"
    assert all(problem.line is None for problem in found.values())


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


def test_secrets_never_show(tmp_path):
    """Neither a repr, an error nor the start-up summary holds a configured secret."""
    text = (
        "server: {access_keys: [CANARY1], admin_key: CANARY2, port: CANARY}\n"
        "store: {key: CANARY3, url: 'redis://:CANARY4@h/0?password=CANARY5'}\n"
        "upstreams: [{name: a, base_url: 'http://h', api_key: CANARY6, headers: {authorization: CANARY7}}]\n"
    )
    fine = text.replace(", port: CANARY}", "}")
    settings = load(written(tmp_path, fine), {}, {})
    shown = repr(settings.server) + repr(settings.upstreams) + summary(settings, {})
    assert "CANARY" not in shown
    assert "CANARY" not in str(problems(tmp_path, text)[0])
    assert "CANARY" not in str(problems(tmp_path, fine.replace("CANARY6", '"CANARY 6"'))[0])


@pytest.mark.parametrize(
    ("host", "extra", "refused"),
    [
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("::1", "", False),
        ("::ffff:127.0.0.1", "", False),
        ("0.0.0.0", "", True),
        ("::", "", True),
        ("proxy.example.org", "", True),
        ("0.0.0.0", ", access_keys: [k]", False),
        ("0.0.0.0", ", open: true", False),
    ],
)
def test_upstream_keys_are_not_offered_to_strangers(tmp_path, host, extra, refused):
    """An address others can reach, an upstream key and no access key: refused, unless told to insist."""
    text = f"server: {{host: '{host}'{extra}}}\nupstreams: [{{name: a, base_url: 'http://h', %s}}]\n"
    for secret in ("api_key: k", "headers: {Authorization: k}"):
        reason = refuse_open(load(written(tmp_path, text % secret), {}, {}))
        assert (reason is not None) == refused
    assert refuse_open(load(written(tmp_path, text % "headers: {x-team: red}"), {}, {})) is None


def test_rules_and_upstreams_are_found(tmp_path):
    """The first matching rule counts, its empty upstream means the default one, and case matters."""
    text = (
        "server: {default_upstream: b}\n"
        "upstreams: [{name: a, base_url: 'http://a/'}, {name: b, base_url: 'http://b'}]\n"
        "models: [{name: 'gpt-5*', upstream: a, context_window: 9}, {name: 'GPT-5*', context_window: 8}]\n"
    )
    settings = load(written(tmp_path, text), {}, {})
    assert settings.upstream(settings.model("gpt-5-mini").upstream).base_url == "http://a"
    assert (settings.model("GPT-5").context_window, settings.model("x").context_window) == (8, None)
    assert settings.upstream("").name == settings.default_upstream().name == "b"
    with pytest.raises(KeyError):
        settings.upstream("c")


def test_the_summary_says_what_is_served(tmp_path):
    """Address, upstreams, windows, store, access and marks are all there, with what only the running proxy knows."""
    text = UPSTREAM + "models: [{name: 'q*', context_window: 8192, upstream: a}, {name: '*', unknown_window: 131072}]\n"
    settings = load(written(tmp_path, text), {("server", "workers"): 2}, {})
    shown = summary(settings, {"store": "embedded, 3 keys", "window *": "32,768 tokens (said by the server)"})
    for part in (
        "http://127.0.0.1:8484/v1  (2 workers)",
        "a  http://127.0.0.1:1/v1  (the client's key, default)",
        "q*  window: 8,192 tokens  -> a",
        "*  window: 32,768 tokens (said by the server)",
        "embedded, 3 keys",
        "this machine only, no key",
        "on: above 90% of the room, down to 40%",
    ):
        assert part in shown


def test_packaged_data_is_found():
    """The example is read as package data, or from the checkout; a name that is neither is an error."""
    assert packaged("ullage.yaml").read_text("utf-8") == EXAMPLE.read_text("utf-8")
    with pytest.raises(FileNotFoundError):
        packaged("nothing.yaml")
    assert version()


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="needs litellm's table")
def test_the_model_table_is_read_without_importing_litellm():
    """Windows of known models come from the table, the explaining first entry does not, and litellm stays out."""
    table = model_table()
    assert table["gpt-4o"].max_input_tokens == 128_000
    assert table["gpt-4o"].mode == "chat"
    assert "sample_spec" not in table
    script = "import sys; from proxy.settings import model_table; model_table(); print('litellm' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ, check=True)
    assert ran.stdout.strip() == "False"
