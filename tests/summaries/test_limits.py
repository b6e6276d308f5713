"""The cost that summaries may have, and the models and keys that may be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from msgspec import structs

from proxy.core.models import Catalogue, ModelRule
from proxy.core.request import Origin
from proxy.engine.ports import SummaryRequest
from proxy.store import SummaryTable
from proxy.store.operations import MemoryBackend
from proxy.summaries.limits import (
    FLUSH_SECONDS,
    FLUSH_TOKENS,
    FRESH,
    PAUSE,
    UNKNOWN_WINDOW,
    SpendingLimits,
    SummaryConfig,
)
from tests.support.summary_fixtures import ROUTE, TENANT, entries_of, summary_request_of, summary_table, written

A, B = b"a" * 32, b"b" * 32


class Now:
    """A clock to move."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def limits_of(table: SummaryTable, now: Now) -> SpendingLimits:
    return SpendingLimits(table, 0.1, {}, now, now)


async def test_a_tenth_of_what_was_sent_may_be_spent() -> None:
    """Spending is allowed up to the share of one's own tokens, and no further."""
    now = Now()
    limits = limits_of(summary_table(MemoryBackend()), now)
    assert await limits.refusal_reason(A, 1) == "budget"
    limits.add_sent(A, 10_000)
    assert await limits.refusal_reason(A, 1000) == ""
    assert await limits.refusal_reason(A, 1001) == "budget"
    limits.add_spent(A, 600)
    assert await limits.refusal_reason(A, 400) == ""
    assert await limits.refusal_reason(A, 401) == "budget"
    limits.add_spent(A, -100)
    assert limits.can_afford(A, 500)
    assert await limits.refusal_reason(B, 1) == "budget"


async def test_replicas_share_their_figures() -> None:
    """Tokens that one replica sent and spent count on the other, a few seconds later at most."""
    now, table = Now(), summary_table(MemoryBackend())
    first, second = limits_of(table, now), limits_of(table, now)
    first.add_sent(A, 10_000)
    assert await first.refusal_reason(A, 900) == ""
    first.add_spent(A, 900)
    await written()
    assert await second.refusal_reason(A, 100) == ""
    assert await second.refusal_reason(A, 101) == "budget"
    now.seconds += FLUSH_SECONDS
    first.add_sent(A, FLUSH_TOKENS)
    await written()
    now.seconds += FRESH
    assert await second.refusal_reason(A, 5000) == ""
    assert await table.spending(A, now.seconds) == (10_000 + FLUSH_TOKENS, 900, False)


async def test_a_busy_tenant_is_not_written_with_every_request() -> None:
    """What is sent within some seconds of a write waits for the next one, and none is lost."""
    now, table = Now(), summary_table(MemoryBackend())
    limits = limits_of(table, now)
    for _ in range(3):
        limits.add_sent(A, FLUSH_TOKENS)
    await written()
    assert await table.spending(A, now.seconds) == (FLUSH_TOKENS, 0, False)
    now.seconds += FLUSH_SECONDS
    limits.add_sent(A, 1)
    await written()
    assert await table.spending(A, now.seconds) == (3 * FLUSH_TOKENS + 1, 0, False)


async def test_a_lost_store_does_not_forget_what_was_spent() -> None:
    """When the store's figures are gone, what this process saw holds."""
    now, memory = Now(), MemoryBackend()
    limits = limits_of(summary_table(memory), now)
    limits.add_sent(A, 10_000)
    assert await limits.refusal_reason(A, 900) == ""
    limits.add_spent(A, 900)
    await written()
    await memory.close()
    now.seconds += FRESH
    assert await limits.refusal_reason(A, 101) == "budget"
    assert await limits.refusal_reason(A, 100) == ""


async def test_who_is_to_slow_down_is_left_alone_everywhere() -> None:
    """After a pause was called nothing may be spent for a minute, on other replicas too, by that tenant alone."""
    now = Now()
    table = summary_table(MemoryBackend(clock=now))
    first, second = limits_of(table, now), limits_of(table, now)
    for limits in (first, second):
        limits.add_sent(A, 10_000)
        limits.add_sent(B, 10_000)
    first.pause(A)
    await written()
    assert first.is_paused(A)
    assert await first.refusal_reason(A, 1) == "paused"
    assert await second.refusal_reason(A, 1) == "paused"
    assert await second.refusal_reason(B, 1) == ""
    now.seconds += PAUSE
    assert await first.refusal_reason(A, 1) == ""
    assert await second.refusal_reason(A, 1) == ""


