"""Past conversations through the engine: what would have been sent is counted truly, in linear time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.cli.replay import Replay, find_files, replay_sessions, request_bodies, request_lengths, totals
from proxy.cli.session_files import Session
from proxy.settings import load
from tests.stub.tokens import request_tokens
from tests.support.sample_conversations import agent_session, chat_turn

WINDOW = 8_192
MODEL = "gpt-4o-mini"


def settings(window: int | None = WINDOW, **compression: Any) -> Any:
    given: dict[tuple[str, ...], object] = {("compression", name): value for name, value in compression.items()}
    if window:
        given["models", "*", "context_window"] = window
    return load(None, given, {})


async def one(session: Session, window: int | None = WINDOW, model: str = MODEL, **compression: Any) -> Replay:
    (replayed,) = await replay_sessions(settings(window, **compression), [session], model, lambda _: None)
    return replayed


@pytest.mark.parametrize("kind", ["agent", "chat"])
@pytest.mark.slow
async def test_a_long_conversation_is_answered_to_its_end(kind: str) -> None:
    """Every request that the client alone could not have sent is sent smaller, and the costs are known."""
    messages = agent_session(40, 500) if kind == "agent" else [m for at in range(60) for m in chat_turn(at, 150)]
    replayed = await one(Session("s", "", messages))
    assert not replayed.problem
    total = totals([replayed])
    assert total.requests == total.answered == len(request_lengths(messages)) > total.fitted_before > 0
    assert 2 < total.compactions < total.requests / 4
    assert total.tokens_after < total.tokens_before
    assert 0.5 < total.repeated < 1
    assert total.cost is not None
    assert total.cost_before is not None
    assert 0 < total.cost < total.cost_before
    assert all(request.pressure is not None and request.pressure <= 1 for request in replayed.requests)
    assert all(request.compacted or not grew or request.repeated > 0 for grew, request in enumerate(replayed.requests))


@pytest.mark.slow
async def test_what_the_client_sent_is_counted() -> None:
    """The tokens before are those of the requests themselves, also where their bytes alone show that they fit."""
    session = Session("s", "", agent_session(6, 100))
    replayed = await one(session)
    assert totals([replayed]).compactions == 0
    for request, body in zip(replayed.requests, request_bodies(session, MODEL), strict=True):
        assert request.before == request.after
        assert abs(request.before - request_tokens(json.loads(body))) <= 8 + request.before // 50


async def test_the_bodies_are_the_requests_of_the_conversation() -> None:
    """Each body holds the conversation up to a point at which the model spoke next, with model and tools."""
    messages = agent_session(3, 20)
    tools = [{"type": "function", "function": {"name": "f"}}]
    bodies = [json.loads(body) for body in request_bodies(Session("s", "", messages, tools), "m")]
    assert all(body["model"] == "m" and body["tools"] == tools for body in bodies)
    assert [len(body["messages"]) for body in bodies] == request_lengths(messages)
    assert all(body["messages"] == messages[: len(body["messages"])] for body in bodies)
    assert all(body["messages"][-1]["role"] in ("user", "tool") for body in bodies)


@pytest.mark.slow
async def test_observing_sends_what_the_client_sent() -> None:
    """With mode observe nothing is made smaller, and the pressure shows it."""
    replayed = await one(Session("s", "", agent_session(40, 500)), mode="observe")
    assert max(request.before for request in replayed.requests) > WINDOW


async def test_an_unknown_window_is_a_problem() -> None:
    """Without a window nothing is planned, and the problem names the option."""
    replayed = await one(Session("s", "nobody-knows-this", agent_session(3, 20)), None)
    assert replayed.requests == ()
    assert "give --window" in replayed.problem


async def test_a_conversations_own_model_counts() -> None:
    """Its window and prices hold, not those of the model given for the others."""
    replayed = await one(Session("s", "gpt-4o", agent_session(3, 20)), None)
    assert (replayed.model, replayed.window) == ("gpt-4o", 128_000)
    assert replayed.prices is not None


@pytest.mark.slow
async def test_four_hundred_messages_turn_by_turn() -> None:
    """Nothing is counted twice: the engine counts about as much text as the conversation holds, however many turns."""
    from proxy.tokenizers import Tokenizers

    counted = 0
    whole = Tokenizers.count

    def count(self: Tokenizers, encoding: str, text: str) -> int:
        nonlocal counted
        counted += len(text)
        return whole(self, encoding, text)

    messages = agent_session(200, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizers, "count", count)
        replayed = await one(Session("s", "", messages), 16_384)
    assert len(messages) > 400
    assert totals([replayed]).answered == len(replayed.requests) > 190
    assert counted < 20 * len(json.dumps(messages))


def test_a_folder_is_searched(tmp_path: Path) -> None:
    """Conversations come from every known file below the folder, named by their path."""
    (tmp_path / "deep").mkdir()
    request = json.dumps({"messages": agent_session(2, 10)})
    (tmp_path / "deep" / "a.jsonl").write_text(request)
    (tmp_path / "b.json").write_text(request)
    (tmp_path / "c.txt").write_text(request)
    (tmp_path / "folder.md").mkdir()
    assert [(file.name, len(file.sessions)) for file in find_files(tmp_path)] == [("b.json", 1), ("deep/a.jsonl", 1)]
    assert [session.name for file in find_files(tmp_path / "b.json") for session in file.sessions] == ["b.json:1"]
    with pytest.raises(FileNotFoundError):
        list(find_files(tmp_path / "none.json"))
