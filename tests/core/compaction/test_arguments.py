"""The arguments of calls as plain text."""

from __future__ import annotations

import json

import pytest

from proxy.core.compaction.arguments import LONGEST_ARGUMENTS, command_of, plain_arguments


def test_a_figure_is_spelled_as_it_was() -> None:
    """Numbers in a call's arguments keep their digits: 1e5 is not written as 100000.0, nor 1.10 as 1.1."""
    assert plain_arguments('{"a": 1e5, "b": [1.10, true, null, "x"], "c": 12345678901234567890}').split("\n") == [
        "1e5",
        "1.10",
        "x",
        "12345678901234567890",
    ]


def test_very_long_arguments_are_not_decoded() -> None:
    """They are text as they stand, and no command is looked for in them."""
    arguments = json.dumps({"command": "x" * LONGEST_ARGUMENTS})
    assert plain_arguments(arguments) == arguments
    assert command_of(arguments) == ""


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
def test_commands_of_calls(arguments: str, command: str) -> None:
    """The command of a shell call on one line, whatever its member is called; nothing for other calls."""
    assert command_of(arguments) == command