async def test_the_status_lists_figures_by_tenant() -> None:
    """Those who sent most come first, with what they may spend and how long they still pause."""
    now = Now()
    limits = limits_of(summary_table(MemoryBackend()), now)
    limits.add_sent(A, 1000)
    limits.add_sent(B, 5000)
    limits.add_spent(B, 70)
    limits.pause(A)
    await written()
    now.seconds += 10.5
    assert limits.status(5) == [
        (B, {"sent_tokens": 5000, "spent_tokens": 70, "allowed_tokens": 500, "paused_seconds": 0}),
        (A, {"sent_tokens": 1000, "spent_tokens": 0, "allowed_tokens": 100, "paused_seconds": 50}),
    ]
    assert [tenant for tenant, _ in limits.status(1)] == [B]
    now.seconds += PAUSE
    assert limits.status(5)[1][1]["paused_seconds"] == 0


OAUTH = "sk-ant-oat01-abc"
CATALOGUE = Catalogue(
    [
        ModelRule("writer", "stub", model="gpt-4o"),
        ModelRule("gpt-4o", "stub", 30_000),
        ModelRule("mini", "stub", model="gpt-4o-mini"),
        ModelRule("far", "other"),
    ],
    {},
    "stub",
)


def headers_of(model: str) -> Mapping[str, str]:
    return {"x-for": model}


def wanted(*headers: tuple[str, str]) -> SummaryRequest:
    made = summary_request_of(entries_of(2))
    return replace(
        made, client_request=structs.replace(made.client_request, origin=Origin("/v1/chat/completions", headers))
    )


def test_the_requests_own_model_writes_by_default() -> None:
    """Without a configured summariser, or for a caller who may not use it, the request's own model is asked."""
    for terms in (
        SummaryConfig(headers_of=headers_of),
        SummaryConfig(model="far", allowed_tenants=frozenset({b"x"}), headers_of=headers_of),
    ):
        chosen = terms.choose_summariser(wanted(), CATALOGUE.resolve)
        assert (chosen.upstream, chosen.model, chosen.is_request_model, chosen.uses_client_headers) == (
            "stub",
            "gpt-4o-mini",
            True,
            True,
        )
        assert chosen.window == wanted().window
        assert chosen.configured_headers == {"x-for": ROUTE.model}


def test_an_alias_is_the_model_it_stands_for() -> None:
    """An alias is asked by its model's name, in its model's window, with its own headers; an alias of the request's
    model is the request's model.
    """
    chosen = SummaryConfig(model="writer", headers_of=headers_of).choose_summariser(wanted(), CATALOGUE.resolve)
    assert (chosen.model, chosen.window, chosen.is_request_model, chosen.uses_client_headers) == (
        "gpt-4o",
        20_000,
        False,
        True,
    )
    assert chosen.configured_headers == {"x-for": "writer"}
    assert SummaryConfig(model="mini").choose_summariser(wanted(), CATALOGUE.resolve).is_request_model


def test_another_upstream_is_called_over_chat_in_a_safe_window() -> None:
    """Another upstream gets no headers of the client; the API is chat, and an unknown window counts as small."""
    terms = SummaryConfig(model="far", allowed_tenants=frozenset({TENANT}))
    made = wanted()
    chosen = terms.choose_summariser(
        replace(made, client_request=structs.replace(made.client_request, api="messages")), CATALOGUE.resolve
    )
    assert (chosen.upstream, chosen.api, chosen.uses_client_headers) == ("other", "chat", False)
    assert chosen.window < UNKNOWN_WINDOW


@pytest.mark.parametrize(
    ("terms", "headers", "forbidden"),
    [
        (SummaryConfig(), (("x-api-key", OAUTH),), True),
        (SummaryConfig(allow_subscriptions=True), (("x-api-key", OAUTH),), False),
        (SummaryConfig(keyed_upstreams=frozenset({"stub"})), (("x-api-key", OAUTH),), False),
        (SummaryConfig(subscription_upstreams=frozenset({"stub"})), (("x-api-key", "sk-1"),), True),
        (SummaryConfig(headers_of=lambda model: {"Authorization": f"Bearer {OAUTH}"}), (("x-api-key", "sk-1"),), True),
        (SummaryConfig(headers_of=lambda model: {"Authorization": "Bearer sk-2"}), (("Authorization", OAUTH),), False),
        (SummaryConfig(model="far"), (("x-api-key", OAUTH),), False),
    ],
    ids=["callers", "allowed", "behind-a-key", "upstreams", "models", "replaced", "elsewhere"],
)
def test_a_subscription_is_its_owners(
    terms: SummaryConfig, headers: tuple[tuple[str, str], ...], forbidden: bool
) -> None:
    """A subscription's token is not used for a summary, wherever it comes from; one that would not be sent matters
    not.
    """
    made = wanted(*headers)
    assert terms.forbids(made, terms.choose_summariser(made, CATALOGUE.resolve)) is forbidden
