from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.store.breaker import SERVER, Breaker, Patience


class Now:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now() -> Now:
    """A clock to move."""
    return Now()


@pytest.fixture
def breaker(now: Now) -> Breaker:
    """A breaker whose pauses are not varied."""
    return Breaker(now, lambda: 0.5)


def _open(breaker: Breaker) -> None:
    for _ in range(SERVER.failures):
        breaker.failed()


def test_five_failures_in_ten_seconds_open_it(breaker: Breaker) -> None:
    """It lets calls through up to the fifth failure and none after."""
    for _ in range(SERVER.failures):
        assert breaker.admit()
        breaker.failed()
    assert not breaker.admit()
    assert breaker.state == "open"


def test_failures_spread_out_do_not_open_it(breaker: Breaker, now: Now) -> None:
    """Failures further apart than the span are not counted together."""
    for _ in range(20):
        breaker.failed()
        now.seconds += 10.0 / (SERVER.failures - 1) + 0.1
    assert breaker.state == "closed"


def test_successes_between_do_not_hide_a_failing_server(breaker: Breaker) -> None:
    """A server that fails every other call is opened for all the same."""
    for _ in range(SERVER.failures):
        breaker.succeeded()
        breaker.failed()
    assert breaker.state == "open"


def test_exactly_one_probe_passes_half_open(breaker: Breaker, now: Now) -> None:
    """After the pause one call goes out, and nobody else until it has reported back."""
    _open(breaker)
    now.seconds += SERVER.first_pause - 0.1
    assert not breaker.admit()
    now.seconds += 0.2
    assert [breaker.admit() for _ in range(5)] == [True, False, False, False, False]
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.admit()


def test_a_lost_probe_does_not_close_the_way_for_ever(breaker: Breaker, now: Now) -> None:
    """When the probing call never reports back, another one may try later."""
    _open(breaker)
    now.seconds += SERVER.first_pause
    assert breaker.admit()
    now.seconds += 60
    assert breaker.admit()


def test_a_late_answer_does_not_close_an_open_breaker(breaker: Breaker) -> None:
    """Success of a call that went out before the breaker opened proves nothing."""
    _open(breaker)
    breaker.succeeded()
    assert breaker.state == "open"


@given(st.floats(0, 1, exclude_max=True))
def test_the_pause_grows_to_thirty_seconds_and_starts_over_after_success(dice: float) -> None:
    """Each failed probe doubles the pause up to the longest one, give or take a quarter."""
    now = Now()
    breaker = Breaker(now, lambda: dice)
    _open(breaker)
    expected = SERVER.first_pause
    for _ in range(8):
        began = now.seconds
        while not breaker.admit():
            now.seconds += 0.05
        assert 0.75 * expected - 0.06 <= now.seconds - began <= 1.25 * expected + 0.06
        breaker.failed()
        expected = min(2 * expected, SERVER.longest_pause)
    while not breaker.admit():
        now.seconds += 1
    breaker.succeeded()
    _open(breaker)
    now.seconds += 1.25 * SERVER.first_pause
    assert breaker.admit()


def test_failures_in_a_row_open_it_however_far_apart(now: Now) -> None:
    """Without a span of time only failures without a success between them count, and the pauses are its own."""
    breaker = Breaker(now, lambda: 0.5, Patience(failures=3, within=None, first_pause=60.0, longest_pause=100.0))
    for outcome in (breaker.failed, breaker.failed, breaker.succeeded, breaker.failed, breaker.failed):
        outcome()
        now.seconds += 3600
    assert breaker.state == "closed"
    breaker.failed()
    assert breaker.state == "open"
    now.seconds += 59.0
    assert not breaker.admit()
    now.seconds += 2.0
    assert breaker.admit()
    breaker.failed()
    now.seconds += 99.0
    assert not breaker.admit()
