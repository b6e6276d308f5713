"""The line that stands for a result."""

from __future__ import annotations

import re

import pytest

from proxy.core.compression.swap import FRAME, LINE, Why, charge, words
from proxy.core.conversation.items import Item
from tests.support.engine_fixtures import count_tokens


@pytest.mark.parametrize("why", ["repeated", "reread", "included", "again", "old"])
@pytest.mark.parametrize("ok", [True, False])
def test_a_line_is_short_and_invents_nothing(why: Why, ok: bool) -> None:
    """It carries no long number and no path of its own, names the target, and fits what it is charged at."""
    text = words(why, "Read", "TARGET", ok=ok, line="LINE")
    assert count_tokens(text) <= LINE
    assert not re.search(r"\d{3}|[/\\]", text)
    assert ("TARGET" in text) is (why != "repeated")
    assert ("LINE" in text) is (why == "old" and not ok)
    assert words(why, "Read", "", ok=ok)


def test_nothing_is_charged_more_than_it_weighed() -> None:
    """A small result is charged as it is, a large one at its line and a share of its names."""
    assert charge(Item("tool", 30, 0, b"", (), ("a",))) == 30
    assert charge(Item("tool", 5000, 0, b"", (), ("a",))) == FRAME + LINE + 500
    assert charge(Item("tool", 5000, 0, b"", (), ("a", "b"))) == FRAME + 2 * LINE + 500
