"""How far items are cut when they are cut: the largest ones to one level, what matters most last."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spared:
    """Items, by index, that are cut after all others: what ``users`` wrote, and results that are ``unread``."""

    users: Collection[int]
    unread: Collection[int]


def fair_level(sizes: Mapping[int, int], floors: Mapping[int, int], room: int) -> int:
    """The largest common cap for *sizes*, none below its floor, that takes at most *room*; at least zero."""
    low, high = 0, max(sizes.values(), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(max(floors[i], min(size, middle)) for i, size in sizes.items()) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def clip_levels(
    sizes: Mapping[int, int], floors: Mapping[int, int], spared: Spared, wanted: int, needed: int, least: int
) -> dict[int, int]:
    """What each item of *sizes* may keep so that *wanted* tokens are saved, or at least the *needed* ones.

    Older items give way first. Unread results and users' words are touched only for what is *needed*; users' words
    stay whole while that leaves the others *least* tokens each.
    """
    both = {*spared.users, *spared.unread}
    total = sum(sizes.values())
    others = {i: size for i, size in sizes.items() if i not in both}
    rest = total - sum(others.values())
    level = fair_level(others, floors, total - wanted - rest)
    if level >= least:
        return _capped(sizes, floors, others, level)
    if not spared.unread:
        return _capped(sizes, floors, sizes, fair_level(sizes, floors, total - wanted))
    if sum(floors[i] for i in others) <= total - needed - rest:
        return _capped(sizes, floors, others, fair_level(others, floors, total - needed - rest))
    silent = {i: size for i, size in sizes.items() if i not in spared.users}
    level = fair_level(silent, floors, total - needed - sum(sizes[i] for i in sizes if i in spared.users))
    if level >= least:
        return _capped(sizes, floors, silent, level)
    return _capped(sizes, floors, sizes, fair_level(sizes, floors, total - needed))


def _capped(sizes: Mapping[int, int], floors: Mapping[int, int], cut: Collection[int], level: int) -> dict[int, int]:
    """*sizes* with those of *cut* brought down to *level*, none below its floor."""
    return {i: max(floors[i], min(size, level)) if i in cut else size for i, size in sizes.items()}
