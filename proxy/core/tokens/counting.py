"""Counts texts, and the parts of them that an agent or a framework injected, which headings, tags and lines show.

The marks of these parts are data (``config/injected.yaml``). Only reports, and soft shares that are configured, depend
on them.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import msgspec

from proxy.core.conversation import Count, Injected
from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.tokens.media import DEFAULT_PRICES, Prices

INJECTED = ("memory", "skills", "knowledge", "related")
"""Regions of texts that an agent or a framework injected into system text or into a user item, by their source."""

MOST_PARTS = 64
"""Injected parts of one text that are looked for: each is counted."""

_UNCLOSED = 64
"""Tags without a closing tag after which no further tag is read: each one costs a search to the end of the text."""

_HEADING = re.compile(r"(#{1,6})[ \t]+\S")

_NEVER = re.compile(r"(?!)")
"""Matches nothing."""


class InjectedMarks(msgspec.Struct, frozen=True):
    """The marks with which injected texts of one region begin.

    A heading in ``headings`` (which one other word may precede) begins a part that ends at the next heading of its
    level or above. A tag in ``tags`` begins a part that ends with its closing tag. ``lines`` maps beginnings of lines
    to the text that ends the part; empty for the end of the whole text.
    """

    headings: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    lines: Mapping[str, str] = msgspec.field(default_factory=dict)


Opening = tuple[int, re.Match[str] | None, str]
"""A mark in a text: where it begins, its match, and the mark itself if it is the beginning of a line."""


class InjectedRules:
    """The compiled marks of all regions. A mark of two regions belongs to the later one."""

    def __init__(self, marks: Mapping[str, InjectedMarks]) -> None:
        self._headings: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self.lines: dict[str, tuple[str, str]] = {}
        for region, openings in marks.items():
            self._headings |= {_folded(name): region for name in openings.headings}
            self._tags |= {name.lower(): region for name in openings.tags}
            self.lines |= {line: (region, end) for line, end in openings.lines.items()}
        # Each pattern begins with a literal, which the matcher finds fast: 0.4 and 1.5 ms for each MB of text.
        self.tag, self.heading = _tag_pattern(self._tags), _heading_pattern(self._headings)

    def may_match(self, text: str) -> bool:
        """Return False if *text* has no injected part."""
        # Runs for every short message: a search for one character is ten times as fast as one by a pattern.
        if "<" in text and self.tag.search(text):
            return True
        if "#" in text and self.heading.search(f"\n{text}"):
            return True
        return any(map(text.__contains__, self.lines))

    def parts(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Yield region, beginning and end of each injected part of *text*; none overlaps another. Linear in time."""
        at = number = 0
        unclosed: set[str] = set()
        text = f"\n{text}"
        for opening in heapq.merge(*self._openings(text), key=itemgetter(0)):
            start = opening[0]
            if start < at:
                continue
            region, end = self._part(text, opening, unclosed)
            if end:
                yield region, start - 1, end - 1
                at, number = end, number + 1
            if number == MOST_PARTS:
                return

    def _openings(self, text: str) -> Iterator[Iterator[Opening]]:
        """Yield for each kind of mark its openings in *text*, in order."""
        yield ((match.start(), match, "") for match in self.tag.finditer(text))
        yield ((match.start() + 1, match, "") for match in self.heading.finditer(text))
        for line in self.lines:
            yield _line_openings(text, line)

    def _part(self, text: str, opening: Opening, unclosed: set[str]) -> tuple[str, int]:
        """Return the region of the part that *opening* begins, and its end; 0 if it begins none."""
        start, match, line = opening
        if match is None:
            region, ending = self.lines[line]
            return region, _end_of_line_part(text, start, ending)
        if "tag" in match.groupdict():
            return self._tags[match["tag"].lower()], _end_of_tag(text, match.end(), match["tag"], unclosed)
        name = _folded(match["name"])
        region = self._headings.get(name) or self._headings.get(name.partition(" ")[2], "")
        if not region:  # the pattern ignores case more widely (``İ`` for ``i``) than the table of headings does
            return "", 0
        return region, _end_of_section(text, match.end(), len(match["level"]))


def _folded(name: str) -> str:
    """Return *name* without case, with one space between two words."""
    return " ".join(name.casefold().split())


def _tag_pattern(tags: Mapping[str, str]) -> re.Pattern[str]:
    """Return the pattern of an opening tag of *tags*, which may have attributes."""
    if not tags:
        return _NEVER
    initials = re.escape("".join(sorted({letter for tag in tags for letter in (tag[0], tag[0].upper())})))
    attributes = r"[ \t][^<>\n]{0,200}"
    return re.compile(f"<(?=[{initials}])(?P<tag>{_any_of(tags)})(?:{attributes})?>", re.IGNORECASE | re.ASCII)


def _heading_pattern(headings: Mapping[str, str]) -> re.Pattern[str]:
    """Return the pattern of a heading of *headings* behind the end of a line."""
    if not headings:
        return _NEVER
    names = _any_of(headings).replace("\\ ", r"[ \t]+")
    name = rf"(?P<name>(?:\w+[ \t]+)?(?:{names}))"
    return re.compile(rf"\n(?P<level>#{{1,6}})[ \t]*{name}[ \t]*:?[ \t]*(?=\r?\n|\Z)", re.IGNORECASE)


