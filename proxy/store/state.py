"""How the store is: as a value, as words for the start-up summary, and as JSON for the status page."""

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
    """The store as health, metrics and the dashboard show it. ``owner`` is ``None`` unless the store is embedded.

    ``refusal`` is the kind of refusal (see ``failures.REFUSALS``) if a server answers but does not do what it is asked.
    ``instead`` is true for memory in place of the configured store. ``errors`` counts by kind; ``latency`` is the
    mean of recent operations in seconds, ``seconds`` their sum so far.
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


def describe(state: StoreState, path: Path) -> str:
    """Return the store in one line; *path* is the embedded one's directory."""
    where = {"embedded": str(path), "memory": "this process only"}.get(state.kind, state.url_redacted)
    guest = "" if state.owner is not False else ", shared with the process that started it"
    return f"{state.kind}  ({where}{guest}{_trouble(state)})"


def status(state: StoreState) -> dict[str, object]:
    """Return what the status page shows of the store."""
    errors, refusal = dict(state.errors), state.refusal or None
    return {"kind": state.kind, "up": state.up, "breaker": state.breaker, "refusal": refusal, "errors": errors}


def _trouble(state: StoreState) -> str:
    if state.up:
        return ""
    if state.instead:
        return INSTEAD
    if state.refusal:
        return f", refuses what it is asked ({state.refusal}): {REFUSALS[state.refusal]}"
    return ", not reachable: serving without it"


class ThrottledWarnings:
    """Counts errors by kind and passes on what is worth a line; never sees keys or values."""

    def __init__(self, warn: Warn, clock: Callable[[], float] = time.monotonic) -> None:
        self._warn = warn
        self._clock = clock
        self._said: dict[str, float] = {}
        self._standing: dict[str, object] = {"store": True}
        self.counts: Counter[str] = Counter()

    def say(self, event: str, /, **facts: object) -> None:
        """Pass *event* on, now."""
        self._warn(event, facts)

    def change(self, subject: str, state: object, event: str, /, **facts: object) -> None:
        """Pass *event* on if *subject* was in another state before."""
        if self._standing.get(subject) != state:
            self._standing[subject] = state
            self._warn(event, facts)

    def count(self, kind: str, event: str = "", **facts: object) -> None:
        """Count one error of *kind*; pass *event* on unless it was within the last minute."""
        self.counts[kind] += 1
        now = self._clock()
        if event and now - self._said.get(event, -EVERY) >= EVERY:
            self._said[event] = now
            self._warn(event, {"kind": kind, **facts})

    def snapshot(self) -> Mapping[str, int]:
        """How many errors of each kind there were so far."""
        return dict(self.counts)
