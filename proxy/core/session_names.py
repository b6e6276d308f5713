"""The name of a conversation in a client's headers and bodies: for people; views follow prefix hashes alone."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

SESSION_HEADERS: Final = (
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "x-session-id",
    "x-session-affinity",
)
"""Headers in which agents name their session, by trust: Claude Code, Codex, opencode."""

EPOCH_HEADER: Final = "x-codex-window-id"
"""A session and, behind a colon, the number of times that the client itself has compacted it."""

_LONGEST: Final = 256
_SESSION: Final = re.compile(r"session[_-]([0-9A-Za-z-]{8,})")


def session_of(headers: Mapping[str, str]) -> str:
    """Return the session in request *headers* (names in lower case); empty if there is none."""
    named = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")
    return (named or headers.get(EPOCH_HEADER, "").rpartition(":")[0])[:_LONGEST]


def epoch_of(headers: Mapping[str, str]) -> int:
    """Return how often the client has compacted its own history, by its headers; 0 if they do not state it."""
    number = headers.get(EPOCH_HEADER, "").rpartition(":")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 9 else 0


def session_in(members: Mapping[str, Any]) -> str:
    """Return the session in decoded *members* of a body; empty if there is none."""
    conversation = members.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    metadata = members.get("metadata")
    found = metadata if isinstance(metadata, dict) else {}
    named = (conversation, _user(found.get("user_id")), found.get("session_id"), members.get("prompt_cache_key"))
    return next((value[:_LONGEST] for value in named if isinstance(value, str) and value), "")


def _user(value: Any) -> str:
    """Return the session in Claude Code's ``user_id``: an object as text, or a name that ends in the session."""
    if not isinstance(value, str):
        return ""
    try:
        said = json.loads(value)
    except (ValueError, RecursionError):
        found = _SESSION.search(value)
        return found[1] if found else ""
    session = said.get("session_id") if isinstance(said, dict) else None
    return session if isinstance(session, str) else ""


def name_of(tenant: bytes, session: str) -> str:
    """Return the public name of a tenant's session; it reveals neither."""
    digest = hashlib.sha256(b"ullage session\0" + tenant + session.encode("utf-8", "surrogatepass")).digest()
    return base64.urlsafe_b64encode(digest[:12]).decode()
