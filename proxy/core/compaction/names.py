"""Finds names in texts and weighs their mentions: by their letters, digits and signs, or by what language shows.

Dates in words, people and places are read in what users and models write. Names of people and places count in a
conversation without calls only: where a model works with tools, capitals inside a sentence mostly begin a heading or a
product's name.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from math import log2
from operator import attrgetter
from typing import Any

from proxy.core.conversation import ItemText
from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.tool_calls import Arguments

LONGEST = 160
"""Most characters of a token, an error line or a command. A longer one is data, not a name."""

MOST_PIECES = 50_000
"""Distinct pieces of text whose names are remembered while one digest is made: some 10 MB."""

SEARCHED = 256
"""Pieces that one call of a pattern searches: it takes a few ms at most, and no other thread runs in it."""

MOST_NAMES = 40_000
"""Names of one text after which the rest of it is not searched."""

WINDOW = 65_536
"""Characters of a text that are searched at a time."""

TOGETHER, SHORT = 64, 1_024
"""Texts whose pieces are searched together, each of so many characters at most: thousands of texts may be a word each,
and to search one piece takes half as long as to search a hundred."""

LEAST_SEARCHED, MOST_SEARCHED = 1_000, 40_000
"""Names after which no further result is searched, at least and at most; and after which no further text is.

Between them a result is searched while there are fewer names than two fifths of the digest's tokens: a name takes four.
"""

WRITTEN = {"user": 3.0, "assistant": 3.0, "tool": 1.0, "system": 0.0}
CALLED = 1.5
"""The worth of a mention: in a text by role, and in the arguments of a call."""

OLDEST = 0.6
"""The worth of a mention at the very beginning, as a share of the worth of one at the end."""

_PLAIN = attrgetter("plain")
_BLANKS = bytes.maketrans(b"\"'`<>(){}[],;|=*", b" " * 16)
_QUOTED = lazy_pattern(r"[「『《【“]([^」』》】”\n]{2,40})[」』》】”]")
PATH = lazy_pattern(
    r"(?:~|\.{1,2}|[A-Za-z]:)?(?:[/\\][\w.@+-]+)+/?|[\w@.-]+(?:/[\w.@+-]+)+/?|[\w-]+(?:\.[\w-]+)*\.[a-z][a-z0-9]{0,5}"
)
_ERROR = lazy_pattern(r"[A-Za-z_.]*(?:Error|Exception|Warning)|E[A-Z]{3,}|[EF]\d{3,4}")
_NAME = lazy_pattern(
    r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+|[a-z]+[a-z0-9]*(?:[A-Z][a-z0-9]+)+"
    r"|[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+|(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}"
    r"|(?=[A-Z0-9]*\d)(?=[A-Z0-9]*[A-Z])[A-Z0-9]{4,12}"
)
_NUMBER = lazy_pattern(
    r"\+?\d{2,4}(?:-\d{3,8}){1,3}"  # a telephone number
    r"|[$€£¥]?\d{3,}(?:[.,:]\d+)*%?|[$€£¥]?\d+\.\d+%?|\d{1,2}(?:[:.]\d{2}){1,2}|\d{4}-\d{2}-\d{2}"
)
_ABBREVIATIONS = frozenset(("e.g", "i.e", "E.g", "I.e", "a.k.a", "and/or", "y/n", "Y/n", "n/a", "N/A"))
"""Abbreviations that look like names."""

_ESCAPE = r"\\[\w.@+-]++(?:[/\\][\w.@+-]++)*+/?"
"""An escape and what follows it, which would be a path without the first sign."""

_WORDS = lazy_pattern(
    r"(?:[a-z]++|(?!(?:Error|Exception|Warning)\n)[A-Z][a-z]*+)\n"  # a plain word
    r"|(\d++"
    r"|(?:[0-9]++[a-f]|[a-f]++[0-9])[0-9a-f]*+(?<=.{7})(?<!.{41})"
    r"|[a-z]++[a-z0-9]*+(?:[A-Z][a-z0-9]++)++|[A-Z][a-z0-9]++(?:[A-Z][a-z0-9]++)++"
    r"|(?:[0-9]++[A-Z]|[A-Z]++[0-9])[A-Z0-9]*+(?<=.{4})(?<!.{13})"
    r"|[A-Za-z]++(?:(?<=Error)|(?<=Exception)|(?<=Warning))|E[A-Z]{3,}|[EF]\d{3,4})\n"
    r"|.*\n"
)
"""The names, errors and numbers among lines, each of which is a piece of letters and digits alone.

