"""The listener and the store: what is refused, and where."""

import pytest

from proxy.settings import load
from proxy.settings.server import Server
from tests.support.settings_files import problems, write_settings


@pytest.mark.parametrize("origin", ["chat.example.org", "https://chat.example.org/", "ftp://chat.example.org"])
def test_an_origin_is_scheme_and_host(tmp_path, origin):
    """A path, another scheme or none: refused at its place in the list, since no browser would ever send it."""
    (problem,) = problems(tmp_path, f"server: {{origins: [https://a.example.org, '{origin}']}}")
    assert problem.key == "server.origins[1]"
    assert "scheme, host and port only" in problem.remedy


@pytest.mark.parametrize("name", ["http://x", "x:80", "*", "a b", "-x", "*.example.org", ""])
def test_a_host_is_a_name_alone(tmp_path, name):
    """Scheme, port or wildcard: refused at its place in the list, since no Host could ever equal it."""
    (problem,) = problems(tmp_path, f"server: {{hosts: [host.docker.internal, '{name}']}}")
    assert problem.key == "server.hosts[1]"
    assert "name alone" in problem.remedy


def test_one_body_has_room_among_all(tmp_path):
    """A body limit above what all bodies may take together could never be used."""
    (problem,) = problems(tmp_path, "server: {limits: {body: 8MiB, in_flight_bytes: 4MiB}}")
    assert problem.key == "server.limits.in_flight_bytes"
    assert Server().limits.body <= Server().limits.in_flight_bytes


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        ("{headers: 256KiB}", "server.limits.head"),
        ("{in_flight: 5000}", "server.limits.connections"),
        ("{fields: 0}", "server.limits.fields"),
    ],
)
def test_limits_that_could_not_be_used_are_refused(tmp_path, limits, key):
    """A field larger than a head, or more requests than connections: each names the key to raise."""
    (problem,) = problems(tmp_path, f"server: {{limits: {limits}}}")
    assert problem.key == key


def test_other_keys_stand_beside_a_key(tmp_path):
    """Former keys without a present one are refused, and so are short and empty ones."""
    key = "k" * 20
    (problem,) = problems(tmp_path, f"store: {{other_keys: [{key}]}}")
    assert (problem.key, problem.message) == ("store.other_keys", "stand beside no key")
    (problem,) = problems(tmp_path, f"store: {{key: {key}, other_keys: [short]}}")
    assert problem.key == "store.other_keys[0]"
    assert "short" not in problem.message
    (problem,) = problems(tmp_path, f"store: {{key: {key}, other_keys: ['']}}")
    assert problem.key == "store.other_keys[0]"
    (tmp_path / "others").write_text(f"{key}2\n{key}3\n")
    text = f"store: {{key: {key}, other_keys_file: others}}\nupstreams: [{{name: a, base_url: 'http://127.0.0.1:1'}}]"
    found = load(write_settings(tmp_path, text), {}, {}).store.other_keys
    assert [each.get_secret_value() for each in found] == [f"{key}2", f"{key}3"]
