import gzip
import zlib

import pytest

from proxy.server import Limits, ServerConfig
from tests.support.server_fixture import running_server

SMALL = ServerConfig("up", limits=Limits(body=100_000, peek=10_000, in_flight_bytes=300_000))


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(b'{"a": 1}', mtime=0)),
        ("x-gzip", gzip.compress(b'{"a"', mtime=0) + gzip.compress(b": 1}", mtime=0)),
        ("deflate", zlib.compress(b'{"a": 1}')),
        ("deflate", zlib.compress(b'{"a": 1}', wbits=-15)),
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
        ("zstd", b"x", 415),
        ("gzip, gzip", gzip.compress(b"{}", mtime=0), 415),
        ("gzip", b"not gzip", 400),
        ("gzip", gzip.compress(b"{}" * 100, mtime=0)[:-9], 400),
        ("deflate", b"\xff\xff\xff", 400),
        ("gzip", gzip.compress(bytes(100_001)), 413),
        ("gzip", gzip.compress(bytes(50_000_000)), 413),
        ("deflate", zlib.compress(bytes(50_000_000)), 413),
    ],
)
async def test_bodies_that_cannot_be_inflated_are_refused_readably(encoding, packed, status):
    """Unknown codings, broken data and bombs each get their status, and the upstream hears nothing."""
    async with running_server(SMALL) as at:
        got = await at.chat(packed, f"Content-Encoding: {encoding}")
        assert got.line.split()[1] == str(status)
        assert got.body.startswith(b'{"error"')
        assert at.stage.heard == []


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_may_unfold_a_hundredfold_and_no_further(encoding):
    """The ratio of what a body unfolds to is bounded, and the refusal names the setting; little is let pass."""
    pack = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    head = f"Content-Encoding: {encoding}"
    async with running_server(ServerConfig("up")) as at:
        assert (await at.chat(pack(b" " * 60_000), head)).line.split()[1] == "200"
        got = await at.chat(pack(b" " * 4_000_000), head)
        assert got.line.split()[1] == "413"
        assert b"server.limits.inflation" in got.body
        assert len(at.stage.heard) == 1
    async with running_server(ServerConfig("up", limits=Limits(inflation=2_000))) as at:
        assert (await at.chat(pack(b" " * 4_000_000), head)).line.split()[1] == "200"
