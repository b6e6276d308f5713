"""Regular expressions that are compiled at their first use: a start uses few of them, and compiling all takes 40 ms."""

from __future__ import annotations

import re
from typing import Any, cast


class _LazyPattern:
    """Stands for a pattern of ``re``, and has what it has. ``pattern`` is there without being compiled."""

    def __init__(self, pattern: str, flags: int) -> None:
        self.pattern = pattern
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        """Return the attribute *name* of the compiled pattern; from then on it is one of this object's own."""
        value = getattr(re.compile(self.pattern, self._flags), name)  # ``re`` keeps what it compiled last
        setattr(self, name, value)
        return value


def lazy_pattern(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Return *pattern*, compiled with *flags* when it is used."""
    return cast("re.Pattern[str]", _LazyPattern(pattern, flags))
