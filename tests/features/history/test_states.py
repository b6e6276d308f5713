"""A conversation's state: what is taken over, what is kept, and what is damaged."""

from __future__ import annotations

import json

import pytest

from proxy.features.history.notes import CompactionNote
from proxy.features.history.states import Budget, State, decode, encode, export, history_tail, read_import


def compaction(written_at: int, stages: tuple[str, ...] = ("fold",)) -> CompactionNote:
    """A compaction that took 900 tokens and left 100."""
    return CompactionNote(1, written_at, "up,m", b"p", 9, 0, 5, 900, 100, "", 0, stages, 0, 8192, 1024, 10)


def test_a_budget_says_what_remains() -> None:
    """Nothing without a total, and never less than zero."""
    assert Budget(100, 30).as_json() == {"total": 100, "consumed": 30, "remaining": 70}
    assert Budget(100, 130).as_json()["remaining"] == 0
    assert Budget(None, 30).as_json() == {"total": None, "consumed": 30, "remaining": None}


def test_an_import_keeps_what_it_does_not_know() -> None:
    """A checkpoint of another tool comes back with its own members; those of ours are written anew."""
    body = {"version": 2, "issue": 7, "budget": {"total": 5, "consumed": 3, "remaining": 2}, "history_tail": [{"a": 1}]}
    state = read_import(json.dumps(body).encode())
    assert state == State(Budget(5, 3), {"issue": 7})
    assert decode(encode(state)) == state
    shown = export("c", state.budget, [compaction(0)], state.others)
    assert (shown["issue"], shown["conversation"], shown["version"]) == (7, "c", 2)
    assert shown["history_tail"] == [
        {"action": "fold", "tokens_in": 900, "tokens_out": 100, "timestamp": "1970-01-01T00:00:00+00:00"}
    ]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"budget": 5}', b'{"budget": {"consumed": -1}}', b'{"budget": {"total": "x"}}', b"\xff"],
)
def test_a_damaged_import_is_none(body: bytes) -> None:
    """No guess is made about what it may have meant."""
    assert read_import(body) is None


def test_a_damaged_stored_state_is_none() -> None:
    """Nor about what was stored."""
    assert decode(None) is None
    assert decode(b"{") is None


def test_the_tail_is_the_last_three() -> None:
    """The newest three compactions of all threads are listed, the newest last."""
    tail = history_tail([compaction(at, ("prune", "fold")) for at in (50, 10, 40, 20, 30)])
    assert [entry["timestamp"] for entry in tail] == [f"1970-01-01T00:00:{at}+00:00" for at in (30, 40, 50)]
    assert tail[0]["action"] == "prune+fold"
