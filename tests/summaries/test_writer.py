"""From a wanted to a verified text."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.engine.ports import Summary
from proxy.store.operations import MemoryBackend
from proxy.summaries import writer
from proxy.summaries.model_call import Summariser
from proxy.summaries.writer import NotWritten
from tests.conftest import StartStub
from tests.stub.summariser import Behaviour
from tests.support.engine_fixtures import tokenizers
from tests.support.summary_fixtures import SummaryReplica, entries_of, summary_request_of, summary_table


async def allow(tokens: int) -> str:
    return ""


def own(window: int) -> Summariser:
    return Summariser(
        "stub", "gpt-4o-mini", "chat", window, is_request_model=True, uses_client_headers=True, encoding="o200k_base"
    )


async def test_a_history_far_larger_than_the_window_is_folded_in_chunks(stub: StartStub) -> None:
    """However long the history, no call overflows the summariser's window, and each builds on the one before."""
    server = await stub(window=4096)
    bench = SummaryReplica(server, summary_table(MemoryBackend()))
    draft = await bench.writer.write(summary_request_of(entries_of(120), window=4096, cap=256), own(4096), None, allow)
    assert draft.calls == len(server.summaries) > 5
    assert {seen.verdict for seen in server.summaries} == {"ok"}
    assert "Note 120: " in draft.text
    assert all("summary so far" in seen.messages[1]["content"] for seen in server.summaries[1:])
    await bench.close()


@pytest.mark.slow
async def test_one_and_a_half_million_tokens_are_folded_through_a_hundred_thousand(
    stub: StartStub, record_property: Any
) -> None:
    """A history of 1.5M tokens goes through a window of 100K: no call is too big, none is wasted, the end is there."""
    server = await stub(window=100_000)
    bench = SummaryReplica(server, summary_table(MemoryBackend()), seconds=60.0)
    wanted = summary_request_of(entries_of(1370, 1090), window=100_000, cap=4096)
    assert wanted.prefix.tokens > 1_500_000
    draft = await bench.writer.write(wanted, own(100_000), None, allow)
    assert {seen.verdict for seen in server.summaries} == {"ok"}
    sizes = [seen.tokens for seen in server.summaries]
    record_property("calls", f"{draft.calls} of {max(sizes)} tokens at most")
    assert draft.calls == len(sizes) < 20
    assert min(sizes[:-1]) > 60_000, "calls that could have been fewer"
    assert "Note 1370: " in draft.text
    await bench.close()


async def test_the_budget_is_checked_before_work_is_done(stub: StartStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no call may be paid for, no source is read to verify a summary."""
    bench = SummaryReplica(await stub(), summary_table(MemoryBackend()))

    async def never(tokens: int) -> str:
        return "budget"

    monkeypatch.setattr(writer, "Source", None)
    with pytest.raises(NotWritten, match="budget"):
        await bench.writer.write(summary_request_of(entries_of(10)), own(8192), None, never)
    await bench.close()


async def test_a_previous_summary_is_built_upon(stub: StartStub) -> None:
    """With a summary of a prefix only the rest of the conversation is sent, and names of the prefix stay known."""
    server = await stub()
    bench = SummaryReplica(server, summary_table(MemoryBackend()))
    base = Summary("## Pending\n- Note 2: the shard of ledger_2 is 9402.", 12, 100)
    draft = await bench.writer.write(summary_request_of(entries_of(10)), own(8192), base, allow)
    (seen,) = server.summaries
    assert "Note 4: " not in seen.messages[1]["content"]
    assert "Note 2: the shard of ledger_2 is 9402." in draft.text
    assert "Note 10: " in draft.text
    await bench.close()


async def test_the_requests_own_prompt_ends_with_the_instruction(stub: StartStub) -> None:
    """In the aligned mode the warm prompt goes out again with one message more, where it fits."""
    server = await stub()
    bench = SummaryReplica(server, summary_table(MemoryBackend()), aligned=True)
    await bench.writer.write(summary_request_of(entries_of(10)), own(8192), None, allow)
    (seen,) = server.summaries
    assert [message["content"][:6] for message in seen.messages] == ["Note 1", "Stop h"]
    plain = SummaryReplica(server, summary_table(MemoryBackend()))
    assert bench.writer.version != plain.writer.version
    await bench.close()
    await plain.close()


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("empty", "empty"),
        ("refusing", "refusal"),
        ("looping", "too_long"),
        ("long", "too_long"),
        ("failing", "refused"),
    ],
)
async def test_what_is_not_usable_is_a_failure(stub: StartStub, behaviour: Behaviour, reason: str) -> None:
    """A rejected text is as good as none, and what it took is told."""
    server = await stub()
    server.summariser = behaviour
    bench = SummaryReplica(server, summary_table(MemoryBackend()))
    with pytest.raises(NotWritten) as failed:
        await bench.writer.write(summary_request_of(entries_of(10, 60), cap=96), own(8192), None, allow)
    assert failed.value.called_model
    assert failed.value.reason == reason
    assert (failed.value.tokens_used[0] > 0) is (behaviour != "failing")
    await bench.close()


async def test_a_transcript_that_is_too_expensive_has_less_detail(stub: StartStub) -> None:
    """When the whole transcript may not be paid for, a leaner one goes out; when that may not be either, none."""
    server = await stub()
    bench = SummaryReplica(server, summary_table(MemoryBackend()))
    asked: list[int] = []

    async def first_is_dear(tokens: int) -> str:
        asked.append(tokens)
        return "budget" if len(asked) == 1 else ""

    await bench.writer.write(summary_request_of(entries_of(10, 600)), own(8192), None, first_is_dear)
    assert asked[1] < asked[0] * 0.7

    async def never(tokens: int) -> str:
        return "budget"

    with pytest.raises(NotWritten, match="budget") as failed:
        await bench.writer.write(summary_request_of(entries_of(10)), own(8192), None, never)
    assert not failed.value.called_model
    assert failed.value.tokens_needed > 0
    await bench.close()


async def test_a_text_that_is_short_in_any_detail_is_counted_once(
    stub: StartStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaner transcript is counted by what is shorter in it: thousands of short items are as they were."""
    bench = SummaryReplica(await stub(), summary_table(MemoryBackend()))
    wanted, counted, count = summary_request_of(entries_of(40, 10)), list[str](), tokenizers().counter("o200k_base")

    def watched(text: str) -> int:
        counted.append(text)
        return count(text)

    monkeypatch.setitem(tokenizers().loaded, "o200k_base", watched)

    async def never(tokens: int) -> str:
        return "budget"

    with pytest.raises(NotWritten, match="budget"):
        await bench.writer.write(wanted, own(8192), None, never)
    assert len(counted) == len(set(counted)) > 40
    await bench.close()
