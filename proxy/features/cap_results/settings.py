"""The settings ``compression.stages.truncate.always`` and ``max_lines`` beside it."""

from __future__ import annotations

from typing import Final, NamedTuple

from pydantic import Field

from proxy.settings import Settings
from proxy.settings.compression import TruncateStage


class AlwaysTruncate(TruncateStage):
    """The stage ``truncate`` with the settings that cap results before they are first sent."""

    always: bool = Field(default=False, description="Cap every result before it is first sent, whatever the room.")
    max_lines: int = Field(default=2_000, gt=1, description="With always: lines a result keeps at most.")


SECTIONS: Final = (AlwaysTruncate,)


class ResultLimits(NamedTuple):
    """The most lines and bytes that every result keeps."""

    lines: int
    size: int


def limits_of_results(settings: Settings) -> ResultLimits | None:
    """Return the limits that every result is capped to; None if results are cut in compactions only."""
    stage = settings.compression.stages.truncate
    if isinstance(stage, AlwaysTruncate) and stage.enabled and stage.always:
        return ResultLimits(stage.max_lines, stage.max_bytes)
    return None
