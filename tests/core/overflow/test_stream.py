"""The opening of a stream: content, nothing yet, or an overflow; however the bytes are cut."""

from __future__ import annotations

import gzip
import itertools
import json

import brotli  # type: ignore[import-untyped]
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.overflow.evidence import Prior
from proxy.core.overflow.kinds import Overflow
from proxy.core.overflow.stream import EarlyOverflowDetector, LateOverflowDetector, Verdict
from tests.support.engine_fixtures import classifier
from tests.support.linear_time import is_linear
from tests.support.overflow_recordings import BROKEN_OFF, described, headers, rows
from tests.support.overflow_recordings import body_of as sent

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
    "alive": {"type": "keepalive", "sequence_number": 3},
    "error": {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long"}},
    "overflow": OVERFLOW,
    "other": {"error": {"message": "The server had an error"}},
    "limits": {"type": "codex.rate_limits", "plan_type": "plus"},
    "counted role": {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": {"prompt_tokens": 0}},
    "block": {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    "tool block": {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "name": "x"}},
    "item": {"type": "response.output_item.added", "item": {"type": "message", "role": "assistant", "content": []}},
    "reasoning item": {"type": "response.output_item.added", "item": {"type": "reasoning", "summary": []}},
    "sealed": {"type": "response.output_item.added", "item": {"type": "reasoning", "encrypted_content": "x"}},
    "call item": {"type": "response.output_item.added", "item": {"type": "function_call", "name": "x"}},
    "part": {"type": "response.content_part.added", "part": {"type": "output_text", "text": ""}},
    "full part": {"type": "response.content_part.added", "part": {"type": "output_text", "text": "x"}},
    "no part": {"type": "response.content_part.added", "part": None},
    "choice": {"choices": [{"delta": {"content": ""}, "finish_reason": "error", "error": OVERFLOW["error"]}]},
    "figures": {"usageMetadata": {"promptTokenCount": 1}, "modelVersion": "g"},
    "empty candidate": {"candidates": [{"index": 0, "content": {"role": "model", "parts": [{"text": ""}]}}]},
    "candidate": {"candidates": [{"content": {"parts": [{"text": "x"}]}}], "usageMetadata": {}},
    "ended candidate": {"candidates": [{"finishReason": "STOP"}], "usageMetadata": {}},
    "candidate's call": {"candidates": [{"content": {"parts": [{"functionCall": {"name": "x"}}]}}]},
    "no candidate": {"candidates": None, "usageMetadata": {}},
    "odd candidate": {"candidates": [{"content": "x"}]},
    "feedback": {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {}},
    "word and error": {"choices": [{"delta": {"content": "x"}, "error": OVERFLOW["error"]}]},
}
PACKERS = {"gzip": gzip.compress, "br": brotli.compress, "zstd": zstandard.compress}
PREAMBLE = {
    "role",
    "created",
    "start",
    "ping",
    "alive",
    "limits",
    "counted role",
    "block",
    "item",
    "reasoning item",
    "part",
    "figures",
    "empty candidate",
}
LENGTH = {"overflow", "error", "failed", "choice"}


def sse_event(value: object, end: str = "\n") -> bytes:
    return f"data: {json.dumps(value)}{end}{end}".encode()


STREAM = (("content-type", "text/event-stream"),)


def judged(*chunks: bytes, named: tuple[tuple[str, str], ...] = STREAM) -> tuple[Verdict, object]:
    opening = EarlyOverflowDetector(classifier(), *described(named))
    for chunk in chunks:
        opening.feed(chunk)
    verdict = opening.finish()
    assert (verdict == "overflow") == (opening.overflow is not None)
    return verdict, opening.overflow


def cut(raw: bytes, points: list[int]) -> list[bytes]:
    edges = sorted({0, len(raw), *(point % (len(raw) + 1) for point in points)})
    return [raw[start:end] for start, end in itertools.pairwise(edges)]


def watched(*chunks: bytes, named: tuple[tuple[str, str], ...] = ()) -> Overflow | None:
    ending = LateOverflowDetector(classifier(), described(named)[1])
    for chunk in chunks:
        ending.feed(chunk)
    return ending.overflow


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_one_event(name: str, end: str) -> None:
    """An event is preamble, content or an overflow whatever line ends the server writes."""
    opening = EarlyOverflowDetector(classifier())
    expected = "undecided" if name in PREAMBLE else "overflow" if name in LENGTH else "content"
    assert opening.feed(sse_event(EVENTS[name], end)) == expected
    assert opening.finish() == expected


@pytest.mark.shared("overflow_errors.jsonl")
def test_recorded_streams() -> None:
    """Overflows in place of an answer are recognised with their limit; what comes after content is too late."""
    wanted = [r for r in rows() if r["overflow"] and (r["stream"] or r["status"] == 200)]
    assert len(wanted) >= 12
    for row in wanted:
        verdict, found = judged(sent(row), named=headers(row))
        if row["id"] in BROKEN_OFF:
            assert verdict == "content", row["id"]
            continue
        assert verdict == "overflow", row["id"]
        assert getattr(found, "limit", None) == row["limit"], row["id"]


@pytest.mark.shared("overflow_errors.jsonl")
def test_no_other_recorded_answer_is_an_overflow() -> None:
    """No answer that means something else is taken for an overflow, at its beginning or behind it."""
    others = [row for row in rows() if not row["overflow"] and (row["stream"] or row["status"] == 200)]
    assert len(others) >= 3
    assert [row["id"] for row in others if judged(sent(row), named=headers(row))[0] == "overflow"] == []
    for row in others:
        found = watched(sent(row), named=headers(row))
        assert found is None or not (found.too_long or found.kind == "stop"), row["id"]


@pytest.mark.shared("overflow_errors.jsonl")
def test_recorded_answers_that_broke_off() -> None:
    """An overflow behind the first content is found, in streams and in whole answers."""
    late = [row for row in rows() if row["id"] in BROKEN_OFF]
    assert len(late) >= 5
    for row in late:
        found = watched(sent(row), named=headers(row))
        assert found is not None, row["id"]
        assert found.limit == row["limit"], row["id"]
        assert found.kind == ("stop" if row.get("implicit") else found.kind)


@pytest.mark.shared("overflow_errors.jsonl")
@settings(max_examples=60)
@given(st.data())
def test_recorded_streams_in_any_chunks(data: st.DataObject) -> None:
    """How the network cuts a recorded answer does not matter."""
    row = data.draw(st.sampled_from([row for row in rows() if row["stream"] or row["status"] == 200]))
    raw, named = sent(row), headers(row)
    pieces = cut(raw, data.draw(st.lists(st.integers(0, len(raw)))))
    assert judged(*pieces, named=named) == judged(raw, named=named)
    assert (watched(*pieces, named=named) is None) == (watched(raw, named=named) is None)


pieces = st.one_of(
    st.builds(sse_event, st.sampled_from(list(EVENTS.values())), st.sampled_from(["\n", "\r\n", "\r"])),
    st.sampled_from([b": comment\n\n", b"event: error\n", b"\n", b"\r"]),
    st.sampled_from([b"data: [DONE]\n\n", b"data:\n\n", b"x", b"id: 1\n"]),
    st.binary(max_size=12),
)


@settings(max_examples=300)
@given(st.lists(pieces, max_size=6), st.lists(st.integers(0, 400), max_size=12))
@pytest.mark.slow
def test_any_stream_in_any_chunks(parts: list[bytes], points: list[int]) -> None:
    """Any chunking of any bytes gives the same verdict and the same overflow."""
    raw = b"".join(parts)
    assert judged(*cut(raw, points)) == judged(raw)
    assert judged(*(raw[i : i + 1] for i in range(len(raw)))) == judged(raw)


@settings(max_examples=100)
@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=6))
def test_the_first_event_with_content_decides(names: list[str]) -> None:
    """Preamble is passed over; the first other event is the verdict, and what follows changes nothing."""
    opening = EarlyOverflowDetector(classifier())
    telling = next((name for name in names if name not in PREAMBLE), None)
    for name in names:
        before = opening.verdict
        after = opening.feed(sse_event(EVENTS[name]))
        assert before in ("undecided", after)
    expected = "undecided" if telling is None else "overflow" if telling in LENGTH else "content"
    assert opening.finish() == expected


