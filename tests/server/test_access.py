import gzip

import pytest

from proxy.core.errors import Forbidden, Unauthorized
from proxy.server import ServerConfig
from proxy.server.access import FOREIGN_HOST, Access, tenants_of
from proxy.server.request import read_headers
from tests.support.server_fixture import raw_answer, running_server
from tests.support.server_fixture import read_request as read_message

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
        (("X-Goog-Api-Key: pk-1",), 200, []),
        (("X-Goog-Api-Key: wrong",), 401, None),
        (("X-Goog-Api-Key: own", "X-Goog-Api-Key: other", "X-Api-Key: pk-1"), 400, None),
        (("X-Ullage-Key: pk-1", "Authorization: Bearer own"), 200, ["Bearer own"]),
        (("X-Ullage-Key: pk-1",), 200, []),
        (("X-Ullage-Key: wrong", "Authorization: Bearer pk-1"), 401, None),
        (("X-Api-Key: pk-1", "Authorization: Bearer own"), 200, ["Bearer own"]),
        (("X-Api-Key: pk-1", "X-Api-Key: own"), 400, None),
        (("X-Ullage-Key: pk-1", "X-Ullage-Key: pk-2"), 400, None),
    ],
)
async def test_who_is_let_in_and_what_goes_on(headers, status, upstream):
    """An access key opens the proxy and is never forwarded; the client's other credential is."""
    async with running_server(SHARED) as at:
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
    async with running_server(api_key="uk", api_key_header=key_header) as at:
        await at.chat(b"{}", "Authorization: Bearer c", "X-Api-Key: c", "Api-Key: c", "X-Goog-Api-Key: c")
        heard = at.stage.heard[0]
        names = ("Authorization", "X-Api-Key", "Api-Key", "X-Goog-Api-Key")
        found = [(name, value) for name in names for value in heard.all(name)]
        assert found == [expected]


async def test_the_upstreams_key_never_comes_back():
    """Nothing the client gets holds the configured key."""
    async with running_server(api_key="uk-secret") as at:
        at.stage.reply = raw_answer(b"{}", status="401 Unauthorized")
        got = await at.chat()
        assert "uk-secret" not in str(got)


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
    async with running_server(ServerConfig("up", admin_key=key), host=host) as at:
        got = await at.ask("GET", "/ullage/api/status", b"", *headers)
        assert got.line.split()[1] == str(status)
        assert at.stage.heard == []
        assert at.reports == []


@pytest.mark.parametrize(
    ("options", "host", "headers", "status"),
    [
        ({"access_keys": ("pk-1",), "admin_key": "adm"}, "0.0.0.0", (), 401),
        ({"access_keys": ("pk-1",), "admin_key": "adm"}, "0.0.0.0", ("Authorization: Bearer pk-1",), 401),
        ({"access_keys": ("pk-1",), "admin_key": "adm"}, "0.0.0.0", ("Authorization: Bearer adm",), 200),
        ({"access_keys": ("pk-1",)}, "0.0.0.0", (), 403),
        ({"access_keys": ("pk-1",), "open_metrics": True}, "0.0.0.0", (), 200),
        ({"access_keys": ("pk-1",), "admin_key": "adm"}, "127.0.0.1", (), 200),
        ({"access_keys": ("pk-1",), "admin_key": "adm"}, "127.0.0.1", ("X-Forwarded-For: 1.2.3.4",), 401),
        ({"access_keys": ("pk-1",)}, "127.0.0.1", ("X-Forwarded-For: 1.2.3.4",), 403),
        ({}, "0.0.0.0", (), 200),
    ],
)
async def test_who_may_read_the_metrics(options, host, headers, status):
    """Beside access keys the metrics need the admin key, except on this machine or where a setting opens them."""
    async with running_server(ServerConfig("up", **options), host=host) as at:
        got = await at.ask("GET", "/metrics", b"", *headers)
        assert got.line.split()[1] == str(status)
        assert (b"ullage_up" in got.body) == (status == 200)
        assert at.stage.heard == []


