import pytest

from proxy.server import ServerConfig
from proxy.server.access import Access
from proxy.server.intake import read_headers
from tests.server.house import answer, house

SHARED = ServerConfig("up", access_keys=("pk-1", "pk-2"))


@pytest.mark.parametrize(
    ("headers", "status", "upstream"),
    [
        ((), 401, None),
        (("Authorization: Bearer wrong",), 401, None),
        (("Authorization: Bearer pk-1x",), 401, None),
        (("Authorization: Bearer pk-1",), 200, []),
        (("authorization: bearer pk-2",), 200, []),
        (("X-Api-Key: pk-1",), 200, []),
        (("Api-Key: pk-1",), 200, []),
        (("X-Ullage-Key: pk-1", "Authorization: Bearer own"), 200, ["Bearer own"]),
        (("X-Ullage-Key: pk-1",), 200, []),
        (("X-Ullage-Key: wrong", "Authorization: Bearer pk-1"), 401, None),
        (("X-Api-Key: pk-1", "Authorization: Bearer own"), 200, ["Bearer own"]),
        (("X-Api-Key: pk-1", "X-Api-Key: own"), 400, None),
    ],
)
async def test_who_is_let_in_and_what_goes_on(headers, status, upstream):
    """An access key opens the proxy and is never forwarded; the client's other credential is."""
    async with house(SHARED) as at:
        got = await at.chat(b"{}", *headers)
        assert got.line.split()[1] == str(status)
        if upstream is None:
            assert at.stage.heard == []
        else:
            heard = at.stage.heard[0]
            assert heard.all("authorization") == upstream
            assert not [value for _, value in heard.headers if "pk-" in value]


@pytest.mark.parametrize(
    ("key_header", "expected"), [("authorization", ("Authorization", "Bearer uk")), ("x-api-key", ("X-Api-Key", "uk"))]
)
async def test_the_upstreams_own_key_replaces_every_credential(key_header, expected):
    """With a key configured, none of the client's credentials arrives and exactly that key does."""
    async with house(api_key="uk", api_key_header=key_header) as at:
        await at.chat(b"{}", "Authorization: Bearer c", "X-Api-Key: c", "Api-Key: c")
        heard = at.stage.heard[0]
        found = [(name, value) for name in ("Authorization", "X-Api-Key", "Api-Key") for value in heard.all(name)]
        assert found == [expected]


async def test_the_upstreams_key_never_comes_back():
    """Nothing the client gets holds the configured key."""
    async with house(api_key="uk-secret") as at:
        at.stage.reply = answer(b"{}", status="401 Unauthorized")
        got = await at.chat()
        assert "uk-secret" not in str(got)


SHARED_ROUTES = [
    ("POST", "/v1/chat/completions", 200),
    ("POST", "/v1/completions", 200),
    ("POST", "/v1/embeddings", 200),
    ("POST", "/v1/messages", 200),
    ("POST", "/messages", 200),
    ("POST", "/v1/responses", 200),
    ("POST", "/v1/audio/transcriptions", 200),
    ("POST", "/v1/images/generations", 200),
    ("GET", "/v1/models", 200),
    ("GET", "/v1/models/a%2Fb", 200),
    ("GET", "/v1/responses/resp_1", 403),
    ("GET", "/v1/files", 403),
    ("POST", "/v1/files", 403),
    ("POST", "/v1/batches", 403),
    ("GET", "/v1/chat/completions", 403),
    ("DELETE", "/v1/models/x", 403),
    ("GET", "/v1/models/../files", 403),
    ("GET", "/v1/models/%2e%2e/files", 403),
    ("GET", "/v1/models/%252e%252e/files", 403),
    ("GET", "/v1/models/..%2ffiles", 403),
    ("GET", "/v1/models/..%5cfiles", 403),
    ("POST", "/v1/audio/../files", 403),
    ("GET", "/anything", 403),
]


@pytest.mark.parametrize(("method", "path", "status"), SHARED_ROUTES)
async def test_behind_shared_keys_only_stateless_routes_are_relayed(method, path, status):
    """Callers that share the upstream's key cannot reach what others keep under it, however the path is written."""
    async with house(SHARED, api_key="uk") as at:
        got = await at.ask(method, path, b"{}" if method == "POST" else b"", "X-Api-Key: pk-1")
        assert got.line.split()[1] == str(status)
        assert len(at.stage.heard) == (status == 200)


async def test_every_route_is_relayed_on_request_or_without_a_shared_key():
    """``relay: all`` opens the others, and so does an upstream that has no key of ours."""
    async with house(ServerConfig("up", access_keys=("pk-1",), relay="all"), api_key="uk") as at:
        assert (await at.ask("GET", "/v1/files", b"", "X-Api-Key: pk-1")).line.endswith("200 OK")
    async with house(SHARED) as at:
        assert (await at.ask("GET", "/v1/files", b"", "X-Api-Key: pk-1")).line.endswith("200 OK")


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


@pytest.mark.parametrize(
    ("key", "host", "headers", "status"),
    [
        ("adm", "127.0.0.1", (), 401),
        ("adm", "127.0.0.1", ("Authorization: Bearer no",), 401),
        ("adm", "0.0.0.0", ("Authorization: Bearer adm",), 200),
        (None, "127.0.0.1", (), 200),
        (None, "127.0.0.1", ("X-Forwarded-For: 1.2.3.4",), 403),
        (None, "127.0.0.1", ("Forwarded: for=1.2.3.4",), 403),
        (None, "127.0.0.1", ("Origin: https://evil.test",), 403),
        (None, "0.0.0.0", (), 403),
    ],
)
async def test_who_may_use_the_admin_api(key, host, headers, status):
    """The admin API needs its key; without one only this machine itself may ask."""
    async with house(ServerConfig("up", admin_key=key), host=host) as at:
        got = await at.ask("GET", "/ullage/api/status", b"", *headers)
        assert got.line.split()[1] == str(status)
        assert at.stage.heard == []
        assert at.reports == []


def tenant(config, *headers):
    raw = [tuple(part.encode() for part in header.split(": ", 1)) for header in headers]
    return Access(config).admit(read_headers(raw))


def test_tenants_follow_the_credential_and_nothing_else():
    """Equal credentials are one tenant, others another; kinds of credential never meet."""
    open_ = ServerConfig("up")
    one = tenant(open_, "Authorization: Bearer a", "X-Forwarded-For: 1.1.1.1")
    assert len(one) == 32
    assert one == tenant(open_, "authorization: Bearer a", "User-Agent: other")
    others = [
        tenant(open_),
        tenant(open_, "Authorization: Bearer b"),
        tenant(open_, "X-Api-Key: Bearer a"),
        tenant(open_, "Authorization: Bearer a", "X-Api-Key: b"),
        tenant(SHARED, "Authorization: Bearer pk-1"),
        tenant(SHARED, "X-Ullage-Key: pk-2"),
    ]
    assert len({one, *others}) == 7
    assert tenant(SHARED, "X-Ullage-Key: pk-1", "Authorization: Bearer a") == tenant(SHARED, "X-Api-Key: pk-1")
