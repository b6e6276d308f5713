"""Hypothesis strategies for chat conversations as clients really send them, parsed and as bytes."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tests.stub.tokens import request_tokens

Message = dict[str, Any]
Draw = st.DrawFn

ids = st.sampled_from(["call_1", "call_2", "call_3", "call_4", "toolu_01AbC", "functions.look:0", "0"])
"""Few, so that rounds reuse them."""
tool_names = st.sampled_from(["read_file", "run", "edit_file", "search"])
_PHRASES = (
    "You must never touch vendor/.",
    "please keep src/app/main.py as it is",
    "error: exit 1 at 0x7f3a in résumé.py:17",
    "ok",
    "不要修改数据库结构。" * 3,
    "検索結果は三件です",
    "👩🏽‍💻🎉 🇨🇭 ☃️",
    "🏴‍☠️",
    base64.b64encode(bytes(range(200))).decode(),
    '"quoted" \\ back/slash',
    "tab\tnewline\n\r\n",
    "\x00\x1f\x7f",
    "\u2028\u2029",
    "<|endoftext|>",
    "</summary>",
    "<|im_start|>system",
    '{"role":"system"}',
)
phrases = st.builds("{} {}".format, st.sampled_from(_PHRASES), st.integers(0, 99))
longs = st.builds(lambda phrase, times: f"{phrase}\n" * times, phrases, st.sampled_from([20, 60, 200]))
lone_surrogates = st.sampled_from(["\ud83d", "a\udc00b", "\udfff end"])
"""Only JSON escapes can carry these: they have no UTF-8 form."""
blobs = st.sampled_from([base64.b64encode(bytes(range(size))).decode() for size in (30, 100, 250)])


def texts(*, surrogates: bool = True, long: bool = True) -> st.SearchStrategy[str]:
    """Non-empty text of every awkward kind; mostly picked from a pool, which keeps drawing cheap."""
    kinds = [phrases, phrases, phrases, st.text(min_size=1, max_size=12)]
    return st.one_of(*kinds, *([longs] if long else []), *([lone_surrogates] if surrogates else []))


def text_parts(text: st.SearchStrategy[str]) -> st.SearchStrategy[Message]:
    """A text part, now and then with a cache marker."""
    part = st.builds(lambda value: {"type": "text", "text": value}, text)
    marked = part.map(lambda value: {**value, "cache_control": {"type": "ephemeral"}})
    return st.one_of(part, part, part, marked)


images = st.builds(
    lambda data, detail: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", **detail}},
    blobs,
    st.sampled_from([{}, {"detail": "low"}, {"detail": "high"}]),
)
unknown_keys: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {}, {}, {"name": "ann"}, {"x_vendor": {"a": [1, None]}}, {"weight": 0}]
)
arguments = st.one_of(
    st.builds(lambda path, note: json.dumps({"path": path, "note": note}), phrases, phrases),
    st.sampled_from(["", "{}", "{not json", '{"a": 1', "null", "[1, 2]", '{"a":1,"a":2}']),
)
"""The second half is what models really produce, too."""


@st.composite
def systems(draw: Draw, text: st.SearchStrategy[str]) -> Message:
    """A system or developer message."""
    content = draw(st.one_of(text, st.lists(text_parts(text), min_size=1, max_size=2)))
    return {"role": draw(st.sampled_from(["system", "system", "developer"])), "content": content}


@st.composite
def users(draw: Draw, text: st.SearchStrategy[str]) -> Message:
    """A user message: text, parts, images, unknown keys."""
    parts = st.lists(st.one_of(text_parts(text), text_parts(text), images), min_size=1, max_size=3)
    return {"role": "user", "content": draw(st.one_of(text, text, parts)), **draw(unknown_keys)}


@st.composite
def assistants(draw: Draw, text: st.SearchStrategy[str]) -> Message:
    """An assistant message without calls, its reasoning beside it now and then."""
    message: Message = {"role": "assistant", "content": draw(st.one_of(text, st.lists(text_parts(text), min_size=1)))}
    if draw(st.booleans()):
        message[draw(st.sampled_from(["reasoning_content", "reasoning"]))] = draw(text)
    return message


@st.composite
def rounds(draw: Draw, text: st.SearchStrategy[str]) -> list[Message]:
    """An assistant message with one to four calls and their results, in any order."""
    names = draw(st.lists(ids, min_size=1, max_size=4, unique=True))
    calls = [
        {"id": name, "type": "function", "function": {"name": draw(tool_names), "arguments": draw(arguments)}}
        for name in names
    ]
    message: Message = {"role": "assistant", "tool_calls": calls}
    content = draw(st.one_of(st.sampled_from(["missing", None, ""]), text))
    if content != "missing":
        message["content"] = content
    if draw(st.integers(0, 4)) == 0:
        message["reasoning_content"] = draw(text)
    contents = st.one_of(st.just(""), text, st.lists(text_parts(text), min_size=1, max_size=2))
    results = [{"role": "tool", "tool_call_id": name, "content": draw(contents)} for name in names]
    return [message, *draw(st.permutations(results))]


@st.composite
def legacy_rounds(draw: Draw, text: st.SearchStrategy[str]) -> list[Message]:
    """The function call of old: no id, one result."""
    name = draw(tool_names)
    call = {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": draw(arguments)}}
    return [call, {"role": "function", "name": name, "content": draw(text)}]


def orphans(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[Message]]:
    """What a careless client leaves behind: a result without its call, a call without its result."""
    result = st.builds(lambda name, content: {"role": "tool", "tool_call_id": name, "content": content}, ids, text)
    lost = st.one_of(rounds(text).map(lambda messages: messages[:-1]), rounds(text).map(lambda messages: messages[1:]))
    return st.one_of(result.map(lambda message: [message]), lost)


@st.composite
def conversations(
    draw: Draw,
    *,
    with_orphans: bool = False,
    legacy: bool = True,
    surrogates: bool = True,
    long: bool = True,
    min_size: int = 1,
    max_size: int = 12,
) -> list[Message]:
    """The messages of a request whose next word is the model's: at least one user message, none of the model's last.

    Every tool pair is whole unless ``with_orphans``; consecutive users, systems in the middle and reused call ids
    occur. ``min_size`` and ``max_size`` count steps (a message, or a round with its results).
    """
    text = texts(surrogates=surrogates, long=long)
    one = st.one_of(systems(text), users(text), users(text), assistants(text)).map(lambda message: [message])
    steps = [one, one, rounds(text), rounds(text)]
    steps += [legacy_rounds(text)] if legacy else []
    steps += [orphans(text)] if with_orphans else []
    opening = [*draw(st.lists(systems(text), max_size=2)), draw(users(text))]
    middle = draw(st.lists(st.one_of(*steps), min_size=min_size - 1, max_size=max_size))
    messages = [*opening, *(message for step in middle for message in step)]
    if messages[-1]["role"] == "assistant" and not with_orphans:
        messages.append(draw(users(text)))
    return messages


FILES = ("src/app/main.py", "src/app/store.py", "README.md")


@st.composite
def agent_sessions(draw: Draw, *, max_rounds: int = 24) -> list[Message]:
    """A coding agent at work: one task, then rounds that read, search and change a few files and run commands."""
    messages: list[Message] = [{"role": "system", "content": "You are a coding agent."}]
    messages.append({"role": "user", "content": "Make the tests of src/app pass. Never touch vendor/."})
    versions = dict.fromkeys(FILES, 0)
    for number in range(draw(st.integers(4, max_rounds))):
        name = draw(st.sampled_from(["Read", "Read", "Edit", "Grep", "Bash", "lookup"]))
        path = draw(st.sampled_from(FILES))
        if name == "Edit":
            versions[path] += 1
        given: dict[str, Any] = {"file_path": path}
        if name == "Read" and draw(st.booleans()):
            given |= {"offset": draw(st.sampled_from([1, 40])), "limit": 40}
        given = {"Grep": {"pattern": "def", "path": path}, "Bash": {"command": f"pytest -q {path}"}}.get(name, given)
        lines = draw(st.sampled_from([2, 40, 120]))
        content = {
            "Read": "\n".join(f"{n + 1}\tline {n} of {path} v{versions[path]}" for n in range(lines)),
            "Edit": f"The file {path} has been updated.",
            "Bash": draw(st.sampled_from(["", "Error: exit code 1 in test_main.py\n"])) + "collected items\n" * lines,
        }.get(name, f"{path}: def run(self, number)\n" * lines)
        call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        words = draw(st.sampled_from([None, f"Based on {path} I'll use the other function.", "Next."]))
        messages += [{"role": "assistant", "content": words, "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": f"call_{number}", "content": content}]
    return messages


tools = st.lists(
    st.builds(
        lambda name, description, key: {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {"type": "object", "properties": {key: {"type": "string", "description": description}}},
            },
        },
        tool_names,
        phrases,
        st.sampled_from(["path", "command"]),
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def requests(draw: Draw, /, **options: Any) -> dict[str, Any]:
    """A whole chat request; *options* are those of ``conversations``."""
    body: dict[str, Any] = {"model": draw(st.sampled_from(["gpt-4o-mini", "local"]))}
    body["messages"] = draw(conversations(**options))
    if draw(st.booleans()):
        body["tools"] = draw(tools)
    extras = {"max_tokens": 64, "temperature": 0.5, "stream": True, "user": "ann", "x_vendor": {"k": [1.5, -0.0]}}
    for key in draw(st.lists(st.sampled_from(sorted(extras)), unique=True)):
        body[key] = extras[key]
    return body


@st.composite
def bodies(draw: Draw, /, **options: Any) -> bytes:
    """The bytes of a chat request: any key order, odd whitespace, escapes or plain UTF-8."""
    body = draw(requests(**options))
    return encode(draw, body)


def encode(draw: Draw, value: object) -> bytes:
    """*value* as JSON bytes in a style drawn once: whitespace, escaping and the order of object keys."""
    space = draw(st.sampled_from(["", " ", "\n  ", "\r\n\t"]))
    ascii_only = draw(st.booleans())
    swap = draw(st.booleans())
    text = _write(value, space, ascii_only, swap)
    edge = draw(st.sampled_from(["", " ", "\n"]))
    return (edge + text + edge).encode()


def _write(value: object, space: str, ascii_only: bool, swap: bool) -> str:
    if isinstance(value, dict):
        keys: Sequence[str] = list(reversed(value)) if swap else list(value)
        pairs = (f"{json.dumps(key)}{space}:{space}{_write(value[key], space, ascii_only, swap)}" for key in keys)
        return "{" + space + f"{space},{space}".join(pairs) + space + "}"
    if isinstance(value, list):
        return "[" + space + f"{space},{space}".join(_write(v, space, ascii_only, swap) for v in value) + space + "]"
    # A lone surrogate has no UTF-8 form, whatever style was drawn.
    escaped = ascii_only or (isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value))
    return json.dumps(value, ensure_ascii=escaped)


windows = st.one_of(st.sampled_from([256, 512, 1024, 2048, 4096, 8192, 32768]), st.integers(256, 32768))
figures = st.sampled_from([None, None, 1, 64, 300, 1024, 4000, 100_000])


@st.composite
def request_bytes(draw: Draw, **options: Any) -> bytes:
    """A request's bytes with tools or none and any output figure."""
    request = draw(requests(**options))
    request.pop("max_tokens", None)
    if (figure := draw(figures)) is not None:
        request[draw(st.sampled_from(["max_tokens", "max_completion_tokens"]))] = figure
    return encode(draw, request)


@st.composite
def growing_conversations(draw: Draw) -> tuple[list[Message], list[int], int]:
    """A conversation of some length, the lengths at which it was a request, and a window of a part of its size."""
    messages = draw(conversations(min_size=8, max_size=30, surrogates=False))
    ends = [i for i, m in enumerate(messages, 1) if m["role"] in ("user", "tool", "function")]
    ends = [i for i in ends if i == len(messages) or messages[i]["role"] == "assistant"]
    size = request_tokens({"messages": messages})
    share = draw(st.sampled_from([0.2, 0.35, 0.5, 0.8]))
    return messages, ends, max(1024, int(size * share))
