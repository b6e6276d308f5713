"""Faults of our own that cost no request: reported by type and place, never by text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal, Protocol, TypeVar

_LOG: Final = logging.getLogger(__name__)

Where = Literal["request", "answer", "after"]
"""What a fault was met in: making a request smaller, watching its answer, or the work behind the answer."""

T = TypeVar("T")


class Report(Protocol):
    """Takes notice of a fault."""

    def __call__(self, where: Where, request_id: str, fault: Exception) -> None:
        """Log the type and the frames of *fault*, and count it. Its text may quote the request."""


def logged(where: Where, request_id: str, fault: Exception) -> None:
    """Write *fault* to the library log, whose lines carry type and frames only."""
    _LOG.error("internal error in %s of %s", where, request_id, exc_info=fault)


class Faults:
    """Takes notice of faults, and runs what an answer can do without. Every fault goes to each of *reports*."""

    def __init__(self, *reports: Report) -> None:
        self._reports = reports or (logged,)

    def report(self, where: Where, request_id: str, fault: Exception) -> None:
        """Take notice of *fault*."""
        for each in self._reports:
            each(where, request_id, fault)

    def attempt(self, where: Where, request_id: str, work: Callable[[], T], instead: T) -> T:
        """Return what *work* returns, or *instead* after a fault."""
        try:
            return work()
        except Exception as fault:  # noqa: BLE001 - an optional part of an answer must not cost the answer
            self.report(where, request_id, fault)
            return instead
