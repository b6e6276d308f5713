"""One stream out of several generations, over every API and in any chunking."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.features.recall.tool import NAME
from proxy.server_tools import chat, messages, responses
from proxy.server_tools import merger as merger_module
from proxy.server_tools.events import value_of, written
from proxy.server_tools.merger import MOST_BUFFERED, NOT_RUN, StreamMerger, TooMuchBuffered
from tests.stub import Answer, Call
from tests.stub import chat as chat_stub
from tests.stub import messages as messages_stub
from tests.stub import responses as responses_stub
from tests.stub.answers import Frame
from tests.support.answer_parser import ParsedAnswer, parse_answer
from tests.support.linear_time import is_linear
from tests.support.recall_fixtures import LOOK, READ
from tests.support.server_tool_fixtures import APIS

NAMES = frozenset({NAME})

OURS: dict[str, ModuleType] = {"chat": chat, "messages": messages, "responses": responses}
THEIRS: dict[str, ModuleType] = {"chat": chat_stub, "messages": messages_stub, "responses": responses_stub}

CALLS = st.lists(st.sampled_from([LOOK, READ, Call("run", '{"command": "ls -l"}')]), max_size=4).map(tuple)
ANSWERS = st.builds(
    Answer,
    text=st.sampled_from(["", "Let me look.", "It is a kingfisher,\n\nas said before. " * 3]),
    calls=CALLS,
    reasoning=st.sampled_from(["", "What was it again?"]),
    piece=st.sampled_from([3, 24, 400]),
)


def raw(api: str, answer: Answer, number: int = 1) -> bytes:
    """The stream of one generation."""
    usage = THEIRS[api].usage(1000 * number, 10 * number, 500)
    return b"".join(THEIRS[api].streamed(answer, Frame(number, "m", usage), True))


def fed(merger: StreamMerger, stream: bytes, size: int) -> bytes:
    return b"".join(merger.feed(stream[at : at + size]) for at in range(0, len(stream), size))


def spliced(api: str, answers: list[Answer], size: int = 64) -> tuple[bytes, StreamMerger, int]:
    """The stream that a client gets from *answers*, as long as each calls the tool; the number of generations."""
    merger = OURS[api].new_stream(NAMES)
    out, used = b"", 0
    for number, answer in enumerate(answers, 1):
        out, used = out + fed(merger, raw(api, answer, number), size), number
        if not merger.calls() or number == len(answers):
            break
        merger.next_generation()
    return out + merger.release() + merger.rest(), merger, used


def ours(answer: Answer) -> bool:
    return any(call.name == NAME for call in answer.calls)


@pytest.mark.parametrize("api", APIS)
@given(answer=ANSWERS, size=st.integers(1, 300))
@pytest.mark.slow
def test_a_generation_without_a_recall_passes_byte_for_byte(api: str, answer: Answer, size: int) -> None:
    """Whatever else a model says and calls, in any chunking: every byte, in order."""
    answer = Answer(answer.text, tuple(call for call in answer.calls if call.name != NAME), answer.reasoning)
    out, merger, _ = spliced(api, [answer], size)
    assert out == raw(api, answer)
    assert merger.calls() == []


@pytest.mark.parametrize("api", APIS)
@given(answers=st.lists(ANSWERS, min_size=1, max_size=3), size=st.integers(1, 300))
@pytest.mark.slow
def test_any_generations_make_one_valid_answer(api: str, answers: list[Answer], size: int) -> None:
    """One start, one end, running numbers, no call of the tool, and the last generation's calls and usage."""
    out, _, used = spliced(api, answers, size)
    last = answers[used - 1]
    if api == "responses" and not any(answer.text or answer.calls or answer.reasoning for answer in answers):
        return
    if last.reasoning and not last.text and not last.calls:
        return  # a model that thinks and says nothing: no answer of a valid shape to begin with
    parsed = parse_answer(api, out, stream=True)
    assert [name for name, _ in parsed.calls] == [call.name for call in last.calls if call.name != NAME]
    assert THEIRS[api].usage(1000 * used, 10 * used, 500).items() <= parsed.usage.items()
    for answer in answers[:used]:
        assert answer.text in parsed.text


