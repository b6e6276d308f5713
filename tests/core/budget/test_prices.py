"""What images cost by family: the providers' own published examples, and what must hold for any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.budget.prices import FAMILIES, USUAL, Meter, Prices, Size, prices, prices_of

MODELS = (
    "gpt-4o", "gpt-4.1", "gpt-4o-mini", "gpt-4.1-mini", "gpt-4.1-nano", "gpt-5", "gpt-5-mini", "gpt-5-nano", "gpt-5.2",
    "gpt-5.4", "gpt-6", "o1", "o3", "o4-mini", "computer-use-preview", "claude-3-5-sonnet", "claude-opus-4-7",
    "claude-sonnet-5", "gemini-2.5-pro", "gemini-3-pro", "qwen2.5-vl-7b", "llama3.2-vision",
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "size", "detail", "tokens"),
    [
        ("gpt-4o", (1024, 1024), "high", 765),
        ("gpt-4o", (2048, 4096), "high", 1105),
        ("gpt-4o", (4096, 8192), "low", 85),
        ("gpt-4.1", (1024, 1024), "auto", 765),
        ("gpt-4o-mini", (1024, 1024), "high", 2833 + 4 * 5667),
        ("gpt-4o-mini", (1024, 1024), "low", 2833),
        ("o1", (1024, 1024), "high", 75 + 4 * 150),
        ("o3-2025-04-16", (1024, 1024), "high", 75 + 4 * 150),
        ("gpt-5", (1024, 1024), "high", 70 + 4 * 140),
        ("gpt-5-chat-latest", (1024, 1024), "low", 70),
        ("computer-use-preview", (1024, 1024), "high", 65 + 4 * 129),
        ("gpt-4.1-mini", (1024, 1024), "high", 1659),
        ("gpt-4.1-mini", (2400, 1800), "high", 2353),
        ("gpt-4.1-nano", (1024, 1024), "high", 2520),
        ("o4-mini", (1024, 1024), "high", 1762),
        ("gpt-5-mini", (1800, 2400), "low", 2353),
        ("gpt-5-nano", (1800, 2400), "auto", 3572),
        ("gpt-5.4", (1600, 1600), "high", 3000),
        ("gpt-5.4", (3200, 3200), "original", 12_000),
        ("claude-3-5-sonnet-20241022", (1000, 1000), "auto", 1334),
        ("claude-3-5-sonnet-20241022", (1092, 1092), "auto", 1590),
        ("claude-sonnet-4-5-20250929", (4000, 4000), "auto", 1600),
        ("anthropic/claude-opus-4-7", (4000, 4000), "auto", 4784),
        ("gemini-2.5-pro", (384, 384), "auto", 258),
        ("gemini-2.5-pro", (960, 540), "auto", 6 * 258),
        ("models/gemini-3-pro-preview", (960, 540), "auto", 1120),
        ("ft:gpt-4o-mini-2024-07-18:us::x", (512, 512), "high", 2833 + 5667),
        ("GPT-4o", (512, 512), "high", 255),
    ],
)
def test_published_examples(model: str, size: Size, detail: str, tokens: int) -> None:
    """Each family's images cost what its provider's examples and figures say."""
    assert prices(model).picture.tokens(size, detail) == tokens


@pytest.mark.parametrize("model", MODELS)
@given(
    width=st.integers(0, 20_000),
    height=st.integers(0, 20_000),
    detail=st.sampled_from(["low", "high", "auto", "original", "?"]),
)
def test_any_size_has_a_price(model: str, width: int, height: int, detail: str) -> None:
    """Every size costs something, and no more than the provider lets one image cost."""
    assert 0 < prices(model).picture.tokens((width, height), detail) <= 50_000
    assert prices(model).picture.tokens(None, detail) > 0


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-4o-mini", "gpt-4.1-mini", "gpt-5.4", "o1", "claude-3-opus"])
@given(width=st.integers(1, 20_000), height=st.integers(1, 20_000))
def test_an_unseen_image_is_the_dearest(model: str, width: int, height: int) -> None:
    """Where the size is unknown, no size would cost more."""
    picture = prices(model).picture
    assert picture.tokens((width, height), "high") <= picture.tokens(None, "high")


def test_models_nobody_publishes_cost_the_usual() -> None:
    """A name that no family matches, or none at all, has the usual prices."""
    for model in ("", "house-model", "gpt-4", "gpt-4-turbo", "mistral-large"):
        assert prices(model) is USUAL


def test_one_name_means_one_price() -> None:
    """Counts are remembered under the name of their prices: two families that share it share everything."""
    by_name: dict[str, Prices] = {USUAL.name: USUAL}
    for _, found in FAMILIES:
        assert by_name.setdefault(found.name, found) == found


def test_a_meter_counts_and_knows_its_prices() -> None:
    """A meter is used like the function it holds; a plain function means the usual prices."""
    meter = Meter(len, prices("claude-3-haiku"))
    assert meter("four") == 4
    assert prices_of(meter) is prices("claude-3-haiku")
    assert prices_of(len) is USUAL
