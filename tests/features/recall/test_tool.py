"""How the recall tool is declared."""

from __future__ import annotations

import json

import pytest

from proxy.core.decisions import Addition
from proxy.features.recall.tool import DECLARATIONS, MENTION, NAME
from tests.support.api_formats import tools_of
from tests.support.sample_conversations import AGENT_TOOLS
from tests.support.server_tool_fixtures import APIS


@pytest.mark.parametrize("api", APIS)
def test_the_tools_of_the_client_stay_as_they_are(api: str) -> None:
    """The declaration stands behind the client's tools, whose bytes do not change."""
    tools = json.dumps(tools_of(AGENT_TOOLS, api), indent=2)
    made = Addition(DECLARATIONS[api]).added_to(tools)
    assert made.startswith(tools[:-1].rstrip())
    assert json.loads(made) == [*json.loads(tools), json.loads(DECLARATIONS[api])]
    assert NAME in MENTION


@pytest.mark.parametrize("tools", ["", "null", "[]", "[ ]"])
def test_without_tools_of_the_client_it_stands_alone(tools: str) -> None:
    """The array has the declaration only."""
    assert Addition(DECLARATIONS["chat"]).added_to(tools) == f"[{DECLARATIONS['chat']}]"
