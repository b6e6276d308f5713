"""Every API reads and edits as the table says, and all of them keep the same promises for whatever clients send."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from proxy.core.apis import chat, portable
from proxy.core.apis.items import digest
from proxy.core.apis.json_scan import members
from proxy.core.conversation import Item, ItemText
from proxy.core.errors import InvalidRequest
from tests.support import conversation_strategies
from tests.support.api_cases import (
    APIS,
    IMAGE,
    INPUT_PICTURE,
    LONG,
    PICTURE,
    ROWS,
    SAME,
    Element,
    Row,
    Tokens,
    added,
    call,
    clipped,
    made_portable,
    raw_of,
    shorten,
    text,
)
from tests.support.api_formats import to_gemini, to_messages, to_responses
from tests.support.engine_fixtures import count_tokens
from tests.support.plan_checks import is_clip

ITEM: dict[str, Callable[[Item], Any]] = {
    "role": lambda item: item.role,
    "calls": lambda item: item.calls,
    "answers": lambda item: item.answers,
    "tokens": lambda item: item.tokens,
    "media": lambda item: item.media,
    "guess": lambda item: item.guess,
    "sealed": lambda item: item.sealed,
    "user_tokens": lambda item: item.user_tokens,
    "all_sealed": lambda item: item.sealed == item.tokens,
    "all_media_guessed": lambda item: item.media == item.guess,
}
ENTRY: dict[str, Callable[[ItemText], Any]] = {
    "text": lambda entry: entry.text,
    "user_text": lambda entry: entry.user_text,
    "spoken_calls": lambda entry: entry.calls,
    "kinds": lambda entry: entry.media,
    "results": lambda entry: entry.results,
}
RANGED = frozenset({"tokens", "media", "guess", "sealed"})
DEFAULTS: dict[str, Any] = {"calls": (), "answers": ()}
"""The members that a row with a role implies."""


def item_of(api: str, raw: bytes) -> Item:
    return APIS[api].module.read_item(raw, count_tokens)


def rows(wanted: Callable[[Row], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", [row for row in ROWS if wanted(row)], ids=str)


# The table, both ways.


@rows(lambda row: bool(row.reads) and "refused" not in row.reads)
def test_what_is_read(row: Row) -> None:
    """The bytes give the item and the words that the row names."""
    module, reads = APIS[row.api].module, dict(row.reads)
    item = item_of(row.api, row.raw)
    wanted = {**(DEFAULTS if "role" in reads else {}), **reads}
    if (words := wanted.pop("counts", None)) is not None:
        assert item.tokens >= APIS[row.api].least + count_tokens(words)
    if (words := wanted.pop("exactly", None)) is not None:
        assert item.tokens == APIS[row.api].least + item.media + count_tokens(words)
    if "parts" in wanted:
        assert module.media_parts(row.raw) == wanted.pop("parts")
    if "marker" in wanted:
        found, mark = module.marker(row.raw), wanted.pop("marker")
        assert (json.loads(found) if found else None) == mark
    for name, value in wanted.items():
        found = ITEM[name](item) if name in ITEM else ENTRY[name](module.read_item_text(row.raw))
        if name in RANGED and isinstance(value, tuple):
            assert value[0] <= found <= value[1], name
        else:
            assert found == value, name
    if row.api == "chat" and "role" in reads:
        assert item.digest == digest(json.loads(row.raw))


@rows(lambda row: bool(row.reads.get("refused")))
def test_what_is_no_element_is_refused(row: Row) -> None:
    """An element that is no object, no JSON, or too deep is the client's mistake."""
    with pytest.raises(InvalidRequest):
        item_of(row.api, row.raw)


@rows(lambda row: row.edit is not None)
def test_what_an_edit_gives(row: Row) -> None:
    """The edit gives the bytes that the row names."""
    assert row.edit is not None
    raw = row.raw
    made = row.edit(row.api, raw)
    if row.gives is SAME:
        assert made is raw
    elif row.gives is None:
        assert made is None
    elif isinstance(row.gives, Tokens):
        assert made is not None
        found = item_of(row.api, made)
        assert row.gives.above < found.tokens - found.media <= row.gives.most
        assert found.media == item_of(row.api, raw).media
    elif isinstance(row.gives, (bytes, str)):
        assert made == raw_of(row.gives)
    else:
        assert made is not None
        assert json.loads(made.decode()) == row.gives


