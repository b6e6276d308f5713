"""One conversation in the form of each API: chat messages, and the same as the other APIs spell it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.stub import gemini
from tests.stub.messages import signature
from tests.support.sample_conversations import AGENT_TOOLS

Message = dict[str, Any]

SYSTEMS = ("system", "developer")


def text_of_content(content: Any) -> str:
    """The words of a chat message's content."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def system_of(chat: Sequence[Message]) -> str:
    """The operator's words of a conversation."""
    return "\n\n".join(text_of_content(message["content"]) for message in chat if message["role"] in SYSTEMS)


def to_messages(chat: Sequence[Message], *, mixed: bool = False) -> list[Message]:
    """The conversation as Messages: results in user turns; with *mixed* the user's next words stand beside them."""
    converted: list[Message] = []
    for message in chat:
        role = message["role"]
        if role == "assistant":
            converted.append({"role": "assistant", "content": _model_blocks(message)})
        elif role in ("tool", "function"):
            block = {"type": "tool_result", "tool_use_id": _id(message), "content": _result(message["content"])}
            if converted and _answers(converted[-1]):
                converted[-1]["content"].append(block)
            else:
                converted.append({"role": "user", "content": [block]})
        elif role not in SYSTEMS:
            content = _user_blocks(message["content"])
            if mixed and converted and _answers(converted[-1]):
                converted[-1]["content"] += [{"type": "text", "text": content}] if isinstance(content, str) else content
            else:
                converted.append({"role": "user", "content": content})
    return converted


def to_responses(chat: Sequence[Message]) -> list[Message]:
    """The conversation as input items of Responses; the operator's words stand elsewhere."""
    converted: list[Message] = []
    for at, message in enumerate(chat):
        role = message["role"]
        if role == "assistant":
            converted += _model_items(message, at)
        elif role in ("tool", "function"):
            converted.append(
                {"type": "function_call_output", "call_id": _id(message), "output": text_of_content(message["content"])}
            )
        elif role not in SYSTEMS:
            converted.append({"type": "message", "role": "user", "content": _input_parts(message["content"])})
    return converted


def to_gemini(chat: Sequence[Message]) -> list[Message]:
    """The conversation as Gemini's contents: all results of a content's calls in one; thoughts are signed."""
    converted: list[Message] = []
    names: dict[str, str] = {}
    for message in chat:
        role = message["role"]
        if role == "assistant":
            converted.append({"role": "model", "parts": _model_parts(message, names)})
        elif role in ("tool", "function"):
            name = names.get(_id(message), message.get("name", "unknown"))
            part = {"functionResponse": {"name": name, "response": {"output": text_of_content(message["content"])}}}
            if converted and _is_results(converted[-1]):
                converted[-1]["parts"].append(part)
            else:
                converted.append({"role": "user", "parts": [part]})
        elif role not in SYSTEMS:
            converted.append({"role": "user", "parts": _user_parts(message["content"])})
    return converted


def _model_parts(message: Message, names: dict[str, str]) -> list[Message]:
    parts: list[Message] = [{"text": text} for text in _texts(message.get("content")) if text]
    calls = _calls(message)
    for call in calls:
        names[call["id"]] = call["function"]["name"]
        parts.append({"functionCall": {"name": call["function"]["name"], "args": _input(call["function"])}})
    if calls and (message.get("reasoning_content") or message.get("reasoning")):
        parts[-len(calls)] = gemini.sealed(parts[-len(calls)])
    return parts or [{"text": "-"}]


def _user_parts(content: Any) -> list[Message]:
    if isinstance(content, str):
        return [{"text": content}]
    return [_inline(part) if part["type"] == "image_url" else {"text": part["text"]} for part in content]


def _inline(part: Message) -> Message:
    source = _image(part)["source"]
    return {"inlineData": {"mimeType": source["media_type"], "data": source["data"]}}


def _is_results(content: Mapping[str, Any]) -> bool:
    return any("functionResponse" in part for part in content["parts"])


def tools_of(tools: Sequence[Message], api: str) -> list[Message]:
    """Chat's function *tools* in the form of *api*."""
    functions = [tool["function"] for tool in tools]
    if api == "gemini":
        return [{"functionDeclarations": functions}]
    if api == "messages":
        return [{**_but(f, "parameters"), "input_schema": f["parameters"]} for f in functions]
    return [{"type": "function", **f} for f in functions] if api == "responses" else list(tools)


