"""The state of the store: as a value, as a line at start, as JSON for the status page, and as warnings in the log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from proxy.store.breaker import State
from proxy.store.redis_errors import REFUSALS

Warn = Callable[[str, dict[str, object]], None]
"""Takes ``(event, facts)`` for the log."""

EVERY = 60.0
"""Seconds between two lines about the same kind of error."""

INSTEAD = ", in place of the configured store, which cannot be used"


@dataclass(frozen=True, slots=True)
class StoreState:
    """The state of the store, for health, metrics and the status page.

    ``owner``: this process runs the private server; None unless the store is embedded. ``refusal`` is a kind of
    ``redis_errors.REFUSALS`` if a server answers but refuses operations, else empty. ``instead``: memory replaces the
    configured store. ``errors`` counts by kind. ``latency`` is a running mean of operations, ``seconds`` their sum.
    """

    kind: str
    url_redacted: str
    up: bool
    breaker: State
    owner: bool | None
    refusal: str
    instead: bool
    errors: Mapping[str, int]
    hits: int
    misses: int
    operations: int
    seconds: float
    latency: float


def describe_store(state: StoreState, path: Path) -> str:
    """The store in one line; *path* is the embedded one's directory."""
    where = {"embedded": str(path), "memory": "this process only"}.get(state.kind, state.url_redacted)
    guest = ", shared with the process that started it" if state.owner is False else ""
    return f"{state.kind}  ({where}{guest}{_trouble(state)})"


def store_status(state: StoreState) -> dict[str, object]:
    """The store on the status page."""
    return {
        "kind": state.kind,
        "up": state.up,
        "breaker": state.breaker,
        "refusal": state.refusal or None,
        "errors": dict(state.errors),
    }


def _trouble(state: StoreState) -> str:
    if state.up:
        return ""
    if state.instead:
        return INSTEAD
    if state.refusal:
        return f", refuses what it is asked ({state.refusal}): {REFUSALS[state.refusal]}"
    return ", not reachable: serving without it"


class ThrottledWarnings:
    """Counts errors by kind. Logs changes of state at once, repeated errors once a minute; gets no keys or values."""

    def __init__(self, warn: Warn, clock: Callable[[], float] = time.monotonic) -> None:
        self._warn = warn
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._states: dict[str, object] = {"store": True}
        self.counts: Counter[str] = Counter()

    def say(self, event: str, /, **facts: object) -> None:
        """Log *event* now."""
        self._warn(event, facts)

    def change(self, subject: str, state: object, event: str, /, **facts: object) -> None:
        """Log *event* if *subject* was in another state before."""
        if self._states.get(subject) != state:
            self._states[subject] = state
            self._warn(event, facts)

    def count(self, kind: str, event: str = "", **facts: object) -> None:
        """Count one error of *kind*; log *event* unless it was logged within the last minute."""
        self.counts[kind] += 1
        now = self._clock()
        if event and now - self._logged_at.get(event, -EVERY) >= EVERY:
            self._logged_at[event] = now
            self._warn(event, {"kind": kind, **facts})

    def snapshot(self) -> Mapping[str, int]:
        """The number of errors of each kind so far."""
        return dict(self.counts)