@given(st.sampled_from(["role", "words"]), st.text(max_size=30))
def test_an_assistant_may_speak_of_overflows(first: str, said: str) -> None:
    """An answer that quotes an overflow, or its JSON, is an answer."""
    quoted = f"{said}{json.dumps(OVERFLOW)} maximum context length is 4096 tokens"
    chunks = [sse_event(EVENTS[first]), sse_event({"choices": [{"delta": {"content": quoted}}]})]
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
    assert judged(sse_event(ROLE), sse_event(OVERFLOW).rstrip())[0] == "overflow"
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


WHOLE = {
    "error": ({"error": {"message": "prompt is too long: 9000 tokens > 8192 maximum"}}, "overflow"),
    "list": ([{"error": {"message": "prompt is too long: 9000 tokens > 8192 maximum"}}], "overflow"),
    "other error": ({"error": {"message": "The server had an error"}}, "content"),
    "answer": ({"choices": [{"message": {"content": "prompt is too long"}}], "error": None}, "content"),
    "message": ({"type": "message", "content": [{"text": "prompt is too long"}]}, "content"),
    "list of models": ({"object": "list", "data": []}, "content"),
    "no choices": ({"id": "c", "choices": [], "error": OVERFLOW["error"]}, "overflow"),
    "null choices": ({"id": "c", "choices": None, "error": OVERFLOW["error"]}, "overflow"),
    "no output": ({"object": "response", "output": [], "status": "failed", "error": OVERFLOW["error"]}, "overflow"),
    "code and message": ({"code": 7, "message": "prompt is too long: 9000 tokens > 8192", "data": None}, "overflow"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_that_is_no_stream(name: str) -> None:
    """An error object with status 200 is found, and an answer is let go at its first telling member."""
    value, expected = WHOLE[name]
    raw = json.dumps(value).encode()
    for chunks in ([raw], [b"\r\n " + raw], [raw[i : i + 1] for i in range(len(raw))]):
        assert judged(*chunks)[0] == expected
    if name in ("answer", "message"):
        opening = EarlyOverflowDetector(classifier())
        assert opening.feed(raw[:-2]) == "content"


def test_an_answer_of_unknown_format_is_buffered_no_longer_than_needed() -> None:
    """An object without a telling member is let go once it is large."""
    opening = EarlyOverflowDetector(classifier())
    assert opening.feed(b'{"pad": "') == "undecided"
    assert opening.feed(b"x" * 300_000) == "content"
    assert EarlyOverflowDetector(classifier()).feed(b"plain text that is nothing of ours") == "content"


@given(st.lists(st.integers(0, 400), max_size=12))
def test_an_object_is_judged_alike_however_it_is_cut(points: list[int]) -> None:
    """Content before any error is let go at once, behind one only the end tells, wherever the chunks end."""
    whole = json.dumps({"id": "r", "object": "response", "output": [{"text": "maximum context length is 9 tokens"}]})
    unclear = json.dumps({"id": "r", "error": None, "output": []})
    for body, before, after in ((whole, "content", "content"), (unclear, "undecided", "content")):
        opening = EarlyOverflowDetector(classifier())
        for chunk in cut(body.encode(), points):
            opening.feed(chunk)
        assert (opening.verdict, opening.finish()) == (before, after)
    assert judged(*cut(json.dumps(OVERFLOW).encode(), points), named=())[0] == "overflow"


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd"])
def test_compressed_answers(encoding: str) -> None:
    """A compressed stream is read like a plain one."""
    raw = PACKERS[encoding](sse_event(ROLE) + sse_event(OVERFLOW))
    assert judged(raw, named=(*STREAM, ("Content-Encoding", encoding)))[0] == "overflow"
    assert (
        judged(*(raw[i : i + 1] for i in range(len(raw))), named=(*STREAM, ("content-encoding", encoding)))[0]
        == "overflow"
    )


def test_an_error_in_a_line_of_its_own_name() -> None:
    """llama.cpp of 2025 wrote no data line for an error."""
    line = b"error: " + json.dumps(OVERFLOW["error"]).encode() + b"\n\n"
    assert judged(line)[0] == "overflow"
    assert judged(sse_event(ROLE), line, b"data: [DONE]\n\n", named=())[0] == "overflow"
    assert judged(*(line[i : i + 1] for i in range(len(line))), named=())[0] == "overflow"
    assert judged(b'error: {"message": "no such slot"}\n\n')[0] == "content"


def test_an_error_event_in_plain_text() -> None:
    """An event named error may hold a sentence only."""
    assert judged(b"event: error\ndata: prompt is too long: 9000 tokens > 8192 maximum\n\n")[0] == "overflow"
    assert judged(b"event: error\ndata: the server is gone\n\n")[0] == "content"


def test_our_count_corroborates_streams_too() -> None:
    """A claim in a stream about a request that we count far below its limit is not believed."""
    event = sse_event({"error": {"message": "prompt is too long: 210000 tokens > 200000 maximum"}})
    for counted, expected in ((1_000, "content"), (190_000, "overflow")):
        assert EarlyOverflowDetector(classifier(), prior=Prior(counted, window=200_000)).feed(event) == expected


LATE = {
    "error": sse_event({"error": {"message": "Context size has been exceeded.", "code": 500}}),
    "named": b'event: error\ndata: {"type": "error", "error": {"message": "prompt is too long"}}\n\n',
    "failed": sse_event(EVENTS["failed"]),
    "stop": sse_event({"choices": [{"delta": {}, "finish_reason": "model_context_window_exceeded"}]}),
    "whole": b'{"content": [], "stop_reason" : "model_context_window_exceeded"}',
}


@pytest.mark.parametrize("name", LATE)
def test_what_comes_late(name: str) -> None:
    """Errors and stop reasons behind content are found in any chunking, between other events."""
    raw = sse_event(WORDS) * 3 + LATE[name] + sse_event("[DONE]")
    for chunks in ([raw], [raw[i : i + 1] for i in range(len(raw))], cut(raw, [100, 200, 300, 400, 450])):
        found = watched(*chunks)
        assert found is not None
        assert found.kind == ("stop" if name in ("stop", "whole") else found.kind)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=6), st.lists(st.integers(0, 2_000), max_size=6))
