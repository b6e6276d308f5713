"""Real conversations as sequences of requests, each with a window that is small but not impossible."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.stub.tokens import fixed_tokens, message_tokens, request_tokens
from tests.support.shared_recordings import RECORDINGS

FOLDER = RECORDINGS["transcripts"]
MIN_WINDOW = 2048
Message = Mapping[str, Any]


@dataclass(frozen=True)
class RecordedConversation:
    """One recorded conversation; ``weights`` are its messages' tokens, ``fixed`` those of tools and system text."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    weights: tuple[int, ...]
    fixed: int
    size: int

    def places(self) -> list[int]:
        """Lengths of the prefixes that could have been requests: the model speaks next."""
        ends = []
        for index, message in enumerate(self.messages):
            after = self.messages[index + 1]["role"] if index + 1 < len(self.messages) else "assistant"
            if message["role"] != "assistant" and after == "assistant":
                ends.append(index + 1)
        return ends

    def floor(self) -> int:
        """The smallest window into which every place's request must be brought without an excuse."""
        return max(MIN_WINDOW, 1024 + max(map(self.must_fit, self.places())))

    def must_fit(self, end: int) -> int:
        """Tokens that even the smallest faithful view of the first *end* messages holds."""
        users = [w for m, w in zip(self.messages[:end], self.weights, strict=False) if m["role"] == "user"]
        spoken = sum({0: users[0], len(users) - 1: users[-1]}.values()) if users else 0
        return self.fixed + spoken + int(1.5 * max(self.rounds(end), default=0))

    def rounds(self, end: int) -> Iterator[int]:
        """Tokens of each round within the first *end* messages: what the model wrote and all results of its calls."""
        total = 0
        for message, weight in zip(self.messages[:end], self.weights, strict=False):
            if message["role"] in {"assistant", "tool", "function"}:
                total += weight
            else:
                yield total
                total = 0
        yield total

    def body(self, end: int, model: str) -> bytes:
        """The request body of the first *end* messages."""
        request: dict[str, Any] = {"model": model, "messages": self.messages[:end]}
        if self.tools:
            request["tools"] = self.tools
        return json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")


def read_all() -> list[RecordedConversation]:
    """Every recorded conversation, in a fixed order; empty if the recordings are not there."""
    lines = (line for file in sorted(FOLDER.glob("*.jsonl")) for line in file.read_bytes().split(b"\n"))
    return [_read(json.loads(line)) for line in lines if line]


def _read(row: Mapping[str, Any]) -> RecordedConversation:
    messages: Sequence[Message] = row["messages"]
    tools = row.get("tools") or ()
    weights = tuple(map(message_tokens, messages))
    systems = (w for m, w in zip(messages, weights, strict=True) if m["role"] in {"system", "developer"})
    size = request_tokens({"messages": messages, "tools": tools})
    fixed = fixed_tokens({"tools": tools}) + sum(systems)
    return RecordedConversation(str(row["id"]), tuple(messages), tuple(tools), weights, fixed, size)
