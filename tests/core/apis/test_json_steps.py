"""Large values are written in calls of bounded size, and the text is what one call makes of them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.apis import json_steps
from proxy.core.apis.json_steps import (
    MOST,
    ONE_CALL,
    Digits,
    decode,
    dismantle,
    encode_in_steps,
    is_large,
    is_small,
    parse,
    parse_each,
    read_fraction,
    read_integer,
    runs,
)
from proxy.core.errors import InvalidRequest

SORTED = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
PLAIN = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner), max_leaves=60)


def parses_as_json_does(text: str) -> None:
    """``parse`` gives the standard parser's value of *text*, or digits if it is too large, or fails as it does."""
    try:
        expected = repr(json.loads(text, parse_int=read_integer, parse_float=read_fraction))
    except ValueError:
        with pytest.raises(ValueError):
            parse(text)
    else:
        assert repr(parse(text)) == expected


@given(VALUES, st.integers(1, 12), st.booleans())
@pytest.mark.slow
def test_what_has_many_values_is_large(value: Any, most: int, spaced: bool) -> None:
    """Bytes that are not large hold no value that is encoded or freed in steps; small bodies are never counted."""
    raw = json.dumps(value, separators=(", ", ": ") if spaced else (",", ":")).encode()
    assert not is_large(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_steps, "MOST", most)
        patch.setattr(json_steps, "MOST_AT_ONCE", most)
        patch.setattr(json_steps, "ONE_CALL", 0)
        assert is_large(raw) or not json_steps._large(value)


@given(VALUES, st.integers(1, 12), st.integers(1, 4))
@pytest.mark.slow
def test_the_text_is_that_of_one_call(value: Any, most: int, batch: int) -> None:
    """With any batch size, the text is the encoder's own, sorted or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_steps, "MOST", most)
        patch.setattr(json_steps, "_BATCH", batch)
        assert encode_in_steps(value, PLAIN.encode) == PLAIN.encode(value)
        assert encode_in_steps(value, SORTED.encode, ordered=True) == SORTED.encode(value)
        text = encode_in_steps(
            value, lambda part: msgspec.json.encode(part, order="deterministic").decode(), ordered=True
        )
        assert text == msgspec.json.encode(value, order="deterministic").decode()


def chain(levels: int, end: Any) -> Any:
    """*end* under so many objects."""
    for _ in range(levels):
        end = {"a": end, "b": 1}
    return end


@pytest.mark.parametrize(
    "value",
    [
        {"all": [chain(100, "end") for _ in range(500)]},
        [1] * 100_000,
        [[] for _ in range(100_000)],
        {f"k{at}": {} for at in range(50_000)},
        chain(200, [{"a": "b"} for _ in range(30_000)]),
        chain(200, [chain(20, 1) for _ in range(2_000)]),
    ],
    ids=["deep", "figures", "lists", "members", "chain", "chains"],
)
def test_no_call_writes_much_and_few_are_made(value: Any) -> None:
    """Each call gets at most so many values, and there are not many more calls than that takes."""
    sizes: list[int] = []

    def encode(part: Any) -> str:
        sizes.append(nodes(part))
        return PLAIN.encode(part)

    assert encode_in_steps(value, encode) == PLAIN.encode(value)
    assert max(sizes) <= 2 * MOST
    assert len(sizes) < nodes(value) / 10 + 10_000


def nodes(value: Any) -> int:
    """Return the number of values in *value*."""
    count, stack = 0, [value]
    while stack:
        node = stack.pop()
        count += 1
        stack.extend(node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
    return count


@given(VALUES)
@pytest.mark.slow
def test_what_is_inside_a_value_is_counted(value: Any) -> None:
    """As many values are inside as a walk visits, if texts count as one each."""
    inside = nodes(value) - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_steps, "_TEXT", 1_000)
        assert is_small(value, inside)
        assert not is_small(value, inside - 1)


def test_characters_of_texts_count_too() -> None:
    """A few long texts take as long as many values."""
    assert is_small(["x" * 1_000] * 4, 4 + 4 * 1_000 // 16)
    assert not is_small(["x" * 1_000] * 4, 3 + 4 * 1_000 // 16)


@given(VALUES)
@pytest.mark.slow
def test_small_values_are_left_alone(value: Any) -> None:
    """A value that is freed quickly is not dismantled."""
    before = PLAIN.encode(value)
    dismantle(value)
    assert PLAIN.encode(value) == before


@pytest.mark.parametrize("levels", [0, 100])
def test_large_values_are_taken_apart(levels: int) -> None:
    """The long lists in a large value are emptied, wherever they stand."""
    lists = [[{"a": at} for at in range(MOST // 4)] for _ in range(3)]
    value = chain(levels, {"all": lists[0], "more": [lists[1], lists[2]]})
    dismantle(value)
    assert not value
    assert not lists[0]
    assert levels or not any(lists)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'"\\ud83d"', "\ud83d"),
        (b'"\\ud83d\\ude00"', "😀"),
        (b"[Infinity, 1e308]", [float("inf"), 1e308]),
        (b"9" * 40, int("9" * 40)),
        (b' {"a":1,"a":2} ', {"a": 2}),
    ],
)
def test_values_are_those_of_the_standard_parser(raw: bytes, value: object) -> None:
    """Values are equal to those of the standard parser."""
    assert decode(raw) == value


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'"\xed\xa0\x80"', b"[" * 100_000, b"1 2", b"nul"])
def test_what_is_no_json_cannot_be_decoded(raw: bytes) -> None:
    """No JSON, bad UTF-8 or too deep: the client's mistake."""
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        decode(raw)


