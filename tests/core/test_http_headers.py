"""One list of the headers that several rooms have to agree on; heads that come again, and where their message ends."""

from __future__ import annotations

import ast
from hashlib import sha256
from pathlib import Path

import pytest

from proxy.core import http_headers
from proxy.core.http_headers import read_head
from proxy.server.access import client_tenant
from proxy.server.request import read_headers

ROOT = Path(__file__).parents[2] / "proxy"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\ncontent-LENGTH:  5\r\nX-Api-Key: k\r\n\r\n"


def test_every_name_is_in_lower_case() -> None:
    """The lists are compared with names in lower case."""
    names = {*http_headers.CREDENTIAL_ORDER, *http_headers.PERSONAL, *http_headers.HOP_BY_HOP}
    assert {name for name in names if name != name.lower()} == set()
    assert set(http_headers.CREDENTIAL_ORDER) == http_headers.CREDENTIALS < http_headers.PERSONAL


def test_a_tenant_keeps_its_digest() -> None:
    """A caller with several keys is the tenant that it has been since the first version."""
    keys = {"x-goog-api-key": "4", "api-key": "3", "x-api-key": "2", "authorization": "1"}
    named = b"authorization\x001\x00x-api-key\x002\x00api-key\x003\x00x-goog-api-key\x004"
    assert client_tenant(keys) == sha256(b"ullage tenant\x00client\x00" + named).digest()


@pytest.mark.parametrize("name", sorted(http_headers.HOP_BY_HOP | http_headers.REWRITTEN))
def test_what_belongs_to_one_connection_is_not_forwarded(name: str) -> None:
    """No header of the client's connection goes upstream; a credential does."""
    intake = read_headers([(name.encode(), b"close"), (b"authorization", b"Bearer k")])
    assert intake.end_to_end == (("authorization", "Bearer k"),)


@pytest.mark.slow
def test_no_other_module_has_a_list_of_its_own() -> None:
    """Nowhere else do two credentials, or most of the hop-by-hop headers, stand in one literal."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        literals = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Set | ast.Tuple)]
        for node in literals:
            names = {str(each.value) for each in node.elts if isinstance(each, ast.Constant)}
            if len(names & http_headers.CREDENTIALS) > 1 or len(names & http_headers.HOP_BY_HOP) > 3:
                found.append(path.relative_to(ROOT).as_posix())
    assert set(found) == {"core/http_headers.py"}


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (HEAD, len(HEAD) + 5),
        (HEAD + b"12345 and more", len(HEAD) + 5),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 27),
    ],
)
def test_a_message_ends_at_its_content_length_or_with_its_head(data, size):
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
def test_no_end_is_read_from_a_head_that_is_incomplete_long_or_framed_otherwise(data):
    """A head that is incomplete, long, or framed by more than its length."""
    assert read_head(data) == (b"", 0)
