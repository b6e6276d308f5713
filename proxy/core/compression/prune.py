"""Which old tool results can best be done without: by their tool's kind, and by what the model made of them since."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from proxy.core.compression.swap import Placeholder, charge
from proxy.core.conversation import Item, Layout
from proxy.core.tool_calls import Pair, mentioned

WEIGHTS: Mapping[str, int] = MappingProxyType(
    {
        "shell": 70,
        "shell_read": 65,
        "web_fetch": 55,
        "grep": 50,
        "search_semantic": 50,
        "web_search": 40,
        "file_read": 30,
        "unknown": 25,
        "media_read": 30,
        "glob": 20,
        "list": 20,
        "file_edit": 10,
        "file_write": 10,
        "agent": 0,
    }
)
"""How easily a result of each kind is done without; what has no weight is never left out."""

REFERENCE = 20
QUOTATION = 20
DECISION = 10
"""What a result is worth more for each later item that names its file or quotes it, and if a conclusion follows it."""

USUAL_WINDOW = 200_000
"""Below this window the figures in tokens shrink with it."""


@dataclass(frozen=True, slots=True)
class Prune:
    """What is never left out, in rounds and in tokens of results from the newest back; the least that pays; weights."""

    protect_rounds: int = 6
    protect_tokens: int = 40_000
    min_saving: int = 20_000
    weights: Mapping[str, int] = field(default_factory=lambda: WEIGHTS)

    def scaled(self, window: int) -> Prune:
        """The same for a *window*: below the usual one fewer tokens and rounds are protected."""
        share = min(1.0, window / USUAL_WINDOW)
        tokens, saving = int(self.protect_tokens * share), int(self.min_saving * share)
        rounds = max(min(1, self.protect_rounds), int(self.protect_rounds * share))
        return Prune(rounds, tokens, saving, self.weights)


def border(layout: Layout, start: int, place: int, rules: Prune) -> int:
    """The first protected item between *start* and *place*: results before it may go."""
    cuts = layout.cuts[: bisect_left(layout.cuts, place)]
    oldest = cuts[-rules.protect_rounds] if len(cuts) >= rules.protect_rounds else start
    oldest = oldest if rules.protect_rounds else place
    sums = layout.result_sums
    tokens = bisect_left(sums, sums[place] - rules.protect_tokens) - 1 if rules.protect_tokens else place
    # The result that crosses the limit may go; those after it may not.
    return max(start, min(oldest, tokens + 1))


def ranked(pairs: Sequence[Pair], items: Sequence[Item], place: int, rules: Prune) -> list[Placeholder]:
    """The results among *pairs* that may go, the most dispensable first, an unknown tool's last.

    Only what was written before *place* counts.
    """
    scores: dict[int, list[tuple[bool, int] | None]] = {}
    for pair, value in zip(reversed(pairs), _values(pairs, items, place), strict=True):
        weight = rules.weights.get(pair.call.kind)
        score = None if weight is None else (pair.call.kind == "unknown", -max(0, weight - value))
        scores.setdefault(pair.index, []).append(score)
    order: dict[int, tuple[bool, int]] = {}
    for index, found in scores.items():
        known = [score for score in found if score is not None]
        if len(known) == len(found):  # an item with several results gives way only as a whole
            order[index] = max(known)
    return [Placeholder(index, "old") for index in sorted(order, key=lambda index: (order[index], index))]


def oldest(pairs: Sequence[Pair], items: Sequence[Item], over: int) -> tuple[Placeholder, ...] | None:
    """The fewest of the oldest results among *pairs* that save *over* tokens, whatever they are worth.

    ``None`` where all of them do not save as much.
    """
    found: list[Placeholder] = []
    for index in sorted({pair.index for pair in pairs}):
        if over <= 0:
            break
        saved = items[index].tokens - charge(items[index])
        if saved > 0:
            found.append(Placeholder(index, "old"))
            over -= saved
    return tuple(found) if over <= 0 else None


def _values(pairs: Sequence[Pair], items: Sequence[Item], place: int) -> Iterator[int]:
    """What each of *pairs*, from the last to the first, is worth more for what the model wrote after it."""
    seen: Counter[int] = Counter()
    decides, index = False, place
    for pair in reversed(pairs):
        while index > pair.index + 1:
            index -= 1
            facts = items[index].facts
            if items[index].role != "assistant":
                continue
            decides = facts is not None and facts.decides
            if facts is not None:
                names = [name for call in facts.calls for name in call.names]
                seen.update({*mentioned(facts.mentions), *names})
        named = max((seen[name] for name in pair.call.names), default=0)
        quoted = bool(pair.result.opening) and seen[pair.result.opening] > 0
        yield REFERENCE * named + QUOTATION * quoted + DECISION * decides
