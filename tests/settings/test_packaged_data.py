"""Data that comes with packages."""

import importlib.util
import os
import subprocess
import sys

import pytest

from proxy.settings import model_table, overflow_rules, packaged, packaged_overflow_rules, prices, version
from proxy.settings.upstreams import OverflowRule
from tests.support.settings_files import EXAMPLE


def test_packaged_data_is_found():
    """The example is read as package data, or from the checkout; a name that is neither is an error."""
    assert packaged("ullage.yaml").read_text("utf-8") == EXAMPLE.read_text("utf-8")
    with pytest.raises(FileNotFoundError):
        packaged("nothing.yaml")
    assert version()


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="needs litellm's table")
@pytest.mark.slow
def test_the_model_table_is_read_without_importing_litellm():
    """Windows of known models come from the table, the explaining first entry does not, and litellm stays out."""
    table = model_table()
    assert table["gpt-4o"].max_input == 128_000
    assert "sample_spec" not in table
    script = "import sys; from proxy.settings import model_table; model_table(); print('litellm' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="needs litellm's table")
def test_the_smaller_of_two_window_figures_is_taken():
    """Of rows that state the window twice, unequally, the smaller figure is believed."""
    table = model_table()
    assert table["wandb/zai-org/GLM-5.2"].max_input == 262_144
    assert table["wandb/google/gemma-4-31B-it"].max_input == 262_000


def test_the_configured_rules_come_before_the_packaged_ones():
    """A configured phrase is known beside all packaged ones."""
    packaged_rules = overflow_rules(())
    own = overflow_rules((OverflowRule(phrase="over {limit} beans"), OverflowRule(code="E-77")))
    assert own.phrases[0].source == "configured"
    assert len(own.phrases) == len(packaged_rules.phrases) + 1
    assert own.codes.items() > packaged_rules.codes.items()
    assert packaged_overflow_rules()["rules"]


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="needs litellm's table")
def test_prices_and_their_tiers_are_read_as_data():
    """A model's prices come from the table, with or without a provider's prefix; dearer ones hold above their tier."""
    found = prices(["gemini-2.5-pro", "x/gpt-4o-mini", "unknown-model"])
    assert set(found) == {"gemini-2.5-pro", "x/gpt-4o-mini"}
    price = found["gemini-2.5-pro"]
    assert price.tier == model_table()["gemini-2.5-pro"].price_tier == 200_000
    assert price.cost(200_000, 0) == pytest.approx(0.25)
    assert price.cost(200_001, 0) == pytest.approx(0.5000025)
    assert price.cost(1_000, 1_000) < price.cost(1_000, 0) / 2
    assert model_table()["gpt-4o"].price_tier is None
