"""Which answers are overflows, and what they state."""

from __future__ import annotations

import gzip
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.overflow.evidence import NO_PRIOR, UNCORROBORATED, Prior, check_claim
from proxy.core.overflow.kinds import Overflow
from tests.support.engine_fixtures import classifier
from tests.support.overflow_recordings import BEYOND, BROKEN_OFF, KINDS, body_of, headers, rows
from tests.support.overflow_reports import ReportedError, reported_errors

CLEAR = "This model's maximum context length is 4097 tokens. However, your messages resulted in 5000 tokens."


def error(message: str, **members: object) -> bytes:
    return json.dumps({"error": {"message": message, **members}}).encode()


def read(message: str, status: int = 400, counted: int | None = None, **members: object) -> Overflow | None:
    prior = NO_PRIOR if counted is None else Prior(counted, window=2 * counted)
    return classifier().answer(status, (), error(message, **members), prior)


@pytest.mark.shared("overflow_errors.jsonl")
def test_every_recorded_overflow_is_recognised() -> None:
    """Recorded errors of providers are read with their kind and exactly the figures they state."""
    wanted = [row for row in rows() if row["overflow"] and not row["stream"] and row["id"] not in BROKEN_OFF]
    assert len(wanted) > 100
    wrong = {}
    for row in wanted:
        found = classifier().answer(row["status"], headers(row), body_of(row))
        if found is None or (
            (row["id"] not in BEYOND and found.kind != KINDS[row["kind"]])
            or (found.limit, found.prompt, found.output)
            != (row["limit"], row["prompt_tokens"], row["max_output_tokens"])
        ):
            wrong[row["id"]] = found
    assert wrong == {}


@pytest.mark.shared("overflow_errors.jsonl")
def test_no_recorded_look_alike_is_taken_for_one() -> None:
    """Rates, output caps, other fields, outages and quotations are no overflows."""
    others = [row for row in rows() if not row["overflow"] and not row["stream"]]
    assert len(others) > 40
    found = {row["id"]: classifier().answer(row["status"], headers(row), body_of(row)) for row in others}
    assert {name: one for name, one in found.items() if one and (one.too_long or one.kind == "stop")} == {}
    named = {row["id"]: KINDS.get(row["kind"]) for row in others if row["kind"] != "other"}
    assert {name: kind for name, kind in named.items() if (one := found[name]) is None or one.kind != kind} == {}


@pytest.mark.parametrize("one", reported_errors(), ids=lambda one: one.origin)
def test_errors_that_people_met(one: ReportedError) -> None:
    """Errors that people posted are read with their kind, and a limit is exact or not stated."""
    found = classifier().answer(one.status, one.headers, one.body.encode())
    assert (found.kind if found else None) in one.kinds
    if one.too_long:
        assert found is not None
        assert (found.limit, found.prompt) == (one.limit, one.prompt)


@pytest.mark.parametrize("status", [400, 404, 413, 422, 424, 429, 500, 502, 503])
def test_statuses_an_overflow_comes_with(status: int) -> None:
    """A sentence about the window means the same under every status that gateways give it."""
    found = read(CLEAR, status)
    assert found is not None
    assert (found.kind, found.limit, found.prompt) == ("input", 4097, 5000)


@pytest.mark.parametrize("status", [401, 402, 403])
def test_who_asks_and_who_pays(status: int) -> None:
    """Where credentials or credit are the trouble only a code is believed."""
    assert read(CLEAR, status) is None
    assert read(CLEAR, status, code="context_length_exceeded") is not None


@pytest.mark.parametrize("words", ["Rate limit reached", "exceeds 40000 tokens per min", "quota", "(TPM): Limit 3"])
def test_pace_is_no_length(words: str) -> None:
    """An error that speaks of pace and of nothing else is a rate limit."""
    found = read(f"Request too large: {words}. Limit 8000, Requested 9000. Please reduce the prompt.", 429)
    assert found is not None
    assert (found.kind, found.too_long, found.window) == ("rate_limit", False, None)


def test_an_option_of_the_server_is_no_conversation() -> None:
    """A window that the server was asked to set up, and cannot, says nothing of the request's length."""
    assert read("invalid option: num_ctx 262144 exceeds the maximum context length of 131072") is None


def test_an_unlikely_claim_needs_a_code() -> None:
    """A claim about a request that we count far below the stated limit is not believed without a decisive code."""
    limit = 10_000
    alone = f"maximum context length is {limit} tokens, you requested 12000 tokens"
    low, enough = int(UNCORROBORATED * limit) - 1, int(UNCORROBORATED * limit)
    assert read(alone, counted=low) is None
    assert read(alone, counted=enough) is not None
    assert read(alone) is not None
    assert read(alone, counted=1, code="context_length_exceeded") is not None
    split = f"{alone} (1 in the messages, 11999 in the completion)."
    found = read(split, counted=1)
    assert found is not None
    assert (found.kind, found.prompt, found.output) == ("input_plus_output", 1, 11_999)


