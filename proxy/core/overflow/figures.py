"""Which figure of a text is the limit, the prompt, the output: by where it stands, checked by arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from proxy.core.overflow.rules import Pattern
from proxy.core.overflow.words import Row

SMALLEST_WINDOW = 64
"""A limit below this is a count of something else."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a text states, in the provider's tokens; ``None`` where it states nothing.

    ``cap`` is the most output; ``whole`` means that ``prompt`` is all that was requested, whatever that is made of.
    """

    limit: int | None = None
    prompt: int | None = None
    output: int | None = None
    requested: int | None = None
    cap: int | None = None
    whole: bool = False

    @property
    def are_too_many(self) -> bool:
        """Whether the figures by themselves say that something does not fit."""
        claim = self.requested or 0 if self.prompt is None else self.prompt + (self.output or 0)
        return self.limit is not None and claim >= self.limit

    def undivided(self) -> Figures:
        """The same, where what was requested as a whole is not known to be the prompt alone."""
        return replace(self, prompt=None) if self.whole and self.output is None else self


def read_figures(row: Row, patterns: Iterable[Pattern]) -> Figures:
    """Return the figures of *row* in their roles. Each figure has the role of the first pattern that names it."""
    named: set[int] = set()
    stated: dict[str, list[int]] = {}
    for roles in _role_places(row, patterns) if row.figures else ():
        if not named.isdisjoint(roles):
            continue
        named.update(roles)
        for place, role in roles.items():
            stated.setdefault(role, []).append(row.figures[place])
    return assemble(stated)


def _role_places(row: Row, patterns: Iterable[Pattern]) -> Iterator[dict[int, str]]:
    """Yield for each match of *patterns* in *row* the places of its figures, each with its role."""
    for pattern in patterns:
        at = 0
        while found := pattern.regex.search(row.notions, at):
            at = found.start() + 1
            yield {found.start(role): role for role in found.groupdict()}


def assemble(stated: Mapping[str, list[int]]) -> Figures:
    """Figures out of all that was said in each role, most certain first."""
    output = next(iter(stated.get("output", ())), None)
    requested = next(iter(stated.get("requested", ())), None)
    limits = [limit for limit in stated.get("limit", ()) if limit >= SMALLEST_WINDOW]
    prompt = _prompt(stated.get("prompt", []), output, requested)
    if prompt is None and len(set(limits)) > 1:
        limits, prompt = [min(limits)], max(limits)
    claim = (prompt or 0) + (output or 0)
    limit = next((limit for limit in limits if limit <= claim), next(iter(limits), None))
    if limit is not None and prompt is not None and claim < limit / 2:
        limit = prompt = None  # whatever these figures are, they do not say that something is too long
    cap = next(iter(stated.get("cap", ())), None)
    whole = requested is not None and "prompt" not in stated and prompt == requested
    return Figures(limit, prompt, output, requested, cap, whole)


def _prompt(parts: list[int], output: int | None, requested: int | None) -> int | None:
    """The input's tokens: stated, or the sum of its parts where that is what the whole says."""
    whole = None if requested is None else requested - (output or 0)
    if whole is not None and whole >= 0 and (not parts or sum(parts) == whole):
        return whole
    return parts[0] if parts else None
