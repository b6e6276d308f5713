"""The messages for the operator at the start."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from proxy.settings import load
from proxy.startup import (
    CannotListen,
    connection_problem,
    print_summary,
    settings_summary,
    warn_of_unreachable,
)
from proxy.upstream_wiring import open_catalogue
from tests.support.ports import free_port
from tests.support.settings_files import UPSTREAM, problems, write_settings


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
    print_summary(settings, open_catalogue(settings), 8484, "memory")
    assert capsys.readouterr().err.splitlines()[-1] == f"export OPENAI_BASE_URL={url}"


@pytest.mark.parametrize("enabled", [True, False])
def test_the_page_s_address_is_named_if_there_is_one(tmp_path: Path, enabled: bool) -> None:
    """Below the address that clients use."""
    text = f"{UPSTREAM}\ntelemetry: {{page: {{enabled: {str(enabled).lower()}}}}}"
    summary = settings_summary(load(write_settings(tmp_path, text), {}, {}), {})
    assert ("  page         http://127.0.0.1:8484/ullage/" in summary.splitlines()) is enabled


async def test_upstreams_that_accept_no_connection_are_warned_of(tmp_path: Path) -> None:
    """One line for each upstream that is not there, with its name and what follows, and none for the others.

    Of one behind a forward proxy only that can be connected to.
    """
    gone = free_port()
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        text = f"""upstreams:
- {{name: there, base_url: 'http://127.0.0.1:{port}/v1'}}
- {{name: gone, base_url: 'http://127.0.0.1:{gone}/v1'}}
- {{name: behind, base_url: 'http://127.0.0.1:{gone}/v1', proxy: 'http://127.0.0.1:{port}'}}
- {{name: shut, base_url: 'http://127.0.0.1:{port}/v1', proxy: 'http://127.0.0.1:{gone}'}}
- {{name: cloud, provider: bedrock}}
"""
        warned: list[tuple[str, dict[str, object]]] = []
        await warn_of_unreachable(
            load(write_settings(tmp_path, text), {}, {}), lambda event, facts: warned.append((event, facts))
        )
    (event, facts), (_, behind_proxy) = warned
    assert (event, facts["upstream"]) == ("upstream.unreachable", "gone")
    assert "refused" in str(facts["cause"]).lower()
    assert (behind_proxy["upstream"], "its forward proxy" in str(behind_proxy["cause"])) == ("shut", True)
    assert f"http://127.0.0.1:{gone}/v1" in str(facts["advice"])


async def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    """The resolver's own words are the cause."""
    assert await connection_problem("https://nobody.invalid/v1")


def test_secrets_never_show(tmp_path):
    """Neither a repr, an error nor the start-up summary holds a configured secret."""
    text = (
        "server: {access_keys: [CANARY1], admin_key: CANARY2, port: CANARY}\n"
        "store: {key: CANARY3-0123456789, url: 'redis://:CANARY4@h/0?password=CANARY5'}\n"
        "upstreams: [{name: a, base_url: 'http://h', api_key: CANARY6, headers: {authorization: CANARY7}}]\n"
    )
    fine = text.replace(", port: CANARY}", "}")
    settings = load(write_settings(tmp_path, fine), {}, {})
    shown = repr(settings.server) + repr(settings.upstreams) + settings_summary(settings, {})
    assert "CANARY" not in shown
    assert "CANARY" not in str(problems(tmp_path, text)[0])
    assert "CANARY" not in str(problems(tmp_path, fine.replace("CANARY6", '"CANARY 6"'))[0])


def test_the_summary_says_what_is_served(tmp_path):
    """Address, upstreams, windows, store, access and marks are all there, with what only the running proxy knows."""
    text = UPSTREAM + "models: [{name: 'q*', context_window: 8192, upstream: a}, {name: '*', unknown_window: 131072}]\n"
    settings = load(write_settings(tmp_path, text), {("server", "workers"): 2}, {})
    shown = settings_summary(settings, {"store": "embedded, 3 keys", "window *": "32,768 tokens (said by the server)"})
    for part in (
        "http://127.0.0.1:8484/v1  (2 workers)",
        "a  http://127.0.0.1:1/v1  (the client's key, default)",
        "q*  window: 8,192 tokens  -> a",
        "*  window: 32,768 tokens (said by the server)",
        "embedded, 3 keys",
        "this machine only, no key",
        "on: above 90% of the room, down to 40%",
        "background, by the request's own model, with its own key; at most 10% of the tokens a client sends in an hour",
    ):
        assert part in shown


def test_the_summary_does_not_promise_a_window_it_does_not_know(tmp_path):
    """A rule without a window says where one will come from."""
    shown = settings_summary(
        load(write_settings(tmp_path, UPSTREAM + "models: [{name: '*', unknown_window: 4096}]\n"), {}, {}), {}
    )
    assert "*  window: stated by the server, else by the model table, else 4,096 tokens" in shown
    shown = settings_summary(load(write_settings(tmp_path, UPSTREAM), {}, {}), {})
    assert "*  window: stated by the server, else by the model table, else learned from the first overflow" in shown


@pytest.mark.parametrize(
    ("host", "error", "text"),
    [
        ("127.0.0.1", OSError(errno.EADDRINUSE, "x"), "127.0.0.1:1: address already in use. Give another --port, or 0"),
        ("192.0.2.1", OSError(errno.EADDRNOTAVAIL, "x"), "192.0.2.1:1: cannot assign requested address."),
        ("::1", OSError(errno.EACCES, "x"), "[::1]:1: permission denied."),
        ("nowhere", socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "nowhere:1: name or service not"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_named(host: str, error: OSError, text: str) -> None:
    """The message names address and reason, and a remedy where there is one."""
    assert text in str(CannotListen(host, 1, error))
