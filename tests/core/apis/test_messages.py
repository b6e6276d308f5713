"""The Messages dialect: roles, weights, marks, and edits that leave what is sealed alone."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.apis.messages import (
    clipped,
    listed,
    marker,
    media_parts,
    read_entry,
    read_item,
    replaced,
    user_message,
    with_text,
)
from proxy.core.compaction.truncate import clip
from proxy.core.conversation import Item
from proxy.core.errors import InvalidRequest
from tests.stub import messages as stub
from tests.support import conversation_strategies
from tests.support.api_formats import to_messages
from tests.support.engine_fixtures import count_tokens, is_clip

Message = dict[str, Any]
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 8 + struct.pack(">II", 750, 1000)).decode()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
REMOTE = {"type": "image", "source": {"type": "url", "url": "https://x.y/z.png"}}
CALL = {"type": "tool_use", "id": "t1", "name": "run", "input": {"cmd": "ls -la", "deep": [{"n": 1}]}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "a long text indeed"}
THOUGHT = {"type": "thinking", "thinking": "a long text indeed", "signature": "c2ln" * 4}
LONG = "word " * 2_000


def read(message: Message) -> Item:
    return read_item(json.dumps(message).encode(), count_tokens)


def of(*blocks: Message, role: str = "user") -> Message:
    return {"role": role, "content": list(blocks)}


def text(words: str) -> Message:
    return {"type": "text", "text": words}


@st.composite
def raws(draw: st.DrawFn) -> bytes:
    """One message as bytes, in any style."""
    chat = draw(conversation_strategies.conversations(surrogates=False, max_size=4))
    message = draw(st.sampled_from(to_messages(chat, mixed=draw(st.booleans()))))
    return conversation_strategies.encode(draw, message).strip()


@settings(max_examples=100)
@given(raws())
def test_what_a_message_weighs(raw: bytes) -> None:
    """A message without media is never counted below what the strict upstream bills, and hardly above it."""
    message = json.loads(raw)
    if b'"image"' in raw:
        return
    ours, billed = read_item(raw, count_tokens).tokens, stub.weigh(message)
    blocks = message["content"] if isinstance(message["content"], list) else []
    assert billed <= ours <= billed + 8 + 16 * len(blocks)


@pytest.mark.parametrize(
    ("message", "role", "calls", "answers"),
    [
        ({"role": "user", "content": "hi"}, "user", (), ()),
        (of(text("hi"), IMAGE), "user", (), ()),
        (of(RESULT), "tool", (), ("t1",)),
        (of(RESULT, {**RESULT, "tool_use_id": "t2"}, text("stop")), "tool", (), ("t1", "t2")),
        (of(THOUGHT, text("I look."), CALL, role="assistant"), "assistant", ("t1",), ()),
        (of({"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}, role="assistant"),
         "assistant", (), ()),
        ({"role": "system", "content": "x"}, "system", (), ()),
        ({"role": "narrator"}, "user", (), ()),
        ({}, "user", (), ()),
    ],
)  # fmt: skip
def test_roles_calls_and_answers(message: Message, role: str, calls: tuple[str, ...], answers: tuple[str, ...]) -> None:
    """An item with results is a tool item, whoever is said to speak; calls and answers meet by id."""
    found = read(message)
    assert (found.role, found.calls, found.answers) == (role, calls, answers)


@pytest.mark.parametrize(
    "block",
    [
        text("a long text indeed"),
        RESULT,
        {**RESULT, "content": [text("a long text indeed"), IMAGE]},
        {**CALL, "input": {"a": ["a long text indeed"]}},
        THOUGHT,
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a long text indeed"}},
        {"type": "document", "source": {"type": "content", "content": [text("a long text indeed")]}, "title": "T"},
        {"type": "search_result", "source": "u", "title": "t", "content": [text("a long text indeed")]},
        {"type": "mcp_tool_result", "tool_use_id": "m", "content": [text("a long text indeed")]},
        {"type": "compaction", "content": "a long text indeed"},
        {"type": "nobody_knows", "words": "a long text indeed"},
    ],
)
def test_everything_counts(block: Message) -> None:
    """Whatever block holds a text, the text is counted."""
    assert read(of(block)).tokens >= count_tokens("a long text indeed") + 4


def test_media_and_what_is_sealed() -> None:
    """Images weigh by their size, what cannot be read is a guess, what is signed or encrypted may not be clipped."""
    assert (read(of(IMAGE)).media, read(of(IMAGE)).guess) == (765, 0)
    assert read(of(REMOTE)).media == read(of(REMOTE)).guess > 765
    paper = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "A" * 4000}}
    assert read(of(paper)).media == read(of(paper)).guess > 100
    hidden = read(of({**THOUGHT, "thinking": "", "signature": "x" * 1600}, role="assistant"))
    assert (hidden.guess, hidden.media) == (300, 0)
    assert hidden.sealed > 300
    assert read(of(THOUGHT)).guess == 0
    assert read(of({"type": "redacted_thinking", "data": "x" * 160})).guess == 30


def test_what_a_user_said_beside_results() -> None:
    """The user's own words in an item of results are told apart from the results."""
    message = of(RESULT, text("Stop that."), IMAGE)
    assert read(message).said == count_tokens("Stop that.")
    entry = read_entry(json.dumps(message).encode())
    assert (entry.role, entry.said, entry.media) == ("tool", "Stop that.", ("image",))
    assert entry.text == "a long text indeed\nStop that."
    assert read(of(text("Stop that."))).said == 0