STORED_BODIES = [
    b'{"model":"m","input":"x","previous_response_id":"resp_1"}',
    b'{"model":"m","input":"x", "conversation" : "conv_1"}',
    b'{"model":"m","input":"x","conversation":{"id":"conv_1"}}',
    b'{"model":"m","input":"x","previous_response\\u005fid":"resp_1"}',
    b'{"\\u0070revious_response_id":"resp_1","model":"m","input":"x"}',
    b'{"previous_response_id":"resp_1","model":"m","input":"x","previous_response_id":null}',
]
OTHER_BODIES = [
    b'{"model":"m","input":"x"}',
    b'{"model":"m","input":"x","previous_response_id":null,"conversation":null}',
    b'{"model":"m","input":"\\"previous_response_id\\": \\"resp_1\\""}',
    b'{"model":"m","input":[],"tools":[{"parameters":{"properties":{"conversation":{"type":"string"}}}}]}',
    b'{"model":"m","input":"x","metadata":{"conversation":"conv_1"}}',
]


@pytest.mark.parametrize("path", ["/v1/responses", "/responses", "/v1/responses/compact", "/v1/responses/input_tokens"])
@pytest.mark.parametrize("body", STORED_BODIES)
async def test_what_the_provider_stored_for_another_caller_is_not_gone_on_from(path, body):
    """Callers of several access keys share what the upstream stores, so a request that goes on from it is a 403."""
    async with running_server(SHARED, api_key="uk") as at:
        got = await at.ask("POST", path, body, "X-Api-Key: pk-1", "Content-Type: application/json")
        assert got.line.split()[1] == "403"
        assert b"server.relay" in got.body
        assert at.stage.heard == []


@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
async def test_a_count_that_cannot_be_checked_is_refused(kind):
    """A body that is relayed unread, by its type or its size, may go on from a stored response."""
    size = 2**21 if kind == "application/json" else 10
    body = b'{"model":"m","input":"%b","previous_response_id":"resp_1"}' % (b"x" * size)
    async with running_server(SHARED, api_key="uk") as at:
        got = await at.ask("POST", "/v1/responses/input_tokens", body, "X-Api-Key: pk-1", f"Content-Type: {kind}")
        assert got.line.split()[1] == "403"
        assert at.stage.heard == []


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
@pytest.mark.parametrize("body", OTHER_BODIES)
async def test_words_alone_do_not_go_on_from_anything(path, body):
    """Only the body's own member counts: not an empty one, not text, not a tool's parameter of that name."""
    async with running_server(SHARED, api_key="uk") as at:
        got = await at.ask("POST", path, body, "X-Api-Key: pk-1", "Content-Type: application/json")
        assert got.line.split()[1] == "200"
        assert at.stage.heard[0].body == body


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (ServerConfig("up"), "uk"),
        (ServerConfig("up", access_keys=("pk-1",)), "uk"),
        (ServerConfig("up", access_keys=("pk-1", "pk-2"), relay="all"), "uk"),
        (SHARED, None),
    ],
)
async def test_who_shares_nothing_goes_on_from_its_own(config, key):
    """One access key is one caller; without keys, or with a key of one's own at the upstream, nothing is shared."""
    async with running_server(config, api_key=key) as at:
        got = await at.ask("POST", "/v1/responses", STORED_BODIES[0], "X-Api-Key: pk-1")
        assert got.line.split()[1] == "200"
        assert at.stage.heard[0].body == STORED_BODIES[0]


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
        tenant(open_, "X-Goog-Api-Key: Bearer a"),
        tenant(open_, "X-Goog-Api-Key: b"),
        tenant(SHARED, "Authorization: Bearer pk-1"),
        tenant(SHARED, "X-Ullage-Key: pk-2"),
    ]
    assert len({one, *others}) == 9
    assert tenant(SHARED, "X-Ullage-Key: pk-1", "Authorization: Bearer a") == tenant(SHARED, "X-Api-Key: pk-1")


