"""The section ``memories``."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from proxy.settings import Settings
from proxy.settings.field_types import Section


class Memories(Section):
    """What a project's conversations should know of each other."""

    enabled: bool = Field(default=False, description="Store them, and give them to new conversations, once.")


class MemoriesSettings(Settings):
    """The settings with the section of memories."""

    memories: Memories = Memories()


SECTIONS: Final = (MemoriesSettings,)


def memories_settings(settings: Settings) -> Memories:
    """Return the section of memories; the defaults if *settings* have none."""
    if isinstance(settings, MemoriesSettings):
        return settings.memories
    return Memories()


def summary_lines(settings: Settings) -> list[tuple[str, str]]:
    """Return one line if memories are given: they change what is sent."""
    if not memories_settings(settings).enabled:
        return []
    return [("memories", "on: new conversations are given those of their x-ullage-project")]
