"""The Responses dialect: roles, weights, and edits that leave what is encrypted or hosted alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.apis.responses import (
    REFERENCE,
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
from tests.stub import responses as stub
from tests.support import conversation_strategies
from tests.support.api_formats import to_responses
from tests.support.engine_fixtures import count_tokens, is_clip

Element = dict[str, Any]
PICTURE = {"type": "input_image", "image_url": "https://x.y/z.png", "detail": "low"}
LONG = "word " * 2_000


def read(element: Element) -> Item:
    return read_item(json.dumps(element).encode(), count_tokens)


def part(words: str) -> Element:
    return {"type": "input_text", "text": words}


@st.composite
def raws(draw: st.DrawFn) -> bytes:
    """One element as bytes, in any style."""
    chat = draw(conversation_strategies.conversations(surrogates=False, max_size=4))
    return conversation_strategies.encode(draw, draw(st.sampled_from(to_responses(chat)))).strip()


@settings(max_examples=100)
@given(raws())
def test_what_an_element_weighs(raw: bytes) -> None:
    """An element without media is never counted below what the strict upstream bills, and hardly above it."""
    if b"input_image" not in raw:
        billed = stub.weigh(json.loads(raw))
        assert billed <= read_item(raw, count_tokens).tokens <= billed + 40


KINDS: list[tuple[Element, str, tuple[str, ...], tuple[str, ...]]] = [
    ({"role": "user", "content": "hi"}, "user", (), ()),
    ({"type": "message", "role": "developer", "content": "hi"}, "system", (), ()),
    ({"type": "message", "role": "assistant", "content": [], "id": "msg_1"}, "assistant", (), ()),
    (
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
        "assistant",
        ("c1",),
        (),
    ),
    ({"type": "function_call_output", "call_id": "c1", "output": "x"}, "tool", (), ("c1",)),
    ({"type": "custom_tool_call", "call_id": "c1", "name": "f", "input": "x"}, "assistant", ("c1",), ()),
    ({"type": "custom_tool_call_output", "call_id": "c1", "output": "x"}, "tool", (), ("c1",)),
    ({"type": "local_shell_call", "id": "l1", "call_id": "c1", "action": {}}, "assistant", ("c1", "l1"), ()),
    ({"type": "local_shell_call_output", "id": "l1", "output": "x"}, "tool", (), ("l1",)),
    ({"type": "computer_call_output", "call_id": "c1", "output": {"type": "computer_screenshot"}}, "tool", (), ("c1",)),
    ({"type": "mcp_approval_request", "id": "m1"}, "assistant", ("m1",), ()),
    ({"type": "mcp_approval_response", "approval_request_id": "m1", "approve": True}, "tool", (), ("m1",)),
    ({"type": "reasoning", "id": "rs_1", "summary": []}, "assistant", (), ()),
    ({"type": "web_search_call", "id": "ws_1"}, "assistant", (), ()),
    ({"type": "item_reference", "id": "x"}, "assistant", (), ()),
    ({"type": "compaction", "encrypted_content": "x"}, "system", (), ()),
    ({"type": "compaction_trigger"}, "tool", (), ()),
    ({"type": "nobody_knows"}, "assistant", (), ()),
    ({}, "user", (), ()),
]


@pytest.mark.parametrize(("element", "role", "calls", "answers"), KINDS)
def test_roles_calls_and_answers(element: Element, role: str, calls: tuple[str, ...], answers: tuple[str, ...]) -> None:
    """What the model made, what answers it and what is always kept are told apart; calls and answers meet by id."""
    found = read(element)
    assert (found.role, found.calls, found.answers) == (role, calls, answers)


@pytest.mark.parametrize(
    "element",
    [
        {"role": "user", "content": "a long text indeed"},
        {"role": "user", "content": [part("a long text indeed")]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "a long text indeed"}]},
        {"type": "function_call", "name": "f", "arguments": "a long text indeed"},
        {"type": "function_call_output", "output": "a long text indeed"},
        {"type": "function_call_output", "output": [part("a long text indeed"), PICTURE]},
        {"type": "custom_tool_call", "input": "a long text indeed"},
        {"type": "local_shell_call", "action": {"command": ["a long text indeed"]}},
        {"type": "mcp_call", "output": "a long text indeed"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a long text indeed"}]},
        {"type": "nobody_knows", "words": {"deep": ["a long text indeed"]}},
    ],
)
def test_everything_counts(element: Element) -> None:
    """Whatever holds a text, the text is counted."""
    assert read(element).tokens >= count_tokens("a long text indeed") + 4


def test_media_references_and_what_is_sealed() -> None:
    """Pictures weigh by detail, references by a guess; what the provider encrypted is a guess that no clip touches."""
    assert read({"role": "user", "content": [PICTURE]}).media == 85
    shot = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}
    assert read({"type": "computer_call_output", "call_id": "c", "output": shot}).media > 85
    drawn = read({"type": "image_generation_call", "id": "i", "result": "A" * 40_000})
    assert 85 < drawn.tokens < 2000
    named = read({"type": "item_reference", "id": "rs_1"})
    assert named.guess == named.media == REFERENCE
    thought = read({"type": "reasoning", "summary": [], "encrypted_content": "x" * 1600})
    assert (thought.guess, thought.media) == (300, 0)
    assert thought.sealed == thought.tokens


def test_an_entry_says_what_is_written() -> None:
    """Words, calls and media are told apart; reasoning is nobody's words."""
    said = read_entry(json.dumps({"role": "user", "content": [part("one"), PICTURE, part("two")]}).encode())
    assert (said.role, said.text, said.media) == ("user", "one\ntwo", ("input_image",))
    call = read_entry(b'{"type":"function_call","name":"f","arguments":"{\\"a\\":1}"}')
    assert call.calls == (("f", '{"a":1}'),)
    shell = read_entry(b'{"type":"local_shell_call","action":{"command":["ls"]}}')
    assert shell.calls == (("local_shell_call", '{"command":["ls"]}'),)
    assert read_entry(b'{"type":"function_call_output","output":"found"}').text == "found"
    assert read_entry(b'{"type":"reasoning","summary":[{"type":"summary_text","text":"hm"}]}').text == ""


