"""What things are called in the store. One line per kind; everything of one conversation shares a hash slot."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from hashlib import sha256

MASTER = "ullage1:master"


def event(root: bytes, route: str, chain: bytes) -> str:
    """The name of the event record at *chain* of conversation *root* on *route* (``upstream,model``)."""
    return _of_conversation(root, "e", sha256(route.encode()).digest()[:8], chain)


def lesson(name: bytes) -> str:
    """The name of what was learned about a route for one tenant; *name* is a keyed digest of both."""
    return f"ullage1:f:{_text(name)}"


def _of_conversation(root: bytes, kind: str, *parts: bytes) -> str:
    # The braces make the root the cluster's hash tag: one MGET may then name many places of a conversation.
    return ":".join((f"ullage1:{{{_text(root)}}}:{kind}", *map(_text, parts)))


def _text(value: bytes) -> str:
    return urlsafe_b64encode(value).rstrip(b"=").decode("ascii")
