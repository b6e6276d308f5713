"""Ports for servers that get theirs as a setting, and ports on which no server listens."""

from __future__ import annotations

import itertools
import os
import random
import socket

CANDIDATES = range(20_000, 32_000)
"""Below those that Linux gives to a program that wants any port: a stub of another test would be taken for the proxy
that is about to listen, and the looks whether it is ready for the requests of that other test."""

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_OWN = CANDIDATES[_WORKER::_WORKERS]
"""No worker of pytest-xdist takes a port that another one has found free and whose server does not listen yet."""

_ports = itertools.cycle(random.sample(_OWN, len(_OWN)))


def free_port() -> int:
    """Return a loopback port that no server listens on, and that this process does not get again soon."""
    return next(port for port in _ports if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
