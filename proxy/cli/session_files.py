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

_SPEAKERS = frozenset({"user", "assistant"})


@dataclass(frozen=True, slots=True)
class Session:
    """One past conversation as a client of the chat API would have sent it; ``model`` is empty if it is not known."""

    name: str
    model: str = ""
    messages: Sequence[Message] = field(default=())
    tools: Sequence[Message] = field(default=())


def read_sessions(name: str, text: str) -> list[Session]:
    """Return the conversations in the file called *name*; none if its kind is not known."""
    found = list(_aider(name, text)) if name.endswith(".md") else _of_values(name, _values(text))
    return [session for session in found if _has_answer(session)]


def _has_answer(session: Session) -> bool:
    return any(message["role"] == "assistant" for message in session.messages)


def _values(text: str) -> list[Any]:
    """Return the value of a JSON file, or those of the lines of a JSON Lines file; a broken line is left out."""
    whole = _decoded(text)
    if whole is not None:
        return [whole]
    lines = (_decoded(line) for line in text.splitlines())
    return [value for value in lines if value is not None]


def _of_values(name: str, values: Sequence[Any]) -> list[Session]:
    if len(values) == 1 and isinstance(values[0], list):
        return [Session(name, "", _messages(values[0]))]
    rows = _dicts(list(values))
    kinds = {str(row.get("type")) for row in rows}
    if kinds & {"session_meta", "response_item"}:
        return _codex(name, [(str(row.get("type")), _dict(row.get("payload"))) for row in rows])
    if any(isinstance(row.get("message"), dict) for row in rows):
        return _claude_code(name, rows)
    requests = list(_requests(name, rows))
    if requests:
        return requests
    if kinds & {"message", "function_call"}:
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
    """Return the main conversation and those of sub-agents.

    What follows the client's own compaction is a conversation of its own.
    """
    threads: dict[tuple[str, int], _Thread] = {}
    epochs: dict[str, int] = {}
    for row in rows:
        message = _dict(row.get("message"))
        if row.get("type") not in _SPEAKERS or message.get("role") not in _SPEAKERS:
            continue
        agent = str(row.get("agentId") or "sub-agent") if row.get("isSidechain") else ""
        epochs[agent] = epochs.get(agent, 0) + bool(row.get("isCompactSummary"))
        threads.setdefault((agent, epochs[agent]), _Thread()).add(message)
    return [
        Session("/".join(filter(None, (name, agent, str(epoch or "")))), thread.model, thread.messages)
        for (agent, epoch), thread in threads.items()
    ]


@dataclass(slots=True)
class _Thread:
    """One conversation of a Claude Code file as its rows are read; ``last_id`` is the id of the last row's message."""

    model: str = ""
    last_id: str = ""
    messages: list[Message] = field(default_factory=list)

    def add(self, message: Mapping[str, Any]) -> None:
        """Add the message of one row; rows with the same id are the blocks of one answer."""
        if message["role"] == "assistant" and message.get("model"):
            self.model = str(message["model"])
        identity = str(message.get("id") or "")
        for each in _from_blocks(message):
            if identity and identity == self.last_id and each["role"] == "assistant":
                self.messages[-1] = _joined(self.messages[-1], each)
            else:
                self.messages.append(each)
            self.last_id = identity


def _joined(first: Message, second: Message) -> Message:
    text = "\n".join(filter(None, (first.get("content"), second.get("content"))))
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})}


def _codex(name: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Session]:
    """Return the conversations in items of the Responses API.

    What follows the client's own compaction is a conversation of its own.
    """
    sessions: list[list[Message]] = [[]]
    model, instructions = "", ""
    for kind, payload in rows:
        match kind:
            case "session_meta":
                instructions = _instructions(payload)
            case "turn_context":
                model = str(payload.get("model") or model)
            case "compacted":
                sessions.append(_spoken("user", payload.get("message")))
            case "response_item":
                _add_item(sessions[-1], payload)
    first = _spoken("system", instructions)
    return [Session(f"{name}/{at}" if at else name, model, [*first, *messages]) for at, messages in enumerate(sessions)]


def _instructions(meta: Mapping[str, Any]) -> str:
    """Return the system text that a Codex session begins with: a text, or an object with one."""
    given = meta.get("base_instructions") or meta.get("instructions")
    return str((given.get("text") if isinstance(given, dict) else given) or "")


def _spoken(role: str, text: Any) -> list[Message]:
    """Return a message of *text*, or none if it is empty."""
    return [{"role": role, "content": str(text)}] if text else []


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
    """Return the messages of an export, each with its ``info`` and its ``parts``; none if they are of another kind."""
    found: list[Message] = []
    for value in values:
        role = str(_dict(_dict(value).get("info")).get("role"))
        parts = _dicts(_dict(value).get("parts"))
        text = "\n".join(str(part.get("text") or "") for part in parts if part.get("type") == "text")
        if role == "user":
            found += _spoken("user", text)
        elif role == "assistant":
            found += _opencode_answer(text, [part for part in parts if part.get("type") == "tool"])
    return found


def _opencode_answer(text: str, tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return an answer with its calls, and their results behind it: a part of an export holds a call and its result."""
    answer: Message = {"role": "assistant", "content": text or None}
    results: list[Message] = []
    for part in tools:
        name, state = str(part.get("callID")), _dict(part.get("state"))
        arguments = json.dumps(state.get("input") or {}, ensure_ascii=False)
        answer.setdefault("tool_calls", []).append(_call(name, part.get("tool"), arguments))
        output = _text(state.get("output") or state.get("error"))
        results.append({"role": "tool", "tool_call_id": name, "content": output})
    return [answer, *results] if text or tools else []


def _model(values: Iterable[Any]) -> str:
    infos = (_dict(_dict(value).get("info")) for value in values)
    return next((str(info["modelID"]) for info in infos if info.get("modelID")), "")


_AIDER_START = re.compile(r"^# aider chat started at (.*)$", re.MULTILINE)


def _aider(name: str, text: str) -> Iterator[Session]:
    """A Markdown history: what the user typed stands behind ``####``, what aider printed behind ``>``."""
    starts = list(_AIDER_START.finditer(text))
    for at, start in enumerate(starts):
        end = starts[at + 1].start() if at + 1 < len(starts) else len(text)
        messages = _aider_messages(text[start.end() : end])
        yield Session(f"{name} {start[1]}".strip(), "", messages)


def _aider_messages(history: str) -> list[Message]:
    messages: list[Message] = []
    for line in history.splitlines():
        if line.startswith(">"):
            continue
        role = "user" if line.startswith("#### ") else "assistant"
        words = line.removeprefix("#### ")
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n{words}"
        elif words.strip():
            messages.append({"role": role, "content": words})
    return messages


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
