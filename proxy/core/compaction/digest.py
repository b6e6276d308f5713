"""The literal digest of folded rounds: names, paths, figures and errors that later steps are likely to refer to.

A name that the user or the model wrote ranks above one that only a tool's output mentions, and a newer one above an
older one. Every entry of a digest occurs literally in the rounds it stands for, so none can be invented.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from math import log2
from string import ascii_letters, digits

from proxy.core.compaction.names import LONGEST, PATH, STANDARD, WINDOW, NameFinder, without_line_numbers
from proxy.core.conversation import Count, ItemText
from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.tool_table import command_of, plain_arguments

NUMBER_SHARE = 0.2
CHAT_NUMBER_SHARE = 0.5
COMMAND_SHARE = 0.1
ERROR_SHARE = 0.15
FILE_SHARE = 0.1
"""Shares of a digest that numbers (with and without calls), commands, error lines and the newest files take at most.

Numbers may also take what the other names leave over.
"""

WRITTEN = {"user": 3.0, "assistant": 3.0, "tool": 0.5, "system": 0.0}
CALLED = 1.5
"""The worth of a mention: in a text by role, and in the arguments of a call."""

OLDEST = 0.6
"""The worth of a mention at the very beginning, as a share of the worth of one at the end."""

SMOOTH = 3.0
"""Tokens added to the size of a name, so that the shortest do not always win."""

MOST_MISSES = 20
"""Entries in all that may be too long for the room before no further one is tried."""

_SIGNS = bytes(code for code in range(128) if not chr(code).isalnum() and chr(code) != "\n")
_KINDS = bytes.maketrans(
    (ascii_letters + digits).encode() + _SIGNS, b"a" * len(ascii_letters) + b"0" * len(digits) + b" " * len(_SIGNS)
)
"""Turns every letter into one character, every digit into another one, and all else into blanks."""

_ANY_DIGIT = str.maketrans(dict.fromkeys(digits, "0"))
"""Spells all digits as one of them: in every vocabulary one, two or three digits are one token, whichever they are."""

_PART = 8
"""Characters of the parts of a text by which it is known that a name is not in it."""

_INDEXED = 16_384
"""Characters of a known text whose parts are looked up; a longer text is searched."""

LABEL = 6
"""Tokens of the words around an error line or a command."""

_COUNTED = 65_536
"""Values that are counted in one call, during which nothing else runs."""

_TIME = lazy_pattern(r"\d{1,2}(?::\d{2}){1,2}")
TIME = 0.3
"""The worth of a time of day, as a share of that of other figures: opening hours are many, and rarely asked for."""

STANDARD_WORTH = 0.3
"""The worth of a name in a standard library, as a share of that of other names."""

_FAILURE = lazy_pattern(
    r"\b(?:error|failed|failure|exception|traceback|fatal|cannot|denied|not found)\b|错误|失败|エラー", re.I
)
_NO_FAILURE = lazy_pattern(r"\b(?:0|no) (?:\w+ )?(?:errors?|failed|failures?|exceptions?)\b", re.I)
"""A total of none."""

_LISTED = lazy_pattern(r"\d+(?:→|\t)")
"""The beginning of a numbered line of a file: what it says is code."""

_FAILURE_PARTS = ("error", "fail", "exception", "traceback", "fatal", "cannot", "denied", "not found")
"""One of these is in every ASCII text with a failure. To look for them takes a third of the time of the pattern."""


FILES, NAMES, FIGURES = "Files used last: ", "Names and places mentioned: ", "Figures mentioned: "
ERROR, COMMAND = "A tool said: ", "Command run: "
BEGINNINGS = (FILES, NAMES, FIGURES, ERROR, COMMAND)
"""The beginnings of a digest's lines."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The lines of a digest by heading, in the order in which they are shown."""

    files: tuple[str, ...]
    names: tuple[str, ...]
    numbers: tuple[str, ...]
    errors: tuple[str, ...]
    commands: tuple[str, ...]

    def lines(self) -> list[str]:
        """The digest as text lines; headings without entries are left out."""
        lines = []
        if self.files:
            lines.append(FILES + ", ".join(self.files))
        if self.names:
            lines.append(NAMES + ", ".join(self.names))
        if self.numbers:
            lines.append(FIGURES + ", ".join(self.numbers))
        lines += [f"{ERROR}{quoted(line)}" for line in self.errors]
        lines += [f"{COMMAND}{line}" for line in self.commands]
        return lines


