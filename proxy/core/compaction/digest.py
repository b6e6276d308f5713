"""The literal digest of folded rounds: names, paths, figures and errors that later steps are likely to refer to.

A name that the user or the model wrote ranks above one that only a tool's output mentions, and a newer one above an
older one. Every entry of a digest occurs literally in the rounds it stands for, so none can be invented.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from string import ascii_letters, digits

from proxy.core.compaction.names import LONGEST, PATH, WINDOW, Names
from proxy.core.conversation import Count, ItemText
from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.tool_calls import FAILURE_SIGNS, FAILURE_WORDS, Arguments, read_all_arguments

NUMBER_SHARE = 0.2
CHAT_NUMBER_SHARE = 0.5
COMMAND_SHARE = 0.1
ERROR_SHARE = 0.15
FILE_SHARE = 0.1
"""Shares of a digest that numbers (with and without calls), commands, error lines and the newest files take at most.

Numbers may also take what the other names leave over.
"""

SMOOTH = 4.0
"""Tokens added to the size of a name, so that the shortest do not always win."""

MOST_MISSES = 20
"""Entries in all that may be too long for the room before no further one is tried."""

_SIGNS = bytes(code for code in range(128) if not chr(code).isalnum() and chr(code) != "\n")
_KINDS = bytes.maketrans(
    (ascii_letters + digits).encode() + _SIGNS, b"a" * len(ascii_letters) + b"0" * len(digits) + b" " * len(_SIGNS)
)
"""Turns every letter into one character, every digit into another one, and all else into blanks."""

BYTES_A_TOKEN = 5
"""Bytes of a long word's part that take a token, to guess what a name takes.

Of 16,000 recorded names the guess is within a tenth of the count, give or take a tenth.
"""

LONG_ENTRY = 12
"""Tokens that few entries of a list take: so many of them are counted together as fit in the room if all do."""

_RUN = lazy_pattern(r"[A-Za-z0-9]+")

LABEL = 6
"""Tokens of the words around an error line or a command."""

_FAILURE = lazy_pattern(rf"\b(?:{FAILURE_WORDS}|traceback)\b|{FAILURE_SIGNS}", re.I)
_NO_FAILURE = lazy_pattern(r"\b(?:0|no) (?:\w+ )?(?:errors?|failed|failures?|exceptions?)\b", re.I)
"""A total of none."""

_LISTED = lazy_pattern(r"\d+(?:→|\t|\||:  )")
"""The beginning of a numbered line of a file: what it says is code."""

_OPENINGS = (":", "：", "{", ";", "(")
"""Ends of lines that are code, or that only announce what the next line says."""

_FAILURE_PARTS = ("error", "fail", "exception", "traceback", "fatal", "cannot", "denied", "not found")
"""One of these is in every ASCII text with a failure. To look for them takes a third of the time of the pattern."""

FILES, NAMES, FIGURES = "Files used last:", "Names and places mentioned:", "Figures mentioned:"
ERROR, COMMAND = "A tool said: ", "Command run: "
BEGINNINGS = (FILES, NAMES, FIGURES, ERROR, COMMAND)
"""The beginnings of a digest's lines."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The lines of a digest by heading, in the order in which they are shown, and about the ``tokens`` they take."""

    files: tuple[str, ...]
    names: tuple[str, ...]
    numbers: tuple[str, ...]
    errors: tuple[str, ...]
    commands: tuple[str, ...]
    tokens: int = 0

    def lines(self) -> list[str]:
        """The digest as text lines; headings without entries are left out."""
        lines = []
        for heading, entries in ((FILES, self.files), (NAMES, self.names), (FIGURES, self.numbers)):
            if entries:
                lines.append(heading + listed(entries))
        lines += [f"{ERROR}{quoted(line)}" for line in self.errors]
        lines += [f"{COMMAND}{line}" for line in self.commands]
        return lines


