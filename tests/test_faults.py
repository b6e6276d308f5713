"""Faults of our own: reported wherever reports go, and worth no more than what failed."""

from __future__ import annotations

import logging

import pytest

from proxy.faults import Faults


def test_an_attempt_is_worth_what_it_gives_or_its_substitute() -> None:
    """Work that fails gives the substitute; every report hears of the fault once, of other work nothing."""
    heard: list[tuple[str, str, str]] = []
    faults = Faults(*[lambda *told, at=at: heard.append((at, *told[:2])) for at in ("log", "metric")])
    assert faults.attempt("answer", "r1", lambda: 1, 2) == 1
    assert heard == []
    assert faults.attempt("answer", "r1", lambda: 1 // 0, 2) == 2
    assert heard == [("log", "answer", "r1"), ("metric", "answer", "r1")]


def test_what_cuts_a_process_short_is_no_fault() -> None:
    """A cancellation or an interrupt goes on."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Faults().attempt("answer", "r1", interrupted, 2)


def test_without_a_report_of_its_own_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing fails silently: the library log has the exception, and no text of its own quotes it."""
    with caplog.at_level(logging.ERROR):
        Faults().attempt("after", "r1", lambda: 1 // 0, None)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    assert "division" not in record.getMessage()
