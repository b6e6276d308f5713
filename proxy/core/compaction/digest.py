"""The literal digest of folded rounds: names, paths, figures and errors that later steps are likely to refer to.

A name that the user or the model wrote ranks above one that only a tool's output mentions, and a newer one above an
older one. Every entry of a digest occurs literally in the rounds it stands for, so none can be invented.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from math import log2

from proxy.core.compaction.arguments import command_of, plain_arguments
from proxy.core.compaction.spoken_names import STANDARD, dates, is_meaningless, proper_names, without_line_numbers
from proxy.core.conversation import ItemText

Count = Callable[[str], int]

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

ROUGH, SMOOTH = 3.0, 2.0
"""Tokens added to the size of a name, so that the shortest do not always win: to a guessed size, to a counted one."""

LABEL = 6
"""Tokens of the words around an error line or a command."""

LONGEST = 160
"""Most characters of a token, an error line or a command. A longer one is data, not a name."""

MOST_MISSES = 20
"""Entries in all that may be too long for the room before no further one is tried."""

MOST_PIECES = 50_000
"""Distinct pieces of text whose names are remembered while one digest is made: some 10 MB."""

_STEP = 16_384
"""Numbers that are sorted at once."""

_WINDOW = 65_536
"""Characters of a text that are searched at a time; of a result, all that are searched for an error line."""
_BLANKS = str.maketrans(dict.fromkeys("\"'`<>(){}[],;|=*", " "))
_SPLIT = re.compile(r"[^\s\"'`<>(){}\[\],;|=*]+")
_PATH = re.compile(
    r"(?:~|\.{1,2}|[A-Za-z]:)?(?:[/\\][\w.@+-]+)+/?|[\w@.-]+(?:/[\w.@+-]+)+/?|[\w-]+(?:\.[\w-]+)*\.[a-z][a-z0-9]{0,5}"
)
_ERROR = re.compile(r"[A-Za-z_.]*(?:Error|Exception|Warning)|E[A-Z]{3,}|[EF]\d{3,4}")
_NAME = re.compile(
    r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+|[a-z]+[a-z0-9]*(?:[A-Z][a-z0-9]+)+"
    r"|[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+|(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}"
    r"|(?=[A-Z0-9]*\d)(?=[A-Z0-9]*[A-Z])[A-Z0-9]{4,12}"
)
_NUMBER = re.compile(
    r"\+?\d{2,4}(?:-\d{3,8}){1,3}"  # a telephone number
    r"|[$€£¥]?\d{3,}(?:[.,:]\d+)*%?|[$€£¥]?\d+\.\d+%?|\d{1,2}(?:[:.]\d{2}){1,2}|\d{4}-\d{2}-\d{2}"
)
_WORD = re.compile(
    r"(?P<plain>[a-z]++|(?!(?:Error|Exception|Warning)\Z)[A-Z][a-z]*+)"
    r"|(?:[0-9]++[a-f]|[a-f]++[0-9])[0-9a-f]*+(?<=.{7})(?<!.{41})"
    r"|[a-z]++[a-z0-9]*+(?:[A-Z][a-z0-9]++)++|[A-Z][a-z0-9]++(?:[A-Z][a-z0-9]++)++"
    r"|(?:[0-9]++[A-Z]|[A-Z]++[0-9])[A-Z0-9]*+(?<=.{4})(?<!.{13})"
    r"|[A-Za-z]++(?:(?<=Error)|(?<=Exception)|(?<=Warning))|E[A-Z]{3,}|[EF]\d{3,4}"
)
"""A piece of letters and digits alone that is a plain word, a name or an error.

The patterns are those of ``_WHOLE`` that such a piece can match, which takes half the time.
"""

_WHOLE = re.compile(
    r"(?P<plain>[a-z-]++|(?!(?:Error|Exception|Warning)\Z)[A-Z][a-z]*+)|https?://\S{3,}"
    r"|(?P<path>[\w@.-]++(?:/[\w.@+-]++)++)(?:/|(?<!\.):(?P<line>\d+))?|(?:[\w-]++\.)++[a-z][a-z0-9]{0,5}"
    r"|(?:~|\.{1,2}|[A-Za-z]:)?(?:[/\\][\w.@+-]++)++/?"
    r"|[A-Za-z_]\w*+(?:\.[A-Za-z_]\w*+)++|[A-Za-z][A-Za-z0-9]*+(?:_[A-Za-z0-9]++)++"
    r"|[A-Za-z_.]++(?:(?<=Error)|(?<=Exception)|(?<=Warning))"
    rf"|(?P<number>{_NUMBER.pattern})"
)
"""A piece with signs in it that is a plain word, an address, a path (perhaps with a line number), a name, an error, or
a number.

