"""What answers teach, who else gets to know it, and what a conversation's own last answer is good for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from msgspec import structs

from proxy.core.learned_window import STATED_SECONDS
from proxy.core.models import Route
from proxy.core.overflow.kinds import Overflow
from proxy.core.report import Usage
from proxy.engine import learned_routes
from proxy.engine.learned_routes import (
    FRESH_SECONDS,
    MOST_KNOWN,
    RAISE_ANY,
    LearnedRoutes,
    SentPrompt,
    remedy,
)
from tests.core.test_planner import measured
from tests.support.engine_fixtures import DictRecords
from tests.support.sample_conversations import agent_session

T = 1_000_000.0
ROUTE = Route("up", "m", None, None, "o200k_base", "unknown")
ONE, TWO = b"1" * 32, b"2" * 32
MEASURED = measured(agent_session(2, 20))
"""Any measured request; tests give it an anchor."""


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def open_routes(
    store: DictRecords, clock: ManualClock, logged: list[tuple[str, dict[str, object]]] | None = None
) -> LearnedRoutes:
    def notice(event: str, facts: Mapping[str, object]) -> None:
        if logged is not None:
            logged.append((event, dict(facts)))

    return LearnedRoutes(store, {}, {}, clock, notice, lambda: T + clock.time)


async def test_an_overflow_teaches_every_replica() -> None:
    """A stated limit and prompt are known to the replica that saw them, and to others once they ask."""
    store, clock = DictRecords(), ManualClock()
    here, there = open_routes(store, clock), open_routes(store, clock)
    assert (await there.get(ROUTE, ONE)).learned_window.stated is None
    here.learn_refusal(ROUTE, ONE, Overflow("input", 8192, 15_000), 10_000)
    assert here.get_cached(ROUTE, ONE).learned_window.stated == 8192
    assert here.get_cached(ROUTE, ONE).calibration.factor == 1.5
    assert (await there.get(ROUTE, ONE)).learned_window.stated is None
    clock.time += FRESH_SECONDS + 1
    assert (await there.get(ROUTE, ONE)) == here.get_cached(ROUTE, ONE)


class SlowRecords(DictRecords):
    """Records whose reads of routes wait until they are let through."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.goes_on = asyncio.Event(), asyncio.Event()

    async def read_route(self, tenant: bytes, route: str) -> bytes | None:
        value = await super().read_route(tenant, route)
        self.reading.set()
        await self.goes_on.wait()
        return value


async def test_what_is_learned_during_a_read_of_the_store_stays() -> None:
    """A value that was read before an overflow does not replace what the overflow taught."""
    store, clock = SlowRecords(), ManualClock()
    open_routes(store, clock).learn_refusal(ROUTE, ONE, Overflow("input", 32_768), 40_000)
    here = open_routes(store, clock)

    async def refused() -> None:
        await store.reading.wait()
        here.learn_refusal(ROUTE, ONE, Overflow("input", 8192), 10_000)
        store.goes_on.set()

    read, _ = await asyncio.gather(here.get(ROUTE, ONE), refused())
    assert read.learned_window.stated == 8192
    assert here.get_cached(ROUTE, ONE).learned_window.stated == 8192


async def test_lessons_stay_with_their_tenant() -> None:
    """What one caller's traffic taught is not used for another's."""
    store, clock = DictRecords(), ManualClock()
    here = open_routes(store, clock)
    here.learn_refusal(ROUTE, ONE, Overflow("input", 8192), 10_000)
    assert (await here.get(ROUTE, TWO)).learned_window.stated is None


async def test_a_payload_limit_is_no_window() -> None:
    """Bytes that were too many say nothing about tokens."""
    here = open_routes(DictRecords(), ManualClock())
    here.learn_refusal(ROUTE, ONE, Overflow("payload", 32_000_000), 10_000)
    assert here.get_cached(ROUTE, ONE).learned_window.stated is None


async def test_nonsense_in_the_store_is_a_miss() -> None:
    """A value that is no lesson leaves what this process knows."""
    store = DictRecords()
    store.save_route(ONE, ROUTE.name, b"\xff not a lesson")
    assert (await open_routes(store, ManualClock()).get(ROUTE, ONE)).calibration.factor == 1.0


