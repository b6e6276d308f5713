"""Tokens that a client could save: repetitions, long listings and large new tool results; and the files that were read.

A paragraph ends at an empty line. A tool result is fresh in the first request that contains it: the model has not read
it yet, so the client can still replace it by a narrower call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from proxy.core.compaction.record import Compaction
from proxy.core.conversation import NO_FACTS, Injected, Item
from proxy.core.tool_calls import Pair

LARGE: Final = 0.30
"""Share of the room left from which fresh results get a warning, each alone or all together."""

SHORTEST: Final = 200
"""Characters of the shortest paragraph that is compared (some 50 tokens). Headings and lines of code repeat anyway."""

EXCERPT: Final = 60
"""Characters of a paragraph that are shown to name it."""

_LISTINGS: Final = frozenset({"list", "glob", "grep"})
"""Kinds of calls whose results list names or lines."""

_LONG_LISTING: Final = 500
"""Tokens from which a listing is worth a narrower call."""

_SHORT_MESSAGE: Final = 50
"""Tokens below which a repeated message is normal, such as "continue"."""

_SHORT_RESULT: Final = 200
"""Bytes below which a repeated result is normal, such as "ok"."""


class RepeatedParagraph(NamedTuple):
    """A paragraph that occurs ``times`` times in a request; ``wasted`` are the tokens of all but the first one."""

    excerpt: str
    times: int
    wasted: int


class FreshResults(NamedTuple):
    """The fresh results of a request: the tokens of each, by item, and the room that was left for them."""

    tokens: tuple[tuple[int, int], ...]
    room: int

    def share(self, tokens: int) -> float:
        """Return *tokens* as a share of the room; 0 if the request was too long without them already."""
        if self.room <= 0:
            return 0.0
        return tokens / self.room


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of *text* that are long enough to count, without the space around them."""
    for part in text.replace("\r\n", "\n").split("\n\n"):
        paragraph = part.strip()
        if len(paragraph) >= SHORTEST:
            yield paragraph


def repeated_paragraphs(texts: Iterable[str], count: Callable[[str], int]) -> list[RepeatedParagraph]:
    """Return the paragraphs that occur in *texts* more than once, those that waste most first; *count* counts tokens.

    Linear in the length of the texts; only what is repeated is counted.
    """
    times: dict[str, int] = {}
    for text in texts:
        for paragraph in paragraphs(text):
            times[paragraph] = times.get(paragraph, 0) + 1
    occurrences = [(text, number) for text, number in times.items() if number > 1]
    repeated = [RepeatedParagraph(excerpt(text), number, (number - 1) * count(text)) for text, number in occurrences]
    return sorted(repeated, key=lambda paragraph: -paragraph.wasted)


def repeated_skills(items: Sequence[Item], system: Sequence[Injected]) -> int:
    """Return the tokens of skills in *items* that occurred in an earlier item or in the *system* text.

    A message that is repeated as a whole counts once: it is a repeated message, not a repeated skill.
    """
    tokens = 0
    digests = {part.digest for part in system if part.region == "skills"}
    messages = {item.digest: item.injected for item in items if item.injected}
    for part in chain.from_iterable(messages.values()):
        if part.region != "skills":
            continue
        if part.digest in digests:
            tokens += part.tokens
        digests.add(part.digest)
    return tokens


def excerpt(text: str) -> str:
    """Return the beginning of *text* on one line."""
    line = " ".join(text[: 4 * EXCERPT].split())
    if len(line) <= EXCERPT:
        return line
    return f"{line[: EXCERPT - 1]}…"


def fresh_results(items: Sequence[Item], total: int, room: int) -> FreshResults:
    """Return the results at the end of *items*, which no earlier request contained.

    *total* are the tokens of the request, *room* those that its input may use.
    """
    tokens: list[tuple[int, int]] = []
    for index in range(len(items) - 1, -1, -1):
        if not items[index].answers:
            break
        tokens.append((index, items[index].tokens))
    newest = sum(size for _, size in tokens)
    return FreshResults(tuple(reversed(tokens)), room - total + newest)


def files_read(pairs: Iterable[Pair], compaction: Compaction) -> int:
    """Return how many different files a view shows as read by the calls of *pairs*, after *compaction*.

    Folded rounds and old results that left the view show none.
    """
    removed = {placeholder.index for placeholder in compaction.placeholders}
    shown = [pair for pair in pairs if pair.call_index >= compaction.cut and pair.index not in removed]
    paths = [pair.call.paths for pair in shown if pair.call.kind == "file_read" and pair.result.ok]
    return len({path for read in paths for path in read})


def needless_items(items: Sequence[Item], pairs: Sequence[Pair], system: Sequence[Injected]) -> dict[str, int]:
    """Return tokens that a client could do without: repeated messages, results and skills, and long listings.

    *pairs* are all results of *items* with their calls, *system* the injected parts of the system text before them.
    """
    tokens = {"repeated_message": _repeated_messages(items), "repeated_result": 0, "listing": 0}
    if system or any(item.injected for item in items):
        tokens["skill"] = repeated_skills(items, system)
    digests: set[int] = set()
    for pair, size in zip(pairs, _result_tokens(items, pairs), strict=True):
        result = pair.result
        if result.digest in digests and result.size > _SHORT_RESULT:
            tokens["repeated_result"] += size
        elif pair.call.kind in _LISTINGS and size >= _LONG_LISTING:
            tokens["listing"] += size
        digests.add(result.digest)
    return {kind: count for kind, count in tokens.items() if count}


def _result_tokens(items: Sequence[Item], pairs: Sequence[Pair]) -> list[int]:
    """Return the tokens of each result of *pairs*; several results of one item share its tokens by their bytes."""
    tokens: list[int] = []
    index, whole = -1, 1
    for pair in pairs:  # in the order of their items
        item = items[pair.index]
        if pair.index != index:
            index = pair.index
            whole = max(1, sum([result.size for result in (item.facts or NO_FACTS).results]))
        tokens.append(item.tokens * pair.result.size // whole)
    return tokens


def _repeated_messages(items: Sequence[Item]) -> int:
    messages = [item for item in items if item.role in ("system", "user") and item.tokens >= _SHORT_MESSAGE]
    first = {item.digest: item.tokens for item in messages}
    return sum(item.tokens for item in messages) - sum(first.values())
