"""The section ``memories``."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Final

from pydantic import Field

from proxy.settings import Settings
from proxy.settings.field_types import Section, SplitText, section_of


class Memories(Section):
    """Memories of a project, which its conversations share."""

    enabled: bool = Field(default=False, description="Store them, and give them to new conversations, once.")
    tools: Annotated[tuple[str, ...], SplitText] = Field(
        default=(), description="Projects, names or globs, whose models may save and search them with tools."
    )
    extract: Annotated[tuple[str, ...], SplitText] = Field(
        default=(), description="Projects, names or globs, in which compactions make some of what the user said."
    )


class MemoriesSettings(Settings):
    """The settings with the section of memories."""

    memories: Memories = Memories.defaults()


SECTIONS: Final = (MemoriesSettings,)


def memories_settings(settings: Settings) -> Memories:
    """Return the section of memories; the defaults if *settings* have none."""
    return section_of(settings, "memories", Memories)


def is_named(project: str, patterns: Sequence[str]) -> bool:
    """True if one of *patterns* names *project*."""
    return any(fnmatchcase(project, pattern) for pattern in patterns)


def summary_lines(settings: Settings) -> list[tuple[str, str]]:
    """Return one line if memories are switched on, because they change requests."""
    memories = memories_settings(settings)
    if not memories.enabled:
        return []
    tools = ""
    if memories.tools:
        tools = f"; models save and search them in {', '.join(memories.tools)}"
    return [("memories", f"on: new conversations are given those of their x-ullage-project{tools}")]