@rows(
    lambda row: isinstance(row.gives, (Tokens, dict, bytes, str)) and row.raw[:1] == b"{" and b'"input"' not in row.raw
)
def test_an_edited_element_is_the_same_item(row: Row) -> None:
    """An edited item is read with the same role, calls and answers."""
    assert row.edit is not None
    made = row.edit(row.api, row.raw)
    assert made is not None
    was, now = item_of(row.api, row.raw), item_of(row.api, made)
    assert (now.role, now.calls, now.answers) == (was.role, was.calls, was.answers)


@pytest.mark.parametrize("api", APIS)
def test_every_api_is_in_the_table(api: str) -> None:
    """Each has rows that are read, refused and edited, and its own way to leave sealed reasoning out."""
    own = [row for row in ROWS if row.api == api]
    assert {bool(row.reads.get("refused")) for row in own} == {True, False}
    assert any(row.edit for row in own)
    assert set(portable.PORTABLE) == set(APIS)


# Promises for whatever clients send, the same for every API.


@st.composite
def elements(draw: st.DrawFn, api: str, **options: Any) -> Element:
    """One element of any kind that clients of *api* send."""
    if api == "chat":
        chats = draw(conversation_strategies.conversations(with_orphans=True, max_size=4, **options))
        return draw(st.sampled_from(chats))
    chats = draw(conversation_strategies.conversations(surrogates=False, max_size=4))
    if api == "gemini":
        return draw(st.sampled_from(to_gemini(chats)))
    items = to_responses(chats) if api == "responses" else to_messages(chats, mixed=draw(st.booleans()))
    return draw(st.sampled_from(items))


@st.composite
def raws(draw: st.DrawFn, api: str) -> bytes:
    """One element as bytes, in any style."""
    return conversation_strategies.encode(draw, draw(elements(api))).strip()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.slow
def test_what_an_element_weighs(api: str) -> None:
    """An element without media is never counted below what the strict upstream bills, and hardly above it."""

    @settings(max_examples=150 if api == "chat" else 100)
    @given(raws(api))
    def check(raw: bytes) -> None:
        assume(not any(kind in raw for kind in (b'"image"', b"image_url", b"input_image", b"inlineData")))
        element = json.loads(raw)
        ours, billed = item_of(api, raw).tokens, APIS[api].weigh(element)
        assert ours >= billed
        if not {"x_vendor", "weight"} & element.keys():
            assert ours <= billed + APIS[api].slack(element)

    check()


def strip_texts(message: Element) -> Element:
    """The chat *message* without the texts that may be clipped."""
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
    """Return the parts of a call's arguments that must stay: all but the words."""

    def empty(value: object) -> object:
        if isinstance(value, dict):
            return {key: empty(member) for key, member in value.items()}
        if isinstance(value, list):
            return [empty(member) for member in value]
        return "" if isinstance(value, str) else value

    try:
        return empty(json.loads(arguments))
    except ValueError:
        return ""


def least(message: Element) -> int:
    """The weight of the chat *message* with every clippable text emptied."""
    made = strip_texts(message)
    for now, was in zip(functions_of(made), functions_of(message), strict=True):
        now["arguments"] = emptied(was["arguments"])
    return item_of("chat", raw_of(made)).tokens


def functions_of(message: Element) -> list[Element]:
    """The functions that the chat *message* calls, in order."""
    calls = [*(message.get("tool_calls") or ()), *([message] if "function_call" in message else [])]
    return [one.get("function") or one["function_call"] for one in calls]


def emptied(arguments: str) -> str:
    """The least that clipping leaves of a call's arguments: without words they stay, with members that are repeated."""
    left = shape(arguments)
    if left == "":
        return ""
    return arguments if left == json.loads(arguments) else json.dumps(left)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.slow
def test_clipping_keeps_everything_but_words(api: str) -> None:
    """A clipped element has its role, names, ids, media, thoughts and the shape of its arguments, and shorter texts."""

    @settings(max_examples=150 if api == "chat" else 80)
    @given(raws(api), st.integers(0, 400 if api == "chat" else 300))
    def check(raw: bytes, tokens: int) -> None:
        made = APIS[api].module.clipped(raw, shorten, count_tokens, tokens)
        was, now = json.loads(raw), json.loads(made.decode())
        if api == "chat":
            assert strip_texts(now) == strip_texts(was)
        else:
            assert is_clip(was, now)
        if was.get("type") == "reasoning":
            assert made == raw
        item, before = item_of(api, made), item_of(api, raw)
        assert (item.role, item.calls, item.answers) == (before.role, before.calls, before.answers)
        assert (item.media, item.sealed) == (before.media, before.sealed)

    check()


