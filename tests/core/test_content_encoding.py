"""Content-encodings come off piece by piece, and never swell beyond what was allowed."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Callable

import brotli  # type: ignore[import-untyped]
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.content_encoding import ContentDecoder, decode_content

TEXT = b'{"error": {"message": "prompt is too long"}}' * 40


def _raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def _in_thirds(pack: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Return a function that packs data in three runs, as servers do that pack each event by itself."""
    return lambda data: b"".join(
        pack(data[at : at + len(data) // 3 + 1]) for at in range(0, len(data), len(data) // 3 + 1)
    )


PACKED = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    " DEFLATE ": _raw_deflate,
    "br": brotli.compress,
    "zstd": zstandard.compress,
    "gzip ": _in_thirds(gzip.compress),
    "zstd ": _in_thirds(zstandard.compress),
    "": bytes,
    "identity": bytes,
    "gzip, br": bytes,
}


@pytest.mark.parametrize("encoding", PACKED)
def test_whole(encoding: str) -> None:
    """Every encoding that providers use comes off; an unknown one stays."""
    assert decode_content(PACKED[encoding](TEXT), encoding, 10_000) == TEXT


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.slow
def test_no_more_than_allowed(encoding: str) -> None:
    """Of a body that swells without end only the allowed beginning is made."""
    assert decode_content(PACKED[encoding](b" " * 20_000_000), encoding, 1_000) == b" " * 1_000


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", ""])
def test_it_is_known_that_something_is_missing(encoding: str) -> None:
    """A body above the limit, or with an end that cannot be decoded, does not count as complete."""
    packed = PACKED[encoding](b" " * 5_000)
    taker = ContentDecoder(encoding, 1_000)
    assert not taker.is_full
    taker.feed(packed)
    assert taker.is_full
    whole = ContentDecoder(encoding, 10_000)
    assert len(whole.feed(packed)) == 5_000
    assert not whole.is_full


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_what_is_not_encoded_is_read_as_it_is(encoding: str) -> None:
    """A server that names an encoding and does not use it is understood."""
    assert decode_content(TEXT, encoding, 10_000) == TEXT


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_padding_behind_the_end_is_dropped(encoding: str) -> None:
    """What stands behind an encoded body and is none costs nothing of it."""
    assert decode_content(PACKED[encoding](TEXT) + b"padding " * 20, encoding, 10_000) == TEXT


@settings(max_examples=60)
@given(st.sampled_from(sorted(PACKED)), st.lists(st.integers(0, 2_000), max_size=8), st.integers(1, 3_000))
def test_in_pieces(encoding: str, points: list[int], most: int) -> None:
    """The decoded bytes are the same for any chunking."""
    packed = PACKED[encoding](TEXT)
    edges = sorted({0, len(packed), *(point % (len(packed) + 1) for point in points)})
    taker = ContentDecoder(encoding, most)
    made = b"".join(taker.feed(packed[start:end]) for start, end in itertools.pairwise(edges))
    assert made == TEXT[:most]
    assert taker.feed(b"") == b""


@given(st.sampled_from(sorted(PACKED)), st.binary(max_size=200))
def test_any_bytes(encoding: str, body: bytes) -> None:
    """Broken data never raises."""
    decode_content(PACKED[encoding](TEXT)[:20] + body, encoding, 10_000)
