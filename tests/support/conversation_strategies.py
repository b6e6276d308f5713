"""Hypothesis strategies for chat conversations as clients really send them, parsed and as bytes.

Each strategy is built once: Hypothesis checks a new one at its first draw, which takes longer than the draw.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st

from tests.stub.tokens import request_tokens

Message = dict[str, Any]
Draw = st.DrawFn

booleans = st.booleans()
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


@cache
def texts(*, surrogates: bool = True, long: bool = True) -> st.SearchStrategy[str]:
    """Non-empty text of every awkward kind; mostly picked from a pool, which keeps drawing cheap."""
    kinds = [phrases, phrases, phrases, st.text(min_size=1, max_size=12)]
    return st.one_of(*kinds, *([longs] if long else []), *([lone_surrogates] if surrogates else []))


@cache
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


system_roles = st.sampled_from(["system", "system", "developer"])
reasoning_names = st.sampled_from(["reasoning_content", "reasoning"])
call_ids = st.lists(ids, min_size=1, max_size=4, unique=True)
orders = {size: st.permutations(range(size)) for size in range(1, 5)}
"""Orders of as many results as a round has calls."""


@cache
def systems(text: st.SearchStrategy[str]) -> st.SearchStrategy[Message]:
    """A system or developer message."""
    contents = st.one_of(text, st.lists(text_parts(text), min_size=1, max_size=2))
    return st.builds(lambda content, role: {"role": role, "content": content}, contents, system_roles)


@cache
def users(text: st.SearchStrategy[str]) -> st.SearchStrategy[Message]:
    """A user message: text, parts, images, unknown keys."""
    parts = st.lists(st.one_of(text_parts(text), text_parts(text), images), min_size=1, max_size=3)
    contents = st.one_of(text, text, parts)
    return st.builds(lambda content, others: {"role": "user", "content": content, **others}, contents, unknown_keys)


@cache
def assistants(text: st.SearchStrategy[str]) -> st.SearchStrategy[Message]:
    """An assistant message without calls, its reasoning beside it now and then."""
    contents = st.one_of(text, st.lists(text_parts(text), min_size=1))

    @st.composite
    def assistant(draw: Draw) -> Message:
        message: Message = {"role": "assistant", "content": draw(contents)}
        if draw(booleans):
            message[draw(reasoning_names)] = draw(text)
        return message

    return assistant()


@cache
def rounds(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[Message]]:
    """An assistant message with one to four calls and their results, in any order."""
    words = st.one_of(st.sampled_from(["missing", None, ""]), text)
    contents = st.one_of(st.just(""), text, st.lists(text_parts(text), min_size=1, max_size=2))
    one_in_five = st.integers(0, 4)

    @st.composite
    def round_of_calls(draw: Draw) -> list[Message]:
        names = draw(call_ids)
        calls = [
            {"id": name, "type": "function", "function": {"name": draw(tool_names), "arguments": draw(arguments)}}
            for name in names
        ]
        message: Message = {"role": "assistant", "tool_calls": calls}
        content = draw(words)
        if content != "missing":
            message["content"] = content
        if draw(one_in_five) == 0:
            message["reasoning_content"] = draw(text)
        results = [{"role": "tool", "tool_call_id": name, "content": draw(contents)} for name in names]
        return [message, *(results[index] for index in draw(orders[len(results)]))]

    return round_of_calls()


@cache
def legacy_rounds(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[Message]]:
    """The function call of old: no id, one result."""

    def round_of(name: str, call_arguments: str, result: str) -> list[Message]:
        function = {"name": name, "arguments": call_arguments}
        call = {"role": "assistant", "content": None, "function_call": function}
        return [call, {"role": "function", "name": name, "content": result}]

    return st.builds(round_of, tool_names, arguments, text)


@cache
def orphans(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[Message]]:
    """What a careless client leaves behind: a result without its call, a call without its result."""
    result = st.builds(lambda name, content: {"role": "tool", "tool_call_id": name, "content": content}, ids, text)
    lost = st.one_of(rounds(text).map(lambda messages: messages[:-1]), rounds(text).map(lambda messages: messages[1:]))
    return st.one_of(result.map(lambda message: [message]), lost)


@cache
def conversations(
    *,
    with_orphans: bool = False,
    legacy: bool = True,
    surrogates: bool = True,
    long: bool = True,
    min_size: int = 1,
    max_size: int = 12,
) -> st.SearchStrategy[list[Message]]:
    """The messages of a request whose next word is the model's: at least one user message, none of the model's last.

    Every tool pair is whole unless ``with_orphans``; consecutive users, systems in the middle and reused call ids
    occur. ``min_size`` and ``max_size`` count steps (a message, or a round with its results).
    """
    text = texts(surrogates=surrogates, long=long)
    one = st.one_of(systems(text), users(text), users(text), assistants(text)).map(lambda message: [message])
    steps = [one, one, rounds(text), rounds(text)]
    steps += [legacy_rounds(text)] if legacy else []
    steps += [orphans(text)] if with_orphans else []
    openings = st.lists(systems(text), max_size=2)
    middles = st.lists(st.one_of(*steps), min_size=min_size - 1, max_size=max_size)

    @st.composite
    def conversation(draw: Draw) -> list[Message]:
        opening = [*draw(openings), draw(users(text))]
        messages = [*opening, *(message for step in draw(middles) for message in step)]
        if messages[-1]["role"] == "assistant" and not with_orphans:
            messages.append(draw(users(text)))
        return messages

    return conversation()


FILES = ("src/app/main.py", "src/app/store.py", "README.md")
agent_tools = st.sampled_from(["Read", "Read", "Edit", "Grep", "Bash", "lookup"])
agent_files = st.sampled_from(FILES)
agent_words = st.sampled_from([None, "Based on {} I'll use the other function.", "Next."])
offsets, line_counts = st.sampled_from([1, 40]), st.sampled_from([2, 40, 120])
command_heads = st.sampled_from(["", "Error: exit code 1 in test_main.py\n"])


@st.composite
def agent_sessions(draw: Draw, *, max_rounds: int = 24) -> list[Message]:
    """A coding agent at work: one task, then rounds that read, search and change a few files and run commands."""
    messages: list[Message] = [{"role": "system", "content": "You are a coding agent."}]
    messages.append({"role": "user", "content": "Make the tests of src/app pass. Never touch vendor/."})
    versions = dict.fromkeys(FILES, 0)
    for number in range(draw(st.integers(4, max_rounds))):
        name = draw(agent_tools)
        path = draw(agent_files)
        if name == "Edit":
            versions[path] += 1
        given: dict[str, Any] = {"file_path": path}
        if name == "Read" and draw(booleans):
            given |= {"offset": draw(offsets), "limit": 40}
        given = {"Grep": {"pattern": "def", "path": path}, "Bash": {"command": f"pytest -q {path}"}}.get(name, given)
        lines = draw(line_counts)
        content = {
            "Read": "\n".join(f"{n + 1}\tline {n} of {path} v{versions[path]}" for n in range(lines)),
            "Edit": f"The file {path} has been updated.",
            "Bash": draw(command_heads) + "collected items\n" * lines,
        }.get(name, f"{path}: def run(self, number)\n" * lines)
        call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        words = draw(agent_words)
        messages += [{"role": "assistant", "content": words and words.format(path), "tool_calls": [call]}]
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


models = st.sampled_from(["gpt-4o-mini", "local"])
EXTRAS = {"max_tokens": 64, "temperature": 0.5, "stream": True, "user": "ann", "x_vendor": {"k": [1.5, -0.0]}}
extra_keys = st.lists(st.sampled_from(sorted(EXTRAS)), unique=True)


@st.composite
def requests(draw: Draw, /, **options: Any) -> dict[str, Any]:
    """A whole chat request; *options* are those of ``conversations``."""
    body: dict[str, Any] = {"model": draw(models)}
    body["messages"] = draw(conversations(**options))
    if draw(booleans):
        body["tools"] = draw(tools)
    for key in draw(extra_keys):
        body[key] = EXTRAS[key]
    return body


@st.composite
def bodies(draw: Draw, /, **options: Any) -> bytes:
    """The bytes of a chat request: any key order, odd whitespace, escapes or plain UTF-8."""
    body = draw(requests(**options))
    return encode(draw, body)


spaces, edges = st.sampled_from(["", " ", "\n  ", "\r\n\t"]), st.sampled_from(["", " ", "\n"])


def encode(draw: Draw, value: object) -> bytes:
    """*value* as JSON bytes in a style drawn once: whitespace, escaping and the order of object keys."""
    space = draw(spaces)
    ascii_only = draw(booleans)
    swap = draw(booleans)
    text = _write(value, space, ascii_only, swap)
    edge = draw(edges)
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
figure_names = st.sampled_from(["max_tokens", "max_completion_tokens"])


@st.composite
def request_bytes(draw: Draw, **options: Any) -> bytes:
    """A request's bytes with tools or none and any output figure."""
    request = draw(requests(**options))
    request.pop("max_tokens", None)
    if (figure := draw(figures)) is not None:
        request[draw(figure_names)] = figure
    return encode(draw, request)


window_shares = st.sampled_from([0.2, 0.35, 0.5, 0.8])


@st.composite
def growing_conversations(draw: Draw) -> tuple[list[Message], list[int], int]:
    """A conversation of some length, the lengths at which it was a request, and a window of a part of its size."""
    messages = draw(conversations(min_size=8, max_size=30, surrogates=False))
    ends = [i for i, m in enumerate(messages, 1) if m["role"] in ("user", "tool", "function")]
    ends = [i for i in ends if i == len(messages) or messages[i]["role"] == "assistant"]
    size = request_tokens({"messages": messages})
    share = draw(window_shares)
    return messages, ends, max(1024, int(size * share))
