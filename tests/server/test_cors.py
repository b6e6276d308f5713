"""Web pages of listed origins."""

import pytest

from proxy.server import ServerConfig
from tests.support.server_fixture import answer, house

LISTED = ServerConfig("up", origins=frozenset({"https://app.test"}))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((), 200),
        (("Origin: http://proxy.test",), 200),
        (("Origin: http://proxy.test", "Sec-Fetch-Site: same-origin"), 200),
        (("Origin: https://app.test", "Sec-Fetch-Site: cross-site"), 200),
        (("Origin: https://evil.test",), 403),
        (("Origin: null",), 403),
        (("Origin: https://app.test.evil.test",), 403),
        (("Sec-Fetch-Site: cross-site",), 403),
        (("Sec-Fetch-Site: same-origin",), 200),
        (("Sec-Fetch-Site: none",), 200),
        (("Origin: http://proxy.test", "Sec-Fetch-Site: cross-site"), 403),
    ],
)
async def test_which_web_origins_may_call(headers, status):
    """Pages of other sites are refused unless listed; programs and the proxy's own pages are not."""
    async with house(LISTED) as at:
        got = await at.chat(b"{}", *headers)
        assert got.line.split()[1] == str(status)
        assert len(at.stage.heard) == (status == 200)
        allowed = got.all("access-control-allow-origin")
        assert allowed == (["https://app.test"] if headers and headers[0].endswith("//app.test") else [])


async def test_a_preflight_of_a_listed_origin_is_answered_here():
    """The browser's question is answered without a key and without the upstream."""
    async with house(LISTED) as at:
        ask = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,x-a")
        got = await at.ask("OPTIONS", "/v1/chat/completions", b"", "Origin: https://app.test", *ask)
        assert got.line == "HTTP/1.1 204 No Content"
        assert got.all("access-control-allow-headers") == ["authorization,x-a"]
        assert got.all("access-control-allow-methods") == ["POST"]
        got = await at.ask("OPTIONS", "/v1/chat/completions", b"", "Origin: https://evil.test", *ask)
        assert got.line == "HTTP/1.1 403 Forbidden"
        assert at.stage.heard == []


async def test_an_answer_to_a_listed_page_carries_our_permission_and_not_the_upstreams():
    """What the upstream says about origins is replaced: it does not know who may call here."""
    async with house(LISTED) as at:
        at.stage.reply = answer(b"{}", "Access-Control-Allow-Origin: *", "X-Kept: 1")
        got = await at.chat(b"{}", "Origin: https://app.test")
        assert got.all("access-control-allow-origin") == ["https://app.test"]
        assert got.all("vary") == ["origin"]
        assert got.all("x-kept") == ["1"]
