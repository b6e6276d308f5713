import pytest

from proxy.server import ServerConfig
from proxy.server.access import Access, tenants_of
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


def test_a_listed_key_is_found_in_whatever_header_it_comes():
    """The tenants of a key are those of every way to send it, and of nobody else."""
    listed = tenants_of(["pk-1"])
    for config, header in (
        (ServerConfig("up"), "Authorization: Bearer pk-1"),
        (ServerConfig("up"), "X-Api-Key: pk-1"),
        (ServerConfig("up"), "Api-Key: pk-1"),
        (SHARED, "Authorization: Bearer pk-1"),
        (SHARED, "X-Ullage-Key: pk-1"),
    ):
        assert tenant(config, header) in listed
        assert tenant(config, header.replace("pk-1", "pk-2")) not in listed
