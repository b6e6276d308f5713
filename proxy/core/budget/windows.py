"""How much a model takes: three figures that are kept apart, who says so, and who is believed over whom."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Source = Literal["configured", "server", "learned", "table", "assumed", "unknown"]
"""Who says how large a window is, most believed first."""

_SERIES = re.compile(r"(?:^|[./-])(gpt-\d+)(?![a-z\d])")
"""The series of an OpenAI model's name, with or without the prefixes that resellers put before it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What somebody says of a model, in tokens; ``None`` where nothing is said.

    ``window`` is input and output together, ``max_input`` a limit of the input beside it; inputs above ``tier`` cost
    more for each token.
    """

    window: int | None = None
    max_input: int | None = None
    max_output: int | None = None
    tier: int | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """What a server says of itself, in tokens; ``at`` is the monotonic second since when it has said just that.

    ``how`` names the route and the member it was read from.
    """

    context_window: int
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    source: Source = "server"
    at: float = 0.0
    how: str = ""


Told = Callable[[str, str, bool], Window | None]
"""What the named upstream says of the named model, as far as it is known this instant; never waits.

The last argument says whether it is worth asking the upstream where that is unknown or old.
"""


def published(rows: Mapping[str, Facts]) -> dict[str, Facts]:
    """What a published table says, read safely; in each row only ``max_input`` and ``max_output`` are looked at.

    A row's input figure is mostly the shared window (gpt-4o: 128,000; Claude: 200,000 or 1,000,000), so it is taken
    for the window: where it is only the input's, the window comes out too small and never too large. For OpenAI's
    numbered series the table holds both readings side by side: 272,000 + 128,000 in the rows of gpt-5 and 400,000
    with the same output in those of gpt-5.1-codex; 922,000 against 1,050,000; 111,616 + 16,384 against 128,000. Two
    rows of one series whose inputs differ by exactly their common output figure speak of one window: the larger
    figure is the window, the smaller the limit of its input. Elsewhere such a pair is chance (131,072 and 163,840
    with 32,768, of two hosts of one DeepSeek model) and says nothing.
    """
    pairs = {(series(name), row.max_input, row.max_output) for name, row in rows.items() if series(name)}
    return {name: _read(row, series(name), pairs) for name, row in rows.items()}


def series(model: str) -> str:
    """The numbered OpenAI series *model* belongs to, such as ``gpt-5``; empty for every other model."""
    found = _SERIES.search(model)
    return found[1] if found else ""


def _read(row: Facts, name: str, pairs: set[tuple[str, int | None, int | None]]) -> Facts:
    taken, output, tier = row.max_input, row.max_output, row.tier
    if not name or taken is None or output is None:
        return Facts(taken, None, output, tier)
    if (name, taken + output, output) in pairs:
        return Facts(taken + output, taken, output, tier)
    return Facts(taken, taken - output if (name, taken - output, output) in pairs else None, output, tier)
