"""The settings of memories."""

from proxy.features.memories.settings import Memories, is_named, memories_settings, summary_lines
from proxy.features.settings import AllSettings
from proxy.settings import Settings


def test_they_are_announced_where_they_are_given() -> None:
    """Off by default; the start-up summary names them if they are on."""
    assert memories_settings(Settings()) == memories_settings(AllSettings()) == Memories(enabled=False)
    assert summary_lines(AllSettings()) == []
    settings = AllSettings.model_validate({"memories": {"enabled": True}})
    assert memories_settings(settings).enabled
    assert [title for title, _ in summary_lines(settings)] == ["memories"]
    settings = AllSettings.model_validate({"memories": {"enabled": True, "tools": "heron, team-*"}})
    assert memories_settings(settings).tools == ("heron", "team-*")
    assert "team-*" in summary_lines(settings)[0][1]


def test_projects_are_named_by_globs() -> None:
    """Case counts; no project is matched by a star alone."""
    named = {project: is_named(project, ("heron", "team-*")) for project in ("heron", "Heron", "team-a", "team", "")}
    assert named == {"heron": True, "Heron": False, "team-a": True, "team": False, "": False}
    assert is_named("", ("*",))
