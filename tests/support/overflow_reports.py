"""Errors that people met and posted, beside the recordings: facts about providers, each with where it was seen.

They were collected and judged after the first rules were written, and before any was changed for them: then 59 of the
60 that mean length were recognised, 8 of 41 look-alikes were taken for it, and 2 of 44 limits were wrong. A second lot,
written down after the rules had been mended for the first, gave 54 of 55, 4 of 47 and 1 of 35.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parents[1] / "data" / "overflow_reports.jsonl"


@dataclass(frozen=True)
class ReportedError:
    """One answer: what it may mean (``None``: nothing of ours), and the limit and prompt it states in tokens."""

    origin: str
    status: int
    kinds: tuple[str | None, ...]
    limit: int | None
    prompt: int | None
    body: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def too_long(self) -> bool:
        """True if a smaller view would help."""
        return self.kinds[0] in {"input", "input_plus_output", "payload"}


def reported_errors() -> list[ReportedError]:
    """Every answer in the file."""
    rows = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]
    return [
        ReportedError(
            **{
                **row,
                "kinds": tuple(row["kinds"]),
                "headers": tuple((name, value) for name, value in row.get("headers", ())),
            }
        )
        for row in rows
    ]
