"""How often results that no model has read yet are cut: ``python -m tests.bench.unread``.

Every recorded conversation is replayed request by request into windows that are smaller than it is. Counted are the
requests that end in tool results: how many there are, in how many a result behind the last assistant message is not
what the client sent, and in how many of those the results would have fitted whole beside the least that may stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from proxy.core.compaction.stages import BLOCK_FRAME
from tests.support.engine_fixtures import Replica, message_slices
from tests.support.recorded_conversations import RecordedConversation, read_all

WINDOWS = (2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152)
RESULTS = ("tool", "function")


@dataclass
class Counts:
    """What was seen: requests that end in tool results, those with a result cut, and those cut without need."""

    requests: int = 0
    refused: int = 0
    cut: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The figures in words."""
        return (
            f"{self.requests} requests that end in tool results: {len(self.cut)} with an unread result cut, "
            f"{len(self.needless)} of them although all of it would have fitted; {self.refused} refused"
        )


def sampled(places: Sequence[int], most: int) -> list[int]:
    """At most *most* of *places*, evenly spread, the last one among them."""
    step = max(1, -(-len(places) // most))
    return list(places[::-1][::step][::-1])


def unread_from(recording: RecordedConversation, end: int) -> int:
    """The index of the first message behind the last assistant message of the first *end* messages."""
    said = (at for at in range(end - 1, -1, -1) if recording.messages[at]["role"] == "assistant")
    return next(said, -1) + 1


def least(recording: RecordedConversation, end: int) -> int:
    """Tokens of the smallest view that holds the unread results whole: the task, the newest user text, the round."""
    weights, roles = recording.weights, [message["role"] for message in recording.messages[:end]]
    first = unread_from(recording, end)
    while first and roles[first - 1] == "assistant":
        first -= 1
    users = [at for at, role in enumerate(roles) if role == "user"]
    kept = {*users[:1], *users[-1:], *range(first, end)}
    return recording.fixed + sum(weights[at] for at in kept if roles[at] not in ("system", "developer"))


def budget(window: int) -> int:
    """Tokens of input beside the answer and what a step of the fixed part may round up."""
    return window - window // 8 - window // 64 - 2 * BLOCK_FRAME


async def replay(recording: RecordedConversation, window: int, ends: Sequence[int], counts: Counts) -> None:
    """Send the prefixes of *recording* that end at *ends* through one replica, and count."""
    replica = Replica()
    for end in ends:
        raw = recording.body(end, "house-model")
        plan = await replica.plan(raw, window)
        if recording.messages[end - 1]["role"] not in RESULTS:
            continue
        counts.requests += 1
        if plan.error is not None:
            counts.refused += 1
            continue
        unread = message_slices(raw)[unread_from(recording, end) :]
        if message_slices(plan.body)[-len(unread) :] == unread:
            continue
        name = f"{recording.name}[:{end}] in {window}"
        counts.cut.append(name)
        if least(recording, end) <= budget(window):
            counts.needless.append(name)


def work(
    recordings: Sequence[RecordedConversation], most: int, windows: Sequence[int]
) -> Iterator[tuple[RecordedConversation, int, list[int]]]:
    """Each recording that has tool results, with each window that is smaller than it and at most *most* places."""
    for recording in recordings:
        if any(message["role"] in RESULTS for message in recording.messages):
            for window in windows:
                if recording.fixed * 2 < window < recording.size * 1.2:
                    yield recording, window, sampled(recording.places(), most)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.unread", description=__doc__)
    parser.add_argument("--most", type=int, default=12, help="requests of each conversation and window")
    parser.add_argument("--each", action="store_true", help="name the requests")
    given = parser.parse_args()
    counts = Counts()
    for recording, window, ends in work(read_all(), given.most, WINDOWS):
        asyncio.run(replay(recording, window, ends, counts))
    print(counts.line())
    if given.each:
        print(json.dumps({"needless": counts.needless, "cut": counts.cut}, indent=1))


if __name__ == "__main__":
    main()
