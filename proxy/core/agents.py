"""Names the client that sent a request, by its headers, for the log: as ``ullage connect`` calls it, if it does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

AGENT_HEADER: Final = "user-agent"

CLAUDE_CODE_SESSION: Final = "x-claude-code-session-id"
"""Claude Code's probes have a made-up user agent, but this header:
https://github.com/obot-platform/obot/pull/7205
"""

AGENTS: Final[Mapping[str, str]] = {
    "claude-cli": "claude-code",
    "claude-code": "claude-code",
    "qwencode": "qwen-code",
    "openai": "openai",
    "asyncopenai": "openai",
    "anthropic": "anthropic",
    "asyncanthropic": "anthropic",
}
"""Names of clients by the product that their user agent begins with, in lower case; tests/recorded has examples.

Products that are called as the client is stand for themselves.
"""

CODEX: Final = ("codex_", "codex-")
"""Codex names the program that it runs in, such as ``codex_exec`` or ``codex-tui``:
https://github.com/openai/codex/blob/main/codex-rs/core/src/default_client.rs
"""

_PRODUCT: Final = re.compile(r"[\w.-]{1,32}(?=/|\s|$)", re.ASCII)


def agent_in_headers(headers: Mapping[str, str]) -> str:
    """Return the client that request *headers* (names in lower case) name; empty if they name none."""
    if headers.get(CLAUDE_CODE_SESSION):
        return "claude-code"
    product = _PRODUCT.match(headers.get(AGENT_HEADER, ""))
    if product is None:
        return ""
    name = product[0].lower()
    if name.startswith(CODEX):
        return "codex"
    return AGENTS.get(name, name)