def test_no_figures_nothing_to_corroborate() -> None:
    """A sentence without a limit is believed whatever was counted, and so is what is no overflow."""
    assert read("Your input exceeds the context window of this model.", counted=1) is not None
    capped = Overflow("output_cap", 4096)
    assert check_claim(capped, Prior(1)) is capped
    assert check_claim(None, Prior(1)) is None


def test_the_input_alone_may_be_too_long() -> None:
    """Where the prompt exceeds the limit without any output, lowering the output would not help."""
    found = read(
        "maximum context length is 100 tokens. However, you requested 350 tokens (150 in the messages, 200 in the "
        "completion)."
    )
    assert found is not None
    assert found.kind == "input"


@pytest.mark.parametrize("code", ["context_length_exceeded", "bad_request"])
def test_a_limit_alone(code: str) -> None:
    """An error that names the window and complains of nothing in known words is about the window."""
    found = read("This model's maximum context length is 6000 tokens. However, you sent more.", code=code)
    assert found is not None
    assert (found.kind, found.limit) == ("input", 6000)


def test_a_code_is_enough() -> None:
    """A machine-readable code means overflow without any sentence, and states what its members say."""
    body = {"error": {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 34031, "n_ctx": 8192}}
    found = classifier().answer(400, (), json.dumps(body).encode())
    assert found is not None
    assert (found.kind, found.limit, found.prompt, found.decisive) == ("input", 8192, 34031, True)


@pytest.mark.parametrize(
    "code", ["PromptTooLong", "max_context_length_exceeded", "ContextOverflow", "input_too_long", "CONTEXT_TOO_LONG"]
)
def test_codes_that_are_not_listed(code: str) -> None:
    """A code is read by its words, however they are joined."""
    found = classifier().answer(500, (), json.dumps({"error": {"code": code, "message": "The call failed."}}).encode())
    assert found is not None
    assert (found.kind, found.decisive) == ("input", True)


@pytest.mark.parametrize("code", ["invalid_request_error", "rate_limit_exceeded", "timeout", "content_filter", "400"])
def test_codes_that_mean_something_else(code: str) -> None:
    """Other codes decide nothing."""
    found = classifier().answer(400, (), json.dumps({"error": {"code": code, "message": "No."}}).encode())
    assert found is None or found.kind == "rate_limit"


def test_amazon_says_it_in_a_header() -> None:
    """An error's name may stand in a header only."""
    named = (("x-amzn-errortype", "ContextLengthExceededException:http://internal.amazon.com/coral/"),)
    assert classifier().answer(400, named, b"{}") is not None
    throttled = classifier().answer(400, (("x-amzn-errortype", "ThrottlingException"),), b"{}")
    assert throttled is not None
    assert throttled.kind == "rate_limit"


@pytest.mark.parametrize("figure", [True, None, "8192", 1.5, [8192]])
def test_members_that_are_no_figures_state_nothing(figure: object) -> None:
    """A figure of the wrong type is not a limit."""
    found = classifier().event({"error": {"type": "exceed_context_size_error", "n_ctx": figure}})
    assert found is not None
    assert found.limit is None


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_json_in_strings_is_read(levels: int) -> None:
    """Gateways that put the provider's answer into a string, one behind the other, hide nothing."""
    body = {"error": {"type": "exceed_context_size_error", "message": "no", "n_ctx": 8192, "n_prompt_tokens": 9000}}
    for _ in range(levels):
        body = {"error": {"message": f"upstream said 400: {json.dumps(body)} (retried twice)"}}
    found = classifier().answer(502, (), json.dumps(body).encode())
    assert found is not None
    assert (found.limit, found.prompt) == (8192, 9000)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("messages[0].content", "payload"),
        ("input[3].output", "payload"),
        ("messages[2].content[0].text", "payload"),
        ("messages[3].tool_calls[0].id", None),
        ("tools[0].function.description", None),
        ("user", None),
    ],
)
def test_caps_in_characters(place: str, kind: str | None) -> None:
    """A message over its cap in characters can be made smaller; any other field cannot."""
    words = f"Invalid '{place}': string too long. Expected a string with maximum length 10, but got one with 12000."
    for members in ({}, {"param": place, "code": "string_above_max_length"}):
        found = read(words, **members)
        assert (found and found.kind) == kind
        assert found is None or found.limit is None


def test_an_answer_is_no_error() -> None:
    """A model may write about overflows in an answer with status 200."""
    message = {"role": "assistant", "content": CLEAR, "refusal": None}
    answer = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"prompt_tokens": 9}}
    assert classifier().answer(200, (), json.dumps(answer).encode()) is None
    assert classifier().answer(200, (), error(CLEAR)) is not None
    assert classifier().answer(200, (), CLEAR.encode()) is None


