"""The setting ``compression.deferred_tools``."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from proxy.settings import Compression, Settings
from proxy.settings.field_types import Section, section_of


class DeferredTools(Section):
    """A tool, offered and answered by Ullage, that finds tools for which the window has no room."""

    enabled: bool = Field(default=False, description="Defer tools if all of them leave no room; edits such answers.")
    share: float = Field(default=0.5, gt=0, le=0.9, description="Share of the window that tools may take before that.")
    max_tokens: int = Field(default=4_000, ge=200, le=32_000, description="Tokens of the tools found at once, at most.")


class CompressionWithDeferredTools(Compression):
    """The section ``compression`` with the settings of deferred tools."""

    deferred_tools: DeferredTools = DeferredTools.defaults()


SECTIONS: Final = (CompressionWithDeferredTools,)


def deferred_tools_settings(settings: Settings) -> DeferredTools:
    """Return the settings of deferred tools; the defaults if *settings* have none."""
    return section_of(settings.compression, "deferred_tools", DeferredTools)


def summary_lines(settings: Settings) -> list[tuple[str, str]]:
    """Return one line if tools are deferred: answers that look for one are edited."""
    if settings.compression.mode != "on" or not deferred_tools_settings(settings).enabled:
        return []
    return [("deferred tools", "on: tools without room stand behind a search, and answers that use it are edited")]
