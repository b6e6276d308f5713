"""The chat dialect: what a message weighs and calls, and edits that change nothing but what they should."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from proxy.core.apis.chat import (
    PER_CALL,
    PER_MESSAGE,
    clipped,
    media_parts,
    read_entry,
    read_item,
    replaced,
    user_message,
    with_text,
)
from proxy.core.apis.item_digest import digest
from proxy.core.apis.json_scan import members
from proxy.core.compaction.truncate import clip
from proxy.core.conversation import Item
from proxy.core.errors import InvalidRequest
from proxy.core.tokens.media import UNKNOWN_IMAGE
from proxy.tokenizers import Tokenizers
from tests.stub import tokens as stub
from tests.support import conversation_strategies

Message = dict[str, Any]
COUNTER = Tokenizers()
IMAGE = {"type": "image_url", "image_url": {"url": "https://x.y/z.png"}}


def count(text: str) -> int:
    return COUNTER.count("o200k_base", text)


def shorten(text: str, tokens: int) -> str:
    return clip(text, tokens, count)


def read(message: Message) -> Item:
    return read_item(json.dumps(message).encode(), count)


def call(name: str, arguments: str, **members: object) -> Message:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **members}


@st.composite
def messages(draw: st.DrawFn, **options: Any) -> Message:
    """One message of any kind that clients send."""
    return draw(st.sampled_from(draw(conversation_strategies.conversations(with_orphans=True, max_size=4, **options))))


@st.composite
def raws(draw: st.DrawFn) -> bytes:
    """One message as bytes, in any style."""
    return conversation_strategies.encode(draw, draw(messages())).strip()


@settings(max_examples=150)
@given(messages())
def test_what_a_message_weighs(message: Message) -> None:
    """A message without media is never counted below what the strict upstream bills, and hardly above it."""
    assume("image_url" not in json.dumps(message))
    ours, billed = read(message).tokens, stub.message_tokens(message)
    calls = len(message.get("tool_calls") or ()) + ("function_call" in message)
    assert ours >= billed
    if not {"x_vendor", "weight"} & message.keys():
        assert ours <= billed + 12 + PER_CALL * calls


@pytest.mark.parametrize(
    "more",
    [
        {"content": [{"type": "text", "text": "a long text indeed"}]},
        {"content": [{"text": "a long text indeed"}]},
        {"content": ["a long text indeed"]},
        {"content": {"what": "a long text indeed"}},
        {"content": [{"type": "thinking", "thinking": "a long text indeed"}]},
        {"content": [{"type": "refusal", "refusal": "a long text indeed"}]},
        {"content": [{"type": "custom", "text": "x", "more": "a long text indeed"}]},
        {"name": "a long text indeed"},
        {"reasoning_content": "a long text indeed"},
        {"reasoning_details": [{"text": "a long text indeed"}]},
        {"refusal": "a long text indeed"},
        {"tool_call_id": "a long text indeed"},
        {"tool_calls": [call("f", "a long text indeed")]},
        {"tool_calls": [call("a long text indeed", "")]},
        {"tool_calls": [call("f", "", id="a long text indeed")]},
        {"tool_calls": [{"id": "x", "type": "custom", "custom": {"name": "f", "input": "a long text indeed"}}]},
        {"tool_calls": [{"id": "x", "function": {"name": "f", "arguments": {"a": "a long text indeed"}}}]},
        {"function_call": {"name": "f", "arguments": "a long text indeed"}},
        {"function_call": {"name": "a long text indeed", "arguments": ""}},
    ],
)
def test_everything_counts(more: Message) -> None:
    """Whatever part of a message holds a text, the text is counted."""
    assert read({"role": "assistant", **more}).tokens >= PER_MESSAGE + count("a long text indeed")


def test_media_weigh_by_themselves() -> None:
    """Media are part of the weight, named as such, and known as a guess where they are one."""
    low = {"type": "image_url", "image_url": {"url": "https://x.y/z.png", "detail": "low"}}
    found = read({"role": "user", "content": [IMAGE, low, {"type": "text", "text": "see"}]})
    assert (found.media, found.guess) == (UNKNOWN_IMAGE + 85, UNKNOWN_IMAGE)
    assert found.tokens == PER_MESSAGE + found.media + count("see")
    assert read({"role": "user", "content": "see"}).media == 0


@pytest.mark.parametrize(
    ("message", "role", "calls", "answers"),
    [
        ({"role": "system"}, "system", (), ()),
        ({"role": "developer"}, "system", (), ()),
        ({"role": "user"}, "user", (), ()),
        ({"role": "narrator"}, "user", (), ()),
        ({"role": None}, "user", (), ()),
        ({}, "user", (), ()),
        ({"role": "assistant", "tool_calls": None}, "assistant", (), ()),
        ({"role": "assistant", "tool_calls": [call("f", ""), call("g", "", id="c2")]}, "assistant", ("c1", "c2"), ()),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "id": "x", "custom": {}}]}, "assistant", ("x",), ()),
        ({"role": "assistant", "function_call": {"name": "f"}}, "assistant", ("function:f",), ()),
        ({"role": "function", "name": "f", "content": "x"}, "tool", (), ("function:f",)),
        ({"role": "tool", "tool_call_id": "c1"}, "tool", (), ("c1",)),
        ({"role": "tool", "tool_call_id": 5}, "tool", (), ("5",)),
        ({"role": "tool"}, "tool", (), ()),
    ],
)
def test_roles_calls_and_answers(message: Message, role: str, calls: tuple[str, ...], answers: tuple[str, ...]) -> None:
    """Roles are the four there are; calls and answers meet by id, legacy ones by the function's name."""
    found = read(message)
    assert (found.role, found.calls, found.answers) == (role, calls, answers)
    assert found.digest == digest(message)


