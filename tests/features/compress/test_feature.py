"""Requests for views: what they answer, and that nothing is sent for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.errors import UllageError
from proxy.core.request import Origin, Request
from proxy.engine.ports import Answer, Refusal
from proxy.features.compress.feature import Compress
from tests.support.engine_fixtures import TENANT, Replica
from tests.support.sample_conversations import AGENT_SYSTEM, AGENT_TASK, agent_round

WINDOW = 8_192


def replica() -> Replica:
    """A replica that answers requests for views; its upstream refuses whatever is sent."""
    return Replica(features=lambda each: [Compress(each.reader, each.catalogue.resolve)])


def conversation(rounds: int) -> list[dict[str, Any]]:
    """An agent's conversation of so many rounds, of some 330 tokens each."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": AGENT_SYSTEM},
        {"role": "user", "content": AGENT_TASK},
    ]
    for number in range(rounds):
        messages += agent_round(number, 300)
    return messages


async def ask(at: Replica, agent: str = "", **members: Any) -> dict[str, Any]:
    """The answer to a request for a view. Raises the refusal."""
    body = json.dumps({"model": "m", **members}).encode()
    origin = Origin("/v1/compress", (("User-Agent", agent),))
    outcome = await at.engine.exchange(Request("chat", body, TENANT, "r", origin=origin, purpose="compress"))
    if isinstance(outcome, Refusal):
        raise outcome.error
    assert isinstance(outcome, Answer)
    answer: dict[str, Any] = json.loads(await outcome.reply.next_chunk())
    return answer


async def test_a_view_is_the_answer_and_nothing_is_sent() -> None:
    """It fits the window that the request names, says what was done, and keeps what must stay."""
    messages = conversation(40)
    answer = await ask(replica(), messages=messages, window=WINDOW)
    assert (answer["outcome"], answer["stages"], answer["window"]) == ("compacted", ["fold"], WINDOW)
    assert answer["tokens_after"] < WINDOW < answer["tokens_before"]
    assert answer["messages"][0] == messages[0]
    assert answer["messages"][-1] == messages[-1]
    assert len(answer["messages"]) < len(messages)


async def test_a_conversation_that_grows_keeps_its_beginning() -> None:
    """The compaction is recorded: later views begin with the same bytes."""
    at = replica()
    first = await ask(at, messages=conversation(40), window=WINDOW)
    second = await ask(at, messages=conversation(42), window=WINDOW)
    assert second["messages"][: len(first["messages"])] == first["messages"]


@pytest.mark.parametrize("how", [{"keep_items": True}, {"agent": "litellm/1.106.2"}])
async def test_a_gateway_gets_as_many_items_as_it_sent(how: dict[str, Any]) -> None:
    """No item is left out; results are made smaller where they stand, also those whose calls are not there."""
    at = replica()
    await ask(at, messages=conversation(40), window=WINDOW)  # a fold of the same conversation is not taken
    messages = [each for each in conversation(40) if each["role"] in ("user", "tool")]
    answer = await ask(at, messages=messages, window=4_000, **how)
    assert [each["role"] for each in answer["messages"]] == [each["role"] for each in messages]
    assert answer["tokens_after"] < 4_000 < answer["tokens_before"]
    whole = await ask(at, messages=conversation(40), window=WINDOW, **how)
    assert len(whole["messages"]) == 82


async def test_no_view_exceeds_its_target() -> None:
    """No view is larger than the target; a share compacts now."""
    at = replica()
    assert (await ask(at, messages=conversation(40), target=3_000))["tokens_after"] <= 3_000
    shared = await ask(at, messages=conversation(15), window=WINDOW, target=0.2)
    assert (shared["outcome"], shared["stages"]) == ("compacted", ["fold"])


async def test_a_target_that_only_guesses_exceed_is_refused() -> None:
    """A provider would judge them; whoever names a target wants no view that may be larger."""
    image = {"type": "image_url", "image_url": {"url": "https://images.test/a.png"}}
    with pytest.raises(UllageError, match="raise target"):
        await ask(replica(), messages=[{"role": "user", "content": [image]}], target=300)


async def test_without_a_window_nothing_is_made_smaller() -> None:
    """The answer is what was sent, counted, and says why."""
    messages = conversation(3)
    answer = await ask(replica(), messages=messages)
    assert answer["messages"] == messages
    assert answer["tokens_before"] == answer["tokens_after"] > 500


@pytest.mark.parametrize(
    ("members", "api"),
    [
        ({"messages": conversation(1)[1:2], "system": "s " * 5_000, "window": 1_000}, "messages"),
        ({"input": "no list", "window": 1_000, "instructions": "i " * 5_000}, "responses"),
        ({"messages": 1}, "chat"),
        ({"messages": conversation(9), "target": 40}, "chat"),
    ],
)
async def test_a_refusal_has_the_shape_of_the_api(members: dict[str, Any], api: str) -> None:
    """A body that cannot fit, or cannot be read, is refused in the shape of its own API."""
    body = json.dumps({"model": "m", **members}).encode()
    outcome = await replica().engine.exchange(Request("chat", body, TENANT, "r", purpose="compress"))
    assert isinstance(outcome, Refusal)
    assert (outcome.error_api, outcome.error.status, outcome.report.outcome) == (api, 400, "refused")


async def test_a_fault_of_ours_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller asked for nothing to be sent: a fault is its answer."""
    at = replica()
    monkeypatch.setattr("proxy.features.compress.feature.read_body", lambda body: 1 / 0)
    with pytest.raises(UllageError):
        await ask(at, messages=conversation(1))
