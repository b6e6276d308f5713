"""What a client of each API makes of an answer, streamed or whole; a stream that breaks its API's rules fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ParsedAnswer:
    """An answer as its client has it: texts and calls in order, why it ended, its usage, and the items to send back."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)


def parse_answer(api: str, body: bytes, *, stream: bool) -> ParsedAnswer:
    """The answer in *body*. Fails if it is not a whole and valid one."""
    values = events(body) if stream else [json.loads(body)]
    reader = {"chat": (_chat, _chats), "messages": (_message, _messages), "responses": (_response, _responses)}[api]
    return reader[1](values) if stream else reader[0](values[0])


def events(body: bytes) -> list[Any]:
    """The data of a stream's events; the names of events agree with their types."""
    values: list[Any] = []
    for event in body.decode().replace("\r\n", "\n").split("\n\n"):
        lines = [line for line in event.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        named = dict(line.split(": ", 1) for line in lines)
        value = named["data"] if named["data"] == "[DONE]" else json.loads(named["data"])
        assert "event" not in named or named["event"] == value["type"]
        values.append(value)
    return values


def _chat(value: dict[str, Any]) -> ParsedAnswer:
    (choice,) = value["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    assert message["content"] is not None or calls
    assert (choice["finish_reason"] == "tool_calls") == bool(calls)
    return ParsedAnswer(message["content"] or "", calls, choice["finish_reason"], value["usage"], [message])


def _chats(values: Sequence[Any]) -> ParsedAnswer:
    *values, done = values
    assert done == "[DONE]"
    assert len({value["id"] for value in values}) == 1
    roles, finishes, usages, calls = 0, [], [], {}
    texts: dict[str, str] = {"content": "", "reasoning_content": ""}
    for value in values:
        assert value["object"] == "chat.completion.chunk"
        usages += [value["usage"]] if value.get("usage") else []
        for choice in value["choices"]:
            assert not finishes, "nothing comes behind the finish reason"
            delta = choice["delta"]
            roles += "role" in delta
            for key in texts:
                texts[key] += delta.get(key) or ""
            for piece in delta.get("tool_calls") or ():
                call = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
                assert piece["index"] == len(calls) - 1, "calls come one after the other, numbered from zero"
                call["id"] += piece.get("id") or ""
                call["name"] += piece["function"].get("name") or ""
                call["arguments"] += piece["function"].get("arguments") or ""
            finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert roles == 1
    assert len(finishes) == 1
    assert len(usages) <= 1
    assert (finishes[0] == "tool_calls") == bool(calls)
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls.values()]
    pairs = zip(calls.values(), functions, strict=True)
    tool_calls = [{"id": call["id"], "type": "function", "function": function} for call, function in pairs]
    message = {"role": "assistant", "content": texts["content"], **({"tool_calls": tool_calls} if tool_calls else {})}
    named = [(call["name"], call["arguments"]) for call in functions]
    return ParsedAnswer(texts["content"], named, finishes[0], usages[0] if usages else {}, [message])


def _message(value: dict[str, Any]) -> ParsedAnswer:
    blocks = value["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
    assert (value["stop_reason"] == "tool_use") == bool(calls)
    return ParsedAnswer(text, calls, value["stop_reason"], value["usage"], [{"role": "assistant", "content": blocks}])


def _messages(values: Sequence[Any]) -> ParsedAnswer:
    values = [value for value in values if value["type"] != "ping"]
    first, *middle, delta, last = values
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    blocks: list[dict[str, Any]] = []
    opened = False
    inputs: dict[int, str] = {}
    for value in middle:
        kind, index = value["type"], value["index"]
        if kind == "content_block_start":
            assert not opened
            assert index == len(blocks)
            blocks.append(dict(value["content_block"]))
            opened = True
            continue
        assert opened
        assert index == len(blocks) - 1
        opened = kind != "content_block_stop"
        if kind == "content_block_delta":
            piece = value["delta"]
            name = piece["type"].removesuffix("_delta")
            if name == "input_json":
                inputs[index] = inputs.get(index, "") + piece["partial_json"]
            else:
                blocks[index][name] = blocks[index].get(name, "") + piece[name]
    assert not opened
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    usage = {**first["message"]["usage"], **delta["usage"]}
    return _message({"content": blocks, "stop_reason": delta["delta"]["stop_reason"], "usage": usage})


def _response(value: dict[str, Any]) -> ParsedAnswer:
    output = value["output"]
    message_items = [item for item in output if item["type"] == "message"]
    text = "".join(part["text"] for item in message_items for part in item["content"])
    calls = [(item["name"], item["arguments"]) for item in output if item["type"] == "function_call"]
    for at, item in enumerate(output):
        assert item["type"] != "reasoning" or at + 1 < len(output), "reasoning leads to something"
    return ParsedAnswer(text, calls, value["status"], value["usage"], output)


def _responses(values: Sequence[Any]) -> ParsedAnswer:
    assert [value["sequence_number"] for value in values] == list(range(len(values)))
    assert [value["type"] for value in values[:2]] == ["response.created", "response.in_progress"]
    *middle, last = values[2:]
    assert last["type"] in ("response.completed", "response.incomplete")
    added: list[str] = []
    done: list[Any] = []
    for value in middle:
        index = value["output_index"]
        if value["type"] == "response.output_item.added":
            assert index == len(added) == len(done)
            added.append(value["item"]["id"])
        elif value["type"] == "response.output_item.done":
            done.append(value["item"])
            assert index == len(done) - 1
        else:
            assert value["item_id"] == added[index]
    assert [item["id"] for item in done] == added
    assert last["response"]["output"] == done
    return _response(last["response"])
