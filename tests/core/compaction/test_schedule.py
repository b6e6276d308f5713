"""The schedule: when a view is made smaller and how far, by token counts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from proxy.core.compaction.excerpts import MOST_TEXTS
from proxy.core.compaction.record import Compaction
from proxy.core.compaction.schedule import CompactionTarget, Schedule
from proxy.core.compaction.stages import BLOCK_FRAME, CLIP_FLOOR, CompactionRules, EnabledStages
from proxy.core.conversation import Item, ItemFacts, Result, lay_out, unread_from
from proxy.core.tokens.allocation import Allocation
from proxy.core.tokens.budget import Marks, Shares, TokenBudget

RULES = CompactionRules(Marks(), Shares(), EnabledStages())
FIGURES = TokenBudget(8192, 1024, 300, 1024)
SIZES = st.sampled_from([5, 40, 200, 600, 2500])


def item(role: str, tokens: int, calls: Sequence[str] = (), answers: Sequence[str] = (), spare: int = 0) -> Item:
    facts = None
    if answers:
        results = [Result(n, n, True, 1, 4 * tokens, spare=spare) for n, _ in enumerate(answers)]
        facts = ItemFacts(results=tuple(results))
    return Item(role, tokens, 0, bytes(16), tuple(calls), tuple(answers), facts=facts)  # type: ignore[arg-type]


def agent(rounds: int, result: int = 400, parallel: int = 1) -> list[Item]:
    """A task and rounds of calls with their results."""
    found = [item("system", 100), item("user", 50)]
    for at in range(rounds):
        names = [f"{at}.{n}" for n in range(parallel)]
        found += [item("assistant", 60, names), *(item("tool", result, (), (name,)) for name in names)]
    return found


def schedule(items: Sequence[Item], figures: TokenBudget = FIGURES, rules: CompactionRules = RULES) -> Schedule:
    return Schedule(items, lay_out(tuple(items)), figures, rules)


def chat(rounds: int, tokens: int) -> list[Item]:
    """A chat whose rounds take twice *tokens* each; the user has the last word."""
    return [item("user", tokens), *[item("assistant", tokens), item("user", tokens)] * rounds]


def compactions_of(
    items: Sequence[Item], figures: TokenBudget = FIGURES, rules: CompactionRules = RULES
) -> list[Compaction]:
    """The compactions that a conversation goes through, request by request."""
    found: list[Compaction] = []
    for boundary in lay_out(tuple(items)).boundaries:
        compaction = schedule(items[:boundary], figures, rules).newest_compaction(found[-1] if found else None)
        if compaction is not None and compaction not in found:
            found.append(compaction)
    return found


@st.composite
def results_of(draw: st.DrawFn, name: str) -> Item:
    """A result; now and then half of it is white space in JSON."""
    tokens = draw(SIZES)
    spare = 0
    if draw(st.integers(0, 3)) == 0:
        spare = tokens // 2
    return item("tool", tokens, (), (name,), spare)


@st.composite
def histories(draw: st.DrawFn) -> list[Item]:
    """Items of a conversation: rounds with parallel calls, chats, runs of users, systems between."""
    found = [item("user", draw(SIZES))]
    for at in range(draw(st.integers(1, 30))):
        kind = draw(st.sampled_from(["round", "round", "talk", "users", "system"]))
        if kind == "round":
            names = [f"{at}.{n}" for n in range(draw(st.integers(1, 4)))]
            found.append(item("assistant", draw(SIZES), names))
            found += [draw(results_of(name)) for name in names]
        elif kind == "talk":
            found += [item("assistant", draw(SIZES)), item("user", draw(SIZES))]
        else:
            found.append(item(kind.removesuffix("s"), draw(SIZES)))
    if found[-1].role == "assistant":
        found.append(item("user", 10))
    return found


figures = st.builds(
    lambda window, fixed, reserve: TokenBudget(window, int(window * reserve), int(window * fixed), window // 8),
    st.sampled_from([1024, 4096, 8192, 32768]),
    st.sampled_from([0.0, 0.02, 0.3, 0.7]),
    st.sampled_from([0.01, 0.125, 0.3]),
)


@settings(max_examples=200)
@given(histories(), figures, st.booleans())
@pytest.mark.slow
def test_a_compaction_is_sound(items: list[Item], asked: TokenBudget, force: bool) -> None:
    """Any compaction cuts between rounds, keeps the newest round, makes the view smaller, and says how large it is."""
    plan = schedule(items, asked)
    layout = lay_out(tuple(items))
    compaction = plan.newest_compaction(None, CompactionTarget(force=force))
    if compaction is None:
        return
    assert compaction.cut == 0 or compaction.cut in layout.cuts
    assert compaction.cut < compaction.boundary <= len(items)
    assert compaction.boundary in (*layout.boundaries, len(items))
    assert all(0 <= index < compaction.boundary for index in compaction.anchors)
    assert all(CLIP_FLOOR <= tokens < items[index].tokens for index, tokens in compaction.clips)
    assert compaction.view_tokens == plan.view_tokens(compaction.boundary, compaction)
    assert compaction.view_tokens < plan.view_tokens(compaction.boundary, None)
    assert compaction.block_tokens == 0 or compaction.text_tokens <= compaction.block_tokens
    assert compaction.cut == 0 or set(compaction.anchors) >= {layout.task}


@settings(max_examples=150)
@given(histories(), figures)
@pytest.mark.slow
def test_going_on_from_a_compaction_equals_starting_over(items: list[Item], asked: TokenBudget) -> None:
    """For equal figures the fold from the start finds the compactions that were found request by request."""
    asked = replace(asked, reserve=asked.default_reserve)
    layout = lay_out(tuple(items))
    compaction = None
    for boundary in (*layout.boundaries, len(items)):
        part = schedule(items[:boundary], asked)
        compaction = part.newest_compaction(compaction)
        if part.fits(compaction, asked.ceiling):
            assert part.newest_compaction(None) == compaction
        else:
            compaction = part.newest_compaction(None)


@settings(max_examples=100)
@given(histories(), figures)
def test_a_view_that_can_be_brought_under_the_budget_is(items: list[Item], asked: TokenBudget) -> None:
    """If the newest round and its frame leave room, the present view fits the exact budget."""
    plan = schedule(items, asked)
    compaction = plan.newest_compaction(None)
    budget = min(asked.baseline, asked.input)
    floor = asked.quantised_fixed + 2 * BLOCK_FRAME + CLIP_FLOOR * (2 + len(items) - lay_out(tuple(items)).cuts[-1])
    tails = [cut for cut in lay_out(tuple(items)).cuts if cut < len(items)]
    run = len(items) - tails[max(0, len(tails) - 9)]
    if floor + CLIP_FLOOR * run <= budget:
        assert plan.fits(compaction, budget)


@pytest.mark.parametrize(("tokens", "kept"), [(30, 0.80), (100, 0.58), (170, 0.50)])
def test_a_chat_of_small_rounds_keeps_more(tokens: int, kept: float) -> None:
    """It comes down as far as a dozen rounds take, a quarter of the way at least; its block has the room it keeps."""
    room = FIGURES.baseline - FIGURES.quantised_fixed
    compaction = compactions_of(chat(200, tokens))[-1]
    assert kept - 2 * tokens / room <= compaction.view_tokens / room <= kept + 0.01
    assert compaction.block_tokens == pytest.approx(BLOCK_FRAME + (kept - 0.10) * room, abs=0.01 * room)


@pytest.mark.parametrize("tokens", [10, 50, 90, 120])
@pytest.mark.slow
def test_a_dozen_rounds_pass_until_a_chat_is_compacted_again(tokens: int) -> None:
    """Unless its rounds are so large that they do not even from the usual mark of chats."""
    boundaries = [each.boundary for each in compactions_of(chat(600, tokens))]
    assert len(boundaries) > 3
    assert min(after - before for before, after in pairwise(boundaries)) >= 2 * 12


def test_the_block_of_a_long_chat_leaves_the_room_that_quotes_cannot_fill() -> None:
    """Sentences are chosen from so many of the newest texts; what older ones leave unused is for whole messages."""
    figures = replace(FIGURES, window=65_536)
    compaction = schedule(chat(4_000, 15), figures).newest_compaction(None)
    assert compaction is not None
    assert compaction.block_tokens == BLOCK_FRAME + MOST_TEXTS * 15
    assert compaction.view_tokens / (figures.baseline - figures.quantised_fixed) == pytest.approx(0.80, abs=0.1)


@pytest.mark.parametrize(
    ("figures", "rules"),
    [
        (FIGURES, replace(RULES, marks=Marks(chat_low=0.50))),
        (replace(FIGURES, price_cap=100_000), RULES),
    ],
    ids=["configured mark", "price cap"],
)
def test_a_configured_mark_of_chats_is_used_as_it_is(figures: TokenBudget, rules: CompactionRules) -> None:
    """A configured mark of chats holds as it is; with a price cap less is kept, since it costs less."""
    room = figures.baseline - figures.quantised_fixed
    assert compactions_of(chat(200, 30), figures, rules)[0].view_tokens <= 0.51 * room


def test_compactions_are_rare_and_deep() -> None:
    """Each compaction goes from above the high mark to the low one, so the room between them passes before the next."""
    items, compactions = agent(200), []
    compaction = None
    for boundary in lay_out(tuple(items)).boundaries:
        part = schedule(items[:boundary])
        found = part.newest_compaction(compaction)
        if found is not None and found != compaction:
            compactions.append(found)
            before = part.view_tokens(boundary, compaction)
            assert FIGURES.quantised_fixed + before > min(FIGURES.mark(0.9, FIGURES.baseline), FIGURES.ceiling)
            assert FIGURES.quantised_fixed + found.view_tokens <= FIGURES.mark(0.4, FIGURES.baseline)
        compaction = found
    assert len(compactions) > 5
    growth = [sum(i.tokens for i in items[a.boundary : b.boundary]) for a, b in pairwise(compactions)]
    assert min(growth) >= 0.45 * (FIGURES.baseline - FIGURES.quantised_fixed)


def test_the_cut_is_the_oldest_that_reaches_the_low_mark() -> None:
    """An compaction keeps as many rounds as the low mark allows: one more would not fit."""
    items = agent(17)
    plan = schedule(items)
    compaction = plan.newest_compaction(None, CompactionTarget(force=True))
    assert compaction is not None
    earlier = structs.replace(compaction, cut=compaction.cut - 2)
    low = FIGURES.mark(0.4, FIGURES.input) - FIGURES.quantised_fixed
    assert compaction.view_tokens <= low < plan.view_tokens(len(items), earlier)


@pytest.mark.parametrize(
    "changed",
    [
        replace(FIGURES, fixed=FIGURES.fixed + 20),
        replace(FIGURES, reserve=64),
        replace(FIGURES, reserve=2000),
        replace(FIGURES, window=32768, default_reserve=4096),
    ],
    ids=["clock", "small figure", "large figure", "larger window"],
)
def test_a_past_compaction_stands_whatever_changed(changed: TokenBudget) -> None:
    """From an compaction that was sent, other figures go on without touching it while the view fits."""
    items = agent(20)
    compaction = schedule(items).newest_compaction(None)
    assert compaction is not None
    assert schedule(agent(21), changed).newest_compaction(compaction) == compaction


def test_the_fixed_part_counts_in_steps() -> None:
    """System texts of slightly different length give the same compactions."""
    items = agent(60)
    assert schedule(items, replace(FIGURES, fixed=290)).newest_compaction(None) == schedule(
        items, replace(FIGURES, fixed=380)
    ).newest_compaction(None)


def test_a_smaller_limit_is_a_new_compaction() -> None:
    """An overflow's limit compacts again at the same boundary, below it."""
    items = agent(20)
    plan = schedule(items)
    compaction = plan.newest_compaction(None)
    smaller = plan.newest_compaction(compaction, CompactionTarget(limit=1500))
    assert compaction is not None
    assert smaller is not None
    assert smaller.cut > compaction.cut
    assert FIGURES.quantised_fixed + smaller.view_tokens <= 1500


