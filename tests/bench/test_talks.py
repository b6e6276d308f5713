"""Generated talks: the same every time, with their evidence in them, and cut where a client would send them."""

from __future__ import annotations

import pytest

from tests.bench import metrics
from tests.bench.talks import histories, kinds, phrases, report, share_there, talk

TOKENS = 2_000


@pytest.mark.parametrize("kind", list(kinds()))
def test_a_talk_is_the_same_every_time_and_has_its_evidence(kind: str) -> None:
    """Every fact stands in the message that it is said to stand in."""
    one = talk(kind, 1, TOKENS)
    assert one == talk(kind, 1, TOKENS) != talk(kind, 2, TOKENS)
    assert metrics.size(one.messages) >= TOKENS
    assert [message["role"] for message in one.messages[-2:]] == ["user", "assistant"]
    assert len(one.evidence) > 3
    assert all(fact in one.messages[at]["content"] for at, fact in one.evidence)
    assert "{" not in "".join(message["content"] for message in one.messages)


def test_a_talk_is_cut_where_a_client_would_send_it() -> None:
    """Each history is longer than the one before, and a message of the user ends it."""
    cut = list(histories(talk("months-en", 3, TOKENS).messages))
    assert [history[-1]["role"] for history in cut] == ["user"] * 4
    sizes = [metrics.size(history) for history in cut]
    assert sizes == sorted(set(sizes))


SENTENCES = ["One two three four five.", "今天天气很好。", "今日は天気がいい。", "오늘 날씨가 좋다."]


@pytest.mark.parametrize("text", SENTENCES)
def test_phrases_are_found_in_every_script(text: str) -> None:
    """All of a text is in itself, and nothing of it in another text."""
    assert share_there(phrases(f"So: {text} And more."), text) == 1.0
    assert share_there(phrases("Nothing of the kind was ever said here."), text) == 0.0


def test_a_row_for_each_way() -> None:
    """The newest messages of equal budget stand beside Ullage's view."""
    rows = list(report(["months-en"], [1], TOKENS, [0.5]))
    assert [cells[:3] for cells in rows] == [["months-en", "newest", "4"], ["months-en", "ullage", "4"]]
    assert all(0 < float(cells[3]) <= 1 for cells in rows)