def digest_of(entries: Sequence[ItemText], tokens: int, count: Count, known: str = "") -> Digest:
    """The best digest of *entries* in at most about *tokens*. Names that the text *known* holds are left out."""
    arguments = [[plain_arguments(each) for _, each in entry.calls] for entry in entries]
    names = _Names(entries, arguments)
    sized = Sizes(count)
    errors = sized.fill((line for line in _error_lines(entries) if line not in known), int(tokens * ERROR_SHARE))
    commands = sized.fill(_commands(entries), int(tokens * COMMAND_SHARE))
    room = tokens - sum(sized(line) + LABEL for line in (*errors, *commands))
    shown = Shown(known)
    files = sized.fill(filter(shown.is_new, _files(arguments)), int(room * FILE_SHARE))
    room -= sum(map(sized, files))
    other_worths = best_by_length(names.worths(), max(0, tokens))
    for name in other_worths:
        if "." in name and "/" not in name and STANDARD.fullmatch(name):
            other_worths[name] *= STANDARD_WORTH
    number_worths = {name: other_worths.pop(name) for name in names.numbers().intersection(other_worths)}
    # Searching a long known text is not cheap: it is searched only for names that are about to be shown.
    ranked_numbers = filter(shown.is_new, ranked(number_worths, sized))
    number_share = NUMBER_SHARE
    if names.is_chat:
        number_share = CHAT_NUMBER_SHARE
    numbers = sized.fill(ranked_numbers, int(room * number_share))
    room -= sum(map(sized, numbers))
    others = sized.fill(filter(shown.is_new, ranked(other_worths, sized)), room)
    room -= sum(map(sized, others))
    if room > LABEL:
        numbers += sized.fill(ranked_numbers, room)
    return Digest(tuple(files), tuple(others), tuple(numbers), tuple(errors[::-1]), tuple(commands[::-1]))


class _Names:
    """The names in *entries* and in the *arguments* of their calls, and the mentions of each.

    ``mentions`` are the numbers of texts that mention each name, by the worth of the mention. ``recency`` is the factor
    by which the newest mention of each name raises its worth. Names of people and places count only if there is no
    call.
    """

    def __init__(self, entries: Sequence[ItemText], arguments: Sequence[Sequence[str]]) -> None:
        self.mentions: dict[float, dict[str, int]] = defaultdict(dict)
        self.recency: dict[str, float] = {}
        self.is_chat = not any(arguments)
        self._finder = NameFinder()
        for index, entry in enumerate(entries):
            recency = OLDEST + (1 - OLDEST) * ((index + 1) / len(entries))
            text = entry.text
            if entry.role == "tool":
                text = without_line_numbers(text)
            self._add(text, WRITTEN[entry.role], recency)
            for called in (*(name for name, _ in entry.calls), *arguments[index]):
                self._add(called, CALLED, recency)

    def numbers(self) -> set[str]:
        """The names that are numbers, and no titles."""
        return self._finder.numbers - self._finder.titles

    def worths(self) -> dict[str, float]:
        """The worth of each name: the sum over its kinds of mention, in each of which a further one counts less."""
        mentioned: dict[str, float] = {}
        for worth, times in self.mentions.items():
            worth_of = {number: worth * log2(1 + number) for number in set(times.values())}
            for name, number in times.items():
                mentioned[name] = mentioned.get(name, 0.0) + worth_of[number]
        recency = self.recency
        worths = {name: worth * recency[name] for name, worth in mentioned.items()}
        for name in filter(_TIME.fullmatch, self.numbers()):
            worths[name] *= TIME
        return worths

    def _add(self, text: str, worth: float, recency: float) -> None:
        """Add a mention of each name in *text*."""
        # Plain loops: while a dictionary takes in another one with a million names, no other thread runs.
        times, newest = self.mentions[worth], self.recency
        written = worth > WRITTEN["tool"]
        for name in self._finder.names_in(text, phrases=written, people=written and self.is_chat):
            times[name] = times.get(name, 0) + 1
            newest[name] = recency


