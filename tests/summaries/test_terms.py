"""Who writes a summary, and whose key may be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from proxy.core.models import Catalogue, ModelRule
from proxy.core.request import Origin
from proxy.engine.ports import SummaryRequest
from proxy.summaries.terms import UNKNOWN_WINDOW, Terms
from tests.support.summary_fixtures import ROUTE, TENANT, entries_of, summary_request_of

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


def passage(*headers: tuple[str, str]) -> SummaryRequest:
    made = summary_request_of(entries_of(2))
    return replace(made, request=replace(made.request, origin=Origin("/v1/chat/completions", headers)))


def test_the_requests_own_model_writes_by_default() -> None:
    """Without a configured summariser, or for a caller who may not use it, the request's own model is asked."""
    for terms in (Terms(headers_of=headers_of), Terms(model="far", allowed=frozenset({b"x"}), headers_of=headers_of)):
        chosen = terms.summariser(passage(), CATALOGUE.resolve)
        assert (chosen.upstream, chosen.model, chosen.own, chosen.lent) == ("stub", "gpt-4o-mini", True, True)
        assert chosen.window == passage().window
        assert chosen.added == {"x-for": ROUTE.model}


def test_an_alias_is_the_model_it_stands_for() -> None:
    """An alias is asked by its model's name, in its model's window, with its own headers; an alias of the request's
    model is the request's model.
    """
    chosen = Terms(model="writer", headers_of=headers_of).summariser(passage(), CATALOGUE.resolve)
    assert (chosen.model, chosen.window, chosen.own, chosen.lent) == ("gpt-4o", 20_000, False, True)
    assert chosen.added == {"x-for": "writer"}
    assert Terms(model="mini").summariser(passage(), CATALOGUE.resolve).own


def test_another_upstream_is_asked_over_chat_in_a_window_that_is_safe() -> None:
    """Where the request did not go, nothing is lent, the API is chat, and an unknown window is taken to be small."""
    terms = Terms(model="far", allowed=frozenset({TENANT}))
    made = passage()
    chosen = terms.summariser(replace(made, request=replace(made.request, api="messages")), CATALOGUE.resolve)
    assert (chosen.upstream, chosen.api, chosen.lent) == ("other", "chat", False)
    assert chosen.window < UNKNOWN_WINDOW


@pytest.mark.parametrize(
    ("terms", "headers", "forbidden"),
    [
        (Terms(), (("x-api-key", OAUTH),), True),
        (Terms(subscriptions=True), (("x-api-key", OAUTH),), False),
        (Terms(keyed=frozenset({"stub"})), (("x-api-key", OAUTH),), False),
        (Terms(guarded=frozenset({"stub"})), (("x-api-key", "sk-1"),), True),
        (Terms(headers_of=lambda model: {"Authorization": f"Bearer {OAUTH}"}), (("x-api-key", "sk-1"),), True),
        (Terms(headers_of=lambda model: {"Authorization": "Bearer sk-2"}), (("Authorization", OAUTH),), False),
        (Terms(model="far"), (("x-api-key", OAUTH),), False),
    ],
    ids=["callers", "allowed", "behind-a-key", "upstreams", "models", "replaced", "elsewhere"],
)
def test_a_subscription_is_its_owners(terms: Terms, headers: tuple[tuple[str, str], ...], forbidden: bool) -> None:
    """A subscription's token is not used for a summary, wherever it comes from; one that would not be sent matters
    not.
    """
    made = passage(*headers)
    assert terms.forbid(made, terms.summariser(made, CATALOGUE.resolve)) is forbidden
