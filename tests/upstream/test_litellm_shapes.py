import json
from typing import Any

import pytest

from proxy.upstream import litellm_shapes as shapes
from proxy.upstream.litellm_shapes import FIELDS, dropped_member


@pytest.mark.parametrize(
    ("body", "message", "kind", "code"),
    [
        ({"type": "error", "error": {"type": "t", "message": "m"}}, "m", "t", None),
        ({"error": {"code": 400, "message": "m", "status": "INVALID_ARGUMENT"}}, "m", "INVALID_ARGUMENT", None),
        ([{"error": {"code": 400, "message": "m"}}], "m", "invalid_request_error", None),
        ({"error": {"message": "m", "type": "t", "code": "c"}}, "m", "t", "c"),
        ({"error": "m"}, "m", "invalid_request_error", None),
        ({"message": "m"}, "m", "invalid_request_error", None),
        ({"Message": "m"}, "m", "invalid_request_error", None),
        ({"detail": "m"}, "m", "invalid_request_error", None),
        ([], "[]", "invalid_request_error", None),
        ("just text", '"just text"', "invalid_request_error", None),
    ],
)
def test_every_providers_error_is_openais(body, message, kind, code):
    """Message, type and code are found in the places of each provider; any other body is the message."""
    status, document = shapes.openai_refusal(400, json.dumps(body).encode(), overflow=False)
    assert (status, document) == (400, {"error": {"message": message, "type": kind, "param": None, "code": code}})


def test_an_overflow_has_openais_code():
    """Clients that know the code need not know the words."""
    assert shapes.openai_refusal(413, b"too long", overflow=True)[1]["error"]["code"] == "context_length_exceeded"


class Refused(Exception):
    status_code = 422


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (Refused('litellm.BadRequestError: AnthropicException - {"error": {"message": "m"}}'), 422, "m"),
        (Refused("litellm.BadRequestError: plain words"), 422, "plain words"),
        (KeyError("x"), 500, "'x'"),
        (Refused("words\nTraceback (most recent call last):\n  File x"), 422, "words"),
    ],
)
def test_what_litellm_says_itself(error, status, message):
    """Its own names and traces are taken off; the provider's words inside are found."""
    found, document = shapes.openai_error(error, overflow=False)
    assert (found, document["error"]["message"]) == (status, message)


def test_empty_lists_are_left_out():
    """Members that LiteLLM adds for other providers are left out of an answer; the choices always stay."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "x", "images": []}, "finish_reason": "stop"}
    got = shapes.openai_answer({"choices": [choice], "vertex_ai_safety_results": []}, "m")
    message = {"role": "assistant", "content": "x"}
    assert got == {"choices": [{**choice, "message": message}], "model": "m"}
    assert shapes.openai_chunk({"choices": [], "usage": {"prompt_tokens": 1, "cost": 2.0}}) == {
        "choices": [],
        "usage": {"prompt_tokens": 1},
    }


def test_lone_surrogates_go_through():
    """Half an emoji, as agents cut them, does not break an answer."""
    assert b"\xed\xa0\xbd" in shapes.encoded({"x": "\ud83d"})


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
def test_members_that_would_be_lost(provider: str, model: str, members: dict[str, Any], is_lost: bool) -> None:
    """It is named with a remedy; everything else passes."""
    assert bool(dropped_member(provider, {"model": model, **members})) == is_lost
    assert members.keys() <= FIELDS
