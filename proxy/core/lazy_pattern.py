"""Regular expressions that are compiled at their first use: compiling all of them at start-up would take 40 ms.

``UNSPACED`` is a range of letters for such patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, cast

UNSPACED: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Letters of scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese.

https://www.unicode.org/charts/
"""

_GROUP_NAME = re.compile(r"\(\?P<\w+>")
_STANDS_ALONE = re.compile(r"\\(?:[1-9]|\(\?P<)|\(\?(?:P=|\(|[aiLmsux]+\))")
"""Found in a pattern that cannot be joined with others: it refers to its own groups, or has flags for all of it."""


class _LazyPattern:
    """Stands in for a ``re.Pattern``: any attribute but ``pattern`` compiles it first."""

    def __init__(self, pattern: str, flags: int) -> None:
        self.pattern = pattern
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        """Return the attribute *name* of the compiled pattern, and set it here so that it is found directly next time.

        ``re`` caches what it compiled last: https://docs.python.org/3/library/re.html#re.compile
        """
        value = getattr(re.compile(self.pattern, self._flags), name)
        setattr(self, name, value)
        return value


def lazy_pattern(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Return *pattern*, compiled with *flags* when it is used."""
    return cast("re.Pattern[str]", _LazyPattern(pattern, flags))


def any_pattern(patterns: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern, without groups, that matches where one of *patterns* does; None if these cannot be joined.

    If hardly any text matches one of many patterns, this saves nine tenths of the time.
    """
    parts = list(patterns)
    if not parts or any(map(_STANDS_ALONE.search, parts)):
        return None
    return lazy_pattern("|".join([f"(?:{_GROUP_NAME.sub('(?:', part)})" for part in parts]))
