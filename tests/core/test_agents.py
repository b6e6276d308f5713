"""The client that a request's headers name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from proxy.cli.clients import clients
from proxy.core.agents import AGENTS, agent_in_headers

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.mark.parametrize(
    ("user_agent", "agent"),
    [
        ("claude-cli/2.1.330 (external, sdk-cli)", "claude-code"),
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
