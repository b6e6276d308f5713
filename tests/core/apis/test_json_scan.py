"""The spans of items in a body: exactly the client's bytes, for any spelling of the body."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from proxy.core.apis.json_scan import (
    Scan,
    elements,
    extend,
    members,
    reject_duplicates,
    scan,
)
from proxy.core.apis.json_steps import decode
from proxy.core.errors import InvalidRequest, TooManyItems
from tests.support import conversation_strategies

SPACE = " \t\n\r"


def oracle(body: bytes, key: str) -> Scan:
    """The same by a walk with the standard decoder, character by character; raises ``ValueError`` where it cannot."""
    text = body.decode()
    decoder = json.JSONDecoder()

    def skip(at: int, marks: str = "") -> int:
        while text[at] in SPACE or text[at] in marks:
            at += 1
        return at

    def in_bytes(at: int) -> int:
        return len(text[:at].encode())

    json.loads(text)
    at = skip(skip(0) + 1)
    while text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        at = skip(at, ":")
        if name == key:
            spans, inner = [], skip(at + 1)
            while text[inner] != "]":
                _, end = decoder.raw_decode(text, inner)
                spans.append((in_bytes(inner), in_bytes(end)))
                inner = skip(end, ",")
            return Scan(in_bytes(at + 1), in_bytes(inner), tuple(spans))
        at = skip(decoder.raw_decode(text, at)[1], ",")
    raise ValueError(key)


def shown(found: Scan, body: bytes) -> tuple[list[bytes], object]:
    """The slices of *found*, and what surrounds the list, apart from white space at its edges."""
    return [body[start:end] for start, end in found.spans], json.loads(found.without_items(body))


def same(body: bytes, key: str = "messages") -> None:
    """*body* scans as the oracle has it, and its outline is JSON with an empty list."""
    found, expected = scan(body, key), oracle(body, key)
    assert found.spans == expected.spans
    assert shown(found, body) == shown(expected, body)
    assert json.loads(found.without_items(body))[key] == []


def spelled(name: str, escaped: list[bool]) -> str:
    """*name* as a JSON string with the letters marked in *escaped* written as escapes."""
    letters = (f"\\u{ord(c):04x}" if e else c for c, e in zip(name, escaped, strict=False))
    return '"' + "".join(letters) + name[len(escaped) :] + '"'


RAW = [
    "1", "1.5e-3", "NaN", "-Infinity", "1e999", "null", "true", "{}", "[]", '""', '"messages"', '"\\"messages\\":["',
    '"\\ud83d"', '"\\u005b]}{,"', '"é日本👩🏽‍💻"', '{"messages":[1,2]}', '{"messages" : [ 1 , 2 ] }', '{"input":[3]}',
    '{"\\u006dessages":[1,2]}', '[[1,2],[1,2]]', '{"a":1,"a":2}', "9" * 40, '{"model":"m","model":"n"}',
]  # fmt: skip
values = st.one_of(
    st.sampled_from(RAW),
    st.sampled_from(RAW),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["messages", "m", "é"]), inner),
        max_leaves=5,
    ).map(json.dumps),
)
spaces = st.text(SPACE, max_size=3)


@st.composite
def awkward(draw: st.DrawFn, key: str = "messages") -> bytes:
    """The bytes of an object with one list under *key*, and much around it that looks like it."""
    gap = draw(spaces)

    def spread(pieces: list[str]) -> str:
        return gap + f"{gap},{draw(spaces)}".join(pieces) + gap

    fields = [
        (name, draw(values)) for name in draw(st.lists(st.sampled_from(["x", "messagesx", "é", "n"]), max_size=3))
    ]
    fields.insert(draw(st.integers(0, len(fields))), (key, "[" + spread(draw(st.lists(values, max_size=4))) + "]"))
    written = [
        f"{spelled(name, draw(st.lists(st.booleans(), max_size=2)))}{gap}:{draw(spaces)}{text}" for name, text in fields
    ]
    return (draw(spaces) + "{" + spread(written) + "}" + draw(spaces)).encode()


@settings(max_examples=60)
@given(conversation_strategies.bodies(with_orphans=True))
@pytest.mark.slow
def test_requests_are_cut_into_the_clients_slices(body: bytes) -> None:
    """Of any request, in any style, the spans are the items as the client wrote them."""
    same(body)


@settings(max_examples=300)
@given(awkward())
@example(b'{"x":{"messages":[1,2]},"\\u006dessages":[1,2]}')
@example(b'{"\\u006dessages":[1],"x":"\\u006dessages"}')
@example('{"x":"é日本👩🏽‍💻","messages":[1e999,"é",[NaN]],"y":"é"}'.encode())
@pytest.mark.slow
def test_look_alikes_do_not_mislead(body: bytes) -> None:
    """Nested lists of that name, escaped keys, values only the standard parser accepts: the spans stay exact."""
    same(body)


@given(awkward(key="input"))
def test_other_lists_scan_alike(body: bytes) -> None:
    """The list may have another name."""
    same(body, "input")


def growing_bodies(messages: list[Any], keep: int, extra: dict[str, Any], style: st.DataObject) -> tuple[bytes, bytes]:
    """A body with all of *messages*, and one with only the first *keep* that begins with the same bytes."""
    space, ascii_only = style.draw(st.sampled_from(["", " ", "\n "])), style.draw(st.booleans())
    texts = [conversation_strategies._write(message, space, ascii_only, False) for message in messages]
    head, tail = '{"model":"m","messages":[', "]" + "".join(f',"{k}":{json.dumps(v)}' for k, v in extra.items()) + "}"
    separator = f"{space},{space}"
    return tuple((head + separator.join(t) + tail).encode() for t in (texts[:keep], texts))  # type: ignore[return-value]


@settings(max_examples=80)
@given(conversation_strategies.conversations(surrogates=False), st.data())
@pytest.mark.slow
def test_a_longer_conversation_extends_the_shorter(messages: list[Any], data: st.DataObject) -> None:
    """Continuing from the scan of a prefix finds the spans that scanning all of the body finds."""
    keep = data.draw(st.integers(1, len(messages)))
    extra = data.draw(st.sampled_from([{}, {"tools": [{"messages": [1]}]}, {"tools": ["\u0041é"]}]))
    before, after = growing_bodies(messages, keep, extra, data)
    found = extend(after, "messages", scan(before, "messages"))
    assert found is not None
    assert found.spans == scan(after, "messages").spans
    assert shown(found, after) == shown(scan(after, "messages"), after)


@settings(max_examples=300)
@given(awkward(), st.data())
@pytest.mark.slow
def test_whatever_follows_a_known_prefix(body: bytes, data: st.DataObject) -> None:
    """Extending the scan of a known beginning is right for any continuation, or is refused."""
    known = scan(body, "messages")
    assume(known.spans)
    keep = data.draw(st.integers(1, len(known.spans)))
    known = Scan(known.start, known.end, known.spans[:keep])
    border = known.spans[-1][1]
    rest = data.draw(
        st.one_of(
            st.just(body[border:]),
            st.sampled_from([b"", b"]", b"]}", b",]}", b" , 5 ]}", b"}", b"2]}", b"]}x", b',7],"messages":[1,7]}']),
            st.builds(lambda at, junk: body[border:][:at] + junk, st.integers(0, 40), st.binary(max_size=6)),
            values.map(lambda value: f",{value}],".encode() + rb'"\u006dessages":' + f"[1,{value}]}}".encode()),
        )
    )
    longer = body[:border] + rest
    found = extend(longer, "messages", known)
    try:
        expected = scan(longer, "messages")
    except InvalidRequest:
        assert found is None
    else:
        assert found is None or (found.start, found.spans) == (expected.start, expected.spans)
        assert found is None or shown(found, longer) == shown(expected, longer)


def test_nothing_extends_an_empty_list() -> None:
    """A body without items gives nothing to continue from."""
    assert extend(b'{"messages":[1]}', "messages", scan(b'{"messages":[]}', "messages")) is None


@settings(max_examples=100)
@given(st.lists(st.booleans(), max_size=8), st.lists(st.booleans(), max_size=8), values, values, st.booleans())
@pytest.mark.slow
def test_a_list_given_twice_is_refused(
    first: list[bool], second: list[bool], left: str, right: str, between: bool
) -> None:
    """Two lists of the same name are refused in every spelling, also where both hold the same."""
    middle = ',"x":{"messages":[1]}' if between else ""
    body = f"{{{spelled('messages', first)}:[{left}]{middle},{spelled('messages', second)}:[{right}]}}".encode()
    with pytest.raises(InvalidRequest, match="more than once"):
        scan(body, "messages")


@pytest.mark.parametrize("name", ["model", "messages", "input"])
@pytest.mark.parametrize("second", ["{}", "\\u00{:x}{}"])
def test_members_that_decide_must_not_occur_twice(name: str, second: str) -> None:
    """A second model, messages or input is refused, written plainly or with escapes."""
    again = second.format(ord(name[0]), name[1:]) if "u" in second else name
    with pytest.raises(InvalidRequest, match=f"'{name}' more than once"):
        reject_duplicates(members(f'{{"{name}":1,"x":2,"{again}":1}}'))
    reject_duplicates(members(f'{{"{name}":1,"x":{{"{name}":1}},"x":3}}'))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"   ", "not valid JSON"),
        (b"[]", "not valid JSON"),
        (b'"messages"', "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"messages"', "not valid JSON"),
        (b'{"messages":', "not valid JSON"),
        (b'{"messages":[', "not valid JSON"),
        (b'{"messages":[1', "not valid JSON"),
        (b'{"messages":[1,', "not valid JSON"),
        (b'{"messages":[1,]}', "not valid JSON"),
        (b'{"messages":[1 2]}', "not valid JSON"),
        (b'{"messages":[1]', "not valid JSON"),
        (b'{"messages":[1],}', "not valid JSON"),
        (b'{"messages":[1] "x":1}', "not valid JSON"),
        (b'{"messages":[1]}}', "not valid JSON"),
        (b'{"messages":[1]} {}', "not valid JSON"),
        (b"{messages:[1]}", "not valid JSON"),
        (b'{"messages" [1]}', "not valid JSON"),
        (b'{"messages"\x0b:[1]}', "not valid JSON"),
        (b'\xef\xbb\xbf{"messages":[1]}', "not valid JSON"),
        (b'{"messages":["\n"]}', "not valid JSON"),
        ('{"messages":[1]}'.encode("utf-16"), "not valid UTF-8"),
        (b"{}", "no 'messages'"),
        (b'{"x":{"messages":[1]}}', "no 'messages'"),
        (b'{"messages":null}', "must be a list"),
        (b'{"messages":{}}', "must be a list"),
        (b'{"messages":"[1]"}', "must be a list"),
    ],
)
def test_what_is_no_request_is_refused(body: bytes, words: str) -> None:
    """A body that is no JSON object with a list of items is the client's mistake, and named as such."""
    with pytest.raises(InvalidRequest, match=words):
        scan(body, "messages")


