"""From settings to upstreams, probes and the catalogue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.core.models import ServerWindow
from proxy.settings import Settings
from proxy.store import open_store
from proxy.summaries import ignore_note
from proxy.tasks import Tasks
from proxy.tokenizers import Tokenizers
from proxy.upstream.probes import OWNER
from proxy.upstream_wiring import (
    NO_UPSTREAM,
    open_bridge,
    open_catalogue,
    open_probes,
    open_summaries,
    open_upstream,
)
from tests.support.proxy_process import until
from tests.support.server_fixture import ScriptedServer, listening, raw_answer
from tests.support.upstream_fixture import read_body


def settings(**given: Any) -> Settings:
    return Settings.model_validate({"upstreams": [{"name": "up", "base_url": "http://127.0.0.1:1/v1"}], **given})


@pytest.mark.parametrize(
    ("model", "figures"),
    [
        ("gpt-4o", (128_000, None, 16_384, "table")),
        ("gpt-5", (400_000, 272_000, 128_000, "table")),
        ("openai/gpt-5-mini", (400_000, 272_000, 128_000, "table")),
        ("claude-sonnet-4-5", (200_000, None, 64_000, "table")),
        ("gemini-2.5-pro", (1_048_576, None, 65_535, "table")),
        ("nobody-knows", (None, None, None, "unknown")),
        ("mine", (9_000, 8_000, 700, "configured")),
        ("guess", (5_000, None, None, "assumed")),
    ],
)
def test_figures_of_models(model: str, figures: tuple[int | None, int | None, int | None, str]) -> None:
    """Known models have their published figures, kept apart; what the configuration says wins."""
    rules = [
        {"name": "mine", "context_window": 9_000, "max_input_tokens": 8_000, "max_output_tokens": 700},
        {"name": "guess", "unknown_window": 5_000},
    ]
    route = open_catalogue(settings(models=rules)).resolve(model)
    assert (route.window, route.max_input, route.max_output, route.source) == figures


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning")
@pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning")
@pytest.mark.parametrize(("model", "num_ctx"), [("qwen3:8b", 32_768), ("llama3.2", None)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("provider", "route"), [("ollama_chat", "/api/chat"), ("ollama", "/api/generate")])
async def test_a_rule_sets_ollamas_window(
    model: str, num_ctx: int | None, stream: bool, provider: str, route: str
) -> None:
    """Requests for the rule's model carry the figure in `options`, others do not; Ollama gets no other request."""
    stage = ScriptedServer()
    last = {"model": model, "message": {"role": "assistant", "content": "Hm."}, "done": True, "done_reason": "stop"}
    last |= {"response": "Hm."}
    last |= {"prompt_eval_count": 7, "eval_count": 2, "created_at": "2026-11-23T00:00:00Z"}
    lines = [last]
    if stream:
        lines = [{**last, "done": False}, {**last, "message": {"role": "assistant", "content": ""}, "response": ""}]
    answer = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    stage.reply = raw_answer(answer, "Content-Type: application/json")
    async with listening(stage) as port:
        ollama = {"name": "ollama", "provider": provider, "base_url": f"http://127.0.0.1:{port}", "api_key": "any"}
        found = Settings.model_validate(
            {"upstreams": [ollama], "models": [{"name": "mine", "model": "qwen3:8b", "num_ctx": 32_768}]}
        )
        assert open_catalogue(found).resolve("mine").window == 32_768
        tasks = Tasks(lambda name, error: None)
        bridge = open_bridge(found, tasks)
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        reply = await bridge.send("ollama", [], json.dumps(body).encode())
        answer = await read_body(reply)
        await bridge.close()
        await tasks.finish(1.0)
    assert b"Hm." in answer, answer
    (heard,) = stage.heard
    assert heard.line.startswith(f"POST {route} ")
    assert json.loads(heard.body).get("options", {}).get("num_ctx") == num_ctx


def test_a_reported_window_reaches_the_catalogue() -> None:
    """The window that an upstream states is looked up by its name and the model's."""
    stated = {("up", "gpt-4o"): ServerWindow(32_768)}
    catalogue = open_catalogue(settings(), lambda upstream, model, ask: stated.get((upstream, model)))
    assert (catalogue.resolve("gpt-4o").window, catalogue.resolve("gpt-4o").source) == (32_768, "server")
    assert catalogue.resolve("gpt-5").source == "table"


