"""The rows of ``ullage models``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from proxy.cli.models import ModelRow, learned_windows, list_models, show_models, visible_tenants
from proxy.settings import Settings, load
from proxy.tokenizers import library
from tests.conftest import StartProxy, StartStub
from tests.support.proxy_process import Client
from tests.support.sample_conversations import chat_turn

STATED = "server: /v1/models max_model_len"
GONE = {"name": "gone", "base_url": "http://127.0.0.1:1/v1"}


def settings(**given: Any) -> Settings:
    return Settings.model_validate({"upstreams": [GONE], **given})


@pytest.mark.slow
async def test_without_a_pattern_configured_models_and_those_of_servers(stub: StartStub) -> None:
    """Rules come first, in their order, then the models that a server lists: few lines, each with its origin."""
    server = await stub(window=8192, windows={"small": 4096}, tells=True)
    server.models = ["small", "large"]
    given = settings(
        upstreams=[{"name": "up", "base_url": server.url}, GONE],
        models=[
            {"name": "gpt-5", "upstream": "gone"},
            {"name": "claude*", "context_window": 100_000, "tokenizer": "o200k_base"},
            {"name": "*", "upstream": "up", "max_output_tokens": 50},
        ],
    )
    listing = await list_models(given, None)
    family, configured = ("family", "default"), ("configured", "configured")
    assert {row.counted_by for row in listing.rows} == {library("o200k_base")}
    assert [replace(row, age_seconds=None, counted_by="tiktoken") for row in listing.rows] == [
        ModelRow("gpt-5", "gone", 400_000, 272_000, 128_000, "o200k_base", 1.0, "table", None, "table", *family),
        ModelRow("claude*", "up", 100_000, None, None, "o200k_base", 1.0, "configured", None, "unknown", *configured),
        ModelRow("*", "up", None, None, 50, "o200k_base", 1.0, "unknown", None, "configured", *family),
        ModelRow("large", "up", 8192, None, 50, "o200k_base", 1.0, STATED, None, "configured", *family),
        ModelRow("small", "up", 4096, None, 50, "o200k_base", 1.0, STATED, None, "configured", *family),
    ]
    ages = [row.age_seconds for row in listing.rows]
    assert ages[:3] == [None, None, None]
    assert all(age is not None and 0 <= age < 60 for age in ages[3:]), "only what a server stated has an age"
    assert set(listing.problems) == {"gone"}
    assert len((await list_models(settings(), None)).rows) == 1, "never the whole table"


async def test_a_pattern_is_looked_up_in_the_table(stub: StartStub) -> None:
    """A glob lists what matches, of the table and of servers' lists; a plain name is shown even if unknown."""
    server = await stub(window=8192, tells=True)
    server.models = ["gpt-4o-local"]
    given = settings(upstreams=[{"name": "up", "base_url": server.url}])
    rows = {row.model: row for row in (await list_models(given, "gpt-4o*")).rows}
    assert rows["gpt-4o"].context_window == 128_000
    assert (rows["gpt-4o-local"].context_window, rows["gpt-4o-local"].factor) == (8192, 1.0)
    assert all(name.startswith("gpt-4o") for name in rows)
    assert [row.model for row in (await list_models(given, "nobody-knows")).rows] == ["nobody-knows"]
    assert (await list_models(given, "nobody-knows*")).rows == ()


async def test_priors_are_shown() -> None:
    """The factor a model starts with is its family's."""
    rows = (await list_models(Settings(), "claude-sonnet-4-5")).rows
    assert [(row.upstream, row.factor, row.window_from, row.factor_from) for row in rows] == [
        ("-", 1.5, "table", "family")
    ]


async def test_another_name_is_shown_with_what_it_is_sent_as() -> None:
    """An alias has its own row, under its own name, with the figures of the model behind it."""
    models = [{"name": "fast", "model": "gpt-5-mini"}, {"name": "gpt-5-mini"}]
    rows = (await list_models(settings(models=models), None)).rows
    assert [(row.model, row.sent_as, row.context_window) for row in rows] == [
        ("fast", "gpt-5-mini", 400_000),
        ("gpt-5-mini", "", 400_000),
    ]


KEY = "sk-learned"
TRUE, UNHEARD = 8_192, "a-model-nobody-has-heard-of"
CHAT: Any = [message for turn in range(12) for message in chat_turn(turn, 450)] + chat_turn(99, 60)[:1]


def settings_of(url: str, path: Path, more: Mapping[tuple[str, ...], Any] | None = None) -> Settings:
    upstreams = [{"name": "stub", "base_url": url}]
    return load(None, {("upstreams",): upstreams, ("store", "path"): str(path), **(more or {})}, {})


@pytest.mark.slow
async def test_models_shows_what_an_overflow_taught(stub: StartStub, proxy: StartProxy) -> None:
    """The stated window is shown for the key whose traffic taught it, and for no other."""
    server = await stub(window=TRUE)
    front = await proxy(server.url, config={})
    async with Client(front.url, api_key=KEY) as client:
        await client.chat.completions.create(model=UNHEARD, messages=CHAT)
    assert front.home is not None
    configured = settings_of(server.url, front.home / "data")
    (row,) = (await list_models(configured, UNHEARD, KEY)).rows
    assert (row.context_window, row.window_from) == (TRUE, "learned: stated by an error")
    for other in ("", "sk-other"):
        (row,) = (await list_models(configured, UNHEARD, other)).rows
        assert (row.context_window, row.window_from) == (None, "unknown")


