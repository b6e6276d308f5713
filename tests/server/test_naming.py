"""A relayed body under another name of its model: that name and nothing else."""

import pytest

from proxy.server.naming import renamed


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"model":"fast","input":"fast"}', b'{"model":"own","input":"fast"}'),
        (b' {"input" : {"model":"fast"} , "model" : "fast" }\n', b' {"input" : {"model":"fast"} , "model" : "own" }\n'),
        ('{"input":"é","m\\u006fdel":"fast","ü":1.10}'.encode(), '{"input":"é","m\\u006fdel":"own","ü":1.10}'.encode()),
        (b'{"model":"a","model":"fast"}', b'{"model":"a","model":"own"}'),
    ],
)
def test_only_the_name_changes(body: bytes, found: bytes) -> None:
    """The top-level member is exchanged, wherever it stands and however it is spelled."""
    assert renamed(body, "own") == found


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input":1}', b"\xff", b"[" * 100_000])
def test_what_has_no_name_stays(body: bytes) -> None:
    """A body that is no object, or names no model, is passed as it is."""
    assert renamed(body, "own") is body
