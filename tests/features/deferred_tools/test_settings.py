"""The setting ``compression.deferred_tools``."""

from proxy.features.deferred_tools.settings import DeferredTools, deferred_tools_settings, summary_lines
from proxy.features.settings import AllSettings
from proxy.settings import Settings


def test_it_is_off_unless_a_file_switches_it_on() -> None:
    """The defaults hold where the section has no such key, too; what edits answers is named at the start."""
    assert deferred_tools_settings(Settings()) == deferred_tools_settings(AllSettings()) == DeferredTools(enabled=False)
    assert summary_lines(AllSettings()) == []
    settings = AllSettings.model_validate({"compression": {"deferred_tools": {"enabled": True, "share": 0.3}}})
    assert deferred_tools_settings(settings) == DeferredTools(enabled=True, share=0.3)
    assert [title for title, _ in summary_lines(settings)] == ["deferred tools"]
