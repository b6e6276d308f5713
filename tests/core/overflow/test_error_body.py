"""The parts of an error answer of any format."""

from __future__ import annotations

import json

import pytest

from proxy.core.overflow.error_body import MOST_CHARACTERS, MOST_TEXTS, error_parts, is_error, parse_body, stated_status

SENTENCE = "prompt is too long"


@pytest.mark.parametrize(
    "value",
    [
        {"error": {"message": SENTENCE}},
        {"error": SENTENCE},
        {"detail": SENTENCE},
        {"detail": [{"msg": SENTENCE}]},
        {"message": SENTENCE},
        [{"error": {"message": SENTENCE}}],
        {"errors": [{"message": SENTENCE}]},
        {"error": {"metadata": {"raw": json.dumps({"error": {"message": SENTENCE}})}}},
        {"error": {"message": f"upstream said {json.dumps({'message': SENTENCE})}, sorry"}},
        {"headers": {":exception-type": {}}, "body": json.dumps({"message": SENTENCE})},
        {"type": "response.failed", "response": {"error": {"message": SENTENCE}}},
        f"<html><head><title>{SENTENCE}</title></head></html>",
        SENTENCE,
    ],
)
def test_envelopes(value: object) -> None:
    """The sentence comes out of every envelope by itself."""
    assert SENTENCE in error_parts(value).texts


def test_codes_and_members() -> None:
    """Single words are codes, numbers are members under their names."""
    parts = error_parts({"error": {"code": "a_code", "type": "b_type", "n_ctx": 7, "status": 413, "ok": True}})
    assert parts.codes == ["a_code", "b_type", "413"]
    assert ("n_ctx", 7) in parts.members
    assert "ok" not in dict(parts.members)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"error": {"message": "Invalid 'user': string too long.", "param": None}}, "user"),
        ({"error": {"message": "no", "param": "messages"}}, "messages"),
        ({"error": {"message": "no", "param": {"a": 1}}}, ""),
        ({"error": {"message": "no", "param": "None"}}, ""),
        ({"errors": [{"field": "body", "message": "no"}]}, "body"),
        ({"errors": {"name": ["is no good"]}}, "name"),
        ({"errors": {"name": "is no good"}}, "name"),
        ({"errors": {"detail": "is no good"}}, ""),
        ({"path": "/v1/chat", "message": "no"}, ""),
        ({"detail": [{"loc": ["body", "messages", 0, "content"], "msg": "no"}]}, "messages.0.content"),
        ({"detail": [{"loc": ["body"], "msg": "no"}]}, ""),
        ({"message": "Malformed input request: #/texts/41: expected maxLength: 2048"}, "texts.41"),
    ],
)
def test_places(value: object, place: str) -> None:
    """The part of the request that an error complains of is known where it is named."""
    assert error_parts(value).member_at_fault == place


@pytest.mark.parametrize(
    "literal", ["{'loc': {[]: 1}}", "[{'loc': {{}: 1}}]", "[{'loc': (1, }]", "{'loc': ...}", "{'loc': 1 + 'a'}"]
)
def test_what_only_looks_like_an_object_of_python_is_text(literal: str) -> None:
    """Whatever stands between brackets, the sentence around it is read."""
    assert any(text.startswith(SENTENCE) for text in error_parts(f"{SENTENCE}: {literal}").texts)


@pytest.mark.parametrize("name", ["input", "messages", "prompt", "request", "model", "id"])
def test_echoes(name: str) -> None:
    """Members that repeat the request are left out."""
    assert error_parts({"detail": [{"msg": "no way", name: SENTENCE}]}).texts == ["no way"]


def test_texts_about_members_are_no_echo() -> None:
    """What frameworks say of a member of the request, under its name, is theirs; messages of errors have no role."""
    assert error_parts({"errors": {"messages": ["are too long", "are bad"]}}).texts == ["are too long", "are bad"]
    assert error_parts({"messages": [{"errorCode": "x-1", "message": "not this"}]}).texts == ["not this"]
    assert error_parts({"messages": [{"role": "user", "content": SENTENCE}]}).texts == []
    assert error_parts({"error": {"input": [SENTENCE]}}).texts == []


