"""Finds names that only language shows: dates in words, people and places; and tells what only looks like a name.

A digest reads them in what users and models write. Names of people and places count in a conversation without calls
only: where a model works with tools, capitals inside a sentence mostly begin a heading or a product's name.
"""

from __future__ import annotations

import re
from itertools import islice

_MONTH = "(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)(?:uary|ruary|ch|il|ust|tember|ober|ember)?"
_DATE = re.compile(
    rf"\b\d{{1,2}}(?:st|nd|rd|th)?\.? (?:of )?{_MONTH}\b(?:,? \d{{4}}\b)?"
    rf"|\b{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}}\b)?"
    r"|(?:\d{4}年)?\d{1,2}月\d{1,2}[日号號]|(?:\d{4}년 ?)?\d{1,2}월 ?\d{1,2}일"
)
"""A date in words, with its day; in English, Chinese, Japanese or Korean."""

_CALENDAR = re.compile(
    "January|February|March|April|May|June|July|August|September|October|November|December"
    "|Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
)
_CAPITALISED = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{2,}(?: [A-Z][a-z]+){0,2}\b")
"""Words with a capital inside a sentence: in most languages with capitals these are names."""

_NO_PART = "是去在到有叫和找订住从或的了吗呢吧啊我你他她它们这那个就想要请帮给把被让跟与及附近周边推荐家"
_WITHOUT_SPACES = re.compile(
    rf"(?:(?![{_NO_PART}])[\u4e00-\u9fff]){{1,9}}"
    r"(?:酒店|宾馆|饭店|餐馆|餐厅|烤鸭店|小吃店|公园|大学|医院|博物馆|美术馆|车站|机场|大厦|广场|胡同|大街|路|街|寺|宫|坛|村"
    r"|駅|県|神社|公園|空港|さん|様|先生)"
    r"|[ァ-ヴー]{3,12}|[가-힣]{2,6}(?:씨|님|역|호텔|식당|공원|대학교|병원|공항)"
)
"""Names of places and people that their endings show, and words in katakana, which are mostly names or loans."""

_ABBREVIATIONS = frozenset(("e.g", "i.e", "E.g", "I.e", "a.k.a", "and/or", "y/n", "Y/n", "n/a", "N/A"))
"""Abbreviations that look like names."""

_END_TAG = re.compile(
    "/(?:html|head|body|div|span|p|a|b|i|li|ul|ol|td|tr|th|table|tbody|thead|script|style|h[1-6]|form|code|pre)"
)
"""The rest of HTML end tags between their brackets."""

STANDARD = re.compile(
    r"(?:os|sys|re|io|json|math|time|datetime|random|logging|subprocess|pathlib|shutil|collections|itertools|functools"
    r"|typing|asyncio|threading|unittest|argparse|tempfile|hashlib|uuid|copy|string|struct|socket|urllib|abc|enum|csv"
    r"|dataclasses|contextlib|traceback|inspect|pickle|base64|glob|textwrap|warnings|signal|queue|statistics"
    r"|console|process|window|document|Math|JSON|Object|Array|Promise|Number|String|Date|Buffer|Symbol|Reflect"
    r"|fmt|strings|errors|strconv|bytes|bufio|filepath|http|sync|sort|System|Enum|Map|List|Keyword|Logger|IO|File|Path)"
    r"(?:\.(?!(?:py|pyi|js|ts|tsx|jsx|mjs|go|rs|ex|exs|md|txt|ya?ml|toml|json|lock|sh|html|css|csv|xml|cfg|ini)\Z)"
    r"[A-Za-z_]\w*)+"
)
"""A name in the standard library of a common language: any model knows it. A file may be called alike."""

_NUMBERED_LINE = re.compile(r"^[ ]{0,8}(\d{1,7})(?:→|\t)", re.MULTILINE)
"""The number that a listing puts before each line of a file. It names nothing that is needed later."""


def dates(text: str) -> list[str]:
    """The dates in *text* that are written with a word for the month."""
    return [match.group() for match in _DATE.finditer(text)]


def proper_names(text: str) -> list[str]:
    """Names of people and places in *text*, as far as their letters or their endings show them."""
    names = [name for name in _CAPITALISED.findall(text) if not _CALENDAR.fullmatch(name)]
    if not text.isascii():
        names += _WITHOUT_SPACES.findall(text)
    return names


def is_meaningless(name: str) -> bool:
    """True for escapes, abbreviations and HTML tags that look like names."""
    return name.startswith("\\") or name in _ABBREVIATIONS or _END_TAG.fullmatch(name) is not None


def without_line_numbers(text: str) -> str:
    """A tool's *text*; if it is a listing of numbered lines, without their numbers."""
    if "→" not in text and "\t" not in text:
        return text
    numbers = [int(match.group(1)) for match in islice(_NUMBERED_LINE.finditer(text), 2)]
    if len(numbers) < 2 or numbers[1] != numbers[0] + 1:
        return text
    return _NUMBERED_LINE.sub("", text)
