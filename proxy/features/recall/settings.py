"""The setting ``compression.recall``."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from proxy.settings import Compression, Settings
from proxy.settings.field_types import Section, section_of


class Recall(Section):
    """A tool, offered and answered by Ullage, with which a model reads items that left its view."""

    enabled: bool = Field(default=False, description="Offer it where a view leaves something out; edits such answers.")
    results: int = Field(default=10, ge=1, le=30, description="Results of one call at most; a call may ask for 30.")
    max_tokens: int = Field(default=4_000, ge=100, le=32_000, description="Tokens one call's results take at most.")
    without_tools: bool = Field(
        default=True, description="Offer it to clients that send no tools; a model that refuses it is asked without."
    )
    sessions: bool = Field(
        default=False, description="Offer it in every request with tools, for earlier conversations of its project too."
    )


class CompressionWithRecall(Compression):
    """The section ``compression`` with the tool's settings."""

    recall: Recall = Recall.defaults()


SECTIONS: Final = (CompressionWithRecall,)


def recall_settings(settings: Settings) -> Recall:
    """Return the tool's settings; the defaults if *settings* have none."""
    return section_of(settings.compression, "recall", Recall)


def summary_lines(settings: Settings) -> list[tuple[str, str]]:
    """Return one line if the tool is offered: it edits answers."""
    recall = recall_settings(settings)
    if settings.compression.mode != "on" or not recall.enabled:
        return []
    if recall.sessions:
        return [("recall", "on: requests with tools get one more, which searches earlier conversations of a project")]
    return [("recall", "on: compacted requests get one more tool, and answers that use it are edited")]
