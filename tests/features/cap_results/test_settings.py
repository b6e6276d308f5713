"""The settings by which every result is capped."""

from proxy.features.cap_results.settings import AlwaysTruncate, ResultLimits, limits_of_results
from proxy.features.settings import AllSettings
from proxy.settings import Settings
from tests.support.settings_files import problems


def limits(**truncate):
    return limits_of_results(AllSettings.model_validate({"compression": {"stages": {"truncate": truncate}}}))


def test_results_are_capped_if_both_switches_are_on():
    """The stage must be on, and always so."""
    assert limits_of_results(Settings()) is None
    assert limits() is None
    assert limits(always=True, enabled=False) is None
    assert limits(always=True, max_lines=40, max_bytes=1_000) == ResultLimits(40, 1_000)


def test_a_result_keeps_its_head_and_its_tail(tmp_path):
    """A limit of one line could not keep both ends of a result."""
    assert "max_lines" in str(problems(tmp_path, "compression: {stages: {truncate: {max_lines: 1}}}"))
    assert AlwaysTruncate(max_lines=2).max_lines == 2
