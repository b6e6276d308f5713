"""Which results go first, and which never go."""

from __future__ import annotations

import json

from proxy.core.compression.prune import WEIGHTS, Prune, border, oldest, ranked
from proxy.core.conversation.entry import Entry
from proxy.core.conversation.facts import facts_of, pairs_of
from proxy.core.conversation.items import Item, lay_out
from tests.support.engine_fixtures import tool_map_of_package


def agent(*names: str, says: dict[int, str] | None = None, tokens: int = 500) -> list[Item]:
    """Rounds of one call each; ``says`` is what the model writes before round n."""
    items = [Item("user", 10, 0, b"")]
    for number, name in enumerate(names):
        entry = Entry("assistant", (says or {}).get(number, ""), ((name, json.dumps({"path": f"src/f{number}.py"})),))
        items.append(Item("assistant", 10, 0, b"", (str(number),), facts=facts_of(entry, tool_map_of_package().call)))
        result = facts_of(
            Entry("tool", "", results=((f"the result of step {number} is long", False),)), tool_map_of_package().call
        )
        items.append(Item("tool", tokens, 0, b"", (), (str(number),), facts=result))
    return items


def order(items: list[Item], rules: Prune | None = None) -> list[int]:
    """The steps that may go, first to last."""
    return [swap.index // 2 - 1 for swap in ranked(pairs_of(items, 0, len(items)), items, len(items), rules or Prune())]


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
    assert order(agent("Read", "Bash"), Prune(weights={"shell": 1})) == [1]
    assert WEIGHTS["glob"] > WEIGHTS["file_edit"]


def test_the_newest_rounds_and_tokens_are_protected() -> None:
    """What crosses the limit may go; nothing after it, and none of the newest rounds."""
    items = agent(*["Bash"] * 10)
    layout = lay_out(items)
    assert border(layout, 0, len(items), Prune(protect_rounds=3, protect_tokens=0)) == len(items) - 6
    assert border(layout, 0, len(items), Prune(protect_rounds=0, protect_tokens=1200)) == len(items) - 4
    assert border(layout, 0, len(items), Prune(protect_rounds=50, protect_tokens=0)) == 0


def test_small_windows_protect_less() -> None:
    """Figures in tokens and rounds shrink with the window, but the newest round stays protected."""
    assert Prune().scaled(400_000) == Prune()
    small = Prune().scaled(10_000)
    assert (small.protect_rounds, small.protect_tokens, small.min_saving) == (1, 2_000, 1_000)


def test_the_oldest_go_in_order_until_it_is_enough() -> None:
    """However a result is worth, the oldest goes first, no more than are needed, none where all are too few."""
    items = agent("TodoWrite", "Read", "lookup", "Bash", tokens=500)
    pairs = pairs_of(items, 0, len(items))

    def gone(over: int) -> list[int] | None:
        found = oldest(pairs, items, over)
        return None if found is None else [swap.index // 2 - 1 for swap in found]

    assert [gone(over) for over in (0, 1, 300, 600, 1000)] == [[], [0], [0], [0, 1], [0, 1, 2]]
    assert gone(5000) is None
    short = agent("Read", "Read", tokens=60)
    assert oldest(pairs_of(short, 0, len(short)), short, 1) is None
