"""Decodes a content-encoding piece by piece, and never makes more bytes of it than a limit.

The codings are those of https://www.rfc-editor.org/rfc/rfc9110#section-8.4.1, Brotli and Zstandard.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import brotli  # type: ignore[import-untyped]
import zstandard

_PIECE = 64
"""Bytes that a decoder without a limit of its own is given at a time, so that what they swell to stays bounded."""


class ContentDecoder:
    """Decodes bytes as they come. What cannot be decoded is given back as it is."""

    def __init__(self, encoding: str, most: int) -> None:
        """*encoding* is the content-encoding's value; at most *most* plain bytes are made, the rest is dropped."""
        self._most = most
        self._made = 0
        self._decode = _decoder(encoding.strip().lower())
        self._begun = False

    @property
    def is_full(self) -> bool:
        """True if the limit is reached: what is fed now is dropped."""
        return self._made >= self._most

    def feed(self, data: bytes) -> bytes:
        """The decoded bytes of *data*, as far as the limit allows."""
        room = self._most - self._made
        if room <= 0 or not data:
            return b""
        made = data[:room] if self._decode is None else self._decoded(self._decode, data, room)
        self._made += len(made)
        return made[:room]

    def _decoded(self, decode: Callable[[bytes, int], bytes], data: bytes, room: int) -> bytes:
        try:
            made = decode(data, room)
        except (zlib.error, brotli.error, zstandard.ZstdError):
            if self._begun:
                self._most = self._made
                return b""
            self._decode = None
            return data[:room]
        self._begun = self._begun or bool(made)
        return made


def decode_content(body: bytes, encoding: str, most: int) -> bytes:
    """*body* without its content-encoding, at most *most* bytes of it; as it is if it cannot be decoded."""
    return ContentDecoder(encoding, most).feed(body)


def _decoder(encoding: str) -> Callable[[bytes, int], bytes] | None:
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _Inflate()
    if encoding == "br":
        return _Brotli()
    return _Zstandard() if encoding == "zstd" else None


class _Inflate:
    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        self._first = True

    def __call__(self, data: bytes, room: int) -> bytes:
        try:
            made = self._inflater.decompress(self._inflater.unconsumed_tail + data, room)
        except zlib.error:
            if not self._first:
                raise
            self._inflater = zlib.decompressobj(wbits=-zlib.MAX_WBITS)  # deflate without its header
            made = self._inflater.decompress(data, room)
        self._first = False
        return made


class _Brotli:
    def __init__(self) -> None:
        self._decoder = brotli.Decompressor()

    def __call__(self, data: bytes, room: int) -> bytes:
        made = self._decoder.process(data, output_buffer_limit=room)
        while len(made) < room and not self._decoder.can_accept_more_data() and not self._decoder.is_finished():
            more = self._decoder.process(b"", output_buffer_limit=room - len(made))
            if not more:
                break
            made += more
        return bytes(made)


class _Zstandard:
    def __init__(self) -> None:
        self._decoder = zstandard.ZstdDecompressor(max_window_size=2**23).decompressobj()

    def __call__(self, data: bytes, room: int) -> bytes:
        made = bytearray()
        for at in range(0, len(data), _PIECE):
            made += self._decoder.decompress(data[at : at + _PIECE])
            if len(made) >= room or self._decoder.eof:
                break
        return bytes(made)
