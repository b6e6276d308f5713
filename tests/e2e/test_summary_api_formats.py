"""How a summary is asked for: over every API, with a warm prompt, with what is configured for its model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import StartProxy, StartStub
from tests.stub import Seen, Stub
from tests.stub.summariser import FOREIGN
from tests.support.agent_loop import KEY, WINDOW, AgentLoop
from tests.support.process_inspection import metrics, total


def answered(server: Stub) -> list[Seen]:
    """The calls for summaries that were answered: one more may be under way when a test ends."""
    return [seen for seen in server.summaries if seen.answered_at is not None]


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_every_api_has_its_summaries(stub: StartStub, home: Path, proxy: StartProxy, api: str) -> None:
    """Over Messages and Responses a summary is asked for on the same API with the caller's key, and used."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, window=WINDOW, home=home)
    async with AgentLoop(server, [front], 600, api=api, gated=True) as loop:
        while not loop.spent:
            await loop.ask()
            assert loop.rounds < 40
        assert "as a model summed it up" in loop.shown()
    for seen in answered(server):
        assert seen.verdict == "ok", seen.why
        assert seen.path == f"/v1/{api}"
        assert "tools" not in seen.parsed
    credential = server.summaries[0].header("x-api-key" if api == "messages" else "authorization")
    assert credential.removeprefix("Bearer ") == KEY
    assert len(server.summaries) <= len(loop.events) + 1


@pytest.mark.parametrize("api", ["chat", "messages", "responses", "gemini"])
async def test_only_what_was_requested_and_checked_stands_in_the_block(
    stub: StartStub, home: Path, proxy: StartProxy, api: str
) -> None:
    """Over every API and two compactions: the headings, pins, digest; no thoughts, inventions or orders of a model's.

    The summary of the second compaction continues the first one's.
    """
    server = await stub(window=WINDOW)
    server.summariser = "untidy"
    config = {"summaries": {"spend": 1.0}}
    front = await proxy(server.url, window=WINDOW, config=config, home=home)
    said, continued = "Never touch shard_501 without a backup of zone_701.", False
    async with AgentLoop(server, [front], 600, api=api) as loop:
        while len(loop.events) < 3 or not continued:
            await loop.ask(text=said if loop.rounds == 2 else "")
            continued = any("summary so far" in seen.body.decode() for seen in answered(server))
            assert loop.rounds < 60
        shown = loop.shown()
    assert loop.spent > 0
    _, _, below = shown.partition("What happened so far, as a model summed it up:\n")
    summary, digest = below.partition("## Pending")[0], below.partition("mentioned: ")[2].partition("Steps so far")[0]
    named = set(re.findall(r"ledger_\d+|\d{4}", summary))
    assert named
    assert digest
    assert named.isdisjoint(re.findall(r"\w+", digest)), "a name stands in the summary and in the digest"
    assert "## State\n- The ledgers were looked through" in below
    assert "## Pending\n- The rest is to be read." in below
    left_out = [
        "think",
        "Here is your summary",
        "```",
        "Key files",
        "A list of what",
        "Next steps",
        "invented",
        "77123",
    ]
    assert [each for each in (*left_out, *FOREIGN) if each in below] == []
    assert said in shown.partition("What happened so far")[0], "the user's words stand word for word beside it"
    assert total(await metrics(front), "ullage_summaries_total", outcome="failed") == 0


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_a_warm_prompt_is_sent_again(stub: StartStub, home: Path, proxy: StartProxy, api: str) -> None:
    """In the aligned mode a summary's prompt begins as the request's own did: the provider has most of it cached."""
    server = await stub(window=WINDOW)
    config = {"summaries": {"aligned": True, "spend": 1.0}}
    front = await proxy(server.url, window=WINDOW, config=config, home=home)
    async with AgentLoop(server, [front], 600, api=api, gated=True) as loop:
        while not loop.spent:
            await loop.ask()
            assert loop.rounds < 40
        views = loop.stub.chats()
    assert total(await metrics(front), "ullage_summaries_total", outcome="written")
    for seen in answered(server):
        assert seen.verdict == "ok", seen.why
        assert seen.parsed["tools"] == views[0].parsed["tools"]
        assert seen.parsed.get("system") == views[0].parsed.get("system")
        shared = seen.slices[:-1]
        before = [view.slices[: len(shared)] for view in views if view.number < seen.number]
        assert shared in before, "what goes before the instruction was never sent"
        assert seen.cached > 0.8 * seen.tokens


async def test_a_summariser_is_found_by_its_alias(stub: StartStub, home: Path, proxy: StartProxy) -> None:
    """A configured alias is asked as the model it stands for, with its headers, on its own deployment's path."""
    server = await stub(window=32768)
    config = {
        "models": [
            {"name": "writer", "model": "gpt-4o", "headers": {"x-team": "summaries"}},
            {"name": "gpt-4o", "context_window": 32768},
            {"name": "*", "context_window": WINDOW, "headers": {"x-team": "agents"}},
        ],
        "summaries": {"model": "writer"},
    }
    front = await proxy(server.url, config=config, home=home)
    path = "/openai/deployments/gpt-4o-mini/chat/completions?api-version=2024-10-21"
    async with AgentLoop(server, [front], 600, path=path) as loop:
        while not loop.spent:
            await loop.ask()
            assert loop.rounds < 40
    for seen in answered(server):
        assert seen.path == "/openai/deployments/gpt-4o/chat/completions"
        assert seen.query == "api-version=2024-10-21"
        assert seen.model == "gpt-4o"
        assert seen.header("x-team") == "summaries"
        assert seen.header("authorization") == f"Bearer {KEY}"
    assert {seen.header("x-team") for seen in server.chats()} == {"agents"}
    assert {seen.path for seen in server.chats()} == {"/openai/deployments/gpt-4o-mini/chat/completions"}


async def test_the_models_own_headers_go_with_its_summaries(stub: StartStub, home: Path, proxy: StartProxy) -> None:
    """Where the request's own model writes, what is configured for it goes along, under the name it was asked by."""
    server = await stub(window=WINDOW)
    config = {
        "models": [
            {"name": "fast", "model": "gpt-4o-mini", "headers": {"x-team": "alias"}},
            {"name": "*", "context_window": WINDOW},
        ]
    }
    front = await proxy(server.url, config=config, home=home)
    async with AgentLoop(server, [front], 600, model="fast") as loop:
        while not loop.spent:
            await loop.ask()
            assert loop.rounds < 40
    assert {(seen.model, seen.header("x-team")) for seen in answered(server)} == {("gpt-4o-mini", "alias")}
