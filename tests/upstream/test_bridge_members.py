"""What LiteLLM would leave out in silence is known by provider, model and value."""

from typing import Any

import pytest

from proxy.upstream.bridge_members import FIELDS, lost

JSON = {"response_format": {"type": "json_object"}}
ONE = {"parallel_tool_calls": False}
SEARCH = {"web_search_options": {}}


@pytest.mark.parametrize(
    ("provider", "model", "members", "is_lost"),
    [
        ("anthropic", "claude-sonnet-4-5", JSON, True),
        ("bedrock", "anthropic.claude-3", JSON, True),
        ("bedrock", "amazon.nova-pro-v1:0", JSON, True),
        ("vertex_ai", "claude-sonnet-4-5", JSON, True),
        ("gemini", "gemini-2.5-pro", JSON, False),
        ("mistral", "mistral-large", JSON, False),
        ("anthropic", "claude-sonnet-4-5", {"response_format": {"type": "json_schema"}}, False),
        ("anthropic", "claude-sonnet-4-5", {"response_format": "json"}, False),
        ("gemini", "gemini-2.5-pro", ONE, True),
        ("gemini", "gemini-2.5-pro", {"parallel_tool_calls": True}, False),
        ("bedrock", "amazon.nova-pro-v1:0", ONE, True),
        ("bedrock", "anthropic.claude-3", ONE, False),
        ("gemini", "gemini-2.5-pro", {**SEARCH, "tools": [{}]}, True),
        ("gemini", "gemini-2.5-pro", SEARCH, False),
    ],
)
def test_what_is_lost(provider: str, model: str, members: dict[str, Any], is_lost: bool) -> None:
    """It is named with a remedy; everything else passes."""
    assert bool(lost(provider, {"model": model, **members})) == is_lost
    assert members.keys() <= FIELDS
