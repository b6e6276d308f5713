"""The engine of commands that send nothing."""

from __future__ import annotations

import pytest

from proxy.core.errors import UllageError
from proxy.core.request import Request
from proxy.offline import offline_engine
from proxy.settings import Settings
from proxy.upstream_wiring import open_catalogue
from tests.support.engine_fixtures import chat_body


async def test_it_plans_and_sends_nothing() -> None:
    """A request is planned without an upstream, and sending it is an error."""
    settings = Settings()
    request = Request("chat", chat_body([{"role": "user", "content": "Hello."}], model="gpt-4o"), bytes(32), "one")
    async with offline_engine(settings, open_catalogue(settings)) as engine:
        decision = await engine.first_plan(request, count_always=True)
        assert engine.report(decision).tokens_before
        with pytest.raises(UllageError, match="nothing is sent"):
            await engine.exchange(request)
