"""Hooks: a feature is called for what concerns it, and only where it overrides something."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from proxy.core.request import Request
from proxy.engine.features import Feature, Features
from tests.support.engine_fixtures import TENANT


class Preparing(Feature):
    """Prepares bodies of one API that hold a word."""

    markers = MappingProxyType({"chat": (b"special",)})

    async def prepare(self, request: Request, engine: Any) -> Request:
        return request


class Compacting(Feature):
    """Answers requests of one purpose, whatever they hold."""

    purposes = frozenset({"compact"})

    async def answer(self, request: Request, engine: Any) -> None:
        return None


class Noting(Feature):
    """Notes answers; its markers mean nothing, since it prepares and answers nothing."""

    markers = MappingProxyType({"chat": (b"special",)})

    def answered(self, view: Any, report: Any, status: int) -> None:
        return None


@pytest.mark.parametrize(
    ("request_", "concerned"),
    [
        (Request("chat", b'{"special": 1}', TENANT, "r"), [Preparing]),
        (Request("chat", b"{}", TENANT, "r"), []),
        (Request("messages", b'{"special": 1}', TENANT, "r"), []),
        (Request("messages", b"{}", TENANT, "r", purpose="compact"), [Compacting]),
        (Request("chat", b'{"special": 1}', TENANT, "r", purpose="compact"), [Preparing, Compacting]),
    ],
)
def test_a_feature_is_called_for_what_concerns_it(request_: Request, concerned: list[type[Feature]]) -> None:
    """By a marker in the body of its API, or by what the request is for; in the order of the wiring."""
    features = Features([Preparing(), Noting(), Compacting()])
    assert features.markers == {"chat": (b"special",)}
    assert [type(each) for each in features.concerned(request_)] == concerned


def test_only_overridden_hooks_are_called() -> None:
    """What a feature does not override is none of its hooks."""
    noting = Noting()
    features = Features([Preparing(), noting])
    assert features.noting == [noting]
    assert (features.adding, features.continuing, features.answering_planned) == (None, [], [])
    assert Features([noting]).markers == {}