def expected(here: LearnedRoutes, links: list[bytes], boundary: int, tokens: int, ratio: float) -> int:
    """What the provider is expected to count for a view of *tokens* at the end of *links*."""
    known = structs.replace(MEASURED.known, token_ratio=ratio)
    request = structs.replace(MEASURED, known=known, anchor=here.find_anchor(ROUTE, links))
    return request.expected_tokens(boundary, tokens)


async def test_a_conversation_is_anchored_by_its_last_answer() -> None:
    """The next request's weight is what was reported, plus an estimate of what is new; another event has no anchor."""
    here = open_routes(DictRecords(), ManualClock())
    assert not here.learn_usage(SentPrompt(ROUTE, ONE, 1_000, b"a", -1), 1_337)
    assert expected(here, [b"x", b"a", b"b", b"c"], -1, 1_100, 1.5) == 1_337 + 150
    assert expected(here, [b"x", b"y"], -1, 1_100, 1.5) == 1_650
    assert expected(here, [b"x", b"a", b"b"], 2, 1_100, 1.5) == 1_650
    assert expected(here, [b"a"], -1, 900, 1.0) == 900


@pytest.mark.parametrize("reported", [0, 5_000_000, 2**53 - 1])
@pytest.mark.parametrize("plain", [True, False])
async def test_a_lie_is_no_anchor(reported: int, plain: bool) -> None:
    """A figure that no prompt of that size can have says nothing of the conversation, nor of the provider's count."""
    here = open_routes(DictRecords(), ManualClock())
    assert not here.learn_usage(SentPrompt(ROUTE, ONE, 1_000, b"a", -1, plain), reported)
    assert expected(here, [b"a"], -1, 1_000, 1.0) == 1_000
    assert here.get_cached(ROUTE, ONE).calibration.factor == 1.0


async def test_a_silent_cut_is_flagged() -> None:
    """A report far below the count is flagged, and neither anchors nor calibrates."""
    here = open_routes(DictRecords(), ManualClock())
    assert here.learn_usage(SentPrompt(ROUTE, ONE, 10_000, b"a", -1), 4_096)
    assert expected(here, [b"a"], -1, 10_000, 1.0) == 10_000
    assert here.get_cached(ROUTE, ONE).calibration.factor == 1.0


async def test_a_new_reported_window_replaces_a_stated_one() -> None:
    """A stated window holds while the server tells what the overflow contradicted; told anew, it starts over."""
    here = open_routes(DictRecords(), ManualClock())
    before = Route("up", "m", 32_768, None, "o200k_base", "server")
    after = Route("up", "m", 65_536, None, "o200k_base", "server")
    here.learn_refusal(before, ONE, Overflow("input", 16_384), 20_000)
    lesson = here.get_cached(before, ONE)
    assert before.window_after(lesson.learned_window.stated, lesson.learned_window.reported) == 16_384
    assert after.window_after(lesson.learned_window.stated, lesson.learned_window.reported) == 65_536
    here.learn_refusal(after, ONE, Overflow("input", 50_000), 60_000)
    lesson = here.get_cached(after, ONE)
    assert after.window_after(lesson.learned_window.stated, lesson.learned_window.reported) == 50_000
    assert here.learn_usage(SentPrompt(after, ONE, 10_000, b"l" * 16, -1), 13_000) is False
    assert here.get_cached(after, ONE).learned_window.reported == 65_536


async def test_pictures_teach_nothing_about_words() -> None:
    """How a provider prices media says nothing of its vocabulary; the conversation is anchored all the same."""
    here = open_routes(DictRecords(), ManualClock())
    assert not here.learn_usage(SentPrompt(ROUTE, ONE, 3_000, b"a", -1, is_text=False), 900)
    assert not here.learn_usage(SentPrompt(ROUTE, ONE, 1_000, b"b", -1, is_text=False), 3_000)
    assert here.get_cached(ROUTE, ONE).calibration.factor == 1.0
    assert expected(here, [b"a"], -1, 3_000, 1.0) == 900


