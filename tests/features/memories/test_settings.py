"""The settings of memories."""

from proxy.features.memories.settings import Memories, memories_settings, summary_lines
from proxy.features.settings import AllSettings
from proxy.settings import Settings


def test_they_are_announced_where_they_are_given() -> None:
    """Off by default; the start-up summary names them if they are on."""
    assert memories_settings(Settings()) == memories_settings(AllSettings()) == Memories(enabled=False)
    assert summary_lines(AllSettings()) == []
    settings = AllSettings.model_validate({"memories": {"enabled": True}})
    assert memories_settings(settings).enabled
    assert [title for title, _ in summary_lines(settings)] == ["memories"]