@pytest.mark.parametrize(
    "raw",
    [b"1", b'"x"', b"[]", b"null", b"", b"{", b'{"content":"\xff"}', b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
    ids=range(8),
)
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    """An element that is no object, no JSON, or too deep is the client's mistake."""
    with pytest.raises(InvalidRequest):
        read_item(raw, count)


@pytest.mark.parametrize("depth", [50, 200, 400, 600, 900, 2000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_messages_never_crash(depth: int, opening: str, closing: str) -> None:
    """A message nested deep is read or refused; arguments nested deep, which are text, as well."""
    deep = opening * depth + "1" + closing * depth
    inside = json.dumps({"role": "assistant", "tool_calls": [call("f", deep)]})
    for raw in (f'{{"role":"user","content":[{{"x":{deep}}}]}}', f'{{"role":"user","x":{deep}}}', inside):
        try:
            assert read_item(raw.encode(), count).tokens > depth / 2
        except InvalidRequest:
            assert depth > 200


def test_an_entry_says_what_is_written() -> None:
    """Words, calls and kinds of media are told apart."""
    found = read_entry(
        json.dumps(
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "one"}, IMAGE, {"type": "text", "text": "two"}],
                "tool_calls": [call("f", '{"a":1}'), {"id": "x", "custom": {"name": "g", "input": "raw"}}],
                "function_call": {"name": "h", "arguments": {"b": 2}},
            }
        ).encode()
    )
    assert found.role == "assistant"
    assert found.text == "one\ntwo"
    assert found.calls == (("f", '{"a":1}'), ("g", "raw"), ("h", '{"b":2}'))
    assert found.media == ("image_url",)
    assert read_entry(b'{"role":"tool","content":null}').text == ""


def content_of(raw: bytes) -> str:
    """The bytes of the content as they stand, as text; ``null`` where there is none."""
    text = raw.decode()
    return next((text[f.start : f.end] for f in reversed(members(text)) if f.key == "content"), "null")


