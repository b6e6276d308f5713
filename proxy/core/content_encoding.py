"""Decodes a content-encoding piece by piece, up to a limit of decoded bytes.

The codings are those of https://www.rfc-editor.org/rfc/rfc9110#section-8.4.1, Brotli and Zstandard.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import brotli  # type: ignore[import-untyped]
import zstandard

ZSTANDARD_PIECE = 64
"""Bytes that Zstandard decodes at a time. Its decoder takes no limit, so this bounds what one call can return."""

ZSTANDARD_WINDOW = 2**23
"""Bytes of the largest window that an HTTP sender may use: https://www.rfc-editor.org/rfc/rfc9659"""


class ContentDecoder:
    """Decodes bytes as they arrive. Bytes that cannot be decoded are returned as they are."""

    def __init__(self, encoding: str, most: int) -> None:
        """Decode *encoding*, the header's value, into at most *most* bytes; the rest is dropped."""
        self._most = most
        self._done = 0
        self._decode = _decoder(encoding.strip().lower())
        self._begun = False

    @property
    def is_full(self) -> bool:
        """True if the limit is reached: further bytes are dropped."""
        return self._done >= self._most

    def feed(self, data: bytes) -> bytes:
        """Return the decoded bytes of *data*, up to the limit."""
        room = self._most - self._done
        if room <= 0 or not data:
            return b""
        decoded = data[:room]
        if self._decode is not None:
            decoded = self._decoded(self._decode, data, room)
        self._done += len(decoded)
        return decoded[:room]

    def _decoded(self, decode: Callable[[bytes, int], bytes], data: bytes, room: int) -> bytes:
        """Return the decoded bytes; *data* itself if the body turns out not to be encoded at all."""
        try:
            decoded = decode(data, room)
        except (zlib.error, brotli.error, zstandard.ZstdError):
            if self._begun:  # damaged half-way: end here, since raw bytes behind decoded ones would be garbage
                self._most = self._done
                return b""
            self._decode = None
            return data[:room]
        self._begun = self._begun or bool(decoded)
        return decoded


def decode_content(body: bytes, encoding: str, most: int) -> bytes:
    """Return *body* without its content-encoding, at most *most* bytes; as it is if it cannot be decoded."""
    return ContentDecoder(encoding, most).feed(body)


def _decoder(encoding: str) -> Callable[[bytes, int], bytes] | None:
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _Inflate()
    if encoding == "br":
        return _Brotli()
    if encoding == "zstd":
        return _Zstandard()
    return None


class _Inflate:
    """Decodes gzip and deflate."""

    def __init__(self) -> None:
        self._inflater = _inflater()
        self._first = True

    def __call__(self, data: bytes, room: int) -> bytes:
        try:
            decoded = self._members(data, room)
        except zlib.error:
            if not self._first:
                raise
            # Some senders of deflate omit its header: https://www.rfc-editor.org/rfc/rfc9110#section-8.4.1.2
            self._inflater = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
            decoded = self._inflater.decompress(data, room)
        self._first = False
        return decoded

    def _members(self, data: bytes, room: int) -> bytes:
        """Return the decoded bytes of *data*: one member, or several in a row.

        https://www.rfc-editor.org/rfc/rfc1952#section-2.2
        """
        decoded, left = b"", self._inflater.unconsumed_tail + data
        while left and len(decoded) < room:
            if self._inflater.eof:
                self._inflater = _inflater()
            try:
                decoded += self._inflater.decompress(left, room - len(decoded))
            except zlib.error:
                if not decoded:
                    raise
                break  # what stands behind a member is no further one
            left = self._inflater.unused_data
        return decoded


def _inflater() -> zlib._Decompress:
    # 32 detects the header of gzip or zlib: https://docs.python.org/3/library/zlib.html#zlib.decompress
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)


class _Brotli:
    def __init__(self) -> None:
        self._decoder = brotli.Decompressor()

    def __call__(self, data: bytes, room: int) -> bytes:
        decoded = self._decoder.process(data, output_buffer_limit=room)
        while len(decoded) < room and not self._decoder.can_accept_more_data() and not self._decoder.is_finished():
            more = self._decoder.process(b"", output_buffer_limit=room - len(decoded))
            if not more:
                break
            decoded += more
        return bytes(decoded)


class _Zstandard:
    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTANDARD_WINDOW)
        self._decoder = self._decompressor.decompressobj()

    def __call__(self, data: bytes, room: int) -> bytes:
        decoded = bytearray()
        for at in range(0, len(data), ZSTANDARD_PIECE):
            try:
                self._add_frames(decoded, data[at : at + ZSTANDARD_PIECE])
            except zstandard.ZstdError:
                if not decoded:
                    raise
                break  # what stands behind a frame is no further one
            if len(decoded) >= room:
                break
        return bytes(decoded)

    def _add_frames(self, decoded: bytearray, data: bytes) -> None:
        """Add the decoded bytes of *data* to *decoded*: a part of a frame, or several frames in a row.

        https://www.rfc-editor.org/rfc/rfc8878#section-3.1
        """
        while data:
            if self._decoder.eof:
                self._decoder = self._decompressor.decompressobj()
            decoded += self._decoder.decompress(data)
            data = self._decoder.unused_data