@pytest.mark.slow
async def test_what_a_beta_flag_taught_has_a_row_of_its_own(stub: StartStub, proxy: StartProxy) -> None:
    """A window learned from requests with a flag is shown beside the model's own, with the flag."""
    model, flag = "claude-unheard-of", "context-1m-2025-08-07"
    server = await stub(window=TRUE)
    front = await proxy(server.url, config={})
    async with Client(front.url, api_key=KEY) as client:
        flagged = {"anthropic-beta": flag}
        await client.chat.completions.create(model=model, messages=CHAT, extra_headers=flagged)
    assert front.home is not None
    rows = (await list_models(settings_of(server.url, front.home / "data"), model, KEY)).rows
    assert [(row.model, row.variant, row.context_window) for row in rows] == [(model, "", None), (model, flag, TRUE)]


@pytest.mark.parametrize("url", ["memory", "embedded"])
async def test_nothing_is_started_to_look(tmp_path: Path, url: str) -> None:
    """Without a running store nothing is known, and none is started or made."""
    configured = settings_of("http://127.0.0.1:9/v1", tmp_path / "none", {("store", "url"): url})
    assert await learned_windows(configured, []) == {}
    assert not (tmp_path / "none").exists()


def test_whose_lessons_are_shown() -> None:
    """With access keys theirs; without, those of the given key in either header, or of callers without one."""
    shared = load(None, {("server", "access_keys"): ["a" * 20, "b" * 20]}, {})
    assert len(set(visible_tenants(shared, "ignored"))) == 2
    alone = load(None, {}, {})
    assert len(set(visible_tenants(alone, "k") + visible_tenants(alone, ""))) == 3


ROW: dict[str, object] = {
    "model": "a-model-with-a-name-that-is-longer-than-any-terminal-is-wide-" * 3,
    "upstream": "[here]",
    "context_window": 128_000,
    "max_input_tokens": None,
    "max_output_tokens": 4_096,
    "encoding": "o200k_base",
    "factor": 1.05,
    "window_from": "table",
    "age_seconds": 2.5,
    "output_from": "table",
    "encoding_from": "family",
    "factor_from": "table",
}


def test_a_row_of_models_is_one_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Thousands are set apart, what is unknown is a dash, an age has its unit, and nothing is folded."""
    show_models([ROW], wide=True)
    title, line = capsys.readouterr().out.splitlines()
    assert title.split()[:2] == ["model", "upstream"]
    assert line.split() == [
        *(str(ROW["model"]), "[here]", "128,000", "-", "4,096", "o200k_base", "1.05", "table", "2.5", "s"),
        *("table", "family", "table"),
    ]


def test_without_sources_a_row_has_the_figures_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    """Window, answer, encoding, factor and the window's source are shown; the upstream only if there is one."""
    row = {**ROW, "model": "m"}
    show_models([row], wide=False)
    title, line = capsys.readouterr().out.splitlines()
    assert title.split() == ["model", "upstream", "window", "output", "encoding", "factor", "window", "from"]
    assert line.split() == ["m", "[here]", "128,000", "4,096", "o200k_base", "1.05", "table"]
    show_models([{**row, "upstream": "-"}], wide=False)
    assert "upstream" not in capsys.readouterr().out


def test_a_table_of_models_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a long name and a long source are folded, and every line has at most 80 columns."""
    long = {**ROW, "window_from": "server: /v1/models max_model_len", "upstream": "a-server-with-a-name"}
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    monkeypatch.setattr("proxy.cli.models.table_console", lambda: console)
    show_models([long], wide=False)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    width = lines[0].index("upstream")
    assert "".join(line[:width].strip() for line in lines[1:]) == long["model"]
    assert all(figure in lines[1] for figure in ("128,000", "4,096", "o200k_base", "1.05"))


@pytest.mark.parametrize("wide", [False, True])
def test_no_terminal_hides_the_name_of_a_model(monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    """In 40 columns fewer figures are shown, each of them whole; the lines of a wide table are left to the terminal."""
    row = {**ROW, "model": "gpt-5-mini", "upstream": "-"}
    console = Console(file=io.StringIO(), width=40, highlight=False, markup=False)
    monkeypatch.setattr("proxy.cli.models.table_console", lambda: console)
    show_models([row], wide=wide)
    title, line = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert line.split()[:2] == ["gpt-5-mini", "128,000"]
    assert (len(title) <= 40, "encoding from" in title) == (not wide, wide)


def test_other_names_and_flags_are_shown_with_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """An alias is shown with the name that is sent, a variant with the flag that makes it."""
    show_models(
        [{**ROW, "model": "fast", "sent_as": "own"}, {**ROW, "model": "m", "sent_as": "", "variant": "context-1m"}],
        wide=False,
    )
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("fast (own) ")
    assert second.startswith("m with context-1m ")
