"""What goes wrong has a name, and only some of it is the server's fault."""

from __future__ import annotations

import pytest
from redis import exceptions

from proxy.store.failures import BREAKING, FAULTS, kind_of


@pytest.mark.parametrize(
    ("error", "kind", "breaks"),
    [
        (exceptions.OutOfMemoryError(), "oom", False),
        (exceptions.MaxConnectionsError(), "pool", False),
        (exceptions.NoPermissionError(), "permission", False),
        (exceptions.ReadOnlyError(), "readonly", False),
        (exceptions.ResponseError("WRONGTYPE Operation against"), "wrongtype", False),
        (exceptions.ResponseError("MISCONF Errors writing to the AOF file"), "disk", False),
        (exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."), "replicas", False),
        (exceptions.MasterDownError("MASTERDOWN"), "loading", True),
        (exceptions.ResponseError("something"), "error", False),
        (exceptions.AuthenticationError(), "auth", True),
        (exceptions.BusyLoadingError(), "loading", True),
        (exceptions.ClusterDownError("CLUSTERDOWN"), "cluster", True),
        (exceptions.TimeoutError(), "slow", True),
        (TimeoutError(), "slow", True),
        (exceptions.ConnectionError(), "down", True),
        (ConnectionResetError(), "down", True),
        (ValueError(), "protocol", True),
    ],
)
def test_every_failure_has_a_name(error: BaseException, kind: str, breaks: bool) -> None:
    """What a library or a socket raises is told by a fixed word, and blamed on the server where it is to blame."""
    assert isinstance(error, FAULTS)
    assert kind_of(error) == kind
    assert (kind in BREAKING) is breaks