def test_codes_in_texts_stay_apart() -> None:
    """A code in JSON inside a text may be quoted, and is known apart from the error's own."""
    parts = error_parts({"error": {"code": "own_code", "message": 'the upstream: {"error": {"code": "their_code"}}'}})
    assert (parts.codes, parts.embedded_codes) == (["own_code"], ["their_code"])
    assert stated_status({"error": 'busy: {"code": "rate_limit_exceeded"}'}) == 429


@pytest.mark.parametrize(
    ("written", "value"),
    [(r"C:\dir\data", r"C:\dir\data"), (r"\d+", r"\d+"), (r"\\d", r"\d"), (r"\777", r"\777"), (r"a\tb", "a\tb")],
)
@pytest.mark.filterwarnings("error")
def test_backslashes_that_escape_nothing(written: str, value: str) -> None:
    """Paths and patterns in what Python wrote are read without a warning."""
    assert value in error_parts(f"{SENTENCE}: [{{'msg': 'see {written} here'}}]").texts[1]


def test_bounds() -> None:
    """However much there is, a bounded part is taken."""
    parts = error_parts({"error": [f"text number {number} {'x ' * 400}" for number in range(10_000)]})
    assert len(parts.texts) <= MOST_TEXTS
    assert sum(map(len, parts.texts)) <= MOST_CHARACTERS
    nested: object = SENTENCE
    for _ in range(60):
        nested = {"error": nested}
    assert error_parts(nested).texts == []


@pytest.mark.parametrize("body", [b"", b"[" * 100_000, b"{", b"\xff\xfe", b'{"a": NaN}'])
def test_any_bytes_open(body: bytes) -> None:
    """A body that is no JSON is text."""
    error_parts(parse_body(body))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"error": {}}, False),
        ({"error": None, "choices": []}, False),
        ({"choices": [{}], "detail": "x"}, False),
        ({"detail": "x"}, True),
        ({"type": "error"}, True),
        ({"object": "error"}, True),
        ([{"error": "x"}], True),
        ([], False),
        ("error", False),
        ({"response": {"error": None}}, False),
        ({"response": {"error": {"code": "x"}}}, True),
        ({"Response": {"Error": {"Code": "x"}, "RequestId": "1"}}, True),
        ({"Response": {"RequestId": "1"}}, False),
        ({"error_code": 336103, "error_msg": "Prompt tokens too long", "id": "as-1"}, True),
        ({"error_type": "context_length_exceeded", "error_message": "no"}, True),
        ({"code": 10907, "message": "x", "sid": "1"}, True),
        ({"code": 0, "message": "Success", "sid": "1"}, False),
        ({"code": 20015, "message": "x", "data": None}, True),
        ({"code": 1, "message": "x", "choices": [{}]}, False),
        ({"base_resp": {"status_code": 2013, "status_msg": "x"}, "choices": None}, True),
        ({"base_resp": {"status_code": 0, "status_msg": ""}, "reply": "x"}, False),
    ],
)
def test_what_says_by_its_shape_that_it_is_an_error(value: object, expected: bool) -> None:
    """An answer is no error because it could hold one."""
    assert is_error(value) is expected


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ({"error": {"message": "Rate limit reached", "type": "tokens", "code": "rate_limit_exceeded"}}, 429),
        ({"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}, 429),
        ({"error": {"message": "litellm.RateLimitError", "type": None, "code": "429"}}, 429),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, 503),
        ({"type": "error", "error": {"type": "api_error", "message": "Internal server error"}}, 503),
        ({"type": "error", "error": {"type": "invalid_request_error", "message": "no such tool"}}, 200),
        ({"type": "error", "code": "server_error", "message": "x y", "sequence_number": 1}, 503),
        ({"type": "response.failed", "response": {"tools": [{"type": "overload"}], "error": {"code": "x"}}}, 200),
        ({"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded"}}}, 429),
        ({"response": {}, "error": {"code": 502}}, 502),
        ([{"error": {"code": 429, "status": "RESOURCE_EXHAUSTED"}}], 429),
        ([[{"error": {"code": 503, "status": "UNAVAILABLE"}}]], 503),
        ({"object": "error", "message": "boom", "type": "InternalServerError", "code": 500}, 500),
        ({"error": "the server is down"}, 200),
        ({"detail": "x"}, 200),
    ],
)
def test_the_status_that_an_error_states(value: object, status: int) -> None:
    """An error with status 200 is a rate limit or a fault of the server if its codes say so."""
    assert is_error(value)
    assert stated_status(value) == status
