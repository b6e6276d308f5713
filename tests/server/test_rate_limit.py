"""The limit of what one caller may ask."""

from __future__ import annotations

import pytest

from proxy.core.errors import TooManyRequests
from proxy.server.rate_limit import RateLimit


def test_the_bucket_is_refilled() -> None:
    """After a while a caller may ask again, and never more at once than the burst."""
    now = 0.0
    limit = RateLimit(5.0, 30.0, "questions", lambda: now)
    for _ in range(30):
        limit.admit(b"a")
    with pytest.raises(TooManyRequests):
        limit.admit(b"a")
    now = 1000.0
    for _ in range(30):
        limit.admit(b"a")
    with pytest.raises(TooManyRequests):
        limit.admit(b"a")


def test_callers_are_counted_separately_and_get_a_time_to_retry() -> None:
    """One who asks too often does not keep another from asking."""
    limit = RateLimit(0.1, 1.0, "logins", lambda: 0.0)
    limit.admit(b"a")
    with pytest.raises(TooManyRequests, match="Too many logins") as refused:
        limit.admit(b"a")
    assert refused.value.retry_after == 10
    limit.admit(b"b")