def digest_of(
    entries: Sequence[ItemText],
    tokens: int,
    count: Count,
    known: str = "",
    arguments: Mapping[str, Arguments] | None = None,
    files: Collection[str] = (),
) -> Digest:
    """The best digest of *entries* in at most about *tokens*. Names that the text *known* holds are left out.

    *arguments* are those of their calls if they were read before. *files* are results that show what stands in files:
    no line of them reports a failure.
    """
    if arguments is None:
        arguments = read_all_arguments(entries)
    calls = [[arguments[text] for _, text in entry.calls] for entry in entries]
    names = Names(entries, calls, tokens)
    errors, error_tokens = fill(
        (line for line in _error_lines(entries, files) if line not in known), tokens * ERROR_SHARE, count
    )
    commands, command_tokens = fill(_commands(calls), tokens * COMMAND_SHARE, count)
    room = tokens - error_tokens - command_tokens - LABEL * (len(errors) + len(commands))
    shown = Shown(known)
    paths, used = fill(_files(calls, known), room * FILE_SHARE, count)
    paths = list(filter(shown.is_new, paths))  # one that is too long for its share may stand among the names
    room -= used
    other_worths = names.worths()
    number_worths = {name: other_worths.pop(name) for name in names.numbers().intersection(other_worths)}
    # Only names that are about to be shown are looked up among those that are.
    ranked_numbers = filter(shown.is_new, ranked(number_worths))
    number_share = NUMBER_SHARE
    if names.is_chat:
        number_share = CHAT_NUMBER_SHARE
    numbers, used = fill(ranked_numbers, room * number_share, count)
    room -= used
    others, used = fill(filter(shown.is_new, ranked(other_worths)), room, count)
    room -= used
    if room > LABEL:
        more, used = fill(ranked_numbers, room, count)
        numbers += more
        room -= used
    lists = sum(map(bool, (paths, numbers, others)))
    return Digest(
        tuple(paths),
        tuple(others),
        tuple(numbers),
        tuple(errors[::-1]),
        tuple(commands[::-1]),
        tokens - room + LABEL * lists,
    )


def listed(entries: Iterable[str]) -> str:
    """*entries* as a list, a space before each: commas would take a fifth of its room. Several words are quoted."""
    return "".join([f" {quoted(entry)}" if " " in entry else f" {entry}" for entry in entries])


def quoted(text: str) -> str:
    """*text* in quotation marks that nothing inside it can end."""
    inside = text.replace("“", "'").replace("”", "'")
    return f"“{inside}”"


def ranked(worths: Mapping[str, float]) -> Iterator[str]:
    """The names of *worths* by their worth for each of the tokens that they are guessed to take, the highest first."""
    by_value: dict[float, list[str]] = defaultdict(list)
    names = list(worths)
    for name, worth, fewest in zip(names, worths.values(), fewest_tokens(names), strict=True):
        length = len(name)
        if not name.isascii():
            length = len(name.encode("utf-8", "replace"))
        size = length / BYTES_A_TOKEN
        if size < fewest:
            size = fewest
        by_value[worth / (size + SMOOTH)].append(name)
    # Names of few texts with few tokens each: few values are different, so names are sorted by value, then by name.
    groups = map(by_value.__getitem__, sorted(by_value, reverse=True))
    return chain.from_iterable(map(sorted, groups))


