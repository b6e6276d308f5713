"""Request headers: which go on, which are wishes, which are refused."""

import asyncio
import gzip

import pytest

from proxy.core.errors import InvalidRequest
from proxy.core.request import Request
from proxy.server import ServerConfig
from proxy.server.access import is_stateless
from proxy.server.config import Limits
from proxy.server.incoming import BodyBytes, BodyReader
from proxy.server.request import (
    MANAGED,
    RequestHeaders,
    api_path,
    decoded,
    is_local,
    read_headers,
    read_path,
    read_request,
    request_target,
    window_variant,
    with_key_as_header,
)
from tests.support.server_fixture import running_server

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
    async with running_server() as at:
        assert (await at.chat(CHAT, sent)).line.startswith("HTTP/1.1 200")
        heard = at.stage.heard[0]
        if arrives is None:
            assert heard.all(sent.partition(":")[0]) == []
        else:
            assert arrives in [f"{key}: {value}" for key, value in heard.headers]


async def test_nothing_is_added_and_repeated_headers_keep_their_order():
    """The upstream sees the client's headers, Host and Content-Length rewritten, and not one more."""
    async with running_server() as at:
        await at.ask("POST", "/v1/embeddings", b"{}", "B: 1", "a: 2", "b: 3", "Connection: c, close", "C: 4")
        heard = at.stage.heard[0]
        assert heard.headers == [
            ("Host", f"127.0.0.1:{at.stage.port}"), ("B", "1"), ("a", "2"), ("B", "3"), ("Content-Length", "2"),
        ]  # fmt: skip


async def test_a_client_cannot_use_connection_to_strip_its_credential():
    """Credentials named by ``Connection`` are forwarded all the same."""
    async with running_server() as at:
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
    async with running_server() as at:
        got = await at.chat(CHAT, f"{header}: {value}")
        assert got.line == "HTTP/1.1 400 Bad Request"
        assert header.encode() in got.body
        assert got.all("x-ullage-outcome") == ["refused;invalid_request"]
        assert at.stage.heard == []
        assert [(report.outcome, report.status) for report in at.reports] == [("refused", 400)]


async def test_good_options_reach_the_engine():
    """The options in the caller's headers reach the engine."""
    async with running_server() as at:
        await at.chat(
            CHAT, "X-Ullage-Mode: observe", "X-Ullage-Window: 4096", "X-Ullage-Compact: now",
            "X-Ullage-Task-Size: tiny", "X-Ullage-Conversation: c1", "X-Ullage-Project: p1",
        )  # fmt: skip
        wishes = at.engine.seen[0].options
        assert (wishes.mode, wishes.window, wishes.compact_now) == ("observe", 4096, True)
        assert (wishes.task_size, wishes.conversation, wishes.project) == ("tiny", "c1", "p1")


def test_flags_that_change_a_window_are_distinguished():
    """Of the beta flags those of the context count, in any order and however often they are sent."""
    told = {
        value: window_variant(value)
        for value in ("", "tools-2024", "context-1m-2025, tools-2024", "x,context-b ,context-a,context-b")
    }
    assert list(told.values()) == ["", "", "context-1m-2025", "context-a,context-b"]


async def test_the_variant_reaches_the_engine():
    """The options in the headers come with the request."""
    async with running_server() as at:
        await at.chat(CHAT, "Anthropic-Beta: tools-1", "anthropic-beta: context-1m")
        assert at.engine.seen[0].window_variant == "context-1m"


SHARED = ServerConfig("up", access_keys=("pk-1", "pk-2"))

