"""Are the tool calls of a chat conversation answered, each once and in its place?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def pair_violations(messages: Sequence[Message]) -> list[str]:
    """One sentence for each broken tool pair in *messages*; empty when every pair is whole and in place.

    A result must stand in the run of results directly behind the assistant message that made the call; every call
    must be answered, once, before that run ends. Ids may come again in another message, never twice in one.
    """
    violations: list[str] = []
    waiting: dict[str, None] = {}
    legacy = ""
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            call = str(message.get("tool_call_id"))
            if call in waiting:
                del waiting[call]
            else:
                violations.append(f"messages[{index}]: the result for {call!r} answers no open call right before it")
            continue
        if role == "function":
            if not legacy or message.get("name") != legacy:
                violations.append(f"messages[{index}]: the function result does not follow its function call")
            legacy = ""
            continue
        violations += _unanswered(waiting, before=index)
        waiting, legacy = {}, ""
        if role == "assistant":
            ids = [str(call.get("id")) for call in message.get("tool_calls") or ()]
            twice = [name for name, times in Counter(ids).items() if times > 1]
            violations += [f"messages[{index}]: the call id {name!r} occurs twice in one message" for name in twice]
            waiting = dict.fromkeys(ids)
            legacy = str((message.get("function_call") or {}).get("name", ""))
    return violations + _unanswered(waiting, before=len(messages))


def _unanswered(waiting: Mapping[str, None], before: int) -> list[str]:
    return [f"messages[{before}]: the call {name!r} was not answered before it" for name in waiting]


def block_violations(messages: Sequence[Message]) -> list[str]:
    """The same for ``/v1/messages``: every ``tool_use`` is answered first thing in the user turn behind it.

    Turns of one role in a row are one turn, as the provider has it.
    """
    violations: list[str] = []
    waiting: dict[str, None] = {}
    for index, (role, blocks) in enumerate(_turns(messages)):
        if role == "assistant":
            violations += _unanswered(waiting, before=index)
            ids = [str(block.get("id")) for block in blocks if block.get("type") == "tool_use"]
            twice = [name for name, times in Counter(ids).items() if times > 1]
            violations += [f"messages[{index}]: the call id {name!r} occurs twice in one message" for name in twice]
            waiting = dict.fromkeys(ids)
            continue
        spoken = False
        for block in blocks:
            if block.get("type") != "tool_result":
                spoken = True
                continue
            call = str(block.get("tool_use_id"))
            if call not in waiting:
                violations.append(f"messages[{index}]: the result for {call!r} answers no open call right before it")
            elif spoken:
                violations.append(f"messages[{index}]: the result for {call!r} stands behind something else")
            waiting.pop(call, None)
        violations += _unanswered(waiting, before=index + 1)
        waiting = {}
    return violations + _unanswered(waiting, before=len(messages))


def _turns(messages: Sequence[Message]) -> list[tuple[str, list[Message]]]:
    turns: list[tuple[str, list[Message]]] = []
    for message in messages:
        content = message.get("content")
        blocks = [b for b in content if isinstance(b, Mapping)] if isinstance(content, list) else [{"type": "text"}]
        if turns and turns[-1][0] == message.get("role"):
            turns[-1][1].extend(blocks)
        else:
            turns.append((str(message.get("role")), [*blocks]))
    return turns


def violations(items: Sequence[Message]) -> list[str]:
    """The same for the conversation of any API, which its elements show."""
    contents = [item["content"] for item in items if isinstance(item.get("content"), list)]
    kinds = {block.get("type") for content in contents for block in content if isinstance(block, Mapping)}
    if kinds & {"tool_use", "tool_result"}:
        return block_violations(items)
    if any("parts" in item for item in items):
        return content_violations(items)
    if any("type" in item for item in items):
        return item_violations(items)
    return pair_violations(items)


def content_violations(contents: Sequence[Message]) -> list[str]:
    """The same for Gemini's contents: the results of a content's calls are the next content, no more and no less.

    They meet by name, and by id where both have one. The first content is the user's.
    """
    problems: list[str] = []
    waiting: list[Message] = []
    if contents and contents[0].get("role", "user") != "user":
        problems.append("contents[0]: the conversation must begin with a user turn")
    for index, content in enumerate(contents):
        parts = content.get("parts") or ()
        results = [part.get("functionResponse", part.get("function_response")) for part in parts]
        results = [result for result in results if result is not None]
        if results and not waiting:
            problems.append(f"contents[{index}]: a function response turn must come right after a function call turn")
        elif len(results) != len(waiting):
            problems.append(f"contents[{index}]: the number of function response parts is not that of the calls")
        elif not _same_calls(waiting, results):
            problems.append(f"contents[{index}]: the function responses answer other calls")
        calls = [part.get("functionCall", part.get("function_call")) for part in parts]
        waiting = [call for call in calls if call is not None]
        if waiting and index and contents[index - 1].get("role") == "model":
            problems.append(f"contents[{index}]: a function call turn must come after a user or function response turn")
    if waiting:
        problems.append(f"contents[{len(contents)}]: the last function calls are not answered")
    return problems


def _same_calls(calls: Sequence[Message], results: Sequence[Message]) -> bool:
    if Counter(str(call.get("name")) for call in calls) != Counter(str(result.get("name")) for result in results):
        return False
    if not all(each.get("id") for each in (*calls, *results)):
        return True
    return {each["id"] for each in calls} == {each["id"] for each in results}


def item_violations(items: Sequence[Message]) -> list[str]:
    """The same for ``/v1/responses``: calls and results meet by id, and no reasoning stands without what came of it."""
    violations: list[str] = []
    waiting: dict[str, None] = {}
    for index, item in enumerate(items):
        kind, name = str(item.get("type", "message")), str(item.get("call_id"))
        if kind in CALLS:
            waiting[name] = None
        elif kind in RESULTS:
            if name not in waiting:
                violations.append(f"messages[{index}]: the result for {name!r} answers no open call right before it")
            waiting.pop(name, None)
        if kind == "reasoning" and (index + 1 == len(items) or _is_clients(items[index + 1])):
            violations.append(f"messages[{index}]: the reasoning stands without its required following item")
    return violations + _unanswered(waiting, before=len(items))


CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call"})
RESULTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})


def _is_clients(item: Message) -> bool:
    kind = str(item.get("type", "message"))
    return kind in RESULTS or (kind == "message" and item.get("role") != "assistant")
