"""Texts that may be clipped are located at any depth and replaced without changing a byte beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.apis import chat, json_edit
from proxy.core.apis.json_edit import (
    MOST_PARTS,
    Path,
    Slot,
    argument_slots,
    cache_marks,
    clipped,
    common_cap,
    extended_list,
    leaves,
    locate,
    locate_slots,
    minified,
    to_json,
    with_fewer_parts,
    with_model,
    with_replaced_texts,
    without_members,
)
from proxy.core.apis.json_scan import Span
from proxy.core.apis.json_steps import decode, parse
from proxy.core.conversation import Count
from tests.support import conversation_strategies

values = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@st.composite
def written(draw: st.DrawFn) -> tuple[Any, str]:
    """A value and its JSON in any style."""
    value = draw(values)
    return value, conversation_strategies.encode(draw, value).decode()


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    """Return the value at *path*."""
    for key in path:
        value = value[key]
    return value


@settings(max_examples=150)
@given(written())
def test_every_text_is_located(case: tuple[Any, str]) -> None:
    """Each text of a value, and nothing else, is found at its path, and its span spells it."""
    value, source = case
    found = dict(leaves(value))
    assert all(at(value, path) == text for path, text in found.items())
    spans = dict(locate(source, list(found)))
    assert {path: json.loads(source[start:end]) for path, (start, end) in spans.items()} == found


@settings(max_examples=150)
@given(written(), st.text(max_size=6))
def test_replacing_touches_nothing_else(case: tuple[Any, str], text: str) -> None:
    """A replaced text is the new one; what stands before and behind it is the same bytes."""
    value, source = case
    for path, old in leaves(value):
        slot = Slot(path, old)
        made = with_replaced_texts(source, locate_slots(source, [slot]), {slot: text})
        assert at(json.loads(made), path) == text
        start, end = dict(locate(source, [path]))[path]
        assert made.startswith(source[:start])
        assert made.endswith(source[end:])


def test_arguments_are_json_before_and_after() -> None:
    """A text inside JSON inside a text is replaced there, and figures beside it keep their spelling."""
    source = json.dumps({"arguments": '{"path": "a", "deep": {"note": "b\\n"}, "n": 1.10}', "x": 1})
    slots = list(argument_slots(("arguments",), json.loads(source)["arguments"]))
    assert [(slot.inner, slot.text) for slot in slots] == [(("path",), "a"), (("deep", "note"), "b\n")]
    texts = {slot: f'"{slot.text}"' for slot in slots}
    made = json.loads(with_replaced_texts(source, locate_slots(source, slots), texts))["arguments"]
    assert json.loads(made) == {"path": '"a"', "deep": {"note": '"b\n"'}, "n": 1.1}
    assert "1.10" in made
    assert list(argument_slots(("a",), "{no json")) == [Slot(("a",), "{no json")]


def test_the_longest_are_clipped_to_the_requested_tokens() -> None:
    """Short texts stay, long ones come down to one level, and no more is taken than the target needs."""
    raw = json.dumps({"a": "x" * 10, "b": "y" * 300, "c": "z" * 200}).encode()
    made = clipped(
        raw,
        lambda text, tokens: text[:tokens],
        len,
        150,
        slots=lambda value: (Slot((key,), text) for key, text in value.items()),
        weigh=lambda raw, count: count(raw.decode()),
    )
    found = json.loads(made)
    assert found["a"] == "x" * 10
    assert len(found["b"]) == len(found["c"])
    assert 140 <= len(made) <= 150


def test_levels() -> None:
    """The cap is the largest that lets all sizes in."""
    assert common_cap([], 10) == 0
    assert common_cap([3, 5], 10) == 5
    assert common_cap([3, 50, 50], 43) == 20
    assert common_cap([9, 9], 0) == 0


@pytest.mark.parametrize(
    ("value", "before", "expected"),
    [
        ('"own"', True, '[{"type":"text","text":"new"},{"type":"text","text":"own"}]'),
        ("[ 1 ]", False, '[1,{"type":"text","text":"new"}]'),
        ("null", True, '[{"type":"text","text":"new"}]'),
        ('""', False, '[{"type":"text","text":"new"}]'),
    ],
)
def test_what_is_joined_stays_one_run(value: str, before: bool, expected: str) -> None:
    """A content becomes a list in which its own stands unchanged beside the added part."""
    assert extended_list(value, "new", "text", before, ()) == expected


def test_many_parts_become_one_text() -> None:
    """Of more parts than are clipped one by one neighbours are joined; marks, media and all bytes beside them stay."""
    many = [{"type": "text", "text": f"line {at}"} for at in range(MOST_PARTS)]
    marked = {"type": "text", "text": "marked", "cache_control": {"type": "ephemeral"}}
    picture = {"type": "image_url", "image_url": {"url": "data:,x"}}
    message = {"role": "user", "content": [*many, marked, *many, picture, many[0]], "name": "ann"}
    raw = json.dumps(message, indent=1).encode()
    made = json.loads(with_fewer_parts(raw))
    whole = {"type": "text", "text": "\n".join(part["text"] for part in many)}
    assert made == {**message, "content": [whole, marked, whole, picture, many[0]]}
    assert with_fewer_parts(raw).endswith(raw[raw.index(b'"name"') :])
    few = json.dumps({"role": "user", "content": many}).encode()
    assert with_fewer_parts(few) is few


def test_clipping_many_parts_costs_as_much_as_they_are() -> None:
    """Ten times the parts are counted no more often: what is clipped is one text."""
    asked = {}
    for size in (500, 5_000):
        parts = [{"type": "text", "text": "word"} for _ in range(size)]
        raw = json.dumps({"role": "user", "content": parts}).encode()
        counts: list[str] = []

        def count(text: str, counts: list[str] = counts) -> int:
            counts.append(text)
            return len(text)

        made = chat.clipped(raw, lambda text, tokens: text[:tokens], count, 300)
        assert len(json.loads(made)["content"]) == 1
        asked[size] = len(counts)
    assert asked[5_000] == asked[500] < 50


@pytest.mark.parametrize(
    ("body", "edited"),
    [
        (b'{"model":"fast","input":"fast"}', b'{"model":"own","input":"fast"}'),
        (b' {"input" : {"model":"fast"} , "model" : "fast" }\n', b' {"input" : {"model":"fast"} , "model" : "own" }\n'),
        ('{"input":"é","m\\u006fdel":"fast","ü":1.10}'.encode(), '{"input":"é","m\\u006fdel":"own","ü":1.10}'.encode()),
        (b'{"model":"a","model":"fast"}', b'{"model":"a","model":"own"}'),
    ],
)
def test_only_the_name_changes(body: bytes, edited: bytes) -> None:
    """The top-level member is exchanged, wherever it stands and however it is spelled."""
    assert with_model(body, "own") == edited


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input":1}', b"\xff", b"[" * 100_000])
def test_what_has_no_name_stays(body: bytes) -> None:
    """A body that is no object, or names no model, is passed as it is."""
    assert with_model(body, "own") is body


@given(values, st.sampled_from([0.5, 1e16, 1.10, float("nan"), float("inf"), None, 10**20, "\ud83d", "1.5", ":2.5"]))
def test_values_are_written_as_the_standard_library_writes_them(value: Any, odd: Any) -> None:
    """Fractions, what is no number and lone surrogates, too, wherever they stand."""
    for each in (value, odd, [value, odd], {"a": odd, "b": value}):
        ascii_only = any(text == "\ud83d" for _, text in leaves(each))
        assert to_json(each) == json.dumps(each, ensure_ascii=ascii_only, separators=(",", ":"))


def test_a_text_is_located_once_for_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping tries again if the JSON takes more than its texts; the places of these are known by then."""
    calls: list[int] = []

    def counted(source: str, paths: Sequence[Path]) -> Iterator[tuple[Path, Span]]:
        calls.append(len(paths))
        return locate(source, paths)

    monkeypatch.setattr(json_edit, "locate", counted)
    raw = json.dumps({"a": "x" * 1_000, "b": json.dumps({"c": "y" * 1_000})}).encode()
    weighed: list[int] = []

    def weigh(cut: bytes, count: Count) -> int:
        weighed.append(len(cut))
        return len(cut)

    def slots(value: dict[str, Any]) -> Iterator[Slot]:
        yield Slot(("a",), value["a"])
        yield from argument_slots(("b",), value["b"])

    def clip(text: str, tokens: int) -> str:
        return text[: tokens // 2] + "\n" * (tokens // 2)  # written as JSON, a line end takes more than it is long

    made = clipped(raw, clip, len, 400, slots=slots, weigh=weigh)
    assert len(weighed) > 2
    assert calls == [2, 1]
    assert len(json.loads(made)["a"]) < 200


@given(written())
def test_minified_json_parses_to_the_same_value(case: tuple[Any, str]) -> None:
    """However it is indented: the same value, never longer, and the same again."""
    value, text = case
    shorter = minified(text)
    assert json.loads(shorter) == value
    assert len(shorter) <= len(text)
    assert minified(shorter) == shorter


@pytest.mark.parametrize(
    ("text", "shorter"),
    [
        ('{\n  "a": [1.0, 1e400, 12345678901234567890123]\n}\n', '{"a":[1.0,1e400,12345678901234567890123]}'),
        ('[ "a  b", "\\u00e9\\n" , "" ]', '["a  b","\\u00e9\\n",""]'),
        ('{"a": 1, "a": 2}', '{"a":1,"a":2}'),
        ("{ not json }", "{ not json }"),
        ('{"a": 1} trailing', '{"a": 1} trailing'),
        ("plain  text", "plain  text"),
        ('"a  b"', '"a  b"'),
        ('{"a":  "\ud800"}', '{"a":  "\ud800"}'),
        ("[ " * 5_000, "[ " * 5_000),
    ],
)
def test_what_minified_json_keeps(text: str, shorter: str) -> None:
    """Numbers and strings as they are spelled, keys that come twice, and every text that is no JSON."""
    assert minified(text) == shorter


@pytest.mark.parametrize("number", ["1e400", "-1.5E+999", "9" * 5000, "-" + "8" * 4301])
@pytest.mark.parametrize("other", [1, 0.5, "1e400", "\ud83d", None])
def test_a_number_that_python_does_not_hold_is_spelled_as_it_came(number: str, other: Any) -> None:
    """JSON has larger numbers than Python; a text of the same characters stays a text."""
    text = json.dumps({"a": [other, {"b": "@"}], "@": "@"}, separators=(",", ":")).replace('"@"', number, 1)
    assert to_json(decode(text.encode())) == text
    assert to_json(parse(text)) == text
    assert to_json(decode(number.encode())) == number
    assert to_json(decode(json.dumps(number).encode())) == f'"{number}"'


MARK = {"cache_control": {"type": "ephemeral"}}
TEXT = {"type": "text", "text": '"cache_control":{"type":"ephemeral"}'}
CALL = {"type": "tool_use", "input": {"cache_control": {"max-age": 5}}, "name": '"cache_control"'}
marked_members = st.sampled_from(
    [TEXT, {**TEXT, **MARK}, {**MARK, **TEXT}, {"type": "text", **MARK, "text": "x"}, MARK]
)


@settings(max_examples=150)
@given(st.data(), marked_members, marked_members, marked_members)
def test_cache_marks_are_removed_and_nothing_else(data: st.DataObject, outer: Any, part: Any, inner: Any) -> None:
    """Marks of a message, its parts and their parts go; what only looks like one stays."""
    message = {**outer, "role": "user", "content": [part, CALL, {**part, "content": [inner, TEXT]}]}
    raw = conversation_strategies.encode(data.draw, message)
    marks = cache_marks(raw)
    assert len(marks) == sum("cache_control" in each for each in (outer, part, part, inner))
    bare = without_members(raw, [path for path, _ in marks])
    assert json.loads(bare) == bare_of(message)
    assert cache_marks(bare) == []


def bare_of(value: Any) -> Any:
    """Return a message or a part of it without marks, in its content too."""
    if isinstance(value, list):
        return [bare_of(each) for each in value]
    if not isinstance(value, dict):
        return value
    rest = {key: member for key, member in value.items() if key != "cache_control"}
    if "content" in rest:
        rest["content"] = bare_of(rest["content"])
    return rest
