"""Reads past conversations from the session files of clients, as messages of the chat API.

It reads JSON and JSON Lines of OpenAI requests, and the session files of Claude Code, Codex, opencode (its export),
Cline, Roo and Aider. Lines that are no message are left out; those that are no JSON are counted, too.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from proxy.core.apis.json_steps import as_object, objects

Message = dict[str, Any]

_ROLES: Final = frozenset({"user", "assistant"})


@dataclass(frozen=True, slots=True)
class Session:
    """A past conversation as a client of the chat API would have sent it; ``model`` is empty if it is not known."""

    name: str
    model: str
    messages: Sequence[Message]
    tools: Sequence[Message] = ()


class SessionFile(NamedTuple):
    """The conversations in the file called ``name``, and the number of its ``broken`` lines, which are no JSON."""

    name: str
    sessions: Sequence[Session]
    broken: int = 0


def read_file(name: str, text: str) -> SessionFile:
    """Return the conversations with at least one answer in the file called *name*; none if its format is not known."""
    if name.endswith(".md"):
        return _with_answers(SessionFile(name, list(_aider(name, text))))
    values, broken = _json_values(text)
    return _with_answers(SessionFile(name, _from_json(name, values), broken))


def _with_answers(file: SessionFile) -> SessionFile:
    return file._replace(sessions=[session for session in file.sessions if _has_answer(session)])


def utf8_of(data: bytes) -> bytes:
    """Return the *data* of a JSON file in UTF-8 and without a byte order mark.

    Editors and shells of Windows write a mark, or UTF-16.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    encoding = json.detect_encoding(data)
    if encoding == "utf-8":
        return data
    return data.decode(encoding, "replace").encode("utf-8", "replace")


def _has_answer(session: Session) -> bool:
    return any(message["role"] == "assistant" for message in session.messages)


def _json_values(text: str) -> tuple[list[Any], int]:
    """Return the value of a JSON file, or those of the lines of a JSON Lines file, and the number of broken lines."""
    document = _decoded(text)
    if document is not None:
        return [document], 0
    # Not ``splitlines``: it ends a line at U+2028 and the like, too, which JSON may hold as they are.
    values = [_decoded(line) for line in text.split("\n") if line.strip() not in ("", "null")]
    return [value for value in values if value is not None], values.count(None)


def _from_json(name: str, values: Sequence[Any]) -> list[Session]:
    """Return the conversations in *values*, whose format is recognised by the members of its rows."""
    if len(values) == 1 and isinstance(values[0], list):
        return [Session(name, "", _messages(values[0]))]
    rows = objects(values)
    types = {str(row.get("type")) for row in rows}
    # Codex writes rollout files of {type, payload} (https://github.com/openai/codex), Claude Code rows with a message.
    if types & {"session_meta", "response_item"}:
        return _codex(name, [(str(row.get("type")), as_object(row.get("payload"))) for row in rows])
    if any(isinstance(row.get("message"), dict) for row in rows):
        return _claude_code(name, rows)
    requests = list(_requests(name, rows))
    if not requests and types & {"message", "function_call"}:  # Codex without an envelope around its items
        return _codex(name, [("response_item", row) for row in rows])
    return requests


def _requests(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Session]:
    """Yield the logged requests of *rows*, without those that the next one continues."""
    # A client sends the whole conversation with every request: only the last request of each conversation counts.
    previous: Session | None = None
    for number, row in enumerate(rows, 1):
        request = _request(row)
        if not request:
            continue
        label = str(row.get("id") or as_object(row.get("info")).get("id") or f"{name}:{number}")
        session = _request_session(label, request)
        if previous is not None and not _continues(session.messages, previous.messages):
            yield previous
        previous = session
    if previous is not None:
        yield previous


