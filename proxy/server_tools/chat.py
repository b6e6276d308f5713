"""Server tools over ``/v1/chat/completions``: the output of a generation is one assistant message.

The chunks of a stream: https://platform.openai.com/docs/api-reference/chat-streaming.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from proxy.core.apis.json_edit import json_bytes, to_json
from proxy.core.apis.json_steps import as_object, objects
from proxy.server_tools.events import written
from proxy.server_tools.merger import Call, Names, StreamMerger, with_texts
from proxy.server_tools.pieces import add_piece, assembled, assembled_members

_USUAL_MEMBERS: Final = ("role", "content", "tool_calls")
_MOST_OTHER_MEMBERS: Final = 32
"""Other members of a message that are searched in the body: a message with thousands would take seconds."""

_TRUNCATED: Final = frozenset({"length", "content_filter"})
"""Values of ``finish_reason`` after which the last call may be incomplete.

https://platform.openai.com/docs/api-reference/chat/object
"""


def output_of(answer: Mapping[str, Any]) -> Any:
    """Return the message of a whole answer; None if it has not exactly one choice."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    message = choices[0].get("message")
    if not isinstance(message, dict):
        return None
    return message


def is_truncated(answer: Mapping[str, Any]) -> bool:
    """True if the answer was broken off."""
    return str(answer["choices"][0].get("finish_reason")) in _TRUNCATED


def calls(output: Mapping[str, Any], names: Names) -> list[Call]:
    """Return the calls of a server tool in a message."""
    return [
        Call(str(call.get("id") or ""), str(call["function"]["name"]), _arguments(call))
        for call in _tool_calls(output)
        if _is_server_call(call, names)
    ]


def input_of(output: Mapping[str, Any], body: bytes) -> list[Any]:
    """Return the message to continue from. Unusual members are sent back if the client's body has such members, too."""
    others = [name for name, value in output.items() if name not in _USUAL_MEMBERS and value]
    sent_back = {name: output[name] for name in others[:_MOST_OTHER_MEMBERS] if json_bytes(name) in body}
    content = output.get("content") or None
    return [{"role": "assistant", "content": content, **sent_back, "tool_calls": _tool_calls(output)}]


def results(output: Mapping[str, Any], names: Names, texts: Sequence[str]) -> list[Any]:
    """Return a tool message for each call."""
    answered = with_texts(_tool_calls(output), lambda call: _is_server_call(call, names), texts)
    return [{"role": "tool", "tool_call_id": str(call.get("id") or ""), "content": text} for call, text in answered]


def merged(answer: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]], names: Names) -> dict[str, Any]:
    """Return the last answer, its text after that of the *earlier* messages, without calls of a server tool."""
    choice = answer["choices"][0]
    message = dict(choice["message"])
    texts = list(_texts([*earlier, message]))
    if len(texts) > 1 or (texts and not message.get("content")):
        message["content"] = _joined(texts)
    finish_reason = choice.get("finish_reason")
    if calls(message, names):
        finish_reason = _remove_server_calls(message, finish_reason, names)
    return {**answer, "choices": [{**choice, "message": message, "finish_reason": finish_reason}]}


