"""The figures of an error text in their roles: limit, prompt, output, all that was requested, and a cap of output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from proxy.core.overflow.rules import Pattern, Row

SMALLEST_WINDOW = 64
"""Tokens of a window at least: a smaller limit counts something else."""

_SIZE = re.compile(r"(\d{1,15}(?:[.,]\d{1,3})*)[ -]?(bytes?|[kmg]i?b(?:ytes)?)\b", re.IGNORECASE)
_SCALE = {"b": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def stated_size(text: str) -> int | None:
    """The largest number of bytes that *text* states; None if it states none."""
    return max((_bytes(match[1], match[2]) for match in _SIZE.finditer(text)), default=None)


def _bytes(number: str, unit: str) -> int:
    whole = re.sub(r"[.,](?=\d{3}(?:\D|$))", "", number).replace(",", ".")
    return int(float(whole) * _SCALE[unit[0].lower()])


@dataclass(frozen=True, slots=True)
class StatedFigures:
    """The figures of a text, in the provider's tokens; None for one that it does not state.

    ``cap`` is the most output. ``whole``: ``prompt`` is all that was requested, perhaps with output in it.
    """

    limit: int | None = None
    prompt: int | None = None
    output: int | None = None
    requested: int | None = None
    cap: int | None = None
    whole: bool = False

    @property
    def are_too_many(self) -> bool:
        """True if the figures by themselves say that something does not fit."""
        if self.limit is None:
            return False
        tokens = self.requested or 0
        if self.prompt is not None:
            tokens = self.prompt + (self.output or 0)
        return tokens >= self.limit

    def undivided(self) -> StatedFigures:
        """The same figures without the prompt, if that may be the whole request with its output."""
        if not self.whole or self.output is not None:
            return self
        return replace(self, prompt=None)


def read_figures(row: Row, patterns: Iterable[Pattern]) -> StatedFigures:
    """The figures of *row* in their roles. Each figure has the role of the first pattern that matches it."""
    if not row.figures:
        return StatedFigures()
    known: set[int] = set()
    by_role: dict[str, list[int]] = {}
    for roles in _role_positions(row, patterns):
        if not known.isdisjoint(roles):
            continue
        known.update(roles)
        for position, role in roles.items():
            by_role.setdefault(role, []).append(row.figures[position])
    if by_role.keys() == {"limit"}:
        unnamed = (figure for at, figure in row.figures.items() if at not in known and row.notions.startswith("NK", at))
        by_role["limit"] += unnamed  # of two figures of tokens the larger one is what was sent
    return assign_roles(by_role)


def _role_positions(row: Row, patterns: Iterable[Pattern]) -> Iterator[dict[int, str]]:
    """For each match of *patterns* in *row*, the positions of its figures with their roles."""
    for pattern in patterns:
        at = 0
        while match := pattern.regex.search(row.notions, at):
            at = match.start() + 1
            yield {match.start(role): role for role in match.groupdict()}


def assign_roles(by_role: Mapping[str, list[int]]) -> StatedFigures:
    """One figure for each role, of those stated in it, the most certain first."""
    output = next(iter(by_role.get("output", ())), None)
    requested = next(filter(None, by_role.get("requested", ())), None)
    limits = [limit for limit in by_role.get("limit", ()) if limit >= SMALLEST_WINDOW]
    prompt = _prompt([*filter(None, by_role.get("prompt", ()))], output, requested)
    if prompt is None and len(set(limits)) > 1:
        limits, prompt = [min(limits)], max(limits)
    claim = (prompt or 0) + (output or 0)
    limit = next((limit for limit in limits if limit <= claim), next(iter(limits), None))
    if limit is not None and prompt is not None and claim < limit / 2:
        limit = prompt = None  # these figures do not say that something is too long
    cap = next(iter(by_role.get("cap", ())), None)
    whole = requested is not None and "prompt" not in by_role and prompt == requested
    return StatedFigures(limit, prompt, output, requested, cap, whole)


def _prompt(parts: list[int], output: int | None, requested: int | None) -> int | None:
    """Tokens of the input: what was requested less the output, if *parts* add up to that, else the first part."""
    if requested is not None:
        rest = requested - (output or 0)
        if rest >= 0 and (not parts or sum(parts) == rest):
            return rest
    return next(iter(parts), None)