@pytest.mark.parametrize(
    "answer",
    [
        {"stop_reason": "model_context_window_exceeded", "usage": {"input_tokens": 9, "output_tokens": 2}},
        {"choices": [{"finish_reason": "model_context_window_exceeded"}], "usage": {"prompt_tokens": 9}},
        {"delta": {"stop_reason": "model_context_window_exceeded"}, "usage": {"input_tokens": 9}},
        {"response": {"incomplete_details": {"reason": "context_length_exceeded"}, "usage": {"input_tokens": 9}}},
    ],
)
def test_generation_that_ran_into_the_window(answer: dict[str, object]) -> None:
    """A stop reason is learned from and never retried: what came before it was billed."""
    found = classifier().answer(200, (), json.dumps(answer).encode())
    assert found is not None
    assert (found.kind, found.prompt, found.too_long, found.window) == ("stop", 9, False, None)


@pytest.mark.parametrize("usage", [None, 7, {"prompt_tokens": "9"}])
def test_a_stop_without_usage(usage: object) -> None:
    """Usage of an odd shape states nothing."""
    found = classifier().stop({"stop_reason": "model_context_window_exceeded", "usage": usage})
    assert found is not None
    assert found.prompt is None


def test_a_stop_counts_cached_input() -> None:
    """Tokens that Anthropic read from its cache are beside ``input_tokens``, and fill the window all the same."""
    usage = {"input_tokens": 9, "cache_read_input_tokens": 900, "output_tokens": 2}
    found = classifier().stop({"stop_reason": "model_context_window_exceeded", "usage": usage})
    assert found is not None
    assert (found.prompt, found.output) == (909, 2)


def test_a_body_that_repeats_the_request() -> None:
    """A part of the conversation in a validation error does not count as its cause."""
    echo = {"detail": [{"loc": ["body", "temperature"], "msg": "must be a number", "input": {"messages": CLEAR}}]}
    assert classifier().answer(422, (), json.dumps(echo).encode()) is None


def test_bombs() -> None:
    """A compressed body that swells without end is looked at in its beginning only."""
    bomb = gzip.compress(b" " * 50_000_000 + error(CLEAR))
    assert classifier().answer(400, (("content-encoding", "gzip"),), bomb) is None


HOSTILE = [
    b"[" * 300_000,
    b'{"a":' * 60_000,
    json.dumps({"error": {"message": "{" * 30_000}}).encode(),
    json.dumps({"error": "context length exceeds maximum tokens input prompt too long " * 5_000}).encode(),
    json.dumps({"error": "input output " * 20_000}).encode(),
    json.dumps({"error": "9 > " * 50_000}).encode(),
    json.dumps({"error": "tokens " * 50_000 + "9"}).encode(),
    json.dumps({"error": "1,234" * 60_000}).encode(),
    json.dumps({"error": "Invalid 'a" + "[0].a" * 50_000}).encode(),
    json.dumps({"error": "<" * 200_000 + "</"}).encode(),
    json.dumps({"error": "超过上下文长度" * 30_000}).encode(),
    json.dumps({"error": "aB" * 100_000}).encode(),
    json.dumps({"error": [CLEAR] * 20_000}).encode(),
    json.dumps({"error": {str(number): CLEAR + str(number) for number in range(5_000)}}).encode(),
    b"\xff" * 300_000,
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: f"{body[:24]!r}")
def test_no_body_takes_long(body: bytes) -> None:
    """A body made to keep a matcher busy costs processor time in proportion to what is looked at."""
    started = time.process_time()
    for status in (400, 200):
        classifier().answer(status, (), body)
    assert time.process_time() - started < 5.0


@settings(max_examples=150)
@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode), st.integers(200, 599))
def test_any_bytes_are_read(body: bytes, status: int) -> None:
    """Nothing an upstream sends breaks the classifier, and what is no error is no overflow."""
    found = classifier().answer(status, (), body)
    assert found is None or found.rule


members = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([CLEAR, "context_length_exceeded", "x", "413"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["error", "message", "code", "type", "detail", "param", "loc", "usage", "choices", "response"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(members, st.sampled_from([200, 400, 413, 429, 500]))
def test_any_object_is_read(value: object, status: int) -> None:
    """No shape of JSON breaks the classifier."""
    found = classifier().answer(status, (), json.dumps(value).encode())
    assert found is None or found.kind != "payload" or found.limit is None
    assert classifier().event(value) == classifier().event(value)


@settings(max_examples=60)
@given(st.integers(64, 4_000_000), st.integers(1, 1_000_000), st.booleans())
def test_figures_are_read_exactly(limit: int, above: int, separated: bool) -> None:
    """Whatever the figures are, with or without separators, they are read as they stand."""
    shown = (f"{limit:,}", f"{limit + above:,}") if separated else (str(limit), str(limit + above))
    for words in (
        f"prompt is too long: {shown[1]} tokens > {shown[0]} maximum",
        f"The request has {shown[1]} input tokens, which exceeds the model's context window of {shown[0]} tokens.",
        f"Input length ({shown[1]}) exceeds maximum context length ({shown[0]}).",
        f"上下文长度为{shown[0]}，输入{shown[1]}个token，超过限制",
    ):
        found = read(words)
        assert found is not None, words
        assert (found.limit, found.prompt) == (limit, limit + above), words
