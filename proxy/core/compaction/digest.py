"""The literal digest of folded rounds: names, paths, figures and errors that later steps are likely to refer to.

A name that the user or the model wrote ranks above one that only a tool's output mentions, and a newer one above an
older one. Every entry of a digest occurs literally in the rounds it stands for, so none can be invented.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from itertools import islice
from math import log2
from types import MappingProxyType
from typing import Any

from proxy.core.conversation import ItemText

Count = Callable[[str], int]

NUMBER_SHARE = 0.2
CHAT_NUMBER_SHARE = 0.5
COMMAND_SHARE = 0.1
ERROR_SHARE = 0.15
FILE_SHARE = 0.1
"""Shares of a digest that numbers (in a chat: without calls), commands, error lines and the newest files may take at most.

Numbers may also take what the other names leave over."""

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

LONGEST_ARGUMENTS = 262_144
"""Most characters of a call's arguments that are read as JSON. Longer ones are read as plain text."""

MOST_MISSES = 20
"""Entries in all that may be too long for the room before no further one is tried."""

MOST_PIECES = 50_000
"""Distinct pieces of text whose names are remembered while one digest is made: some 10 MB."""

_STEP = 16_384
"""Numbers that are sorted at once."""

_LITERAL = json.JSONDecoder(parse_int=str, parse_float=str)
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
    r"\+?\d{2,4}(?:-\d{3,8}){1,3}|[$€£¥]?\d{3,}(?:[.,:]\d+)*%?|[$€£¥]?\d+\.\d+%?|\d{1,2}(?:[:.]\d{2}){1,2}|\d{4}-\d{2}-\d{2}"
)
_WHOLE = re.compile(
    r"(?P<plain>[a-z-]++|(?!(?:Error|Exception|Warning)\Z)[A-Z][a-z]*+)|https?://\S{3,}"
    r"|(?P<path>[\w@.-]++(?:/[\w.@+-]++)++)(?:/|(?<!\.):(?P<line>\d+))?|(?:[\w-]++\.)++[a-z][a-z0-9]{0,5}"
    r"|(?:~|\.{1,2}|[A-Za-z]:)?(?:[/\\][\w.@+-]++)++/?"
    r"|[A-Za-z_]\w*+(?:\.[A-Za-z_]\w*+)++|[A-Za-z][A-Za-z0-9]*+(?:_[A-Za-z0-9]++)++|[a-z]++[a-z0-9]*+(?:[A-Z][a-z0-9]++)++"
    r"|[A-Z][a-z0-9]++(?:[A-Z][a-z0-9]++)++|(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}"
    r"|(?=[A-Z0-9]*\d)(?=[A-Z0-9]*[A-Z])[A-Z0-9]{4,12}"
    r"|[A-Za-z_.]++(?:(?<=Error)|(?<=Exception)|(?<=Warning))|E[A-Z]{3,}|[EF]\d{3,4}"
    rf"|(?P<number>{_NUMBER.pattern})"
)
"""A piece of text that is a plain word, an address, a path (perhaps with a line number), a name, an error, or a number.

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

_MARKS = ".,:;!?…。，：；！？-"
"""Marks around a piece of text that are no part of it."""

_FRAGMENT = re.compile(r"[\W_]?[^\W\d_]+(?:'[^\W\d_]+)?|\d{1,3}|[\W_]+")
"""A part of ASCII text that takes a token at least: vocabularies join no letters with digits, and no four digits.

