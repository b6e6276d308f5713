"""Heads that come again: where their message ends, and when one is the same."""

import pytest

from proxy.core.sized_head import read_head, sized_head

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\ncontent-LENGTH:  5\r\nX-Api-Key: k\r\n\r\n"


def test_only_the_length_may_differ():
    """Every other byte of a head is compared."""
    head = sized_head(HEAD, ["5"])
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
