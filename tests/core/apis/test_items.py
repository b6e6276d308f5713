"""Messages of one text read as any other; digests are equal for equal meaning, different for anything else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.apis.chat import read_item
from proxy.core.apis.items import DEEPEST, IGNORED, digest, text_message
from proxy.core.apis.json_steps import ONE_CALL
from proxy.core.conversation import HASH_BYTES
from tests.support import conversation_strategies
from tests.support.api_cases import APIS
from tests.support.engine_fixtures import count_tokens

Message = dict[str, Any]

CALL: Message = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "because",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": '{"command":"ls","n":[1,2]}'}}
    ],
}
SAID: Message = {"role": "user", "content": "hello", "name": "ann"}
PARTS: Message = {
    "role": "user",
    "content": [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "call_1", "content": "done"}


def changed(message: Message, change: Callable[[Message], object]) -> Message:
    made = copy.deepcopy(message)
    change(made)
    return made


def set_arguments(text: str) -> Callable[[Message], object]:
    return lambda message: message["tool_calls"][0]["function"].update(arguments=text)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (CALL, set_arguments('{ "command": "ls",\n "n": [1, 2] }')),
        (CALL, set_arguments('{"n":[1,2],"command":"l\\u0073"}')),
        (CALL, lambda m: m.update(content="")),
        (CALL, lambda m: m.pop("content")),
        (CALL, lambda m: m.update(content=[])),
        (CALL, lambda m: m.update(refusal=None, annotations=[], audio=None, function_call=None)),
        (CALL, lambda m: m.update(annotations=[{"type": "url_citation"}], provider_specific_fields={"x": 1})),
        (CALL, lambda m: m["tool_calls"][0].update(cache_control={"type": "ephemeral"})),
        (CALL, lambda m: m["tool_calls"][0]["function"].update(provider_specific_fields={"a": 1})),
        (CALL, lambda m: m.update(dict(reversed(m.items())))),
        (SAID, lambda m: m.update(content=[{"type": "text", "text": "hello"}])),
        (SAID, lambda m: m.update(content=[{"text": "hello", "type": "text", "cache_control": {"type": "ephemeral"}}])),
        (SAID, lambda m: m.update(tool_calls=[])),
        (RESULT, lambda m: m.update(content=[{"type": "text", "text": "done"}])),
        (PARTS, lambda m: m["content"][1].update(cache_control={"type": "ephemeral"})),
    ],
)
def test_what_clients_change_when_they_echo(message: Message, change: Callable[[Message], object]) -> None:
    """Spacing and key order, nulls, empty and missing values, markers and notes do not change an item."""
    made = changed(message, change)
    assert digest(made) == digest(message)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (CALL, set_arguments('{"command":"ls","n":[2,1]}')),
        (CALL, set_arguments('{"command":"ls ","n":[1,2]}')),
        (CALL, set_arguments('{"command":"ls"}')),
        (CALL, set_arguments("not json")),
        (CALL, set_arguments("")),
        (CALL, lambda m: m["tool_calls"][0].update(id="call_2")),
        (CALL, lambda m: m["tool_calls"][0]["function"].update(name="walk")),
        (CALL, lambda m: m["tool_calls"].append(copy.deepcopy(m["tool_calls"][0]))),
        (CALL, lambda m: m.update(reasoning_content="why")),
        (CALL, lambda m: m.pop("reasoning_content")),
        (CALL, lambda m: m.update(content="text")),
        (CALL, lambda m: m.update(refusal="no")),
        (SAID, lambda m: m.update(role="assistant")),
        (SAID, lambda m: m.update(content="hello ")),
        (SAID, lambda m: m.update(content=[{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}])),
        (SAID, lambda m: m.update(name="bob")),
        (SAID, lambda m: m.update(x_vendor=0)),
        (SAID, lambda m: m.update(x_vendor=False)),
        (RESULT, lambda m: m.update(tool_call_id="call_2")),
        (PARTS, lambda m: m["content"].reverse()),
        (PARTS, lambda m: m["content"][1]["image_url"].update(url="data:image/png;base64,AAAB")),
        (PARTS, lambda m: m["content"][1]["image_url"].update(detail="high")),
        (PARTS, lambda m: m["content"].pop()),
    ],
)
def test_any_change_of_meaning_is_another_item(message: Message, change: Callable[[Message], object]) -> None:
    """Role, words, names, ids, argument values, reasoning, media, unknown members and their order all count."""
    made = changed(message, change)
    assert made != message
    assert digest(made) != digest(message)


def echoed(message: Message, data: st.DataObject) -> Message:
    """*message* as some client might send it back: re-serialised, with other empty values and notes."""
    made = copy.deepcopy(message)
    for call in made.get("tool_calls", ()):
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            continue
        call["function"]["arguments"] = json.dumps(arguments, indent=data.draw(st.sampled_from([None, 1])))
    if not made.get("content"):
        made["content"] = data.draw(st.sampled_from([None, "", []]))
    elif isinstance(made["content"], str) and data.draw(st.booleans()):
        made["content"] = [{"type": "text", "text": made["content"]}]
    for key in data.draw(st.lists(st.sampled_from(sorted(IGNORED)), unique=True)):
        made[key] = {"x": [1]}
    return dict(data.draw(st.permutations(list(made.items()))))


@settings(max_examples=80)
@given(conversation_strategies.conversations(legacy=False), st.data())
@pytest.mark.slow
def test_an_echo_means_the_same(messages: list[Message], data: st.DataObject) -> None:
    """An item that a client serialises in another way has the same digest."""
    for message in messages:
        echo = data.draw(st.just(echoed(message, data)))
        written = conversation_strategies.encode(data.draw, echo)  # type: ignore[arg-type]
        assert read_item(written, len).digest == digest(message)


@settings(max_examples=80)
@given(conversation_strategies.conversations(with_orphans=True))
@pytest.mark.slow
def test_different_items_have_different_digests(messages: list[Message]) -> None:
    """Two items of a conversation share a digest only where they say the same."""

    def meaning(message: Message) -> str:
        plain = {key: value for key, value in message.items() if value not in (None, "", [])}
        if isinstance(plain.get("content"), str):
            plain["content"] = [{"type": "text", "text": plain["content"]}]
        elif "content" in plain:
            plain["content"] = [{k: v for k, v in part.items() if k != "cache_control"} for part in plain["content"]]
        return json.dumps(plain, sort_keys=True)

    by_digest: dict[bytes, str] = {}
    for message in messages:
        made = meaning(message)
        known = by_digest.setdefault(digest(message), made)
        if "arguments" not in made:
            assert known == made
    assert all(len(name) == HASH_BYTES for name in by_digest)


def test_what_nests_too_deeply_has_no_digest() -> None:
    """Beyond so many levels an item is refused, whatever the interpreter could still take."""
    for wrap in (lambda value: {"a": value}, lambda value: [value]):
        value: Any = "x"
        for _ in range(DEEPEST - 2):
            value = wrap(value)
        assert len(digest({"content": value})) == HASH_BYTES
        for _ in range(10):
            value = wrap(value)
        with pytest.raises(RecursionError):
            digest({"content": value})


@pytest.mark.parametrize("api", APIS)
@settings(max_examples=100)
@given(
    st.sampled_from(["user", "assistant", "system", "developer", "tool", "function", "other", "", None, 3, ["user"]]),
    st.one_of(st.text(max_size=40), st.sampled_from(["# Memory\nlikes tea\n# Task\ngo", "\ud800", None, [], 7])),
    st.sampled_from([None, "message", "reasoning", ""]),
)
def test_a_message_of_one_text_is_read_as_any_other(api: str, role: Any, content: Any, kind: str | None) -> None:
    """An ignored member takes the general way through a message: the item and its words stay the same."""
    message = {"role": role, "content": content} | ({} if kind is None else {"type": kind})
    module = APIS[api].module
    raw, longer = (json.dumps(each).encode() for each in (message, message | {"cache_control": None}))
    assert module.read_item(raw, count_tokens) == module.read_item(longer, count_tokens)
    assert module.read_item_text(raw) == module.read_item_text(longer)


def test_only_a_role_and_a_text_are_such_a_message() -> None:
    """Another member, another type of content, a result or an empty text take the general way."""
    roles = {"assistant": "assistant", "tool": "tool"}
    assert text_message({"role": "ann", "content": "a"}, roles) == ("user", "a")
    assert text_message({"role": "assistant", "content": "a", "type": "message"}, roles) == ("assistant", "a")
    others: list[Message] = [PARTS, RESULT, {"role": "tool", "content": "a"}, {"role": "user", "content": ""}]
    others += [{"role": "", "content": "a"}, {"content": "a"}, {"role": "user", "content": "a" * (ONE_CALL + 1)}]
    assert [text_message(message, roles) for message in others] == [None] * len(others)
    said, unnamed = (
        read_item(json.dumps(message).encode(), count_tokens)
        for message in (SAID, {"role": "user", "content": "hello"})
    )
    assert said.tokens > unnamed.tokens
    assert said.digest != unnamed.digest
