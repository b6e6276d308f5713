"""Stages, shares and summaries: defaults and what is refused."""

import pytest

from proxy.settings import SettingsError, load
from tests.support.settings_files import write_settings


def test_shares_above_the_whole_are_refused_where_they_stand(tmp_path):
    """An allocation of more than the window names file, line, key, the sum, and what to lower."""
    file = write_settings(tmp_path, "compression:\n  allocation: {system: 0.5, tools: 0.3, recent: 0.4}\n")
    with pytest.raises(SettingsError) as refused:
        load(file, {}, {})
    (problem,) = refused.value.problems
    assert (problem.file, problem.line, problem.key) == (str(file), 2, "compression.allocation")
    assert problem.message == "the shares add up to 1.20 of the window"
    assert "system + tools + recent" in problem.remedy
    whole = load(write_settings(tmp_path, "compression:\n  allocation: {recent: 0.7, reserve: 0.3}\n"), {}, {})
    assert whole.compression.allocation.is_configured
    assert not load(None, {}, {}).compression.allocation.is_configured