Names have capitals, digits or signs inside. The patterns are those above, written for a match of a whole piece: most
repeats give nothing back, which takes half the time.
"""

_INSIDE = re.compile(
    rf"(?<![\w.])({_PATH.pattern}|{_ERROR.pattern}|{_NAME.pattern})(?![\w/])"
    rf"|(?<![A-Za-z0-9_.])({_NUMBER.pattern})(?![A-Za-z0-9_/])"
)
"""A name inside a piece of text that is no name itself: behind a sigil, a quote mark or an escape.

Numbers also stand right beside characters of scripts that are written without spaces.
"""

_TIME = re.compile(r"\d{1,2}(?::\d{2}){1,2}")
TIME = 0.3
"""The worth of a time of day, as a share of that of other figures: opening hours are many, and rarely asked for."""

STANDARD_WORTH = 0.3
"""The worth of a name in a standard library, as a share of that of other names."""

_MARKS = ".,:;!?…。，：；！？-"
"""Marks around a piece of text that are no part of it."""

_FRAGMENT = re.compile(r"[\W_]?[^\W\d_]+(?:'[^\W\d_]+)?|\d{1,3}|[\W_]+")
"""A part of ASCII text that takes a token at least: vocabularies join no letters with digits, and no four digits.

See the patterns in https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
"""

_QUOTED = re.compile(r"[「『《【“]([^」』》】”\n]{2,40})[」』》】”]")
_FAILURE = re.compile(
    r"\b(?:error|failed|failure|exception|traceback|fatal|cannot|denied|not found)\b|错误|失败|エラー", re.I
)
_NO_FAILURE = re.compile(r"\b(?:0|no) (?:\w+ )?(?:errors?|failed|failures?|exceptions?)\b", re.I)
"""A total of none."""

_LISTED = re.compile(r"\d+(?:→|\t)")
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
    names = _Names()
    names.read(entries)
    sized = _Sized(count)
    errors = sized.fill((line for line in _error_lines(entries) if line not in known), int(tokens * ERROR_SHARE))
    commands = sized.fill(_commands(entries), int(tokens * COMMAND_SHARE))
    room = tokens - sum(sized(line) + LABEL for line in (*errors, *commands))
    shown = _Shown(known)
    files = sized.fill(filter(shown.is_new, _files(entries)), int(room * FILE_SHARE))
    room -= sum(map(sized, files))
    other_worths = _best_by_length(names.worths(), max(0, tokens))
    for name in filter(STANDARD.fullmatch, other_worths):
        other_worths[name] *= STANDARD_WORTH
    number_worths = {name: other_worths.pop(name) for name in filter(names.is_number, list(other_worths))}
    # Searching a long known text is not cheap: it is searched only for names that are about to be shown.
    ranked_numbers = filter(shown.is_new, _ranked(number_worths, sized))
    number_share = NUMBER_SHARE
    if names.is_chat:
        number_share = CHAT_NUMBER_SHARE
    numbers = sized.fill(ranked_numbers, int(room * number_share))
    room -= sum(map(sized, numbers))
    others = sized.fill(filter(shown.is_new, _ranked(other_worths, sized)), room)
    room -= sum(map(sized, others))
    if room > LABEL:
        numbers += sized.fill(ranked_numbers, room)
    return Digest(tuple(files), tuple(others), tuple(numbers), tuple(errors[::-1]), tuple(commands[::-1]))


class _Names:
    """The names of a digest's entries, and their mentions.

    ``mentions`` are the numbers of texts that mention each name, by the worth of the mention. ``recency`` is the factor
    by which the newest mention of each name raises its worth.
    """

    def __init__(self) -> None:
        self.mentions: dict[float, dict[str, int]] = defaultdict(dict)
        self.recency: dict[str, float] = {}
        self._pieces = _Pieces()
        self._titles: set[str] = set()
        self.is_chat = False

    def read(self, entries: Sequence[ItemText]) -> None:
        """Add the names in *entries*; those of people and places only if there is no call."""
        self.is_chat = not any(entry.calls for entry in entries)
        total = max(1, len(entries))
        for index, entry in enumerate(entries):
            recency = OLDEST + (1 - OLDEST) * ((index + 1) / total)
            text = entry.text
            if entry.role == "tool":
                text = without_line_numbers(text)
            self._add(text, WRITTEN[entry.role], recency)
            for name, arguments in entry.calls:
                self._add(name, CALLED, recency)
                self._add(plain_arguments(arguments), CALLED, recency)

    def is_number(self, name: str) -> bool:
        """True if *name* was first mentioned as a number."""
        return name in self._pieces.numbers and name not in self._titles

    def worths(self) -> dict[str, float]:
        """The worth of each name: the sum over its kinds of mention, in each of which a further one counts less."""
        mentioned: dict[str, float] = {}
        for worth, times in self.mentions.items():
            worth_of = {number: worth * log2(1 + number) for number in set(times.values())}
            for name, number in times.items():
                mentioned[name] = mentioned.get(name, 0.0) + worth_of[number]
        recency = self.recency
        worths = {name: worth * recency[name] for name, worth in mentioned.items()}
        for name in filter(_TIME.fullmatch, filter(self.is_number, worths)):
            worths[name] *= TIME
        return worths

    def _add(self, text: str, worth: float, recency: float) -> None:
        """Add a mention of each name in *text*."""
        # Plain loops: while a dictionary takes in another one with a million names, no other thread runs.
        times, newest = self.mentions[worth], self.recency
        for name in self._names_in(text, phrases=worth > WRITTEN["tool"]):
            times[name] = times.get(name, 0) + 1
            newest[name] = recency

    def _names_in(self, text: str, *, phrases: bool) -> set[str]:
        """Every name in *text*; with *phrases* also quoted titles of several words."""
        if len(text) <= _WINDOW:
            return self._names_in_window(text, phrases)
        names: set[str] = set()
        for start in range(0, len(text), _WINDOW):
            names |= self._names_in_window(text[start : start + _WINDOW], phrases)
        return names

    def _names_in_window(self, text: str, phrases: bool) -> set[str]:
        names = self._names_of_pieces(text, phrases)
        if not phrases:
            return names
        for date in dates(text):
            self._pieces.numbers.add(date)
            names.add(date)
        if self.is_chat:
            names.update(proper_names(text))
        return names

    def _names_of_pieces(self, text: str, phrases: bool) -> set[str]:
        if text.isascii():  # a quarter of the time that the pattern takes, and none of the marks of titles is in ASCII
            return self._pieces.names_in(set(text.translate(_BLANKS).split()))
        names = self._pieces.names_in(set(_SPLIT.findall(text)))
        titles: list[str] = _QUOTED.findall(text)
        if not phrases:
            titles = [title for title in titles if not any(map(str.isspace, title))]
        self._titles.update(title for title in titles if title not in self.recency)
        return names.union(titles)


def _best_by_length(worths: dict[str, float], most: int) -> dict[str, float]:
    """The *most* names of *worths* with the highest worth per token, their tokens guessed by their length."""
    if len(worths) <= most:
        return worths
    per_token = [worth / (len(name) / 4 + ROUGH) for name, worth in worths.items()]
    least = _nth_highest(per_token, most + 1)
    ranked = list(zip(worths, per_token, strict=True))
    best = [name for name, worth in ranked if worth > least]
    best += nsmallest(most - len(best), [name for name, worth in ranked if worth == least])
    return {name: worths[name] for name in best}


def _nth_highest(values: Iterable[float], number: int) -> float:
    """The value at this *number* from the highest; sorted in steps, because no other thread runs during a sort."""
    highest: list[float] = []
    remaining = iter(values)
    while step := list(islice(remaining, _STEP)):
        highest = sorted(highest + step, reverse=True)[:number]
    return highest[-1]


def _ranked(worths: Mapping[str, float], size: Callable[[str], int]) -> Iterator[str]:
    """The names of *worths* by their worth per token, the highest first.

    Tokens are counted only of names that can be next: of those whose fewest tokens make them worth more per token than
    the best one that was counted.
    """
    uncounted = [(-worth / (fewest_tokens(name) + SMOOTH), name) for name, worth in worths.items()]
    heapify(uncounted)  # rather than sorted: few of thousands of names are shown
    counted: list[tuple[float, str]] = []
    while uncounted:
        least, name = heappop(uncounted)
        while counted and counted[0][0] < least:
            yield heappop(counted)[1]
        heappush(counted, (-worths[name] / (size(name) + SMOOTH), name))
    yield from [name for _, name in sorted(counted)]


def fewest_tokens(name: str) -> int:
    """The fewest tokens that *name* can take with the comma and the space behind it."""
    if name.isdecimal():
        return 3
    if not name.isascii():
        return 2
    return len(_FRAGMENT.findall(f"{name},")) + 1


class _Sized:
    """Counts the tokens of lines as parts of a list, each line once."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self._sizes: dict[str, int] = {}

    def __call__(self, line: str) -> int:
        size = self._sizes.get(line)
        if size is None:
            size = self._sizes[line] = self._count(f"{line}, ")
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


