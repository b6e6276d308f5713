"""Heads: the size of a request, and when a head is the same again."""

import pytest
from aiohttp import HttpVersion
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.server.access import Caller
from proxy.server.incoming import IncomingRequest, read_head, repeated_head
from proxy.server.request import read_headers, read_path

CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\ncontent-LENGTH:  5\r\nX-Api-Key: k\r\n\r\n"


def request_with(*fields):
    """A request with header *fields*, parsed."""
    headers = CIMultiDictProxy(CIMultiDict([(name.decode(), value.decode()) for name, value in fields]))
    return IncomingRequest(None, "POST", CHAT, HttpVersion(1, 1), headers, fields, True, EMPTY_PAYLOAD, 5)


def repeated(head=HEAD):
    return repeated_head(head, request_with((b"Content-Length", b"5")))


def test_only_the_length_may_differ():
    """Every other byte of a head is compared."""
    head = repeated()
    assert head.match(HEAD + b"12345") == (len(HEAD), 5)
    assert head.match(HEAD.replace(b"5", b"770") + b"{") == (len(HEAD) + 2, 770)
    for other in (
        HEAD.replace(b"LENGTH", b"length"),
        HEAD.replace(b"Api-Key: k", b"Api-Key: K"),
        HEAD.replace(b"POST", b"PUT"),
        HEAD.replace(b"Host: a", b"Host: b"),
        HEAD[:-2] + b"X: y\r\n\r\n",
        HEAD.replace(b"X-Api-Key: k\r\n", b""),
        HEAD.replace(b"5\r", b"5 \r"),
        HEAD.replace(b"5\r", b"5,5\r"),
        HEAD.replace(b"5\r", b"\r"),
        HEAD.replace(b"5\r", b"1" * 13 + b"\r"),
        HEAD.replace(b"5\r", b"\xb2\r"),
        HEAD[:-1],
        HEAD[:60],
        b"",
    ):
        assert head.match(other) is None


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (HEAD, len(HEAD) + 5),
        (HEAD + b"12345 and more", len(HEAD) + 5),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 27),
    ],
)
def test_where_a_request_ends(data, size):
    """By its Content-Length, or with its head."""
    assert read_head(data) == (data[: data.index(b"\r\n\r\n") + 4], size)


@pytest.mark.parametrize(
    "data",
    [
        HEAD[:-1],
        b"",
        HEAD.replace(b"X-Api-Key: k", b"Transfer-Encoding: chunked"),
        HEAD.replace(b"X-Api-Key: k", b"expect : 100-continue"),
        HEAD.replace(b"X-Api-Key: k", b"Upgrade:websocket"),
        HEAD.replace(b"X-Api-Key: k", b"Cookie: " + b"c" * 5000),
    ],
)
def test_whose_end_is_not_known(data):
    """A head that is incomplete, long, or framed by more than its length."""
    assert read_head(data) == (b"", 0)


def test_a_head_without_exactly_one_length_is_not_remembered():
    """Nor is one of which the parser read another length."""
    length = (b"Content-Length", b"5")
    for head, fields in (
        (HEAD, ()),
        (HEAD, (length, length)),
        (HEAD, ((b"Content-Length", b"6"),)),
        (HEAD.replace(b"LENGTH", b"LENGT"), (length,)),
    ):
        assert repeated_head(head, request_with(*fields)) is None


def test_whose_head_may_return():
    """A caller's on a managed route, unless it is a browser's or its headers change on their way."""
    fields = ((b"Host", b"a"), (b"Content-Length", b"5"), (b"X-Api-Key", b"k"))
    managed, relayed = read_path("POST", CHAT), read_path("POST", "/v1/embeddings")
    assert Caller(read_headers(fields), managed).may_return
    assert not Caller(read_headers(fields), relayed).may_return
    for more in ((b"Content-Encoding", b"gzip"), (b"Origin", b"null"), (b"Upgrade", b"x"), (b"Expect", b"x")):
        assert not Caller(read_headers((*fields, more)), managed).may_return
