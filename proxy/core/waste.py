"""Repeated paragraphs and skills, and large new results, which fill a window without need.

A paragraph ends at an empty line. A tool result is fresh in the first request that it stands in: from then on the model
has read it, and what it holds could still have been requested in a narrower way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from proxy.core.conversation import Injected, Item

LARGE: Final = 0.30
"""Share of the room left from which fresh results are worth a warning, each alone or all together."""

SHORTEST: Final = 200
"""Characters of a paragraph that counts, some 50 tokens: shorter ones are phrases, headings and lines of code."""

EXCERPT: Final = 60
"""Characters by which a paragraph is named."""


class RepeatedParagraph(NamedTuple):
    """A paragraph that stands ``times`` times in a request; ``wasted`` are the tokens of all but the first of them."""

    excerpt: str
    times: int
    wasted: int


class FreshResults(NamedTuple):
    """The fresh results of a request: the tokens of each, by item, and the room that was left for them."""

    tokens: tuple[tuple[int, int], ...]
    room: int

    @property
    def together(self) -> int:
        """Tokens of all of them."""
        return sum(tokens for _, tokens in self.tokens)

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
    """Return the paragraphs that stand in *texts* more than once, those that waste most first; *count* counts tokens.

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
    """Return the tokens of skills in *items* that stood before them, or in the *system* text.

    A message that is repeated as a whole is no matter of skills.
    """
    tokens = 0
    seen = {part.digest for part in system if part.region == "skills"}
    messages = {item.digest: item.injected for item in items if item.injected}
    for part in chain.from_iterable(messages.values()):
        if part.region != "skills":
            continue
        if part.digest in seen:
            tokens += part.tokens
        seen.add(part.digest)
    return tokens


def excerpt(text: str) -> str:
    """Return the beginning of *text* on one line."""
    line = " ".join(text[: 4 * EXCERPT].split())
    if len(line) <= EXCERPT:
        return line
    return f"{line[: EXCERPT - 1]}…"


def fresh_results(items: Sequence[Item], total: int, room: int) -> FreshResults:
    """Return the results at the end of *items*, which stood in no request before.

    *total* are the tokens of the request, *room* those that its input may use.
    """
    tokens: list[tuple[int, int]] = []
    for index in range(len(items) - 1, -1, -1):
        if not items[index].answers:
            break
        tokens.append((index, items[index].tokens))
    newest = sum(size for _, size in tokens)
    return FreshResults(tuple(reversed(tokens)), room - total + newest)
