"""Log lines for people: a finished request as one line of figures, everything else as structlog shows it.

A request reads as status, API, model and outcome, then its tokens and its time::

    200 chat gpt-4o compacted fold 17,076 → 1,510 of 4,096 (37 %) 285 ms

If that is wider than the terminal, the least important parts are left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from proxy.core.advice import NEARLY_FULL

RESET: Final = "\x1b[0m"
BOLD: Final = "\x1b[1m"
DIM: Final = "\x1b[2m"
RED: Final = "\x1b[31m"
GREEN: Final = "\x1b[32m"
YELLOW: Final = "\x1b[33m"
CYAN: Final = "\x1b[36m"

OUTCOME_COLORS: Final = {"verbatim": GREEN, "compacted": CYAN, "degraded": YELLOW, "refused": RED}

SHORTEST_NAME: Final = 12
"""Characters of a model's name that are left on a narrow terminal."""

NO_WIDTH: Final = 0
"""The width of a file or pipe: nothing is left out."""


class Part(NamedTuple):
    """A piece of a request's line. Pieces with the highest ``rank`` are left out first, those of rank 0 never."""

    text: str
    color: str = ""
    rank: int = 0


def uses_colors(fd: int) -> bool:
    """True if *fd* is a terminal whose user wants colours: https://no-color.org."""
    return os.isatty(fd) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_width(fd: int) -> int:
    """Return the columns of the terminal *fd*; ``NO_WIDTH`` if it is none."""
    try:
        return os.get_terminal_size(fd).columns
    except OSError:
        return NO_WIDTH


class Console:
    """Renders lines for the terminal *fd*, in *colors* or plain."""

    def __init__(self, fd: int, *, colors: bool) -> None:
        self._fd = fd
        self._colors = colors
        self._render = structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=24)

    def __call__(self, line: MutableMapping[str, Any] | msgspec.Struct) -> bytes:
        """Return *line* as UTF-8, without a line end. A structure is the line of a finished request."""
        if isinstance(line, msgspec.Struct):
            text = request_line(line, terminal_width(self._fd), colors=self._colors)
        else:
            fields = {name: value for name, value in line.items() if value not in (None, "", [], {}, False)}
            text = str(self._render(None, "", fields))
        return text.encode("utf-8", "replace")


def request_line(request: Any, width: int, *, colors: bool) -> str:
    """Return the line of a finished *request*, which has the keys of the log as attributes, in *width* columns."""
    parts = fitting(list(request_parts(request)), width)
    texts = [part.text for part in parts]
    if colors:
        texts = [_colored(part) for part in parts]
    return " ".join(texts)


def _colored(part: Part) -> str:
    if not part.color:
        return part.text
    return f"{part.color}{part.text}{RESET}"


def request_parts(request: Any) -> Iterator[Part]:
    """Yield the pieces of the line of *request*, from left to right."""
    yield Part(str(request.status), _status_color(request.status))
    if request.api:
        yield Part(request.api, DIM, 5)
    if request.model:
        yield Part(request.model, BOLD)
    if request.fallback:
        yield Part(f"by {request.fallback}", YELLOW, 1)
    yield Part(request.outcome, OUTCOME_COLORS[request.outcome])
    if request.reason:
        yield Part(f"({request.reason})", DIM, 3)
    if request.stages:
        yield Part(",".join(request.stages), CYAN, 4)
    if tokens := _tokens(request):
        yield Part(tokens)
    if request.window and request.tokens_after is not None:
        yield _fill(request)
    if request.retries:
        yield Part(f"sent {request.retries + 1} times", YELLOW, 1)
    yield Part(_duration(request.duration_ms), DIM, 2)


def _status_color(status: int) -> str:
    if status >= 500:
        return RED
    if status >= 400:
        return YELLOW
    return GREEN


def _tokens(request: Any) -> str:
    """Return the tokens before and after; empty if they are not known."""
    before, after = request.tokens_before, request.tokens_after
    if after is None:
        return ""
    text = f"{after:,}"
    if request.bounded:
        text = f"<{text}"
    if before not in (None, after):
        text = f"{before:,} → {text}"
    if not request.window:
        text = f"{text} tokens"
    return text


def _fill(request: Any) -> Part:
    """Return the window and the share of it that the view takes."""
    share = request.tokens_after / request.window
    percent = f"{max(1, round(100 * share))} %"
    if request.bounded:
        percent = f"<{math.ceil(100 * share)} %"  # a bound never rounds down
    color = ""
    if share >= NEARLY_FULL and not request.bounded:
        color = YELLOW
    return Part(f"of {request.window:,} ({percent})", color)


def _duration(milliseconds: float) -> str:
    if milliseconds < 10_000:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds / 1000:.1f} s"


def fitting(parts: list[Part], width: int) -> list[Part]:
    """Return the *parts* that fit into *width* columns side by side; a long model's name is shortened last."""
    if width == NO_WIDTH:
        return parts
    while _columns(parts) > width and any(part.rank for part in parts):
        parts.remove(max(parts, key=lambda part: part.rank))
    excess = _columns(parts) - width
    for index, part in enumerate(parts):
        if excess > 0 and part.color == BOLD:  # the model's name
            length = max(SHORTEST_NAME, len(part.text) - excess)
            parts[index] = part._replace(text=shortened(part.text, length))
    return parts


def shortened(text: str, length: int) -> str:
    """Return *text* in at most *length* characters, with an ellipsis in its middle if it is longer."""
    if len(text) <= length:
        return text
    head = length // 2
    return f"{text[:head]}…{text[len(text) - (length - head - 1) :]}"


def _columns(parts: list[Part]) -> int:
    return sum(len(part.text) + 1 for part in parts) - 1
