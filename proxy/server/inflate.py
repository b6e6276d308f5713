"""Decodes the content coding of a request's body, under limits of size and of ratio."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

import zstandard

from proxy.core.content_encoding import ZSTANDARD_PIECE, ZSTANDARD_WINDOW
from proxy.core.errors import BodyTooLarge, InflatesTooFar, InvalidRequest, UllageError
from proxy.server.config import Limits
from proxy.tasks import offload

_STEP: Final = 2**18
"""Bytes of output of one call at most: after each, the limits are checked."""

_PIECE: Final = 2**16
"""Bytes of input of one call at most, since each call copies the input that it leaves."""

_MOST_MEMBERS: Final = 4096
"""Members or frames of a compressed body, four times as many as ``bgzip`` writes for 64 MiB.

Each takes a decompressor of its own: https://www.rfc-editor.org/rfc/rfc1952#section-2.2.
"""

_ZSTANDARD: Final = "zstd"
"""The content coding in which Codex sends its requests: https://www.rfc-editor.org/rfc/rfc8878#section-7.2"""

_INVALID: Final = (zlib.error, zstandard.ZstdError)

_ANY_RATIO: Final = 2**16
"""Bytes that any compressed body may inflate to, whatever the ratio: small bodies often compress very well."""

_WINDOWS: Final = {"gzip": (31,), "x-gzip": (31,), "deflate": (15, -15)}
"""The ``wbits`` of each content coding, in the order in which they are tried.

Some clients send ``deflate`` without zlib's header: https://www.rfc-editor.org/rfc/rfc9110#section-8.4.1.2. The numbers
are those of https://docs.python.org/3/library/zlib.html#zlib.decompress.
"""


class UnsupportedEncoding(UllageError):
    """The request body is compressed in a way the proxy does not read."""

    status = 415
    code = "unsupported_content_encoding"
    kind = "invalid_request_error"


async def inflated(body: bytes, encoding: str, limits: Limits) -> bytes:
    """Return *body* without its content coding. A bomb costs no more memory than *limits* allow.

    Raises ``BodyTooLarge`` above ``limits.body`` and ``InflatesTooFar`` above ``limits.inflation`` times its size.
    """
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding != _ZSTANDARD and coding not in _WINDOWS:
        raise UnsupportedEncoding(
            f"Request bodies in content-encoding {coding[:40]!r} are not read; send gzip, deflate, zstd or none."
        )
    # The time depends on the output, so the largest possible output decides whether this runs on a thread.
    return await offload(min(limits.body, len(body) * limits.inflation), _inflate, body, coding, limits)


def _inflate(body: bytes, coding: str, limits: Limits) -> bytes:
    error: Exception | None = None
    for steps in _ways(body, coding):
        try:
            return _joined(steps, len(body), limits)
        except _INVALID as invalid:
            error = error or invalid
    raise InvalidRequest(f"The request body is not valid {coding}.") from error


def _ways(body: bytes, coding: str) -> Iterator[Iterator[bytes]]:
    """Yield the steps of each way to read *body* in *coding*, in the order in which they are tried."""
    if coding == _ZSTANDARD:
        yield _frames(body)
    for window in _WINDOWS.get(coding, ()):
        yield _steps(body, window)


def _joined(steps: Iterator[bytes], sent: int, limits: Limits) -> bytes:
    """Return the output of *steps*, of a body of *sent* bytes, if it is not too large."""
    parts: list[bytes] = []
    size = 0
    most = max(limits.inflation * sent, _ANY_RATIO)
    for part in steps:
        size += len(part)
        _refuse_too_large(size, most, limits)
        parts.append(part)
    return b"".join(parts)


def _frames(body: bytes) -> Iterator[bytes]:
    """Yield the output of each piece of *body*, which is one frame of Zstandard or several in a row."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTANDARD_WINDOW)
    frames, decoder = 1, decompressor.decompressobj()
    for start in range(0, len(body), ZSTANDARD_PIECE):
        data = body[start : start + ZSTANDARD_PIECE]
        while data:
            if decoder.eof:
                frames, decoder = frames + 1, decompressor.decompressobj()
                _refuse_too_many(frames)
            yield decoder.decompress(data)
            data = decoder.unused_data
    if body and not decoder.eof:
        raise zstandard.ZstdError("the body ends early")


def _steps(body: bytes, window: int) -> Iterator[bytes]:
    """Yield the output of each step. Takes linear time, whatever the number of members."""
    members = 1
    inflate = _member(members, window)
    for start in range(0, len(body), _PIECE):
        data = body[start : start + _PIECE]
        is_done = False
        while not is_done:
            if inflate.eof:
                members += 1
                inflate = _member(members, window)
            part = inflate.decompress(data, _STEP)
            yield part
            data = inflate.unused_data or inflate.unconsumed_tail
            is_done = not data and (len(part) < _STEP or inflate.eof)
    if body and not inflate.eof:
        raise zlib.error("the body ends early")


def _member(number: int, window: int) -> zlib._Decompress:
    """Return the decompressor for member *number*. Raises ``InvalidRequest`` above the limit."""
    _refuse_too_many(number)
    return zlib.decompressobj(window)


def _refuse_too_many(members: int) -> None:
    """Raise ``InvalidRequest`` if a body has that many *members*."""
    if members > _MOST_MEMBERS:
        raise InvalidRequest(f"The compressed request body has more than {_MOST_MEMBERS} members.")


def _refuse_too_large(size: int, most: int, limits: Limits) -> None:
    """Raise if a body that inflates to *size* bytes or more is too large, or much larger than what was sent."""
    if size > limits.body:
        raise BodyTooLarge(limits.body)
    if size > most:
        raise InflatesTooFar(limits.inflation)