def test_an_entry_says_what_is_written() -> None:
    """Words and calls are told apart, and thoughts are nobody's words."""
    entry = read_entry(json.dumps(of(THOUGHT, text("I look."), CALL, role="assistant")).encode())
    assert (entry.role, entry.text) == ("assistant", "I look.")
    assert entry.calls == (("run", '{"cmd":"ls -la","deep":[{"n":1}]}'),)


@pytest.mark.parametrize("raw", [b"1", b"[]", b"null", b"{", b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    """An element that is no object, no JSON, or too deep is the client's mistake."""
    with pytest.raises(InvalidRequest):
        read_item(raw, count_tokens)
    assert listed(raw) is None


@settings(max_examples=80)
@given(raws(), st.booleans(), st.booleans())
def test_added_text_leaves_the_content_in_one_run(raw: bytes, before: bool, marked: bool) -> None:
    """A block of ours stands before or after the message's own blocks, with a mark if it is given one."""
    mark = b'{"type":"ephemeral"}' if marked else b""
    was = json.loads(raw)
    now = json.loads(with_text(raw, "BLOCK", before=before, media=[json.dumps(IMAGE).encode()], marker=mark))
    own = was["content"] if isinstance(was["content"], list) else [text(was["content"])]
    block = {**text("BLOCK"), **({"cache_control": {"type": "ephemeral"}} if marked else {})}
    assert now["content"] == ([block, IMAGE, *own] if before else [*own, block, IMAGE])
    assert {**now, "content": 0} == {**was, "content": 0}


def test_a_message_of_our_own() -> None:
    """Where there is no user item to carry a text, one is made; one without content gets some."""
    assert json.loads(user_message("\ud83d x")) == {"role": "user", "content": "\ud83d x"}
    assert json.loads(with_text(b'{"role":"user"}', "new", before=True))["content"] == [text("new")]


def test_media_parts_are_the_clients_bytes() -> None:
    """Images and files are slices of the message; a document of words is words."""
    picture = b'{ "type" : "image", "source":{"type":"url","url":"u"} }'
    words = b'{"type":"document","source":{"type":"text","data":"x"}}'
    assert media_parts(b'{"content":[' + words + b" , " + picture + b',"loose"]}') == [picture]
    assert media_parts(b'{"content":"x"}') == []


def test_marks_are_found_wherever_they_may_stand() -> None:
    """The last mark of a message counts, also one inside a result."""
    five, hour = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    inside = {**RESULT, "content": [{**text("x"), "cache_control": hour}]}
    assert json.loads(marker(json.dumps(of(text("a"), inside)).encode())) == hour
    assert json.loads(marker(json.dumps(of(inside, {**text("a"), "cache_control": five})).encode())) == five
    assert marker(json.dumps(of(text("a"))).encode()) == b""


@settings(max_examples=80)
@given(raws(), st.integers(0, 300))
def test_clipping_keeps_everything_but_words(raw: bytes, tokens: int) -> None:
    """A clipped message has its blocks, ids, names, thoughts and media, and only shorter texts."""
    made = clipped(raw, lambda words, n: clip(words, n, count_tokens), count_tokens, tokens)
    assert is_clip(json.loads(raw), json.loads(made))
    now, was = read_item(made, count_tokens), read_item(raw, count_tokens)
    assert (now.role, now.calls, now.answers, now.media, now.sealed) == (
        was.role,
        was.calls,
        was.answers,
        was.media,
        was.sealed,
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": LONG},
        of(text(LONG), IMAGE, text("short")),
        of({**RESULT, "content": LONG}),
        of({**RESULT, "content": [text(LONG), IMAGE]}),
        of(THOUGHT, {**CALL, "input": {"a": {"b": [LONG, 1.5]}}}, role="assistant"),
        of({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": LONG}}),
        of({"type": "search_result", "source": "u", "title": "t", "content": [text(LONG)]}),
    ],
)
def test_what_is_long_becomes_short(message: Message) -> None:
    """Every place a client can put a long text is clipped to what was asked for."""
    raw = json.dumps(message).encode()
    was = read_item(raw, count_tokens)
    made = read_item(
        clipped(raw, lambda words, n: clip(words, n, count_tokens), count_tokens, 300 + was.media), count_tokens
    )
    assert 150 < made.tokens - was.media <= 300


def test_what_is_sealed_is_not_clipped() -> None:
    """A thought and what a server's own tool found stay byte for byte, however long they are."""
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"encrypted_content": "x" * 9000}]}
    raw = json.dumps(of({**THOUGHT, "thinking": LONG}, found, role="assistant")).encode()
    assert clipped(raw, lambda words, n: clip(words, n, count_tokens), count_tokens, 50) == raw


def test_results_give_way_one_by_one() -> None:
    """Each result's content is replaced in the order of their ids; ids, marks, errors and the user's words stay."""
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "hi"}], "cache_control": {}},
        {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True},
        {"type": "text", "text": "and so"},
    ]
    raw = json.dumps({"role": "user", "content": blocks}).encode()
    assert read_entry(raw).results == (("hi", False), ("no", True))
    made = json.loads(replaced(raw, ["X", "Y"]))["content"]
    assert made == [{**blocks[0], "content": "X"}, {**blocks[1], "content": "Y"}, blocks[2]]