class _Shown:
    """Names that need no entry: those in a known text, and those shown before, also inside a longer one.

    ``_parts`` are all three and all four characters in a row of what was shown: most new names begin with others, and
    need not be searched for.
    """

    def __init__(self, known: str) -> None:
        self._known = known
        self._shown = ""
        self._parts: set[str] = set()

    def is_new(self, name: str) -> bool:
        """True if *name* is not shown yet. It counts as shown from now on."""
        may_be_shown = len(name) < 3 or name[:4] in self._parts
        if (may_be_shown and name in self._shown) or name in self._known:
            return False
        self._shown += f"{name}\n"
        for at in range(len(name) - 2):
            self._parts.add(name[at : at + 3])
            self._parts.add(name[at : at + 4])
        return True


def quoted(text: str) -> str:
    """*text* in quotation marks that nothing inside it can end."""
    inside = text.replace("“", "'").replace("”", "'")
    return f"“{inside}”"


class _Pieces:
    """Finds the names in pieces of text between blanks. A piece is searched once.

    ``numbers`` are those of the names that are numbers.
    """

    def __init__(self) -> None:
        self.numbers: set[str] = set()
        self._names: dict[str, tuple[str, ...]] = {}

    def names_in(self, pieces: Iterable[str]) -> set[str]:
        """The names in *pieces*."""
        all_names: set[str] = set()
        known = self._names
        for piece in pieces:
            names = known.get(piece)
            if names is None:
                names = self._search(piece)
                if len(known) < MOST_PIECES and len(piece) <= LONGEST:
                    known[piece] = names
            if names:
                all_names.update(names)
        return all_names

    def _search(self, piece: str) -> tuple[str, ...]:
        """*piece* itself, without the marks around it, if it is a name or a number, else those inside it."""
        token = piece.strip(_MARKS)
        if not 2 < len(token) <= LONGEST:
            return ()
        if token.isdecimal():
            self.numbers.add(token)
            return (token,)
        if token.isalnum():
            word = _WORD.fullmatch(token)
            if word is None or word.lastgroup == "plain":
                return ()
            return (token,)
        whole = _WHOLE.fullmatch(token)
        if whole is None:
            return self._search_inside(token)
        return self._search_whole(token, whole.lastgroup)

    def _search_whole(self, token: str, kind: str | None) -> tuple[str, ...]:
        """The names in *token*, which is as a whole of this *kind*: a group of ``_WHOLE``, None for other names."""
        if is_meaningless(token):
            return ()
        match kind:
            case "plain":
                return ()
            case "line":
                path, _, number = token.rpartition(":")
                if len(number) < 3:
                    return (path,)
                self.numbers.add(number)
                return path, number
            case "number":
                self.numbers.add(token)
        return (token,)

    def _search_inside(self, token: str) -> tuple[str, ...]:
        """The names and numbers inside *token*."""
        names: list[str] = []
        for name, number in _INSIDE.findall(token):
            stripped = name.rstrip(".") or number
            if len(stripped) > 2 and not is_meaningless(stripped):
                names.append(stripped)
                if number:
                    self.numbers.add(number)
        return tuple(names)


def _files(entries: Sequence[ItemText]) -> Iterator[str]:
    """Distinct paths that are a whole argument of a call, newest first."""
    seen: set[str] = set()
    for entry in reversed(entries):
        for _, arguments in reversed(entry.calls):
            for value in plain_arguments(arguments).split("\n"):
                if 2 < len(value) <= LONGEST and value not in seen and _PATH.fullmatch(value):
                    seen.add(value)
                    yield value


def _error_lines(entries: Sequence[ItemText]) -> Iterator[str]:
    """Distinct error lines of tool results, newest first."""
    seen: set[str] = set()
    for entry in reversed(entries):
        if entry.role != "tool":
            continue
        text = entry.text[:_WINDOW]
        if not _may_fail(text):
            continue
        for line in map(str.strip, text.splitlines()):
            if len(line) <= LONGEST and line not in seen and _FAILURE.search(line) and _reports_failure(line):
                seen.add(line)
                yield line
                break


def _reports_failure(line: str) -> bool:
    """True if *line*, which speaks of one, reports a failure: not only a total of none, nor what a listed file says."""
    if _LISTED.match(line):
        return False
    return not _NO_FAILURE.search(line) or _FAILURE.search(_NO_FAILURE.sub("", line)) is not None


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
