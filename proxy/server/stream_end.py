"""What a stream of events says of its own end."""

from __future__ import annotations

import re
from typing import Final

# What each API sends last: https://platform.openai.com/docs/api-reference/chat-streaming (``[DONE]``, which some
# servers leave out behind the ``finish_reason``), https://docs.anthropic.com/en/docs/build-with-claude/streaming
# (``message_stop``), https://platform.openai.com/docs/api-reference/responses-streaming. Inside a JSON string quotes
# and line ends are escaped, so no text that a model writes looks like this.
_LAST: Final = rb"(?:message_stop|response\.(?:completed|incomplete|failed|cancelled)|error)"
_COLON: Final = rb"\s{0,8}:\s{0,8}"
_DONE: Final = re.compile(
    rb"[\r\n](?:data: ?\[DONE\]|event: ?" + _LAST + rb"[\r\n]"
    rb'|data: ?\{\s{0,8}"(?:type"' + _COLON + rb'"' + _LAST + rb'"|error"' + _COLON + rb"))"
    rb'|"finish_?[rR]eason"' + _COLON + rb'"'
)
_LONGEST: Final = 96
"""More bytes than any match has."""


class StreamEnd:
    """Watches a stream of events for what says that it is done. Feed it bytes in any chunking."""

    __slots__ = ("_tail", "done")

    def __init__(self) -> None:
        self.done = False
        self._tail = b"\n"  # the first line has none before it

    def feed(self, chunk: bytes) -> None:
        """Look at *chunk*."""
        if self.done:
            return
        data = self._tail + chunk
        self.done = _DONE.search(data) is not None
        self._tail = data[-_LONGEST:]