SHARED_ROUTES = [
    ("POST", "/v1/chat/completions", 200),
    ("POST", "/v1/completions", 200),
    ("POST", "/v1/embeddings", 200),
    ("POST", "/v1/messages", 200),
    ("POST", "/messages", 200),
    ("POST", "/v1/responses", 200),
    ("POST", "/v1/responses/compact", 200),
    ("POST", "/v1/responses/resp_1/cancel", 403),
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
    ("GET", "/v1/models/gpt-4o:ft@x", 200),
    ("GET", "/v1/models/", 200),
    ("GET", "/v1/models/..;/files", 403),
    ("GET", "/v1/models/..;a=b/files", 403),
    ("GET", "/v1/models/..%3b/files", 403),
    ("GET", "/v1/models/..%253b/files", 403),
    ("GET", "/v1/models/%2e%2e;/files", 403),
    ("GET", "/v1/models/.%2e/files", 403),
    ("GET", "/v1/models/..\\files", 403),
    ("GET", "/v1/models/..%255cfiles", 403),
    ("GET", "/v1/models/%25252e%25252e/files", 403),
    ("GET", "/v1/models/%2525252e%2525252e/files", 403),
    ("GET", "/v1/models/..%00/files", 403),
    ("GET", "/v1/models/..%09/files", 403),
    ("GET", "/v1/models/..%0d%0a/files", 403),
    ("GET", "/v1/models/%c0%ae%c0%ae/files", 403),
    ("GET", "/v1/models/%ef%bc%8e%ef%bc%8e/files", 403),
    ("GET", "/v1/models/%u002e%u002e/files", 403),
    ("GET", "/v1/models/x%23/../../files", 403),
    ("GET", "/v1/models/%3f/files", 403),
    ("GET", "/v1/models//files", 403),
    ("GET", "/v1//models", 403),
    ("GET", "//models", 403),
    ("GET", "//v1/files", 403),
    ("GET", "/v1;a/files", 403),
    ("GET", "/models/..;/files", 403),
    ("GET", "/openai/deployments/d/models/..;/files", 403),
    ("GET", "/openai/deployments/..;/models", 403),
    ("GET", "/v1/realtime/..;/files", 403),
    ("POST", "/v1/images/..;/files", 403),
    ("POST", "/v1/embeddings;/../files", 403),
    ("POST", "/openai/deployments/d/audio/..%2f..%2ffiles", 403),
    ("POST", "/v1/responses;", 403),
    ("GET", "/anything", 403),
]


@pytest.mark.parametrize(("method", "path", "status"), SHARED_ROUTES)
async def test_behind_shared_keys_only_stateless_routes_are_relayed(method, path, status):
    """Callers that share the upstream's key cannot reach what others keep under it, however the path is written."""
    async with running_server(SHARED, api_key="uk") as at:
        got = await at.ask(method, path, b"{}" if method == "POST" else b"", "X-Api-Key: pk-1")
        assert got.line.split()[1] == str(status)
        assert len(at.stage.heard) == (status == 200)


@pytest.mark.parametrize("path", ["/v1/response%73", "/v1/responses/", "/v1//responses", "//v1/%72esponses//"])
async def test_behind_shared_keys_a_managed_route_is_sent_in_its_usual_spelling(path):
    """However it is spelled, the upstream gets the path that was judged, and nothing that another caller stored."""
    async with running_server(SHARED, api_key="uk") as at:
        got = await at.ask("POST", path, b"{}", "X-Api-Key: pk-1")
        assert (got.line.split()[1], at.stage.heard[0].line) == ("200", "POST /v1/responses HTTP/1.1")
        stored = await at.ask("POST", path, b'{"previous_response_id": "r"}', "X-Api-Key: pk-1")
        assert (stored.line.split()[1], len(at.stage.heard)) == ("403", 1)


async def test_every_route_is_relayed_on_request_or_without_a_shared_key():
    """``relay: all`` opens the others, and so does an upstream that has no key of ours."""
    async with running_server(ServerConfig("up", access_keys=("pk-1",), relay="all"), api_key="uk") as at:
        assert (await at.ask("GET", "/v1/files", b"", "X-Api-Key: pk-1")).line.endswith("200 OK")
    async with running_server(SHARED) as at:
        assert (await at.ask("GET", "/v1/files", b"", "X-Api-Key: pk-1")).line.endswith("200 OK")


@pytest.mark.parametrize("path", ["/anything", "/v1/v1/chat/completions", "/openai/v1/v1/models"])
async def test_a_wrong_base_url_is_explained_behind_shared_keys_too(path):
    """A newcomer with /v1 twice, or without it, reads more than which routes are stateless."""
    async with running_server(SHARED, api_key="uk") as at:
        got = await at.ask("GET", path, b"", "X-Api-Key: pk-1")
        assert (got.line, b"end in one /v1" in got.body) == ("HTTP/1.1 403 Forbidden", True)
        other = await at.ask("GET", "/v1/files", b"", "X-Api-Key: pk-1")
        assert b"end in one /v1" not in other.body


async def test_a_trace_would_show_the_upstream_s_key():
    """The answer to a TRACE is the request itself, so none is relayed."""
    async with running_server(api_key="uk") as at:
        assert (await at.ask("TRACE", "/v1/models")).line == "HTTP/1.1 400 Bad Request"
        assert at.stage.heard == []


@pytest.mark.parametrize(
    ("path", "name", "api"),
    [
        ("/v1/messages", "messages", "messages"),
        ("/messages/count_tokens", "messages/count_tokens", "messages"),
        ("/openai/v1/responses/r_1", "responses/r_1", "responses"),
        ("/v1/chat/completions", "chat/completions", "chat"),
        ("/anthropic/v1/messages", "messages", "messages"),
        ("/openai/deployments/d-1/responses", "responses", "responses"),
        ("/v1x/models", "v1x/models", "chat"),
        ("/v1beta/cachedContents/x", "v1beta/cachedContents/x", "gemini"),
        ("/", "", "chat"),
    ],
)
def test_a_path_below_its_root_and_its_error_shape(path, name, api):
    """The API's root is taken off where it stands, and the rest says in which shape errors are worded."""
    assert (api_path(path), read_path("GET", path).error_api) == (name, api)