def test_forcing_under_the_low_mark_changes_nothing() -> None:
    """There is nothing to gain below the low mark: a demand to compact is no compaction."""
    assert schedule(agent(3)).newest_compaction(None, CompactionTarget(force=True)) is None


def test_a_large_newest_result_is_truncated_and_its_round_stays() -> None:
    """A newest result of twice the window loses tokens; its call stays before it."""
    items = [*agent(6), item("assistant", 60, ["big"]), item("tool", 16_000, (), ("big",))]
    compaction = schedule(items).newest_compaction(None)
    assert compaction is not None
    assert compaction.stages == ("fold", "truncate")
    assert compaction.cut <= len(items) - 2
    assert dict(compaction.truncations)[len(items) - 1] > 2000
    assert len(compaction.truncations) == 1
    assert compaction.clips == ()


def test_what_the_user_wrote_is_clipped_last() -> None:
    """Beside a large result, a user's message of moderate size stays whole."""
    items = [item("user", 1500), item("assistant", 60, ["big"]), item("tool", 16_000, (), ("big",))]
    compaction = schedule(items).newest_compaction(None)
    assert compaction is not None
    assert set(dict(compaction.truncations)) == {2}
    assert compaction.clips == ()


@pytest.mark.parametrize("off", [("fold",), ("fold", "drop"), ("clip",)], ids="-".join)
def test_a_rung_that_is_switched_off_is_not_taken(off: tuple[str, ...]) -> None:
    """Without a rung no compaction shows it; nothing leaves the view where neither folding nor dropping is allowed."""
    items = [*agent(20), item("assistant", 60, ["big"]), item("tool", 16_000, (), ("big",))]
    compaction = schedule(
        items, rules=replace(RULES, enabled_stages=replace(EnabledStages(), **dict.fromkeys(off, False)))
    ).newest_compaction(None)
    assert compaction is None or not set(off).intersection(compaction.stages)
    if "fold" in off:
        assert compaction is not None
        assert (compaction.cut == 0) == ("drop" in off)


