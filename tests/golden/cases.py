"""The requests of the golden record: conversations as they grow, in three APIs, under many configurations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.stub.tokens import request_tokens
from tests.support.api_formats import request_body
from tests.support.recorded_conversations import read_all
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, chat_turn

Message = dict[str, Any]

APIS = ("chat", "messages", "responses")
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
WINDOWS = (2048, 4096, 8192, 16384, 32768, 65536, 131072, 200000)
LARGEST = 60_000
"""Tokens of the largest conversation that is recorded: larger ones take long and show nothing new."""
BELIEVED = 4
"""By how much the window of the models called ``lied-*`` is believed larger than it is."""


@dataclass(frozen=True)
class Case:
    """One request: its name, where it goes, its body, and the headers that it adds."""

    name: str
    path: str
    body: bytes = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    replica: int = 0


@dataclass(frozen=True)
class Setup:
    """One proxy (or several on one store): its configuration and the requests it gets, in order."""

    name: str
    config: Mapping[str, Any]
    cases: Sequence[Case]
    replicas: int = 1
    recalls: bool = False


@dataclass(frozen=True)
class Conversation:
    """A whole conversation as chat messages, with its tools and its weight in tokens."""

    name: str
    messages: Sequence[Message]
    tools: Sequence[Message]
    tokens: int

    def ends(self, most: int) -> list[int]:
        """At most *most* lengths at which the model speaks next, evenly spread, two neighbours at the end."""
        spoken = [m["role"] == "assistant" for m in self.messages] + [True]
        ends = [i + 1 for i in range(len(self.messages)) if not spoken[i] and spoken[i + 1]]
        if len(ends) <= most:
            return ends
        step = (len(ends) - 1) / (most - 2)
        spread = {ends[int(i * step)] for i in range(most - 1)}
        return sorted(spread | {ends[-2], ends[-1]})


def conversations() -> list[Conversation]:
    """Made conversations first, then the recorded ones that are not too long."""
    made = [
        ("agent-wide", agent_session(30, 400, 2), AGENT_TOOLS),
        ("agent-thin", agent_session(70, 120), AGENT_TOOLS),
        ("agent-big-results", agent_session(12, 2500), AGENT_TOOLS),
        ("chat-long", [m for t in range(40) for m in chat_turn(t, 220)] + chat_turn(99, 60)[:1], ()),
        ("chat-huge-message", [*chat_turn(1, 100), {"role": "user", "content": chat_turn(2, 9000)[0]["content"]}], ()),
    ]
    found = [_weighed(name, messages, tools) for name, messages, tools in made]
    # One recording has a part that only Chat Completions knows.
    recorded = [t for t in read_all() if 1500 < t.size < LARGEST and "document_as_binary" not in t.name]
    return found + [_weighed(t.name, list(t.messages), t.tools) for t in recorded]


def _weighed(name: str, messages: Sequence[Message], tools: Any) -> Conversation:
    tokens = request_tokens({"messages": messages, "tools": list(tools)})
    functions = [{"parameters": {"type": "object", "properties": {}}, **tool["function"]} for tool in tools]
    return Conversation(name, messages, [{"type": "function", "function": one} for one in functions], tokens)


def window_below(tokens: int) -> int:
    """The largest window of ``WINDOWS`` that is smaller than *tokens*, or the smallest of all."""
    return max((window for window in WINDOWS if window < tokens), default=WINDOWS[0])


def growing(
    conversation: Conversation, api: str, model: str, most: int = 6, replicas: int = 1, **members: Any
) -> Iterator[Case]:
    """The conversation's requests as it grows, streamed every other time; alternating over *replicas*."""
    headers = members.pop("headers", {})
    for at, end in enumerate(conversation.ends(most)):
        body = request_body(api, conversation.messages[:end], conversation.tools, model=model, **members)
        if at % 2:
            body["stream"] = True
        label = ",".join(
            f"{key}={value}" for key, value in {**members, **headers}.items() if key != "context_management"
        )
        name = f"{model}/{api}/{conversation.name}/{label}/{end}"
        raw = json.dumps(body, ensure_ascii=bool(at % 3), separators=(",", ":")).encode("utf-8", "surrogatepass")
        yield Case(name, PATHS[api], raw, headers, at % replicas)


def models() -> list[dict[str, Any]]:
    """Model rules that every setup has: a window each, believed ones that are too large, unknown ones, fallbacks."""
    common = {"upstream": "stub", "tokenizer": "o200k_base"}
    rules: list[dict[str, Any]] = [{"name": f"w{w}", "context_window": w, **common} for w in WINDOWS]
    rules += [{"name": f"lied{w}", "context_window": w * BELIEVED, **common} for w in WINDOWS]
    first, last = [{"fallback": "w131072"}, "compress"], ["compress", {"fallback": "w131072"}]
    rules += [{"name": f"first{w}", "context_window": w, "overflow": first, **common} for w in WINDOWS]
    rules += [{"name": f"last{w}", "context_window": w, "overflow": last, **common} for w in WINDOWS]
    rules += [{"name": f"liedlast{w}", "context_window": w * BELIEVED, "overflow": last, **common} for w in WINDOWS]
    rules += [{"name": "alias", "model": "w8192", **common}, {"name": "*", **common}]
    return rules


