"""Tokens that each stage saved in a request, and the parts of its block, from known figures: nothing is counted again.

All figures are estimates. The saving of an edited item is taken from the share of its bytes that is left. Savings that
no other stage explains are the fold's. ``ullage fit --explain`` counts every text again instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from proxy.core.apis.json_scan import Span
from proxy.core.compaction.block import FOOTER, HEADER, NEWEST, PINS, STEPS, SUMMARY, TASK
from proxy.core.compaction.digest import BEGINNINGS
from proxy.core.compaction.record import CompactionRecord, stages_of_edits
from proxy.core.compaction.work_state import STATE
from proxy.core.conversation import Item

_SECTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        TASK: "first request",
        PINS: "user's words",
        NEWEST: "latest message",
        SUMMARY: "summary",
        STEPS: "steps",
        STATE: "state",
        HEADER: "frame",
        FOOTER: "frame",
        **dict.fromkeys(BEGINNINGS, "digest"),
    }
)
"""The kind of each section of a block, by its beginning."""


class StageSaving(msgspec.Struct, frozen=True):
    """The tokens by which one stage made the request smaller, and the number of items that it changed."""

    stage: str
    tokens: int
    items: int


class BlockPart(msgspec.Struct, frozen=True):
    """One section of a block: its kind, its tokens and its lines."""

    kind: str
    tokens: int
    lines: int


class ViewFacts(msgspec.Struct, frozen=True):
    """The figures of a view that a breakdown needs, without its body: the client's items and their spans.

    ``record`` is the one that the view was made from, ``tools_saved`` the tokens by which the tools were shrunk.
    ``ratio``: provider tokens per token of our count.
    """

    items: Sequence[Item]
    spans: Sequence[Span]
    record: CompactionRecord | None
    tools_saved: int = 0
    ratio: float = 1.0


def stage_savings(facts: ViewFacts, stages: Sequence[str], removed: int) -> tuple[StageSaving, ...]:
    """Return the estimated share of each of *stages* in the *removed* tokens; all are the provider's tokens."""
    record = facts.record
    saved: Counter[str] = Counter({"tools": int(facts.tools_saved * facts.ratio)})
    changed: Counter[str] = Counter()
    if record is not None:
        names = stages_of_edits(record.compaction)
        for index, tokens in _savings(facts, record):
            stage = names.get(index, "clip")
            saved[stage] += int(tokens * facts.ratio)
            changed[stage] += 1
        folding = next((stage for stage in stages if stage in ("fold", "drop")), "")
        saved[folding] = max(0, removed - sum(saved[stage] for stage in stages))
        changed[folding] = record.compaction.cut
    return tuple(StageSaving(stage, saved[stage], changed[stage]) for stage in stages)


def _savings(facts: ViewFacts, record: CompactionRecord) -> Iterator[tuple[int, float]]:
    """Yield the index of each edited item in the view, and an estimate of the tokens that its edit saves."""
    for index, edit in record.edits.items():
        if index >= record.compaction.cut:
            start, end = facts.spans[index]
            left = min(1.0, len(edit) / (end - start))
            yield index, facts.items[index].tokens * (1.0 - left)


def block_parts(block: str, tokens: int) -> tuple[BlockPart, ...]:
    """Return the sections of *block*, which takes *tokens*, in their order; each gets its share by characters."""
    characters: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    kind = "frame"
    for line in block.splitlines():
        beginning = next((begin for begin in _SECTIONS if line.startswith(begin)), "")
        kind = _SECTIONS.get(beginning, kind)
        if line:
            characters[kind] += len(line)
            lines[kind] += 1
    whole = characters.total() or 1
    return tuple(BlockPart(name, tokens * count // whole, lines[name]) for name, count in characters.items())
