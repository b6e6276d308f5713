"""The kinds of errors of a Redis or Valkey server. Only a process that uses one imports this module and redis."""

from __future__ import annotations

from typing import Final

from redis import exceptions as errors

_PROTOCOL_ERRORS: Final = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError)
"""Errors that the library raises if a server does not speak the protocol."""

_KINDS: Final[tuple[tuple[type[BaseException], str], ...]] = (
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
    *((cause, "protocol") for cause in _PROTOCOL_ERRORS),
)
"""The kind of each error; the first that matches names it."""

_PREFIXES: Final = {"WRONGTYPE": "wrongtype", "MISCONF": "disk", "NOREPLICAS": "replicas"}
"""Error prefixes for which the library has no class: https://redis.io/docs/latest/develop/reference/errors/"""

FAULTS: Final = (errors.RedisError, errors.RedisClusterException, OSError, TimeoutError, *_PROTOCOL_ERRORS)
"""Errors that an operation may raise. Those of a cluster that cannot be reached are no ``RedisError``."""


def kind_of(error: BaseException) -> str:
    """The kind of *error*, for metrics and the log."""
    if isinstance(error, errors.ResponseError):
        prefix, _, _ = str(error).partition(" ")
        if prefix in _PREFIXES:
            return _PREFIXES[prefix]
    for cause, kind in _KINDS:
        if isinstance(error, cause):
            return kind
    return "error"
