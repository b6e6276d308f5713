"""Which path means what."""

import pytest

from proxy.server import ServerConfig
from proxy.server.routes import COMPACTING, COUNTING, MANAGED, api_path, is_local, is_stateless, managed, wire
from tests.support.server_fixture import house

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
    ("POST", "/v1/response%73", 403),
    ("POST", "/v1/responses;", 403),
    ("POST", "/v1/responses/", 403),
    ("POST", "/v1//responses", 403),
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
        ("/", "", "chat"),
    ],
)
def test_a_path_below_its_root_and_its_error_shape(path, name, api):
    """The API's root is taken off where it stands, and the rest says in which shape errors are worded."""
    assert (api_path(path), wire(path)) == (name, api)


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
    ],
)
def test_what_is_managed(path, found):
    """A path is managed for an API, and may name the model; a deployment is a plain name."""
    assert managed(path) == found
    assert (path in COUNTING) == path.endswith("/count_tokens")
    assert (path in COMPACTING) == path.endswith("/compact")