The patterns are those of ``_SIGNED`` that such a piece can match, which takes half the time. Whatever a line is, one of
the alternatives takes all of it, so that the search never begins inside a line.
"""

_SIGNED = lazy_pattern(
    r"(?:[a-z-]++|(?!(?:Error|Exception|Warning)\n)[A-Z][a-z]*+"  # a plain word
    rf"|{'|'.join(map(re.escape, _ABBREVIATIONS))}|{_ESCAPE})\n"
    r"|(https?://\S{3,}"
    r"|(?P<path>[\w@.-]++(?:/[\w.@+-]++)++)(?:/|(?<!\.):(?P<line>\d+))?|(?:[\w-]++\.)++[a-z][a-z0-9]{0,5}"
    r"|(?:~|\.{1,2}|[A-Za-z]:)?(?:[/\\][\w.@+-]++)++/?"
    r"|[A-Za-z_]\w*+(?:\.[A-Za-z_]\w*+)++|[A-Za-z][A-Za-z0-9]*+(?:_[A-Za-z0-9]++)++"
    r"|[A-Za-z_.]++(?:(?<=Error)|(?<=Exception)|(?<=Warning))"
    rf"|(?P<number>{_NUMBER.pattern}))\n"
    r"|(?P<other>.*)\n"
)
"""The addresses, paths (perhaps with a line number), names, errors and numbers among lines, each of which is a piece
with signs in it; what is none of these is found as ``other``.

Names have capitals, digits or signs inside. The patterns are those above, written for a match of a whole line: most
repeats give nothing back, which takes half the time.
"""

_INSIDE = lazy_pattern(
    rf"(?<![\w.])({PATH.pattern}|{_ERROR.pattern}|{_NAME.pattern})(?![\w/])"
    rf"|(?<![A-Za-z0-9_.])({_NUMBER.pattern})(?![A-Za-z0-9_/])"
)
"""A name inside a piece of text that is no name itself: behind a sigil, a quote mark or an escape.