def test_a_huge_result_is_truncated_where_rounds_are_dropped() -> None:
    """Where old rounds are dropped bare, the newest result is cut short as far as needed, not clipped."""
    items = [*agent(13), item("assistant", 60, ["big"]), item("tool", 16_000, (), ("big",))]
    compaction = schedule(items, rules=replace(RULES, enabled_stages=EnabledStages(fold=False))).newest_compaction(None)
    assert compaction is not None
    assert compaction.stages == ("drop", "truncate")
    kept = sum(items[i].tokens for i in range(compaction.cut, len(items) - 1))
    assert FIGURES.input // 4 < compaction.view_tokens - kept


def test_media_is_never_clipped() -> None:
    """The tokens of an item's images are the floor of its clip."""
    picture = Item("user", 3000, 2900, bytes(16))
    items = [
        item("user", 10),
        item("assistant", 10),
        picture,
        item("assistant", 60, ["x"]),
        item("tool", 9000, (), ("x",)),
    ]
    compaction = schedule(items, replace(FIGURES, window=4096)).newest_compaction(None)
    assert compaction is not None
    assert all(tokens >= items[index].media + CLIP_FLOOR for index, tokens in compaction.clips)


def test_a_user_item_behind_the_newest_round_keeps_it() -> None:
    """A question after a round keeps the round it is about, unless that alone is too big."""
    items = [*agent(20), item("user", 30)]
    compaction = schedule(items).newest_compaction(None, CompactionTarget(limit=1500))
    assert compaction is not None
    assert compaction.cut == len(items) - 3
    huge = [*agent(20), item("assistant", 60, ["b"]), item("tool", 9000, (), ("b",)), item("user", 30)]
    compaction = schedule(huge).newest_compaction(None)
    assert compaction is not None
    assert compaction.cut == len(huge) - 1