def request_body(api: str, chat: Sequence[Message], tools: Sequence[Message] = (), **members: Any) -> Message:
    """A whole request of *api* that says what *chat* says; *members* are the API's own."""
    body: Message = {"model": "gpt-4o-mini", **members}
    system = system_of(chat)
    if api == "chat":
        body["messages"] = list(chat)
    elif api == "messages":
        body = {"max_tokens": 64, **body, "messages": to_messages(chat)}
        body |= {"system": system} if system else {}
    elif api == "gemini":
        del body["model"]  # the path names it
        body["contents"] = to_gemini(chat)
        body |= {"systemInstruction": {"parts": [{"text": system}]}} if system else {}
    else:
        body["input"] = to_responses(chat)
        body |= {"instructions": system} if system else {}
    return {**body, "tools": tools_of(tools, api)} if tools else body


def next_request(api: str, talk: Sequence[Message]) -> Message:
    """A request of *api* for the next answer, with an output figure that stays the same."""
    figure = "max_output_tokens" if api == "responses" else "max_tokens"
    return request_body(api, talk, AGENT_TOOLS, **{figure: 256})


def kind_of(item: Mapping[str, Any]) -> str:
    """What an element of any API is to a conversation: system, user, assistant or tool."""
    role, kind = item.get("role"), str(item.get("type", "message"))
    if "parts" in item:
        if role == "model":
            return "assistant"
        return "tool" if _is_results(item) else "user"
    if kind != "message":
        return "tool" if kind.endswith("_output") else "assistant"
    if role in ("function", "tool"):
        return "tool"
    if role in SYSTEMS:
        return "system"
    return "tool" if role == "user" and _answers(item) else str(role)


def text_of(item: Mapping[str, Any]) -> str:
    """All text an element of any API shows, results included."""
    if "parts" in item:
        results = [part["functionResponse"]["response"] for part in item["parts"] if "functionResponse" in part]
        texts = [part["text"] for part in item["parts"] if "text" in part]
        return "\n".join([*texts, *(str(text) for result in results for text in result.values())])
    return "\n".join(_texts(item.get("content", item.get("output"))))


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts: list[str] = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping):
            texts += [part["text"]] if isinstance(part.get("text"), str) else _texts(part.get("content"))
    return texts


def _answers(item: Mapping[str, Any]) -> bool:
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, Mapping) and part.get("type") == "tool_result" for part in parts)


def _model_blocks(message: Message) -> list[Message]:
    blocks: list[Message] = []
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought:
        blocks.append({"type": "thinking", "thinking": thought, "signature": signature(thought)})
    blocks += [{"type": "text", "text": text} for text in _texts(message.get("content")) if text]
    for call in _calls(message):
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function)})
    return blocks or [{"type": "text", "text": "-"}]


def _model_items(message: Message, at: int) -> list[Message]:
    items: list[Message] = []
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought:
        summary = [{"type": "summary_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{at}", "summary": summary, "encrypted_content": "Z" * 900})
    texts = [text for text in _texts(message.get("content")) if text]
    if texts or not _calls(message):
        parts = [{"type": "output_text", "text": text} for text in texts or ["-"]]
        items.append({"type": "message", "role": "assistant", "content": parts})
    for call in _calls(message):
        items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def _calls(message: Message) -> list[Message]:
    calls = [{"id": _name(call["id"]), "function": call["function"]} for call in message.get("tool_calls") or ()]
    legacy = message.get("function_call")
    return calls + ([{"id": _name("function:" + legacy["name"]), "function": legacy}] if legacy else [])


def _id(message: Message) -> str:
    return _name(message["tool_call_id"] if message["role"] == "tool" else "function:" + message["name"])


def _name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _input(function: Message) -> Any:
    try:
        value = json.loads(function["arguments"])
    except ValueError:
        value = function["arguments"]
    return value if isinstance(value, dict) else {"value": value}


def _result(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": text} for text in _texts(content) if text]


def _user_blocks(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [_image(part) if part["type"] == "image_url" else part for part in content]


def _image(part: Message) -> Message:
    head, _, data = part["image_url"]["url"].partition(",")
    source = {"type": "base64", "media_type": head.removeprefix("data:").partition(";")[0], "data": data}
    return {"type": "image", "source": source}


def _input_parts(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [_input_image(part["image_url"]) if part["type"] == "image_url" else _input_text(part) for part in content]


def _input_text(part: Message) -> Message:
    return {"type": "input_text", "text": part["text"]}


def _input_image(image: Message) -> Message:
    return {"type": "input_image", "image_url": image["url"], "detail": image.get("detail", "auto")}


def _but(value: Message, key: str) -> Message:
    return {name: member for name, member in value.items() if name != key}


def answered_calls(item: Mapping[str, Any]) -> list[str]:
    """The ids of the calls whose results an element of any API holds."""
    if "tool_call_id" in item:
        return [str(item["tool_call_id"])]
    if str(item.get("type")).endswith("_output"):
        return [str(item.get("call_id"))]
    if "parts" in item:
        return [part["functionResponse"]["name"] for part in item["parts"] if "functionResponse" in part]
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    return [str(part.get("tool_use_id")) for part in parts if part.get("type") == "tool_result"]
