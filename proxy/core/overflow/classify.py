"""Is this answer a context overflow, of which kind, and what does it state. Parses before it matches."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from proxy.core.overflow.kinds import Kind, Overflow
from proxy.core.overflow.rules import CODES, FIELDS, VETO, WORDINGS

__all__ = ["STATUSES", "UNCORROBORATED", "Overflow", "classify", "classify_error"]

STATUSES = frozenset({400, 413, 422, 500})
"""Statuses an overflow comes with; pace (429) never means length."""

UNCORROBORATED = 0.6
"""A claim about a request we count at under this share of the stated limit is not believed without a decisive code."""

_LONGEST = 65_536
_DEEPEST = 6
_MOST_TEXTS = 200


def classify(status: int, body: bytes, counted: int | None = None, encoding: str = "") -> Overflow | None:
    """The overflow an error answer reports, or ``None`` when it reports something else.

    *counted* is our own count of the input in tokens, *encoding* the body's content-encoding. The status is that of
    the answer, or 400 for an error event inside a stream that began with 200.
    """
    if status not in STATUSES:
        return None
    found = classify_error(_parsed(_plain(body, encoding)))
    if found is None or found.decisive or counted is None or found.limit is None:
        return found
    claimed = (found.prompt or 0) + (found.output or 0)
    return found if claimed > found.limit or counted >= UNCORROBORATED * found.limit else None


def classify_error(error: Any) -> Overflow | None:
    """The overflow that a decoded error object, or a plain text, reports."""
    texts = [text[:_LONGEST] for text in islice(_texts(error), _MOST_TEXTS)]
    if any(VETO.search(text) for text in texts):
        return None
    stated = dict(_fields(error))
    code = next((CODES[text] for text in texts if text in CODES), None)
    for wording in WORDINGS:
        for text in texts:
            match = wording.pattern.search(text)
            if match:
                figures = {name: _number(value) for name, value in match.groupdict().items() if value}
                return _overflow(wording.kind, {**stated, **figures}, decisive=code is not None)
    return _overflow(code, stated, decisive=True) if code else None


def _overflow(kind: Kind, figures: Mapping[str, int], *, decisive: bool) -> Overflow:
    limit, prompt, output = figures.get("limit"), figures.get("prompt"), figures.get("output")
    if kind == "input_plus_output" and limit is not None and prompt is not None and prompt > limit:
        kind = "input"
    return Overflow(kind, limit, prompt, output, decisive)


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Every string in a decoded error, also those inside JSON that was put into a string."""
    if depth > _DEEPEST:
        return
    if isinstance(value, str):
        yield value
        if value.lstrip()[:1] in ("{", "["):
            try:
                yield from _texts(json.loads(value), depth + 1)
            except (ValueError, RecursionError):
                return
    elif isinstance(value, dict):
        for member in value.values():
            yield from _texts(member, depth + 1)
    elif isinstance(value, list):
        for member in value[:50]:
            yield from _texts(member, depth + 1)


def _fields(value: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    if isinstance(value, dict) and depth <= _DEEPEST:
        for key, member in value.items():
            if key in FIELDS and isinstance(member, int) and not isinstance(member, bool):
                yield FIELDS[key], member
            yield from _fields(member, depth + 1)


def _parsed(body: bytes) -> Any:
    text = body.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _plain(body: bytes, encoding: str) -> bytes:
    """The body without gzip or deflate; as it is where it cannot be inflated."""
    if encoding.strip().lower() not in ("gzip", "x-gzip", "deflate"):
        return body
    try:
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32).decompress(body, _LONGEST * 4)
    except zlib.error:
        return body


def _number(text: str) -> int:
    return int(text.replace(",", "").replace("_", ""))