def test_only_our_own_paths_are_local():
    """Health, metrics, the root and /ullage/ are answered here; what merely begins alike is not."""
    for path in ("/", "/metrics", "/health/live", "/health/x", "/healthz", "/readyz", "/ullage/", "/ullage/api/status"):
        assert is_local(path)
    for path in ("/v1/metrics", "/metrics/x", "/healthy", "/ullage", "/v1/health/live", "//metrics"):
        assert not is_local(path)
    assert not any(map(is_local, MANAGED))


@pytest.mark.parametrize("path", ["/v1/models/../files", "/v1/models/%2e%2e/files", "/v1/models/%252e%252e/files",
                                  "/v1/models/..\\files", "/v1/embeddings/./x"])  # fmt: skip
def test_a_path_that_climbs_is_not_stateless(path):
    """Whatever an upstream decodes before it resolves dots, no other route can be reached through a stateless one."""
    assert not is_stateless("GET", path)
    assert not is_stateless("POST", path)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v1/chat/completions", ("chat", "")),
        ("/messages", ("messages", "")),
        ("/anthropic/v1/messages/count_tokens", ("messages", "")),
        ("/openai/v1/responses", ("responses", "")),
        ("/openai/deployments/my-gpt.4/chat/completions", ("chat", "my-gpt.4")),
        ("/openai/deployments/my-gpt/embeddings", None),
        ("/openai/deployments/../chat/completions", None),
        ("/openai/deployments/./responses", None),
        ("/openai/deployments/a%2f..%2fb/responses", None),
        ("/openai/deployments/a/b/responses", None),
        ("/v1/responses/resp_1", None),
        ("/v1/responses/compact", ("responses", "")),
        ("/v1/messages/batches", None),
        ("/v2/messages", None),
        ("/openai/responses", ("responses", "")),
        ("/openai/responses/compact", ("responses", "")),
        ("/openai/messages", None),
        ("/openai/deployments/d/responses/compact", ("responses", "d")),
        ("/api/v1/chat/completions", ("chat", "")),
        ("/api/paas/v4/chat/completions", ("chat", "")),
        ("/v1beta/openai/chat/completions", ("chat", "")),
        ("/engines/m/chat/completions", ("chat", "")),
        ("/api/anthropic/v1/messages", ("messages", "")),
        ("/api/v1/messages/count_tokens", ("messages", "")),
        ("/api/v1/responses/compact", ("responses", "")),
        ("/api/v1/compress", None),
        ("/v1/v1/chat/completions", None),
        ("/v1/threads/v1/messages", None),
        ("/v1/threads/t/messages", None),
        ("/api/../v1/messages", None),
        ("/v1beta/models/gemini-x:generateContent", ("gemini", "gemini-x")),
        ("/v1/models/gemini-x:streamGenerateContent", ("gemini", "gemini-x")),
        ("/v1beta/models/gemini-x:countTokens", ("gemini", "gemini-x")),
        ("/v1beta/models/gemini-x:embedContent", ("relay", "gemini-x")),
        ("/v1/models/gemini-x:embedContent", ("relay", "gemini-x")),
    ],
)
def test_managed_paths(path, found):
    """A path is managed for an API, and may name the model; a deployment is a plain name."""
    read = read_path("POST", f"{path}?a=b")
    assert (read.path_qs, read.path) == (f"{path}?a=b", path)
    assert (read.api, read.model) == (found or ("relay", ""))
    assert (read.purpose == "count") == path.endswith(("/count_tokens", ":countTokens"))
    assert (read.purpose == "compact") == path.endswith("/compact")
    assert read_path("GET", path).api == "relay"


@pytest.mark.parametrize(
    ("target", "usual", "api"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions", "chat"),
        ("//v1/chat//completions?a=%2f/", "/v1/chat/completions?a=%2f/", "chat"),
        ("/v1/chat/complet%69ons", "/v1/chat/completions", "chat"),
        ("/%76%31/m%65ssages//?beta=true", "/v1/messages?beta=true", "messages"),
        ("/openai/deployments/a%2Db/responses/?v=1", "/openai/deployments/a-b/responses?v=1", "responses"),
        ("/api/v1/responses/", "/api/v1/responses", "responses"),
        ("/v1beta/models/g%3AgenerateContent", "/v1beta/models/g:generateContent", "gemini"),
        ("http://host//v1/messages", "/v1/messages", "messages"),
    ],
)  # fmt: skip
def test_an_unusual_spelling_of_a_managed_path(target, usual, api):
    """What a lenient server reads as a managed route is managed, and goes on in the spelling that was judged."""
    read = read_path("POST", target)
    assert (read.path_qs, read.path, read.api) == (usual, usual.partition("?")[0], api)


