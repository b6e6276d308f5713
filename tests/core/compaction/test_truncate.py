"""Cutting short: tool results, single texts, and the definitions of tools."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.compaction.truncate import (
    LEVELS,
    MARKER,
    MIDDLE,
    OMITTED,
    REST,
    SHORT_MARKER,
    Spared,
    TruncateLimits,
    clip,
    clip_levels,
    fair_level,
    is_over,
    line_count,
    shrink_tools,
    truncate,
    truncate_to,
)
from tests.support.conversation_strategies import texts
from tests.support.engine_fixtures import count_tokens
from tests.support.sample_conversations import log, prose, tool

LINES = "".join(f"line {n}\n" for n in range(1, 3001))


def kept(text: str, shown: str) -> tuple[str, str]:
    """The parts before and after the marker, both as they are in *text*."""
    marker = MIDDLE if MIDDLE in shown else REST
    head, _, tail = shown.partition(marker)
    head, tail = head.removesuffix("\n"), tail.removeprefix("\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) < len(text)
    return head, tail


@pytest.mark.parametrize("tail", [True, False])
def test_at_the_limit_nothing_happens(tail: bool) -> None:
    """Exactly so many lines or bytes stay as they are, with and without a final line end; one more does not."""
    exact = "x\n" * 2000
    assert truncate(exact, 2000, 50_000, tail=tail) is exact
    assert truncate(exact[:-1], 2000, 50_000, tail=tail) == exact[:-1]
    assert truncate(exact + "y", 2000, 50_000, tail=tail) != exact + "y"
    assert truncate("x" * 50_000, 2000, 50_000, tail=tail) == "x" * 50_000
    assert truncate("x" * 50_001, 2000, 50_000, tail=tail) != "x" * 50_001


def test_commands_keep_both_ends_and_reads_their_head() -> None:
    """Lines before and after the marker are whole, and as many as the limit says with the marker's own."""
    head, tail = kept(LINES, truncate(LINES, 100, 50_000, tail=True))
    assert (line_count(head), line_count(tail)) == (50, 49)
    assert tail.endswith("line 3000\n")
    head, tail = kept(LINES, truncate(LINES, 100, 50_000, tail=False))
    assert (line_count(head), tail) == (99, "")


def test_one_giant_line_is_cut_inside() -> None:
    """A line of a megabyte keeps both its ends."""
    giant = "".join(chr(97 + n % 26) for n in range(1_000_000))
    head, tail = kept(giant, truncate(giant, 2000, 50_000, tail=True))
    assert 40_000 < len(head) + len(tail) <= 50_000


@given(
    st.text(alphabet="aé漢👩\n ", max_size=400),
    st.integers(1, 12),
    st.integers(1, 300),
    st.booleans(),
)
def test_whatever_the_text_the_limits_hold(text: str, lines: int, size: int, tail: bool) -> None:
    """Never over a limit but for the marker alone, never half a character, and the same when done again."""
    shown = truncate(text, lines, size, tail=tail)
    if not is_over(text, lines, size):
        assert shown == text
    elif shown in (MIDDLE, REST):
        assert lines < 3 or size < len(shown) + 16
    else:
        assert not is_over(shown, lines, size)
        kept(text, shown)
        assert truncate(shown, lines, size, tail=tail) == shown


@given(st.integers(40, 400), st.sampled_from([LINES, "word " * 4000, "漢字" * 4000]))
def test_tokens_are_a_limit_too(tokens: int, text: str) -> None:
    """The result takes at most so many tokens."""
    assert count_tokens(truncate_to(text, TruncateLimits(), tokens, count_tokens, tail=True)) <= tokens


def test_a_text_of_which_only_the_marker_is_left_is_cut_no_further() -> None:
    """Thousands of short results with no room for any of them cost two counts each."""
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return count_tokens(text)

    assert truncate_to("1\tdone, all of it", TruncateLimits(max_bytes=10), 1, count, tail=True) == MIDDLE
    assert len(counted) <= 2


def test_markers_say_nothing_that_could_be_quoted_as_a_fact() -> None:
    """No long number, nothing like a path."""
    assert not re.search(r"\d{3}|[/\\]", MIDDLE + REST)


SIZES = st.dictionaries(st.integers(0, 9), st.integers(1, 5_000), min_size=1)


