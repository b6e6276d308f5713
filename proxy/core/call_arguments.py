"""The texts, numbers and shell commands in the arguments of any tool call, whatever tool it calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from proxy.core.conversation import ItemText

LONGEST_ARGUMENTS = 262_144
"""Most characters of a call's arguments that are read as JSON. Longer ones are read as plain text."""

_LITERAL = json.JSONDecoder(parse_int=str, parse_float=str)
"""Leaves numbers as they are spelled: a parsed number could be printed differently."""

_COMMAND_KEYS = ("command", "cmd", "code", "script")
_COMMANDS_KEYS = ("commands", "cmds")
"""Keys of lists of commands, each a text or an object with one. Under other keys a list is one command in parts."""


class Arguments(NamedTuple):
    """What a call's arguments say.

    ``plain`` are their text and number values, one a line, or their own text if it is no JSON. ``command`` are the
    shell command or commands in them, on one line; "" if there is none.
    """

    plain: str
    command: str = ""


def read_all_arguments(entries: Iterable[ItemText]) -> dict[str, Arguments]:
    """Return what the arguments of all calls of *entries* say, by their text; equal ones are parsed once."""
    texts = dict.fromkeys(text for entry in entries for _, text in entry.calls)
    return {text: read_arguments(text) for text in texts}


def read_arguments(text: str) -> Arguments:
    """Return what a call's arguments, the JSON *text*, say. Above ``LONGEST_ARGUMENTS`` it is not parsed."""
    if len(text) > LONGEST_ARGUMENTS:
        return Arguments(text)
    try:
        values = _LITERAL.decode(text)
    except (ValueError, RecursionError):
        return Arguments(text)
    command = ""
    if isinstance(values, dict):
        command = _command_in(values)
    return Arguments(_plain(values), command)


def _command_in(values: dict[str, Any]) -> str:
    """Return the shell command or commands in *values*, on one line; "" if there is none."""
    several = next((values[key] for key in _COMMANDS_KEYS if isinstance(values.get(key), list)), [values])
    commands = [_one_command(command) for command in several if command]
    return "; ".join(filter(None, commands))


def _one_command(value: Any) -> str:
    """Return the command in *value* on one line: *value* itself, or a member of it."""
    if isinstance(value, dict):
        value = next((value[key] for key in _COMMAND_KEYS if value.get(key)), "")
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return " ".join(str(value).split())


def _plain(value: Any) -> str:
    """Return the text and number values in *value*, one a line."""
    texts: list[str] = []
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            stack.extend(reversed(node.values()))
        elif isinstance(node, list):
            stack.extend(reversed(node))
        elif isinstance(node, str):
            texts.append(node)
    return "\n".join(texts)
