"""Summaries as the store has them, and the notes on them."""

from __future__ import annotations

import msgspec
import pytest

from proxy.summaries.codec import VERSION, StoredSummary, dump, load, note_for
from proxy.summaries.model_call import Summariser
from tests.support.summary_fixtures import entries_of, summary_request_of

SUMMARISER = Summariser("stub", "small", "chat", 8192, True, True, "o200k_base")


def test_a_summary_comes_back_with_its_author() -> None:
    """A summary of so many items is read back for just as many."""
    found = load(dump("text", 7, 900, "small", 1), 7)
    assert found is not None
    assert (found.text, found.length, found.tokens_spent, found.model) == ("text", 7, 900, "small")
    assert load(dump("text", 7, 900, "small", 1), 8) is None


@pytest.mark.parametrize("value", [b"", b"\xc1", msgspec.msgpack.encode(StoredSummary(VERSION + 1, "t", 7, 1, "m", 1))])
def test_what_is_no_summary_of_this_version_is_none(value: bytes) -> None:
    """Noise and other versions are not taken for a summary."""
    assert load(value, 7) is None


def test_a_note_tells_when_a_failure_is_tried_again() -> None:
    """A failed summary has a time; it names the prefix and who was asked, and holds no text."""
    wanted = summary_request_of(entries_of(3))
    failed = note_for(wanted, SUMMARISER, b"p" * 8, "failed", 1000, reason="empty", refused_for=60, tokens_out=0)
    assert (failed.retry_at, failed.length, failed.model, failed.reason) == (1060, 8, "small", "empty")
    assert note_for(wanted, SUMMARISER, b"p" * 8, "ready", 1000, tokens_out=90, refused_for=60, reason="").retry_at == 0
    assert b"ledger" not in msgspec.msgpack.encode(failed)