def test_an_empty_conversation_has_no_compaction() -> None:
    """No items, nothing to do, whatever is demanded."""
    assert schedule([]).newest_compaction(None, CompactionTarget(force=True, limit=0)) is None


def test_a_long_conversation_costs_few_looks() -> None:
    """A binary search finds the next boundary above the mark: a long conversation is not counted at each boundary."""
    items = agent(5000, result=40)
    plan = schedule(items, TokenBudget(10**6, 1000, 300, 16_384))
    looks = 0
    weigh = plan.view_tokens

    def watched(boundary: int, compaction: Compaction | None) -> int:
        nonlocal looks
        looks += 1
        return weigh(boundary, compaction)

    plan.view_tokens = watched  # type: ignore[method-assign]
    plan.newest_compaction(None)
    assert looks < 100


SHARED = Allocation(system=0.02, tools=0.03, summary=0.05, recent=0.10, older=0.02, reserve=0.78)
ALLOCATED = replace(RULES, allocation=SHARED)


def test_an_allocation_makes_a_compaction_deeper() -> None:
    """An compaction leaves messages and block no more than their shares and what is lent; the newest round stays."""
    items = agent(30)
    plain, shared = schedule(items).newest_compaction(None), schedule(items, rules=ALLOCATED).newest_compaction(None)
    assert plain is not None
    assert shared is not None
    most = SHARED.for_history(8192, FIGURES.quantised_fixed)
    assert most < int(0.18 * 8192)
    assert shared.view_tokens <= most < plain.view_tokens
    assert shared.block_tokens <= SHARED.for_block(8192, FIGURES.quantised_fixed) + BLOCK_FRAME < plain.block_tokens
    tight = replace(RULES, allocation=Allocation(reserve=1.0))
    alone = schedule(items, rules=tight).newest_compaction(None)
    assert alone is not None
    assert alone.cut <= lay_out(tuple(items)).cuts[-1], "whatever the shares, the newest round is kept"
    assert alone.block_tokens == BLOCK_FRAME