def fewest_tokens(names: Sequence[str]) -> list[int]:
    """The fewest tokens that each of *names* can take with the space before it.

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
    return [len(tokens) for tokens in kinds.translate(None, b"a ").split(b"\n")[1:]]


def fill(candidates: Iterable[str], tokens: float, count: Count) -> tuple[list[str], int]:
    """The first of *candidates* that fit in a list of at most *tokens*, and what they take. A long one is skipped.

    As many are counted together as fit even if all are long: one by one they would take twice the time.
    """
    chosen: list[str] = []
    left, misses = int(tokens), 0
    most = left
    candidates = iter(candidates)
    while left >= 2 and misses <= MOST_MISSES:
        number = max(1, min(most, left // LONG_ENTRY))
        entries = list(islice(candidates, number))
        if not entries:
            break
        size = count(listed(entries))
        if size <= left:
            chosen += entries
            left -= size
        elif number == 1:
            misses += 1
        else:
            candidates, most = chain(entries, candidates), 1
    return chosen, int(tokens) - left


class Shown:
    """Names that need no entry: those in a known text, and those shown before, also inside a longer one.

    A text is searched for a name only if it has the name's runs of letters and digits, and names that were shown only
    if they have its runs next to each other: most names are in neither.
    """

    def __init__(self, known: str) -> None:
        self._known = known
        self._known_runs = set(_RUN.findall(known))
        self._names: list[str] = []
        self._joined = ""
        self._runs: set[str] = set()
        self._neighbours: set[tuple[str, str]] = set()

    def is_new(self, name: str) -> bool:
        """True if *name* is not shown yet. It counts as shown from now on."""
        if name in self._runs:
            return False
        if name.isalnum() and name.isascii():  # a run itself: no text that lacks it has the name
            if name in self._known_runs:
                return False
            self._runs.add(name)
            self._names.append(name)
            return True
        runs = _RUN.findall(name)
        if self._known_runs.issuperset(runs) and name in self._known:
            return False
        if self._runs.issuperset(runs) and self._neighbours.issuperset(pairwise(runs)):
            # Joined only here: few names have to be looked up in all that were shown.
            self._joined = "\n".join([self._joined, *self._names])
            self._names.clear()
            if name in self._joined:
                return False
        self._runs.update(runs)
        self._neighbours.update(pairwise(runs))
        self._names.append(name)
        return True


def _files(calls: Sequence[Sequence[Arguments]], known: str) -> Iterator[str]:
    """Distinct paths that are a whole argument of one of *calls*, newest first; none that the text *known* holds."""
    seen: set[str] = set()
    for of_entry in reversed(calls):
        for call in reversed(of_entry):
            for value in call.plain.split("\n"):
                if 2 < len(value) <= LONGEST and value not in seen and PATH.fullmatch(value) and value not in known:
                    seen.add(value)
                    yield value


def _error_lines(entries: Sequence[ItemText], files: Collection[str]) -> Iterator[str]:
    """Distinct error lines of tool results, newest first; of each result the first one, and none of *files*."""
    seen: set[str] = set()
    for entry in reversed(entries):
        if entry.role != "tool":
            continue
        results = [result for result, _ in reversed(entry.results)] or [entry.text]
        for result in results:
            if result in files:
                continue
            if line := _error_line(result[:WINDOW], seen):
                seen.add(line)
                yield line


def _error_line(text: str, seen: Collection[str]) -> str:
    """The first line of *text* that reports a failure and is not among *seen*; "" if there is none."""
    if not _may_fail(text):
        return ""
    for line in map(str.strip, text.splitlines()):
        if len(line) <= LONGEST and line not in seen and _reports_failure(line):
            return line
    return ""


def _reports_failure(line: str) -> bool:
    """True if *line* reports a failure: a total of none is no failure, and code that handles failures is none."""
    if not _FAILURE.search(line) or line.endswith(_OPENINGS) or _LISTED.match(line):
        return False
    return _FAILURE.search(_NO_FAILURE.sub("", line)) is not None


def _may_fail(text: str) -> bool:
    """False if no line of *text* reports a failure."""
    if not text.isascii():
        return True
    return any(map(text.lower().__contains__, _FAILURE_PARTS))


def _commands(calls: Sequence[Sequence[Arguments]]) -> Iterator[str]:
    """Distinct shell commands of *calls*, newest first."""
    seen: set[str] = set()
    for call in chain.from_iterable(reversed(calls)):
        command = call.command
        if command.isidentifier() and command != call.plain:
            continue  # what an editor is to do: "view", beside a path
        if command and len(command) <= LONGEST and command not in seen:
            seen.add(command)
            yield command
