"""What things are called in the store. One line per kind; everything of one conversation shares a hash slot."""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from hashlib import sha256

MASTER = "ullage1:master"
TRIAL = "ullage1:trial"


def names(fingerprint: bytes) -> str:
    """Where the secret that names come from is kept for those who have the master key with this *fingerprint*."""
    return f"ullage1:{{names}}:{_text(fingerprint)}"


def event(root: bytes, route: str, chain: bytes) -> str:
    """The name of the event record at *chain* of conversation *root* on *route* (``upstream,model``)."""
    return _of_conversation(root, "e", sha256(route.encode()).digest()[:8], chain)


def summary(root: bytes, policy: bytes, chain: bytes) -> str:
    """The name of the summary of the items before *chain*, written by the text *policy*."""
    return _of_conversation(root, "s", policy, chain)


def lease(root: bytes, policy: bytes, chain: bytes) -> str:
    """The name of the right to write a summary of what came after the event at *chain*."""
    return _of_conversation(root, "k", policy, chain)


def refused(root: bytes, policy: bytes, chain: bytes) -> str:
    """The name of the mark that no summary could be written of what came after the event at *chain*."""
    return _of_conversation(root, "x", policy, chain)


def mark(root: bytes) -> str:
    """The name of the wish that conversation *root* is compacted at its next request."""
    return _of_conversation(root, "m")


def notes(root: bytes) -> str:
    """The name of what is told of conversation *root*: a hash of notes."""
    return _of_conversation(root, "n")


def original(root: bytes, digest: bytes) -> str:
    """The name of an archived original of conversation *root*; *digest* is keyed and of its content."""
    return _of_conversation(root, "a", digest)


def known(name: bytes) -> str:
    """The name of the roots that belong to one conversation; *name* is a keyed digest of what it is called."""
    return f"ullage1:{{{_text(name)}}}:c"


def listed(tenant: bytes) -> str:
    """The name of the list of a tenant's (a keyed digest) newest conversations."""
    return f"ullage1:{{{_text(tenant)}}}:l"


def bucket(tenant: bytes, kind: str, slot: int) -> str:
    """The name of a count of *tenant*'s (a keyed digest) tokens of one *kind* in the time *slot*."""
    return f"ullage1:b:{{{_text(tenant)}}}:{kind}:{slot}"


def pause(tenant: bytes) -> str:
    """The name of the mark that nothing is asked on behalf of *tenant* (a keyed digest) for a while."""
    return f"ullage1:b:{{{_text(tenant)}}}:pause"


def lesson(name: bytes) -> str:
    """The name of what was learned about a route for one tenant; *name* is a keyed digest of both."""
    return f"ullage1:f:{_text(name)}"


def trial(key: str, operation: str) -> str:
    """Return the name under which *operation* is tried on the server that has *key*: it is in the same hash slot."""
    tagged = re.search(r"\{(.+?)\}", key)
    return f"ullage1:{{{tagged[1] if tagged else key}}}:t:{operation}"


def _of_conversation(root: bytes, kind: str, *parts: bytes) -> str:
    # The braces make the root the cluster's hash tag: one MGET may then name many places of a conversation.
    return ":".join((f"ullage1:{{{_text(root)}}}:{kind}", *map(_text, parts)))


def _text(value: bytes) -> str:
    return urlsafe_b64encode(value).rstrip(b"=").decode("ascii")
