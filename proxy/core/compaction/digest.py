"""The literal digest of folded rounds: names, paths, figures and errors that later steps are likely to refer to.

A name that the user or the model wrote ranks above one that only a tool's output mentions, and a newer one above an
older one. Every entry of a digest occurs literally in the rounds it stands for, so none can be invented.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import log2
from typing import Any

from proxy.core.conversation import ItemText

Count = Callable[[str], int]

NUMBER_SHARE = 0.2
COMMAND_SHARE = 0.1
ERROR_SHARE = 0.15
FILE_SHARE = 0.1
"""Shares of a digest that numbers, commands, error lines and the newest files may take at most."""

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

_LITERAL = json.JSONDecoder(parse_int=str, parse_float=str)
_WINDOW = 65_536
"""Characters of a text that are searched at a time; of a result, all that are searched for an error line."""
_SPLIT = re.compile(r"[^\s\"'`<>(){}\[\],;|=*]+")
_PLAIN = re.compile(r"[a-z]+")
"""A plain word: names have capitals, digits or signs inside."""

_URL = re.compile(r"https?://\S{3,}")
_PATH = re.compile(
    r"(?:~|\.{1,2}|[A-Za-z]:)?(?:[/\\][\w.@+-]+)+/?|[\w@.-]+(?:/[\w.@+-]+)+/?|[\w-]+(?:\.[\w-]+)*\.[a-z][a-z0-9]{0,5}"
)
_ERROR = re.compile(r"[A-Za-z_.]*(?:Error|Exception|Warning)|E[A-Z]{3,}|[EF]\d{3,4}")
_NAME = re.compile(
    r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+|[a-z]+[a-z0-9]*(?:[A-Z][a-z0-9]+)+"
    r"|[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+|(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}"
    r"|(?=[A-Z0-9]*\d)(?=[A-Z0-9]*[A-Z])[A-Z0-9]{4,12}"
)
_NUMBER = re.compile(r"[$€£¥]?\d{3,}(?:[.,:]\d+)*%?|[$€£¥]?\d+\.\d+%?|\d{1,2}(?:[:.]\d{2}){1,2}|\d{4}-\d{2}-\d{2}")
_WHOLE = re.compile(rf"(?:{_URL.pattern}|{_PATH.pattern}|{_NAME.pattern}|{_ERROR.pattern})|({_NUMBER.pattern})")
"""A piece of text that is a name itself, or a number."""

_INSIDE = re.compile(rf"(?<![\w.])(?:({_PATH.pattern}|{_ERROR.pattern}|{_NAME.pattern})|({_NUMBER.pattern}))(?![\w/])")
"""A name inside a piece of text that is no name itself: behind a sigil, a quote mark or an escape."""

_QUOTED = re.compile(r"[「『《【“]([^」』》】”\n]{2,40})[」』》】”]")
_FAILURE = re.compile(
    r"\b(?:error|failed|failure|exception|traceback|fatal|cannot|denied|not found)\b|错误|失败|エラー", re.I
)
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


@dataclass(slots=True)
class _Name:
    """The mentions of one name: how many items mention it, by worth, and the newest of them as a share of all."""

    is_number: bool
    mentions: dict[float, int]
    newest: float = 0.0

    def worth(self) -> float:
        """The name's worth: the sum over its kinds of mention, in each of which a further mention counts less."""
        mentioned = sum(worth * log2(1 + times) for worth, times in self.mentions.items())
        return mentioned * (OLDEST + (1 - OLDEST) * self.newest)


