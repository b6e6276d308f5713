"""What summaries may cost."""

from __future__ import annotations

from collections import Counter

from proxy.summaries.spend import FLUSH_TOKENS, FRESH, PAUSE, Ledger
from tests.support.summary_fixtures import DictSummaryTable

A, B = b"a" * 32, b"b" * 32


class Now:
    """A clock to move."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def ledger(shelf: DictSummaryTable, now: Now) -> Ledger:
    return Ledger(shelf, 0.1, {}, now, now)


async def test_a_tenth_of_what_was_sent_may_be_spent() -> None:
    """Spending is allowed up to the share of one's own tokens, and no further."""
    now = Now()
    book = ledger(DictSummaryTable(), now)
    assert await book.why_not(A, 1) == "budget"
    book.sent(A, 10_000)
    assert await book.why_not(A, 1000) == ""
    assert await book.why_not(A, 1001) == "budget"
    book.spent(A, 600)
    assert await book.why_not(A, 400) == ""
    assert await book.why_not(A, 401) == "budget"
    book.spent(A, -100)
    assert book.affords(A, 500)
    assert await book.why_not(B, 1) == "budget"


async def test_replicas_share_their_figures() -> None:
    """What one replica sent and spent counts on the other, a few seconds later at most."""
    now, shelf = Now(), DictSummaryTable()
    first, second = ledger(shelf, now), ledger(shelf, now)
    first.sent(A, 10_000)
    assert await first.why_not(A, 900) == ""
    first.spent(A, 900)
    assert await second.why_not(A, 100) == ""
    assert await second.why_not(A, 101) == "budget"
    first.sent(A, FLUSH_TOKENS)
    now.seconds += FRESH
    assert await second.why_not(A, 5000) == ""
    assert shelf.counts == Counter({(A, "in"): 10_000 + FLUSH_TOKENS, (A, "out"): 900})


async def test_a_lost_store_does_not_forget_what_was_spent() -> None:
    """When the store's figures are gone, what this process saw holds."""
    now, shelf = Now(), DictSummaryTable()
    book = ledger(shelf, now)
    book.sent(A, 10_000)
    assert await book.why_not(A, 900) == ""
    book.spent(A, 900)
    shelf.counts.clear()
    now.seconds += FRESH
    assert await book.why_not(A, 101) == "budget"
    assert await book.why_not(A, 100) == ""


async def test_who_is_to_slow_down_is_left_alone_everywhere() -> None:
    """After a pause was called nothing may be spent for a minute, on other replicas too, by that tenant alone."""
    now, shelf = Now(), DictSummaryTable()
    first, second = ledger(shelf, now), ledger(shelf, now)
    for book in (first, second):
        book.sent(A, 10_000)
        book.sent(B, 10_000)
    first.pause(A)
    assert first.is_paused(A)
    assert await first.why_not(A, 1) == "paused"
    assert await second.why_not(A, 1) == "paused"
    assert await second.why_not(B, 1) == ""
    shelf.paused.clear()
    now.seconds += PAUSE
    assert await first.why_not(A, 1) == ""
    assert await second.why_not(A, 1) == ""


async def test_figures_are_told_by_tenant() -> None:
    """Those who sent most come first, with what they may spend and how long they still pause."""
    now = Now()
    book = ledger(DictSummaryTable(), now)
    book.sent(A, 1000)
    book.sent(B, 5000)
    book.spent(B, 70)
    book.pause(A)
    now.seconds += 10.5
    assert book.figures(5) == [
        (B, {"sent_tokens": 5000, "spent_tokens": 70, "allowed_tokens": 500, "paused_seconds": 0}),
        (A, {"sent_tokens": 1000, "spent_tokens": 0, "allowed_tokens": 100, "paused_seconds": 50}),
    ]
    assert [tenant for tenant, _ in book.figures(1)] == [B]
    now.seconds += PAUSE
    assert book.figures(5)[1][1]["paused_seconds"] == 0
