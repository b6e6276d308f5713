"""What ``ullage models`` lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from proxy.cli.listing import Row, listing
from proxy.settings import Settings
from tests.conftest import StartStub

TOLD = "server: /v1/models max_model_len"
GONE = {"name": "gone", "base_url": "http://127.0.0.1:1/v1"}


def settings(**given: Any) -> Settings:
    return Settings.model_validate({"upstreams": [GONE], **given})


async def test_without_a_pattern_what_is_configured_and_told(stub: StartStub) -> None:
    """Rules come first, in their order, then the models a server tells of: few lines, each with its origin."""
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
    found = await listing(given, None)
    family, configured = ("family", "default"), ("configured", "configured")
    assert [replace(row, age_seconds=None) for row in found.rows] == [
        Row("gpt-5", "gone", 400_000, 272_000, 128_000, "o200k_base", 1.0, "table", None, "table", *family),
        Row("claude*", "up", 100_000, None, None, "o200k_base", 1.0, "configured", None, "unknown", *configured),
        Row("*", "up", None, None, 50, "o200k_base", 1.0, "unknown", None, "configured", *family),
        Row("large", "up", 8192, None, 50, "o200k_base", 1.0, TOLD, None, "configured", *family),
        Row("small", "up", 4096, None, 50, "o200k_base", 1.0, TOLD, None, "configured", *family),
    ]
    ages = [row.age_seconds for row in found.rows]
    assert ages[:3] == [None, None, None]
    assert all(age is not None and 0 <= age < 60 for age in ages[3:]), "only what a server said has an age"
    assert set(found.troubles) == {"gone"}
    assert len((await listing(settings(), None)).rows) == 1, "never the whole table"


async def test_a_pattern_is_looked_up_in_the_table(stub: StartStub) -> None:
    """A glob lists what matches, of the table and of what servers tell; a plain name is shown even if unknown."""
    server = await stub(window=8192, tells=True)
    server.models = ["gpt-4o-local"]
    given = settings(upstreams=[{"name": "up", "base_url": server.url}])
    rows = {row.model: row for row in (await listing(given, "gpt-4o*")).rows}
    assert rows["gpt-4o"].context_window == 128_000
    assert (rows["gpt-4o-local"].context_window, rows["gpt-4o-local"].factor) == (8192, 1.0)
    assert all(name.startswith("gpt-4o") for name in rows)
    assert [row.model for row in (await listing(given, "nobody-knows")).rows] == ["nobody-knows"]
    assert (await listing(given, "nobody-knows*")).rows == ()


async def test_priors_are_shown() -> None:
    """The factor a model starts with is its family's."""
    rows = (await listing(Settings(), "claude-sonnet-4-5")).rows
    assert [(row.upstream, row.factor, row.window_from, row.factor_from) for row in rows] == [
        ("-", 1.5, "table", "family")
    ]


async def test_another_name_is_shown_with_what_it_is_sent_as() -> None:
    """An alias has its own row, under its own name, with the figures of the model behind it."""
    models = [{"name": "fast", "model": "gpt-5-mini"}, {"name": "gpt-5-mini"}]
    rows = (await listing(settings(models=models), None)).rows
    assert [(row.model, row.sent_as, row.context_window) for row in rows] == [
        ("fast", "gpt-5-mini", 400_000),
        ("gpt-5-mini", "", 400_000),
    ]
