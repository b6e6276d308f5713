from __future__ import annotations

from proxy.store.notices import EVERY, Notices


def test_states_are_told_once_and_repetitions_once_a_minute() -> None:
    """Every error is counted; the operator hears of changes, and of repeated errors once a minute."""
    heard, now = [], 0.0
    notices = Notices(lambda event, facts: heard.append((event, facts)), lambda: now)
    for state in (True, False, False, False, True):
        notices.change("store", state, "up" if state else "down")
    for _ in range(100):
        notices.count("oom", "full")
    notices.count("slow")
    now = EVERY
    notices.count("oom", "full")
    assert heard == [("down", {}), ("up", {}), ("full", {"kind": "oom"}), ("full", {"kind": "oom"})]
    assert notices.snapshot() == {"oom": 101, "slow": 1}
