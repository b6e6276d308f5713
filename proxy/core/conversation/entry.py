"""What an item says, read from its bytes when an event has to write about it: the same for every API."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.conversation.items import Role


@dataclass(frozen=True, slots=True)
class Entry:
    """The words of one item: its text, its tool calls as (name, arguments) and the kinds of its media parts.

    ``results`` are the texts of its tool results that a text may replace, each with whether the API itself says that it
    failed. ``reasoning`` is what the model thought before it spoke, where that is
    readable; ``said`` what the user wrote beside the tool results of the same item (``text`` holds it too).
    """

    role: Role
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    media: tuple[str, ...] = ()
    reasoning: str = ""
    said: str = ""
    results: tuple[tuple[str, bool], ...] = ()