@settings(max_examples=120)
@given(histories(), figures, st.sampled_from([ALLOCATED, replace(RULES, allocation=Allocation(reserve=1.0))]))
@pytest.mark.slow
def test_an_allocation_never_makes_a_view_fit_less(
    items: list[Item], asked: TokenBudget, rules: CompactionRules
) -> None:
    """A view that fits without an allocation fits with one, which only goes deeper.

    While no compaction is due, it moves none that was sent.
    """
    plain, shared = schedule(items, asked), schedule(items, asked, rules)
    if plain.fits(plain.newest_compaction(None), asked.input):
        assert shared.fits(shared.newest_compaction(None), asked.input)
    since = plain.newest_compaction(None)
    tokens = asked.quantised_fixed + plain.view_tokens(len(items), since)
    high = min(asked.high(RULES.marks, asked.baseline), asked.ceiling)
    if tokens <= high and plain.newest_compaction(since) == since:
        assert shared.newest_compaction(since) == since


@settings(max_examples=200)
@given(histories(), figures)
@pytest.mark.slow
def test_unread_results_are_cut_only_if_they_cannot_stay_whole(items: list[Item], asked: TokenBudget) -> None:
    """A result no model has read is cut only if it would not fit beside task, newest user text and a note."""
    plan, count = schedule(items, asked), len(items)
    compaction = plan.newest_compaction(None)
    border = unread_from(items, count)
    if compaction is None or compaction.boundary < count or not any(item.answers for item in items[border:]):
        return
    cut = {
        index for index, _ in (*compaction.truncations, *compaction.clips) if index >= border and items[index].answers
    }
    swapped = {swap.index for swap in compaction.placeholders if swap.index >= border}
    assert not swapped
    start = max(each for each in lay_out(tuple(items)).cuts if each <= border)
    users = [index for index, item in enumerate(items) if item.role == "user" and index < start]
    least = sum(item.tokens for item in items[start:] if item.role != "system") + BLOCK_FRAME
    least += sum(items[index].tokens for index in {*users[:1], *users[-1:]})
    if asked.quantised_fixed + least <= asked.view_limit:
        assert not cut


