"""A conversation's state as its caller exports and imports it: its budget, its last compactions, and foreign members.

Unknown members are stored and exported as they were imported. A state that cannot be read is replaced by the stored
one, or by a new one, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec

from proxy.core.apis.json_steps import UNREADABLE
from proxy.features.history.notes import CompactionNote

VERSION: Final = 2
"""The version of the exported state, which is that of the checkpoints that some agents write already."""

TAIL: Final = 3
"""Number of compactions, the newest ones, whose tokens a state lists."""

_Tokens = Annotated[int, msgspec.Meta(ge=0)]


class Budget(msgspec.Struct, frozen=True):
    """Tokens that a conversation may use in all (None: any number), and those it has used."""

    total: _Tokens | None = None
    consumed: _Tokens = 0

    def as_json(self) -> dict[str, int | None]:
        """Return the budget as callers see it, with the tokens that remain."""
        remaining = None
        if self.total is not None:
            remaining = max(0, self.total - self.consumed)
        return {"total": self.total, "consumed": self.consumed, "remaining": remaining}


class _Imported(msgspec.Struct):
    budget: Budget = Budget()


_OWN_MEMBERS: Final = frozenset({"version", "conversation", "budget", "history_tail", "repaired"})
"""Members that an export computes; all others are those of the import."""


class State(msgspec.Struct, frozen=True):
    """The stored part of a state: its budget, and the imported members that have no meaning here."""

    budget: Budget
    others: Mapping[str, Any]


NOTHING: Final = State(Budget(), {})
"""The state of a conversation of which none is stored."""


def read_import(body: bytes) -> State | None:
    """Return the state that *body* holds; None if it is damaged."""
    try:
        members = msgspec.json.decode(body, type=dict[str, Any])
        budget = msgspec.json.decode(body, type=_Imported).budget
    except UNREADABLE:
        return None
    return State(budget, {name: value for name, value in members.items() if name not in _OWN_MEMBERS})


def encode(state: State) -> bytes:
    """Return *state* as it is stored."""
    return msgspec.json.encode(state)


def decode(value: bytes | None) -> State | None:
    """Return the stored state; None if there is none, or it is damaged."""
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=State)
    except UNREADABLE:
        return None


def history_tail(compactions: Sequence[CompactionNote]) -> list[dict[str, object]]:
    """Return the tokens before and after the last ``TAIL`` compactions, the newest last."""
    newest = sorted(compactions, key=lambda note: note.written_at)[-TAIL:]
    return [
        {
            "action": "+".join(note.stages),
            "tokens_in": note.tokens_in,
            "tokens_out": note.tokens_out,
            "timestamp": datetime.fromtimestamp(note.written_at, UTC).isoformat(),
        }
        for note in newest
    ]


def export(
    conversation: str, budget: Budget, compactions: Sequence[CompactionNote], others: Mapping[str, Any]
) -> dict[str, object]:
    """Return the state of *conversation* as its caller gets it."""
    return {
        "version": VERSION,
        "conversation": conversation,
        "budget": budget.as_json(),
        "history_tail": history_tail(compactions),
        **others,
    }
