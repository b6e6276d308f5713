import pytest

from proxy.upstream.targets import BaseUrl

CASES = [
    ("http://h/v1", "/v1/models", "http://h/v1/models"),
    ("http://h/v1/", "/v1/models", "http://h/v1/models"),
    ("http://h/v1", "/models?a=%2f&b", "http://h/v1/models?a=%2f&b"),
    ("http://h", "/v1/models", "http://h/v1/models"),
    ("http://h/", "/chat/completions", "http://h/v1/chat/completions"),
    ("http://h/v1", "/skills", "http://h/v1/skills"),
    ("http://h", "/tokenize", "http://h/tokenize"),
    ("http://h/v1", "/tokenize", "http://h/tokenize"),
    ("http://h/v1", "/v1/tokenize", "http://h/v1/tokenize"),
    ("http://h/v1", "/v1x/models", "http://h/v1x/models"),
    ("http://h/v1", "/v1?x=/v1/", "http://h/v1?x=/v1/"),
    ("http://h/openai/v1", "/v1/models", "http://h/openai/v1/models"),
    ("http://h/openai/v1", "/openai/v1/models", "http://h/openai/v1/models"),
    ("http://h/v1", "/openai/v1/models", "http://h/v1/models"),
    ("http://h", "/openai/v1/models", "http://h/openai/v1/models"),
    ("http://h/openai", "/openai/deployments/d/chat/completions?api-version=1",
     "http://h/openai/deployments/d/chat/completions?api-version=1"),
    ("http://h/openai/v1", "/openai/deployments/d/responses", "http://h/openai/deployments/d/responses"),
    ("http://h/v1", "/anthropic/v1/messages?beta=true", "http://h/v1/messages?beta=true"),
    ("http://h", "/anthropic/v1/messages", "http://h/anthropic/v1/messages"),
    ("http://h/anthropic", "/v1/messages", "http://h/anthropic/v1/messages"),
    ("http://h/anthropic/v1", "/anthropic/v1/messages", "http://h/anthropic/v1/messages"),
    ("http://h/v1", "/anthropic/v2/messages", "http://h/anthropic/v2/messages"),
    ("http://h/v1beta/openai", "/v1/chat/completions", "http://h/v1beta/openai/chat/completions"),
    ("http://h/v1beta/openai/", "/chat/completions", "http://h/v1beta/openai/chat/completions"),
    ("http://h/api/paas/v4", "/v1/chat/completions", "http://h/api/paas/v4/chat/completions"),
    ("http://h/ollama", "/v1/models", "http://h/ollama/v1/models"),
    ("https://h:8443/v1", "//evil/v1", "https://h:8443//evil/v1"),
    ("http://h", "/@evil/", "http://h/@evil/"),
    ("http://h/v1", "/v1/files/a%2Fb/../c%20", "http://h/v1/files/a%2Fb/../c%20"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "path", "url"), CASES)
def test_client_paths_are_joined_once(base, path, url):
    """With and without a version on either side the client's path lands on the route it means, on that host."""
    assert BaseUrl(base).join(path) == url