@settings(max_examples=200)
@given(st.binary(max_size=60) | st.text('{}[]",:\\ messages01', max_size=40).map(str.encode))
def test_any_bytes_are_scanned_or_refused(body: bytes) -> None:
    """Any bytes are a request or an InvalidRequest, and nothing else."""
    try:
        found = scan(body, "messages")
    except InvalidRequest:
        return
    assert json.loads(found.without_items(body))["messages"] == []


@pytest.mark.parametrize("depth", [100, 500, 990, 1100, 5000, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_values_never_crash(depth: int, opening: str, closing: str) -> None:
    """Nesting, in the list or beside it, is scanned or refused; moderate depth is scanned."""
    deep = opening * depth + "1" + closing * depth
    for body in (f'{{"messages":[{deep}]}}', f'{{"tools":{deep},"messages":[1]}}', f'{{"messages":{deep}}}', deep):
        try:
            found = scan(body.encode(), "messages")
        except InvalidRequest:
            assert depth > 500 or body.startswith(('{"messages":{', '{"messages":[[', deep))
        else:
            assert depth < 200_000
            assert all(body.encode()[start:end] for start, end in found.spans)
    longer = f'{{"messages":[1,{deep}]}}'.encode()
    known = scan(b'{"messages":[1]}', "messages")
    extended = extend(longer, "messages", known)
    assert extended is None or len(extended.spans) == 2


def test_moderately_deep_items_are_found() -> None:
    """An item nested five hundred deep is an item."""
    body = b'{"messages":[' + b"[" * 500 + b"]" * 500 + b"]}"
    assert scan(body, "messages").spans == ((13, 1013),)


def test_a_number_of_too_many_digits_to_read_is_no_mistake() -> None:
    """JSON has no longest number: it is left to whom it is meant for, however the body is read."""
    longest = b"9" * 5000
    assert decode(b'{"n": %b}' % longest) == {"n": longest.decode()}
    body = b'{"seed": %b, "messages": [{"n": %b}], "\\u006d": 1}' % (longest, longest)
    assert [field.key for field in members(body.decode())] == ["seed", "messages", "m"]
    assert len(scan(body, "messages").spans) == 1


@pytest.mark.parametrize("text", ["", "[", "1", "[1", "[1,]", "[,1]", "[1 2]", "[1,", '["'])
def test_what_is_no_array_has_no_elements(text: str) -> None:
    """Only a whole JSON array has elements."""
    with pytest.raises(ValueError):
        elements(text, 0)


def test_elements_and_members_are_spans() -> None:
    """Elements and members are given by where their values stand, keys decoded, duplicates included."""
    text = ' [ 1 , "a" ,[2]] '
    spans, close = elements(text, 1)
    assert [text[start:end] for start, end in spans] == ["1", '"a"', "[2]"]
    assert text[close] == "]"
    text = '{"a":1, "\\u0061" : [ ] , "b":"}"}'
    found = members(text)
    assert [(f.key, text[f.start : f.end]) for f in found] == [("a", "1"), ("a", "[ ]"), ("b", '"}"')]
    assert members(" { } ") == []


@pytest.mark.parametrize("item", [b"{}", b"1", b'{"role":"user","content":"a, b"}', b"[1,2]"])
@pytest.mark.parametrize("key", ["messages", "input"])
def test_more_items_than_allowed_are_refused(item: bytes, key: str) -> None:
    """As many as allowed are found, one more is refused with the setting's name, whichever scanner reads it."""
    for head in (b'{"model":"m","%b":[', b'{"x":NaN,"%b":['):
        for count in (50, 51, 5_000):
            body = head % key.encode() + b",".join([item] * count) + b"]}"
            if count == 50:
                assert len(scan(body, key, 50).spans) == 50
                continue
            with pytest.raises(TooManyItems, match=r"more than 50 .*server\.limits\.items"):
                scan(body, key, 50)


def test_a_bomb_of_items_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of a million items is refused before any parser sees it."""
    monkeypatch.setattr(msgspec.json, "decode", None)
    monkeypatch.setattr("proxy.core.apis.json_scan.members", None)
    with pytest.raises(TooManyItems):
        scan(b'{"messages":[' + b"{}," * 1_000_000 + b"{}]}", "messages", 20_000)


def test_commas_elsewhere_are_no_items() -> None:
    """Commas in texts, in parts of one item and in other lists do not count as items."""
    part = b'{"type":"text","text":"a,b,c,\\"],[,"}'
    one = b'{"role":"user","content":[' + b",".join([part] * 500) + b"]}"
    body = b'{"messages":[' + one + b'],"tools":[1,2],"metadata":{' + b'"a":[1,2,3],' * 100 + b'"b":1}}'
    assert len(scan(body, "messages", 10).spans) == 1


@given(st.lists(st.tuples(st.sampled_from(["{}", '{"a":1}', '" {}"', "[ ]"]), spaces, spaces), max_size=8))
def test_gaps_between_items_may_differ(items: list[tuple[str, str, str]]) -> None:
    """Each item is found where it stands, whatever stood between the two before it."""
    text = ",".join(before + item + after for item, before, after in items)
    body = f'{{"messages":[{text}]}}'.encode()
    assert [body[start:end].decode() for start, end in scan(body, "messages").spans] == [item for item, _, _ in items]


def test_a_longer_conversation_is_counted_as_a_whole() -> None:
    """Known items count too: a continuation may not exceed the limit either."""
    first = b'{"messages":[' + b",".join([b"{}"] * 40) + b"]}"
    longer = b'{"messages":[' + b",".join([b"{}"] * 60) + b"]}"
    known = scan(first, "messages", 50)
    assert extend(longer, "messages", known, 50) is None
    grown = extend(longer, "messages", known, 60)
    assert grown is not None
    assert len(grown.spans) == 60


def test_a_long_list_beside_the_items_stands_where_it_stands() -> None:
    """Members behind a list that is parsed element by element are found all the same, and faults in it too."""
    tools = json.dumps([{"name": f"t{at}", "note": "[x]"} for at in range(5_000)], indent=1)
    text = '{"a":1, "tools" : ' + tools + ' , "model":"m"}'
    found = {field.key: text[field.start : field.end] for field in members(text)}
    assert found == {"a": "1", "tools": tools, "model": '"m"'}
    with pytest.raises(ValueError):
        members(text.replace('"t4000"', "t4000"))
