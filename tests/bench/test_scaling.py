"""The arithmetic of a fleet: what its page shows, and what must be so whatever the costs are."""

from __future__ import annotations

from pathlib import Path

from tests.bench.scaling import Load, mean_cost, processes_needed, rows

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_the_page_shows_what_the_command_prints() -> None:
    """Each figure of the page's table is computed."""
    shown = PAGE.read_text()
    assert [what for what, figure in rows(Load()) if f"| {what} | {figure} |" not in shown] == []


def test_one_process_sees_every_turn() -> None:
    """With one process it is the same how requests are balanced; with more, turns by turns cost more."""
    load = Load(rate=100)
    assert mean_cost(load, 1, sticky=True) == mean_cost(load, 1, sticky=False)
    assert mean_cost(load, 8, sticky=False) > 5 * mean_cost(load, 8, sticky=True)


def test_what_is_needed_carries_the_load() -> None:
    """Twice the rate needs about twice the processes, if each sees its conversations."""
    small, large = (processes_needed(Load(rate=rate), sticky=True) for rate in (5_000, 10_000))
    assert 1.8 < large / small < 2.2
