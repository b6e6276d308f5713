"""Layers, secrets from files, and every way of being wrong."""

import pytest

from proxy.settings import Settings, load
from tests.support.settings_files import UPSTREAM, only_problem, problems, write_settings


def test_flags_win_over_environment_over_file_over_defaults(tmp_path):
    """Each layer overrides the ones below it, key by key."""
    file = write_settings(tmp_path, "server: {port: 1000, workers: 2, drain: 5}\n" + UPSTREAM)
    environ = {"ULLAGE_SERVER__PORT": "2000", "ULLAGE_SERVER__WORKERS": "3"}
    server = load(file, {("server", "port"): 3000}, environ).server
    assert (server.port, server.workers, server.drain, server.host) == (3000, 3, 5, "127.0.0.1")


def test_list_entries_are_addressed_by_name_in_the_environment(tmp_path):
    """ULLAGE_UPSTREAMS__NAME__KEY reaches that entry, adds one if there is none, and leaves the others alone."""
    file = write_settings(tmp_path, "upstreams:\n  - {name: my-api, base_url: 'http://h/v1'}\n")
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


def test_secrets_come_from_files(tmp_path):
    """*_file keys read the secret, relative to the configuration file, without its line end."""
    (tmp_path / "up").write_text("upstream-key-0123456789\n")
    (tmp_path / "access").write_text("one\ntwo\n")
    text = (
        "server: {access_keys_file: access}\nstore: {key_file: up}\n"
        "upstreams: [{name: a, base_url: 'http://h', api_key_file: up}]"
    )
    settings = load(write_settings(tmp_path, text), {}, {})
    assert [key.get_secret_value() for key in settings.server.access_keys] == ["one", "two"]
    assert settings.upstreams[0].api_key == settings.store.key
    assert settings.store.key is not None
    assert settings.store.key.get_secret_value() == "upstream-key-0123456789"


