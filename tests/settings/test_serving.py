"""The listener and the store: what is refused, and where."""

import pytest

from proxy.settings.serving import Server
from tests.settings.files import problems


@pytest.mark.parametrize("origin", ["chat.example.org", "https://chat.example.org/", "ftp://chat.example.org"])
def test_an_origin_is_scheme_and_host(tmp_path, origin):
    """A path, another scheme or none: refused at its place in the list, since no browser would ever send it."""
    (problem,) = problems(tmp_path, f"server: {{origins: [https://a.example.org, '{origin}']}}")
    assert problem.key == "server.origins[1]"
    assert "scheme, host and port only" in problem.remedy


def test_one_body_has_room_among_all(tmp_path):
    """A body limit above what all bodies may take together could never be used."""
    (problem,) = problems(tmp_path, "server: {limits: {body: 8MiB, in_flight_bytes: 4MiB}}")
    assert problem.key == "server.limits.in_flight_bytes"
    assert Server().limits.body <= Server().limits.in_flight_bytes