def texts_of(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


@settings(max_examples=150)
@given(raws(), conversation_strategies.texts(long=False), st.booleans(), st.booleans())
def test_added_text_leaves_the_content_in_one_run(raw: bytes, text: str, before: bool, pictures: bool) -> None:
    """The message's own content stays one unchanged run of bytes, and only the content member changes."""
    media = [json.dumps(IMAGE).encode()] if pictures else []
    made = with_text(raw, text, before=before, media=media)
    was, now = json.loads(raw), json.loads(made.decode())
    assert {k: v for k, v in now.items() if k != "content"} == {k: v for k, v in was.items() if k != "content"}
    own = content_of(raw)
    inner = own.strip()[1:-1].strip() if own[0] in '["' else ""
    assert inner in content_of(made)
    said = texts_of(now["content"])
    assert text in (said[0] if before or len(said) == 1 else said[-1])
    assert ([part for part in now["content"] if part == IMAGE] != []) >= pictures
    if isinstance(was.get("content"), list):
        kept = now["content"][1 + pictures :] if before else now["content"][: -1 - pictures]
        assert kept == was["content"]


@pytest.mark.parametrize(
    ("content", "before", "media", "expected"),
    [
        ('"own"', True, False, '"new\\n\\nown"'),
        ('"own"', False, False, '"own\\n\\nnew"'),
        ('"\\ud83d\\n"', True, False, '"new\\n\\n\\ud83d\\n"'),
        ('""', True, False, '"new\\n\\n"'),
        ("null", True, False, '"new"'),
        ("[]", False, False, '"new"'),
        ("[ ]", True, False, '"new"'),
        ('[ {"a": 1} ]', True, False, '[{"type":"text","text":"new"},{"a": 1}]'),
        ('[ {"a": 1} ]', False, True, '[{"a": 1},{"type":"text","text":"new"},M]'),
        ('"own"', True, True, '[{"type":"text","text":"new"},M,{"type":"text","text":"own"}]'),
        ('""', True, True, '[{"type":"text","text":"new"},M]'),
        ("null", False, True, '[{"type":"text","text":"new"},M]'),
    ],
)
def test_where_text_is_added(content: str, before: bool, media: bool, expected: str) -> None:
    """A string grows inside its quotes, a list by parts, nothing becomes the text; media stand behind our text."""
    picture = json.dumps(IMAGE)
    made = with_text(
        f'{{ "content" : {content} , "role":"user"}}'.encode(),
        "new",
        before=before,
        media=[picture.encode()] if media else [],
    )
    assert made.decode() == f'{{ "content" : {expected.replace("M", picture)} , "role":"user"}}'


@pytest.mark.parametrize("raw", [b"{}", b" { } ", b'{"role":"user"}', b'{"role":"user" }', b'{"x":{"content":"a"}}'])
def test_text_for_a_message_without_content(raw: bytes) -> None:
    """A message that had no content gets one, and loses nothing."""
    for media in ([], [b'{"type":"image_url"}']):
        now = json.loads(with_text(raw, "new", before=True, media=media))
        content = now.pop("content")
        assert content == ([{"type": "text", "text": "new"}, {"type": "image_url"}] if media else "new")
        assert now == json.loads(raw)


def test_the_content_that_counts_is_the_one_that_grows() -> None:
    """Where a message has two contents, the last one is what parsers see."""
    made = with_text(b'{"content":"a","role":"user","cont\\u0065nt":"b"}', "new", before=False)
    assert json.loads(made)["content"] == "b\n\nnew"
    assert media_parts(b'{"content":[],"content":[' + json.dumps(IMAGE).encode() + b"]}") != []


@pytest.mark.parametrize("text", ["\ud83d", '"\\', "é日本👩🏽‍💻", "\x00\u2028"])
def test_any_text_can_be_added(text: str) -> None:
    """Broken characters, quotes and control characters arrive as they are, and the bytes are UTF-8."""
    for content in ('"own"', "[]", '[{"type":"text","text":"own"}]'):
        raw = f'{{"role":"user","content":{content}}}'.encode()
        assert text in str(texts_of(json.loads(with_text(raw, text, before=True).decode())["content"])[0])
    assert json.loads(user_message(text).decode()) == {"role": "user", "content": text}


def test_media_parts_are_the_clients_bytes() -> None:
    """The media parts of a message are its own slices, in order, and nothing else."""
    first, second = b'{ "type" : "image_url", "image_url":{"url":"\xc3\xa9"} }', b'{"type":"file","file":{}}'
    raw = b'{"role":"user","content":[ ' + first + b' , {"type":"text","text":"x"},"loose",' + second + b"]}"
    assert media_parts(raw) == [first, second]
    assert media_parts(b'{"content":"x"}') == []
    assert media_parts(b"{}") == []


def strip_texts(message: Message) -> Message:
    """*message* without the texts that may be clipped."""
    made = json.loads(json.dumps(message))
    for key in ("content", "reasoning_content", "reasoning"):
        if isinstance(made.get(key), str):
            made[key] = ""
    for part in made["content"] if isinstance(made.get("content"), list) else ():
        if isinstance(part, dict) and "text" in part:
            part["text"] = ""
    functions = [one["function"] for one in made.get("tool_calls") or ()]
    for function in [*functions, *([made["function_call"]] if "function_call" in made else [])]:
        function["arguments"] = shape(function["arguments"])
    return made


def shape(arguments: str) -> object:
    """What of a call's arguments must stay: everything but the words."""

    def empty(value: object) -> object:
        if isinstance(value, dict):
            return {key: empty(member) for key, member in value.items()}
        return (
            [empty(member) for member in value] if isinstance(value, list) else "" if isinstance(value, str) else value
        )

    try:
        return empty(json.loads(arguments))
    except ValueError:
        return ""


def least(message: Message) -> int:
    """The weight of *message* with every clippable text emptied."""
    made = strip_texts(message)
    for one in [*(made.get("tool_calls") or ()), *([made] if "function_call" in made else [])]:
        function = one.get("function") or one["function_call"]
        function["arguments"] = json.dumps(function["arguments"]) if function["arguments"] != "" else ""
    return read(made).tokens


@settings(max_examples=150)
@given(raws(), st.integers(0, 400))
def test_clipping_keeps_everything_but_words(raw: bytes, tokens: int) -> None:
    """A clipped message has its roles, names, ids, media and the shape of its arguments, and only shorter texts."""
    made = clipped(raw, shorten, count, tokens)
    was, now = json.loads(raw), json.loads(made.decode())
    assert strip_texts(now) == strip_texts(was)
    item, before = read_item(made, count), read_item(raw, count)
    assert (item.role, item.calls, item.answers, item.media) == (
        before.role,
        before.calls,
        before.answers,
        before.media,
    )


@settings(max_examples=150)
@given(messages(surrogates=False), st.integers(0, 400))
@example({"role": "assistant", "tool_calls": [call("f", json.dumps({"a": "\n" * 900, "b": '"' * 900}))]}, 100)
@example({"role": "tool", "tool_call_id": "c", "content": "<|endoftext|>" * 400}, 60)
def test_clipping_reaches_what_can_be_reached(message: Message, tokens: int) -> None:
    """The result takes at most what was asked for, unless what may not be clipped alone takes more."""
    raw = json.dumps(message).encode()
    found = read_item(clipped(raw, shorten, count, tokens), count).tokens
    assert found <= max(tokens, least(message) + 4)


LONG = "word " * 2_000


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": LONG},
        {"role": "user", "content": [{"type": "text", "text": LONG}, IMAGE, {"type": "text", "text": "short"}]},
        {"role": "tool", "tool_call_id": "c1", "content": LONG},
        {"role": "assistant", "tool_calls": [call("f", json.dumps({"a": {"b": [LONG, 1]}, "n": None}))]},
        {"role": "assistant", "tool_calls": [call("f", LONG)]},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": LONG}}]},
        {"role": "assistant", "tool_calls": [{"id": "c", "custom": {"name": "f", "input": json.dumps({"a": LONG})}}]},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": json.dumps({"a": LONG})}},
        {"role": "user", "content": "\ud83d " * 3_000},
        {"role": "assistant", "tool_calls": [call("f", json.dumps({"a": LONG, "b": "\ud83d"}))]},
    ],
    ids=range(10),
)
def test_what_is_long_becomes_short(message: Message) -> None:
    """Every place a client can put a long text is clipped to what was asked for; the short ones stay whole."""
    raw = json.dumps(message).encode()
    media = read_item(raw, count).media
    made = clipped(raw, shorten, count, 300 + media)
    found = read_item(made, count)
    assert 150 < found.tokens - media <= 300
    said = made.decode()
    assert "left out" in said
    assert ("short" in said) == ("short" in raw.decode())
    for one in json.loads(said).get("tool_calls", ()):
        function = one.get("function") or one["custom"]
        text = function.get("arguments", function.get("input"))
        assert text.startswith("word") or json.loads(text)