def test_content_is_not_mistaken_for_a_late_error(names: list[str], points: list[int]) -> None:
    """Words of the answer, quoted errors among them, teach nothing; errors do."""
    quoted = {"choices": [{"delta": {"content": json.dumps(OVERFLOW) + '"finish_reason": "x_exceeded"'}}]}
    raw = b"".join(sse_event(EVENTS[name]) for name in names) + sse_event(quoted)
    found = watched(*cut(raw, points))
    assert (found is not None and found.too_long) == bool(LENGTH & set(names))


def test_a_long_event_is_not_buffered() -> None:
    """An event without an end keeps no more than a bounded part in memory, and harms nothing behind it."""
    ending = LateOverflowDetector(classifier())
    for _ in range(200):
        ending.feed(b"x" * 4_096)
    assert len(ending._event) <= 65_536
    ending.feed(b"\n\n" + LATE["error"])
    assert ending.overflow is not None


@pytest.mark.parametrize("piece", [b"\n" * 4_096, b": alive\n\n" * 400, b" " * 4_096])
@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
def test_signs_of_life_are_no_opening_for_ever(piece: bytes, kind: str) -> None:
    """What an answer begins with is in memory: blanks without end were 300 MB within the five seconds of the hold."""
    opening = EarlyOverflowDetector(classifier(), kind)
    assert opening.feed(piece) == "undecided"
    for _ in range(2**20 // len(piece)):
        opening.feed(piece)
    assert opening.verdict == "content"


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


HOSTILE: dict[str, tuple[bytes, int]] = {
    "comments": (b":\n\n", 2**18),
    "blanks": (b" " * 16, 64),
    "one event": (b"data: xxxxxxxxxx", 16),
    "one object": (b'{"a": ["b", "c", ', 8),
    "error first": (b'{"error": 1, "content": 2, ', 16),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.slow
def test_an_opening_costs_no_more_per_byte_the_longer_it_is(kind: str) -> None:
    """Whatever an answer begins with, and however it is cut, it is looked at in time that grows with it."""
    piece, size = HOSTILE[kind]
    named = STREAM if kind in ("comments", "one event") else (("content-type", "application/json"),)

    def work(length: int) -> None:
        opening = EarlyOverflowDetector(classifier(), *described(named))
        for chunk in pieces(piece * (length // len(piece)), size):
            assert opening.feed(chunk) == "undecided"

    assert is_linear(work, 60_000)


@pytest.mark.parametrize("piece", [b"data: xxxxxxxxxx", b'"error" xxxxxxxx', b'data: {"error":1}\n\n', b"\n\n"])
@pytest.mark.slow
def test_what_follows_costs_no_more_per_byte_the_longer_it_is(piece: bytes) -> None:
    """Events behind the first content are looked at in time that grows with them, however they are cut."""

    def work(length: int) -> None:
        ending = LateOverflowDetector(classifier())
        for chunk in pieces(piece * (length // len(piece)), 4):
            ending.feed(chunk)
        assert ending.overflow is None

    assert is_linear(work, 15_000)
