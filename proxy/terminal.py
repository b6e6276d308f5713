"""Lines for people, folded to the width of their terminal."""

from __future__ import annotations

import shutil
import textwrap
from typing import Final, TextIO

_NARROWEST: Final = 40
"""Columns of the narrowest terminal that lines are folded for; a narrower one folds them itself."""


def fold_lines(text: str, stream: TextIO, indent: int = 4) -> str:
    """Return *text* with its long lines folded if *stream* is a terminal.

    Only spaces are folded at, so paths and addresses stay whole. What follows a fold has *indent* more spaces than its
    line.
    """
    if not stream.isatty():
        return text
    width = max(_NARROWEST, shutil.get_terminal_size().columns)
    return "\n".join(_folded(line, width, indent) for line in text.split("\n"))


def _folded(line: str, width: int, indent: int) -> str:
    if len(line) <= width:
        return line
    margin = len(line) - len(line.lstrip(" ")) + indent
    return textwrap.fill(line, width, subsequent_indent=" " * margin, break_long_words=False, break_on_hyphens=False)
