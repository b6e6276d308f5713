import asyncio
import gzip
import random
import zlib

import pytest
import zstandard

from proxy.core.errors import InvalidRequest
from proxy.server import Limits, ServerConfig
from proxy.server.inflate import inflated
from tests.support.linear_time import is_linear
from tests.support.server_fixture import running_server

ZSTD = zstandard.ZstdCompressor().compress
SKIPPED = b"\x50\x2a\x4d\x18\4\0\0\0note"
"""A frame of Zstandard that decoders skip: https://www.rfc-editor.org/rfc/rfc8878#section-3.1.2"""

SMALL = ServerConfig("up", limits=Limits(body=100_000, peek=10_000, in_flight_bytes=300_000))


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(b'{"a": 1}', mtime=0)),
        ("x-gzip", gzip.compress(b'{"a"', mtime=0) + gzip.compress(b": 1}", mtime=0)),
        ("deflate", zlib.compress(b'{"a": 1}')),
        ("deflate", zlib.compress(b'{"a": 1}', wbits=-15)),
        ("zstd", ZSTD(b'{"a": 1}')),
        ("ZSTD", ZSTD(b'{"a"') + SKIPPED + ZSTD(b": 1}")),
        ("identity", b'{"a": 1}'),
    ],
)
async def test_a_compressed_body_is_read_and_sent_on_inflated(encoding, packed):
    """The engine and the upstream get the plain body, and no header claims otherwise."""
    async with running_server() as at:
        assert (await at.chat(packed, f"Content-Encoding: {encoding}")).line == "HTTP/1.1 200 OK"
        assert at.engine.seen[0].body == b'{"a": 1}'
        heard = at.stage.heard[0]
        assert (heard.body, heard.all("content-encoding")) == (b'{"a": 1}', [])


@pytest.mark.parametrize(
    ("encoding", "packed", "status"),
    [
        ("br", b"x", 415),
        ("zstd", b"not zstd", 400),
        ("zstd", ZSTD(b"{}" * 100)[:-3], 400),
        ("zstd", ZSTD(b"{}") + b"more", 400),
        ("zstd", ZSTD(bytes(100_001)), 413),
        ("zstd", ZSTD(bytes(50_000_000)), 413),
        ("zstd", ZSTD(b"{}") * 4_500, 400),
        ("gzip, gzip", gzip.compress(b"{}", mtime=0), 415),
        ("gzip", b"not gzip", 400),
        ("gzip", gzip.compress(b"{}" * 100, mtime=0)[:-9], 400),
        ("deflate", b"\xff\xff\xff", 400),
        ("gzip", gzip.compress(bytes(100_001)), 413),
        ("gzip", gzip.compress(bytes(50_000_000)), 413),
        ("deflate", zlib.compress(bytes(50_000_000)), 413),
        ("gzip", gzip.compress(b"{}", mtime=0) * 4_500, 400),
    ],
)
async def test_bodies_that_cannot_be_inflated_are_refused_readably(encoding, packed, status):
    """Unknown codings, broken data and bombs each get their status, and the upstream hears nothing."""
    async with running_server(SMALL) as at:
        got = await at.chat(packed, f"Content-Encoding: {encoding}")
        assert got.line.split()[1] == str(status)
        assert got.body.startswith(b'{"error"')
        assert at.stage.heard == []


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_body_may_unfold_a_hundredfold_and_no_further(encoding):
    """The ratio of what a body unfolds to is bounded, and the refusal names the setting; little is let pass."""
    pack = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": ZSTD}[encoding]
    head = f"Content-Encoding: {encoding}"
    async with running_server(ServerConfig("up")) as at:
        assert (await at.chat(pack(b" " * 60_000), head)).line.split()[1] == "200"
        got = await at.chat(pack(b" " * 4_000_000), head)
        assert got.line.split()[1] == "413"
        assert b"server.limits.inflation" in got.body
        assert len(at.stage.heard) == 1
    async with running_server(ServerConfig("up", limits=Limits(inflation=40_000))) as at:
        assert (await at.chat(pack(b" " * 4_000_000), head)).line.split()[1] == "200"


@pytest.mark.slow
def test_a_body_of_many_members_costs_no_more_for_each_the_more_there_are():
    """100,000 empty members of 20 bytes took a quarter of a minute, each a copy of all that follow."""

    def inflate(members):
        with pytest.raises(InvalidRequest):
            asyncio.run(inflated(gzip.compress(b"", mtime=0) * members, "gzip", Limits()))

    assert is_linear(inflate, 15_000)


async def test_members_and_stored_bytes_are_joined_wherever_a_piece_of_the_input_ends():
    """The body is inflated in pieces, whose ends fall into headers, data and checksums of members."""
    noise = random.Random(1)
    parts = [noise.randbytes(noise.randrange(90_000)) for _ in range(20)]
    packed = b"".join(gzip.compress(part, level, mtime=0) for part, level in zip(parts, [0, 1, 6, 9] * 5, strict=True))
    assert await inflated(packed, "gzip", Limits()) == b"".join(parts)


async def test_frames_are_joined_wherever_a_piece_of_the_input_ends():
    """A body of several frames of Zstandard, of data that hardly compress, comes out whole."""
    noise = random.Random(1)
    parts = [noise.randbytes(noise.randrange(90_000)) for _ in range(20)]
    assert await inflated(b"".join(map(ZSTD, parts)), "zstd", Limits()) == b"".join(parts)


@pytest.mark.slow
def test_a_body_of_many_frames_costs_no_more_for_each_the_more_there_are():
    """Frames that hold nothing are read in linear time."""

    def inflate(frames):
        with pytest.raises(InvalidRequest):
            asyncio.run(inflated(ZSTD(b"") * frames, "zstd", Limits()))

    assert is_linear(inflate, 15_000)
