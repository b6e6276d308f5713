"""The opening of a stream: content, nothing yet, or an overflow; however the bytes are cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.overflow.stream import Opening, Verdict
from tests.core.overflow.corpus import AFTER_CONTENT, SPOKEN, rows

OVERFLOW = {"error": {"message": "maximum context length is 4096 tokens", "code": "context_length_exceeded"}}
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
WORDS = {"choices": [{"index": 0, "delta": {"content": "prompt is too long: 9 tokens > 8 maximum"}}]}
EVENTS: dict[str, object] = {
    "role": ROLE,
    "words": WORDS,
    "reasoning": {"choices": [{"delta": {"reasoning_content": "x"}}]},
    "call": {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]},
    "end": {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    "usage": {"choices": [], "usage": {"prompt_tokens": 1}},
    "created": {"type": "response.created", "response": {"error": None}},
    "failed": {"type": "response.failed", "response": {"error": OVERFLOW["error"]}},
    "start": {"type": "message_start", "message": {"usage": {"input_tokens": 1}}},
    "ping": {"type": "ping"},
    "error": {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long"}},
    "overflow": OVERFLOW,
    "other": {"error": {"message": "The server had an error"}},
}
PREAMBLE = {"role", "created", "start", "ping"}
LENGTH = {"overflow", "error", "failed"}


def wire(value: object, end: str = "\n") -> bytes:
    return f"data: {json.dumps(value)}{end}{end}".encode()


def judged(*chunks: bytes) -> tuple[Verdict, object]:
    opening = Opening()
    for chunk in chunks:
        opening.feed(chunk)
    verdict = opening.finish()
    assert (verdict == "overflow") == (opening.overflow is not None)
    return verdict, opening.overflow


def cut(raw: bytes, points: list[int]) -> list[bytes]:
    edges = sorted({0, len(raw), *(point % (len(raw) + 1) for point in points)})
    return [raw[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_one_event(name: str, end: str) -> None:
    """An event is preamble, content or an overflow whatever line ends the server writes."""
    opening = Opening()
    expected = "undecided" if name in PREAMBLE else "overflow" if name in LENGTH else "content"
    assert opening.feed(wire(EVENTS[name], end)) == expected
    assert opening.finish() == expected


def test_recorded_streams() -> None:
    """These providers' overflows in place of an answer are recognised with their limit; none comes after content."""
    wanted = [r for r in rows() if r["overflow"] and r["stream"] and r["provider"] in SPOKEN and not r.get("implicit")]
    assert len(wanted) >= 5
    for row in wanted:
        verdict, found = judged(row["body"].encode())
        if row["id"] in AFTER_CONTENT:
            assert verdict == "content"
            continue
        assert verdict == "overflow", row["id"]
        assert getattr(found, "limit", None) == row["limit"], row["id"]


def test_no_other_recorded_stream_is_an_overflow() -> None:
    """No stream of any provider that means something else is taken for an overflow."""
    others = [row for row in rows() if not row["overflow"] and row["stream"]]
    assert len(others) >= 3
    assert [row["id"] for row in others if judged(row["body"].encode())[0] == "overflow"] == []


@settings(max_examples=60)
@given(st.data())
def test_recorded_streams_in_any_chunks(data: st.DataObject) -> None:
    """How the network cuts a recorded stream does not matter."""
    row = data.draw(st.sampled_from([row for row in rows() if row["stream"]]))
    raw = row["body"].encode()
    assert judged(*cut(raw, data.draw(st.lists(st.integers(0, len(raw)))))) == judged(raw)


pieces = st.one_of(
    st.builds(wire, st.sampled_from(list(EVENTS.values())), st.sampled_from(["\n", "\r\n", "\r"])),
    st.sampled_from([b": comment\n\n", b"event: error\n", b"\n", b"\r"]),
    st.sampled_from([b"data: [DONE]\n\n", b"data:\n\n", b"x", b"id: 1\n"]),
    st.binary(max_size=12),
)


@settings(max_examples=300)
@given(st.lists(pieces, max_size=6), st.lists(st.integers(0, 400), max_size=12))
def test_any_stream_in_any_chunks(parts: list[bytes], points: list[int]) -> None:
    """Any chunking of any bytes gives the same verdict and the same overflow."""
    raw = b"".join(parts)
    assert judged(*cut(raw, points)) == judged(raw)
    assert judged(*(raw[i : i + 1] for i in range(len(raw)))) == judged(raw)


@settings(max_examples=100)
@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=6))
def test_the_first_event_that_says_something_decides(names: list[str]) -> None:
    """Preamble is passed over; the first other event is the verdict, and what follows changes nothing."""
    opening = Opening()
    telling = next((name for name in names if name not in PREAMBLE), None)
    for name in names:
        before = opening.verdict
        after = opening.feed(wire(EVENTS[name]))
        assert before in ("undecided", after)
    expected = "undecided" if telling is None else "overflow" if telling in LENGTH else "content"
    assert opening.finish() == expected


@given(st.sampled_from(["role", "words"]), st.text(max_size=30))
def test_an_assistant_may_speak_of_overflows(first: str, said: str) -> None:
    """An answer that quotes an overflow, or its JSON, is an answer."""
    quoted = f"{said}{json.dumps(OVERFLOW)} maximum context length is 4096 tokens"
    chunks = [wire(EVENTS[first]), wire({"choices": [{"delta": {"content": quoted}}]})]
    assert judged(b"".join(chunks))[0] == "content"


@pytest.mark.parametrize("size", [262_144 - 8, 262_144, 262_145, 300_000])
def test_a_huge_event_is_judged_by_its_size(size: int) -> None:
    """An event too long to hold is content in every chunking, even one that ends as an overflow."""
    opening, rest = b'data: {"pad": "', b'", "error": {"code": "context_length_exceeded"}}'
    raw = opening + b"x" * (size - len(opening) - len(rest)) + rest
    assert len(raw) == size
    expected = "overflow" if size <= 262_144 else "content"
    assert judged(raw + b"\n\n")[0] == expected
    assert judged(raw[: size - 1], raw[size - 1 :] + b"\n", b"\n")[0] == expected
    assert judged(raw + b"\n\n" + b"y" * 400_000)[0] == expected


def test_a_last_event_without_its_blank_line_counts() -> None:
    """A stream that ends right behind an error's line still reports it."""
    assert judged(wire(ROLE), wire(OVERFLOW).rstrip())[0] == "overflow"
    assert judged()[0] == "undecided"
    assert judged(b": only a comment\n")[0] == "undecided"


@pytest.mark.parametrize("data", ["[DONE]", "not json", "[" * 100_000, "7", "[1]"])
def test_what_is_no_object_is_content(data: str) -> None:
    """Data that cannot be read as an event is passed on as an answer."""
    assert judged(f"data: {data}\n\n".encode())[0] == "content"


def test_data_may_span_lines() -> None:
    """An event's data lines belong together."""
    lines = json.dumps(OVERFLOW, indent=1).splitlines()
    assert judged("".join(f"data: {line}\n" for line in lines).encode() + b"\n")[0] == "overflow"