Numbers also stand right beside characters of scripts that are written without spaces.
"""

_MARKS = ".,:;!?…。，：；！？-"
"""Marks around a piece of text that are no part of it."""

_BETWEEN = lazy_pattern(r"[ ,()]+")

_MONTH = "(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)(?:uary|ruary|ch|il|ust|tember|ober|ember)?"
_DATE = lazy_pattern(
    rf"\b\d{{1,2}}(?:st|nd|rd|th)?\.? (?:of )?{_MONTH}\b(?:,? \d{{4}}\b)?"
    rf"|\b{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}}\b)?"
    r"|(?:\d{4}年)?\d{1,2}月\d{1,2}[日号號]|(?:\d{4}년 ?)?\d{1,2}월 ?\d{1,2}일"
)
"""A date in words, with its day; in English, Chinese, Japanese or Korean."""

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec", "月", "월")
"""One of these is in every date in words."""

_SHORTEST_DATE = len("5月2日")

_FIGURE_RUN = lazy_pattern(r"[0-9$€£¥+(][0-9.()-]*[, ][0-9][0-9 ,.-]{2,}")
"""A run of digits and signs with a comma or a blank inside: the search for long figures in it alone is short."""

_LONG_FIGURE = lazy_pattern(
    r"[$€£¥]?(?<![\d.,])\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d|,\d)"
    r"|(?<![\d.,])\d{1,3}(?:\.\d{3})+,\d{2}(?!\d)"
    r"|\+\d{1,3}(?: \d{2,4}){2,4}(?!\d)|\(\d{3}\) \d{3}-\d{4}(?!\d)"
)
"""Amounts such as $1,250.50 and 1.250,50; telephone numbers such as +44 20 7946 0958 and (415) 555-2671."""

_CALENDAR = lazy_pattern(
    "January|February|March|April|May|June|July|August|September|October|November|December"
    "|Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
)
_UPPER, _LOWER = "[A-ZÀ-ÖØ-ÞА-ЯЁ]", "[a-zß-öø-ÿа-яё]"
_CAPITALISED = lazy_pattern(rf"(?<=[a-zß-öø-ÿа-яё,;] ){_UPPER}{_LOWER}{{2,}}(?: {_UPPER}{_LOWER}+){{0,2}}\b")
"""Words with a capital inside a sentence: in most languages with capitals these are names."""

_CAPITALISES_NOUNS = lazy_pattern(r"\b(?:der|das|und|nicht|ist|eine?[nr]?|für|zu|ich|wir|sie)\b", re.IGNORECASE)
"""Words of German, in which every noun has a capital."""

_NO_PART = (
    "是去在到有叫和找订住从或的了吗呢吧啊我你他她它们这那个就想要请帮给把被让跟与及附近周边推荐家哪些什么啥条号型"
    "该某每各"
)
_WITHOUT_SPACES = lazy_pattern(
    # "和" joins two names, unless it is a part of one: 颐和园路, 和平医院. So with "家", which also counts restaurants.
    rf"(?:[颐頤雍永共仁泰]和|和[平谐諧睦]|[国國]家|(?![{_NO_PART}])[\u4e00-\u9fff]){{1,9}}"
    r"(?:酒店|宾馆|饭店|餐馆|餐厅|烤鸭店|小吃店|公园|大学|学院|医院|博物院|剧院|博物馆|美术馆|车站|机场|大厦|广场|胡同"
    r"|大街|路|街|寺|宫|坛|村"
    r"|駅|県|神社|公園|空港|さん|様|先生)"
    r"|[ァ-ヴー]{3,12}|[가-힣]{2,6}(?:씨|님|역|호텔|식당|공원|대학교|병원|공항)"
)
"""Names of places and people that their endings show, and words in katakana, which are mostly names or loans."""

STANDARD = lazy_pattern(
    r"(?:os|sys|re|io|json|math|time|datetime|random|logging|subprocess|pathlib|shutil|collections|itertools|functools"
    r"|typing|asyncio|threading|unittest|argparse|tempfile|hashlib|uuid|copy|string|struct|socket|urllib|abc|enum|csv"
    r"|dataclasses|contextlib|traceback|inspect|pickle|base64|glob|textwrap|warnings|signal|queue|statistics"
    r"|console|process|window|document|Math|JSON|Object|Array|Promise|Number|String|Date|Buffer|Symbol|Reflect"
    r"|fmt|strings|errors|strconv|bytes|bufio|filepath|http|sync|sort|System|Enum|Map|List|Keyword|Logger|IO|File|Path)"
    r"(?:\.(?!(?:py|pyi|js|ts|tsx|jsx|mjs|go|rs|ex|exs|md|txt|ya?ml|toml|json|lock|sh|html|css|csv|xml|cfg|ini)\Z)"
    r"[A-Za-z_]\w*)+"
)
"""A name in the standard library of a common language: any model knows it. A file may be called alike."""

_GLUED = lazy_pattern(
    r"[a-z]{2,}\.(?:We|It|Its|I|He|She|They|You|Our|Your|My|The|This|These|Those|There|Here|Let|Given|However|Overall"
    r"|Therefore|Thus|Additionally|Furthermore|Moreover|Also|But|Because|Although|Please|What|Which|Upon)"
)
"""The end of a sentence with the next one right behind it. Other words with a capital may be members, as in Go."""

_TIME = lazy_pattern(r"\d{1,2}(?::\d{2}){1,2}")
TIME = 0.3
"""The worth of a time of day, as a share of that of other figures: opening hours are many, and rarely asked for."""

STANDARD_WORTH = 0.3
"""The worth of a name in a standard library, as a share of that of other names."""

_NUMBERED_LINE = lazy_pattern(r"^[ ]{0,8}(\d{1,7})(?:→|\t)", re.MULTILINE)
"""The number that a listing puts before each line of a file. It names nothing that is needed later."""


def dates(text: str) -> list[str]:
    """The dates in *text* that are written with a word for the month."""
    # Most texts have no month, and thousands may have hardly a character: the pattern takes ten times as long.
    if len(text) < _SHORTEST_DATE or not any(map(text.__contains__, _MONTHS)):
        return []
    return [match.group() for match in _DATE.finditer(text)]


def long_figures(text: str) -> list[str]:
    """The amounts with separators, and the telephone numbers with blanks, in *text*: signs at which pieces end."""
    figures: list[str] = []
    for run in _FIGURE_RUN.findall(text):
        figures += [match.group() for match in _LONG_FIGURE.finditer(run)]
    return figures


def proper_names(text: str) -> list[str]:
    """Names of people and places in *text*, as far as their letters or their endings show them."""
    names: list[str] = []
    if " " in text and not _CAPITALISES_NOUNS.search(text):
        names = [name for name in _CAPITALISED.findall(text) if not _CALENDAR.fullmatch(name)]
    if not text.isascii():
        names += _WITHOUT_SPACES.findall(text)
    return names


def is_meaningless(name: str) -> bool:
    """True for escapes and abbreviations that look like names."""
    return name[0] == "\\" or name in _ABBREVIATIONS


def without_line_numbers(text: str) -> str:
    """A tool's *text*; if it is a listing of numbered lines, without their numbers."""
    if "→" not in text and "\t" not in text:
        return text
    numbers = [int(match.group(1)) for match in islice(_NUMBERED_LINE.finditer(text), 2)]
    if len(numbers) < 2 or numbers[1] != numbers[0] + 1:
        return text
    return _NUMBERED_LINE.sub("", text)


