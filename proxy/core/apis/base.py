"""The interface of an API's module: it reads items from bytes and edits these bytes.

``chat``, ``messages``, ``responses`` and ``gemini`` implement it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from proxy.core.conversation import Count, Item, ItemText

PER_REPLY = 3
"""Tokens that prime the answer, once a request, as in OpenAI's own example; other providers do not publish theirs.

https://github.com/openai/openai-cookbook/blob/main/examples/How_to_count_tokens_with_tiktoken.ipynb
"""


def no_item_list(body: bytes) -> None:
    """Return None: ``with_item_list`` of an API whose items are always a list."""
    del body


def no_marker(raw: bytes) -> bytes:
    """Return nothing: ``marker`` of an API without marks of a cached prefix."""
    del raw
    return b""


class ApiFormat(Protocol):
    """The functions and constants of one API.

    ``LIST`` is the member with the items. ``OUTPUT_FIGURES`` are the members that may state the output figure; a dot
    separates a member from the object around it. ``PER_TOOLS`` are the tokens that a provider adds to a request with
    tools. ``MARKER`` is the key that marks the end of a cached prefix, empty if the API has no such key.
    """

    API: str
    LIST: str
    OUTPUT_FIGURES: tuple[str, ...]
    PER_TOOLS: int
    MARKER: bytes

    def with_item_list(self, body: bytes) -> bytes | None:
        """Return *body* with its items as a list if it has another form that the API allows; else None."""

    def read_item(self, raw: bytes, count: Count, *, with_digest: bool = True) -> Item:
        """Return the item of one element's bytes; without its digest it takes two thirds of the time.

        Raises ``InvalidRequest`` if it is no object.
        """

    def read_items(self, raws: Iterable[bytes], count: Count, *, with_digest: bool = True) -> list[Item]:
        """Return the item of each of *raws*, as ``read_item`` does."""

    def read_item_text(self, raw: bytes) -> ItemText:
        """Return the texts of one element."""

    def read_item_texts(self, raws: Iterable[bytes]) -> list[ItemText]:
        """Return the texts of each of *raws*."""

    def with_text(
        self, raw: bytes, text: str, *, before: bool, media: Sequence[bytes] = (), marker: bytes = b""
    ) -> bytes:
        """Return the element with *text* added before or after its own content, which stays one unchanged run of bytes.

        The added part gets the cache mark *marker*, if one is given.
        """

    def user_message(self, text: str) -> bytes:
        """Return a new user element that holds *text*."""

    def media_parts(self, raw: bytes) -> list[bytes]:
        """Return the media parts of an element, each as its own bytes."""

    def with_results(self, raw: bytes, texts: Sequence[str], *, media: bool = False) -> bytes:
        """Return the element with *texts* in place of its tool results, one for each in the order of their ids.

        With *media* the images and files of a result stay behind its text.
        """

    def marker(self, raw: bytes) -> bytes:
        """Return the last cache mark of an element, as JSON; empty if it has none."""

    def clipped(
        self, raw: bytes, clip: Callable[[str, int], str], count: Count, tokens: int, present: int | None = None
    ) -> bytes:
        """Return the element cut to about *tokens*; *clip* shortens one text to a number of tokens.

        *present* are the tokens that the element takes, if it was counted before.
        """
