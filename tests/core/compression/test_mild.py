"""The mild event: enough or nothing, and never what another line names."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.compression.dedup import Dedup
from proxy.core.compression.mild import Mild, Stretch, swaps
from proxy.core.compression.prune import Prune
from proxy.core.compression.swap import charge
from proxy.core.conversation import chat
from proxy.core.conversation.items import Item, lay_out, unread_from
from proxy.engine.reading import read_one
from tests.support.conversation_strategies import Message, agent_sessions
from tests.support.engine_fixtures import chat_body, count_tokens, message_slices, tool_map_of_package
from tests.support.sample_conversations import coding_session

RULES = Mild(Dedup(), Prune(protect_rounds=1, protect_tokens=0, min_saving=0))


def stretch_of(messages: list[Message]) -> Stretch:
    items: list[Item] = [
        read_one(chat, raw, count_tokens, tool_map_of_package()) for raw in message_slices(chat_body(messages))
    ]
    return Stretch(items, lay_out(items), 0, len(items))


@settings(max_examples=60, deadline=None)
@given(agent_sessions(), st.integers(1, 20_000))
def test_it_saves_what_it_must_or_does_nothing(messages: list[Message], need: int) -> None:
    """The chosen results save enough together, each saves something, and none is what another names."""
    stretch = stretch_of(messages)
    found = swaps(stretch, need, 200_000, RULES)
    if found is None:
        return
    gains = [stretch.items[s.index].tokens - charge(stretch.items[s.index]) for s in found[0]]
    assert sum(gains) >= need
    assert min(gains) >= 50
    gone = {swap.index for swap in found[0]}
    assert gone.isdisjoint(swap.by for swap in found[0])
    assert all(stretch.items[index].answers for index in gone)
    assert set(found[1]) <= {"dedup", "prune"}


@settings(max_examples=30, deadline=None)
@given(agent_sessions())
def test_a_later_one_adds_to_what_is_there(messages: list[Message]) -> None:
    """What gave way does not do so twice, and what it names stays."""
    stretch = stretch_of(messages)
    first = swaps(stretch, 1, 200_000, Mild(Dedup(), None))
    if first is None:
        return
    second = swaps(replace(stretch, held=first[0]), 1, 200_000, RULES)
    if second is not None:
        again = {swap.index for swap in second[0]}
        assert again.isdisjoint(swap.index for swap in first[0])
        assert again.isdisjoint(swap.by for swap in first[0])


def test_switched_off_it_does_nothing() -> None:
    """Without both parts there is no mild event; a saving below the least is none for pruning."""
    said = "\n".join(f"row {n}" for n in range(400))
    messages: list[Message] = [{"role": "user", "content": "go"}]
    for n in range(6):
        call = {"id": f"c{n}", "type": "function", "function": {"name": "Bash", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{n}", "content": said + str(n)})
    stretch = stretch_of(messages)
    assert swaps(stretch, 1000, 200_000, Mild(None, None)) is None
    assert swaps(stretch, 1000, 200_000, RULES) is not None
    assert swaps(stretch, 1000, 200_000, Mild(None, replace(RULES.prune or Prune(), min_saving=10**6))) is None
    assert swaps(stretch, 10**6, 200_000, RULES) is None


@settings(max_examples=30, deadline=None)
@given(agent_sessions(), st.integers(1, 20_000))
def test_what_was_made_smaller_before_saves_no_more_than_it_takes(messages: list[Message], need: int) -> None:
    """A truncated result counts for what it still takes, not for what it was."""
    stretch = stretch_of(messages)
    sizes = {index: 60 for index, item in enumerate(stretch.items) if item.answers and item.tokens > 60}
    found = swaps(replace(stretch, sizes=sizes), need, 200_000, RULES)
    if found is not None:
        items = stretch.items
        saved = sum(sizes.get(s.index, items[s.index].tokens) - charge(items[s.index]) for s in found[0])
        assert saved >= need


def test_what_no_model_has_read_is_not_pruned() -> None:
    """Where nothing is protected, the newest results still are while the model has not seen them."""
    messages = coding_session(4, 300)
    while messages[-1]["role"] != "tool":
        messages.pop()
    stretch = stretch_of(messages)
    rules = Mild(None, Prune(protect_rounds=0, protect_tokens=0, min_saving=0))
    most = next(need for need in range(20_000, 0, -50) if swaps(stretch, need, 200_000, rules))
    found = swaps(stretch, most, 200_000, rules)
    assert found is not None
    border = unread_from(stretch.items, len(stretch.items))
    assert border < len(stretch.items)
    assert all(swap.index < border for swap in found[0])
