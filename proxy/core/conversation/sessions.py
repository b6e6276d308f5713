"""Past conversations in the files that clients keep, as chat messages: text in, values out.

Known are JSON and JSON Lines of OpenAI requests, and the session files of Claude Code, Codex, opencode (its export),
Cline and Roo, and Aider. What a line of such a file says beside messages is left out, as is a line that is broken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Session:
    """One past conversation as a client of the chat API would have sent it; ``model`` is empty where nobody says."""

    name: str
    model: str = ""
    messages: Sequence[Message] = field(default=())
    tools: Sequence[Message] = field(default=())


def read_sessions(name: str, text: str) -> list[Session]:
    """The conversations in the file called *name*; none where its kind is not known."""
    if name.endswith(".md"):
        found = list(_aider(name, text))
    else:
        whole = _decoded(text)
        lines = [whole] if whole is not None else [_decoded(line) for line in text.splitlines()]
        found = _of_values(name, [line for line in lines if line is not None])
    return [session for session in found if any(message["role"] == "assistant" for message in session.messages)]


def _of_values(name: str, values: Sequence[Any]) -> list[Session]:
    if len(values) == 1 and isinstance(values[0], list):
        return [Session(name, "", _messages(values[0]))]
    rows = [value for value in values if isinstance(value, dict)]
    if any(row.get("type") in ("session_meta", "response_item") for row in rows):
        return _codex(name, [(str(row.get("type")), _dict(row.get("payload"))) for row in rows])
    if any(isinstance(row.get("message"), dict) for row in rows):
        return _claude_code(name, rows)
    if any(_request(row) for row in rows):
        return list(_requests(name, rows))
    if any(row.get("type") in ("message", "function_call") for row in rows):
        return _codex(name, [("response_item", row) for row in rows])
    return []


def _request(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request in a line: the line, or what a log or a batch file put around it; empty where there is none."""
    candidates = (row, row.get("request"), row.get("body"), _dict(row.get("params")).get("body"))
    return next((each for each in candidates if isinstance(each, dict) and isinstance(each.get("messages"), list)), {})


def _requests(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Session]:
    """Requests as they were logged; one that only continues the one before it takes its place."""
    last: Session | None = None
    for at, row in enumerate(rows):
        asked = _request(row)
        if not asked:
            continue
        parts = _opencode(asked["messages"])
        messages = parts or _messages(asked["messages"])
        label = str(row.get("id") or _dict(row.get("info")).get("id") or f"{name}:{at + 1}")
        model = str(asked.get("model") or _model(asked["messages"]))
        session = Session(label, model, messages, _dicts(asked.get("tools")))
        if last is not None and list(messages[: len(last.messages)]) != list(last.messages):
            yield last
        last = session
    if last is not None:
        yield last


def _messages(values: Iterable[Any]) -> list[Message]:
    """Chat messages as they are; those in the Messages API's shape in the chat API's."""
    found: list[Message] = []
    for value in values:
        if isinstance(value, dict) and isinstance(value.get("role"), str):
            found += _from_blocks(value) if _is_blocks(value.get("content")) else [value]
    return found


def _is_blocks(content: Any) -> bool:
    kinds = {"tool_use", "tool_result", "thinking", "redacted_thinking"}
    return any(part.get("type") in kinds for part in _dicts(content))


def _from_blocks(message: Mapping[str, Any]) -> list[Message]:
    """The chat messages of one message made of blocks: results become messages of their own, before the text."""
    role, content = str(message["role"]), message.get("content")
    parts = _dicts(content)
    results = [
        {"role": "tool", "tool_call_id": str(part.get("tool_use_id")), "content": _text(part.get("content"))}
        for part in parts
        if part.get("type") == "tool_result"
    ]
    calls = [
        _call(part.get("id"), part.get("name"), json.dumps(part.get("input") or {}, ensure_ascii=False))
        for part in parts
        if part.get("type") == "tool_use"
    ]
    text = content if isinstance(content, str) else _text(content)
    own: Message = {"role": role, "content": text or None}
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if text or calls else results


def _call(name: Any, tool: Any, arguments: str) -> Message:
    return {"id": str(name), "type": "function", "function": {"name": str(tool), "arguments": arguments}}


