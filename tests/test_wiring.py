"""From settings to what works by them: nothing that was configured is lost on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.core.models import Catalogue, ModelRule
from proxy.core.request import Options, Request
from proxy.offline import NoUpstream
from proxy.settings import Settings
from proxy.store import open_store
from proxy.tasks import Tasks
from proxy.tokenizers import Tokenizers
from proxy.wiring import open_engine, server_config
from tests.support.engine_fixtures import TENANT, chat_body
from tests.support.sample_conversations import agent_session

UPSTREAMS: list[dict[str, Any]] = [
    {"name": "open", "base_url": "http://a"},
    {"name": "keyed", "base_url": "http://b", "api_key": "k", "include_usage": True},
]


def test_the_server_gets_what_was_configured() -> None:
    """Keys, origins, limits, and which upstreams carry a key of the proxy's."""
    server = {
        "access_keys": ["one-key-of-many"],
        "admin_key": "the-admin-key",
        "origins": ["https://chat.example.org"],
        "hosts": ["LLM.Internal"],
        "websockets": "refuse",
        "default_upstream": "keyed",
        "limits": {
            "body": "1MiB",
            "in_flight": 3,
            "in_flight_bytes": "2MiB",
            "headers": "9KiB",
            "head": "10KiB",
            "fields": 5,
        },
    }
    config = server_config(Settings.model_validate({"server": server, "upstreams": UPSTREAMS}))
    assert (config.default_upstream, config.access_keys, config.admin_key) == (
        "keyed",
        ("one-key-of-many",),
        "the-admin-key",
    )
    assert (config.websockets, config.origins) == ("refuse", frozenset({"https://chat.example.org"}))
    assert config.hosts == {"127.0.0.1", "llm.internal"}
    assert (config.limits.body, config.limits.in_flight, config.limits.header) == (2**20, 3, 9 * 1024)
    assert (config.limits.in_flight_bytes, config.limits.head, config.limits.fields) == (2**21, 10 * 1024, 5)
    assert config.keyed_upstreams == config.usage_upstreams == frozenset({"keyed"})


async def test_stages_that_are_turned_off_are_not_used(tmp_path: Path) -> None:
    """The same request with and without a stage: the engine works by its settings."""
    tasks = Tasks(lambda _, error: None)
    store = await open_store("memory", directory=tmp_path, key=None, spawn=tasks.spawn, warn=lambda *_: None)
    used = {}
    for fold in (True, False):
        stages = {"fold": {"enabled": fold}, "prune": {"enabled": False}, "dedup": {"enabled": False}}
        settings = Settings.model_validate({"upstreams": UPSTREAMS, "compression": {"stages": stages}})
        catalogue = Catalogue([ModelRule("*", "open", 8192)], {}, "open")
        engine = open_engine(settings, catalogue, Tokenizers(), store, NoUpstream())
        # Names of their own: else the second would adopt what was decided for the first.
        request = Request("chat", chat_body(agent_session(60, 300)), TENANT, "r", Options(conversation=str(fold)))
        used[fold] = engine.report(await engine.first_plan(request)).stages
    await store.close()
    await tasks.finish(1.0)
    assert "fold" in used[True]
    assert "fold" not in used[False]
    assert "drop" in used[False]
