"""Errors byte for byte as providers send them, through a running proxy: what is length is made good, nothing else."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.conftest import StartProxy, StartStub
from tests.stub import Fault, Stub
from tests.support.loopback import loopback_client
from tests.support.overflow_recordings import BROKEN_OFF, Row, body_of, headers, rows
from tests.support.overflow_reports import ReportedError, reported_errors
from tests.support.proxy_process import Proxy
from tests.support.sample_conversations import chat_turn

CHAT = [message for turn in range(10) for message in chat_turn(turn, 60)] + chat_turn(99, 40)[:1]
UNHEARD = "a-model-nobody-has-heard-of"
"""Nobody knows its window: nothing is counted ahead, and every claim has to be believed or not by what it says."""


def fault(status: int, named: tuple[tuple[str, str], ...], body: bytes) -> Fault:
    """An answer of exactly these bytes."""
    typed = any(name.lower() == "content-type" for name, _ in named)
    kind = "application/json" if body.lstrip()[:1] in (b"{", b"[") else "text/plain"
    return Fault(status=status, headers=named if typed else (("content-type", kind), *named), body=body)


async def post(front: Proxy, server: Stub, fail: Fault, key: str, *, stream: bool) -> tuple[httpx.Response, int]:
    """The client's answer to one conversation whose first attempt ends in *fail*, and how often it was sent."""
    server.forget()
    server.fail(fail)
    body: dict[str, Any] = {"model": UNHEARD, "messages": CHAT, "stream": stream}
    # A key of its own for each: nothing was learned for it.
    named = {"authorization": f"Bearer sk-{key}"}
    async with loopback_client() as client:
        answer = await client.post(f"{front.url}/chat/completions", json=body, headers=named)
    return answer, len(server.chats())


async def outcome(front: Proxy, server: Stub, row: Row) -> str:
    """What became of a recorded answer: ``recovered``, ``passed`` as it came, or what went wrong."""
    fail = fault(row["status"], headers(row), body_of(row))
    answer, times = await post(front, server, fail, row["id"], stream=row["stream"])
    if times == 2 and answer.status_code == 200 and "Understood" in answer.text.replace('"}}]}\n\ndata: ', ""):
        sizes = [len(seen.body) for seen in server.chats()]
        return "recovered" if sizes[1] < sizes[0] else f"not smaller: {sizes}"
    if times == 1 and answer.status_code == row["status"] and answer.content == row["body"].encode():
        return "passed"
    return f"sent {times} times, {answer.status_code}: {answer.text[:200]}"


@pytest.mark.shared("overflow_errors.jsonl")
async def test_recorded_errors(stub: StartStub, proxy: StartProxy) -> None:
    """Of recorded overflows at least 95 % are made good without the client's noticing; of all else nothing is touched.

    What comes behind the first content, and stop reasons, pass through: they were billed.
    """
    server = await stub(window=200_000)
    front = await proxy(server.url)
    became = {row["id"]: await outcome(front, server, row) for row in rows()}
    overflows = [row["id"] for row in rows() if row["overflow"] and row["id"] not in BROKEN_OFF]
    others = [row["id"] for row in rows() if not row["overflow"] or row["id"] in BROKEN_OFF]
    missed = {name: became[name] for name in overflows if became[name] != "recovered"}
    touched = {name: became[name] for name in others if became[name] != "passed"}
    assert len(overflows) > 120
    assert len(missed) <= 0.05 * len(overflows), missed
    assert missed == {}
    assert touched == {}


async def test_errors_that_people_met(stub: StartStub, proxy: StartProxy) -> None:
    """What people posted is made good if it means length, and passed byte for byte if it does not."""
    server = await stub(window=200_000)
    front = await proxy(server.url)

    async def wrong(at: int, one: ReportedError) -> str:
        fail = fault(one.status, one.headers, one.body.encode())
        answer, times = await post(front, server, fail, f"met-{at}", stream=False)
        if one.too_long:
            return "" if (times, answer.status_code) == (2, 200) else f"sent {times} times, {answer.status_code}"
        same = (times, answer.status_code, answer.content) == (1, one.status, one.body.encode())
        return "" if same else f"sent {times} times, {answer.status_code}: {answer.text[:100]}"

    found = {one.origin: outcome for at, one in enumerate(reported_errors()[::5]) if (outcome := await wrong(at, one))}
    assert found == {}


async def test_a_claim_that_our_count_contradicts(stub: StartStub, proxy: StartProxy) -> None:
    """Where the window is known and the request counted, a claim far beyond it is passed on, unless a code decides."""
    server = await stub(window=8_192)
    front = await proxy(server.url, window=3_000)
    said = b'{"error": {"message": "prompt is too long: 210000 tokens > 200000 maximum", "code": "%s"}}'
    for code, times in ((b"upstream_error", 1), (b"context_length_exceeded", 2)):
        _, sent = await post(front, server, fault(400, (), said % code), code.decode(), stream=False)
        assert sent == times


async def test_a_way_of_saying_it_of_ones_own(stub: StartStub, proxy: StartProxy) -> None:
    """An error that Ullage does not know is made good once the configuration names its phrase or code."""
    server = await stub(window=200_000)
    rules = [{"phrase": "basket holds {limit} beans"}, {"code": "E-77"}]
    front = await proxy(
        server.url,
        config={"upstreams": [{"name": "odd", "base_url": server.url}], "overflow_rules": rules},
    )
    for said, times in (("The basket holds 1,500 beans only", 2), ("E-77", 2), ("E-78", 1)):
        body = f'{{"fault": {{"text": "{said}"}}}}'.encode()
        _, sent = await post(front, server, fault(400, (), body), said.replace(" ", "-"), stream=False)
        assert sent == times, said


async def test_a_stop_reason_is_learned_from(stub: StartStub, proxy: StartProxy) -> None:
    """An answer that ran into the window reaches the client as it is, and the next request is fitted below it."""
    server = await stub(window=200_000)
    front = await proxy(server.url)
    body = (
        b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "cut"}, '
        b'"finish_reason": "model_context_window_exceeded"}], "usage": {"prompt_tokens": 1400, "completion_tokens": 9}}'
    )
    answer, sent = await post(front, server, fault(200, (), body), "stop", stream=False)
    assert (answer.content, sent) == (body, 1)
    first = len(server.chats()[0].body)
    _, sent = await post(front, server, Fault(), "stop", stream=False)
    assert sent == 1
    assert len(server.chats()[0].body) < first