See the patterns in https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
"""

_QUOTED = re.compile(r"[「『《【“]([^」』》】”\n]{2,40})[」』》】”]")
_MONTH = "(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)(?:uary|ruary|ch|il|ust|tember|ober|ember)?"
_DATE = re.compile(
    rf"\b\d{{1,2}}(?:st|nd|rd|th)?\.? (?:of )?{_MONTH}\b(?:,? \d{{4}}\b)?"
    rf"|\b{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}}\b)?"
    r"|(?:\d{4}年)?\d{1,2}月\d{1,2}[日号號]|(?:\d{4}년 ?)?\d{1,2}월 ?\d{1,2}일"
)
"""A date in words, with its day; in English, Chinese, Japanese or Korean."""

_CALENDAR = frozenset(
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November"]
    + ["December", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
)
_CAPITALISED = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{2,}(?: [A-Z][a-z]+){0,2}\b")
"""Words with a capital inside a sentence: in most languages with capitals these are names."""

_NO_PART = "是去在到有叫和找订住从或的了吗呢吧啊我你他她它们这那个就想要请帮给把被让跟与及附近周边推荐家"
_NAMES_WITHOUT_SPACES = re.compile(
    rf"(?:(?![{_NO_PART}])[\u4e00-\u9fff]){{1,9}}"
    r"(?:酒店|宾馆|饭店|餐馆|餐厅|烤鸭店|小吃店|公园|大学|医院|博物馆|美术馆|车站|机场|大厦|广场|胡同|大街|路|街|寺|宫|坛|村"
    r"|駅|県|神社|公園|空港|さん|様|先生)"
    r"|[ァ-ヴー]{3,12}|[가-힣]{2,6}(?:씨|님|역|호텔|식당|공원|대학교|병원|공항)"
)
"""Names of places and people that their endings show, and words in katakana, which are mostly names or loans."""

_NUMBERED_LINE = re.compile(r"^[ ]{0,8}(\d{1,7})(?:→|\t)", re.MULTILINE)
"""The number that a listing puts before each line of a file. It names nothing that is needed once the listing is gone."""

_TIME = re.compile(r"\d{1,2}(?::\d{2}){1,2}")
TIME = 0.3
"""The worth of a time of day, as a share of that of other figures: opening hours are many, and rarely asked for."""

_UNNAMED = frozenset(("e.g", "i.e", "E.g", "I.e", "a.k.a", "vs.the", "and/or", "y/n", "Y/n", "n/a", "N/A"))
"""Abbreviations that look like names."""

_TAG = re.compile(
    r"/(?:html|head|body|div|span|p|a|b|i|li|ul|ol|td|tr|th|table|tbody|thead|script|style|h[1-6]|code|pre)"
)
"""What is left of an HTML end tag between its brackets."""

_NO_MEANING = frozenset("\\/.")
"""One of these is in every name that means nothing."""

_FAILURE = re.compile(
    r"\b(?:error|failed|failure|exception|traceback|fatal|cannot|denied|not found)\b|错误|失败|エラー", re.I
)
_FAILURE_PARTS = ("error", "fail", "exception", "traceback", "fatal", "cannot", "denied", "not found")
"""One of these is in every ASCII text with a failure. To look for them takes a third of the time of the pattern."""

_COMMAND_KEYS = ("command", "cmd", "code", "script")
_COMMANDS_KEYS = ("commands", "cmds")
"""Keys of lists of commands, each a text or an object with one. Under other keys a list is one command in parts."""


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
            lines.append("Files used last: " + ", ".join(self.files))
        if self.names:
            lines.append("Names and places mentioned: " + ", ".join(self.names))
        if self.numbers:
            lines.append("Figures mentioned: " + ", ".join(self.numbers))
        lines += [f"A tool said: {quoted(line)}" for line in self.errors]
        lines += [f"Command run: {line}" for line in self.commands]
        return lines


def digest_of(entries: Sequence[ItemText], tokens: int, count: Count, known: str = "") -> Digest:
    """The best digest of *entries* in at most about *tokens*. Names that the text *known* holds are left out."""
    names = _Names()
    names.read(entries)
    sized = _Sized(count)
    errors = sized.fill(_error_lines(entries), int(tokens * ERROR_SHARE))
    commands = sized.fill(_commands(entries), int(tokens * COMMAND_SHARE))
    room = tokens - sum(sized(line) + LABEL for line in (*errors, *commands))
    shown = _Shown(known)
    files = sized.fill(filter(shown.is_new, _files(entries)), int(room * FILE_SHARE))
    room -= sum(map(sized, files))
    candidates = _best_by_length(names.worths(), max(0, tokens))
    # Searching a long known text is not cheap: it is searched only for names that are about to be shown.
    ranked_numbers = _ranked({name: worth for name, worth in candidates.items() if names.is_number[name]}, sized)
    numbers_share = NUMBER_SHARE
    if names.chat:
        numbers_share = CHAT_NUMBER_SHARE
    numbers = sized.fill(filter(shown.is_new, ranked_numbers), int(room * numbers_share))
    room -= sum(map(sized, numbers))
    ranked_others = _ranked({name: worth for name, worth in candidates.items() if not names.is_number[name]}, sized)
    others = sized.fill(filter(shown.is_new, ranked_others), room)
    room -= sum(map(sized, others))
    if room > LABEL:
        numbers += sized.fill(filter(shown.is_new, ranked_numbers), room)
    return Digest(tuple(files), tuple(others), tuple(numbers), tuple(errors[::-1]), tuple(commands[::-1]))


@dataclass(slots=True)
class _Names:
    """The names of a digest's entries, and their mentions.

    ``mentions`` is the number of items that mention each name, by the worth of the mention. An item counts once for
    each kind of text that holds the name. ``newest`` is the place of the newest mention, as a share of all entries.
    """

    is_number: dict[str, bool] = field(default_factory=dict)
    newest: dict[str, float] = field(default_factory=dict)
    chat: bool = False
    mentions: dict[float, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))

    def read(self, entries: Sequence[ItemText]) -> None:
        """Add the names in *entries*; names of people and places only if no tool was called."""
        self.chat = not any(entry.calls for entry in entries)
        # Plain loops: while a dictionary takes in another one with a million names, no other thread runs.
        pieces, newest, is_number = _NamesOfPieces(), self.newest, self.is_number
        total = max(1, len(entries))
        for index, entry in enumerate(entries):
            place = (index + 1) / total
            for text, worth in _texts(entry):
                times = self.mentions[worth]
                for name, number in _tokens(text, pieces, phrases=worth > WRITTEN["tool"], chat=self.chat).items():
                    times[name] = times.get(name, 0) + 1
                    newest[name] = place
                    is_number.setdefault(name, number)

    def worths(self) -> dict[str, float]:
        """The worth of each name: the sum over its kinds of mention, in each of which a further one counts less."""
        mentioned: dict[str, float] = {}
        for worth, times in self.mentions.items():
            for name, number in times.items():
                mentioned[name] = mentioned.get(name, 0.0) + worth * log2(1 + number)
        newest = self.newest
        worths = {name: worth * (OLDEST + (1 - OLDEST) * newest[name]) for name, worth in mentioned.items()}
        for name in filter(_TIME.fullmatch, filter(self.is_number.__getitem__, worths)):
            worths[name] *= TIME
        return worths


def _best_by_length(worths: dict[str, float], most: int) -> dict[str, float]:
    """The *most* names of *worths* with the highest worth per token, their tokens guessed by their length."""
    if len(worths) <= most:
        return worths
    per_token = {name: worth / (len(name) / 4 + ROUGH) for name, worth in worths.items()}
    least = _nth_highest(per_token.values(), most + 1)
    best = {name: worths[name] for name, worth in per_token.items() if worth > least}
    equal = nsmallest(most - len(best), (name for name, worth in per_token.items() if worth == least))
    return best | {name: worths[name] for name in equal}


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
    counted: list[tuple[float, str]] = []
    for least, name in sorted([(-worth / (fewest_tokens(name) + SMOOTH), name) for name, worth in worths.items()]):
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
    """Names that need no entry: those in a known text, and those shown before, also inside a longer one."""

    def __init__(self, known: str) -> None:
        self._known = known
        self._shown = ""

    def is_new(self, name: str) -> bool:
        """True if *name* is not shown yet. It counts as shown from now on."""
        if name in self._shown or name in self._known:
            return False
        self._shown += f"{name}\n"
        return True


def _texts(entry: ItemText) -> Iterator[tuple[str, float]]:
    """The texts of one item, each with the worth of a mention in it."""
    yield _without_line_numbers(entry), WRITTEN[entry.role]
    for name, arguments in entry.calls:
        yield name, CALLED
        yield plain_arguments(arguments), CALLED


def _without_line_numbers(entry: ItemText) -> str:
    """The text of *entry*; if it is a tool's listing of numbered lines, without their numbers."""
    text = entry.text
    if entry.role != "tool" or ("→" not in text and "\t" not in text):
        return text
    numbers = [int(match.group(1)) for match in islice(_NUMBERED_LINE.finditer(text), 2)]
    if len(numbers) < 2 or numbers[1] != numbers[0] + 1:
        return text
    return _NUMBERED_LINE.sub("", text)


