"""What every API's dialect offers: bytes to items, edits to bytes. A dialect is a module with these names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from proxy.core.conversation import Item, ItemText

Count = Callable[[str], int]


class ApiFormat(Protocol):
    """One API. ``LIST`` names the member that holds the items, ``OUTPUT_FIGURES`` those that state the output.

    ``PER_REPLY`` and ``PER_TOOLS`` are tokens a provider adds to every request, and to one with tools. ``MARKER`` is
    the key that marks the end of a cached prefix, empty where there are no such marks.
    """

    API: str
    LIST: str
    OUTPUT_FIGURES: tuple[str, ...]
    PER_REPLY: int
    PER_TOOLS: int
    MARKER: bytes

    def listed(self, body: bytes) -> bytes | None:
        """*body* with its items as a list, where the API has another way to say them; else ``None``."""

    def read_item(self, raw: bytes, count: Count) -> Item:
        """The item of one element's bytes. Raises ``InvalidRequest`` where it is none."""

    def read_entry(self, raw: bytes) -> ItemText:
        """What one element says."""

    def with_text(
        self, raw: bytes, text: str, *, before: bool, media: Sequence[bytes] = (), marker: bytes = b""
    ) -> bytes:
        """The element with *text* added before or after its own content, which stays one unchanged run of bytes.

        The added part bears the cache mark *marker*, if one is given.
        """

    def user_message(self, text: str) -> bytes:
        """A user element of our own."""

    def media_parts(self, raw: bytes) -> list[bytes]:
        """The media parts of an element, each as its own bytes."""

    def replaced(self, raw: bytes, texts: Sequence[str], *, media: bool = False) -> bytes:
        """The element with *texts* in place of what its tool results say, one for each in the order of their ids.

        With *media* the images and files of a result stay behind its text.
        """

    def marker(self, raw: bytes) -> bytes:
        """The last cache mark of an element, as JSON; empty where it bears none."""

    def clipped(self, raw: bytes, clip: Callable[[str, int], str], count: Count, tokens: int) -> bytes:
        """The element cut to about *tokens*."""