def quoted(text: str) -> str:
    """*text* in quotation marks that nothing inside it can end."""
    inside = text.replace("“", "'").replace("”", "'")
    return f"“{inside}”"


def best_by_length(worths: dict[str, float], most: int) -> dict[str, float]:
    """The *most* names of *worths* with the highest worth per token, their tokens guessed by their length."""
    if len(worths) <= most:
        return worths
    per_token = [worth / (len(name) / 4 + SMOOTH) for name, worth in worths.items()]
    least = _nth_highest(per_token, most + 1)
    best = {name: worths[name] for name, worth in zip(worths, per_token, strict=True) if worth > least}
    ties = [name for name, worth in zip(worths, per_token, strict=True) if worth == least]
    best.update((name, worths[name]) for name in nsmallest(most - len(best), ties))
    return best


def _nth_highest(values: Sequence[float], number: int) -> float:
    """The value at this *number* from the highest. Few of thousands of values are different."""
    times: Counter[float] = Counter()
    for start in range(0, len(values), _COUNTED):  # in one call a million values would take 40 ms
        times.update(values[start : start + _COUNTED])
    for value in sorted(times, reverse=True):
        number -= times[value]
        if number <= 0:
            return value
    raise ValueError("there are not so many values")


def ranked(worths: Mapping[str, float], sizes: Sizes) -> Iterator[str]:
    """The names of *worths* by their worth per token, the highest first.

    Tokens are counted only of names that can be next: of those whose fewest tokens make them worth more per token than
    the best one that was counted.
    """
    uncounted: dict[float, list[str]] = defaultdict(list)
    for name, worth, fewest in zip(worths, worths.values(), fewest_tokens(list(worths)), strict=True):
        uncounted[worth / (fewest + SMOOTH)].append(name)
    # Names of few texts with few tokens each: few values are different, so names are sorted by value, then by name.
    counted: dict[float, list[str]] = {}
    lowest: list[float] = []
    for most in sorted(uncounted, reverse=True):
        while lowest and -lowest[0] > most:
            yield from sorted(counted.pop(-heappop(lowest)))
        for name in uncounted[most]:
            value = worths[name] / (sizes(name) + SMOOTH)
            if value in counted:
                counted[value].append(name)
            else:
                counted[value] = [name]
                heappush(lowest, -value)
    for value in sorted(counted, reverse=True):
        yield from sorted(counted[value])


def fewest_tokens(names: Sequence[str]) -> list[int]:
    """The fewest tokens that each of *names* can take with the space before and the comma behind it.

    Vocabularies join no letters with digits, no four digits, and letters with no more than one sign before them. So a
    run of letters takes at least one token, each three digits take one, and so do signs that stand before a digit or
    are several; the space before is a sign, too. An apostrophe may be joined with both sides, and does not count. See
    the patterns in https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
    """
    if not names:
        return []
    # All names as one text, a line each: to turn letters into others then costs nearly nothing.
    lines = "\n " + "\n ".join(names)
    if not lines.isascii() or lines.count("\n") > len(names):
        lines = "\n " + "\n ".join([name * (name.isascii() and "\n" not in name) for name in names])
    kinds = lines.encode().translate(_KINDS, b"'")
    # One mark a token: first for digits and for letters right behind them, then for signs, then for other letters.
    for most_digits in (b"000", b"00", b"0"):
        kinds = kinds.replace(most_digits, b"#")
    kinds = kinds.replace(b"#a", b"##").replace(b" #", b"##").replace(b"  a", b"##")
    kinds = kinds.replace(b" a", b"#")
    return [1 + len(tokens) for tokens in kinds.translate(None, b"a ").split(b"\n")[1:]]