def test_without_upstreams_models_still_have_figures() -> None:
    """Without any configuration models can still be looked up."""
    assert open_catalogue(Settings()).resolve("gpt-4o").upstream == NO_UPSTREAM


async def test_only_upstreams_that_allow_it_are_probed() -> None:
    """An upstream with ``probe: false`` is not probed."""
    given = settings(
        upstreams=[
            {"name": "up", "base_url": "http://127.0.0.1:1/v1", "api_key": "k"},
            {"name": "quiet", "base_url": "http://127.0.0.1:1/v1", "probe": False},
            {"name": "hosted", "base_url": "https://api.openai.com/v1"},
        ]
    )
    upstream = open_upstream(given)
    assert upstream.names == ("up", "quiet", "hosted")
    probes = open_probes(given, upstream, Tasks(lambda name, error: None))
    assert set(probes.last_probes()) == {"up"}
    await upstream.close()


async def test_processes_leave_notes_for_each_other(tmp_path: Path) -> None:
    """A value stored under a name is read through the same store, sealed like everything in it; others have none."""
    tasks = Tasks(lambda name, error: None)
    store = await open_store(
        "memory", directory=tmp_path, key=b"k" * 32, spawn=tasks.spawn, warn=lambda event, facts: None
    )
    try:
        records = store.records
        assert await records.read_route(OWNER, "windows up") is None
        records.save_route(OWNER, "windows up", b"32768")
        await until(lambda: len(tasks) == 0)
        assert await records.read_route(OWNER, "windows up") == b"32768"
        assert await records.read_route(OWNER, "windows down") is None
    finally:
        await store.close()


async def test_who_is_bridged() -> None:
    """A provider other than OpenAI's is bridged; Anthropic, whose other API is spoken here, is reached directly too."""
    upstreams = [
        {"name": "openai", "base_url": "https://api.openai.com/v1"},
        {"name": "claude", "provider": "anthropic", "api_key": "sk-a", "headers": {"x-team": "blue"}},
        {"name": "own", "provider": "anthropic", "base_url": "http://127.0.0.1:1/v1"},
        {"name": "aws", "provider": "bedrock", "options": {"aws_region_name": "eu-central-1"}},
    ]
    given = settings(upstreams=upstreams)
    tasks = Tasks(lambda name, error: None)
    direct, bridge = open_upstream(given), open_bridge(given, tasks)
    assert (direct.names, bridge.names) == (("openai", "claude", "own"), ("claude", "own", "aws"))
    claude, own, aws = (bridge._targets[name] for name in bridge.names)
    assert (claude.base_url, own.base_url, aws.base_url) == ("https://api.anthropic.com", "http://127.0.0.1:1", None)
    assert (claude.api_key, claude.headers, claude.ambient) == ("sk-a", {"x-team": "blue"}, False)
    assert (aws.ambient, aws.options) == (True, {"aws_region_name": "eu-central-1"})
    await direct.close()


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({}, True),
        ({"summaries": {"mode": "inline"}}, True),
        ({"summaries": {"mode": "off"}}, False),
        ({"compression": {"mode": "observe"}}, False),
        ({"compression": {"mode": "off"}}, False),
    ],
)
async def test_summaries_are_written_only_where_they_may_be_used(
    tmp_path: Path, given: dict[str, Any], written: bool
) -> None:
    """No model writes summaries if they are off or if no view is ever made."""
    tasks = Tasks(lambda name, error: None)
    store = await open_store("memory", directory=tmp_path, key=None, spawn=tasks.spawn, warn=lambda event, facts: None)
    wanted = settings(**given)
    upstream = open_upstream(wanted)
    jobs = open_summaries(
        wanted, open_catalogue(wanted), Tokenizers(), store, upstream, tasks, lambda report: None, ignore_note
    )
    assert (jobs is not None) is written
    assert jobs is None or jobs.inline is (wanted.summaries.mode == "inline")
    await upstream.close()
    await store.close()
