"""Reads the arguments of calls as plain text: their values, and the shell command among them."""

from __future__ import annotations

import json
from typing import Any

LONGEST_ARGUMENTS = 262_144
"""Most characters of a call's arguments that are read as JSON. Longer ones are read as plain text."""

_LITERAL = json.JSONDecoder(parse_int=str, parse_float=str)
"""Leaves numbers as they are spelled: a parsed number could be printed differently."""


_COMMAND_KEYS = ("command", "cmd", "code", "script")
_COMMANDS_KEYS = ("commands", "cmds")
"""Keys of lists of commands, each a text or an object with one. Under other keys a list is one command in parts."""


def command_of(arguments: str) -> str:
    """The shell command or commands in a call's arguments, on one line; "" if there is none."""
    if len(arguments) > LONGEST_ARGUMENTS:
        return ""
    try:
        values = _LITERAL.decode(arguments)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(values, dict):
        return ""
    several = next((values[key] for key in _COMMANDS_KEYS if isinstance(values.get(key), list)), [values])
    commands = [_one_command(each) for each in several if each]
    return "; ".join(filter(None, commands))


def _one_command(value: Any) -> str:
    """The command in *value*, on one line: *value* itself, or a member of it."""
    if isinstance(value, dict):
        value = next((value[key] for key in _COMMAND_KEYS if value.get(key)), "")
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return " ".join(str(value).split())


def plain_arguments(arguments: str) -> str:
    """The string and number values of a call's JSON arguments, one on each line; the text itself if it is no JSON."""
    if len(arguments) > LONGEST_ARGUMENTS:
        return arguments
    try:
        stack = [_LITERAL.decode(arguments)]
    except (ValueError, RecursionError):
        return arguments
    texts: list[str] = []
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            stack.extend(reversed(node.values()))
        elif isinstance(node, list):
            stack.extend(reversed(node))
        elif isinstance(node, str):
            texts.append(node)
    return "\n".join(texts)