class Sizes:
    """Counts the tokens of lines as parts of a list, once those of lines that differ in digits only."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self._sizes: dict[str, int] = {}

    def __call__(self, line: str) -> int:
        """The tokens of *line* in a list: with a space before it, which vocabularies join with a word, and a comma."""
        spelled = line.translate(_ANY_DIGIT)
        size = self._sizes.get(spelled)
        if size is None:
            size = self._sizes[spelled] = self._count(f" {spelled},")
        return size

    def fill(self, candidates: Iterable[str], tokens: int) -> list[str]:
        """The first of *candidates* that together take at most *tokens*. One that is too long is skipped."""
        chosen: list[str] = []
        misses = 0
        for candidate in candidates:
            size = self(candidate)
            if size <= tokens:
                chosen.append(candidate)
                tokens -= size
            else:
                misses += 1
            if tokens < 2 or misses > MOST_MISSES:
                break
        return chosen


class Shown:
    """Names that need no entry: those in a known text, and those shown before, also inside a longer one.

    A text is searched for a name only if it has the name's last characters: most names are in neither. The parts of
    names that were shown are collected by their length, when a name of that length comes: a short one is such a part.
    """

    def __init__(self, known: str) -> None:
        self._known = known
        self._known_parts: set[str] | None = None
        if len(known) <= _INDEXED:
            self._known_parts = set(_parts(known, _PART))
        self._names: list[str] = []
        self._collected: dict[int, tuple[int, set[str]]] = {}

    def is_new(self, name: str) -> bool:
        """True if *name* is not shown yet. It counts as shown from now on."""
        is_short = len(name) < _PART
        may_be_known = is_short or self._known_parts is None or name[-_PART:] in self._known_parts
        if (may_be_known and name in self._known) or self._is_shown(name):
            return False
        self._names.append(name)
        return True

    def _is_shown(self, name: str) -> bool:
        """True if a name that was shown holds *name*."""
        length = min(len(name), _PART)
        parts = self._shown_parts(length)
        if name[-length:] not in parts:
            return False
        if length == len(name):
            return True
        return parts.issuperset(_parts(name, length)) and name in "\n".join(self._names)

    def _shown_parts(self, length: int) -> set[str]:
        """The parts, so many characters long, of all names that were shown."""
        names, parts = self._collected.get(length, (0, set[str]()))
        for name in self._names[names:]:
            parts.update(_parts(name, length))
        self._collected[length] = len(self._names), parts
        return parts


def _parts(text: str, length: int) -> list[str]:
    """All parts of *text* that are so many characters long."""
    return [text[at : at + length] for at in range(len(text) - length + 1)]


def _files(arguments: Sequence[Sequence[str]]) -> Iterator[str]:
    """Distinct paths that are a whole argument of a call, newest first."""
    seen: set[str] = set()
    for of_entry in reversed(arguments):
        for text in reversed(of_entry):
            for value in text.split("\n"):
                if 2 < len(value) <= LONGEST and value not in seen and PATH.fullmatch(value):
                    seen.add(value)
                    yield value


def _error_lines(entries: Sequence[ItemText]) -> Iterator[str]:
    """Distinct error lines of tool results, newest first."""
    seen: set[str] = set()
    for entry in reversed(entries):
        if entry.role != "tool":
            continue
        text = entry.text[:WINDOW]
        if not _may_fail(text):
            continue
        for line in map(str.strip, text.splitlines()):
            if len(line) <= LONGEST and line not in seen and _reports_failure(line):
                seen.add(line)
                yield line
                break


def _reports_failure(line: str) -> bool:
    """True if *line* reports a failure: a total of none is no failure, and what a listed file says is code."""
    if not _FAILURE.search(line) or _LISTED.match(line):
        return False
    return _FAILURE.search(_NO_FAILURE.sub("", line)) is not None


def _may_fail(text: str) -> bool:
    """False if no line of *text* reports a failure."""
    if not text.isascii():
        return True
    folded = text.lower()
    return any(part in folded for part in _FAILURE_PARTS)


def _commands(entries: Sequence[ItemText]) -> Iterator[str]:
    """Distinct shell commands, newest first."""
    seen: set[str] = set()
    for entry in reversed(entries):
        for _, arguments in entry.calls:
            command = command_of(arguments)
            if command and len(command) <= LONGEST and command not in seen:
                seen.add(command)
                yield command