@given(SIZES, st.integers(0, 20_000))
def test_a_level_is_the_largest_that_fits(sizes: dict[int, int], room: int) -> None:
    """Cut to the level all of them fit the room, if their floors do; one token more would not."""
    floors = {i: min(size, 48) for i, size in sizes.items()}
    level = fair_level(sizes, floors, room)
    taken = [sum(max(floors[i], min(size, at)) for i, size in sizes.items()) for at in (level, level + 1)]
    assert taken[0] <= room or level == 0
    assert taken[1] > room or level >= max(sizes.values())


def test_what_is_older_gives_way_first() -> None:
    """Older items are cut for all that is wanted, then for what is needed; unread ones and users' words after them."""
    sizes, spared = {0: 500, 1: 2_000, 2: 2_000}, Spared({0}, {2})
    floors = dict.fromkeys(sizes, 48)
    assert clip_levels(sizes, floors, spared, 1_500, 1_000, 300) == {0: 500, 1: 500, 2: 2_000}
    assert clip_levels(sizes, floors, spared, 1_900, 1_800, 300) == {0: 500, 1: 200, 2: 2_000}
    assert clip_levels(sizes, floors, spared, 3_000, 2_800, 300) == {0: 500, 1: 600, 2: 600}
    assert clip_levels(sizes, floors, spared, 4_000, 3_900, 300) == {0: 200, 1: 200, 2: 200}
    assert clip_levels(sizes, floors, Spared({0}, ()), 4_000, 3_900, 300) == {0: 166, 1: 166, 2: 166}


SMALL = 3 * count_tokens(MARKER)
PATHOLOGICAL = {
    "letters": "a" * 1_000_000,
    "spaces": " " * 1_000_000,
    "lines": "\n" * 1_000_000,
    "base64": "QUFBQkJCQ0NDRERERUVFRg" * 40_000,
    "cjk": "不要修改数据库结构" * 100_000,
}


@settings(max_examples=300)
@given(texts(surrogates=False), st.integers(1, 40), st.integers(0, 400))
@pytest.mark.slow
def test_the_result_fits_and_both_ends_stay(text: str, times: int, tokens: int) -> None:
    """Whatever the text, the result takes at most the tokens asked for, is made of the text's ends, and not empty."""
    text = text * times
    result = clip(text, tokens, count_tokens)
    assert count_tokens(result) <= max(tokens, count_tokens(OMITTED))
    assert result.encode("utf-8")
    if count_tokens(text) <= max(tokens, count_tokens(OMITTED)):
        assert result == text
    else:
        pieces = [result.split(marker, 1) for marker in (MARKER, SHORT_MARKER) if marker in result]
        ends = [text.startswith(head) and text.endswith(tail) for head, *rest in pieces for tail in rest]
        assert any(ends) or text.startswith(result) or result == OMITTED


@pytest.mark.parametrize("tokens", [SMALL, 100, 400, 3000])
def test_the_marker_stands_once_between_whole_lines(tokens: int) -> None:
    """A log is cut at line ends, and one marker says so."""
    text = log(1, 5000)
    result = clip(text, tokens, count_tokens)
    head, tail = result.split(MARKER)
    assert count_tokens(result) > tokens * 0.6
    if tokens >= 400:
        assert set(head.split("\n")) | set(tail.split("\n")) <= set(text.split("\n"))
    assert text.startswith(head)
    assert text.endswith(tail)
    assert tail


def test_what_keeps_little_still_keeps_both_ends() -> None:
    """Where the marker's words would be most of the text, a short one stands between head and tail."""
    text = prose(1, 500)
    result = clip(text, 12, count_tokens)
    head, tail = result.split(SHORT_MARKER)
    assert head
    assert tail
    assert MARKER not in result


@pytest.mark.parametrize("kind", PATHOLOGICAL)
def test_a_megabyte_takes_a_bounded_number_of_looks(kind: str) -> None:
    """A megabyte of anything is clipped by reading about a few times what is kept, not the whole text each time."""
    text, seen = PATHOLOGICAL[kind], [0, 0]

    def watched(piece: str) -> int:
        seen[0] += 1
        seen[1] += len(piece)
        return count_tokens(piece)

    result = clip(text, 1000, watched)
    assert count_tokens(result) <= 1000
    assert result.count(MARKER) == 1
    assert seen[0] <= 100
    assert seen[1] <= 6 * len(text)


def test_markers_state_no_facts() -> None:
    """A marker holds no number and nothing that looks like a path: a model would quote it."""
    for marker in (MARKER, SHORT_MARKER, OMITTED):
        assert not any(character.isdigit() or character in "/\\" for character in marker)


