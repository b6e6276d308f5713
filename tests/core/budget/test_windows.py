"""Reading a published table safely."""

from __future__ import annotations

import functools

import pytest

from proxy.core.budget.windows import Facts, published, series
from proxy.settings import ModelFacts, model_table


@functools.cache
def raw() -> dict[str, ModelFacts]:
    return model_table()


@functools.cache
def table() -> dict[str, Facts]:
    return published({name: Facts(None, row.max_input_tokens, row.max_output_tokens) for name, row in raw().items()})


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        ("gpt-4o", Facts(128_000, None, 16_384)),
        ("gpt-4.1", Facts(1_047_576, None, 32_768)),
        ("o3", Facts(200_000, None, 100_000)),
        ("gpt-5", Facts(400_000, 272_000, 128_000)),
        ("gpt-5-mini", Facts(400_000, 272_000, 128_000)),
        ("azure/eu/gpt-5-2025-08-07", Facts(400_000, 272_000, 128_000)),
        ("gpt-5.1-codex", Facts(400_000, 272_000, 128_000)),
        ("gpt-5.4", Facts(1_050_000, 922_000, 128_000)),
        ("azure/gpt-5.4", Facts(1_050_000, 922_000, 128_000)),
        ("claude-sonnet-4-5", Facts(200_000, None, 64_000)),
        ("gemini-2.5-pro", Facts(1_048_576, None, 65_535)),
        ("novita/deepseek/deepseek-v3.1", Facts(131_072, None, 32_768)),
    ],
)
def test_the_installed_table(model: str, facts: Facts) -> None:
    """Known models come out with the figures their makers publish, or with smaller ones."""
    assert table()[model] == facts


def test_only_openai_rows_are_raised() -> None:
    """No window comes out larger than its row's input figure, except of OpenAI's series, by exactly the output."""
    raised = {
        name: facts for name, facts in table().items() if (facts.window or 0) > (raw()[name].max_input_tokens or 0)
    }
    assert raised
    assert {series(name) for name in raised} <= {"gpt-5", "gpt-6"}
    sums = {(facts.max_input, facts.max_output, facts.window) for facts in raised.values()}
    assert sums <= {
        (272_000, 128_000, 400_000),
        (922_000, 128_000, 1_050_000),
        (111_616, 16_384, 128_000),
    }, "a new pair: check it against what the maker says"
    for facts in table().values():
        assert facts.max_input is None or facts.window is None or facts.max_input < facts.window


def test_a_pair_needs_one_series() -> None:
    """Figures that differ by their output speak of one window only within one numbered series."""
    rows = {
        "gpt-5": Facts(None, 272, 128),
        "openai.gpt-5.1-codex": Facts(None, 400, 128),
        "gpt-6": Facts(None, 272, 128),
        "gpt-5o": Facts(None, 272, 128),
        "other": Facts(None, 400, 128),
        "gpt-5-nano": Facts(None, None, 128),
        "gpt-5-x": Facts(None, 272, None),
    }
    read = published(rows)
    assert read["gpt-5"] == Facts(400, 272, 128)
    assert read["openai.gpt-5.1-codex"] == Facts(400, 272, 128)
    assert read["gpt-6"] == read["gpt-5o"] == Facts(272, None, 128)
    assert read["other"] == Facts(400, None, 128)
    assert read["gpt-5-nano"] == Facts(None, None, 128)
    assert read["gpt-5-x"] == Facts(272, None, None)


@pytest.mark.parametrize(
    ("expected", "models"),
    [
        ("gpt-5", "gpt-5 azure/us/gpt-5.1-chat databricks-gpt-5 gpt-5-mini"),
        ("gpt-6", "us.openai.gpt-6-sol"),
        ("", "gpt-4o o3 gpt-oss-20b claude-3 gpt kimi-k2"),
    ],
)
def test_series(expected: str, models: str) -> None:
    """The series is told from the name, whatever a reseller put before it."""
    assert {series(model) for model in models.split()} == {expected}