def _remove_server_calls(message: dict[str, Any], finish_reason: Any, names: Names) -> Any:
    """Remove the calls of a server tool from *message*; return its finish reason without them."""
    remaining = [call for call in _tool_calls(message) if not _is_server_call(call, names)]
    message.pop("tool_calls")
    if remaining:
        message["tool_calls"] = remaining
        return finish_reason
    message["content"] = message.get("content") or ""
    if finish_reason == "tool_calls":
        return "stop"
    return finish_reason


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of *messages* that are not empty."""
    for message in messages:
        text = message.get("content")
        if isinstance(text, str) and text:
            yield text


def _joined(texts: Sequence[str]) -> str:
    before = ""
    parts: list[str] = []
    for text in texts:
        parts += [_gap(before), text]
        before = text
    return "".join(parts)


class ChatMerger(StreamMerger):
    """Merges chunks of assistant messages. All chunks get the id of the first generation.

    ``_calls`` are the calls of this generation in their order of arrival. ``_call_of_index`` maps an index of the
    stream to the position of the call that it currently means, ``_calls_of`` the identity of a buffered chunk to the
    positions of the calls that its pieces belong to.
    """

    calls_in = staticmethod(calls)

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._message: dict[str, Any] = {}
        self._calls: list[dict[str, Any]] = []
        self._call_of_index: dict[Any, int] = {}
        self._calls_of: dict[int, list[int]] = {}
        self._new_indexes: dict[int, int] | None = None
        self._head: dict[str, Any] = {}
        self._role_sent = False
        self._text_before = ""

    @property
    def output(self) -> dict[str, Any]:
        """The message so far."""
        message = assembled_members(self._message)
        if self._calls:
            message["tool_calls"] = list(map(assembled_members, self._calls))
        return message

    def _note(self, value: dict[str, Any]) -> None:
        self.failed = self.failed or bool(value.get("error"))
        choice = _choice(value)
        if choice and not self._head:
            self._head = {name: value[name] for name in ("id", "created") if name in value}
        if isinstance(value.get("usage"), dict):
            self.usage = value["usage"]
        self.truncated = self.truncated or str(choice.get("finish_reason")) in _TRUNCATED
        self._add_delta(value)

    def _add_delta(self, value: dict[str, Any]) -> None:
        """Add the delta of a chunk to the message."""
        for name, member in _delta(value).items():
            if name == "tool_calls":
                self._calls_of[id(value)] = [self._note_piece(piece) for piece in objects(member)]
            elif member is not None:
                self._message[name] = add_piece(name, self._message.get(name), member)

    def _note_piece(self, piece: dict[str, Any]) -> int:
        """Add *piece* to the call that it belongs to; return that call's position.

        Some servers give every call the same index, so a new id begins a new call as well.
        """
        index, call_id = piece.get("index"), piece.get("id")
        key = None
        if isinstance(index, int | str):
            key = index
        position = self._call_of_index.get(key, -1)
        if position < 0 or (call_id and self._calls[position].get("id") not in (None, "", call_id)):
            position = self._call_of_index[key] = len(self._calls)
            self._calls.append({"index": index})
        call = self._calls[position]
        for name, member in piece.items():
            if member is not None and name != "index":
                call[name] = add_piece(name, call.get(name), member)
        return position

    def _starts_buffering(self, value: dict[str, Any]) -> bool:
        return bool(_delta(value).get("tool_calls"))

    def _passed(self, value: dict[str, Any]) -> None:
        self._role_sent = self._role_sent or "role" in _delta(value)
        self._calls_of.pop(id(value), None)

    def _rewritten(self, value: dict[str, Any]) -> bytes:
        choice, delta = _choice(value), dict(_delta(value))
        positions = self._calls_of.pop(id(value), [])
        self._continue(delta)
        finish_reason = choice.get("finish_reason")
        if self._without_server_calls:
            self._remove_server_calls(delta, positions)
            if finish_reason == "tool_calls" and not self._indexes():
                finish_reason = "stop"
        says_something = any(delta.values()) or finish_reason is not None or value.get("usage")
        if choice and not says_something:
            return b""
        chunk = {**value, **{name: member for name, member in self._head.items() if name in value}}
        if choice:
            chunk["choices"] = [{**choice, "delta": delta, "finish_reason": finish_reason}]
        return written(chunk)

    def _continue(self, delta: dict[str, Any]) -> None:
        """Make *delta* follow what was sent before it: the role is sent once, a second text begins a paragraph."""
        if self._role_sent:
            delta.pop("role", None)
        self._role_sent = self._role_sent or "role" in delta
        if isinstance(delta.get("content"), str) and delta["content"]:
            delta["content"] = _gap(self._text_before) + delta["content"]
            self._text_before = ""

    def _remove_server_calls(self, delta: dict[str, Any], positions: Sequence[int]) -> None:
        """Remove a server tool's calls from *delta*, whose pieces belong to *positions*, and number the rest anew."""
        if "tool_calls" not in delta:
            return
        indexes = self._indexes()
        pieces = zip(objects(delta.pop("tool_calls")), positions, strict=True)
        remaining = [{**piece, "index": indexes[position]} for piece, position in pieces if position in indexes]
        if remaining:
            delta["tool_calls"] = remaining

    def _indexes(self) -> dict[int, int]:
        """Return the new index of each call of the client's tools, by its position. Calls behind the end have none."""
        if self._new_indexes is None:
            calls = enumerate(self._calls)
            remaining = [
                position for position, call in calls if not _is_server_call(assembled_members(call), self.names)
            ]
            self._new_indexes = {position: index for index, position in enumerate(remaining)}
        return self._new_indexes

    def _reset(self) -> None:
        text = assembled(self._message.get("content"))
        if isinstance(text, str) and text:
            self._text_before = text
        self._message, self._calls = {}, []
        self._call_of_index, self._calls_of, self._new_indexes = {}, {}, None


new_stream = ChatMerger
"""Makes the merger for the stream of a new answer."""


def _choice(value: Mapping[str, Any]) -> dict[str, Any]:
    choices = value.get("choices")
    if not isinstance(choices, list) or not choices:
        return {}
    return as_object(choices[0])


def _delta(value: Mapping[str, Any]) -> dict[str, Any]:
    return as_object(_choice(value).get("delta"))


def _tool_calls(output: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of a message as they go back: without their index in a stream."""
    tool_calls = []
    for call in objects(output.get("tool_calls")):
        members = {name: member for name, member in call.items() if name != "index"}
        tool_calls.append({"type": "function", **members})
    return tool_calls


def _is_server_call(call: Mapping[str, Any], names: Names) -> bool:
    function = call.get("function")
    return isinstance(function, dict) and function.get("name") in names


def _arguments(call: Mapping[str, Any]) -> str:
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        return arguments
    if not arguments:
        return ""
    return to_json(arguments)


def _gap(before: str) -> str:
    """Return the separator between the texts of two generations, so that the second begins a paragraph."""
    if not before or before[-1].isspace():
        return ""
    return "\n\n"