def test_a_listed_key_is_found_in_whatever_header_it_comes():
    """The tenants of a key are those of every way to send it, and no other tenants."""
    listed = tenants_of(["pk-1"])
    for config, header in (
        (ServerConfig("up"), "Authorization: Bearer pk-1"),
        (ServerConfig("up"), "X-Api-Key: pk-1"),
        (ServerConfig("up"), "Api-Key: pk-1"),
        (ServerConfig("up"), "X-Goog-Api-Key: pk-1"),
        (SHARED, "Authorization: Bearer pk-1"),
        (SHARED, "X-Ullage-Key: pk-1"),
    ):
        assert tenant(config, header) in listed
        assert tenant(config, header.replace("pk-1", "pk-2")) not in listed


def test_a_tenant_is_the_same_for_ever():
    """A credential's digest never changes, or everybody's conversations would be forgotten."""
    both = tenant(ServerConfig("up"), "Authorization: Bearer a", "X-Api-Key: b", "Api-Key: c")
    assert both.hex() == "0547f332771a860f99df68ae47526676a677e58052c20d02905d5f3edf3206c1"
    assert tenant(ServerConfig("up")).hex() == "a66e3d5097d85e173b3523d150d80c7416fb8050700f35e7ad906572853cc94f"


def owner(config, *headers, loopback=True, host="127.0.0.1:8484"):
    raw = [tuple(part.encode() for part in header.split(": ", 1)) for header in (*headers, f"Host: {host}")]
    access = Access(config)
    access.loopback = loopback
    if not access.knows_host(host):
        raise Forbidden(FOREIGN_HOST)
    return access.owner(read_headers(raw), [name.decode() for name, _ in raw])


OPEN, ADMIN = ServerConfig("up"), ServerConfig("up", admin_key="boss")
KEYED = ServerConfig("up", access_keys=("pk-1", "pk-2"), admin_key="boss")


@pytest.mark.parametrize(
    ("config", "headers", "same"),
    [
        (OPEN, ["Authorization: Bearer a"], ["Authorization: Bearer a"]),
        (OPEN, ["X-Goog-Api-Key: a"], ["X-Goog-Api-Key: a"]),
        (OPEN, [], []),
        (ADMIN, ["Authorization: Bearer a"], ["Authorization: Bearer a"]),
        (ADMIN, ["Authorization: Bearer boss"], []),
        (ADMIN, ["Authorization: Bearer boss", "X-Api-Key: a"], ["X-Api-Key: a"]),
        (KEYED, ["Authorization: Bearer pk-1"], ["Authorization: Bearer pk-1"]),
        (KEYED, ["Authorization: Bearer boss", "X-Ullage-Key: pk-2"], ["X-Api-Key: pk-2"]),
    ],
)
def test_a_caller_owns_the_conversations_of_its_model_calls(config, headers, same):
    """The credential of its model calls names the conversations of a caller; the admin names another caller's."""
    assert owner(config, *headers) == tenant(config, *same)


@pytest.mark.parametrize(
    ("config", "headers", "options", "error"),
    [
        (OPEN, [], {"loopback": False}, Forbidden),
        (OPEN, ["X-Forwarded-For: 1.1.1.1"], {}, Forbidden),
        (OPEN, [], {"host": "evil.example.com"}, Forbidden),
        (ADMIN, [], {}, Unauthorized),
        (ADMIN, ["X-Ullage-Key: pk-1"], {}, Unauthorized),
        (KEYED, [], {}, Unauthorized),
        (KEYED, ["Authorization: Bearer a"], {}, Unauthorized),
        (KEYED, ["Authorization: Bearer boss"], {}, Forbidden),
        (KEYED, ["Authorization: Bearer boss", "X-Ullage-Key: a"], {}, Unauthorized),
    ],
)
def test_other_callers_are_refused(config, headers, options, error):
    """Conversations of callers without a credential are shown on this machine alone, or to the admin."""
    with pytest.raises(error):
        owner(config, *headers, **options)


