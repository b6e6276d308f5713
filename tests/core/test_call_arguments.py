"""Arguments of any call: their plain text, and the shell command in them."""

from __future__ import annotations

import json

import pytest

from proxy.core.call_arguments import LONGEST_ARGUMENTS, read_arguments


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
