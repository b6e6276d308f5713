"""What a running proxy's traffic taught, as operators see it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from proxy.commands.learned import learned, tenants
from proxy.commands.listing import listing
from proxy.settings import Settings, load
from tests.conftest import StartProxy, StartStub
from tests.e2e.test_recovery import CHAT, TRUE, UNHEARD
from tests.support.proxy_process import Client

KEY = "sk-learned"


def settings(url: str, path: Path, more: Mapping[tuple[str, ...], Any] | None = None) -> Settings:
    upstreams = [{"name": "stub", "base_url": url}]
    return load(None, {("upstreams",): upstreams, ("store", "path"): str(path), **(more or {})}, {})


async def test_models_shows_what_an_overflow_taught(stub: StartStub, proxy: StartProxy) -> None:
    """The stated window is shown to who holds the key whose traffic taught it, and to nobody else."""
    server = await stub(window=TRUE)
    front = await proxy(server.url, config={})
    async with Client(front.url, api_key=KEY) as client:
        await client.chat.completions.create(model=UNHEARD, messages=CHAT)
    assert front.home is not None
    asked = settings(server.url, front.home / "data")
    (row,) = (await listing(asked, UNHEARD, KEY)).rows
    assert (row.context_window, row.window_from) == (TRUE, "learned: stated by an error")
    for other in ("", "sk-other"):
        (row,) = (await listing(asked, UNHEARD, other)).rows
        assert (row.context_window, row.window_from) == (None, "unknown")


async def test_what_a_beta_flag_taught_has_a_row_of_its_own(stub: StartStub, proxy: StartProxy) -> None:
    """A window learned from requests with a flag is shown beside the model's own, with the flag."""
    model, flag = "claude-unheard-of", "context-1m-2025-08-07"
    server = await stub(window=TRUE)
    front = await proxy(server.url, config={})
    async with Client(front.url, api_key=KEY) as client:
        flagged = {"anthropic-beta": flag}
        await client.chat.completions.create(model=model, messages=CHAT, extra_headers=flagged)
    assert front.home is not None
    rows = (await listing(settings(server.url, front.home / "data"), model, KEY)).rows
    assert [(row.model, row.variant, row.context_window) for row in rows] == [(model, "", None), (model, flag, TRUE)]


@pytest.mark.parametrize("url", ["memory", "embedded"])
async def test_nothing_is_started_to_look(tmp_path: Path, url: str) -> None:
    """Without a running store nothing is known, and none is started or made."""
    asked = settings("http://127.0.0.1:9/v1", tmp_path / "none", {("store", "url"): url})
    assert await learned(asked, []) == {}
    assert not (tmp_path / "none").exists()


def test_whose_lessons_are_shown() -> None:
    """With access keys theirs; without, those of the given key in either header, or of callers without one."""
    shared = load(None, {("server", "access_keys"): ["a" * 20, "b" * 20]}, {})
    assert len(set(tenants(shared, "ignored"))) == 2
    alone = load(None, {}, {})
    assert len(set(tenants(alone, "k") + tenants(alone, ""))) == 3
