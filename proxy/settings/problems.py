"""Problems of a configuration: where each is, what is wrong, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

Path = tuple[str | int, ...]


class Problem(msgspec.Struct, frozen=True):
    """One problem: its file, line (from 1) and key, what is wrong, and the remedy."""

    file: str
    line: int | None
    key: str
    message: str
    remedy: str

    def __str__(self) -> str:
        location = self.file
        if self.line is not None:
            location += f":{self.line}"
        message = self.message
        if self.key:
            message = f"{self.key}: {message}"
        text = f"{location}: {message}"
        if self.remedy:
            text += f"\n    {self.remedy}"
        return text


class SettingsError(Exception):
    """The configuration cannot be used; ``problems`` holds every problem in file order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))


def key_name(path: Path) -> str:
    """Return *path* as it is written: ``upstreams[0].base_url``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}"
    return text.removeprefix(".")
