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
    found: list[str] = []
    waiting: dict[str, None] = {}
    legacy = ""
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            call = str(message.get("tool_call_id"))
            if call in waiting:
                del waiting[call]
            else:
                found.append(f"messages[{index}]: the result for {call!r} answers no open call right before it")
            continue
        if role == "function":
            if not legacy or message.get("name") != legacy:
                found.append(f"messages[{index}]: the function result does not follow its function call")
            legacy = ""
            continue
        found += _unanswered(waiting, before=index)
        waiting, legacy = {}, ""
        if role == "assistant":
            ids = [str(call.get("id")) for call in message.get("tool_calls") or ()]
            twice = [name for name, times in Counter(ids).items() if times > 1]
            found += [f"messages[{index}]: the call id {name!r} occurs twice in one message" for name in twice]
            waiting = dict.fromkeys(ids)
            legacy = str((message.get("function_call") or {}).get("name", ""))
    return found + _unanswered(waiting, before=len(messages))


def _unanswered(waiting: Mapping[str, None], before: int) -> list[str]:
    return [f"messages[{before}]: the call {name!r} was not answered before it" for name in waiting]