def test_arguments_stay_valid_where_characters_are_broken() -> None:
    """A lone surrogate that a call's arguments spell with an escape is spelled so afterwards too."""
    arguments = json.dumps({"a": LONG, "b": "\ud83d"})
    raw = json.dumps({"role": "assistant", "tool_calls": [call("f", arguments)]}).encode()
    made = json.loads(clipped(raw, shorten, count, 200))["tool_calls"][0]["function"]["arguments"]
    assert made.isascii()
    assert json.loads(made)["b"] == "\ud83d"


def test_the_longest_texts_are_clipped_first() -> None:
    """Of several texts the longest give way, down to a common level."""
    parts = [{"type": "text", "text": "word " * size} for size in (10, 1_000, 3_000)]
    made = json.loads(clipped(json.dumps({"role": "user", "content": parts}).encode(), shorten, count, 600))["content"]
    sizes = [count(part["text"]) for part in made]
    assert made[0] == parts[0]
    assert abs(sizes[1] - sizes[2]) < 60


@pytest.mark.parametrize("content", ["said", [{"type": "text", "text": "said"}], None])
def test_a_result_gives_way(content: Any) -> None:
    """A tool's content becomes the given text, parts stay parts, everything else keeps its bytes."""
    raw = json.dumps({"role": "tool", "tool_call_id": "a", "content": content, "x": [1.0]}).encode()
    made = json.loads(replaced(raw, ["X"]))
    assert made == {
        "role": "tool",
        "tool_call_id": "a",
        "content": [{"type": "text", "text": "X"}] if isinstance(content, list) else "X",
        "x": [1.0],
    }
