"""Which tool results give way: duplicates first, then old ones."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from proxy.core.apis import chat
from proxy.core.compaction.prune import (
    FRAME,
    KIND_WEIGHTS,
    LINE,
    DedupRules,
    PrunePassRules,
    PruneRange,
    PruneRules,
    find_duplicates,
    first_protected,
    oldest_results,
    placeholder_text,
    placeholder_tokens,
    prune_pass,
    rank_prunable,
)
from proxy.core.compaction.record import PlaceholderReason
from proxy.core.conversation import UNREAD, FactsMissing, Item, ItemText, lay_out, unread_from
from proxy.core.tool_calls import Pair, facts_of, pairs_of
from tests.support.conversation_strategies import Message, agent_sessions
from tests.support.engine_fixtures import chat_body, count_tokens, message_slices, read_one, tool_map_of_package
from tests.support.sample_conversations import coding_session

Step = tuple[str, dict[str, Any], str]


def pairs(*steps: Step) -> list[Pair]:
    items: list[Item] = []
    for number, (name, arguments, result) in enumerate(steps):
        texts = [
            ItemText("assistant", "", ((name, json.dumps(arguments)),)),
            ItemText("tool", "", results=((result, False),)),
        ]
        call, answer = facts_of(texts, tool_map_of_package().calls, count_tokens)
        items.append(Item("assistant", 10, 0, b"", (str(number),), facts=call))
        items.append(
            Item(
                "tool",
                500,
                0,
                b"",
                (),
                (str(number),),
                facts=answer,
            )
        )
    return pairs_of(items, 0, len(items))


def found(*steps: Step, rules: DedupRules | None = None) -> list[tuple[int, str, int]]:
    """Which steps give way, why, and to which step."""
    taken = pairs(*steps)
    swaps = find_duplicates(taken, rules or DedupRules(), 2 * len(taken))
    return sorted((swap.index // 2, swap.reason, swap.same_as // 2) for swap in swaps)


def listing(first: int, last: int, word: str = "x") -> str:
    return "\n".join(f"{n}\t{word}" for n in range(first, last + 1))


READ: dict[str, Any] = {"file_path": "src/a.py"}
PART = {**READ, "offset": 10, "limit": 11}
EDIT: Step = ("Edit", READ, "The file was updated.")


def test_exact_duplicates_give_way_to_the_newest() -> None:
    """Three equal calls with equal results leave the last one; another result or another tool leaves all."""
    step: Step = ("Grep", {"pattern": "x", "path": "src"}, "a.py: x")
    assert found(step, step, step) == [(0, "repeated", 2), (1, "repeated", 2)]
    assert found(step, ("Grep", step[1], "b.py: x")) == []
    shell: Step = ("Bash", {"command": "date"}, "today")
    assert found(shell, shell) == []


def test_a_read_before_a_change_gives_way_to_one_after() -> None:
    """Read, edit, read again: the first is stale, the edit's confirmation stays."""
    assert found(("Read", READ, listing(1, 50)), EDIT, ("Read", READ, listing(1, 51, "y"))) == [(0, "reread", 2)]


@pytest.mark.parametrize(
    "later",
    [
        ("Read", PART, listing(10, 20, "y")),
        ("Read", READ, "Error: file not found"),
        ("Read", READ, ""),
        ("Read", READ, listing(1, 30, "y") + "\n(output truncated)"),
        ("Read", {"file_path": "src/b.py"}, listing(1, 60, "y")),
    ],
)
def test_a_later_read_that_does_not_cover_leaves_the_earlier(later: Step) -> None:
    """A part, a failure, a cut listing or another file never stands for the whole."""
    assert found(("Read", READ, listing(1, 50)), EDIT, later) == []


def test_lines_decide_what_covers() -> None:
    """A part is covered by a whole, by a longer part and by the same part, not by a shorter one."""
    part: Step = ("Read", PART, listing(10, 20))
    whole: Step = ("Read", READ, listing(1, 50, "y"))
    assert found(part, whole) == [(0, "included", 1)]
    assert found(part, ("Read", {**READ, "offset": 5, "limit": 30}, listing(5, 34, "y"))) == [(0, "included", 1)]
    assert found(part, ("Read", {**READ, "offset": 12, "limit": 30}, listing(12, 41, "y"))) == []
    assert found(part, EDIT, ("Read", PART, listing(10, 20, "y"))) == [(0, "reread", 2)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"offset": 0, "length": 4096}, "y\n" * 2048),
        ({"offset": 0, "limit": 4096}, "y\n" * 2048),
        ({"offset": 0, "limit": 100}, "y\n" * 2048),
        ({"offset": 9}, "y\n" * 2048),
        ({"head": 100}, "y\n" * 100),
        ({"pages": "1-2"}, "y\n" * 100),
    ],
)
def test_a_reading_in_an_unknown_unit_covers_nothing(arguments: dict[str, object], text: str) -> None:
    """Bytes, pages and what else a range may count never stand for a longer reading, nor for one of lines."""
    later: Step = ("read_file", {**READ, **arguments}, text)
    assert found(("read_file", READ, listing(1, 300)), later) == []
    assert found(("read_file", {**READ, "offset": 10, "limit": 20}, "x\n" * 20), later) == []


