"""Eight situations that end a conversation without the proxy: window 8,192, a strict upstream, the real client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import BadRequestError

from tests.conftest import StartProxy, StartStub
from tests.stub import Answer, Call, Seen, Stub
from tests.stub.tokens import count_json
from tests.support.chat_client import MODEL, ChatClient
from tests.support.proxy_process import Client, Proxy
from tests.support.sample_conversations import (
    AGENT_SYSTEM,
    AGENT_TASK,
    AGENT_TOOLS,
    agent_session,
    chat_turn,
    log,
    prose,
    tool,
)
from tests.support.view_checks import CacheTally

WINDOW = 8192
OPENING: list[dict[str, Any]] = [
    {"role": "system", "content": AGENT_SYSTEM},
    {"role": "user", "content": AGENT_TASK},
]
Note = Callable[[str, object], None]


async def begin(stub: StartStub, proxy: StartProxy, **rules: Any) -> tuple[Stub, Proxy]:
    """A strict upstream with the small window, and a proxy that was told of it."""
    server = await stub(window=WINDOW, **rules)
    return server, await proxy(server.url, window=WINDOW)


def agent(rounds: int, parallel: int = 1) -> Callable[[Seen], Answer]:
    """A model that calls *parallel* tools in each of its first *rounds* answers and then says that it is done."""
    made = iter(range(1, rounds + 1))

    def script(_seen: Seen) -> Answer:
        at = next(made, None)
        if at is None:
            return Answer("Done: the rows are kept.")
        files = [json.dumps({"path": f"src/part_{at}_{number}.py"}) for number in range(parallel)]
        calls = tuple(Call("read_file", file, f"call_{at}_{number}") for number, file in enumerate(files))
        return Answer(f"Step {at}: I read on.", calls)

    return script


async def loop(talk: ChatClient, result_tokens: int) -> int:
    """Drive *talk* as an agent until the model calls no more tools; returns how many rounds that took."""
    answer, rounds = await talk.ask(), 0
    while calls := talk.calls:
        rounds += 1
        texts = [log(rounds * 100 + at, result_tokens) for at in range(len(calls))]
        answer = await talk.results(answer, texts)
    return rounds


def report(note: Note, letter: str, ledger: CacheTally, overflows: int) -> None:
    """Show a situation's figures and keep them in the test report."""
    print(f"{letter}: {ledger}, {overflows} overflows recovered")
    note(f"{letter}_repeated_prefix", round(ledger.share, 3))


async def test_a_chat_of_forty_turns(stub: StartStub, proxy: StartProxy, record_property: Note) -> None:
    """A: a chat that grows to three times the window is answered at every turn, and starts untouched."""
    server, front = await begin(stub, proxy)
    server.script = lambda seen: Answer(prose(seen.number * 2 + 1, 300))
    async with ChatClient(front.url, server, OPENING[:1].copy(), {"max_tokens": 512}) as talk:
        for turn in range(40):
            await talk.ask(chat_turn(turn, 300)[0])
            if turn < 5:
                assert talk.ledger.compacted == 0, "a small conversation must leave byte for byte"
        assert talk.tokens > 3 * WINDOW
        assert talk.ledger.compacted > 0
        report(record_property, "A", talk.ledger, talk.overflows)


@pytest.mark.parametrize("stream", [False, True], ids=["b_whole", "h_streaming"])
async def test_an_agent_loop_of_forty_rounds(
    stub: StartStub, proxy: StartProxy, record_property: Note, stream: bool
) -> None:
    """B and H: one user message and forty tool rounds are answered, and four fifths of what is sent repeats."""
    server, front = await begin(stub, proxy)
    server.script = agent(40)
    async with ChatClient(front.url, server, OPENING.copy(), {"tools": AGENT_TOOLS}, stream) as talk:
        assert await loop(talk, 450) == 40
        assert talk.tokens > 2 * WINDOW
        report(record_property, "H" if stream else "B", talk.ledger, talk.overflows)
        assert talk.ledger.share >= 0.80


@pytest.mark.parametrize("kind", ["chat", "agent"])
async def test_a_first_request_of_three_windows(
    stub: StartStub, proxy: StartProxy, record_property: Note, kind: str
) -> None:
    """C: a history the proxy never saw before, three times the window, is answered."""
    server, front = await begin(stub, proxy)
    turns = [message for turn in range(45) for message in chat_turn(turn, 280)]
    history = (
        [*OPENING, *agent_session(52, 450)[2:]] if kind == "agent" else [*OPENING[:1], *turns, chat_turn(99, 40)[0]]
    )
    async with ChatClient(front.url, server, history) as talk:
        assert talk.tokens > 3 * WINDOW
        await talk.ask()
        report(record_property, f"C_{kind}", talk.ledger, talk.overflows)


