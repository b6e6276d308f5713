"""The mild event: old tool results give way to one line each, and everything that was said stays."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from proxy.core.compression.dedup import Dedup, superseded
from proxy.core.compression.prune import Prune, border, ranked
from proxy.core.compression.swap import Swap, charge
from proxy.core.conversation.facts import Pair, pairs_of
from proxy.core.conversation.items import Item, Layout, unread_from


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
    held: tuple[Swap, ...] = ()
    sizes: Mapping[int, int] = field(default_factory=dict)


def swaps(stretch: Stretch, need: int, window: int, rules: Mild) -> tuple[tuple[Swap, ...], tuple[str, ...]] | None:
    """The results that give way so that *need* tokens are saved, and the stages that chose them.

    ``None`` where not so many can be saved. What another replacement names stays; nothing is done by halves.
    """
    items, layout, start, place = stretch.items, stretch.layout, stretch.start, stretch.place
    prune = rules.prune.scaled(window) if rules.prune else None
    most = layout.result_sums[place] - layout.result_sums[start]
    if most < need:
        return None
    gains = _gains(stretch)
    pairs = [pair for pair in pairs_of(items, start, place) if pair.index in gains]
    worth = _worth(gains, stretch.held, rules)
    chosen = _repeated(pairs, worth, rules.dedup)
    saved = sum(gains[index] for index in chosen)
    stages: tuple[str, ...] = ("dedup",) if chosen else ()
    if saved < need and prune is not None:
        first = min(border(layout, start, place, prune), unread_from(items, place))
        old = _unspared(ranked(pairs, items, place, prune), worth - chosen.keys(), first)
        taken, pruned = _enough(old, gains, need - saved)
        if pruned >= prune.min_saving:
            chosen = _repointed(chosen, taken) | taken
            saved += pruned
            stages = (*stages, "prune")
    if not chosen or saved < need:
        return None
    return tuple(sorted(chosen.values())), stages


def _gains(stretch: Stretch) -> dict[int, int]:
    """Return what each item with results saves if a line stands for it, without those that gave way before."""
    items = stretch.items
    gone = {swap.index for swap in stretch.held}
    results = [i for i in range(stretch.start, stretch.place) if items[i].answers and i not in gone]
    return {i: stretch.sizes.get(i, items[i].tokens) - charge(items[i]) for i in results}


def _worth(gains: Mapping[int, int], held: Iterable[Swap], rules: Mild) -> set[int]:
    """Return the items that save enough, without those that an earlier replacement names."""
    least = (rules.dedup or Dedup()).min_saving
    named = {swap.by for swap in held}
    return {index for index, gain in gains.items() if gain >= least and index not in named}


def _repeated(pairs: Sequence[Pair], worth: Container[int], rules: Dedup | None) -> dict[int, Swap]:
    """Return the replacements, by item, of results that a later one repeats."""
    swaps = superseded(pairs, rules) if rules else []
    return {swap.index: swap for swap in swaps if swap.index in worth}


def _unspared(old: Iterable[Swap], worth: Container[int], first: int) -> list[Swap]:
    """Return those of *old* that are *worth* it and stand before the item *first*."""
    return [swap for swap in old if swap.index < first and swap.index in worth]


def _repointed(chosen: Mapping[int, Swap], taken: Container[int]) -> dict[int, Swap]:
    """Return *chosen*, where nothing says that a later result has it if that one is *taken* as well."""
    return {i: Swap(i, "old") if swap.by in taken else swap for i, swap in chosen.items()}


def _enough(old: Sequence[Swap], gains: Mapping[int, int], need: int) -> tuple[dict[int, Swap], int]:
    """The first of *old* that together save *need*, and what they save; all of them where they save less."""
    taken: dict[int, Swap] = {}
    saved = 0
    for swap in old:
        if saved >= need:
            break
        taken[swap.index] = swap
        saved += gains[swap.index]
    return taken, saved