def quoted(text: str) -> str:
    """*text* in quotation marks that nothing inside it can end."""
    inside = text.replace("“", "'").replace("”", "'")
    return f"“{inside}”"


_NO_NAMES: Mapping[str, bool] = MappingProxyType({})


class _NamesOfPieces(dict[str, Mapping[str, bool]]):
    """The names in each piece of text between blanks, True for a number. A piece is searched once."""

    def __missing__(self, piece: str) -> Mapping[str, bool]:
        """The names in *piece*."""
        token = piece.strip(_MARKS)
        names = _NO_NAMES
        if 2 < len(token) <= LONGEST:
            names = _named(token)
            if names and not _NO_MEANING.isdisjoint(token):
                names = {name: number for name, number in names.items() if _means_something(name)}
        if len(self) < MOST_PIECES and len(piece) <= LONGEST:
            self[piece] = names
        return names


def _tokens(text: str, pieces: _NamesOfPieces, *, phrases: bool, chat: bool = False) -> dict[str, bool]:
    """Every name in *text*, True for a number.

    With *phrases* also quoted titles of several words and dates in words, in a *chat* names of people and places.
    """
    found: dict[str, bool] = {}
    for start in range(0, len(text), _WINDOW):
        window = text[start : start + _WINDOW]
        for names in filter(None, map(pieces.__getitem__, _between_blanks(window))):
            found.update(names)
        found.update(dict.fromkeys(_titles(window, phrases=phrases), False))
        if phrases:
            found.update(dict.fromkeys(_dates(window), True))
        if phrases and chat:
            found.update(dict.fromkeys(_proper_names(window), False))
    return found


