"""What can go wrong with an operation of the store, by a name, and what of it says that the server cannot serve."""

from __future__ import annotations

from redis import exceptions as errors

# What the library stumbles over when a server does not speak the protocol.
_NONSENSE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError)
# The first that matches names the failure.
_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (errors.MaxConnectionsError, "pool"),
    (errors.OutOfMemoryError, "oom"),
    (errors.AuthenticationError, "auth"),
    (errors.AuthorizationError, "auth"),
    (errors.NoPermissionError, "permission"),
    (errors.BusyLoadingError, "loading"),
    (errors.ReadOnlyError, "readonly"),
    (errors.MasterDownError, "loading"),
    (errors.ClusterError, "cluster"),
    (errors.RedisClusterException, "cluster"),
    (errors.SlotNotCoveredError, "cluster"),
    (errors.TimeoutError, "slow"),
    (TimeoutError, "slow"),
    (errors.ConnectionError, "down"),
    (OSError, "down"),
    (errors.InvalidResponse, "protocol"),
    *((cause, "protocol") for cause in _NONSENSE),
)
# Answers whose first word the library knows no class for.
_WORDS = {"WRONGTYPE": "wrongtype", "MISCONF": "disk", "NOREPLICAS": "replicas"}
REFUSALS = {
    "oom": "give the server more memory, or set its maxmemory-policy to volatile-lru",
    "disk": "the server cannot write to its disk: make room there, or mend its directory",
    "readonly": "store.url leads to a read-only replica: name its master, or use redis+sentinel://",
    "permission": "grant the user of store.url the commands that docs/operations.md lists, on keys of ullage1:*",
    "replicas": "the server has fewer replicas than its min-replicas-to-write: bring them back, or lower that",
}
"""What a server says that answers but does not do what it is asked, and what its operator can do about each."""

BREAKING = frozenset({"slow", "down", "auth", "loading", "cluster", "protocol"})
"""What says that the server cannot serve. A full memory, a missing permission or a busy pool of ours do not."""
FAULTS = (errors.RedisError, OSError, TimeoutError, *_NONSENSE)
"""What an operation may raise."""


def kind_of(error: BaseException) -> str:
    """What *error* is called in metrics and in the log."""
    if isinstance(error, errors.ResponseError) and (named := _WORDS.get(str(error).partition(" ")[0])):
        return named
    return next((kind for cause, kind in _KINDS if isinstance(error, cause)), "error")