def test_a_default_limit_is_no_whole_file() -> None:
    """A read that stopped at its tool's own limit covers only the lines it shows."""
    capped: Step = ("Read", READ, listing(1, 2000, "y"))
    assert found(("Read", {**READ, "offset": 1990, "limit": 50}, listing(1990, 2039)), capped) == []
    assert found(("Read", {**READ, "offset": 1900, "limit": 50}, listing(1900, 1949)), capped) == [(0, "included", 1)]


def test_a_search_in_a_file_that_is_read_whole_later() -> None:
    """A grep on one file gives way to a full read of it, not to a part, and never for a folder."""
    grep: Step = ("Grep", {"pattern": "x", "path": "src/a.py"}, "1: x")
    assert found(grep, ("Read", READ, listing(1, 50))) == [(0, "included", 1)]
    assert found(grep, ("Read", PART, listing(10, 20))) == []
    assert found(("Grep", {"pattern": "x", "path": "src"}, "a: x"), ("Read", READ, listing(1, 50))) == []


def test_nothing_gives_way_to_what_gave_way() -> None:
    """Of several readings each names the one that stays."""
    steps: list[Step] = []
    for version in range(4):
        steps += [("Read", READ, listing(1, 40, f"v{version}")), EDIT]
    steps.append(("Read", READ, listing(1, 40, "end")))
    assert {by for _, _, by in found(*steps)} == {8}


def test_each_rule_can_be_switched_off() -> None:
    """Without its switch a rule finds nothing."""
    same: Step = ("Grep", {"pattern": "x"}, "a")
    grep: Step = ("Grep", {"pattern": "x", "path": "src/a.py"}, "1: x")
    read: Step = ("Read", READ, listing(1, 50))
    assert found(same, same, rules=DedupRules(exact=False)) == []
    assert found(read, EDIT, ("Read", READ, listing(1, 51)), rules=DedupRules(stale_reads=False)) == []
    assert found(grep, read, rules=DedupRules(grep_subsumed=False)) == []


def agent(*names: str, says: dict[int, str] | None = None, tokens: int = 500) -> list[Item]:
    """Rounds of one call each; ``says`` is what the model writes before round n."""
    items = [Item("user", 10, 0, b"")]
    for number, name in enumerate(names):
        entry = ItemText(
            "assistant", (says or {}).get(number, ""), ((name, json.dumps({"path": f"src/f{number}.py"})),)
        )
        answer = ItemText("tool", "", results=((f"the result of step {number} is long", False),))
        call, result = facts_of([entry, answer], tool_map_of_package().calls, count_tokens)
        items.append(Item("assistant", 10, 0, b"", (str(number),), facts=call))
        items.append(Item("tool", tokens, 0, b"", (), (str(number),), facts=result))
    return items


def order(items: list[Item], rules: PruneRules | None = None) -> list[int]:
    """The steps that may go, first to last."""
    return [
        swap.index // 2 - 1
        for swap in rank_prunable(pairs_of(items, 0, len(items)), items, len(items), rules or PruneRules())
    ]


def test_kinds_go_by_weight_then_age_unknown_last() -> None:
    """Shell output goes before searches, reads and lists; unknown tools go last, protected ones never."""
    names = ("lookup", "LS", "Read", "Grep", "Bash", "Bash", "TodoWrite", "WebFetch", "Edit")
    assert order(agent(*names)) == [4, 5, 7, 3, 2, 1, 8, 0]


def test_what_the_model_came_back_to_stays_longer() -> None:
    """A file that is named later, a conclusion that follows and a quotation each keep a result longer."""
    names = ("Read", "Read", "Read", "Read", "Read")
    assert order(agent(*names)) == [0, 1, 2, 3, 4]
    assert order(agent(*names, says={3: "f1.py is wrong"})) == [0, 2, 3, 4, 1]
    assert order(agent(*names, says={1: "The issue is clear."})) == [1, 2, 3, 4, 0]
    assert order(agent(*names, says={4: 'It said "the result of step 2 is long".'})) == [0, 1, 3, 4, 2]


