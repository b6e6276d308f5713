"""The names of all keys in the store. All keys of one conversation share a hash slot.

Replicas of different versions read the same keys: a name that is in use never changes.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from hashlib import sha256

MASTER = "ullage1:master"
"""The master key of a store without a configured one."""

TRIAL = "ullage1:trial"
"""A key that nothing else uses, to see if a server takes writes."""


def naming_secret(fingerprint: bytes) -> str:
    """The naming secret, for holders of the master key with this *fingerprint*."""
    return f"ullage1:{{names}}:{_text(fingerprint)}"


def record(root_hash: bytes, route: str, prefix_hash: bytes) -> str:
    """The compaction record at *prefix_hash* of a conversation on *route* (``upstream,model``)."""
    return _of_conversation(root_hash, "e", _route_digest(route), prefix_hash)


def records(root_hash: bytes, route: str, prefix_hashes: Sequence[bytes]) -> list[str]:
    """The compaction records at many *prefix_hashes* of one conversation, as ``record`` names each."""
    root, digest, *texts = _texts((root_hash, _route_digest(route), *prefix_hashes))
    return [f"ullage1:{{{root}}}:e:{digest}:{text}" for text in texts]


def summary(root_hash: bytes, policy: bytes, prefix_hash: bytes) -> str:
    """The summary of the items before *prefix_hash*, written by the text *policy*."""
    return _of_conversation(root_hash, "s", policy, prefix_hash)


def lease(root_hash: bytes, policy: bytes, prefix_hash: bytes) -> str:
    """The lease to write a summary of the items after the compaction at *prefix_hash*."""
    return _of_conversation(root_hash, "k", policy, prefix_hash)


def failed_summary(root_hash: bytes, policy: bytes, prefix_hash: bytes) -> str:
    """The mark that a summary of the items after the compaction at *prefix_hash* failed."""
    return _of_conversation(root_hash, "x", policy, prefix_hash)


def compaction_request(root_hash: bytes) -> str:
    """An operator's request to compact the conversation."""
    return _of_conversation(root_hash, "m")


def notes(root_hash: bytes) -> str:
    """The notes on a conversation: a hash."""
    return _of_conversation(root_hash, "n")


def archived(root_hash: bytes, digest: bytes) -> str:
    """An archived original; *digest* is a keyed one of its content."""
    return _of_conversation(root_hash, "a", digest)


def roots(name: bytes) -> str:
    """The root hashes of one conversation; *name* is a keyed digest of its name."""
    return f"ullage1:{{{_text(name)}}}:c"


def consumed(name: bytes) -> str:
    """The tokens that one conversation has used; *name* is a keyed digest of its name."""
    return f"ullage1:{{{_text(name)}}}:u"


def state(name: bytes) -> str:
    """The state of one conversation that its caller may export: a hash; *name* is a keyed digest of its name."""
    return f"ullage1:{{{_text(name)}}}:v"


def memories(name: bytes) -> str:
    """The memories of one project; *name* is a keyed digest of its tenant's name of it."""
    return f"ullage1:{{{_text(name)}}}:p"


def conversations(tenant: bytes) -> str:
    """The list of a tenant's newest conversations; *tenant* is a keyed digest."""
    return f"ullage1:{{{_text(tenant)}}}:l"


def spending(tenant: bytes, kind: str, slot: int) -> str:
    """The count of a tenant's tokens of one *kind* in the time *slot*; *tenant* is a keyed digest."""
    return f"ullage1:b:{{{_text(tenant)}}}:{kind}:{slot}"


def summary_pause(tenant: bytes) -> str:
    """The mark that summaries pause for a tenant; *tenant* is a keyed digest."""
    return f"ullage1:b:{{{_text(tenant)}}}:pause"


def learned_route(name: bytes) -> str:
    """The limits of a route learned from one tenant's requests; *name* is a keyed digest of both."""
    return f"ullage1:f:{_text(name)}"


def trial(key: str, operation: str) -> str:
    """The key to try *operation* on, in the hash slot of *key*, so that the same server has it."""
    tag = key
    tagged = re.search(r"\{(.+?)\}", key)
    if tagged is not None:
        tag = tagged[1]
    return f"ullage1:{{{tag}}}:t:{operation}"


def _of_conversation(root_hash: bytes, kind: str, *parts: bytes) -> str:
    # In braces, the root hash is the cluster's hash tag, so that one MGET may read many keys of a conversation:
    # https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#hash-tags
    root, *others = _texts((root_hash, *parts))
    return ":".join((f"ullage1:{{{root}}}:{kind}", *others))


def _route_digest(route: str) -> bytes:
    return sha256(route.encode()).digest()[:8]


def _texts(values: Sequence[bytes]) -> list[str]:
    """*values* in the alphabet of URLs, without padding."""
    return [urlsafe_b64encode(value).rstrip(b"=").decode("ascii") for value in values]


def _text(value: bytes) -> str:
    return _texts([value])[0]