class Names:
    """The names in *entries* and in the arguments of their *calls*, and the mentions of each.

    ``mentions`` are the numbers of texts that mention each name, by the worth of the mention. ``recency`` is the factor
    by which the newest mention of each name raises its worth. Names of people and places count only if there is no
    call. Older results are not searched if the newer texts have many more names than a digest of *tokens* can show.
    """

    def __init__(self, entries: Sequence[ItemText], calls: Sequence[Sequence[Arguments]], tokens: int) -> None:
        self.mentions: dict[float, dict[str, int]] = defaultdict(dict)
        self.recency: dict[str, float] = {}
        self.is_chat = not any(calls)
        self._numbers: set[str] = set()
        self._titles: set[str] = set()
        self._pieces = _Pieces(self._numbers)
        most = min(max(LEAST_SEARCHED, tokens * 2 // 5), MOST_SEARCHED)
        for end in range(len(entries), 0, -TOGETHER):
            if len(self.recency) >= MOST_SEARCHED:
                break
            self._add_entries(entries, calls, range(max(0, end - TOGETHER), end), most)

    def _add_entries(
        self, entries: Sequence[ItemText], calls: Sequence[Sequence[Arguments]], indexes: range, most: int
    ) -> None:
        """Add what the entries at *indexes* mention, the last first; of a tool's text, unless there are *most* names.

        Short texts are searched all at once before.
        """
        texts: list[str] = []
        for index in indexes:
            if entries[index].role != "tool" or len(self.recency) < most:
                texts.append(entries[index].text)
            texts.extend(map(_PLAIN, calls[index]))
        short = sorted(texts, key=len)
        joined = " ".join(short[: bisect_right(short, SHORT, key=len)])
        self._pieces.names_in(joined)
        for index in reversed(indexes):
            entry = entries[index]
            recency = OLDEST + (1 - OLDEST) * ((index + 1) / len(entries))
            if entry.role == "tool":
                self._add(without_line_numbers(entry.text), WRITTEN["tool"], recency, most)
            else:
                self._add(entry.text, WRITTEN[entry.role], recency)
            for called in (*[name for name, _ in entry.calls], *[call.plain for call in calls[index]]):
                self._add(called, CALLED, recency)

    def numbers(self) -> set[str]:
        """The names that are numbers, and no titles: what stands in quotation marks."""
        return (self._numbers - self._titles).intersection(self.recency)

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
        dotted = [name for name in worths if "." in name and "/" not in name]
        for name in filter(STANDARD.fullmatch, dotted):
            worths[name] *= STANDARD_WORTH
        for name in filter(_GLUED.fullmatch, dotted):
            del worths[name]
        return worths

    def _add(self, text: str, worth: float, recency: float, most: int = MOST_SEARCHED) -> None:
        """Add a mention of each name in *text*, unless there are *most* names."""
        if len(self.recency) >= most:
            return
        names: set[str] = set()
        for start in range(0, len(text), WINDOW):
            if len(names) >= MOST_NAMES:
                break
            window = text[start : start + WINDOW]
            if window.isalnum() and window.isascii():  # one word, with no date, long figure or name of two words in it
                names |= self._pieces.names_in(window)
            else:
                names |= self._names_in(window, is_written=worth > WRITTEN["tool"])
        times, newest = self.mentions[worth], self.recency
        # A plain loop: while a dictionary takes in another one with a million names, no other thread runs.
        for name in names:
            times[name] = times.get(name, 0) + 1
            newest.setdefault(name, recency)

    def _names_in(self, text: str, *, is_written: bool) -> set[str]:
        """Every name in *text*, of at most a window.

        In what a user or the model has written, dates and titles of several words are names, too, and in a chat people
        and places.
        """
        names = self._pieces.names_in(text)
        if not text.isascii():  # none of the marks of titles is in ASCII
            titles = _QUOTED.findall(text)
            if not is_written:
                titles = [title for title in titles if not any(map(str.isspace, title))]
            self._titles.update(titles)
            names.update(titles)
        if "</" in text:
            names -= _end_tags(names, text)
        if not is_written:
            return names
        figures = long_figures(text)
        for figure in figures:
            names.difference_update(_BETWEEN.split(figure))
        numbers = [*dates(text), *figures]
        self._numbers.update(numbers)
        names.update(numbers)
        if self.is_chat:
            names.update(proper_names(text))
        return names


def _end_tags(names: Iterable[str], text: str) -> set[str]:
    """Those of *names* that are the end of a tag in *text*, without its brackets."""
    return {name for name in names if name[0] == "/" and f"<{name}>" in text}


class _Pieces:
    """The names in pieces of text between blanks. Each piece is searched once, together with others of its text.

    Names that are numbers are added to *numbers*.
    """

    def __init__(self, numbers: set[str]) -> None:
        self._numbers = numbers
        self._seen: set[str] = set()
        self._whole: set[str] = set()
        """Pieces that are a name as they are."""

        self._inner: dict[str, tuple[str, ...]] = {}
        """The names in other pieces, which have signs around them or between them."""

    def names_in(self, text: str) -> set[str]:
        """Every name in the pieces of *text*."""
        # The signs are ASCII, and in UTF-8 no other character has their bytes.
        signless = text.encode("utf-8", "surrogatepass").translate(_BLANKS).decode("utf-8", "surrogatepass")
        pieces = set(signless.split())
        if len(self._seen) > MOST_PIECES:
            self._seen, self._whole, self._inner = set(), set(), {}
        if new := pieces - self._seen:
            self._search(new)
        names = pieces & self._whole
        for piece in filter(self._inner.__contains__, pieces):
            names.update(self._inner[piece])
        return names

    def _search(self, new: set[str]) -> None:
        """Search the pieces *new*: one with signs may be a name without the marks around it, or hold names inside."""
        self._seen |= new
        words = set(filter(str.isalnum, new))
        tokens: dict[str, str] = {}
        for piece in new - words:
            token = piece.strip(_MARKS)
            if "/" in token and token[0] != piece[0]:
                token = _dots_before(token, piece) + token
            tokens[piece] = token
        signed = set(tokens.values())
        bare = set(filter(str.isalnum, signed))
        named = set(filter(None, _matches(_WORDS, words | bare)))
        self._numbers.update(filter(str.isdecimal, named))
        self._whole |= named & words
        names = self._names_in_signed(signed - bare)
        names.update({name: (name,) for name in named & bare})
        self._inner.update({piece: names[token] for piece, token in tokens.items() if token in names})

    def _names_in_signed(self, tokens: Collection[str]) -> dict[str, tuple[str, ...]]:
        """The names in each of *tokens*, which have signs in them: it as a whole, or what is inside it."""
        names: dict[str, tuple[str, ...]] = {}
        for whole, path, line, number, other in _matches(_SIGNED, tokens):
            if other:
                names[other] = self._names_inside(other)
            elif len(line) > 2:
                names[whole] = (path, line)
                self._numbers.add(line)
            elif line:
                names[whole] = (path,)
            elif whole:
                names[whole] = (whole,)
            if number:
                self._numbers.add(number)
        return names

    def _names_inside(self, token: str) -> tuple[str, ...]:
        """The names and numbers inside *token*."""
        names: list[str] = []
        for name, number in _INSIDE.findall(token):
            stripped = name.rstrip(".") or number
            if len(stripped) > 2 and not is_meaningless(stripped):
                names.append(stripped)
                if number:
                    self._numbers.add(number)
        return tuple(names)


def _matches(pattern: re.Pattern[str], pieces: Iterable[str]) -> list[Any]:
    """What *pattern* finds in those of *pieces* that are neither too short nor too long for a name.

    Some at a time: no other thread runs while a pattern is searched for.
    """
    lines = [piece for piece in pieces if 2 < len(piece) <= LONGEST]
    matches: list[Any] = []
    for start in range(0, len(lines), SEARCHED):
        matches += pattern.findall("\n".join([*lines[start : start + SEARCHED], ""]))
    return matches


def _dots_before(path: str, piece: str) -> str:
    """The dots of a relative path, or of a hidden folder, which were taken for marks before the *path* in *piece*."""
    before = piece[: piece.index(path)]
    dots = before[len(before.rstrip(".")) :]
    if dots == "." or (dots == ".." and path[0] == "/"):
        return dots
    return ""
