"""Deterministic raw material for conversations: prose, logs, tool schemas, chats and agent loops of a given size."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_SENTENCE = (
    "the parser reads every record before it checks whether a later migration changed that column and then writes "
    "its result into a queue where another worker waits for enough rows to build one batch so that slow disks never "
    "block readers while new schema versions roll out across regions with different clocks limits retries locks"
)
_THINGS = "ledger invoice session tenant router shard snapshot replica cursor planner scheduler gateway bucket"
_ACTIONS = "load merge rotate verify split flush encode resolve drain compact rebuild publish"
_WORDS, _NOUNS, _VERBS = _SENTENCE.split(), _THINGS.split(), _ACTIONS.split()


def name(pick: random.Random) -> str:
    """An identifier as code has them."""
    return f"{pick.choice(_VERBS)}_{pick.choice(_NOUNS)}_{pick.randrange(100, 999)}"


def path(pick: random.Random) -> str:
    """A file path."""
    return f"src/{pick.choice(_NOUNS)}/{name(pick)}.py"


def prose(seed: int, tokens: int) -> str:
    """English-like text of roughly *tokens* tokens; another seed, another text."""
    pick = random.Random(seed)
    words: list[str] = []
    while len(words) < tokens * 0.9:
        sentence = [pick.choice(_WORDS) for _ in range(pick.randrange(7, 16))]
        if pick.random() < 0.3:
            sentence.append(f"in `{path(pick)}`")
        words += " ".join(sentence).capitalize().split(" ")
        words[-1] += "."
    return " ".join(words[: max(1, int(tokens * 0.9))])


def log(seed: int, tokens: int) -> str:
    """Lines of a tool's output of roughly *tokens* tokens."""
    pick = random.Random(seed)
    lines, size = [], 0
    while size < tokens:
        verb = f"{path(pick)}:{pick.randrange(1, 900)}: {pick.choice(_VERBS)} {pick.choice(_NOUNS)}"
        lines.append(f"{verb} took {pick.randrange(10, 9999)} ms, id {pick.getrandbits(40):x}")
        size += 30
    return "\n".join(lines)


def tool(label: str, description: str, **properties: str) -> dict[str, Any]:
    """A function tool whose properties are required strings with the given descriptions."""
    fields = {key: {"type": "string", "description": text} for key, text in properties.items()}
    schema = {"type": "object", "properties": fields, "required": list(properties)}
    return {"type": "function", "function": {"name": label, "description": description, "parameters": schema}}


AGENT_TOOLS = [
    tool("read_file", "Read a file of the repository.", path="Path from the root of the repository."),
    tool("run", "Run a shell command in the sandbox and return its output.", command="The command line."),
    tool("edit_file", "Replace text in a file.", path="Path.", old="Text to find.", new="Text to put there."),
]
AGENT_SYSTEM = "You are a careful engineer. Work step by step with the tools. Never touch files under vendor/."
AGENT_TASK = (
    "Find out why rotate_ledger_412 loses rows after midnight, fix it, and please keep the public API as it is."
)


def agent_round(seed: int, result_tokens: int, parallel: int = 1) -> list[Message]:
    """One round of an agent: a sentence, its tool calls, and their results in order."""
    pick = random.Random(seed * 7919)
    calls = []
    for at in range(parallel):
        arguments = json.dumps({"path": path(pick)})
        function = {"name": "read_file", "arguments": arguments}
        calls.append({"id": f"call_{seed}_{at}", "type": "function", "function": function})
    spoken: Message = {"role": "assistant", "content": f"Next I look at {name(pick)}.", "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": log(seed * 31 + at, result_tokens)}
        for at, call in enumerate(calls)
    ]
    return [spoken, *results]


def agent_session(rounds: int, result_tokens: int, parallel: int = 1) -> list[Message]:
    """System text, one task, and *rounds* finished rounds: the next word is the model's."""
    opening: list[Message] = [{"role": "system", "content": AGENT_SYSTEM}, {"role": "user", "content": AGENT_TASK}]
    return opening + [m for at in range(rounds) for m in agent_round(at + 1, result_tokens, parallel)]


def chat_turn(seed: int, tokens: int) -> list[Message]:
    """A user message and the assistant's answer, of *tokens* tokens each."""
    question = f"Question {seed}: {prose(seed * 2, tokens)}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": prose(seed * 2 + 1, tokens)}]


def request_lengths(messages: Sequence[Message]) -> list[int]:
    """The lengths at which *messages* was a request."""
    return [
        i
        for i, message in enumerate(messages, 1)
        if message["role"] != "assistant"
        and (i == len(messages) or messages[i]["role"] == "assistant")
        and message["role"] != "system"
    ]


def coding_session(rounds: int, lines: int = 60) -> list[Message]:
    """An agent that reads a few files again and again between changes, and runs the tests."""
    messages: list[Message] = [{"role": "user", "content": "Make the tests pass. Never touch vendor/."}]
    for number in range(rounds):
        path = f"src/mod{number % 5}.py"
        name = ("Read", "Read", "Edit", "Bash")[number % 4]
        given = {"command": "pytest -q"} if name == "Bash" else {"file_path": path}
        text = "\n".join(f"{n + 1}\tvalue_{n} = compute({n}, {number // 4})" for n in range(lines))
        result = {"Edit": "The file was updated.", "Bash": f"{number} passed\n" + "ok\n" * 40}.get(name, text)
        call = {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        messages.append({"role": "assistant", "content": f"Step {number}.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": result})
    return messages


SESSIONS: dict[str, list[Message]] = {
    "agent": agent_session(40, 300),
    "parallel": agent_session(16, 120, parallel=6),
    "chat": [m for turn in range(40) for m in chat_turn(turn, 150)][:-1],
}
