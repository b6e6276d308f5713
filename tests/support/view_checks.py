"""What must hold for every view that reaches the upstream, whatever was done to the conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.stub import Seen, slices
from tests.support.api_formats import answered_calls, kind_of, text_of
from tests.support.tool_pair_checks import violations

ENDS = 40
"""Characters at both ends of a clipped text that must survive the clipping."""


def changed_items(raw: Sequence[bytes], view: Sequence[bytes]) -> list[int]:
    """Indices of the messages in *view* that are no byte-identical slice of *raw* in its order."""
    indexes, at = [], 0
    for index, piece in enumerate(view):
        try:
            at = raw.index(piece, at) + 1
        except ValueError:
            indexes.append(index)
    return indexes


def view_problems(raw_body: bytes, seen: Seen, *, clipped: bool = False) -> list[str]:
    """One sentence for each promise that the view in *seen* breaks against the client's *raw_body*.

    With *clipped* some items were too big for the window: user messages beside the carrier may be changed, and of the
    newest user text and the first task only the two ends must be left.
    """
    raw, view = slices(raw_body), seen.slices
    was, now = [json.loads(piece) for piece in raw], seen.messages
    new = changed_items(raw, view)
    problems = violations(now)
    roles = [kind_of(now[index]) for index in new]
    if roles.count("user") > 1 and not clipped:
        problems.append(f"{roles.count('user')} user messages were changed: only the carrier may be")
    problems += [f"a changed item is of the {role!r}" for role in set(roles) - {"user", "tool"}]
    kept_systems = [piece for piece, item in zip(raw, was, strict=True) if kind_of(item) == "system"]
    if any(piece not in view for piece in kept_systems):
        problems.append("a system message is missing or was changed")
    known = {name for item in was for name in answered_calls(item)}
    problems += [f"[{i}]: a changed result for an unknown call" for i in new if set(answered_calls(now[i])) - known]
    everything = "\n".join(map(text_of, now))
    users = [text_of(item) for item in was if kind_of(item) == "user"]
    for label, text in zip(("first task", "newest user text"), (*users[:1], *users[-1:]), strict=False):
        wanted = (text[:ENDS], text[-ENDS:]) if clipped else (text,)
        if not all(piece in everything for piece in wanted):
            problems.append(f"the {label} is not in the view")
    return problems + _carrier_problems(was, now, new, clipped)


def _carrier_problems(
    was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], new: Sequence[int], clipped: bool
) -> list[str]:
    carriers = [text_of(now[index]) for index in new if kind_of(now[index]) == "user"]
    users = [text_of(item) for item in was if kind_of(item) == "user"]
    if clipped or all(any(text and text in carrier for text in users) for carrier in carriers):
        return []
    return ["the carrier does not hold a user message as one unchanged run"]


@dataclass
class CacheTally:
    """Adds up what a conversation's requests sent and how much of it a provider's prompt cache had already."""

    sent: int = 0
    repeated: int = 0
    requests: int = 0
    compacted: int = 0
    fills: list[float] = field(default_factory=list)

    def note(self, raw_body: bytes, seen: Seen) -> None:
        """Count one answered request."""
        self.sent += seen.tokens
        self.repeated += seen.cached
        self.requests += 1
        self.compacted += seen.body != raw_body
        self.fills.append(seen.tokens / seen.window)

    @property
    def share(self) -> float:
        """Tokens of the common message prefix over tokens sent."""
        return self.repeated / self.sent if self.sent else 0.0

    @property
    def fill(self) -> float:
        """Mean share of the window that was used."""
        return sum(self.fills) / len(self.fills) if self.fills else 0.0

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.compacted} compacted, {self.sent} tokens sent, "
            f"repeated prefix {self.share:.3f}, mean fill {self.fill:.2f}"
        )