def _any_of(names: Mapping[str, str]) -> str:
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))


def _line_openings(text: str, line: str) -> Iterator[Opening]:
    """Yield an opening for each line of *text* that begins with *line*."""
    start = text.find(f"\n{line}")
    while start >= 0:
        yield start + 1, None, line
        start = text.find(f"\n{line}", start + 1)


def _end_of_line_part(text: str, start: int, ending: str) -> int:
    """Return the end of the part that a line at *start* begins: behind *ending*, or the end of the text."""
    if not ending:
        return len(text)
    end = text.find(ending, start)
    if end < 0:
        return len(text)
    return end + len(ending)


def _end_of_tag(text: str, start: int, tag: str, unclosed: set[str]) -> int:
    """Return the end of the part that *tag* opens; 0 for a tag without an end, which is added to *unclosed*."""
    if tag in unclosed or len(unclosed) >= _UNCLOSED:
        return 0
    closing = f"</{tag}>"
    end = text.find(closing, start)
    if end < 0:
        unclosed.add(tag)
        return 0
    return end + len(closing)


def _end_of_section(text: str, start: int, level: int) -> int:
    """Return the beginning of the next heading of *level* or above; the text's end if there is none."""
    at = start
    while (at := text.find("\n#", at) + 1) > 0:
        heading = _HEADING.match(text, at)
        if heading is not None and len(heading[1]) <= level:
            return at
    return len(text)


def injected_parts(text: str, rules: InjectedRules, count: Count) -> tuple[Injected, ...]:
    """Return the injected parts of *text* by *rules*, counted by *count*."""
    pieces = ((region, text[start:end].strip()) for region, start, end in rules.parts(text))
    return tuple(Injected(region, count(piece), hash(piece)) for region, piece in pieces)


NO_RULES = InjectedRules({})
"""Rules that find nothing."""


# Counting a text.

SHORT, MOST_SHORT = 32, 40_000
"""Characters of the longest text (such as a tool's name) whose count a meter remembers, and how many it remembers."""


_PARAGRAPH = lazy_pattern(r"\n\n(?=[^\s/])")
"""The end of a paragraph, after which a token begins: no vocabulary joins a line's end with what follows it, but for
white space and slashes. See the patterns in https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
"""


def long_paragraphs(text: str, least: int) -> list[str]:
    """Return *text* in pieces whose tokens add up: a paragraph of *least* characters alone, those between together."""
    pieces: list[str] = []
    start = at = 0
    borders = [border.end() for border in _PARAGRAPH.finditer(text)]
    for end in (*borders, len(text)):
        if end - at >= least:
            pieces += [text[start:at], text[at:end]]
            start = end
        at = end
    return [piece for piece in (*pieces, text[start:]) if piece]


class Meter(msgspec.Struct, frozen=True, eq=False):
    """A function that counts text, together with the prices of media and the marks of injected texts.

    ``text`` counts any text; ``again`` counts one of ``again_from`` characters or more, which later requests repeat: by
    itself, or as a paragraph of another one. ``short`` are the tokens of short texts that were counted.
    """

    text: Count
    prices: Prices
    injected: InjectedRules = NO_RULES
    again: Count | None = None
    again_from: int = 0
    short: dict[str, int] = {}

    def __repr__(self) -> str:
        """Leave out the texts."""
        return f"Meter({self.prices.name})"

    def __call__(self, text: str) -> int:
        """Return the tokens of *text*."""
        if len(text) > SHORT:
            if self.again is None or len(text) < self.again_from:
                return self.text(text)
            total = 0
            for piece in long_paragraphs(text, self.again_from):
                count = self.text
                if len(piece) >= self.again_from:
                    count = self.again
                total += count(piece)
            return total
        size = self.short.get(text)
        if size is None:
            size = self.text(text)
            if len(self.short) < MOST_SHORT:
                self.short[text] = size
        return size


def token_counts(texts: Sequence[str], count: Count) -> list[int]:
    """Return the tokens of each of *texts*; a meter is not called for those that it remembers."""
    if not isinstance(count, Meter):
        return list(map(count, texts))
    sizes: list[int] = []
    remembered, by_text, again_from = count.short, count.text, count.again_from
    for text in texts:
        size = None
        if len(text) <= SHORT:  # a longer one is not there, and its hash would take time
            size = remembered.get(text)
        elif len(text) < again_from:
            size = by_text(text)
        if size is None:
            size = count(text)
        sizes.append(size)
    return sizes


def unremembered(count: Count) -> Count:
    """Return *count* without the memory of a meter: for lines and names that are counted once."""
    if isinstance(count, Meter):
        return count.text
    return count


def prices_of(count: Count) -> Prices:
    """Return the prices of media that belong to *count*: the default ones unless it is a ``Meter``."""
    if isinstance(count, Meter):
        return count.prices
    return DEFAULT_PRICES


def injected_in(texts: Sequence[str], count: Count) -> list[tuple[Injected, ...]]:
    """Return the injected parts of each of *texts* by the rules of *count*: none unless it is a ``Meter``."""
    parts: list[tuple[Injected, ...]] = [()] * len(texts)
    if isinstance(count, Meter):
        for at, text in enumerate(texts):
            if text and count.injected.may_match(text):
                parts[at] = injected_parts(text, count.injected, count)
    return parts
