"""Which error answers mean that a conversation is too long, and what they state."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.overflow.classify import STATUSES, UNCORROBORATED, Overflow, classify, classify_error
from tests.core.overflow.corpus import AFTER_CONTENT, KINDS, SPOKEN, rows

CLEAR = "This model's maximum context length is 4097 tokens. However, your messages resulted in 5000 tokens."


def error(message: str, **members: object) -> bytes:
    return json.dumps({"error": {"message": message, **members}}).encode()


def test_every_recorded_overflow_is_recognised() -> None:
    """What these providers answer before any content is an overflow, with the figures they state, exactly."""
    wanted = [
        row
        for row in rows()
        if row["overflow"] and row["provider"] in SPOKEN and not row["stream"] and not row.get("implicit")
    ]
    assert len(wanted) > 30
    for row in wanted:
        found = classify(row["status"], row["body"].encode())
        assert found is not None, row["id"]
        stated = (found.kind, found.limit, found.prompt, found.output)
        assert stated == (KINDS[row["kind"]], row["limit"], row["prompt_tokens"], row["max_output_tokens"]), row["id"]


def test_no_other_recorded_error_is_taken_for_one() -> None:
    """Of all providers' other errors none is an overflow, however much it speaks of tokens."""
    others = [row for row in rows() if not row["overflow"] and not row["stream"]]
    assert len(others) > 40
    assert [row["id"] for row in others if classify(row["status"], row["body"].encode())] == []


def test_the_late_ones_are_named() -> None:
    """The streams that fail late are still among the recordings."""
    assert {row["id"] for row in rows()} >= AFTER_CONTENT


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate", "GZIP "])
def test_compressed_bodies_are_read(encoding: str) -> None:
    """An overflow inside gzip or deflate is recognised by the header the answer came with."""
    plain = error(CLEAR)
    packed = zlib.compress(plain) if encoding == "deflate" else gzip.compress(plain)
    assert classify(400, packed, encoding=encoding) == Overflow("input", 4097, 5000)
    assert classify(400, packed) is None


def test_a_bomb_is_not_inflated() -> None:
    """A compressed body that swells without end is given up on, and one that is no gzip at all read as it is."""
    bomb = gzip.compress(b" " * 50_000_000 + error(CLEAR))
    assert classify(400, bomb, encoding="gzip") is None
    assert classify(400, error(CLEAR), encoding="gzip") is not None


@pytest.mark.parametrize("status", [200, 401, 403, 404, 429, 503, 529])
def test_other_statuses_never_mean_length(status: int) -> None:
    """Pace, credentials and outages are not overflows, whatever they say."""
    assert classify(status, error(CLEAR, code="context_length_exceeded")) is None


@pytest.mark.parametrize("status", sorted(STATUSES))
def test_statuses_an_overflow_comes_with(status: int) -> None:
    """The sentence means the same under each status that providers give it."""
    assert classify(status, error(CLEAR)) is not None


@pytest.mark.parametrize("words", ["Rate limit reached", "exceeds 40000 tokens per min", "quota", "(TPM): Limit 3"])
def test_pace_vetoes(words: str) -> None:
    """An error that speaks of pace is not an overflow even where it states a context length."""
    assert classify(400, error(f"{words}. {CLEAR}")) is None


def test_an_unlikely_claim_needs_a_code() -> None:
    """A claim about a request far below the stated limit is not believed, unless its own figures or a code back it."""
    limit = 10_000
    alone = error(f"maximum context length is {limit} tokens")
    low, enough = int(UNCORROBORATED * limit) - 1, int(UNCORROBORATED * limit)
    assert classify(400, alone, counted=low) is None
    assert classify(400, alone, counted=enough) is not None
    assert classify(400, alone) is not None
    assert classify(400, error(f"maximum context length is {limit} tokens", code="context_length_exceeded"), 1)
    split = (
        f"maximum context length is {limit} tokens. However, you requested 10001 tokens (1 in the messages, 10000 in"
    )
    found = classify(400, error(f"{split} the completion)."), counted=1)
    assert found is not None
    assert (found.kind, found.prompt, found.output) == ("input_plus_output", 1, 10_000)


def test_no_figures_nothing_to_corroborate() -> None:
    """A sentence without a limit is believed whatever was counted."""
    assert classify(400, error("Your input exceeds the context window of this model."), counted=1) is not None


def test_the_input_alone_may_be_too_long() -> None:
    """Where the prompt exceeds the limit without any output, lowering the output would not help."""
    said = "maximum context length is 100 tokens. However, you requested 350 tokens (150 in the messages, 200 in the"
    found = classify(400, error(f"{said} completion)."))
    assert found is not None
    assert found.kind == "input"


def test_a_code_is_enough() -> None:
    """A machine-readable code means overflow without any sentence, and states what its members say."""
    body = {"error": {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 34031, "n_ctx": 8192}}
    found = classify(400, json.dumps(body).encode())
    assert found == Overflow("input", 8192, 34031, None, decisive=True)


@pytest.mark.parametrize("figure", [True, None, "8192", 1.5, [8192]])
def test_members_that_are_no_figures_state_nothing(figure: object) -> None:
    """A figure of the wrong type is not a limit."""
    found = classify_error({"type": "exceed_context_size_error", "n_ctx": figure})
    assert found is not None
    assert found.limit is None


def test_json_in_a_string_is_read() -> None:
    """A gateway that puts the provider's answer into a string hides nothing."""
    inner = error(CLEAR, code="context_length_exceeded").decode()
    found = classify(400, json.dumps({"error": {"message": "upstream", "metadata": {"raw": inner}}}).encode())
    assert found is not None
    assert (found.limit, found.decisive) == (4097, True)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (
            "Invalid 'messages[1].content': string too long. Expected a string with maximum length 9",
            "payload",
        ),
        ("Invalid 'input[3].content[0].text': string too long. Expected 9", "payload"),
        ("Invalid 'messages[2].tool_calls[0].id': string too long. Expected 40", None),
        ("Invalid 'tools[0].function.description': string too long. Expected 1024", None),
        ("Invalid 'user': string too long. Expected 64", None),
    ],
)
def test_caps_in_characters(words: str, kind: str | None) -> None:
    """A text above a provider's cap is too large; a name or id above one is another mistake."""
    found = classify(400, error(words, code="string_above_max_length"))
    assert (found and found.kind) == kind


HOSTILE = [
    b"",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"error":' * 900 + b"1" + b"}" * 900,
    b'{"n_ctx":' * 900 + b"1" + b"}" * 900,
    error("maximum context length is " + "9" * 5000 + " tokens"),
    error("maximum context length is " + "9," * 60_000),
    error("max_tokens" * 6000),
    error("maximum context length is 5 tokens" + " requested 6 tokens (7 in the messages" * 1500),
    json.dumps({str(i): "{" * 50 for i in range(20_000)}).encode(),
    b"null",
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_are_only_read(body: bytes) -> None:
    """Whatever bytes an upstream sends, it is judged, quickly, and nothing is raised."""
    for status in sorted(STATUSES):
        found = classify(status, body)
        assert found is None or (found.limit or 0) < 10**15


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.sampled_from([CLEAR, "n_ctx", "{", "[1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["error", "n_ctx", "code"]), inner),
    max_leaves=8,
)


@settings(max_examples=200)
@given(json_values)
def test_any_error_object_is_judged(value: object) -> None:
    """Any JSON is judged without raising, and only what says so is an overflow."""
    found = classify_error(value)
    assert found is None or CLEAR in json.dumps(value)
