"""The page of a real process: one worker, several, and none of it if the settings say so."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from proxy.page.opening import LivePage
from proxy.settings import Settings
from proxy.tasks import Tasks, ignore_failure
from proxy.workers import Worker
from tests.stub.rules import Rules
from tests.stub.server import Stub
from tests.support.engine_fixtures import Replica, chat_body
from tests.support.loopback import loopback_client
from tests.support.page_scene import Scene, configuration, play, reading
from tests.support.proxy_process import Proxy
from tests.support.sample_conversations import agent_session, log

SCENE = Scene("migrate", "qwen3-coder", "billing", tuple(range(2, 30, 3)))
ROOMY = Rules(window=400_000)


def live_page(folder: Path | None = None, **telemetry: object) -> LivePage:
    """The page of the first of two workers, whose warnings are lost."""
    return LivePage(Settings.model_validate({"telemetry": telemetry}), Worker(0, 2), folder, lambda event, facts: None)


async def first_event(proxy: Proxy) -> dict[str, Any]:
    """The first event of an open page."""
    async with (
        loopback_client() as client,
        client.stream("GET", f"{proxy.root}/ullage/events") as answer,
    ):
        async for line in answer.aiter_lines():
            return dict(json.loads(line.removeprefix("data: ")))
    raise AssertionError("the stream ended")


async def test_what_is_switched_off_is_not_there() -> None:
    """Neither a board nor a hook that each request would pass."""
    tasks = Tasks(ignore_failure)
    nothing = live_page(advice=False, page={"enabled": False})
    assert (nothing.reports, nothing.features) == (None, ())
    assert nothing.routes(dict) is None
    await nothing.start(tasks.spawn)
    nothing.show_lag(float)
    nothing.tick()
    nothing.close()
    assert len(tasks) == 0
    only_advice = live_page(page={"enabled": False})
    assert (only_advice.reports, len(only_advice.features)) == (None, 1)
    assert live_page().reports is not None


@pytest.mark.parametrize("advice", [True, False])
async def test_the_log_can_be_without_advice(advice: bool) -> None:
    """The page has it all the same."""
    lines: list[str] = []
    settings = Settings.model_validate({"telemetry": {"advice": advice}})
    page = LivePage(settings, Worker(0, 1), None, lambda event, facts: lines.append(event))
    plan = await Replica().plan(chat_body([*agent_session(5, 100), *reading("dist/bundle.js", log(1, 5600))]), 8192)
    (recorder,) = page.features
    recorder.answered(plan.view, plan.report, 200)
    assert lines == ["conversation.nearly_full"] * advice
    assert page._board is not None
    (note,) = page._board.views
    assert note.advice is not None


async def test_a_folder_whose_name_is_too_long_costs_the_others_rows_only(tmp_path: Path) -> None:
    """The page is served all the same."""
    tasks = Tasks(ignore_failure)
    page = live_page(tmp_path / ("x" * 120))
    assert page.routes(lambda: {"models": []}) is not None
    await page.start(tasks.spawn)
    page.tick()
    page.close()
    await tasks.finish(1)


@pytest.mark.slow
async def test_a_page_of_one_worker_shows_what_both_serve() -> None:
    """Real workers, whichever of them the kernel chooses for a connection."""
    async with Stub(ROOMY) as stub:
        config = configuration(stub.url, server={"workers": 2})
        async with Proxy(stub.url, config=config) as proxy:
            await asyncio.gather(*(play(proxy, (Scene(f"c{n}", "gpt-4o-mini", "p", (10, 12)),)) for n in range(8)))
            await asyncio.sleep(1.2)
            for _ in range(4):
                event = await first_event(proxy)
                assert len(event["rows"]) == 8
                assert (event["snapshot"]["workers"], event["snapshot"]["answered"]) == (2, 2)
                assert event["snapshot"]["models"]["gpt-4o-mini"]["requests"] == 16


@pytest.mark.slow
async def test_texts_stay_in_the_process_unless_the_settings_show_them() -> None:
    """Neither the page nor the log has a word of a conversation."""
    async with Stub(ROOMY) as stub:
        for text in (False, True):
            config = configuration(stub.url, telemetry={"page": {"text": text}})
            async with Proxy(stub.url, config=config) as proxy:
                await play(proxy, (SCENE,))
                await asyncio.sleep(1.2)
                (row,) = (await first_event(proxy))["rows"]
                async with loopback_client(base_url=proxy.root) as client:
                    detail = (await client.get(f"/ullage/conversations/{row['name']}")).json()
                blocks = [entry["block"] for entry in detail["compactions"]]
                assert len(blocks) == row["compactions"] > 0
                assert any(blocks) is text
                assert ("src/" in json.dumps(detail)) is text
                assert "src/" not in proxy.log.read_text() or text
