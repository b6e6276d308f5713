"""Notes the token usage an upstream reports while the bytes of its answer pass by, whatever the API or chunking."""

from __future__ import annotations

import zlib
from typing import Annotated, Any, Final

import msgspec

from proxy.core.report import Usage

# Inside a JSON string the quotes are escaped, so these bytes are always a key (or a string of exactly that word).
_KEY: Final = b'"usage"'
_TAIL: Final = len(_KEY) - 1
_LONGEST: Final = 16 * 2**10
_BRACES: Final = 256
_SPACE: Final = b" \t\r\n"
_INFLATED: Final = 4 * 2**20
_MORE: Final = -1

_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Details(msgspec.Struct):
    cached_tokens: _Tokens | None = None


class _Figures(msgspec.Struct):
    input_tokens: _Tokens | None = None
    prompt_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    cache_read_input_tokens: _Tokens | None = None
    cache_creation_input_tokens: _Tokens | None = None
    prompt_cache_hit_tokens: _Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None

    def total_input(self) -> int | None:
        # Anthropic counts cached input beside input_tokens, everybody else inside; gateways that give its figures in
        # OpenAI's shape have added them to prompt_tokens already.
        if self.input_tokens is None:
            return self.prompt_tokens
        own = self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return own if self.prompt_tokens is None else max(self.prompt_tokens, self.input_tokens)

    def cached(self) -> int | None:
        for details in (self.prompt_tokens_details, self.input_tokens_details):
            if details is not None and details.cached_tokens is not None:
                return details.cached_tokens
        read = self.cache_read_input_tokens
        return self.prompt_cache_hit_tokens if read is None else read


_DECODER: Final = msgspec.json.Decoder(_Figures)


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
            end, figures = _object_after(data, found)
            if end == _MORE:
                self._pending = data[found:]
                return
            if figures is not None:
                self._note(figures)
            at = end or found + len(_KEY)
        self._pending = data[max(at, len(data) - _TAIL) :]

    def _note(self, figures: _Figures) -> None:
        total = figures.total_input()
        output = figures.output_tokens if figures.output_tokens is not None else figures.completion_tokens
        cached = figures.cached()
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


def _object_after(data: bytes, key: int) -> tuple[int, _Figures | None]:
    """The end and content of the object after the key; end 0 when none follows, -1 when more bytes must tell."""
    limit = key + _LONGEST
    at = _skip(data, key + len(_KEY))
    if at < len(data) and data[at] == 0x3A:
        at = _skip(data, at + 1)
        if at < len(data) and data[at] == 0x7B:
            return _parse(data, at, limit)
    elif at < len(data):
        return 0, None
    if at < len(data) or at >= limit:
        return 0, None
    return _MORE, None


def _skip(data: bytes, at: int) -> int:
    while at < len(data) and data[at] in _SPACE:
        at += 1
    return at


def _parse(data: bytes, start: int, limit: int) -> tuple[int, _Figures | None]:
    """The shortest JSON object from *start* on, if it ends before *limit*."""
    end = start
    for _ in range(_BRACES):
        end = data.find(b"}", end, limit) + 1
        if not end:
            return (0 if len(data) >= limit else _MORE), None
        text = data[start:end]
        # Braces inside strings may unbalance the count; then the parser decides.
        if text.count(b"{") <= text.count(b"}"):
            try:
                return end, _DECODER.decode(text)
            except msgspec.ValidationError:
                return end, None
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
    return 0, None