@pytest.mark.parametrize("raw", [b"1", b'"x"', b"[]", b"null", b"{", b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_what_is_no_element_is_refused(raw: bytes) -> None:
    """An element that is no object, no JSON, or too deep is the client's mistake."""
    with pytest.raises(InvalidRequest):
        read_item(raw, count_tokens)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"input": "hi \\"you\\"", "x": 1.0}',
         b'{"input": [{"type":"message","role":"user","content":"hi \\"you\\""}], "x": 1.0}'),
        (b'{"model":"m" }', b'{"model":"m" ,"input":[]}'),
        (b'{"input":{}}', None),
        (b'{"input":"a","input":"b"}', None),
        (b"{}", None),
        (b"[", None),
    ],
)  # fmt: skip
def test_input_as_a_list(body: bytes, expected: bytes | None) -> None:
    """A text is one user message, no input is none; everything around them stays as it is spelled."""
    assert listed(body) == expected


@settings(max_examples=60)
@given(
    st.one_of(st.text(min_size=1), st.lists(st.text(min_size=1).map(part), min_size=1)), st.booleans(), st.booleans()
)
def test_added_text_leaves_the_content_in_one_run(content: Any, before: bool, pictures: bool) -> None:
    """A text of ours stands before or after the message's own, in a part of the kind users send."""
    raw = json.dumps({"type": "message", "role": "user", "content": content}).encode()
    media = [json.dumps(PICTURE).encode()] if pictures else []
    now = json.loads(with_text(raw, "BLOCK", before=before, media=media))["content"]
    if isinstance(content, str) and not pictures:
        assert now == ("BLOCK\n\n" + content if before else content + "\n\nBLOCK")
        return
    own = [part(content)] if isinstance(content, str) else content
    added = [part("BLOCK"), PICTURE] if pictures else [part("BLOCK")]
    assert now == ([*added, *own] if before else [*own, *added])


def test_a_message_of_our_own() -> None:
    """Where there is no user item to carry a text, one is made that a strict provider accepts."""
    made = json.loads(user_message("words"))
    assert made == {"type": "message", "role": "user", "content": [part("words")]}
    assert json.loads(with_text(b'{"role":"user"}', "new", before=True))["content"] == [part("new")]
    assert marker(user_message("words")) == b""
    assert media_parts(json.dumps({"content": [part("x"), PICTURE]}).encode()) == [json.dumps(PICTURE).encode()]


@settings(max_examples=80)
@given(raws(), st.integers(0, 300))
def test_clipping_keeps_everything_but_words(raw: bytes, tokens: int) -> None:
    """A clipped element has its ids, names and reasoning, and only shorter texts."""
    made = clipped(raw, lambda words, n: clip(words, n, count_tokens), count_tokens, tokens)
    assert is_clip(json.loads(raw), json.loads(made))
    if json.loads(raw).get("type") == "reasoning":
        assert made == raw


@pytest.mark.parametrize(
    "element",
    [
        {"role": "user", "content": LONG},
        {"role": "user", "content": [part(LONG), PICTURE, part("short")]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": [LONG]})},
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": LONG},
        {"type": "function_call_output", "call_id": "c", "output": LONG},
        {"type": "function_call_output", "call_id": "c", "output": [part(LONG)]},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": LONG, "stderr": "", "outcome": {}}]},
    ],
)
def test_what_is_long_becomes_short(element: Element) -> None:
    """Every place a client can put a long text is clipped to what was asked for."""
    raw = json.dumps(element).encode()
    was = read_item(raw, count_tokens)
    made = read_item(
        clipped(raw, lambda words, n: clip(words, n, count_tokens), count_tokens, 300 + was.media), count_tokens
    )
    assert 150 < made.tokens - was.media <= 300


def test_an_output_gives_way() -> None:
    """A function's output, text or parts, becomes the given text; a screenshot is no such result."""
    parts = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "hi"}]}
    raw = json.dumps(parts).encode()
    assert read_entry(raw).results == (("hi", False),)
    assert json.loads(replaced(raw, ["X"])) == {**parts, "output": "X"}
    picture = {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}
    assert read_entry(json.dumps(picture).encode()).results == ()