TOOL: dict[str, Any] = {
    "type": "function",
    "x_vendor": {"title": "kept"},
    "function": {
        "name": "look_up",
        "strict": True,
        "description": prose(1, 400),
        "parameters": {
            "type": "object",
            "title": "Arguments",
            "description": prose(2, 200),
            "required": ["title", "description"],
            "additionalProperties": False,
            "properties": {
                "title": {
                    "type": "string",
                    "description": prose(3, 100),
                    "default": "none",
                    "examples": ["one", "two"],
                },
                "description": {"type": ["string", "null"], "enum": ["description", "title", None]},
                "default": {"type": "array", "items": {"anyOf": [{"const": "x", "title": "X"}, {"$ref": "#/$defs/k"}]}},
                "kind": {"type": "object", "properties": {"examples": {"type": "integer", "minimum": 100}}},
            },
            "$defs": {"k": {"type": "number", "$comment": prose(4, 50)}},
        },
    },
}


def frame(value: Any, inside: bool = False) -> Any:
    """A schema without its prose, read independently: names under ``properties`` are names."""
    if isinstance(value, list):
        return [frame(part) for part in value]
    if not isinstance(value, dict):
        return value
    prose_keys = ("description", "title", "$comment", "default", "examples", "example")
    kept = {key: part for key, part in value.items() if inside or key not in prose_keys}
    return {key: frame(part, not inside and key in ("properties", "$defs")) for key, part in kept.items()}


@pytest.mark.parametrize("tokens", [0, 60, 150, 300, 400, 10_000])
def test_whatever_a_call_needs_stays(tokens: int) -> None:
    """Names, types, required, enums and properties that are called like prose survive at every level."""
    [cut] = json.loads(shrink_tools(json.dumps([TOOL]).encode(), tokens, count_tokens))
    was, now = TOOL["function"], cut["function"]
    assert (now["name"], now["strict"], cut["type"], cut["x_vendor"]) == (
        "look_up",
        True,
        "function",
        {"title": "kept"},
    )
    assert frame(now["parameters"]) == frame(was["parameters"])
    assert list(now["parameters"]["properties"]) == list(was["parameters"]["properties"])
    assert now["parameters"]["properties"]["description"]["enum"] == ["description", "title", None]


def _with_definitions(**schema: Any) -> list[dict[str, Any]]:
    definitions = {
        "page": {"type": "object", "properties": {"parent": {"$ref": "#/$defs/parent"}}},
        "parent": {"type": "string"},
        "comment": {"type": "object", "properties": {"page": {"$ref": "#/$defs/page"}}},
    }
    return [{"type": "function", "function": {"name": "move", "parameters": {"$defs": definitions, **schema}}}]


def _definitions_left(tools: list[dict[str, Any]]) -> list[str]:
    [tool] = json.loads(shrink_tools(json.dumps(tools).encode(), 0, count_tokens))
    return list(tool["function"]["parameters"].get("$defs", ()))


def test_definitions_that_nothing_refers_to_go() -> None:
    to_page = {"type": "object", "properties": {"page": {"$ref": "#/$defs/page"}}}
    assert _definitions_left(_with_definitions(**to_page)) == ["page", "parent"]
    assert _definitions_left(_with_definitions(type="object")) == []


@pytest.mark.parametrize(
    "reference", [{"$ref": "#/$defs/pa%67e"}, {"$dynamicRef": "#page"}, {"$id": "https://a.test/"}]
)
def test_definitions_stay_if_they_could_be_meant_in_another_way(reference: dict[str, str]) -> None:
    assert _definitions_left(_with_definitions(properties={"page": reference})) == ["page", "parent", "comment"]


def test_declarations_of_gemini_lose_prose_too() -> None:
    declaration = {"name": "find", "description": "Find a page. " * 99, "parametersJsonSchema": {"title": "Arguments"}}
    [tool] = json.loads(shrink_tools(json.dumps([{"functionDeclarations": [declaration]}]).encode(), 0, count_tokens))
    assert tool == {"functionDeclarations": [{"name": "find", "parametersJsonSchema": {}}]}


