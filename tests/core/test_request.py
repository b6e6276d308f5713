"""The name of a conversation in headers and bodies, its public form, and the client that headers name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from proxy.cli.clients import clients
from proxy.core.errors import InvalidRequest
from proxy.core.request import (
    AGENTS,
    agent_in_headers,
    epoch_in_headers,
    options_in,
    public_session_name,
    session_in_body,
    session_in_headers,
)

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.mark.parametrize(
    ("headers", "session", "epoch"),
    [
        ({}, "", 0),
        ({"x-claude-code-session-id": "s-1"}, "s-1", 0),
        ({"thread-id": "t", "session-id": "s", "x-codex-window-id": "t:3"}, "t", 3),
        ({"x-codex-window-id": "a:b:12"}, "a:b", 12),
        ({"x-codex-window-id": "alone"}, "", 0),
        ({"x-codex-window-id": "t:-1"}, "t", 0),
        ({"x-session-id": "s", "x-session-affinity": "a"}, "s", 0),
        ({"x-session-affinity": "a" * 999}, "a" * 256, 0),
    ],
)
def test_what_headers_say(headers: dict[str, str], session: str, epoch: int) -> None:
    """The most trusted header names the session, and Codex says how often it compacted."""
    assert (session_in_headers(headers), epoch_in_headers(headers)) == (session, epoch)


@pytest.mark.parametrize(
    ("members", "session"),
    [
        ({}, ""),
        ({"conversation": "conv_1", "prompt_cache_key": "k"}, "conv_1"),
        ({"conversation": {"id": "conv_1"}}, "conv_1"),
        ({"metadata": {"user_id": json.dumps({"session_id": "s-1"})}}, "s-1"),
        ({"metadata": {"user_id": "user_ab_account__session_1234-5678-9"}}, "1234-5678-9"),
        ({"metadata": {"user_id": "ann"}, "prompt_cache_key": "k"}, "k"),
        ({"metadata": {"session_id": "s-2"}}, "s-2"),
        ({"metadata": ["odd"], "prompt_cache_key": 5, "conversation": 7}, ""),
        ({"metadata": {"user_id": "[1]"}}, ""),
    ],
)
def test_what_a_body_says(members: dict[str, Any], session: str) -> None:
    """The members in which clients name a conversation are known, odd values are none."""
    assert session_in_body(members) == session


def test_names_tell_nothing_and_keep_strangers_apart() -> None:
    """Equal sessions of a tenant have one name, of two tenants two, and the session does not show."""
    assert (
        public_session_name(b"a" * 32, "session-1")
        == public_session_name(b"a" * 32, "session-1")
        != public_session_name(b"b" * 32, "session-1")
    )
    assert "session" not in public_session_name(b"a" * 32, "session-1")
    assert len(public_session_name(b"a" * 32, "\ud83d")) == 16


@pytest.mark.parametrize(
    ("user_agent", "agent"),
    [
        ("claude-cli/2.1.330 (external, sdk-cli)", "claude-code"),
        ("GeminiCLI-tui/0.61.0/gemini-2.5-pro (linux; x64; terminal)", "gemini-cli"),
        ("codex_cli_rs/0.38.0 (Ubuntu 24.04.2 LTS; x86_64) WindowsTerminal", "codex"),
        ("codex-tui/0.142.0 (Mac OS 13.7.8; arm64) xterm-256color", "codex"),
        ("opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14", "opencode"),
        ("QwenCode/0.24.4 (linux; x64)", "qwen-code"),
        ("AsyncOpenAI/Python 2.54.0", "openai"),
        ("Anthropic/JS 0.94.0", "anthropic"),
        ("curl/8.7.1", "curl"),
        ("node", "node"),
        ("", ""),
        ("(compatible)", ""),
        ("secret word " * 30, "secret"),
        ("x" * 33, ""),
        ("évil/1", ""),
        ("a\nb", "a"),
    ],
)
def test_the_product_names_the_client(user_agent: str, agent: str) -> None:
    """Known products have their client's name, others their own in lower case; what is no word names nothing."""
    assert agent_in_headers({"user-agent": user_agent}) == agent


def test_a_session_of_claude_code_names_it() -> None:
    """Its probes have a made-up product, but its session header."""
    headers = {"user-agent": "Dmi/JS 0.94.0", "x-claude-code-session-id": "s"}
    assert agent_in_headers(headers) == "claude-code"
    assert agent_in_headers({}) == ""


def test_recorded_clients_are_known() -> None:
    """Each agent whose sessions were recorded is called as ``ullage connect`` calls it."""
    known, found = clients(), {}
    for file in RECORDED.glob("*.json.gz"):
        request = json.loads(gzip.decompress(file.read_bytes()))["requests"][0]
        headers = {name.lower(): value for name, value in request["headers"]}
        found[file.name.removesuffix(".json.gz")] = agent_in_headers(headers)
    agents = {name: agent for name, agent in found.items() if name in ("claude-code", "codex", "opencode", "qwen-code")}
    assert agents == {name: name for name in agents} != {}
    assert set(AGENTS.values()) <= known.keys()


@pytest.mark.parametrize(("value", "share"), [("now", None), ("0.2", 0.2), (".25", 0.25), ("0.9999", 0.9999)])
def test_a_compaction_may_name_its_share(value: str, share: float | None) -> None:
    """``now`` or a share of the room asks for a compaction."""
    wishes = options_in({"compact": value})
    assert (wishes.compact_now, wishes.compact_to) == (True, share)


@pytest.mark.parametrize(
    "value", ["", "later", "0", "0.0", "1", "1.5", "-0.2", "20%", "nan", "0.2 ", "1e-2", "0.00001"]
)
def test_a_wrong_share_is_refused(value: str) -> None:
    """Anything else is an error that names the header."""
    with pytest.raises(InvalidRequest, match="x-ullage-compact"):
        options_in({"compact": value})
