"""The error tree: what a client of each API reads, and what the proxy answers with."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import errors
from proxy.core.errors import ContextTooLong, UllageError, error_body

ANTHROPIC = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
    "timeout_error",
}
"""The types of error its clients know."""

EVERY: list[UllageError] = [
    errors.InvalidRequest("x"),
    errors.Unauthorized("x"),
    errors.Forbidden("x"),
    errors.NotFound("x"),
    errors.Conflict("x"),
    errors.TooManyRequests("x"),
    errors.StoreUnavailable(),
    errors.OtherVersion(9),
    errors.RequestTimeout("x"),
    errors.BodyTooLarge(5),
    errors.TooManyItems(5),
    errors.InflatesTooFar(5),
    errors.Overloaded("x"),
    errors.UpstreamUnreachable("local", "refused"),
    errors.UpstreamTimeout("local", 30),
    errors.StoredHistoryTooLong("local"),
    ContextTooLong(tokens=900, limit=1000, reserve=200, largest="tools", largest_tokens=700),
]


def test_every_error_is_tried() -> None:
    """The list above names each kind of error there is."""
    named = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, UllageError)}
    assert {type(error) for error in EVERY} == named - {UllageError, errors.UpstreamError}


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_an_error_has_a_status_and_three_shapes(error: UllageError) -> None:
    """Each error states a 4xx or 5xx, and says the same in OpenAI's, in Anthropic's and in Google's shape."""
    assert 400 <= error.status < 600
    chat = json.loads(error_body(error, "chat"))["error"]
    assert chat.keys() == {"message", "type", "param", "code"}
    assert (chat["message"], chat["type"], chat["code"]) == (error.message, error.kind, error.code)
    messages = json.loads(error_body(error, "messages"))
    assert messages["type"] == "error"
    assert messages["error"]["type"] in ANTHROPIC
    assert messages["error"]["message"] == getattr(error, "anthropic", error.message)
    google = json.loads(error_body(error, "gemini"))["error"]
    assert (google["code"], google["message"]) == (error.status, getattr(error, "google", error.message))
    assert google["status"].isupper()


def test_statuses_are_those_clients_act_on() -> None:
    """Clients retry, re-authenticate or shorten by status and code, so these are fixed."""
    assert {type(error).__name__: error.status for error in EVERY} == {
        "InvalidRequest": 400,
        "Unauthorized": 401,
        "Forbidden": 403,
        "NotFound": 404,
        "Conflict": 409,
        "TooManyRequests": 429,
        "StoreUnavailable": 503,
        "OtherVersion": 503,
        "RequestTimeout": 408,
        "BodyTooLarge": 413,
        "TooManyItems": 413,
        "InflatesTooFar": 413,
        "Overloaded": 503,
        "UpstreamUnreachable": 502,
        "UpstreamTimeout": 504,
        "StoredHistoryTooLong": 400,
        "ContextTooLong": 400,
    }


def test_too_long_is_what_openai_clients_look_for() -> None:
    """The refusal carries OpenAI's code and parameter, and a sentence with limit, size, excess and culprit."""
    body = json.loads(error_body(EVERY[-1], "chat"))["error"]
    assert (body["code"], body["param"], body["type"]) == (
        "context_length_exceeded",
        "messages",
        "invalid_request_error",
    )
    for fact in ("maximum context length is 1000 tokens", "900 tokens of input", "200 of output", "100 too many"):
        assert fact in body["message"]
    assert "the tools alone take 700 tokens" in body["message"]


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_refusal_is_never_too_big_by_nothing(tokens: int, limit: int, reserve: int) -> None:
    """The stated excess is the difference, and at least one token."""
    excess = ContextTooLong.excess(tokens, limit, reserve)
    assert excess >= 1
    assert excess == max(1, tokens + reserve - limit)


@given(st.text() | st.sampled_from(["\ud800", "a\udfffb"]), st.sampled_from(["chat", "messages", "gemini"]))
def test_any_words_can_be_sent(words: str, api: str) -> None:
    """For any message, lone surrogates included, the body is valid UTF-8 JSON that contains it."""
    shape = json.loads(error_body(errors.InvalidRequest(words), api).decode())
    assert shape["error"]["message"] == (words or "Ullage failed to handle this request.")


def test_an_error_without_words_still_says_something() -> None:
    """An error raised bare has a sentence of its own."""
    assert UllageError().message == "Ullage failed to handle this request."
    assert UllageError().status == 500
