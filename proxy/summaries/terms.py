"""On which terms summaries are written, and what a process remembers of them: plain values."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

from proxy.ports import Summary
from proxy.summaries.contracts import Breaker

LEASE = 15.0
"""Seconds a lease lasts."""

Key = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms summaries are written.

    ``model`` is the configured summariser, empty for the request's own; only conversations of the tenants in
    ``allowed`` go to it (``None``: everybody's). ``subscriptions``: OAuth tokens may be used. ``guarded`` are the
    upstreams whose configured key is one, ``keyed`` those with a key of their own. ``most`` jobs run at once;
    ``timeout`` is how long an event waits at most.
    """

    mode: Literal["background", "inline"] = "background"
    model: str = ""
    allowed: frozenset[bytes] | None = None
    subscriptions: bool = False
    keyed: frozenset[str] = frozenset()
    guarded: frozenset[str] = frozenset()
    most: int = 4
    timeout: float = 60.0
    lease: float = LEASE


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process remembers: bounded mappings of summaries, of when a stretch may be looked at again, of the prefix
    that was once too dear to sum up and what it costs, of failures in a row, and of breakers by summariser and tenant.
    """

    summaries: MutableMapping[tuple[bytes, bytes], Summary]
    rests: MutableMapping[Key, float]
    dear: MutableMapping[Key, tuple[int, int]]
    failures: MutableMapping[Key, int]
    breakers: MutableMapping[tuple[str, bytes], Breaker]
