"""Recorded conversations, replayed turn by turn through one running proxy into windows far smaller than they are."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.conftest import StartProxy, StartStub
from tests.stub import Seen, Stub
from tests.stub.tokens import encoding
from tests.support.recorded_conversations import RecordedConversation, read_all
from tests.support.tool_pair_checks import pair_violations
from tests.support.view_checks import CacheTally, view_problems

FULL = "ULLAGE_REPLAY_ALL"
"""Set this environment variable to replay every place of every conversation instead of a sample."""
PLACES = 60
SHORT = 12
AT_ONCE = 3
RETRIES = 2
pytestmark = [
    pytest.mark.shared("transcripts"),
    pytest.mark.timeout(3600 if os.environ.get(FULL) else 600),
]


@pytest.fixture(scope="module")
def recordings() -> list[RecordedConversation]:
    """Every recorded conversation."""
    encoding()
    return read_all()


@dataclass
class Replay:
    """Sends prefixes of conversations through a proxy and gathers what went wrong and what repeated."""

    url: str
    stub: Stub
    session: aiohttp.ClientSession
    ledger: CacheTally = field(default_factory=CacheTally)
    problems: list[str] = field(default_factory=list)
    overflows: int = 0
    refused: int = 0

    async def conversation(
        self,
        gate: asyncio.Semaphore,
        recording: RecordedConversation,
        window: int,
        ends: Sequence[int],
        may_refuse: bool,
    ) -> None:
        """Replay the prefixes of *recording* that end at *ends*, in order, when *gate* lets it."""
        async with gate:
            for end in ends:
                found = await self._one(recording, window, end, may_refuse)
                self.problems += [f"{recording.name}[:{end}] in {window}: {problem}" for problem in found]

    async def _one(self, recording: RecordedConversation, window: int, end: int, may_refuse: bool) -> list[str]:
        label = f"{recording.name}-{window}-{end}"
        body = recording.body(end, f"replay-{window}")
        headers = {"content-type": "application/json", "authorization": "Bearer sk-replay", "x-replay": label}
        async with self.session.post(f"{self.url}/chat/completions", data=body, headers=headers) as reply:
            status, answer = reply.status, await reply.read()
        attempts = [seen for seen in self.stub.seen if seen.header("x-replay") == label]
        self.stub.seen = [seen for seen in self.stub.seen if seen.header("x-replay") != label]
        self.overflows += sum(seen.verdict == "overflow" for seen in attempts)
        if status == 400 and may_refuse:
            self.refused += 1
            return _refusal_problems(answer, attempts)
        if status != 200 or attempts[-1].verdict != "ok":
            return [f"status {status}, {answer[:200]!r}, upstream said {[seen.why for seen in attempts]}"]
        self.ledger.note(body, attempts[-1])
        tight = recording.must_fit(end) > 0.75 * window
        late = [] if len(attempts) <= 1 + RETRIES else [f"{len(attempts)} attempts"]
        if may_refuse:  # so little room leaves no choice what to clip; what is sent must still be sound
            return late + pair_violations(attempts[-1].messages)
        return late + view_problems(body, attempts[-1], clipped=tight)


def _refusal_problems(answer: bytes, attempts: Sequence[Seen]) -> list[str]:
    if attempts:
        return [f"refused, but the upstream was asked: {[seen.verdict for seen in attempts]}"]
    code = json.loads(answer)["error"]["code"]
    return [] if code == "context_length_exceeded" else [f"refused with the code {code!r}"]


def sample(ends: Sequence[int], binds: bool) -> Sequence[int]:
    """The places to replay: all on demand, else the last ones in a row, few where the window is no constraint."""
    if os.environ.get(FULL):
        return ends
    return ends[-PLACES:] if binds else ends[-2:]


async def replayed(
    stub: StartStub,
    proxy: StartProxy,
    jobs: Sequence[tuple[RecordedConversation, int, Sequence[int]]],
    may_refuse: bool,
) -> Replay:
    """The outcome of all *jobs* through one proxy that knows a model for every window in them."""
    windows = sorted({window for _, window, _ in jobs})
    server = await stub(windows={f"replay-{window}": window for window in windows})
    models: list[dict[str, Any]] = [
        {"name": f"replay-{window}", "upstream": "stub", "context_window": window, "tokenizer": "o200k_base"}
        for window in windows
    ]
    upstreams = [{"name": "stub", "base_url": server.url}]
    front = await proxy(server.url, config={"upstreams": upstreams, "models": models})
    async with aiohttp.ClientSession() as session:
        replay = Replay(front.url, server, session)
        gate = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(replay.conversation(gate, *job, may_refuse))
    return replay


@pytest.mark.parametrize("share", [0.50, 0.25])
async def test_every_conversation_is_answered(
    stub: StartStub,
    proxy: StartProxy,
    recordings: list[RecordedConversation],
    record_property: Callable[[str, object], None],
    share: float,
) -> None:
    """Each prefix is answered without an error, its pairs whole, its first task and newest user text still there."""
    jobs = []
    for recording in recordings:
        ends = recording.places()
        window = max(recording.floor(), int(share * recording.size))
        jobs.append((recording, window, sample(ends, window < recording.size * 1.1)))
    replay = await replayed(stub, proxy, jobs, may_refuse=False)
    print(f"\nwindows of {share:.0%}: {replay.ledger}, {replay.overflows} overflows recovered")
    record_property(f"repeated_prefix_{share}", round(replay.ledger.share, 3))
    assert not replay.problems, f"{len(replay.problems)} problems, the first:\n" + "\n".join(replay.problems[:20])
    assert replay.ledger.compacted > 0


async def test_impossible_windows_are_refused_before_the_upstream(
    stub: StartStub, proxy: StartProxy, recordings: list[RecordedConversation]
) -> None:
    """Below the floor a request is answered or refused with the error of a full window, never by the upstream."""
    jobs = []
    for recording in recordings:
        if '"file_data"' in json.dumps(recording.messages):
            continue  # a file's size is only a guess, and then the provider is asked
        window = max(512, recording.size // 4)
        if window < min(recording.floor(), recording.size):
            jobs.append((recording, window, recording.places()[-SHORT:]))
    replay = await replayed(stub, proxy, jobs, may_refuse=True)
    print(f"\nbelow the floor: {replay.ledger}, {replay.refused} refused, {replay.overflows} overflows")
    assert not replay.problems, f"{len(replay.problems)} problems, the first:\n" + "\n".join(replay.problems[:20])
    assert replay.overflows == 0