def window(here: LearnedRoutes, route: Route, tenant: bytes = ONE) -> int | None:
    return here.window(route, here.get_cached(route, tenant))


async def test_a_stated_limit_expires() -> None:
    """A stated limit holds for an hour, however often the count is corrected meanwhile."""
    clock = ManualClock()
    here = open_routes(DictRecords(), clock)
    here.learn_refusal(ROUTE, ONE, Overflow("input", 8_192), 10_000)
    clock.time = STATED_SECONDS / 2
    assert not here.learn_usage(SentPrompt(ROUTE, ONE, 1_000, b"a", -1), 1_400)
    clock.time = STATED_SECONDS - 1
    assert window(here, ROUTE) == 8_192
    clock.time = STATED_SECONDS
    assert window(here, ROUTE) is None
    assert here.get_cached(ROUTE, ONE).calibration.factor == 1.4


async def test_a_flag_that_changes_the_window_has_lessons_of_its_own() -> None:
    """What a request without the flag taught says nothing about one with it."""
    here = open_routes(DictRecords(), ManualClock())
    here.learn_refusal(ROUTE, ONE, Overflow("input", 8_192), 10_000)
    wide = replace(ROUTE, variant="context-1m")
    assert (await here.get(wide, ONE)).learned_window.stated is None
    here.learn_refusal(wide, ONE, Overflow("input", 16_384), 20_000)
    assert (window(here, ROUTE), window(here, wide)) == (8_192, 16_384)


async def test_nothing_learned_exceeds_what_was_configured() -> None:
    """A configured window is only ever lowered, by whatever teaches."""
    route = replace(ROUTE, window=10_000, source="configured")
    here = open_routes(DictRecords(), ManualClock())
    here.learn_refusal(route, ONE, Overflow("input", 30_000), 31_000)
    assert window(here, route) == 10_000
    here.learn_refusal(route, ONE, Overflow("input", 8_000), 9_000)
    assert window(here, route) == 8_000


@pytest.mark.parametrize("limit", [100, 5_000_000])
async def test_an_odd_limit_is_not_kept(limit: int) -> None:
    """A limit outside of what can be is treated as if nothing had been stated."""
    here = open_routes(DictRecords(), ManualClock())
    here.learn_refusal(ROUTE, ONE, Overflow("input", limit), 10_000)
    assert window(here, ROUTE) is None
    here.learn_refusal(ROUTE, ONE, Overflow("input", limit), 9_000, 1_000)
    assert window(here, ROUTE) == 9_000


async def test_an_answer_that_ran_into_the_window_teaches_it() -> None:
    """Prompt and answer together filled it; a stated limit is taken as ever, a rate limit teaches nothing."""
    sent = SentPrompt(ROUTE, ONE, 7_000, b"a", -1)
    for overflow, usage, holds in (
        (Overflow("stop"), Usage(7_500, 692), 8_192),
        (Overflow("stop"), Usage(), 7_000),
        (Overflow("input_plus_output", 8_000), Usage(), 8_000),
        (Overflow("rate_limit", 6_000), Usage(), None),
    ):
        here = open_routes(DictRecords(), ManualClock())
        here.learn_late_overflow(sent, overflow, usage)
        assert window(here, ROUTE) == holds


async def test_a_learned_window_is_logged_once() -> None:
    """A new window is an event; the same again is none; a server that cuts is warned of once, for all callers."""
    logged: list[tuple[str, dict[str, object]]] = []
    here = open_routes(DictRecords(), ManualClock(), logged)
    for tokens in (10_000, 11_000):
        here.learn_refusal(ROUTE, ONE, Overflow("input", 8_192), tokens)
    assert [(event, facts["observed_window"]) for event, facts in logged] == [("upstream.window_learned", 8_192)]
    shown = {"route": "up,m", "context_window": 8_192, "how": "stated", "age_seconds": 0.0}
    assert here.shown_windows() == [shown]
    logged.clear()
    for tenant in (ONE, TWO, TWO):
        assert here.learn_usage(SentPrompt(ROUTE, tenant, 9_000, b"a", -1), 4_096)
    events = [event for event, _ in logged]
    assert events.count("upstream.silently_truncates") == 1
    assert window(here, ROUTE, TWO) == 4_096


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("/api/ps context_length", "num_ctx"),
        ("/api/v0/models loaded_context_length", "LM Studio"),
        ("/props n_ctx", "--ctx-size"),
        ("/v1/models meta.n_ctx", "--ctx-size"),
        ("/v1/models max_model_len", RAISE_ANY),
        ("", RAISE_ANY),
    ],
)
def test_the_remedy_fits_the_server(how: str, word: str) -> None:
    """What to do about a cut prompt is said in the words of the server it is about."""
    text = remedy(replace(ROUTE, window_origin=how))
    assert word in text
    assert len(text) <= 200