@settings(max_examples=150)
@given(histories(), figures)
@pytest.mark.slow
def test_the_same_request_gets_the_same_compaction(items: list[Item], asked: TokenBudget) -> None:
    """A conversation that was compacted at its end and fits is not compacted again when it comes once more."""
    plan = schedule(items, asked)
    compaction = plan.newest_compaction(None)
    if compaction is not None and plan.fits(compaction, asked.input):
        assert plan.newest_compaction(compaction) == compaction


def test_a_result_left_whole_is_truncated_once_it_was_read() -> None:
    """The next compaction after a large unread result truncates it where it is, and keeps the block before it."""
    items = [*agent(6), item("assistant", 60, ["big"]), item("tool", 5_200, (), ("big",))]
    first = schedule(items).newest_compaction(None)
    assert first is not None
    assert first.truncations == ()
    assert FIGURES.quantised_fixed + first.view_tokens <= FIGURES.input
    more = [*items, item("assistant", 60, ["next"]), item("tool", 300, (), ("next",))]
    second = schedule(more).newest_compaction(first)
    assert second is not None
    assert (second.cut, second.block_tokens) == (first.cut, first.block_tokens)
    assert [index for index, _ in second.truncations] == [len(items) - 1]


def test_a_fold_that_saves_nothing_is_none() -> None:
    """Before a result larger than the room stands next to nothing: it is cut where it is, and the prompt stays."""
    items = [*agent(0), item("assistant", 60, ["big"]), item("tool", 16_000, (), ("big",))]
    compaction = schedule(items).newest_compaction(None)
    assert compaction is not None
    assert (compaction.cut, compaction.stages) == (0, ("truncate",))
    assert FIGURES.input - 8 <= FIGURES.quantised_fixed + compaction.view_tokens <= FIGURES.input


def test_white_space_goes_if_that_is_enough_and_a_fold_saves_nothing() -> None:
    """A first round that is too long only for the white space in its results fits without it."""
    items = [item("user", 50), item("user", 80), item("assistant", 60, ["a"]), item("tool", 7_000, (), ("a",), 800)]
    compaction = schedule(items).newest_compaction(None)
    assert compaction is not None
    assert (compaction.cut, compaction.stages) == (0, ("minify",))
    assert schedule(items).fits(compaction, FIGURES.input)


def test_the_block_gives_way_before_an_unread_result() -> None:
    """Where a result fits whole beside a smaller block, the block is made smaller."""
    items = [*agent(30), item("assistant", 60, ["big"]), item("tool", 6_000, (), ("big",))]
    compaction = schedule(items).newest_compaction(None)
    assert compaction is not None
    assert compaction.stages == ("drop",)
    assert compaction.truncations == compaction.clips == ()
    assert compaction.block_tokens >= BLOCK_FRAME
    assert FIGURES.quantised_fixed + compaction.view_tokens <= FIGURES.input


def test_an_unread_result_too_big_for_the_room_takes_all_of_it() -> None:
    """A result that has to be cut is cut to the budget, not to a mark below it."""
    items = [*agent(6), item("assistant", 60, ["big"]), item("tool", 16_000, (), ("big",))]
    compaction = schedule(items).newest_compaction(None)
    assert compaction is not None
    assert FIGURES.input - 8 <= FIGURES.quantised_fixed + compaction.view_tokens <= FIGURES.input


@settings(max_examples=60, deadline=None)
@given(histories())
def test_no_view_goes_below_the_least(items: list[Item]) -> None:
    """However little is asked for, what a compaction leaves is no less than the newest round at its shortest."""
    plan = schedule(items)
    compaction = plan.newest_compaction(None, CompactionTarget(force=True, limit=0))
    assert FIGURES.quantised_fixed + plan.view_tokens(len(items), compaction) >= plan.minimum_tokens()


def test_the_least_counts_what_cannot_be_shortened() -> None:
    """A round of many short results weighs all of them, one long result next to nothing."""
    many = agent(1, result=10, parallel=500)
    assert schedule(many).minimum_tokens() >= 500 * 10
    assert schedule(agent(1, result=50_000)).minimum_tokens() < 1_000