def digest_of(entries: Sequence[ItemText], tokens: int, count: Count, known: str = "") -> Digest:
    """The best digest of *entries* in at most about *tokens*. Names that the text *known* holds are left out."""
    names = _mentions(entries)
    sized = _Sized(count)
    errors = sized.fill(_error_lines(entries), int(tokens * ERROR_SHARE))
    commands = sized.fill(_commands(entries), int(tokens * COMMAND_SHARE))
    room = tokens - sum(sized(line) + LABEL for line in (*errors, *commands))
    shown = _Shown(known)
    files = sized.fill(filter(shown.is_new, _files(entries)), int(room * FILE_SHARE))
    room -= sum(map(sized, files))
    # Searching a long known text is not cheap: it is searched only for names that are about to be shown.
    ranked = _ranked(names, max(0, tokens), sized)
    ranked_numbers = (name for name in ranked if names[name].is_number and shown.is_new(name))
    numbers = sized.fill(ranked_numbers, int(room * NUMBER_SHARE))
    room -= sum(map(sized, numbers))
    others = sized.fill((name for name in ranked if not names[name].is_number and shown.is_new(name)), room)
    return Digest(tuple(files), tuple(others), tuple(numbers), tuple(errors[::-1]), tuple(commands[::-1]))


def _mentions(entries: Sequence[ItemText]) -> dict[str, _Name]:
    """Every name in *entries* with its mentions. An item counts once for each kind of text that holds the name."""
    names: dict[str, _Name] = {}
    pieces = _NamesOfPieces()
    total = max(1, len(entries))
    for index, entry in enumerate(entries):
        for text, worth in _texts(entry):
            for token, is_number in _tokens(text, pieces, phrases=worth > WRITTEN["tool"]).items():
                name = names.get(token)
                if name is None:
                    name = names[token] = _Name(is_number, {})
                name.mentions[worth] = name.mentions.get(worth, 0) + 1
                name.newest = (index + 1) / total
    return names


def _ranked(names: Mapping[str, _Name], most: int, size: Callable[[str], int]) -> list[str]:
    """The names by their worth per token. Sizes are guessed at first, and counted for the best *most*; others go."""
    rough = nsmallest(most, names, key=lambda name: (-names[name].worth() / (len(name) / 4 + ROUGH), name))
    return sorted(rough, key=lambda name: (-names[name].worth() / (size(name) + SMOOTH), name))


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
    yield entry.text, WRITTEN[entry.role]
    for name, arguments in entry.calls:
        yield name, CALLED
        yield plain_arguments(arguments), CALLED


def quoted(text: str) -> str:
    """*text* in quotation marks that nothing inside it can end."""
    inside = text.replace("“", "'").replace("”", "'")
    return f"“{inside}”"


class _NamesOfPieces(dict[str, tuple[tuple[str, bool], ...]]):
    """The names in each piece of text between blanks. A piece that occurs again is not searched again."""

    def __missing__(self, piece: str) -> tuple[tuple[str, bool], ...]:
        """The names in *piece*."""
        token = piece.strip(".,:;!?…。，：；！？-")
        names: tuple[tuple[str, bool], ...] = ()
        if 2 < len(token) <= LONGEST and not _PLAIN.fullmatch(token):
            names = _named(token)
        if len(self) < MOST_PIECES and len(piece) <= LONGEST:
            self[piece] = names
        return names


def _tokens(text: str, pieces: _NamesOfPieces, *, phrases: bool) -> dict[str, bool]:
    """Every name in *text*, True for a number; with *phrases* also quoted titles of several words."""
    found: dict[str, bool] = {}
    for start in range(0, len(text), _WINDOW):
        window = text[start : start + _WINDOW]
        for piece in _SPLIT.findall(window):
            if names := pieces[piece]:
                found.update(names)
        for match in _QUOTED.finditer(window):
            if phrases or not any(map(str.isspace, match.group(1))):
                found[match.group(1)] = False
    return found


def _named(token: str) -> tuple[tuple[str, bool], ...]:
    """*token* itself if it is a name or a number, else those inside it; each with True for a number."""
    whole = _WHOLE.fullmatch(token)
    if whole is not None:
        return ((token, whole.lastindex == 1),)
    inside = ((match.group().rstrip("."), match.lastindex == 2) for match in _INSIDE.finditer(token))
    return tuple((name, is_number) for name, is_number in inside if len(name) > 2)


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
        for line in map(str.strip, entry.text[:_WINDOW].splitlines()):
            if len(line) <= LONGEST and line not in seen and _FAILURE.search(line):
                seen.add(line)
                yield line
                break


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