def _request(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the request in a row: the row itself, or a member of a log's or batch file's row; empty without one."""
    for candidate in (row, row.get("request"), row.get("body"), as_object(row.get("params")).get("body")):
        if isinstance(candidate, dict) and isinstance(candidate.get("messages"), list):
            return candidate
    return {}


def _request_session(name: str, request: Mapping[str, Any]) -> Session:
    values = request["messages"]
    model = str(request.get("model") or _opencode_model(values))
    return Session(name, model, _opencode(values) or _messages(values), objects(request.get("tools")))


def _continues(messages: Sequence[Message], earlier: Sequence[Message]) -> bool:
    return list(messages[: len(earlier)]) == list(earlier)


def _messages(values: Iterable[Any]) -> list[Message]:
    """Return chat messages as they are, and messages of the Messages API as chat messages."""
    messages: list[Message] = []
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("role"), str):
            continue
        if _has_blocks(value.get("content")):
            messages.extend(_from_blocks(value))
        else:
            messages.append(value)
    return messages


def _has_blocks(content: Any) -> bool:
    types = {"tool_use", "tool_result", "thinking", "redacted_thinking"}
    return any(part.get("type") in types for part in objects(content))


def _from_blocks(message: Mapping[str, Any]) -> list[Message]:
    """Return the chat messages for one message made of blocks: a message for each tool result, then the rest."""
    results: list[Message] = []
    calls: list[Message] = []
    for part in objects(message.get("content")):
        if part.get("type") == "tool_result":
            results.append(_tool_message(part.get("tool_use_id"), part.get("content")))
        elif part.get("type") == "tool_use":
            calls.append(_call(part.get("id"), part.get("name"), part.get("input") or {}))
    text = _text(message.get("content"))
    if not text and not calls:
        return results
    return [*results, _message(str(message["role"]), text, calls)]


def _message(role: str, text: str, calls: Sequence[Message]) -> Message:
    message: Message = {"role": role, "content": text or None}
    if calls:
        message["tool_calls"] = [*calls]
    return message


def _call(call_id: Any, name: Any, arguments: Any) -> Message:
    """Return a tool call; *arguments* are JSON as a text, or a value."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": str(call_id), "type": "function", "function": {"name": str(name), "arguments": arguments}}


def _tool_message(call_id: Any, content: Any) -> Message:
    return {"role": "tool", "tool_call_id": str(call_id), "content": _text(content)}


def _claude_code(name: str, rows: Sequence[Mapping[str, Any]]) -> list[Session]:
    """Return the main conversation and those of sub-agents.

    After the client's own compaction a new conversation begins.
    """
    threads: dict[tuple[str, int], _Thread] = {}
    compactions: dict[str, int] = {}
    for row in rows:
        message = as_object(row.get("message"))
        if row.get("type") not in _ROLES or message.get("role") not in _ROLES:
            continue
        agent = ""
        if row.get("isSidechain"):
            agent = str(row.get("agentId") or "sub-agent")
        compactions[agent] = compactions.get(agent, 0) + bool(row.get("isCompactSummary"))
        threads.setdefault((agent, compactions[agent]), _Thread()).add(message)
    return [
        Session(_thread_name(name, agent, count), thread.model, thread.messages)
        for (agent, count), thread in threads.items()
    ]


def _thread_name(name: str, agent: str, compactions: int) -> str:
    parts = [name, agent, str(compactions or "")]
    return "/".join(part for part in parts if part)


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
        message_id = str(message.get("id") or "")
        for chat_message in _from_blocks(message):
            if message_id and message_id == self.last_id and chat_message["role"] == "assistant":
                self.messages[-1] = _joined(self.messages[-1], chat_message)
            else:
                self.messages.append(chat_message)
            self.last_id = message_id


def _joined(first: Message, second: Message) -> Message:
    texts = [message["content"] for message in (first, second) if message.get("content")]
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return _message("assistant", "\n".join(texts), calls)


def _codex(name: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Session]:
    """Return the conversations in items of the Responses API, given as (type, payload).

    After the client's own compaction a new conversation begins.
    """
    conversations: list[list[Message]] = [[]]
    model, instructions = "", ""
    for row_type, payload in rows:
        match row_type:
            case "session_meta":
                instructions = _instructions(payload)
            case "turn_context":
                model = str(payload.get("model") or model)
            case "compacted":
                conversations.append(_text_message("user", payload.get("message")))
            case "response_item":
                _add_item(conversations[-1], payload)
    system = _text_message("system", instructions)
    return [
        Session(_thread_name(name, "", number), model, [*system, *messages])
        for number, messages in enumerate(conversations)
    ]


