"""Facts of calls and results: small, without text, joined by id. What the arguments of any call say."""

from __future__ import annotations

import json
import time

import pytest

from proxy.core.conversation import Item, ItemFacts, ItemText, Result
from proxy.core.tool_calls import LONGEST_ARGUMENTS, facts_of, failure_line, pairs_of, read_arguments, unpack_mentions
from tests.support.engine_fixtures import count_tokens, tool_map_of_package


def result_of(text: str, *, failed: bool = False) -> Result:
    [facts] = facts_of([ItemText("tool", "", results=((text, failed),))], tool_map_of_package().calls, count_tokens)
    assert facts is not None
    return facts.results[0]


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ("fine", True),
        ("no error at all", True),
        ("", False),
        ("Error: no such file", False),
        ("<tool_use_error>x", False),
        ("ENOENT: gone", False),
        ("1 passed\nexit code 0", True),
        ("boom\nExit code: 1", False),
    ],
)
def test_success_is_read_from_the_edges(text: str, ok: bool) -> None:
    """A result that is empty or opens or closes with a failure did not succeed."""
    assert result_of(text).ok is ok
    assert result_of(text, failed=True).ok is False


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("     5→a\n     6→b\n     7→c", (5, 7)),
        ("12\tx\n13\ty\n", (12, 13)),
        ("00001| x\n00002| y", (1, 2)),
        ("2024 was\n1999 is", (0, 0)),
        ("plain\ntext", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_a_listing_tells_its_own_lines(text: str, shown: tuple[int, int]) -> None:
    """Line numbers count only where they number the lines that are there."""
    found = result_of(text)
    assert (found.first, found.last) == shown


def test_lines_and_completeness() -> None:
    """A final line end is no line; a notice that something is missing is noticed at either edge."""
    assert [result_of(text).lines for text in ("", "a", "a\n", "a\nb", "\n")] == [0, 1, 1, 2, 1]
    assert result_of("x\n" * 3000 + "(file has more lines)").partial
    assert not result_of("x\n" * 10).partial


def test_what_the_model_wrote_is_kept_as_digests() -> None:
    """File names, quoted openings and conclusions in the model's words are recognised later, without the words."""
    entry = ItemText("assistant", "Based on src/app/main.py: it prints `Traceback (most recent call last)` twice.")
    texts = [entry, ItemText("assistant", "Well then"), ItemText("user", "see main.py")]
    facts, *others = facts_of(texts, tool_map_of_package().calls, count_tokens)
    assert facts is not None
    assert facts.decides
    seen = set(unpack_mentions(facts.mentions))
    assert hash("main.py") in seen
    assert result_of("Traceback (most recent call last):\n ...").opening in seen
    assert others == [None, None]


def test_results_meet_the_newest_call_of_their_id() -> None:
    """An id that is used again belongs to its latest call; a result without a call has no pair."""

    def call(name: str) -> ItemFacts:
        return ItemFacts(calls=(tool_map_of_package().call(name, "{}"),))

    answer = ItemFacts(results=(result_of("x"),))
    items = [
        Item("assistant", 1, 0, b"", ("a",), facts=call("Read")),
        Item("tool", 1, 0, b"", (), ("a",), facts=answer),
        Item("tool", 1, 0, b"", (), ("lost",), facts=answer),
        Item("tool", 1, 0, b"", (), ("a", "b"), facts=answer),
        Item("assistant", 1, 0, b"", ("a",), facts=call("Bash")),
        Item("tool", 1, 0, b"", (), ("a",), facts=answer),
    ]
    assert [(pair.call_index, pair.index, pair.call.kind) for pair in pairs_of(items, 0, 6)] == [
        (0, 1, "file_read"),
        (4, 5, "shell"),
    ]


def test_the_line_that_tells_of_a_failure() -> None:
    """It is the first one that does, stripped; none where nothing failed."""
    assert failure_line("ok\n  KeyError: an error\nfatal") == "KeyError: an error"
    assert failure_line("all good") == ""


@pytest.mark.parametrize("text", ["a" * 65_536, "a-" * 32_768, "a" * 60_000 + ".py"])
def test_a_long_word_costs_little(text: str) -> None:
    """A model's text without a space is read in time that grows with its length, not with its square."""
    began = time.process_time()
    facts_of([ItemText("assistant", text)], tool_map_of_package().calls, count_tokens)
    assert time.process_time() - began < 5  # by the square: half a minute and more


def test_numbers_in_arguments_keep_their_digits() -> None:
    """Numbers in a call's arguments keep their digits: 1e5 is not written as 100000.0, nor 1.10 as 1.1."""
    assert read_arguments('{"a": 1e5, "b": [1.10, true, null, "x"], "c": 12345678901234567890}').plain.split("\n") == [
        "1e5",
        "1.10",
        "x",
        "12345678901234567890",
    ]


def test_very_long_arguments_are_not_decoded() -> None:
    """They are text as they stand, and no command is looked for in them."""
    arguments = json.dumps({"command": "x" * LONGEST_ARGUMENTS})
    assert read_arguments(arguments).plain == arguments
    assert read_arguments(arguments).command == ""


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ('{"command": "ls -la\\n  src"}', "ls -la src"),
        ('{"cmd": ["bash", "-lc", "make all"]}', "bash -lc make all"),
        ('{"path": "x"}', ""),
        ('{"command": null}', ""),
        ('{"commands": ["cd src", "ls\\n -la"]}', "cd src; ls -la"),
        ('{"commands": [{"command": "make"}, {"cmd": ["git", "log"]}, null, {"x": 1}]}', "make; git log"),
        ('{"commands": "make"}', ""),
        ("not json", ""),
        ("[1]", ""),
        ("[" * 100_000, ""),
    ],
)
def test_a_shell_call_shows_its_command_on_one_line(arguments: str, command: str) -> None:
    """The command of a shell call on one line, whatever its member is called; nothing for other calls."""
    assert read_arguments(arguments).command == command
