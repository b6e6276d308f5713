"""The name of a conversation in headers and bodies, and its public form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.request import epoch_in_headers, public_session_name, session_in_body, session_in_headers


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