@pytest.mark.parametrize("api", APIS)
def test_text_passes_at_once_and_calls_wait(api: str) -> None:
    """Text passes before its generation ends; from the first call on nothing does."""
    merger = OURS[api].new_stream(NAMES)
    stream = raw(api, Answer("I read on.", (READ, LOOK)))
    before = fed(merger, stream, 1)
    assert b"I read on." in before
    assert b"read_file" not in before
    assert NAME.encode() not in before
    assert merger.ended
    assert [json.loads(call.arguments) for call in merger.calls()] == [json.loads(LOOK.arguments)]


@pytest.mark.parametrize("api", APIS)
def test_what_goes_back_to_the_model_is_what_it_said(api: str) -> None:
    """Its words, thoughts and calls, as they were; each call is answered, those of other tools with why not."""
    answer = Answer("Let me look.", (READ, LOOK), reasoning="Hm.")
    merger = OURS[api].new_stream(NAMES)
    fed(merger, raw(api, answer), 50)
    calls = merger.calls()
    replayed = OURS[api].input_of(merger.output, b'{"messages":[{"reasoning_content":"x"}]}')
    answered = OURS[api].results(merger.output, NAMES, ["found it"])
    text = str(replayed)
    assert "Let me look." in text
    assert "Hm." in text
    assert "read_file" in text
    assert NAME in text
    assert NOT_RUN in str(answered)
    assert calls[0].id in str(answered)
    assert "found it" in str(answered)


@pytest.mark.parametrize("api", APIS)
def test_whole_answers_say_what_streams_say(api: str) -> None:
    """An answer that is no stream has the same texts and calls as its stream."""
    answers = [Answer("Let me look.", (LOOK,)), Answer("And there.", (LOOK, READ)), Answer("It is so.", (READ,))]
    recall_api = OURS[api]
    values = [value_of(THEIRS[api].whole(a, Frame(n, "m", THEIRS[api].usage(9, 9, 0)))) for n, a in enumerate(answers)]
    whole = recall_api.merged(values[-1], [recall_api.output_of(value) for value in values[:-1]], NAMES)
    streamed = parse_answer(api, spliced(api, answers)[0], stream=True)
    parsed = _whole(api, whole)
    assert parsed.text == streamed.text
    assert [name for name, _ in parsed.calls] == [name for name, _ in streamed.calls] == ["read_file"]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("calls", [(LOOK,), (LOOK, READ), (READ, LOOK)])
def test_a_call_in_the_last_generation_is_taken_out(api: str, calls: tuple[Call, ...]) -> None:
    """Recalls of the last generation are removed; calls of the client's tools stay."""
    answer = Answer("", calls, reasoning="Hm." if api != "responses" else "")
    streamed = (
        parse_answer(api, spliced(api, [answer])[0], stream=True) if api != "responses" or READ in calls else None
    )
    recall_api = OURS[api]
    value = value_of(THEIRS[api].whole(answer, Frame(1, "m", THEIRS[api].usage(9, 9, 0))))
    whole = _whole(api, recall_api.merged(value, [], NAMES))
    left = [call.name for call in calls if call.name != NAME]
    assert [name for name, _ in whole.calls] == left
    assert streamed is None or [name for name, _ in streamed.calls] == left
    if api == "messages":
        assert whole.items[0]["content"], "a message without content cannot be sent back"
        assert streamed is not None
        assert streamed.items[0]["content"]


def _whole(api: str, value: dict[str, Any]) -> ParsedAnswer:
    return parse_answer(api, json.dumps(value).encode(), stream=False)


@pytest.mark.parametrize("api", APIS)
def test_an_error_in_the_stream_ends_the_holding(api: str) -> None:
    """An error event reaches the client after everything that came before it."""
    merger = OURS[api].new_stream(NAMES)
    stream = raw(api, Answer("I read on.", (READ,)))
    cut = stream[: stream.index(b"src/next")]
    cut = cut[: cut.rindex(b"\n\n") + 2]
    error = b'event: error\ndata: {"type":"error","error":{"message":"broken"}}\n\n'
    assert fed(merger, cut + error, 30) == cut + error
    assert merger.failed


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_an_error_of_no_type_is_an_error_all_the_same(api: str) -> None:
    """Behind a generation that was gone on from, an event that only holds an error is named one."""
    merger = OURS[api].new_stream(NAMES)
    fed(merger, raw(api, Answer("Let me look.", (LOOK,))), 64)
    merger.next_generation()
    parsed = merger.feed(b'event: error\ndata: {"error":{"message":"broken"}}\n\n')
    assert parsed == b'event: error\ndata: {"error":{"message":"broken"}}\n\n'
    assert merger.failed


