"""The sections ``archive`` and ``budgets``."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from proxy.settings import Settings
from proxy.settings.field_types import MIB, Bytes, Section, Tokens, section_of


class Archive(Section):
    """Originals of items that compactions removed from views."""

    enabled: bool = Field(default=False, description="Keep them, sealed, for their own client to read.")
    days: Annotated[float, Field(gt=0, le=90, allow_inf_nan=False)] = Field(
        default=7.0, description="Days for which they are kept."
    )
    max_item: Bytes = Field(default=256 * 1024, le=8 * MIB - 1, description="Bytes of the largest item that is kept.")
    queue: Bytes = Field(default=16 * MIB, description="Bytes that wait for the store at most, in each worker.")


class Budgets(Section):
    """Tokens that conversations use, as providers report them. Nothing is refused for a budget."""

    enabled: bool = Field(default=False, description="Count them, and say when a budget is nearly used.")
    total: Tokens | None = Field(
        default=None, description="Tokens of a conversation whose header and model state none; none: any number."
    )


class HistorySettings(Settings):
    """The settings with the sections of the archive and of conversations' budgets."""

    archive: Archive = Archive.defaults()
    budgets: Budgets = Budgets.defaults()


SECTIONS: Final = (HistorySettings,)


def budget_settings(settings: Settings) -> Budgets:
    """Return the section of conversations' budgets; the defaults if *settings* have none."""
    return section_of(settings, "budgets", Budgets)


def archive_settings(settings: Settings) -> Archive:
    """Return the section of the archive; the defaults if *settings* have none."""
    return section_of(settings, "archive", Archive)


def summary_lines(settings: Settings) -> list[tuple[str, str]]:
    """Return one line if originals are archived: for how long."""
    archive = archive_settings(settings)
    if not archive.enabled:
        return []
    return [("archive", f"originals of what leaves a view, sealed, for {archive.days:g} days")]
