"""Assigns roles to the figures of an error text: limit, prompt, output, both together, and a cap of the output."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from proxy.core.overflow.lexicon import Row
from proxy.core.overflow.rules import Pattern

LEAST_LIMIT = 64
"""Tokens of the smallest limit that can be a window; a smaller figure counts something else."""

LEAST_SIZE = 512
"""Bytes or characters of the smallest limit of a message; a smaller one is that of a name or a key."""

_SIZE = re.compile(
    r"(\d{1,15}(?:[.,]\d{1,3})*)(?:[ -]?(bytes?|[kmg]i?b(?:ytes)?|characters|chars|символ\w*|zeichen|caract[eè]r\w*)\b"
    r"| ?个?(字(?![段节典])|文字|자(?![가-힣])))",
    re.IGNORECASE,
)
_SCALE = {"k": 10**3, "m": 10**6, "g": 10**9}


def stated_size(text: str) -> int | None:
    """Return the largest number of bytes or characters that *text* states; None if it states none."""
    return max((_bytes(match[1], match[2] or match[3]) for match in _SIZE.finditer(text)), default=None)


def _bytes(number: str, unit: str) -> int:
    whole = re.sub(r"[.,](?=\d{3}(?:\D|$))", "", number).replace(",", ".")
    return int(float(whole) * _SCALE.get(unit[0].lower(), 1))


@dataclass(frozen=True, slots=True)
class StatedFigures:
    """The figures of a text, in the provider's tokens; None for one that it does not state.

    ``cap`` is the most output. ``whole``: ``prompt`` is the whole request, which may include the output. ``inferred``:
    ``prompt`` is the larger one of two limits. ``small_limit``: the only limits are too small for a window.
    """

    limit: int | None = None
    prompt: int | None = None
    output: int | None = None
    requested: int | None = None
    cap: int | None = None
    whole: bool = False
    inferred: bool = False
    small_limit: bool = False

    @property
    def are_too_many(self) -> bool:
        """True if the figures alone prove that something does not fit."""
        if self.limit is None:
            return False
        tokens = self.requested or 0
        if self.prompt is not None:
            tokens = self.prompt + (self.output or 0)
        return tokens >= self.limit

    @property
    def are_a_count_above_a_limit(self) -> bool:
        """True if ``prompt`` is no round number, and ``limit`` is: what was counted, and what somebody set.

        "num_ctx 262144 is greater than the maximum 131072" is about two settings, "9214 is greater than 8192" is not.
        """
        if self.limit is None or self.prompt is None:
            return False
        return is_round(self.limit) and not is_round(self.prompt) and self.limit < self.prompt

    def undivided(self) -> StatedFigures:
        """Return these figures without the prompt if that may include the output."""
        if not self.whole or self.output is not None:
            return self
        return replace(self, prompt=None)


def is_round(figure: int) -> bool:
    """True if people set limits like *figure*: multiples of 100 or of 64, or one less."""
    return figure % 100 == 0 or figure % 64 in (0, 63)


def read_figures(row: Row, patterns: Iterable[Pattern]) -> StatedFigures:
    """Return the figures of *row* by role. Each figure has the role of the first pattern that matches it."""
    if not row.figures:
        return StatedFigures()
    assigned: set[int] = set()
    by_role: dict[str, list[int]] = {}
    for roles in _role_positions(row, patterns):
        if not assigned.isdisjoint(roles):
            continue
        assigned.update(roles)
        for position, role in roles.items():
            by_role.setdefault(role, []).append(row.figures[position])
    if by_role.keys() == {"limit"}:
        # Of two limits ``assign_roles`` takes the larger one for the prompt.
        by_role["limit"] += _unassigned_tokens(row, assigned)
    return assign_roles(by_role)


def _unassigned_tokens(row: Row, assigned: Collection[int]) -> list[int]:
    """Return the figures of tokens in *row* that are not at the positions *assigned*."""
    unassigned = [at for at in row.figures if at not in assigned]
    return [row.figures[at] for at in unassigned if row.notions.startswith("NK", at)]


def _role_positions(row: Row, patterns: Iterable[Pattern]) -> Iterator[dict[int, str]]:
    """Yield the positions of figures with their roles, for each match of *patterns* in *row*."""
    for pattern in patterns:
        at = 0
        while match := pattern.regex.search(row.notions, at):
            at = match.start() + 1
            yield {match.start(role): role for role in match.groupdict()}


def assign_roles(by_role: Mapping[str, list[int]]) -> StatedFigures:
    """Return one figure for each role, the first of those stated in it."""
    output = next(iter(by_role.get("output", ())), None)
    requested = next(filter(None, by_role.get("requested", ())), None)
    stated = by_role.get("limit", ())
    limits = [limit for limit in stated if limit >= LEAST_LIMIT]
    small = bool(stated) and not limits
    prompt = _prompt([*filter(None, by_role.get("prompt", ()))], output, requested)
    inferred = prompt is None and len(set(limits)) > 1
    if inferred:
        limits, prompt = [min(limits)], max(limits)
    claim = (prompt or 0) + (output or 0)
    limit = next((limit for limit in limits if limit <= claim), next(iter(limits), None))
    if limit is not None and prompt is not None and claim < limit / 2:
        limit = prompt = None  # by these figures the request fits easily, so they are about something else
    cap = next(iter(by_role.get("cap", ())), None)
    whole = requested is not None and "prompt" not in by_role and prompt == requested
    return StatedFigures(limit, prompt, output, requested, cap, whole, inferred, small)


def _prompt(parts: list[int], output: int | None, requested: int | None) -> int | None:
    """Return the tokens of the input: *requested* less *output* if *parts* add up to that, else the first part."""
    if requested is not None:
        rest = requested - (output or 0)
        if rest >= 0 and (not parts or sum(parts) == rest):
            return rest
    return next(iter(parts), None)