async def test_a_pasted_message_of_two_windows(stub: StartStub, proxy: StartProxy, record_property: Note) -> None:
    """D: one user message of twice the window is answered, with both its ends kept."""
    server, front = await begin(stub, proxy)
    pasted = f"What went wrong in this log?\n{log(5, 2 * WINDOW)}\nPlease name the first failing file."
    async with ChatClient(front.url, server, OPENING[:1].copy(), clipped=True) as talk:
        await talk.ask({"role": "user", "content": pasted})
        assert talk.views[0].messages[0] == OPENING[0]
        await talk.ask({"role": "user", "content": "And the second one?"})
        report(record_property, "D", talk.ledger, talk.overflows)


async def test_a_tool_result_of_two_windows(stub: StartStub, proxy: StartProxy, record_property: Note) -> None:
    """E: a newest tool result of twice the window is answered, and still answers its call."""
    server, front = await begin(stub, proxy)
    server.script = agent(4)
    async with ChatClient(front.url, server, OPENING.copy(), {"tools": AGENT_TOOLS}) as talk:
        answer = await talk.ask()
        for at, size in enumerate((300, 2 * WINDOW, 300, 300)):
            answer = await talk.results(answer, [log(at + 1, size)])
        newest = talk.views[2].messages[-1]
        assert newest["tool_call_id"] == "call_2_0"
        assert len(newest["content"]) > 400, "something of the result must be left"
        report(record_property, "E", talk.ledger, talk.overflows)


async def test_parallel_calls_in_every_round(stub: StartStub, proxy: StartProxy, record_property: Note) -> None:
    """F: eight parallel calls in each of twelve rounds are answered, and no call loses its result."""
    server, front = await begin(stub, proxy)
    server.script = agent(12, parallel=8)
    async with ChatClient(front.url, server, OPENING.copy(), {"tools": AGENT_TOOLS}) as talk:
        assert await loop(talk, 120) == 12
        assert talk.tokens > WINDOW
        report(record_property, "F", talk.ledger, talk.overflows)


def wordy_tools(tools: int) -> list[dict[str, Any]]:
    """Tools whose descriptions are most of their size."""
    return [
        tool(f"lookup_{at}", prose(at, 150), key=prose(at + 500, 30), region=prose(at + 900, 30)) for at in range(tools)
    ]


async def test_tools_larger_than_the_window(stub: StartStub, proxy: StartProxy, record_property: Note) -> None:
    """G: a tools array above the window is answered with every name and required parameter still there."""
    server, front = await begin(stub, proxy)
    tools = wordy_tools(55)
    assert count_json(tools) > WINDOW
    async with ChatClient(front.url, server, OPENING.copy(), {"tools": tools}) as talk:
        await talk.ask()
        await talk.ask({"role": "user", "content": "Go on, please."})
        sent = [view.parsed["tools"] for view in talk.views]
        report(record_property, "G", talk.ledger, talk.overflows)
    for view in sent:
        assert [_signature(one) for one in view] == [_signature(one) for one in tools]
    assert sent[0] == sent[1], "the same tools must be cut the same way on every call"


async def test_tools_that_cannot_be_cut(stub: StartStub, proxy: StartProxy) -> None:
    """G: where names and required parameters alone exceed the window, the client gets a clear 400 of OpenAI's shape."""
    server, front = await begin(stub, proxy)
    tools = [tool(f"lookup_{at}_{'long_name' * 6}", "", **{f"key_{n}_{at}": "" for n in range(12)}) for at in range(90)]
    assert count_json(tools) > 2 * WINDOW
    asked: dict[str, Any] = {"messages": OPENING, "tools": tools}
    async with Client(front.url) as client:
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, **asked)
    assert refused.value.code == "context_length_exceeded"
    assert "tools" in refused.value.message
    assert not server.chats("ok")


def _signature(one: dict[str, Any]) -> tuple[str, list[str], list[str]]:
    function = one["function"]
    return function["name"], function["parameters"]["required"], list(function["parameters"]["properties"])
