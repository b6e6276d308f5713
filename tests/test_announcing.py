"""What the operator reads at the start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from proxy.announcing import announce, bracketed, unreachable, warn_of_silent
from proxy.routing import open_catalogue
from proxy.settings import load
from tests.store.conftest import free_port
from tests.support.settings_files import write_settings


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8484/v1"),
        ("0.0.0.0", "http://127.0.0.1:8484/v1"),
        ("::", "http://[::1]:8484/v1"),
        ("proxy.example.org", "http://proxy.example.org:8484/v1"),
    ],
)
def test_the_line_to_paste_is_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str, url: str
) -> None:
    """The summary ends with an export that clients on this machine can use as it stands."""
    settings = load(
        write_settings(tmp_path, f"server: {{host: '{host}'}}\nupstreams: [{{name: a, base_url: 'http://h/v1'}}]"),
        {},
        {},
    )
    announce(settings, open_catalogue(settings), 8484, "memory")
    assert capsys.readouterr().err.splitlines()[-1] == f"export OPENAI_BASE_URL={url}"


def test_addresses_of_the_sixth_version_stand_in_brackets() -> None:
    """A URL needs them."""
    assert (bracketed("::1"), bracketed("h")) == ("[::1]", "h")


async def test_upstreams_that_accept_no_connection_are_warned_of(tmp_path: Path) -> None:
    """One line for each upstream that is not there, with its name and what follows, and none for the others."""
    gone = free_port()
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        text = f"""upstreams:
- {{name: there, base_url: 'http://127.0.0.1:{port}/v1'}}
- {{name: gone, base_url: 'http://127.0.0.1:{gone}/v1'}}
- {{name: cloud, provider: bedrock}}
"""
        warned: list[tuple[str, dict[str, object]]] = []
        await warn_of_silent(
            load(write_settings(tmp_path, text), {}, {}), lambda event, facts: warned.append((event, facts))
        )
    ((event, facts),) = warned
    assert (event, facts["upstream"]) == ("upstream.unreachable", "gone")
    assert "refused" in str(facts["cause"]).lower()
    assert f"http://127.0.0.1:{gone}/v1" in str(facts["advice"])


async def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    """The resolver's own words are the cause."""
    assert await unreachable("https://nobody.invalid/v1")