def test_it_stops_at_the_first_level_that_fits() -> None:
    """More room keeps more prose, and enough room keeps whole words of every description."""
    raw = json.dumps([TOOL]).encode()
    least_cut = count_tokens(shrink_tools(raw, 10_000, count_tokens).decode()) - 1
    sizes = [count_tokens(shrink_tools(raw, tokens, count_tokens).decode()) for tokens in (0, 150, 250, least_cut)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] < count_tokens(raw.decode())
    longest = json.loads(shrink_tools(raw, least_cut, count_tokens))[0]["function"]["description"]
    assert 0 < len(longest) <= LEVELS[0][0] + 10
    assert set(longest.removesuffix(" [...]").split()) <= set(TOOL["function"]["description"].split())


def test_tools_lose_white_space_before_prose() -> None:
    """If that is enough, all that a tool says stays."""
    raw = json.dumps([TOOL], indent=2)
    compact = json.dumps([TOOL], ensure_ascii=False, separators=(",", ":"))
    cut = shrink_tools(raw.encode(), count_tokens(compact), count_tokens)
    assert cut.decode() == json.dumps([TOOL], separators=(",", ":"))
    assert json.loads(cut) == [TOOL]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), max_size=6), st.integers(0, 600), st.booleans())
def test_the_same_array_gives_the_same_bytes(seeds: list[int], tokens: int, indent: bool) -> None:
    """The result parses, has every tool in order, and is the same on every call, however the client wrote it."""
    tools = [tool(f"look_{seed}", prose(seed, 60), key=prose(seed + 1, 30)) for seed in seeds]
    raw = json.dumps(tools, indent=2 if indent else None).encode()
    cut = shrink_tools(raw, tokens, count_tokens)
    assert cut == shrink_tools(json.dumps(tools).encode(), tokens, count_tokens)
    assert [one["function"]["name"] for one in json.loads(cut)] == [f"look_{seed}" for seed in seeds]


@pytest.mark.parametrize(
    "raw",
    [
        '[{"type":"web_search"},1,null,"x",{"function":null},{"name":"bare","description":1}]',
        '[{"name":"a","input_schema":{"properties":{"p":{"description":"\\ud83d"}}}}]',
        '[{"function":{"name":"a","parameters":[true,{"properties":["odd"]}]}}]',
    ],
)
def test_odd_tools_pass(raw: str) -> None:
    """Tools of no known shape, and half a surrogate pair in a description, come out as valid UTF-8 JSON."""
    cut = json.loads(shrink_tools(raw.encode(), 0, count_tokens).decode("utf-8"))
    assert len(cut) == len(json.loads(raw))


class CountsCharacters:
    """Counts tokens, and the characters that it read for that."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self, text: str) -> int:
        self.read += len(text)
        return count_tokens(text)


@pytest.mark.parametrize("text", ["abcdefgh" * 40_000, prose(3, 60_000), log(1, 60_000), "汉字很多" * 40_000])
@pytest.mark.parametrize("tokens", [300, 5_000, 20_000])
def test_a_long_text_keeps_both_ends(text: str, tokens: int) -> None:
    """Nearly as much of it stays as may stay."""
    cut = clip(text, tokens, count_tokens)
    head, _, tail = cut.partition(MARKER)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert tokens * 0.8 - 10 < count_tokens(cut) <= tokens


@pytest.mark.parametrize("text", ["abcdefgh" * 40_000, prose(3, 60_000)])
def test_parts_of_a_long_text_are_not_counted_again_and_again(text: str) -> None:
    """The whole text is counted once, and of its ends mostly what the search adds or takes away (all: 11 times)."""
    count = CountsCharacters()
    cut = clip(text, 20_000, count)
    assert count.read <= len(text) + 7 * len(cut)


def test_tools_that_stay_too_large_are_counted_once() -> None:
    """No level between is written if the last one is too large."""
    raw = json.dumps([TOOL] * 40, indent=1).encode()
    count = CountsCharacters()
    cut = shrink_tools(raw, 10, count)
    assert count.read == len(cut) < len(raw)


@pytest.mark.parametrize("number", ["1e400", "9" * 5000])
def test_tools_without_prose_spell_numbers_as_they_came(number: str) -> None:
    """A limit in a schema that Python does not hold is sent as the client wrote it."""
    tool = {"name": "t", "description": "words " * 50, "input_schema": {"type": "number", "maximum": "@"}}
    raw = json.dumps([tool]).replace('"@"', number).encode()
    cut = shrink_tools(raw, 0, count_tokens)
    assert b"words words" not in cut
    assert f'"maximum":{number}}}'.encode() in cut
