"""The store in words and as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.store import StoreState, describe_store, store_status
from proxy.store.state import EVERY, ThrottledWarnings

HERE = Path("/data/ullage")


def _state(**facts: object) -> StoreState:
    usual = {"kind": "redis", "url_redacted": "redis://h", "up": True, "breaker": "closed", "owner": None}
    usual |= {"refusal": "", "instead": False, "errors": {}, "hits": 0, "misses": 0}
    return StoreState(**{**usual, "operations": 0, "seconds": 0.0, "latency": 0.0, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (_state(), "redis  (redis://h)"),
        (_state(kind="embedded", owner=True), "embedded  (/data/ullage)"),
        (_state(kind="embedded", owner=False), "embedded  (/data/ullage, shared with the process that started it)"),
        (_state(kind="memory"), "memory  (this process only)"),
        (_state(up=False), "redis  (redis://h, not reachable: serving without it)"),
    ],
)
def test_it_is_described_in_a_line(state: StoreState, words: str) -> None:
    """The start-up summary says which store it is and whether it can be used."""
    assert describe_store(state, HERE) == words


def test_what_is_wrong_is_said_with_its_remedy() -> None:
    """A store that refuses is shown with the reason and what to do, and memory in place of another as such."""
    refused = describe_store(_state(up=False, refusal="readonly"), HERE)
    assert "readonly" in refused
    assert "redis+sentinel://" in refused
    assert "in place of the configured store" in describe_store(_state(kind="memory", up=False, instead=True), HERE)


def test_the_status_names_the_refusal() -> None:
    """JSON has null if nothing is refused."""
    assert store_status(_state())["refusal"] is None
    found = store_status(_state(up=False, refusal="disk", errors={"disk": 3}))
    assert found == {"kind": "redis", "up": False, "breaker": "closed", "refusal": "disk", "errors": {"disk": 3}}


def test_states_are_told_once_and_repetitions_once_a_minute() -> None:
    """Every error is counted; the operator hears of changes, and of repeated errors once a minute."""
    heard, now = [], 0.0
    notices = ThrottledWarnings(lambda event, facts: heard.append((event, facts)), lambda: now)
    for state in (True, False, False, False, True):
        notices.change("store", state, "up" if state else "down")
    for _ in range(100):
        notices.count("oom", "full")
    notices.count("slow")
    now = EVERY
    notices.count("oom", "full")
    assert heard == [("down", {}), ("up", {}), ("full", {"kind": "oom"}), ("full", {"kind": "oom"})]
    assert notices.snapshot() == {"oom": 101, "slow": 1}
