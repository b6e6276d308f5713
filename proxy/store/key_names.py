"""The names of all keys in the store.

Replicas of different versions read the same keys: a name that is in use never changes.

    name                                 value
    -----------------------------------  ---------------------------------------------------------------------------
    ``ullage1:{root}:e:route:prefix``    the compaction record at a prefix hash on a route (``upstream,model``)
    ``ullage1:{root}:s:policy:prefix``   the summary of the items before a prefix hash, written by a text policy
    ``ullage1:{root}:k:policy:prefix``   the lease to write a summary of the items after the compaction at that prefix
    ``ullage1:{root}:x:policy:prefix``   the mark that such a summary failed
    ``ullage1:{root}:m``                 an operator's request to compact the conversation
    ``ullage1:{root}:n``                 the notes on a conversation: a hash
    ``ullage1:{root}:a:original``        an archived original
    ``ullage1:{conversation}:c``         the root hashes of a named conversation: scored members
    ``ullage1:{conversation}:u``         the tokens that it has used
    ``ullage1:{conversation}:v``         its state, which its caller may export: a hash
    ``ullage1:{tenant}:l``               a tenant's newest conversations: scored members
    ``ullage1:{project}:p``              the memories of a project
    ``ullage1:b:{tenant}:kind:slot``     the tokens of one kind, ``in`` or ``out``, that a tenant used in a time slot
    ``ullage1:b:{tenant}:pause``         the mark that summaries pause for a tenant
    ``ullage1:f:route``                  a learned route of one tenant
    ``ullage1:{names}:fingerprint``      the naming secret, for holders of the master key with that fingerprint
    ``ullage1:master``                   the master key, if none is configured
    ``ullage1:trial``                    what is written to see if a server takes writes
    ``ullage1:{tag}:t:operation``        what an operation is tried on that was refused for a key with that tag

A route is named by its digest, a conversation by its root hash or, like tenants, projects and originals, by a keyed
digest. What stands in braces is a cluster's hash tag, so that one MGET may read many keys of a conversation:
https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#hash-tags
"""

from __future__ import annotations

import re
from binascii import b2a_base64
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

MASTER: Final = "ullage1:master"
TRIAL: Final = "ullage1:trial"

RECORD: Final = "e"
SUMMARY: Final = "s"
LEASE: Final = "k"
FAILED_SUMMARY: Final = "x"
COMPACTION_REQUEST: Final = "m"
NOTES: Final = "n"
ARCHIVED: Final = "a"
ROOTS: Final = "c"
CONSUMED: Final = "u"
STATE: Final = "v"
CONVERSATIONS: Final = "l"
MEMORIES: Final = "p"

_URL_ALPHABET: Final = bytes.maketrans(b"+/", b"-_")
"""https://www.rfc-editor.org/rfc/rfc4648#section-5"""


def key_name(tag: bytes, kind: str, *parts: bytes) -> str:
    """The key of one *kind* with the hash *tag*, which is a root hash or a keyed digest."""
    text, *others = _texts((tag, *parts))
    return ":".join((f"ullage1:{{{text}}}:{kind}", *others))


def record_name(root_hash: bytes, route: str, prefix_hash: bytes) -> str:
    """The compaction record at *prefix_hash* of a conversation on *route* (``upstream,model``)."""
    return record_names(root_hash, route, [prefix_hash])[0]


def record_names(root_hash: bytes, route: str, prefix_hashes: Sequence[bytes]) -> list[str]:
    """The compaction records at many *prefix_hashes* of one conversation."""
    tag, on_route, *prefixes = _texts((root_hash, sha256(route.encode()).digest()[:8], *prefix_hashes))
    return [f"ullage1:{{{tag}}}:{RECORD}:{on_route}:{prefix}" for prefix in prefixes]


def spending_name(tenant: bytes, kind: str, slot: int) -> str:
    """The count of a tenant's tokens of one *kind* in the time *slot*."""
    return f"ullage1:b:{{{_texts([tenant])[0]}}}:{kind}:{slot}"


def summary_pause_name(tenant: bytes) -> str:
    """The mark that summaries pause for a tenant."""
    return f"ullage1:b:{{{_texts([tenant])[0]}}}:pause"


def learned_route_name(name: bytes) -> str:
    """The learned route with the keyed digest *name*."""
    return f"ullage1:f:{_texts([name])[0]}"


def naming_secret_name(fingerprint: bytes) -> str:
    """The naming secret for the master key with this *fingerprint*."""
    return f"ullage1:{{names}}:{_texts([fingerprint])[0]}"


def trial_name(key: str, operation: str) -> str:
    """The key to try *operation* on, in the hash slot of *key*, so that the same server has it."""
    tag = key
    tagged = re.search(r"\{(.+?)\}", key)
    if tagged is not None:
        tag = tagged[1]
    return f"ullage1:{{{tag}}}:t:{operation}"


def _texts(values: Sequence[bytes]) -> list[str]:
    """Each of *values*, of which there is one at least, in the alphabet of URLs, without padding."""
    # In one go: a look-up names up to 512 records.
    joined = b" ".join([b2a_base64(value, newline=False) for value in values])
    return joined.translate(_URL_ALPHABET, b"=").decode("ascii").split(" ")
