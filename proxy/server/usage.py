"""Notes the token usage an upstream reports while the bytes of its answer pass by, whatever the API or chunking."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

from proxy.core.report import Usage

# Inside a JSON string the quotes are escaped, so these bytes are always a key (or a string of exactly that word).
_KEY: Final = b'"usage"'
_TAIL: Final = len(_KEY) - 1
_LONGEST: Final = 16 * 2**10
_SPACE: Final = b" \t\r\n"
_INFLATED: Final = 4 * 2**20
_MORE: Final = -1


class UsageTap:
    """Feed it every chunk of an answer; ``usage`` holds what was reported so far."""

    __slots__ = ("_cached", "_inflate", "_input", "_output", "_pending")

    def __init__(self, encoding: str = "") -> None:
        self._pending = b""
        self._input: int | None = None
        self._output: int | None = None
        self._cached: int | None = None
        self._inflate = zlib.decompressobj(47) if encoding in ("gzip", "x-gzip", "deflate") else None

    @property
    def usage(self) -> Usage:
        """The newest figures of each kind."""
        return Usage(self._input, self._output, self._cached)

    def feed(self, chunk: bytes) -> None:
        """Look at *chunk*; never raises."""
        if self._inflate is not None:
            chunk = self._inflated(self._inflate, chunk)
        pending = self._pending
        if len(pending) <= _TAIL and _KEY not in chunk and _KEY not in pending + chunk[:_TAIL]:
            self._pending = chunk[-_TAIL:] if len(chunk) >= _TAIL else (pending + chunk)[-_TAIL:]
            return
        self._scan(pending + chunk if pending else chunk)

    def _scan(self, data: bytes) -> None:
        at = 0
        while (found := data.find(_KEY, at)) >= 0:
            end = _object_end(data, found)
            if end == _MORE:
                self._pending = data[found:]
                return
            if end:
                self._note(data[data.index(b"{", found) : end])
            at = end or found + len(_KEY)
        self._pending = data[max(at, len(data) - _TAIL) :]

    def _note(self, text: bytes) -> None:
        try:
            figures = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(figures, dict):
            return
        total = _input(figures)
        output = _first(figures, "output_tokens", "completion_tokens")
        cached = _cached(figures)
        self._input = self._input if total is None else total
        self._output = self._output if output is None else output
        self._cached = self._cached if cached is None else cached

    def _inflated(self, inflate: Any, chunk: bytes) -> bytes:
        try:
            data: bytes = inflate.decompress(chunk, _INFLATED)
        except zlib.error:
            self._inflate = None
            return b""
        if inflate.unconsumed_tail:
            self._inflate = None
        return data


def _object_end(data: bytes, key: int) -> int:
    """The end of the object after the key; 0 when none follows, -1 when more bytes are needed to tell."""
    limit = key + _LONGEST
    at = _skip(data, key + len(_KEY))
    if at < len(data) and data[at] == 0x3A:
        at = _skip(data, at + 1)
        if at < len(data) and data[at] == 0x7B:
            return _balanced(data, at, limit)
    elif at < len(data):
        return 0
    if at < len(data) or at >= limit:
        return 0
    return _MORE


def _skip(data: bytes, at: int) -> int:
    while at < len(data) and data[at] in _SPACE:
        at += 1
    return at


def _balanced(data: bytes, at: int, limit: int) -> int:
    depth = 0
    quoted = False
    while at < len(data) and at < limit:
        byte = data[at]
        if quoted:
            if byte == 0x5C:
                at += 1
            elif byte == 0x22:
                quoted = False
        elif byte == 0x22:
            quoted = True
        elif byte == 0x7B:
            depth += 1
        elif byte == 0x7D:
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return 0 if at >= limit else _MORE


def _input(figures: Mapping[str, Any]) -> int | None:
    tokens = _first(figures, "input_tokens", "prompt_tokens")
    if tokens is None:
        return None
    # Anthropic counts cached input beside input_tokens, the others inside.
    extra = (_count(figures.get(name)) for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
    return tokens + sum(count or 0 for count in extra)


def _cached(figures: Mapping[str, Any]) -> int | None:
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = figures.get(name)
        if isinstance(details, dict) and (count := _count(details.get("cached_tokens"))) is not None:
            return count
    return _first(figures, "cache_read_input_tokens", "prompt_cache_hit_tokens")


def _first(figures: Mapping[str, Any], *names: str) -> int | None:
    return next((count for name in names if (count := _count(figures.get(name))) is not None), None)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None
