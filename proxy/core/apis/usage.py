"""The one reader of ``usage`` for all APIs: in a decoded object, or in the bytes of an answer as they arrive.

``UsageTap`` searches the stream for the key and parses only the object behind it, without cutting events:

    state                      chunk (with what is buffered)              next
    searching, 6 bytes kept    no key                                     searching
    searching                  a key with a whole object                  take its figures; search on behind it
    searching                  a key whose object has not ended           buffering from the key
    buffering                  fewer than ``_enough`` bytes               buffering
    buffering                  ``_enough``: twice the bytes of before     search them again
    buffering                  no end within ``_LONGEST`` bytes           skip them; searching

Members of the object: https://platform.openai.com/docs/api-reference/chat/object,
https://platform.openai.com/docs/api-reference/responses/object, https://docs.anthropic.com/en/api/messages and, as
``usageMetadata``, https://ai.google.dev/api/generate-content#UsageMetadata
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from proxy.core.apis.json_steps import UNREADABLE
from proxy.core.content_encoding import ContentDecoder
from proxy.core.report import NO_USAGE, Usage

# Inside a JSON string the quotes are escaped, so these bytes are always a key (or a string of exactly that word).
_KEY: Final = b'"usage'
"""The common beginning of both keys, ``usage`` and ``usageMetadata``."""

_TAIL: Final = len(_KEY) - 1
"""Bytes at the end of a chunk that may be the beginning of a key."""

_LONGEST: Final = 16 * 2**10
"""Bytes of the longest usage object that is read; providers send a few hundred."""

_INFLATED: Final = 32 * 2**20
"""Bytes of a compressed answer that are decoded: a small one could inflate to any size."""


def _object(depth: int) -> bytes:
    """Return a pattern of a JSON object of at most *depth* levels. It never backtracks: its cost is linear."""
    inner = b""
    if depth > 1:
        inner = rb"|" + _object(depth - 1)
    return rb'\{(?:[^{}"]++|"(?:[^"\\]++|\\.)*+"' + inner + rb")*+\}"


_USAGE: Final = re.compile(_KEY + rb'(Metadata)?"\s*+:\s*+(' + _object(6) + rb")", re.DOTALL)
_BEGUN: Final = re.compile(_KEY + rb'(?:[a-zA-Z]{0,8}\Z|(?:Metadata)?"\s*+(?:\Z|:\s*+(?:\Z|\{)))')
"""The key, followed by the beginning of an object or by bytes that may become one."""

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
        output = self.output_tokens
        if output is None:
            output = self.completion_tokens
        return Usage(self.total_input(), output, self.cached())

    def total_input(self) -> int | None:
        # Anthropic's input_tokens exclude cached input, all others' include it. Gateways that translate its figures to
        # OpenAI's shape have already added them to prompt_tokens.
        # https://platform.claude.com/docs/en/build-with-claude/prompt-caching
        if self.input_tokens is None:
            return self.prompt_tokens
        if self.prompt_tokens is not None:
            return max(self.prompt_tokens, self.input_tokens)
        return self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)

    def cached(self) -> int | None:
        for details in (self.prompt_tokens_details, self.input_tokens_details):
            if details is not None and details.cached_tokens is not None:
                return details.cached_tokens
        if self.cache_read_input_tokens is not None:
            return self.cache_read_input_tokens
        return self.prompt_cache_hit_tokens


class _Metadata(msgspec.Struct, rename="camel"):
    prompt_token_count: _Tokens | None = None
    candidates_token_count: _Tokens | None = None
    thoughts_token_count: _Tokens | None = None
    cached_content_token_count: _Tokens | None = None

    def usage(self) -> Usage:
        output = self.candidates_token_count
        if self.thoughts_token_count is not None:
            output = (output or 0) + self.thoughts_token_count
        return Usage(self.prompt_token_count, output, self.cached_content_token_count)


_Decoder = msgspec.json.Decoder[_Figures] | msgspec.json.Decoder[_Metadata]
_DECODERS: Final[Mapping[bytes | None, _Decoder]] = {
    None: msgspec.json.Decoder(_Figures),
    b"Metadata": msgspec.json.Decoder(_Metadata),
}
"""Decoders of a usage object by the rest of its key."""


def read_usage(value: object) -> Usage:
    """Return the usage in a decoded object: all input, cached or not, the output, and the cached part of the input.

    It is empty if *value* is no object or a member cannot be a number of tokens.
    """
    try:
        return msgspec.convert(value, _Figures).usage()
    except msgspec.ValidationError:
        return NO_USAGE


def read_usage_metadata(value: object) -> Usage:
    """Return the usage in Gemini's ``usageMetadata``, as ``read_usage``; thoughts are output, too."""
    try:
        return msgspec.convert(value, _Metadata).usage()
    except msgspec.ValidationError:
        return NO_USAGE


class UsageTap:
    """Reads usage from the chunks of an answer; ``usage`` is the one reported so far.

    Each byte is read a fixed number of times at most, whatever the answer is and however it is cut. An object without
    its end is read again only when it is twice as long, and when ``usage`` is called for; one without an end within its
    first 16 KiB is skipped.
    """

    __slots__ = ("_cached", "_enough", "_input", "_output", "_pending", "_plain")

    def __init__(self, encoding: str = "") -> None:
        self._pending = bytearray()
        self._enough = 0
        self._input: int | None = None
        self._output: int | None = None
        self._cached: int | None = None
        self._plain: ContentDecoder | None = None
        if encoding not in ("", "identity"):
            self._plain = ContentDecoder(encoding, _INFLATED)

    @property
    def usage(self) -> Usage:
        """The newest figures of each kind."""
        if self._enough:
            self._scan(bytes(self._pending))
        return Usage(self._input, self._output, self._cached)

    def feed(self, chunk: bytes) -> None:
        """Read *chunk*; never raises."""
        if self._plain is not None:
            chunk = self._plain.feed(chunk)
        if self._enough:
            self._pending += chunk
            if len(self._pending) >= self._enough:
                self._scan(bytes(self._pending))
            return
        before = bytes(self._pending)
        # ``find`` and not ``in``: for bytes ``in`` first tries an integer, which raises and drops an exception.
        if chunk.find(_KEY) >= 0 or (before and (before + chunk[:_TAIL]).find(_KEY) >= 0):
            self._scan(before + chunk)
            return
        if len(chunk) < _TAIL:
            chunk = before + chunk
        self._pending[:] = chunk[-_TAIL:]

    def _scan(self, data: bytes) -> None:
        """Read every usage in *data*, and buffer an object that has not ended."""
        at, self._enough = 0, 0
        while (key := data.find(_KEY, at)) >= 0:
            limit = key + _LONGEST
            if match := _USAGE.match(data, key, limit):
                self._read(_DECODERS[match[1]], match[2])
                at = match.end()
            elif not _BEGUN.match(data, key, limit):
                at = key + len(_KEY)
            elif len(data) >= limit:
                at = limit
            else:
                self._pending[:] = data[key:]
                self._enough = min(_LONGEST, 2 * len(self._pending))
                return
        self._pending[:] = data[max(at, len(data) - _TAIL) :]

    def _read(self, decoder: _Decoder, text: bytes) -> None:
        """Take the figures of one usage object; figures that it lacks stay as they were."""
        try:
            figures = decoder.decode(text)
        except UNREADABLE:
            return
        usage = figures.usage()
        if usage.input_tokens is not None:
            self._input = usage.input_tokens
        if usage.output_tokens is not None:
            self._output = usage.output_tokens
        if usage.cached_tokens is not None:
            self._cached = usage.cached_tokens