@settings(max_examples=100, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_what_is_parsed_in_steps_is_the_same(data: st.DataObject) -> None:
    """A large value is the same whether it is parsed at once or step by step."""
    inner = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8),
        lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=3), each, max_size=4),
        max_leaves=30,
    )  # fmt: skip
    value = data.draw(inner)
    whole = {"a": [value] * 2, "b": {"c": "x" * ONE_CALL, "d": [[value], value, "y" * ONE_CALL]}, "a2": value}
    raw = json.dumps(whole).encode()
    assert len(raw) > ONE_CALL
    assert decode(raw) == json.loads(raw) == whole
    for spoilt in (raw[:-1], raw.replace(b'"c"', b'"c', 1), raw + b"]"):
        with pytest.raises(InvalidRequest):
            decode(spoilt)


@settings(max_examples=200)
@given(VALUES, st.integers(4, 60), st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", ":")]), st.data())
@pytest.mark.slow
def test_in_pieces_of_any_size_a_value_is_the_same(
    value: Any, size: int, separators: tuple[str, str], data: st.DataObject
) -> None:
    """However a list or an object is parted, its value is that of the standard parser; and so are its errors."""
    text = json.dumps(value, separators=separators)
    at = data.draw(st.integers(0, len(text)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_steps, "ONE_CALL", size)
        assert repr(parse(text)) == repr(json.loads(text))
        for spoilt in (text[:at] + text[at + 1 :], text[:at] + data.draw(st.sampled_from(',]}["')) + text[at:]):
            parses_as_json_does(spoilt)


@pytest.mark.parametrize(
    "text",
    [
        '{"0long": [], "00": {"0": null}, ,"1": null}',
        '[[1, 2], "long", , "text"]',
        '[ , "long", "text"]',
        '["long", "text", ]',
        "[      ]",
        '{"long": 1}',
    ],
)
def test_two_commas_in_a_row_are_no_json(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a blank between them they were taken for the borders of an empty list or object."""
    for size in range(4, len(text)):
        monkeypatch.setattr(json_steps, "ONE_CALL", size)
        parses_as_json_does(text)


@pytest.mark.parametrize(
    "value",
    [
        {f"key{at}": at for at in range(60_000)},
        {f"key{at}": "a, b" for at in range(60_000)},
        [1] * 400_000,
        [{"a": at, "b": [1, {"c": "}, {"}]} for at in range(30_000)],
        [["x" * 200_000, "y"], *[[]] * 200_000],
    ],
    ids=["members", "texts", "figures", "objects", "behind a long text"],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.slow
def test_no_call_reads_many_members(value: Any, separators: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are read some thousands at a time, however many an object or a list has: each becomes an object."""
    most, read_json = 0, msgspec.json.decode

    def watched(raw: Any, **options: Any) -> Any:
        nonlocal most
        read = read_json(raw, **options)
        if isinstance(read, list | dict):
            most = max(most, len(read))
        return read

    text = json.dumps(value, separators=separators)
    monkeypatch.setattr(json_steps.msgspec, "json", SimpleNamespace(decode=watched))
    read = parse(text)
    monkeypatch.undo()
    assert read == value
    assert 1_000 < most <= 2 * ONE_CALL


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "[" * 40 + "]" * 40, '{"a":1,"a":[2]}', "}"])
def test_long_texts_are_parsed_as_the_standard_parser_does(value: str) -> None:
    """In steps or in one call: the same value, or the same error."""
    for text in (value, f'{{"long":"{"x" * ONE_CALL}","b":[{value}]}}'):
        parses_as_json_does(text)


@pytest.mark.parametrize("number", ["1e400", "1" * 5000])
def test_numbers_that_python_does_not_hold_are_their_digits(number: str) -> None:
    """In steps or in one call, as a text that knows that it is none."""
    for text in (f"[{number}]", f'["{"x" * ONE_CALL}",{number}]'):
        last = parse(text)[-1]
        assert (last, type(last)) == (number, Digits)


@pytest.mark.parametrize(
    ("sizes", "lengths"), [([], []), ([1], [1]), ([30_000] * 5, [2, 2, 1]), ([9, 70_000, 70_000, 9, 9], [1, 1, 1, 2])]
)
def test_a_run_has_as_many_members_as_one_call_reads(sizes: list[int], lengths: list[int]) -> None:
    """All members are in one run, in order; one that is larger by itself is alone."""
    found = [sizes[run] for run in runs(sizes)]
    assert [len(run) for run in found] == lengths
    assert [size for members in found for size in members] == sizes


def test_texts_are_parsed_each() -> None:
    """A text that is no JSON has no value; the others have theirs."""
    assert parse_each(['{"a":1}', "a", "", "[2]", "[" * 100_000]) == [{"a": 1}, None, None, [2], None]
