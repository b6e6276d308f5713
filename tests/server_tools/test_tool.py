"""When a server tool may be offered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.apis.envelope import read_envelope
from proxy.features.recall.tool import NAME
from proxy.server_tools.tool import may_offer, query_in
from tests.support.api_formats import tools_of
from tests.support.sample_conversations import AGENT_TOOLS
from tests.support.server_tool_fixtures import APIS


def offered(api: str, **members: Any) -> bool:
    body = {"model": "m", "tools": tools_of(AGENT_TOOLS, api), **members}
    body = {key: value for key, value in body.items() if value is not ...}
    return may_offer(api, read_envelope(json.dumps(body), ("max_tokens",)), NAME)


@pytest.mark.parametrize("api", APIS)
def test_it_is_offered_beside_tools_of_the_client(api: str) -> None:
    """A client that leaves the model free is offered it, with tools of its own or without."""
    free: Any = {"type": "auto"} if api == "messages" else "auto"
    assert offered(api)
    assert offered(api, tool_choice=free)
    assert offered(api, tools=...)
    assert offered(api, tools=[])
    assert offered(api, tools=None)
    assert not offered(api, tools={})


def test_a_client_of_legacy_functions_is_not_offered_it() -> None:
    """No server takes both members in one request."""
    functions = [tool["function"] for tool in AGENT_TOOLS]
    assert not offered("chat", tools=..., functions=functions)
    assert offered("chat", tools=..., functions=[])


@pytest.mark.parametrize(
    ("api", "choice"),
    [
        *((api, choice) for api in ("chat", "responses") for choice in ("none", "required", {"type": "function"})),
        *(("messages", {"type": kind}) for kind in ("any", "none", "tool")),
    ],
)
def test_a_choice_that_is_made_leaves_no_room_for_it(api: str, choice: Any) -> None:
    """If the client forbids or demands a call, the tool is not offered."""
    assert not offered(api, tool_choice=choice)


@pytest.mark.parametrize(
    ("api", "members"),
    [
        ("chat", {"response_format": {"type": "json_object"}}),
        ("chat", {"n": 2}),
        ("chat", {"audio": {"voice": "alloy"}}),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}),
        ("responses", {"background": True}),
        ("responses", {"previous_response_id": "resp_1"}),
        ("responses", {"conversation": "conv_1"}),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}),
        ("messages", {"container": "c1"}),
    ],
)
def test_an_answer_with_a_form_of_its_own_is_left_alone(api: str, members: dict[str, Any]) -> None:
    """No tool where two generations cannot be one answer, or where the history is elsewhere."""
    assert not offered(api, **members)


@pytest.mark.parametrize(
    ("api", "members"),
    [
        ("chat", {"response_format": {"type": "text"}, "n": 1}),
        ("responses", {"text": {"format": {"type": "text"}, "verbosity": "low"}, "background": False}),
        ("messages", {"output_config": {"effort": "low"}}),
    ],
)
def test_members_that_ask_for_the_usual_do_not_matter(api: str, members: dict[str, Any]) -> None:
    """A member with its default value changes nothing."""
    assert offered(api, **members)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("escaped", [False, True])
def test_it_never_shadows_a_tool_of_the_client(api: str, escaped: bool) -> None:
    """A client's tool of the same name, however it is spelled, keeps the name for itself."""
    own = json.loads(json.dumps(AGENT_TOOLS))
    own[1]["function"]["name"] = NAME
    text = json.dumps({"model": "m", "tools": tools_of(own, api)})
    text = text.replace("ullage_", "ullage\\u005f") if escaped else text
    assert not may_offer(api, read_envelope(text, ()), NAME)


@pytest.mark.parametrize(
    ("arguments", "query"),
    [('{"query":"a b"}', "a b"), ("", ""), ("[", "["), ('"a"', "a"), ('{"query":null}', ""), ('{"query":7}', "7")],
)
def test_any_arguments_are_a_query(arguments: str, query: str) -> None:
    """A model that writes words where JSON was wanted is answered, too."""
    assert query_in(arguments) == query