async def test_what_was_never_counted_teaches_too() -> None:
    """Of a view that was bounded from below a cut shows all the same; it corrects no count and anchors nothing."""
    here = open_routes(DictRecords(), ManualClock())
    sent = SentPrompt(ROUTE, ONE, 30_000, b"", -1, is_counted=False)
    assert not here.learn_usage(sent, 90_000)
    assert here.get_cached(ROUTE, ONE).calibration.factor == 1.0
    assert expected(here, [b""], -1, 100, 1.0) == 100
    assert here.learn_usage(sent, 8_192)
    assert window(here, ROUTE) == 8_192
    here = open_routes(DictRecords(), ManualClock())
    here.learn_late_overflow(sent, Overflow("input"), Usage())
    assert window(here, ROUTE) is None
    here.learn_late_overflow(sent, Overflow("input", 16_384), Usage())
    assert window(here, ROUTE) == 16_384


def answered(here: LearnedRoutes, tokens: int, reported: int, tenant: bytes = ONE, *, is_counted: bool = True) -> None:
    here.learn_usage(SentPrompt(ROUTE, tenant, tokens, b"", -1, is_counted=is_counted), reported)


async def test_the_largest_prompt_that_was_answered_lately() -> None:
    """It is remembered for its tenant alone, and until the route refuses a request."""
    here = open_routes(DictRecords(), ManualClock())
    assert here.served_lately(ROUTE, ONE) is None
    for reported in (9_000, 12_000, 3_000):
        answered(here, reported, reported)
    answered(here, 15_000, 30_000, is_counted=False)
    assert here.served_lately(ROUTE, ONE) == 30_000
    assert here.served_lately(ROUTE, TWO) is None
    assert window(here, ROUTE) is None
    here.learn_refusal(ROUTE, ONE, Overflow("input"), 4_000)
    assert here.served_lately(ROUTE, ONE) is None
    answered(here, 5_000, 5_000)
    assert here.served_lately(ROUTE, ONE) == 5_000
    here.learn_late_overflow(SentPrompt(ROUTE, ONE, 4_000, b"", -1), Overflow("input", 4_096), Usage())
    assert here.served_lately(ROUTE, ONE) is None


async def test_an_old_answer_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Providers change windows: what a route answered counts for some minutes."""
    monkeypatch.setattr(learned_routes, "SERVED_SECONDS", 1e-6)
    here = open_routes(DictRecords(), ManualClock())
    answered(here, 5_000, 5_000)
    await asyncio.sleep(0.001)
    assert here.served_lately(ROUTE, ONE) is None


@pytest.mark.parametrize("is_counted", [True, False])
async def test_a_report_that_cannot_be_true_serves_nothing(is_counted: bool) -> None:
    """A count far beyond what the body can hold is not remembered."""
    here = open_routes(DictRecords(), ManualClock())
    answered(here, 1_000, 9_000_000, is_counted=is_counted)
    assert here.served_lately(ROUTE, ONE) is None


async def test_routes_that_answered_are_bounded() -> None:
    """Names of models come from clients: they cannot fill the memory."""
    here = open_routes(DictRecords(), ManualClock())
    for number in range(MOST_KNOWN + 1):
        answered(here, 2_000, 2_000, str(number).encode())
    assert here.served_lately(ROUTE, str(MOST_KNOWN).encode()) == 2_000
    assert here.served_lately(ROUTE, b"0") is None