def _instructions(meta: Mapping[str, Any]) -> str:
    """Return the system text that a Codex session begins with: a text, or an object that holds one."""
    instructions = meta.get("base_instructions") or meta.get("instructions")
    if isinstance(instructions, dict):
        instructions = instructions.get("text")
    return str(instructions or "")


def _text_message(role: str, text: Any) -> list[Message]:
    """Return a list with a message of *text*; an empty list if there is no text."""
    if not text:
        return []
    return [{"role": role, "content": str(text)}]


def _add_item(messages: list[Message], item: Mapping[str, Any]) -> None:
    """Add one item to *messages*; a call joins the assistant message before it."""
    match item.get("type"):
        case "message" if isinstance(item.get("role"), str):
            messages.append({"role": item["role"], "content": _text(item.get("content"))})
        case "function_call" | "custom_tool_call" | "local_shell_call":
            arguments = item.get("arguments", item.get("input", item.get("action")))
            call = _call(item.get("call_id") or item.get("id"), item.get("name") or "shell", arguments)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
        case "function_call_output" | "custom_tool_call_output":
            messages.append(_tool_message(item.get("call_id"), item.get("output")))


def _opencode(values: Iterable[Any]) -> list[Message]:
    """Return the messages of an export, each with its ``info`` and its ``parts``; none if it is no export."""
    messages: list[Message] = []
    for value in values:
        role = str(as_object(as_object(value).get("info")).get("role"))
        parts = objects(as_object(value).get("parts"))
        text = "\n".join(str(part.get("text") or "") for part in parts if part.get("type") == "text")
        if role == "user":
            messages.extend(_text_message("user", text))
        elif role == "assistant":
            messages.extend(_opencode_answer(text, [part for part in parts if part.get("type") == "tool"]))
    return messages


def _opencode_answer(text: str, tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return an answer with its calls, then their results: a part of an export holds a call and its result."""
    calls, results = [], []
    for part in tools:
        state = as_object(part.get("state"))
        calls.append(_call(part.get("callID"), part.get("tool"), state.get("input") or {}))
        results.append(_tool_message(part.get("callID"), state.get("output") or state.get("error")))
    if not text and not calls:
        return []
    return [_message("assistant", text, calls), *results]


def _opencode_model(values: Iterable[Any]) -> str:
    """Return the first model that an export names; empty if it names none."""
    infos = (as_object(as_object(value).get("info")) for value in values)
    return next((str(info["modelID"]) for info in infos if info.get("modelID")), "")


_AIDER_START: Final = re.compile(r"^# aider chat started at (.*)$", re.MULTILINE)


def _aider(name: str, text: str) -> Iterator[Session]:
    """Yield the conversations of a Markdown history, one for each start of the program."""
    _, *pieces = _AIDER_START.split(text)
    for started, history in zip(pieces[::2], pieces[1::2], strict=True):
        yield Session(f"{name} {started}".strip(), "", _aider_messages(history))


def _aider_messages(history: str) -> list[Message]:
    """Return the messages of a history: ``####`` marks the user's lines, ``>`` the program's own output."""
    messages: list[Message] = []
    for line in history.splitlines():
        if line.startswith(">"):
            continue
        role = "assistant"
        if line.startswith("#### "):
            role = "user"
        words = line.removeprefix("#### ")
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n{words}"
        elif words.strip():
            messages.append({"role": role, "content": words})
    return messages


def _text(content: Any) -> str:
    """Return *content* as a text: itself, the texts of its parts, or JSON."""
    if isinstance(content, str):
        return content
    parts = objects(content)
    if parts or content in (None, []):
        return "\n".join(str(part["text"]) for part in parts if isinstance(part.get("text"), str))
    return json.dumps(content, ensure_ascii=False)


def _decoded(text: str) -> Any:
    """Return the value of the JSON *text*; None if it is empty or no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