def true_windows() -> dict[str, int]:
    """What the upstream really accepts, by model."""
    names = ("w", "lied", "first", "last", "liedlast", "unknown")
    return {f"{name}{w}": w for name in names for w in WINDOWS}


def setups() -> list[Setup]:
    """Every proxy of the record with its requests."""
    every = conversations()
    some, few = every[:5] + every[5::3], every[:5] + every[5::8]
    return [
        Setup("plain", {}, _plainly(every[:5] + every[5::2])),
        Setup("output", {}, [c for api in APIS for one in few for c in _outputs(one, api)]),
        Setup("options", {}, [c for api in APIS for one in few[:7] for c in _options(one, api)]),
        Setup("overflow", {}, [c for api in APIS for one in few for c in _overflows(one, api)]),
        Setup("fallback", {}, [c for api in APIS for one in few for c in _fallbacks(one, api)]),
        Setup("observe", {"compression": {"mode": "observe"}}, _plainly(few)),
        Setup("economy", {"compression": {"policy": "economy", "lower_output": "never"}}, _plainly(few)),
        Setup(
            "first", {"compression": {"lower_output": "first"}}, [c for a in APIS for o in few for c in _outputs(o, a)]
        ),
        Setup("always", {"compression": {"stages": {"truncate": {"always": True, "max_lines": 40}}}}, _plainly(few)),
        Setup("unfolded", {"compression": {"stages": {"fold": {"enabled": False}}}}, _plainly(few)),
        Setup(
            "allocated", {"compression": {"allocation": {"tools": 0.1, "recent": 0.4, "reserve": 0.1}}}, _plainly(few)
        ),
        Setup("recall", {"compression": {"recall": {"enabled": True}}}, _plainly(few), recalls=True),
        Setup("replicas", {}, _plainly(some[:9], replicas=2), replicas=2),
        Setup("counted", {}, [c for one in few for c in _counts(one)]),
        Setup("own", {"upstreams": {"context_management": "own", "compaction": "own"}}, _managed(few)),
    ]


def _model(kind: str, conversation: Conversation, share: int = 1) -> str:
    return f"{kind}{window_below(conversation.tokens // share)}"


def _plainly(some: Sequence[Conversation], replicas: int = 1) -> list[Case]:
    return [c for api in APIS for one in some for c in growing(one, api, _model("w", one), replicas=replicas)]


def _outputs(one: Conversation, api: str) -> Iterator[Case]:
    window = window_below(one.tokens)
    name = {"chat": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}[api]
    for figure in (window // 4, window * 3 // 4):
        yield from growing(one, api, f"w{window}", 4, **{name: figure}, headers={"x-ullage-conversation": f"{figure}"})


def _options(one: Conversation, api: str) -> Iterator[Case]:
    choices: list[dict[str, str]] = [
        {"x-ullage-mode": "off"},
        {"x-ullage-mode": "observe"},
        {"x-ullage-window": str(window_below(one.tokens // 2))},
        {"x-ullage-compact": "now", "x-ullage-conversation": "now"},
        {"x-ullage-project": "p", "x-ullage-task-size": "small", "x-ullage-conversation": "labels"},
    ]
    for headers in choices:
        yield from growing(one, api, _model("w", one), 4, headers=headers)


def _overflows(one: Conversation, api: str) -> Iterator[Case]:
    yield from growing(one, api, _model("lied", one, 2), 4)
    yield from growing(one, api, _model("unknown", one), 4)


def _fallbacks(one: Conversation, api: str) -> Iterator[Case]:
    for kind in ("first", "last", "liedlast"):
        yield from growing(one, api, _model(kind, one, 2), 4)


def _counts(one: Conversation) -> Iterator[Case]:
    for case in growing(one, "messages", _model("w", one), 4):
        body = json.loads(case.body)
        for member in ("max_tokens", "stream"):
            body.pop(member, None)
        yield Case("count:" + case.name, "/v1/messages/count_tokens", json.dumps(body).encode())
        yield case


def _managed(some: Sequence[Conversation]) -> list[Case]:
    edits = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 3000}}]}
    found = [c for one in some for c in growing(one, "messages", _model("w", one), 4, context_management=edits)]
    for one in some:
        for end in one.ends(3):
            body = request_body("responses", one.messages[:end], one.tools, model=_model("w", one))
            found.append(Case(f"compact/{one.name}/{end}", "/v1/responses/compact", json.dumps(body).encode()))
    return found