@pytest.mark.parametrize("target", ["/v1/chat%2Fcompletions", "/v1/./messages", "/v1/messages%20", "/v1/%6Dodels/",
                                    "/v1/files/", "//host/x", "/v1/messages%25", "/v1/x/%2e%2e/messages"])  # fmt: skip
def test_other_paths_keep_their_spelling(target):
    """A path that is relayed is the client's own, byte for byte."""
    read = read_path("POST", target)
    assert (read.path_qs, read.api) == (target, "relay")


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("/v1/x?a=b://c", "/v1/x?a=b://c"),
        ("//host/x", "//host/x"),
        ("http://host/v1/x?y", "/v1/x?y"),
        ("http://host", "/"),
        ("*", "*"),
        ("host:443", "host:443"),
    ],
)
def test_a_request_lines_target_is_its_path(raw, path):
    """Path and query stay byte for byte; of an absolute URL only scheme and host are taken off."""
    assert request_target(raw) == path


BODY = b'{"model": "m", "messages": []}'


def intake(*fields: tuple[str, str]) -> RequestHeaders:
    """Headers as they come in."""
    return read_headers([(name.encode(), value.encode()) for name, value in fields])


def reader_of(body: bytes) -> BodyReader:
    return BodyReader(asyncio.StreamReader(), Limits(), BodyBytes(10**6), b"t")  # type: ignore[arg-type]


def request_of(headers: RequestHeaders, path: str = "/v1/chat/completions") -> Request:
    """The request that is read."""
    return read_request(BODY, read_path("POST", path), headers, b"t" * 32, "r1")


def test_headers_and_path_say_how_it_is_meant() -> None:
    """Wishes, the session and the model of the path are read; what goes on is kept as the origin."""
    headers = intake(("x-ullage-mode", "observe"), ("user-agent", "x"), ("content-type", "application/json"))
    request = request_of(headers, "/openai/deployments/gpt-5/chat/completions?api-version=1")
    assert (request.body, request.options.mode, request.path_model) == (BODY, "observe", "gpt-5")
    assert request.origin is not None
    assert request.origin.path_qs.endswith("api-version=1")
    assert ("user-agent", "x") in request.origin.headers


def test_a_key_in_the_query_becomes_a_header() -> None:
    """It is read and goes on as Google's header, and is in no path; a second one is refused."""
    path = read_path("POST", "/v1beta/models/m:generateContent?key=a%2Bb&alt=sse")
    headers = intake(("accept", "*/*"))
    moved = with_key_as_header(path, headers)
    assert (moved.path_qs, moved.api, moved.model) == ("/v1beta/models/m:generateContent?alt=sse", "gemini", "m")
    assert headers.by_name["x-goog-api-key"] == "a+b"
    assert headers.end_to_end == (("accept", "*/*"), ("x-goog-api-key", "a+b"))
    with pytest.raises(InvalidRequest, match="more than once"):
        with_key_as_header(path, headers)


def test_headers_name_the_session_and_the_beta_of_a_larger_window() -> None:
    """Headers that name a conversation are read, and the flags that change a window."""
    headers = intake(("thread-id", "t-1"), ("x-codex-window-id", "t-1:3"), ("anthropic-beta", "context-1m, other"))
    request = request_of(headers)
    assert (request.session, request.epoch, request.window_variant) == ("t-1", 3, "context-1m")
    assert (request_of(intake()).session, request_of(intake()).window_variant) == ("", "")


async def test_a_content_encoding_is_taken_off_with_its_header() -> None:
    """The engine gets plain JSON; a body that is not what its header says is refused, and its header stays."""
    headers = intake(("content-encoding", "gzip"))
    packed = gzip.compress(BODY)
    assert await decoded(packed, headers, reader_of(packed), Limits()) == BODY
    assert headers.end_to_end == ()
    broken = intake(("content-encoding", "gzip"))
    with pytest.raises(InvalidRequest):
        await decoded(BODY, broken, reader_of(BODY), Limits())
    assert [name for name, _ in broken.end_to_end] == ["content-encoding"]


def test_a_wish_that_cannot_be_is_refused() -> None:
    """A wrong value in a header of ours is an error that names the header."""
    with pytest.raises(InvalidRequest):
        request_of(intake(("x-ullage-mode", "sometimes")))
