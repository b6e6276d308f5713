"""The stages, one at a time: what each makes of a view in token counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from proxy.core.compaction.record import NO_COMPACTION, Compaction, Placeholder
from proxy.core.compaction.stages import (
    BLOCK_FRAME,
    CLIP_FLOOR,
    LEAST_CALL,
    CompactionRules,
    EnabledStages,
    Levels,
    Stages,
    shortest,
)
from proxy.core.conversation import Item, ItemFacts, Result, lay_out
from proxy.core.decisions import API_FORMATS
from proxy.core.tokens.budget import Marks, Shares, TokenBudget
from tests.support.api_formats import to_gemini, to_messages, to_responses
from tests.support.engine_fixtures import count_tokens

RULES = CompactionRules(Marks(), Shares(), EnabledStages())
BUDGET = TokenBudget(8192, 1024, 300, 1024)
LEVELS = Levels(high=6_000, budget=6_600, goal=2_500, clip_to=4_000)


def item(role: str, tokens: int, calls: Sequence[str] = (), answers: Sequence[str] = ()) -> Item:
    facts = (
        ItemFacts(results=tuple(Result(n, n, True, 1, 4 * tokens) for n, _ in enumerate(answers))) if answers else None
    )
    return Item(role, tokens, 0, bytes(16), tuple(calls), tuple(answers), facts=facts)  # type: ignore[arg-type]


def agent(rounds: int, result: int = 400) -> list[Item]:
    """A system item, a task, and rounds of one call with its result each."""
    items = [item("system", 100), item("user", 50)]
    for at in range(rounds):
        items += [item("assistant", 60, [str(at)]), item("tool", result, (), (str(at),))]
    return items


def stages(items: Sequence[Item], rules: CompactionRules = RULES) -> Stages:
    return Stages(items, lay_out(tuple(items)), BUDGET, rules)


def test_a_view_without_a_compaction_takes_all_items_but_system_ones() -> None:
    """The fixed part holds the system items: they are not counted twice."""
    items = agent(3)
    assert stages(items).view_tokens(len(items), None) == 50 + 3 * 460
    assert stages(items).view_tokens(4, None) == 50 + 460


def test_what_a_compaction_made_smaller_counts_as_it_is_now() -> None:
    """Folded items count as their block, anchors as themselves, shortened items at their new size."""
    items = agent(4)
    compaction = Compaction(len(items), 4, 200, 100, (1,), clips=((5, 100),), truncations=((7, 150),))
    assert stages(items).view_tokens(len(items), compaction) == 200 + 50 + 3 * 460 - 300 - 250


def test_a_fold_keeps_as_many_rounds_as_the_goal_allows() -> None:
    """One cut earlier the view would be above the goal; the block is charged at its cap."""
    items = agent(12)
    folded = stages(items).fold(len(items), NO_COMPACTION, BUDGET.input, LEVELS)
    assert folded is not None
    assert folded.stages == ("fold",)
    assert folded.view_tokens <= LEVELS.goal < folded.view_tokens + 460
    assert folded.anchors == (1,)


def test_a_bare_fold_leaves_a_note() -> None:
    """A bare fold has no block but its frame."""
    items = agent(12)
    dropped = stages(items).fold(len(items), NO_COMPACTION, BUDGET.input, LEVELS, bare=True)
    assert dropped is not None
    assert (dropped.block_tokens, dropped.text_tokens, dropped.stages) == (BLOCK_FRAME, 0, ("drop",))


def test_a_fold_keeps_what_was_shortened_behind_its_cut() -> None:
    """Clips and truncations of items that stay stay too; those of folded items are gone with them."""
    items = agent(12)
    last = Compaction(10, 0, 0, truncations=((3, 150), (len(items) - 1, 160)))
    folded = stages(items).fold(len(items), last, BUDGET.input, LEVELS)
    assert folded is not None
    assert folded.truncations == ((len(items) - 1, 160),)


def test_truncation_goes_no_lower_than_needed() -> None:
    """All large results come down to one level, at which the view just reaches its target."""
    items = agent(4, result=2_000)
    truncated = stages(items).truncate(len(items), NO_COMPACTION, LEVELS, 5_000, range(2, len(items)))
    assert truncated is not None
    assert truncated.stages == ("truncate",)
    assert len({tokens for _, tokens in truncated.truncations}) == 1
    assert 5_000 - len(truncated.truncations) < truncated.view_tokens <= 5_000


def test_an_unread_result_is_not_truncated_by_default() -> None:
    """Only results that a model has read are cut short, unless others are named."""
    items = agent(1, result=9_000)
    assert stages(items).truncate(len(items), NO_COMPACTION, LEVELS, 1_000) is None
    assert stages(items).unread(len(items), NO_COMPACTION) == range(3, 4)
    assert stages(items).unread_excess(len(items), NO_COMPACTION, LEVELS) > 8_000


def test_a_clip_cuts_users_last() -> None:
    """While others can give what is needed, what a user wrote stays whole."""
    items = [item("user", 1_000), item("assistant", 3_000), item("user", 50), item("assistant", 3_000), item("user", 5)]
    clipped = stages(items).clip(len(items), NO_COMPACTION, 4_000, 5_000)
    assert clipped is not None
    assert [index for index, _ in clipped.clips] == [1, 3]
    assert clipped.view_tokens <= 4_000


def test_nothing_is_pruned_in_vain() -> None:
    """No result is replaced if nothing has to be saved, or if all results together could not save it."""
    items = [*agent(60, result=900)]
    rules = replace(RULES, prune_pass=replace(RULES.prune_pass, dedup=None))
    assert stages(items, rules).prune(len(items), NO_COMPACTION, 0) is None
    assert stages(items, rules).prune(len(items), NO_COMPACTION, 10**6) is None


def test_a_smaller_block_takes_its_text_in_proportion() -> None:
    """The frame stays; digest and steps shrink with the block."""
    items = agent(12)
    folded = stages(items).fold(len(items), NO_COMPACTION, BUDGET.input, LEVELS)
    assert folded is not None
    smaller = stages(items).with_smaller_block(len(items), folded, BLOCK_FRAME)
    assert (smaller.block_tokens, smaller.text_tokens, smaller.stages) == (BLOCK_FRAME, 0, ("drop",))
    assert smaller.view_tokens == folded.view_tokens - folded.block_tokens + BLOCK_FRAME


@pytest.mark.parametrize("off", ["fold", "drop", "clip"])
def test_a_stage_that_is_switched_off_does_nothing(off: str) -> None:
    """A stage that is switched off returns None."""
    items = agent(12)
    one = stages(items, replace(RULES, enabled_stages=replace(EnabledStages(), **{off: False})))
    fold = one.fold(len(items), NO_COMPACTION, BUDGET.input, LEVELS, bare=off == "drop")
    assert (fold is None) == (off != "clip")
    assert (one.clip(len(items), NO_COMPACTION, 1_000, 1_000) is None) == (off == "clip")


def test_truncation_can_be_switched_off() -> None:
    """Without limits nothing is truncated, and unread results are as large as they are."""
    one = stages(agent(1, result=9_000), replace(RULES, truncate=None))
    assert one.truncate(4, NO_COMPACTION, LEVELS, 100, range(2, 4)) is None
    assert one.unread_excess(4, NO_COMPACTION, LEVELS) == 0


def test_an_item_keeps_its_media_however_short_it_is_cut() -> None:
    """A short item is never cut; of a long one stays what cannot be cut."""
    assert shortest(item("user", CLIP_FLOOR)) == CLIP_FLOOR
    assert shortest(Item("user", 3_000, 2_900, bytes(16), (), ())) == 2_900


def test_an_item_keeps_its_calls_and_results_however_short_it_is_cut() -> None:
    """Ids and separators are never cut: what is left of thousands of calls is more than a window."""
    names = tuple(f"c{at}" for at in range(5_000))
    assert shortest(Item("assistant", 100_000, 0, bytes(16), names, ())) == 5_000 * LEAST_CALL
    assert shortest(Item("tool", 100_000, 10, bytes(16), (), names)) == 5_000 * LEAST_CALL + 10


CALLS = [{"id": f"{at}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for at in range(40)]
ROUND = [
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    *({"role": "tool", "tool_call_id": f"{at}", "content": "done"} for at in range(40)),
]


@pytest.mark.parametrize(
    ("api", "convert"), [("chat", list), ("messages", to_messages), ("responses", to_responses), ("gemini", to_gemini)]
)
def test_no_call_takes_less_than_it_is_taken_to_keep(
    api: str, convert: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> None:
    """In every API a call and a result with the shortest names, cut to nothing, take at least so many tokens."""
    for message in convert(ROUND):
        raw = API_FORMATS[api].clipped(json.dumps(message).encode(), lambda *_: "", count_tokens, 0)
        cut = API_FORMATS[api].read_item(raw, count_tokens)
        assert cut.calls or cut.answers
        assert cut.tokens >= LEAST_CALL * (len(cut.calls) + len(cut.answers))


def test_placeholders_are_not_cut_again() -> None:
    """A result that gave way to a line is neither truncated nor clipped."""
    items = agent(6, result=2_000)
    last = Compaction(len(items), 0, 0, placeholders=(Placeholder(3, "old"),))
    truncated = stages(items).truncate(len(items), last, LEVELS, 3_000)
    clipped = stages(items).clip(len(items), last, 2_000, 2_000)
    assert truncated is not None
    assert clipped is not None
    assert 3 not in dict(truncated.truncations)
    assert 3 not in dict(clipped.clips)


def with_spare(items: Sequence[Item], index: int, spare: int) -> list[Item]:
    """*items* with white space worth *spare* tokens in the result at *index*."""
    one = items[index]
    assert one.facts is not None
    results = tuple(structs.replace(each, spare=spare) for each in one.facts.results)
    changed = structs.replace(one, facts=structs.replace(one.facts, results=results))
    return [*items[:index], changed, *items[index + 1 :]]


def test_white_space_goes_out_of_every_whole_result() -> None:
    """Results that were made smaller before, and folded ones, stay as they are."""
    items = agent(5)
    for index in (3, 5, 7, 9):
        items = with_spare(items, index, 100)
    last = Compaction(len(items), 4, 200, 100, (1,), truncations=((7, 150),))
    minified = stages(items).minify(len(items), last)
    assert minified is not None
    assert minified.minified == ((5, 300), (9, 300))
    assert minified.stages == ("minify",)
    assert minified.view_tokens == stages(items).view_tokens(len(items), last) - 200
    assert stages(items).minify(len(items), minified) is None
    assert stages(agent(5)).minify(12, NO_COMPACTION) is None


def test_later_stages_go_on_from_minified_results() -> None:
    """A fold names both stages and keeps what is behind its cut; a truncated result is no longer a minified one."""
    items = agent(12)
    for index in range(3, len(items), 2):
        items = with_spare(items, index, 300)
    count = len(items)
    minified = stages(items).minify(count, NO_COMPACTION)
    assert minified is not None
    folded = stages(items).fold(count, minified, BUDGET.input, LEVELS)
    assert folded is not None
    assert folded.stages == ("minify", "fold")
    assert folded.minified == tuple((index, 100) for index in range(3, count, 2) if index >= folded.cut)
    unminified = stages(items).fold(count, NO_COMPACTION, BUDGET.input, LEVELS)
    assert unminified is not None
    assert folded.cut < unminified.cut
    smaller = stages(items).with_smaller_block(count, folded, 100)
    assert smaller.stages == ("minify", "drop")
    large = with_spare(agent(3, result=2_000), 3, 100)
    truncated = stages(large).truncate(len(large), stages(large).minify(len(large), NO_COMPACTION), LEVELS, 3_000)
    assert truncated is not None
    assert truncated.minified == ()
    assert truncated.stages == ("minify", "truncate")


def test_minifying_can_be_switched_off() -> None:
    """Without the stage every result stays as it came."""
    items = with_spare(agent(5), 3, 100)
    rules = replace(RULES, enabled_stages=EnabledStages(minify=False))
    assert stages(items, rules).minify(len(items), NO_COMPACTION) is None
