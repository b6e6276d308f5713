"""Request headers: which go on, which are wishes, which are refused."""

import pytest

from proxy.core.errors import InvalidRequest
from proxy.server.intake import Intake, options, window_variant, without_secrets
from tests.support.server_fixture import house

CHAT = b'{"model": "m",  "messages":[{"role":"user","content":"\\ud83d h\xc3\xa9"}], "x": 1.10}'


REQUEST_HEADERS = [
    ("User-Agent: raw/1", "User-Agent: raw/1"),
    ("Authorization: Bearer client", "Authorization: Bearer client"),
    ("X-Api-Key: client", "X-Api-Key: client"),
    ("Accept-Encoding: br;q=0.5, gzip", "Accept-Encoding: br;q=0.5, gzip"),
    ("OpenAI-Beta: a", "OpenAI-Beta: a"),
    ("X-Forwarded-For: 10.0.0.1", "X-Forwarded-For: 10.0.0.1"),
    ("Cookie: session=1", "Cookie: session=1"),
    ("TE: trailers", None),
    ("Keep-Alive: timeout=5", None),
    ("Proxy-Authorization: Basic eA==", None),
    ("Proxy-Connection: keep-alive", None),
    ("Upgrade: h2c", None),
    ("HTTP2-Settings: AAM", None),
    ("Trailer: x", None),
    ("X-Ullage-Project: secret", None),
    ("X-Ullage-Anything: secret", None),
]


@pytest.mark.parametrize(("sent", "arrives"), REQUEST_HEADERS)
async def test_which_request_headers_are_forwarded(sent, arrives):
    """End-to-end headers arrive as they were spelled; hop-by-hop ones and our own do not."""
    async with house() as at:
        assert (await at.chat(CHAT, sent)).line.startswith("HTTP/1.1 200")
        heard = at.stage.heard[0]
        if arrives is None:
            assert heard.all(sent.partition(":")[0]) == []
        else:
            assert arrives in [f"{key}: {value}" for key, value in heard.headers]


async def test_nothing_is_added_and_repeated_headers_keep_their_order():
    """The upstream sees the client's headers, Host and Content-Length rewritten, and not one more."""
    async with house() as at:
        await at.ask("POST", "/v1/embeddings", b"{}", "B: 1", "a: 2", "b: 3", "Connection: c, close", "C: 4")
        heard = at.stage.heard[0]
        assert heard.headers == [
            ("Host", f"127.0.0.1:{at.stage.port}"), ("B", "1"), ("a", "2"), ("B", "3"), ("Content-Length", "2"),
        ]  # fmt: skip


async def test_a_client_cannot_use_connection_to_strip_its_credential():
    """Credentials named by ``Connection`` are forwarded all the same."""
    async with house() as at:
        await at.chat(CHAT, "Authorization: Bearer k", "Connection: authorization")
        assert at.stage.heard[0].all("authorization") == ["Bearer k"]


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-ullage-mode", "loud"),
        ("x-ullage-window", "0"),
        ("x-ullage-window", "1e3"),
        ("x-ullage-window", "9" * 5000),
        ("x-ullage-task-size", "xxl"),
        ("x-ullage-compact", "later"),
        ("x-ullage-project", "p" * 300),
    ],
)
async def test_a_bad_option_is_named(header, value):
    """A wrong x-ullage value is a 400 that names the header, and nothing is sent upstream."""
    async with house() as at:
        got = await at.chat(CHAT, f"{header}: {value}")
        assert got.line == "HTTP/1.1 400 Bad Request"
        assert header.encode() in got.body
        assert got.all("x-ullage-outcome") == ["refused;invalid_request"]
        assert at.stage.heard == []
        assert [(report.outcome, report.status) for report in at.reports] == [("refused", 400)]


async def test_good_options_reach_the_engine():
    """What the caller asks for in headers is what the engine is told."""
    async with house() as at:
        await at.chat(
            CHAT, "X-Ullage-Mode: observe", "X-Ullage-Window: 4096", "X-Ullage-Compact: now",
            "X-Ullage-Task-Size: tiny", "X-Ullage-Conversation: c1", "X-Ullage-Project: p1",
        )  # fmt: skip
        wishes = at.engine.seen[0].options
        assert (wishes.mode, wishes.window, wishes.compact_now) == ("observe", 4096, True)
        assert (wishes.task_size, wishes.conversation, wishes.project) == ("tiny", "c1", "p1")


def test_flags_that_change_a_window_are_told_apart():
    """Of the beta flags those of the context count, in any order and however often they are sent."""
    told = {
        value: window_variant(Intake(seen={"anthropic-beta": value}))
        for value in ("", "tools-2024", "context-1m-2025, tools-2024", "x,context-b ,context-a,context-b")
    }
    assert list(told.values()) == ["", "", "context-1m-2025", "context-a,context-b"]
    assert window_variant(Intake()) == ""


async def test_the_variant_reaches_the_engine():
    """What the headers ask for comes with the request."""
    async with house() as at:
        await at.chat(CHAT, "Anthropic-Beta: tools-1", "anthropic-beta: context-1m")
        assert at.engine.seen[0].variant == "context-1m"


def test_what_tells_who_the_client_is_stays():
    """Credentials, cookies and organisations are left out in any spelling, everything else stays in order."""
    kept = [("Accept", "a"), ("anthropic-beta", "b"), ("X-Trace", "t")]
    secret = [("Authorization", "x"), ("X-API-Key", "x"), ("api-key", "x"), ("Cookie", "x"), ("OpenAI-Project", "x")]
    assert without_secrets([*secret[:2], *kept, *secret[2:]]) == kept


@pytest.mark.parametrize(("value", "share"), [("now", None), ("0.2", 0.2), (".25", 0.25), ("0.9999", 0.9999)])
def test_a_compaction_may_name_its_share(value: str, share: float | None):
    """``now`` or a share of the room asks for a compaction."""
    wishes = options({"compact": value})
    assert (wishes.compact_now, wishes.compact_to) == (True, share)


@pytest.mark.parametrize(
    "value", ["", "later", "0", "0.0", "1", "1.5", "-0.2", "20%", "nan", "0.2 ", "1e-2", "0.00001"]
)
def test_what_is_no_share_is_refused(value: str):
    """Anything else is an error that names the header."""
    with pytest.raises(InvalidRequest, match="x-ullage-compact"):
        options({"compact": value})