WRONG = {
    "unknown key": ("server:\n  prot: 1\n", 2, "server.prot", "no such key", "Did you mean 'port'?"),
    "key of another section": ("port: 1\n", 1, "port", "no such key", "Did you mean 'server.port'?"),
    "unlike any": ("server: {zzz: 1}", 1, "server.zzz", "no such key", "Known here: host, port"),
    "in a list": (UPSTREAM + "    # c\n  - {name: b}\n", 4, "upstreams[1].base_url", "required", "Add `base_url"),
    "set twice": ("server:\n  port: 1\n  port: 2\n", 3, "server.port", "first in line 2", "Keep one"),
    "port too big": ("server: {port: 65536}", 1, "server.port", "less than or equal to 65535", "TCP port"),
    "no number": ("server:\n\n  port: x\n", 3, "server.port", "valid integer", "default is 8484"),
    "text as section": ("server: 5", 1, "server", "is empty, or no section", "Write keys below it"),
    "number as text": ("server: {host: 5}", 1, "server.host", "valid string", "in quotes"),
    "mark order": ("compression:\n  low_mark: 0.95\n", 2, "compression.low_mark", "not below high_mark", "Keep low"),
    "soft mark": ("compression:\n  soft_mark: 0.3\n", 2, "compression.soft_mark", "not between", "Keep low_mark"),
    "share": ("compression: {high_mark: 90}", 1, "compression.high_mark", "less than or equal to 1", "default is 0.9"),
    "shares": ("compression: {shares: {pins: .4}}", 1, "compression.shares", "add up to 0.60", "at 0.40 or less"),
    "summaries": ("summaries: {mode: always}", 1, "summaries.mode", "input should be", "'inline' or 'off'"),
    "summary share": ("compression: {shares: {summary: .25}}", 1, "compression.shares.summary", "more than", "Keep it"),
    "policy": ("compression: {policy: cheap}", 1, "compression.policy", "input should be 'fit'", "Write"),
    "buffer order": (
        "compression:\n  buffers:\n    warning: 9000\n    auto_compact: 12000\n", 3, "compression.buffers.warning",
        "not above auto_compact (12000)", "Keep blocking < auto_compact < warning",
    ),
    "no buffer": ("compression: {buffers: {blocking: 0}}", 1, "compression.buffers.blocking", "greater than 0", ""),
    "duplicate glob": ("models:\n- name: 'a*'\n- name: 'a*'\n", 3, "models[1].name", "never reached", "first match"),
    "hidden glob": ("models:\n- name: '*'\n- name: gpt-5\n", 3, "models[1].name", "'*' stands before", "move it up"),
    "upstream missing": (
        UPSTREAM + "models:\n- name: m\n  upstream: b\n", 5, "models[0].upstream", "no upstream 'b'", "Use one of: a"
    ),
    "default missing": ("server: {default_upstream: x}", 1, "server.default_upstream", "no upstream 'x'", "Add it"),
    "same name": (UPSTREAM + UPSTREAM[11:], 3, "upstreams[1].name", "a second upstream", "its own name"),
    "bad name": ("upstreams: [{name: 'a b', base_url: 'http://h'}]", 1, "upstreams[0].name", "cannot be", "letters"),
    "ftp": ("upstreams:\n- name: a\n  base_url: ftp://h\n", 3, "upstreams[0].base_url", "no http(s) URL", "Write it"),
    "a whole route": (
        "upstreams: [{name: a, base_url: 'http://h/v1/chat/completions/'}]", 1, "upstreams[0].base_url",
        "ends in the route /chat/completions", "mostly in /v1",
    ),
    "v1 twice": ("upstreams: [{name: a, base_url: 'http://h/v1/v1'}]", 1, "upstreams[0].base_url", "twice", "once"),
    "empty section": ("store: {}\nserver:\n  # port: 1\n", 2, "server", "is empty, or no section", "take the line out"),
    "query": ("upstreams: [{name: a, base_url: 'http://h/v1?k=1'}]", 1, "upstreams[0].base_url", "query", "Leave out"),
    "fragment": (
        "upstreams: [{name: a, base_url: 'http://h/v1#k'}]", 1, "upstreams[0].base_url", "fragment", "Leave out"
    ),
    "no scheme": ("upstreams: [{name: a, base_url: 'h/v1'}]", 1, "upstreams[0].base_url", "no http(s) URL", "Write it"),
    "no host": ("upstreams: [{name: a, base_url: 'http:///v1'}]", 1, "upstreams[0].base_url", "no http(s)", "Write"),
    "user": ("upstreams: [{name: a, base_url: 'http://u:p@h'}]", 1, "upstreams[0].base_url", "user", "api_key"),
    "proxy": (
        "upstreams: [{name: a, base_url: 'https://h', proxy: 'socks5://h:1'}]", 1, "upstreams[0].proxy",
        "no http URL of a proxy", "http://user:password@",
    ),
    "proxy of a provider": (
        "upstreams: [{name: a, provider: gemini, proxy: 'http://h:1'}]", 1, "upstreams[0].proxy", "LiteLLM calls",
        "Take it out",
    ),
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
    "no step": ("models: [{name: m, overflow: [compres]}]", 1, "models[0].overflow[0]", "no step", "Write compress"),
    "no step's key": (
        "models: [{name: m, overflow: [{fallbak: b}]}]", 1, "models[0].overflow[0]", "no step", "{fallback: MODEL}",
    ),
    "no steps": ("models: [{name: m, overflow: []}]", 1, "models[0].overflow", "at least 1", "What to try"),
    "zero window": ("models: [{name: m, context_window: 0}]", 1, "models[0].context_window", "greater than 0", "Input"),
    "store port": ("store: {url: 'redis://:a:b@h:x'}", 1, "store.url", "no valid host and port", "redis://:password@"),
    "short key": ("store: {key: short}", 1, "store.key", "5 characters", "at least 16"),
    "no list": ("upstreams: {name: a}", 1, "upstreams", "is no list", "Write a list"),
    "secret file": ("store: {key_file: /nowhere}", 1, "store.key_file", "cannot be read", "Give the path"),
    "secret twice": ("store: {key: 0123456789abcdef, key_file: b}", 1, "store.key_file", "set as well", "Keep key or"),
    "bare star": ("models:\n  - {name: *}\n", 2, "", "not valid YAML", "in quotes"),
    "tab": ("server:\n\tport: 1\n", 2, "", "not valid YAML", "Indent with spaces"),
    "open bracket": ("server: {port: 1\n", 2, "", "not valid YAML", "brackets"),
    "no mapping": ("- a\n", 1, "", "not a mapping", "sections"),
    "python tag": ("store: {key: !!python/name:os.system x}", 1, "store.key", "not supported", "Leave the tag out"),
    "a URL as host": ("server: {host: 'http://h'}", 1, "server.host", "no host", "127.0.0.1"),
    "a host with a port": ("server: {host: 'h:80'}", 1, "server.host", "no host", "the port has its own key"),
    "a header of a byte": ("server: {limits: {headers: 1}}", 1, "server.limits.headers", "1024", "default is 32768"),
    "open variable": ("\nstore: {key: '${NOPE'}", 2, "store.key", "named and closed", "write $${"),
    "no variable": ("store: {key: '${NO PE}'}", 1, "store.key", "named and closed", "${NAME:-default}"),
    "output over window": (
        "models:\n- name: m\n  context_window: 1000\n  max_output_tokens: 1001\n", 4, "models[0].max_output_tokens",
        "1,001 is more than the window", "lower this figure",
    ),
    "input over window": (
        "models: [{name: m, context_window: 10, max_input_tokens: 11}]", 1, "models[0].max_input_tokens", "more than",
        "raise it",
    ),
    "key is a list": ("? [a]\n: 1\n", 1, "?", "must be a word", "name: value"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_file_line_key_and_remedy(tmp_path, name):
    """Every mistake is reported where it stands, with what to do about it."""
    text, line, key, message, remedy = WRONG[name]
    found = only_problem(tmp_path, text)
    assert (found.file, found.line, found.key) == (str(tmp_path / "ullage.yaml"), line, key)
    assert message in found.message
    assert remedy in found.remedy
    assert str(found).startswith(f"{found.file}:{line}: ")


def test_wrong_values_are_traced_to_the_variable_or_flag(tmp_path):
    """A problem with a value from the environment or the command line says so instead of naming the file."""
    environ = {"ULLAGE_SERVER__PORT": "x", "ULLAGE_SERVR__PORT": "1"}
    found = {problem.file: problem for problem in problems(tmp_path, UPSTREAM, environ, {("store", "url"): "x"})}
    assert set(found) == {*(f"environment variable {name}" for name in environ), "the command line"}
    assert found["environment variable ULLAGE_SERVR__PORT"].remedy == "Did you mean 'server'?"
    assert all(problem.line is None for problem in found.values())


def test_an_unknown_upstream_is_reported_beside_other_errors(tmp_path):
    """A reference to nothing shows although other values are wrong, and nothing else is made up."""
    text = "server: {default_upstream: c}\nupstreams: [{name: a}, 5]\n"
    text += "models: [{name: m, upstream: b, typo: 1}, {upstream: a}]"
    found = {(problem.key, problem.message) for problem in problems(tmp_path, text)}
    assert ("models[0].upstream", "there is no upstream 'b'") in found
    assert ("server.default_upstream", "there is no upstream 'c'") in found
    assert {key for key, _ in found} == {
        "server.default_upstream", "upstreams[0].base_url", "upstreams[1]", "models[0].upstream", "models[0].typo",
        "models[1].name",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["models: 5\nserver: 5\nupstreams: x", "server: {default_upstream: [a]}\nmodels: [5]"])
def test_references_in_what_is_no_section_are_none(tmp_path, text):
    """A value of a wrong form is a problem of its form alone."""
    assert all("no upstream" not in problem.message for problem in problems(tmp_path, text))


@pytest.mark.parametrize("host", ["127.0.0.1", "::", "[::1]", "fe80::1%eth0", "localhost", "my_host.example.org."])
def test_hosts_are_names_and_addresses(tmp_path, host):
    """Whatever a listener can be bound to is taken."""
    assert load(write_settings(tmp_path, f"server: {{host: '{host}'}}"), {}, {}).server.host == host


def test_a_literal_brace_is_written_with_two_dollars(tmp_path):
    """$${ stands for ${ and begins no variable."""
    key = load(write_settings(tmp_path, "store: {key: '$${NOPE-0123456789'}"), {}, {}).store.key
    assert key is not None
    assert key.get_secret_value() == "${NOPE-0123456789"
