"""What the stub remembers of every request, and the provider's prompt cache it plays."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.stub import chat


class _Listed(msgspec.Struct):
    messages: list[msgspec.Raw] = []
    input: list[msgspec.Raw] = []
    contents: list[msgspec.Raw] = []


def slices(body: bytes) -> list[bytes]:
    """The raw bytes of each message or input item in *body*, as they stand there."""
    listed = msgspec.json.decode(body, type=_Listed)
    return [bytes(raw) for raw in listed.messages or listed.input or listed.contents]


@dataclass
class Seen:
    """One request as it reached the stub.

    ``verdict`` is ``ok``, ``invalid``, ``overflow``, ``fault`` or ``relay``; ``why`` words it. Token figures are the
    stub's own count. Times are monotonic seconds; ``aborted_at`` is when the client left before the answer's end.
    """

    number: int
    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    body: bytes
    at: float
    verdict: str = ""
    why: str = ""
    tokens: int = 0
    max_tokens: int = 0
    window: int = 0
    cached: int = 0
    stream: bool = False
    answered_at: float | None = None
    aborted_at: float | None = None
    parsed: dict[str, Any] = field(default_factory=dict, repr=False)

    def header(self, name: str) -> str:
        """The first header called *name*, or an empty string."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")

    @property
    def model(self) -> str:
        """The model the request names."""
        return str(self.parsed.get("model", ""))

    @property
    def tools(self) -> list[str]:
        """The names of the tools that the request declares."""
        declared = self.parsed.get("tools") or []
        declared = [each for tool in declared for each in tool.get("functionDeclarations", [tool])]
        return [str((tool.get("function") or tool).get("name")) for tool in declared]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The parsed messages or input items."""
        return list(self.parsed.get("messages") or self.parsed.get("input") or self.parsed.get("contents") or [])

    @property
    def slices(self) -> list[bytes]:
        """The raw bytes of each message."""
        return slices(self.body)


class PromptCache:
    """Plays a provider's prompt cache: the longest run of first messages that came before is read, not computed."""

    def __init__(self, entries: int = 200_000) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._entries = entries

    def read(self, body: Mapping[str, Any], api_format: Any = chat) -> int:
        """Tokens of the longest prefix of *body* that an earlier request had; remembers this one."""
        link, total, cached, warm = _link(b"", api_format.head(body)), api_format.fixed(body), 0, True
        for message in api_format.items(body):
            link = _link(link, message)
            total += api_format.weigh(message)
            warm = warm and link in self._known
            cached = total if warm else cached
            self._known[link] = None
            self._known.move_to_end(link)
        while len(self._known) > self._entries:
            self._known.popitem(last=False)
        return cached


def _link(before: bytes, value: object) -> bytes:
    return hashlib.sha256(before + json.dumps(value).encode()).digest()[:16]