@pytest.mark.slow
def test_what_is_buffered_is_bounded() -> None:
    """A call that grows without end is not held in memory."""
    merger = chat.new_stream(NAMES)
    fed(
        merger,
        raw("chat", Answer("", (READ,))).split(b'"finish_reason":"tool_calls"')[0].rsplit(b"data:", 1)[0],
        99,
    )
    piece = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"%b"}}]}}]}\n\n'
    for _ in range(30):
        assert merger.feed(piece % (b"x" * (MOST_BUFFERED // 32))) == b""
    with pytest.raises(TooMuchBuffered):
        merger.feed(piece % (b"x" * (MOST_BUFFERED // 8)))


def test_an_event_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that never become an event are bounded like the buffer."""
    monkeypatch.setattr(merger_module, "LONGEST_EVENT", 1_000)
    merger = chat.new_stream(NAMES)
    merger.feed(b"data: " + b"x" * 900)
    with pytest.raises(TooMuchBuffered):
        merger.feed(b"x" * 200)


def test_comments_pass_while_calls_wait() -> None:
    """An event that keeps the connection alive is never buffered."""
    merger = chat.new_stream(NAMES)
    assert NAME.encode() not in fed(merger, raw("chat", Answer("", (LOOK,))).rsplit(b"data:", 3)[0], 30)
    assert merger.feed(b": ping\n\n") == b": ping\n\n"


def _chat_event(delta: dict[str, Any]) -> bytes:
    return written({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def _chat_answer(size: int) -> bytes:
    texts = [_chat_event({"content": "x" * 40}) for _ in range(size)]
    thoughts = [_chat_event({"reasoning_details": [{"text": "x"}]}) for _ in range(size)]
    calls = [
        _chat_event({"tool_calls": [{"index": n, "id": f"c{n}", "function": {"name": name, "arguments": "{}"}}]})
        for n, name in enumerate([NAME, *["run"] * size])
    ]
    return b"".join([*texts, *thoughts, *calls])


def _messages_answer(size: int) -> bytes:
    found = [{"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}]
    for kind, member in (("text_delta", "text"), ("citations_delta", "citation")):
        delta = {"type": kind, member: "x" * 40}
        found += [{"type": "content_block_delta", "index": 0, "delta": delta}] * size
    for n, name in enumerate([NAME, *["run"] * size], 1):
        block = {"type": "tool_use", "id": f"t{n}", "name": name, "input": {}}
        found += [{"type": "content_block_start", "index": n, "content_block": block}]
        delta = {"type": "input_json_delta", "partial_json": "{}"}
        found += [{"type": "content_block_delta", "index": n, "delta": delta}]
    return b"".join(written(value, value["type"]) for value in found)


def _responses_answer(size: int) -> bytes:
    found: list[dict[str, Any]] = [
        {"type": kind, "output_index": n, "item": {"type": "reasoning", "id": f"r{n}", "summary": []}}
        for n in range(size)
        for kind in ("response.output_item.added", "response.output_item.done")
    ]
    for n, name in enumerate([NAME, *["run"] * size], size):
        call = {"type": "function_call", "name": name, "call_id": f"c{n}", "arguments": "{}"}
        found += [{"type": "response.output_item.added", "output_index": n, "item": call}]
    return b"".join(written(value, value["type"]) for value in found)


LONG = {"chat": (_chat_answer, 1000), "messages": (_messages_answer, 1000), "responses": (_responses_answer, 1000)}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.slow
def test_a_long_answer_costs_no_more_per_byte_than_a_short_one(api: str) -> None:
    """Pieces, calls and items without number are joined, buffered and renumbered in time that grows with the answer."""
    answer, size = LONG[api]

    def work(size: int) -> None:
        merger, stream = OURS[api].new_stream(NAMES), answer(size)
        passed = merger.feed(stream) + merger.release()
        assert passed.count(b'"run"') == size
        assert NAME.encode() not in passed
        assert len(merger.output)

    assert is_linear(work, size)


def test_a_response_ends_once() -> None:
    """Each end of a response holds all its items: however often a server sends one, the client gets one."""
    merger = responses.new_stream(NAMES)
    item = {"type": "function_call", "name": NAME, "call_id": "c", "arguments": "{}"}
    end = written({"type": "response.completed", "response": {"output": [item]}}, "response.completed")
    merger.feed(written({"type": "response.output_item.added", "output_index": 0, "item": item}) + end)
    passed = merger.release() + merger.feed(end * 100)
    assert passed.count(b"event: response.completed") == 1