EVERY_ROUTE = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/models"),
    ("GET", "/v1/files"),
    ("GET", "/metrics"),
    ("GET", "/"),
    ("GET", "/health/ready"),
    ("GET", "/ullage/api/status"),
    ("GET", "/ullage/api/conversations"),
    ("OPTIONS", "/v1/chat/completions"),
]


@pytest.mark.parametrize(("method", "path"), EVERY_ROUTE)
async def test_a_page_that_points_its_own_name_here_gets_nothing(method, path):
    """On loopback a foreign Host is a 403 on every route, though Origin agrees with it; the key is never spent."""
    async with running_server(api_key="uk") as at:
        page = ("Host: evil.example.com:8484", "Origin: http://evil.example.com:8484", "Sec-Fetch-Site: same-origin")
        got = await at.ask(method, path, b"{}" if method == "POST" else b"", *page)
        assert got.line.split()[1] == "403"
        assert b"server.hosts" in got.body
        assert at.stage.heard == []


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("[::1]:8484", 200),
        ("localhost:8484", 200),
        ("LOCALHOST.", 200),
        ("10.0.0.1:80", 200),
        ("host.docker.internal:8484", 200),
        ("HOST.docker.INTERNAL", 200),
        ("evil.host.docker.internal", 403),
        ("evil.localhost.example.com", 403),
        ("evil.localhost", 403),
        ("127.0.0.1.evil.example.com", 403),
        ("127.0.0.1@evil.example.com", 403),
        ("evil.example.com:127.0.0.1", 403),
        ("localhost:8484.evil.example.com", 403),
        ("[::1].evil.example.com", 403),
    ],
)
async def test_the_names_of_a_loopback_listener(host, status):
    """Addresses, localhost and listed names are served; what only resembles them is not."""
    config = ServerConfig("up", hosts=frozenset({"host.docker.internal"}))
    async with running_server(config, api_key="uk") as at:
        assert (await at.ask("GET", "/v1/models/m", b"", f"Host: {host}")).line.split()[1] == str(status)


async def test_a_listener_for_other_machines_is_called_by_any_name():
    """Beyond loopback names are the operator's: access keys guard them."""
    async with running_server(host="0.0.0.0") as at:
        assert (await at.ask("GET", "/v1/models", b"", "Host: llm.example.com")).line.split()[1] == "200"


async def test_a_request_without_a_host_is_no_browsers():
    """Health checks of old load balancers speak HTTP/1.0 without a Host; no browser does."""
    async with running_server() as at:
        assert (await at.raw(b"GET /health/ready HTTP/1.0\r\n\r\n")).line.split()[1] == "200"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]:8484", "localhost:8484", "LOCALHOST", "10.0.0.1:80"])
def test_an_address_cannot_be_another_sites_name(host):
    """Addresses and localhost are this machine; only names can be pointed at it by somebody else."""
    assert owner(OPEN, host=host) == tenant(OPEN)


@pytest.mark.parametrize(("config", "status"), [(SHARED, "403"), (ServerConfig("up"), "200")])
async def test_a_body_that_a_fault_left_compressed_goes_on_from_nothing_shared(monkeypatch, config, status):
    """Behind shared keys a body that cannot be read is refused; where nothing is shared it is relayed unchanged."""

    async def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("proxy.server.request.inflated", broken)
    body = gzip.compress(STORED_BODIES[0])
    async with running_server(config, api_key="uk") as at:
        got = await at.ask("POST", "/v1/responses", body, "X-Api-Key: pk-1", "Content-Encoding: gzip")
        assert got.line.split()[1] == status
        assert [heard.body for heard in at.stage.heard] == ([body] if status == "200" else [])