@settings(max_examples=150)
@given(elements("chat", surrogates=False), st.integers(0, 400))
@example({"role": "assistant", "tool_calls": [call("f", json.dumps({"a": "\n" * 900, "b": '"' * 900}))]}, 100)
@example({"role": "tool", "tool_call_id": "c", "content": "<|endoftext|>" * 400}, 60)
@example({"role": "assistant", "tool_calls": [call("f", '{"a":1,"a":2}'), call("f", '{"b":1,"b":2}')]}, 0)
@pytest.mark.slow
def test_clipping_reaches_what_can_be_reached(message: Element, tokens: int) -> None:
    """The result has at most the requested tokens, unless the parts that may not be clipped have more.

    What stands for a clipped text takes a token more than no text.
    """
    made = chat.clipped(raw_of(message), shorten, count_tokens, tokens)
    assert item_of("chat", made).tokens <= max(tokens, least(message) + 4 + made.count(b"[...]"))


@rows(lambda row: isinstance(row.gives, Tokens))
def test_what_is_long_becomes_short(row: Row) -> None:
    """Something was left out, short texts beside it stay whole, and arguments stay text or valid JSON."""
    made = clipped(300)(row.api, row.raw)
    assert made is not None
    assert b"left out" in made
    assert (b"short" in made) == (b"short" in row.raw)
    for one in json.loads(made).get("tool_calls", ()):
        function = one.get("function") or one["custom"]
        arguments = function.get("arguments", function.get("input"))
        assert arguments.startswith("word") or json.loads(arguments)


def test_arguments_stay_valid_where_characters_are_broken() -> None:
    """A lone surrogate that a call's arguments spell with an escape is spelled so afterwards too."""
    arguments = json.dumps({"a": LONG, "b": "\ud83d"})
    raw = raw_of({"role": "assistant", "tool_calls": [call("f", arguments)]})
    made = json.loads(chat.clipped(raw, shorten, count_tokens, 200))["tool_calls"][0]["function"]["arguments"]
    assert made.isascii()
    assert json.loads(made)["b"] == "\ud83d"


def test_the_longest_texts_are_clipped_first() -> None:
    """Of several texts the longest give way, down to a common level."""
    parts = [text("word " * size) for size in (10, 1_000, 3_000)]
    raw = raw_of({"role": "user", "content": parts})
    made = json.loads(chat.clipped(raw, shorten, count_tokens, 600))["content"]
    sizes = [count_tokens(part["text"]) for part in made]
    assert made[0] == parts[0]
    assert abs(sizes[1] - sizes[2]) < 60