def test_a_kind_without_weight_never_goes() -> None:
    """Weights are settings: what is not listed stays."""
    assert order(agent("Read", "Bash"), PruneRules(weights={"shell": 1})) == [1]
    assert KIND_WEIGHTS["glob"] > KIND_WEIGHTS["file_edit"]


def test_the_newest_rounds_and_tokens_are_protected() -> None:
    """The result at which the tokens exceed the limit may go; none after it, and none of the newest rounds."""
    items = agent(*["Bash"] * 10)
    layout = lay_out(items)
    assert first_protected(layout, 0, len(items), PruneRules(protect_rounds=3, protect_tokens=0)) == len(items) - 6
    assert first_protected(layout, 0, len(items), PruneRules(protect_rounds=0, protect_tokens=1200)) == len(items) - 4
    assert first_protected(layout, 0, len(items), PruneRules(protect_rounds=50, protect_tokens=0)) == 0


def test_small_windows_protect_less() -> None:
    """Figures in tokens and rounds shrink with the window, but the newest round stays protected."""
    assert PruneRules().scaled(400_000) == PruneRules()
    small = PruneRules().scaled(10_000)
    assert (small.protect_rounds, small.protect_tokens, small.min_saving) == (1, 2_000, 1_000)


def test_the_oldest_go_in_order_until_it_is_enough() -> None:
    """However a result is worth, the oldest goes first, no more than are needed, none where all are too few."""
    items = agent("TodoWrite", "Read", "lookup", "Bash", tokens=500)
    pairs = pairs_of(items, 0, len(items))

    def removed_rounds(over: int) -> list[int] | None:
        found = oldest_results(pairs, items, over)
        return None if found is None else [swap.index // 2 - 1 for swap in found]

    assert [removed_rounds(over) for over in (0, 1, 300, 600, 1000)] == [[], [0], [0], [0, 1], [0, 1, 2]]
    assert removed_rounds(5000) is None
    short = agent("Read", "Read", tokens=60)
    assert oldest_results(pairs_of(short, 0, len(short)), short, 1) is None


RULES = PrunePassRules(DedupRules(), PruneRules(protect_rounds=1, protect_tokens=0, min_saving=0))


def stretch_of(messages: list[Message]) -> PruneRange:
    items: list[Item] = [
        read_one(chat, raw, count_tokens, tool_map_of_package()) for raw in message_slices(chat_body(messages))
    ]
    return PruneRange(items, lay_out(items), 0, len(items))


@settings(max_examples=60, deadline=None)
@given(agent_sessions(), st.integers(1, 20_000))
def test_it_saves_what_it_must_or_does_nothing(messages: list[Message], need: int) -> None:
    """The chosen results save enough together, each saves something, and none is what another names."""
    stretch = stretch_of(messages)
    found = prune_pass(stretch, need, 200_000, RULES)
    if found is None:
        return
    gains = [stretch.items[s.index].tokens - placeholder_tokens(stretch.items[s.index]) for s in found[0]]
    assert sum(gains) >= need
    assert min(gains) >= 50
    gone = {swap.index for swap in found[0]}
    assert gone.isdisjoint(swap.same_as for swap in found[0])
    assert all(stretch.items[index].answers for index in gone)
    assert set(found[1]) <= {"dedup", "prune"}


@settings(max_examples=30, deadline=None)
@given(agent_sessions())
def test_a_later_one_adds_to_what_is_there(messages: list[Message]) -> None:
    """A replaced result is not replaced again, and the result that its line names stays."""
    stretch = stretch_of(messages)
    first = prune_pass(stretch, 1, 200_000, PrunePassRules(DedupRules(), None))
    if first is None:
        return
    second = prune_pass(replace(stretch, placeholders=first[0]), 1, 200_000, RULES)
    if second is not None:
        again = {swap.index for swap in second[0]}
        assert again.isdisjoint(swap.index for swap in first[0])
        assert again.isdisjoint(swap.same_as for swap in first[0])


def test_switched_off_it_does_nothing() -> None:
    """Without both parts there is no mild compaction; a saving below the least is none for pruning."""
    said = "\n".join(f"row {n}" for n in range(400))
    messages: list[Message] = [{"role": "user", "content": "go"}]
    for n in range(6):
        call = {"id": f"c{n}", "type": "function", "function": {"name": "Bash", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{n}", "content": said + str(n)})
    stretch = stretch_of(messages)
    assert prune_pass(stretch, 1000, 200_000, PrunePassRules(None, None)) is None
    assert prune_pass(stretch, 1000, 200_000, RULES) is not None
    assert (
        prune_pass(stretch, 1000, 200_000, PrunePassRules(None, replace(RULES.prune or PruneRules(), min_saving=10**6)))
        is None
    )
    assert prune_pass(stretch, 10**6, 200_000, RULES) is None


@settings(max_examples=30, deadline=None)
@given(agent_sessions(), st.integers(1, 20_000))
def test_what_was_made_smaller_before_saves_no_more_than_it_takes(messages: list[Message], need: int) -> None:
    """A truncated result counts for what it still takes, not for what it was."""
    stretch = stretch_of(messages)
    sizes = {index: 60 for index, item in enumerate(stretch.items) if item.answers and item.tokens > 60}
    found = prune_pass(replace(stretch, reduced=sizes), need, 200_000, RULES)
    if found is not None:
        items = stretch.items
        saved = sum(sizes.get(s.index, items[s.index].tokens) - placeholder_tokens(items[s.index]) for s in found[0])
        assert saved >= need


def test_results_that_save_too_little_together_are_not_looked_at() -> None:
    """Without the facts of calls, which only a closer look needs, it is seen that no placeholders can save enough."""
    stretch = stretch_of(coding_session(4, 300))
    unread = [item if item.facts is None else structs.replace(item, facts=UNREAD) for item in stretch.items]
    most = sum(stretch.savings(RULES.min_saving).values())
    assert most > 0
    assert prune_pass(replace(stretch, items=unread), most + 1, 200_000, RULES) is None
    with pytest.raises(FactsMissing):
        prune_pass(replace(stretch, items=unread), most, 200_000, RULES)


def test_what_no_model_has_read_is_not_pruned() -> None:
    """Where nothing is protected, the newest results still are while the model has not seen them."""
    messages = coding_session(4, 300)
    while messages[-1]["role"] != "tool":
        messages.pop()
    stretch = stretch_of(messages)
    rules = PrunePassRules(None, PruneRules(protect_rounds=0, protect_tokens=0, min_saving=0))
    most = next(need for need in range(20_000, 0, -50) if prune_pass(stretch, need, 200_000, rules))
    found = prune_pass(stretch, most, 200_000, rules)
    assert found is not None
    border = unread_from(stretch.items, len(stretch.items))
    assert border < len(stretch.items)
    assert all(swap.index < border for swap in found[0])


def test_of_unread_results_only_what_another_repeats_to_the_letter_gives_way() -> None:
    """A file that is read twice in the newest round stays twice, unless both readings are the same."""
    names = ("a.py", "a.py", "b.py", "b.py")
    texts = ("one " * 300, "two " * 300, "same " * 300, "same " * 300)
    calls = [
        {
            "id": str(at),
            "type": "function",
            "function": {"name": "read_file", "arguments": json.dumps({"path": name})},
        }
        for at, name in enumerate(names)
    ]
    results = [{"role": "tool", "tool_call_id": str(at), "content": text} for at, text in enumerate(texts)]
    asked: list[Message] = [{"role": "user", "content": "Read them."}, {"role": "assistant", "tool_calls": calls}]
    messages = [*asked, *results]
    found = prune_pass(stretch_of(messages), 1, 200_000, RULES)
    assert found is not None
    assert [(swap.index, swap.reason) for swap in found[0]] == [(4, "repeated")]
    later = [*messages, {"role": "assistant", "content": "Read."}, {"role": "user", "content": "Go on."}]
    found = prune_pass(stretch_of(later), 1, 200_000, RULES)
    assert found is not None
    assert {swap.index for swap in found[0]} == {2, 4}


@pytest.mark.parametrize("why", ["repeated", "reread", "included", "again", "old"])
@pytest.mark.parametrize("ok", [True, False])
def test_a_line_is_short_and_invents_nothing(why: PlaceholderReason, ok: bool) -> None:
    """It carries no long number and no path of its own, names the target, and fits what it is charged at."""
    text = placeholder_text(why, "Read", "TARGET", ok=ok, error="LINE")
    assert count_tokens(text) <= LINE
    assert not re.search(r"\d{3}|[/\\]", text)
    assert ("TARGET" in text) is (why != "repeated")
    assert ("LINE" in text) is (why == "old" and not ok)
    assert placeholder_text(why, "Read", "", ok=ok, error="")


def test_nothing_is_charged_more_than_it_weighed() -> None:
    """A small result is charged as it is, a large one at its line and a share of its names."""
    assert placeholder_tokens(Item("tool", 30, 0, b"", (), ("a",))) == 30
    assert placeholder_tokens(Item("tool", 5000, 0, b"", (), ("a",))) == FRAME + LINE + 500
    assert placeholder_tokens(Item("tool", 5000, 0, b"", (), ("a", "b"))) == FRAME + 2 * LINE + 500