def _between_blanks(text: str) -> list[str]:
    """The pieces of *text* between blanks, quotation marks, brackets and the like."""
    if text.isascii():
        return text.translate(_BLANKS).split()  # a quarter of the time that the pattern takes, in ASCII only
    return _SPLIT.findall(text)


def _dates(text: str) -> list[str]:
    """The dates in *text* that are written with the name of a month."""
    return [match.group() for match in _DATE.finditer(text)]


def _proper_names(text: str) -> list[str]:
    """Names of people and places in *text*, as far as their letters or their neighbours show them."""
    names = [name for name in _CAPITALISED.findall(text) if name not in _CALENDAR]
    if not text.isascii():
        names += _NAMES_WITHOUT_SPACES.findall(text)
    return names


def _titles(text: str, *, phrases: bool) -> list[str]:
    """The titles in *text* between marks that only titles have; only those of one word unless *phrases* is true."""
    if text.isascii():
        return []  # none of the marks is in ASCII
    titles: list[str] = _QUOTED.findall(text)
    if phrases:
        return titles
    return [title for title in titles if not any(map(str.isspace, title))]


def _means_something(name: str) -> bool:
    """False for escapes, abbreviations and HTML tags that look like names."""
    return not (name.startswith("\\") or name in _UNNAMED or _TAG.fullmatch(name))


def _named(token: str) -> Mapping[str, bool]:
    """*token* itself if it is a name or a number, else those inside it; each with True for a number."""
    if token.isdecimal():
        return {token: True}
    whole = _WHOLE.fullmatch(token)
    if whole is not None:
        return _named_as(whole.lastgroup, token, whole)
    if token.isalnum():
        return _NO_NAMES  # inside a word there are no names
    names: dict[str, bool] = {}
    for name, number in _INSIDE.findall(token):
        stripped = name.rstrip(".") or number
        if len(stripped) > 2:
            names[stripped] = bool(number)
    return names


def _named_as(kind: str | None, token: str, whole: re.Match[str]) -> Mapping[str, bool]:
    """The names in *token*, which matches as a *whole* of this *kind*: one of the groups, None for other names."""
    if kind == "plain":
        return _NO_NAMES
    if kind != "line":
        return {token: kind == "number"}
    path, number = whole.group("path", "line")
    if len(number) > 2:
        return {path: False, number: True}
    return {path: False}


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
            if len(line) <= LONGEST and line not in seen and _FAILURE.search(line):
                seen.add(line)
                yield line
                break


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


def _literal(arguments: str) -> Any:
    """The value of *arguments*, with numbers as they are spelled: a parsed number could be printed differently."""
    return _LITERAL.decode(arguments)


def command_of(arguments: str) -> str:
    """The shell command or commands in a call's arguments, on one line; "" if there is none."""
    if len(arguments) > LONGEST_ARGUMENTS:
        return ""
    try:
        values = _literal(arguments)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(values, dict):
        return ""
    several = next((values[key] for key in _COMMANDS_KEYS if isinstance(values.get(key), list)), [values])
    commands = [_one_command(each) for each in several if each]
    return "; ".join(filter(None, commands))


def _one_command(value: Any) -> str:
    """The command in *value*, on one line: *value* itself, or a member of it."""
    if isinstance(value, dict):
        value = next((value[key] for key in _COMMAND_KEYS if value.get(key)), "")
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return " ".join(str(value).split())


def plain_arguments(arguments: str) -> str:
    """The string and number values of a call's JSON arguments, one on each line; the text itself if it is no JSON."""
    if len(arguments) > LONGEST_ARGUMENTS:
        return arguments
    try:
        stack = [_literal(arguments)]
    except (ValueError, RecursionError):
        return arguments
    found: list[str] = []
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            stack.extend(reversed(node.values()))
        elif isinstance(node, list):
            stack.extend(reversed(node))
        elif isinstance(node, str):
            found.append(node)
    return "\n".join(found)
