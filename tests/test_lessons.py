"""What answers teach, who else gets to know it, and what a conversation's own last answer is good for."""

from __future__ import annotations

import pytest

from proxy.core.budget.catalogue import Route
from proxy.core.overflow.classify import Overflow
from proxy.lessons import FRESH_SECONDS, Lessons, Sent
from tests.fits import Book

ROUTE = Route("up", "m", None, None, "o200k_base", "unknown")
ONE, TWO = b"1" * 32, b"2" * 32


class Hands:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def lessons(book: Book, clock: Hands) -> Lessons:
    return Lessons(book, {}, {}, clock)


async def test_an_overflow_teaches_every_replica() -> None:
    """A stated limit and prompt are known to the replica that saw them, and to others once they ask."""
    book, clock = Book(), Hands()
    here, there = lessons(book, clock), lessons(book, clock)
    assert (await there.of(ROUTE, ONE)).lesson.window is None
    here.overflowed(ROUTE, ONE, Overflow("input_too_long", 8192, 15_000), 10_000)
    assert here.now(ROUTE, ONE).lesson.window == 8192
    assert here.now(ROUTE, ONE).lesson.calibration.factor == 1.5
    assert (await there.of(ROUTE, ONE)).lesson.window is None
    clock.time += FRESH_SECONDS + 1
    assert (await there.of(ROUTE, ONE)).lesson == here.now(ROUTE, ONE).lesson


async def test_lessons_stay_with_their_tenant() -> None:
    """What one caller's traffic taught is not used for another's."""
    book, clock = Book(), Hands()
    here = lessons(book, clock)
    here.overflowed(ROUTE, ONE, Overflow("input_too_long", 8192), 10_000)
    assert (await here.of(ROUTE, TWO)).lesson.window is None


async def test_a_payload_limit_is_no_window() -> None:
    """Bytes that were too many say nothing about tokens."""
    here = lessons(Book(), Hands())
    here.overflowed(ROUTE, ONE, Overflow("payload_too_large", 32_000_000), 10_000)
    assert here.now(ROUTE, ONE).lesson.window is None


async def test_nonsense_in_the_store_is_a_miss() -> None:
    """A value that is no lesson leaves what this process knows."""
    book = Book()
    book.remember(ONE, ROUTE.name, b"\xff not a lesson")
    assert (await lessons(book, Hands()).of(ROUTE, ONE)).lesson.calibration.factor == 1.0


async def test_a_conversation_is_anchored_by_its_last_answer() -> None:
    """The next request's weight is what was reported, plus an estimate of what is new; another event has no anchor."""
    here = lessons(Book(), Hands())
    assert not here.answered(Sent(ROUTE, ONE, 1_000, b"a", -1), 1_337)
    assert here.expected(ROUTE, [b"x", b"a", b"b", b"c"], -1, 1_100, 1.5) == 1_337 + 150
    assert here.expected(ROUTE, [b"x", b"y"], -1, 1_100, 1.5) == 1_650
    assert here.expected(ROUTE, [b"x", b"a", b"b"], 2, 1_100, 1.5) == 1_650
    assert here.expected(ROUTE, [b"a"], -1, 900, 1.0) == 900


@pytest.mark.parametrize("reported", [0, 5_000_000, 2**53 - 1])
@pytest.mark.parametrize("plain", [True, False])
async def test_a_lie_is_no_anchor(reported: int, plain: bool) -> None:
    """A figure that no prompt of that size can have says nothing of the conversation, nor of the provider's count."""
    here = lessons(Book(), Hands())
    assert not here.answered(Sent(ROUTE, ONE, 1_000, b"a", -1, plain), reported)
    assert here.expected(ROUTE, [b"a"], -1, 1_000, 1.0) == 1_000
    assert here.now(ROUTE, ONE).lesson.calibration.factor == 1.0


async def test_a_silent_cut_is_told() -> None:
    """A report far below the count is flagged, and neither anchors nor calibrates."""
    here = lessons(Book(), Hands())
    assert here.answered(Sent(ROUTE, ONE, 10_000, b"a", -1), 4_096)
    assert here.expected(ROUTE, [b"a"], -1, 10_000, 1.0) == 10_000
    assert here.now(ROUTE, ONE).lesson.calibration.factor == 1.0


async def test_a_new_word_of_the_server_ends_an_old_lesson() -> None:
    """A stated window holds while the server tells what the overflow contradicted; told anew, it starts over."""
    here = lessons(Book(), Hands())
    before = Route("up", "m", 32_768, None, "o200k_base", "server")
    after = Route("up", "m", 65_536, None, "o200k_base", "server")
    here.overflowed(before, ONE, Overflow("input_too_long", 16_384), 20_000)
    lesson = here.now(before, ONE).lesson
    assert before.after(lesson.window, lesson.beside) == 16_384
    assert after.after(lesson.window, lesson.beside) == 65_536
    here.overflowed(after, ONE, Overflow("input_too_long", 50_000), 60_000)
    lesson = here.now(after, ONE).lesson
    assert after.after(lesson.window, lesson.beside) == 50_000
    assert here.answered(Sent(after, ONE, 10_000, b"l" * 16, -1), 13_000) is False
    assert here.now(after, ONE).lesson.beside == 65_536


async def test_pictures_teach_nothing_about_words() -> None:
    """How a provider prices media says nothing of its vocabulary; the conversation is anchored all the same."""
    here = lessons(Book(), Hands())
    assert not here.answered(Sent(ROUTE, ONE, 3_000, b"a", -1, plain=False), 900)
    assert not here.answered(Sent(ROUTE, ONE, 1_000, b"b", -1, plain=False), 3_000)
    assert here.now(ROUTE, ONE).lesson.calibration.factor == 1.0
    assert here.expected(ROUTE, [b"a"], -1, 3_000, 1.0) == 900


async def test_stated_windows_are_told_with_their_age() -> None:
    """People see which windows overflows stated and when, also from another replica, and never of whom."""
    book, wall = Book(), Hands()
    here = Lessons(book, {}, {}, Hands(), wall)
    assert here.stated() == []
    for tenant in (ONE, b"2" * 32):
        here.overflowed(ROUTE, tenant, Overflow("input_too_long", 16_384), 20_000)
    wall.time += 30
    assert here.stated() == [(ROUTE.name, 16_384, 30.0)]
    there = Lessons(book, {}, {}, Hands(), wall)
    await there.of(ROUTE, ONE)
    assert there.stated() == [(ROUTE.name, 16_384, 30.0)]
