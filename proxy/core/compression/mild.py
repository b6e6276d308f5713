"""The mild event: old tool results give way to one line each, and everything that was said stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proxy.core.compression.dedup import Dedup, superseded
from proxy.core.compression.prune import Prune, border, ranked
from proxy.core.compression.swap import Placeholder, charge
from proxy.core.conversation import Item, Layout, unread_from
from proxy.core.tool_calls import pairs_of


@dataclass(frozen=True, slots=True)
class Mild:
    """What the mild event may do; ``None`` where a part of it is switched off."""

    dedup: Dedup | None = field(default_factory=Dedup)
    prune: Prune | None = field(default_factory=Prune)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where a mild event works: results from item ``start`` to ``place`` that did not give way in ``held`` already.

    ``sizes`` are the tokens of items that were made smaller before, by index: no more can be saved there.
    """

    items: Sequence[Item]
    layout: Layout
    start: int
    place: int
    held: tuple[Placeholder, ...] = ()
    sizes: Mapping[int, int] = field(default_factory=dict)


def swaps(
    stretch: Stretch, need: int, window: int, rules: Mild
) -> tuple[tuple[Placeholder, ...], tuple[str, ...]] | None:
    """The results that give way so that *need* tokens are saved, and the stages that chose them.

    ``None`` where not so many can be saved. What another replacement names stays; nothing is done by halves.
    """
    items, layout, start, place = stretch.items, stretch.layout, stretch.start, stretch.place
    prune = rules.prune.scaled(window) if rules.prune else None
    most = layout.result_sums[place] - layout.result_sums[start]
    if most < need or (rules.dedup is None and prune is None):
        return None
    gone = {swap.index for swap in stretch.held}
    named = {swap.by for swap in stretch.held}
    least = rules.dedup.min_saving if rules.dedup else Dedup().min_saving
    results = [i for i in range(start, place) if items[i].answers and i not in gone]
    gains = {i: stretch.sizes.get(i, items[i].tokens) - charge(items[i]) for i in results}
    pairs = [pair for pair in pairs_of(items, start, place) if pair.index in gains]
    repeated = superseded(pairs, rules.dedup) if rules.dedup else []
    chosen = {swap.index: swap for swap in repeated if gains[swap.index] >= least and swap.index not in named}
    saved = sum(gains[index] for index in chosen)
    stages: tuple[str, ...] = ("dedup",) if chosen else ()
    if saved < need and prune is not None:
        first = min(border(layout, start, place, prune), unread_from(items, place))
        spared = {*chosen, *named}
        old = [swap for swap in ranked(pairs, items, place, prune) if swap.index < first and swap.index not in spared]
        taken, pruned = _enough([swap for swap in old if gains[swap.index] >= least], gains, need - saved)
        if pruned >= prune.min_saving:
            # What said that a later result has it says so no longer where that one goes as well.
            pointing = {i: Placeholder(i, "old") if swap.by in taken else swap for i, swap in chosen.items()}
            chosen = pointing | taken
            saved += pruned
            stages = (*stages, "prune")
    if not chosen or saved < need:
        return None
    return tuple(sorted(chosen.values())), stages


def _enough(old: Sequence[Placeholder], gains: Mapping[int, int], need: int) -> tuple[dict[int, Placeholder], int]:
    """The first of *old* that together save *need*, and what they save; all of them where they save less."""
    taken: dict[int, Placeholder] = {}
    saved = 0
    for swap in old:
        if saved >= need:
            break
        taken[swap.index] = swap
        saved += gains[swap.index]
    return taken, saved