JSON = "Content-Type: application/json"
HEADS = [
    ("Authorization: Bearer pk-1",),
    ("Authorization: Bearer pk-2",),
    ("Authorization: Bearer wrong",),
    (),
    ("X-Ullage-Key: pk-1", "Authorization: Bearer own"),
    ("X-Ullage-Key: pk-2", "Authorization: Bearer own"),
    ("X-Api-Key: pk-1", "Thread-Id: t-1"),
    ("X-Api-Key: pk-1", "Thread-Id: t-2", "X-Ullage-Window: 9000"),
    ("X-Api-Key: pk-1", "X-Ullage-Mode: off"),
    ("X-Api-Key: pk-1", "X-Ullage-Mode: wrong"),
    ("X-Api-Key: pk-1", "X-Api-Key: pk-1"),
    ("X-Api-Key: pk-1", "Origin: https://elsewhere.test"),
    ("X-Api-Key: pk-1", "Origin: https://page.test"),
    ("X-Api-Key: pk-1", "Sec-Fetch-Site: cross-site"),
    ("X-Api-Key: pk-1", "Anthropic-Beta: context-1m"),
    ("X-Api-Key: pk-1", "Connection: keep-alive, x-own", "X-Own: 1"),
    ("X-Api-Key: pk-1", "Expect: something"),
    ("X-Api-Key: pk-1", "Cookie: " + "c" * 5000),
]


async def test_a_head_that_comes_again_is_read_as_it_would_be_alone():
    """On one connection each head leads to what it leads to on a connection of its own, in any order and repeated."""
    keys = ServerConfig("up", access_keys=("pk-1", "pk-2"), origins=frozenset({"https://page.test"}))

    def outcome(at, status):
        heard = at.stage.heard.pop() if at.stage.heard else None
        seen = at.engine.seen.pop() if at.engine.seen else None
        at.stage.heard.clear()
        at.engine.seen.clear()
        if seen is None:
            return status, None, None
        sent = [pair for pair in heard.headers if pair[0].lower() != "content-length"]
        return status, sent, (seen.tenant, seen.options, seen.session, seen.window_variant, seen.origin.headers)

    async with running_server(keys) as at:
        alone = {}
        for head in HEADS:
            got = await at.chat(b'{"model":"m"}', *head)
            alone[head] = outcome(at, got.line)
        assert {line.split()[1] for line, _, _ in alone.values()} == {"200", "400", "401", "403", "417"}
        reader, writer = await at.connect()
        order = [head for pair in zip(HEADS, reversed(HEADS), strict=True) for head in pair for _ in range(3)]
        for number, head in enumerate(order):
            body = b'{"model":"m"}' + b" " * (number % 12)
            lines = ["POST /v1/chat/completions HTTP/1.1", "Host: proxy.test", JSON, *head]
            lines.append(f"Content-Length: {len(body)}")
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            got = await read_message(reader)
            assert outcome(at, got.line) == alone[head]
            if "close" in got.all("connection"):
                reader, writer = await at.connect()


async def test_the_host_and_the_route_of_a_repeated_head_are_judged_anew():
    """A foreign name in Host is refused after the same head with a known one; relayed routes keep their rules."""
    async with running_server(SHARED, api_key="sk-shared") as at:
        reader, writer = await at.connect()
        for path, host, status in [
            ("/v1/chat/completions", "proxy.test", "200"),
            ("/v1/chat/completions", "rebound.test", "403"),
            ("/v1/chat/completions", "proxy.test", "200"),
            ("/v1/files", "proxy.test", "403"),
            ("/v1/embeddings", "proxy.test", "200"),
        ]:
            fields = f"Host: {host}\r\nAuthorization: Bearer pk-1\r\n{JSON}\r\nContent-Length: 13"
            writer.write(f'POST {path} HTTP/1.1\r\n{fields}\r\n\r\n{{"model":"m"}}'.encode())
            assert (await read_message(reader)).line.split()[1] == status
