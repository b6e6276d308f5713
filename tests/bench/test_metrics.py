"""The figures of ``tests.bench.quality``: known answers on small conversations, and sessions that come out the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import metrics
from tests.bench.sessions import generated
from tests.support.tool_pair_checks import pair_violations

HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "Mend load_row in src/a.py. Never touch vendor/b.py."},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"id": "c", "function": {"name": "read_file", "arguments": '{"path": "src/a.py"}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "LIMIT is 4711\nsee src/c.py"},
]
FUTURE = [
    {"role": "assistant", "content": "The 4711 in src/a.py is wrong."},
    {"role": "user", "content": "And src/c.py?"},
    {"role": "assistant", "content": "src/c.py is fine."},
]


def test_what_is_needed_later_is_what_nobody_repeated() -> None:
    """A name that the user said again before the model used it was not needed from the history."""
    assert set(metrics.needed_later(HISTORY, FUTURE)) == {"4711", "src/a.py"}


def test_a_view_is_scored_by_what_it_still_says() -> None:
    """A view without the tool's result has lost the figure, keeps the rest, and invents what the history never had."""
    whole = metrics.score(HISTORY, HISTORY, FUTURE, 10_000)
    assert (whole["later"], whole["first_task"], whole["instructions"], whole["invented"]) == (1, 1, 1, 0)
    view = [*HISTORY[:2], {"role": "assistant", "content": "I looked at src/a.py and other_name."}]
    cut = metrics.score(HISTORY, view, FUTURE, 10_000)
    assert (cut["later"], cut["later_figure"], cut["later_path"], cut["instructions"]) == (0.5, 0, 1, 1)
    assert cut["invented"] == 0.25
    assert metrics.score(HISTORY, view, FUTURE, 10)["fits"] == 0


def test_a_prefix_is_repeated_up_to_the_first_change() -> None:
    """Appending repeats all of the view before; a change in its middle breaks it there."""
    longer = [*HISTORY, *FUTURE[:2]]
    assert metrics.repeated_prefix([HISTORY, longer]) == {
        "prefix": metrics.size(HISTORY) / metrics.size(longer),
        "breaks": 0.0,
    }
    changed = [*HISTORY[:1], *FUTURE[1:2], *HISTORY[2:]]
    assert metrics.repeated_prefix([HISTORY, changed])["breaks"] == 1.0


@pytest.mark.parametrize("way", metrics.SIMPLE)
def test_a_simple_way_fits_and_keeps_calls_with_their_results(way: str) -> None:
    """Every simple way gives a valid conversation of the budget's size."""
    for _, messages in list(generated())[::5]:
        history, _ = metrics.split(messages)
        budget = metrics.size(history) // 4
        view = metrics.SIMPLE[way](history, budget)
        assert metrics.size(view) <= 1.02 * budget
        assert pair_violations(view) == []


def test_a_seed_gives_the_same_sessions() -> None:
    """The corpus is the same everywhere, and another seed gives another one; its calls are answered."""
    first, again, other = list(generated()), list(generated()), list(generated(seed=2))
    assert first == again
    assert first != other
    assert all(pair_violations(messages) == [] for _, messages in first)