@pytest.mark.parametrize("depth", [50, 200, 400, 600, 900, 2000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_messages_never_crash(depth: int, opening: str, closing: str) -> None:
    """A message nested deep is read or refused; arguments nested deep, which are text, as well."""
    deep = opening * depth + "1" + closing * depth
    inside = json.dumps({"role": "assistant", "tool_calls": [call("f", deep)]})
    for raw in (f'{{"role":"user","content":[{{"x":{deep}}}]}}', f'{{"role":"user","x":{deep}}}', inside):
        try:
            assert item_of("chat", raw.encode()).tokens > depth / 2
        except InvalidRequest:
            assert depth > 200


# Text that is added to what a client wrote.


def content_of(raw: bytes) -> str:
    """The bytes of the content as they stand, as text; ``null`` where there is none."""
    source = raw.decode()
    return next((source[f.start : f.end] for f in reversed(members(source)) if f.key == "content"), "null")


@settings(max_examples=150)
@given(raws("chat"), conversation_strategies.texts(long=False), st.booleans(), st.booleans())
@pytest.mark.slow
def test_added_text_leaves_the_content_in_one_run(raw: bytes, words: str, before: bool, pictures: bool) -> None:
    """The message's own content stays one unchanged run of bytes, and only the content member changes."""
    made = added(words, before=before, media=[PICTURE] if pictures else [])("chat", raw)
    assert made is not None
    was, now = json.loads(raw), json.loads(made.decode())
    assert {k: v for k, v in now.items() if k != "content"} == {k: v for k, v in was.items() if k != "content"}
    own = content_of(raw)
    inner = own.strip()[1:-1].strip() if own[0] in '["' else ""
    assert inner in content_of(made)
    shown = now["content"]
    said = [shown] if isinstance(shown, str) else [part["text"] for part in shown if "text" in part]
    assert words in (said[0] if before or len(said) == 1 else said[-1])
    assert ([part for part in now["content"] if part == PICTURE] != []) >= pictures
    if isinstance(was.get("content"), list):
        kept = now["content"][1 + pictures :] if before else now["content"][: -1 - pictures]
        assert kept == was["content"]


@settings(max_examples=80)
@given(raws("messages"), st.booleans(), st.booleans())
@pytest.mark.slow
def test_an_added_block_stands_beside_the_messages_own(raw: bytes, before: bool, marked: bool) -> None:
    """In Messages a block of ours stands before or after the message's own blocks, with a mark if it is given one."""
    mark = b'{"type":"ephemeral"}' if marked else b""
    made = added("BLOCK", before=before, media=[IMAGE], marker=mark)("messages", raw)
    assert made is not None
    was, now = json.loads(raw), json.loads(made)
    own = was["content"] if isinstance(was["content"], list) else [text(was["content"])]
    block = {**text("BLOCK"), **({"cache_control": {"type": "ephemeral"}} if marked else {})}
    assert now["content"] == ([block, IMAGE, *own] if before else [*own, block, IMAGE])
    assert {**now, "content": 0} == {**was, "content": 0}


CONTENTS = st.lists(st.text(min_size=1).map(lambda words: text(words, "input_text")), min_size=1)


@settings(max_examples=60)
@given(st.one_of(st.text(min_size=1), CONTENTS), st.booleans(), st.booleans())
def test_an_added_part_is_of_the_kind_users_send(own: Any, before: bool, pictures: bool) -> None:
    """In Responses a text of ours stands before or after the message's own, in a part of the kind users send."""
    raw = raw_of({"type": "message", "role": "user", "content": own})
    made = added("BLOCK", before=before, media=[INPUT_PICTURE] if pictures else [])("responses", raw)
    assert made is not None
    now = json.loads(made)["content"]
    if isinstance(own, str) and not pictures:
        assert now == ("BLOCK\n\n" + own if before else own + "\n\nBLOCK")
        return
    parts = [text(own, "input_text")] if isinstance(own, str) else own
    ours = [text("BLOCK", "input_text"), *([INPUT_PICTURE] if pictures else [])]
    assert now == ([*ours, *parts] if before else [*parts, *ours])


# What of reasoning may be shown to another model.


def test_nested_values() -> None:
    """Members are left out at any depth, sealed parts of any list too."""
    value = {"a": [{"b": 1, "signature": 2}, {"type": "thinking"}], "c": "x"}
    assert portable.unsealed(value) == {"a": [{"b": 1}], "c": "x"}
    assert portable.is_sealed({"type": "redacted_thinking"})
    assert not portable.is_sealed("thinking")


@rows(lambda row: row.api == "chat" and row.edit is made_portable and isinstance(row.gives, dict))
def test_a_mark_betrays_sealed_reasoning(row: Row) -> None:
    """Every item with sealed reasoning matches the hint that is searched for first."""
    assert portable.SEALED_HINT.search(row.raw)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("kind", [[], {}, ["text"], {"text": 1}, None, 5, True])
def test_a_type_that_is_no_text_is_read(api: str, kind: Any) -> None:
    """A part or an item whose type is any JSON at all costs its tokens, and never a fault."""
    part = {"type": kind, "text": "some words"}
    holders = [{"role": "user", key: [part]} for key in ("content", "parts", "output")]
    for holder in (*holders, {**part, "role": "assistant", "content": "some words"}, {"type": kind, "output": [part]}):
        raw = raw_of(holder)
        assert APIS[api].module.read_item(raw, count_tokens).tokens > 0
        APIS[api].module.read_item_text(raw)
        assert portable.PORTABLE[api](raw) is not None


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("number", ["1e400", "9" * 5000])
def test_an_edit_spells_numbers_as_they_came(api: str, number: str) -> None:
    """What Python cannot hold is no reason to send something else, or what is no JSON."""
    bare, module = number.encode(), APIS[api].module
    held = {"big": "@", "note": "words " * 200}
    raw = raw_of(
        {
            "chat": {"role": "assistant", "reasoning_details": [{"type": "reasoning.encrypted"}], "big": "@"},
            "messages": {"role": "assistant", "content": [{"type": "thinking"}, {"type": "tool_use", "input": held}]},
            "responses": {"type": "function_call", "call_id": "c", "id": "f", "name": "n", "arguments": "", "big": "@"},
            "gemini": {
                "role": "model",
                "parts": [{"functionCall": {"name": "n", "args": held}, "thoughtSignature": "x"}],
            },
        }[api]
    ).replace(b'"@"', bare)
    assert len(module.read_item(raw, count_tokens).digest) == 16
    sent = portable.PORTABLE[api](raw)
    assert sent != raw
    assert bare in sent
    assert b'"' + bare not in sent
