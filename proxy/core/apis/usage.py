"""The one reader of ``usage``, whatever the API: of a decoded object, and of an answer's bytes as they pass by.

https://platform.openai.com/docs/api-reference/chat/object, https://platform.openai.com/docs/api-reference/responses/object
and https://docs.anthropic.com/en/api/messages say what stands in it.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

from proxy.core.content_encoding import ContentDecoder
from proxy.core.report import NO_USAGE, Usage

# Inside a JSON string the quotes are escaped, so these bytes are always a key (or a string of exactly that word).
_KEY: Final = b'"usage"'
_TAIL: Final = len(_KEY) - 1
_LONGEST: Final = 16 * 2**10
_INFLATED: Final = 32 * 2**20
"""Bytes of a compressed answer that are read, once inflated."""


def _object(depth: int) -> bytes:
    """The pattern of a JSON object of at most *depth* levels. Nothing in it backtracks: its cost is its length."""
    inner = rb"|" + _object(depth - 1) if depth > 1 else b""
    return rb'\{(?:[^{}"]++|"(?:[^"\\]++|\\.)*+"' + inner + rb")*+\}"


_USAGE: Final = re.compile(_KEY + rb"\s*+:\s*+(" + _object(6) + rb")", re.DOTALL)
_BEGUN: Final = re.compile(_KEY + rb"\s*+(?:\Z|:\s*+(?:\Z|\{))")
"""An object after the key, or what may become one."""

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

    def usage(self) -> Usage:
        output = self.completion_tokens if self.output_tokens is None else self.output_tokens
        return Usage(self.total_input(), output, self.cached())

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


def usage_of(value: object) -> Usage:
    """Return the usage in a decoded object: all of its input, cached or not, its output, and what was cached.

    It is empty if the value is no object or contains what cannot be a number of tokens.
    """
    try:
        return msgspec.convert(value, _Figures).usage()
    except msgspec.ValidationError:
        return NO_USAGE


class UsageTap:
    """Feed it every chunk of an answer; ``usage`` holds what was reported so far.

    Each byte is looked at a fixed number of times at most, whatever the answer is and however it is cut: an object
    without its end is tried again only once it is twice as long, and when the figures are read; one that
    has no end within its first 16 KiB is passed over.
    """

    __slots__ = ("_cached", "_enough", "_input", "_output", "_pending", "_plain")

    def __init__(self, encoding: str = "") -> None:
        self._pending = bytearray()
        self._enough = 0
        self._input: int | None = None
        self._output: int | None = None
        self._cached: int | None = None
        self._plain = ContentDecoder(encoding, _INFLATED) if encoding not in ("", "identity") else None

    @property
    def usage(self) -> Usage:
        """The newest figures of each kind."""
        if self._enough:
            self._scan(bytes(self._pending))
        return Usage(self._input, self._output, self._cached)

    def feed(self, chunk: bytes) -> None:
        """Look at *chunk*; never raises."""
        if self._plain is not None:
            chunk = self._plain.feed(chunk)
        if self._enough:
            self._pending += chunk
            if len(self._pending) >= self._enough:
                self._scan(bytes(self._pending))
            return
        before = bytes(self._pending)
        if _KEY in chunk or _KEY in before + chunk[:_TAIL]:
            self._scan(before + chunk)
        else:
            self._pending[:] = chunk[-_TAIL:] if len(chunk) >= _TAIL else (before + chunk)[-_TAIL:]

    def _scan(self, data: bytes) -> None:
        """Note every figure in *data*, and buffer the object that has not ended."""
        at, self._enough = 0, 0
        while (key := data.find(_KEY, at)) >= 0:
            limit = key + _LONGEST
            if found := _USAGE.match(data, key, limit):
                self._note(found[1])
                at = found.end()
            elif not _BEGUN.match(data, key, limit):
                at = key + len(_KEY)
            elif len(data) >= limit:
                at = limit
            else:
                self._pending[:] = data[key:]
                self._enough = min(_LONGEST, 2 * len(self._pending))
                return
        self._pending[:] = data[max(at, len(data) - _TAIL) :]

    def _note(self, text: bytes) -> None:
        try:
            figures = _DECODER.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        usage = figures.usage()
        self._input = self._input if usage.input_tokens is None else usage.input_tokens
        self._output = self._output if usage.output_tokens is None else usage.output_tokens
        self._cached = self._cached if usage.cached_tokens is None else usage.cached_tokens