def _claude_code(name: str, rows: Sequence[Mapping[str, Any]]) -> list[Session]:
    """Main conversation and sub-agents apart; what follows the client's own compaction is a conversation of its own."""
    found: dict[tuple[str, int], list[tuple[str, Message]]] = {}
    epochs: dict[str, int] = {}
    models: dict[tuple[str, int], str] = {}
    for row in rows:
        message = _dict(row.get("message"))
        if row.get("type") not in ("user", "assistant") or message.get("role") not in ("user", "assistant"):
            continue
        thread = str(row.get("agentId") or "sub-agent") if row.get("isSidechain") else ""
        epochs[thread] = epochs.get(thread, 0) + bool(row.get("isCompactSummary"))
        key = (thread, epochs[thread])
        if message["role"] == "assistant" and message.get("model"):
            models[key] = str(message["model"])
        identity = str(message.get("id") or "")
        said = found.setdefault(key, [])
        for each in _from_blocks(message):
            if identity and said and said[-1][0] == identity and each["role"] == "assistant":
                said[-1] = (identity, _joined(said[-1][1], each))  # one answer is logged block by block
            else:
                said.append((identity, each))
    return [
        Session("/".join(filter(None, (name, key[0], str(key[1] or "")))), models.get(key, ""), [m for _, m in said])
        for key, said in found.items()
    ]


def _joined(first: Message, second: Message) -> Message:
    text = "\n".join(filter(None, (first.get("content"), second.get("content"))))
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})}


def _codex(name: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Session]:
    """Items of the Responses API; what follows the client's own compaction is a conversation of its own."""
    sessions: list[list[Message]] = [[]]
    model, instructions = "", ""
    for kind, payload in rows:
        if kind == "session_meta":
            told = payload.get("base_instructions") or payload.get("instructions")
            instructions = str(_dict(told).get("text") or "") if isinstance(told, dict) else str(told or "")
        elif kind == "turn_context":
            model = str(payload.get("model") or model)
        elif kind == "compacted":
            text = str(payload.get("message") or "")
            sessions.append([{"role": "user", "content": text}] if text else [])
        elif kind == "response_item":
            _add_item(sessions[-1], payload)
    first: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    return [Session(f"{name}/{at}" if at else name, model, [*first, *messages]) for at, messages in enumerate(sessions)]


def _add_item(messages: list[Message], item: Mapping[str, Any]) -> None:
    kind = item.get("type")
    if kind == "message" and isinstance(item.get("role"), str):
        messages.append({"role": item["role"], "content": _text(item.get("content"))})
    elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
        given = item.get("arguments", item.get("input", item.get("action")))
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        call = _call(item.get("call_id") or item.get("id"), item.get("name") or "shell", arguments)
        if messages and messages[-1]["role"] == "assistant":
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = _text(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text})


def _opencode(values: Iterable[Any]) -> list[Message]:
    """The messages of an export, each with its ``info`` and its ``parts``; none where they are of another kind."""
    found: list[Message] = []
    for value in values:
        role = str(_dict(_dict(value).get("info")).get("role"))
        parts = _dicts(_dict(value).get("parts"))
        text = "\n".join(str(part.get("text") or "") for part in parts if part.get("type") == "text")
        tools = [part for part in parts if part.get("type") == "tool"]
        if role == "user" and text:
            found.append({"role": "user", "content": text})
        elif role == "assistant" and (text or tools):
            states = [(str(part.get("callID")), part, _dict(part.get("state"))) for part in tools]
            calls = [
                _call(name, part.get("tool"), json.dumps(state.get("input") or {}, ensure_ascii=False))
                for name, part, state in states
            ]
            found.append({"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})})
            for name, _, state in states:
                told = _text(state.get("output") or state.get("error"))
                found.append({"role": "tool", "tool_call_id": name, "content": told})
    return found


def _model(values: Iterable[Any]) -> str:
    infos = (_dict(_dict(value).get("info")) for value in values)
    return next((str(info["modelID"]) for info in infos if info.get("modelID")), "")


_AIDER_START = re.compile(r"^# aider chat started at (.*)$", re.MULTILINE)


def _aider(name: str, text: str) -> Iterator[Session]:
    """A Markdown history: what the user typed stands behind ``####``, what aider printed behind ``>``."""
    starts = list(_AIDER_START.finditer(text))
    for at, start in enumerate(starts):
        end = starts[at + 1].start() if at + 1 < len(starts) else len(text)
        messages: list[Message] = []
        for line in text[start.end() : end].splitlines():
            if line.startswith(">"):
                continue
            role = "user" if line.startswith("#### ") else "assistant"
            said = line.removeprefix("#### ")
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += f"\n{said}"
            elif said.strip():
                messages.append({"role": role, "content": said})
        yield Session(f"{name} {start[1]}".strip(), "", messages)


def _text(content: Any) -> str:
    """What a content says: a text, the texts of its parts, or the JSON of anything else."""
    if isinstance(content, str):
        return content
    parts = _dicts(content)
    if parts or content in (None, []):
        return "\n".join(str(part["text"]) for part in parts if isinstance(part.get("text"), str))
    return json.dumps(content, ensure_ascii=False)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _decoded(text: str) -> Any:
    """The value of *text*; ``None`` where it is no JSON."""
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return None
