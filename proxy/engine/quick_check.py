"""The first look at a body: whether its bytes alone show that it fits, before anything is located or counted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from proxy.core.apis.json_scan import ESCAPED_LETTER
from proxy.core.apis.json_steps import UNREADABLE
from proxy.core.session_names import session_in

TOOLS_ALLOWANCE: Final = 512
"""Tokens that a provider's own rendering of tools may add to what their bytes bound."""

HEAD_BYTES: Final = 262_144
"""Bodies up to this size are first tried by their bytes alone; larger ones are soon known by their prefix anyway."""

MEDIA: Final = re.compile(rb'"(?:image|input_(?:image|audio|file)|file"|document"|audio|video|item_reference")')
"""What parts of an item hold whose bytes do not bound their tokens."""

HOSTED: Final = b'"mcp"'
"""A kind of tool whose description the provider fetches by itself."""

_LIST: Final = ord("[")


class _Named(msgspec.Struct):
    model: str = ""


_NAMED: Final = msgspec.json.Decoder(_Named)


def model_of(body: bytes) -> str:
    """The model that *body* names, read apart from all else; empty if it names none."""
    try:
        return _NAMED.decode(body).model
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ""


class Head(Protocol):
    """The members that decide where a request goes and whether it may need a closer look."""

    model: str
    stream: bool | None

    @property
    def requested(self) -> int | None:
        """The output figure the request states."""

    @property
    def session(self) -> str:
        """What the body calls the conversation; empty where it says nothing of it."""

    def bounded(self) -> bool:
        """Whether no token of the input is less than a byte of the body."""

    def has_tools(self) -> bool:
        """Whether tools come with it, whose rendering adds tokens of its own."""


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()


class _Chat(msgspec.Struct):
    """A body of ``/v1/chat/completions`` or ``/v1/messages``."""

    messages: list[_Message]
    model: str = ""
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: msgspec.Raw | UnsetType = UNSET
    functions: msgspec.Raw | UnsetType = UNSET
    audio: msgspec.Raw | UnsetType = UNSET
    prompt: msgspec.Raw | UnsetType = UNSET
    conversation: msgspec.Raw | UnsetType = UNSET
    previous_response_id: msgspec.Raw | UnsetType = UNSET
    mcp_servers: msgspec.Raw | UnsetType = UNSET
    prompt_cache_key: str | None = None
    metadata: Any = None

    @property
    def requested(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def session(self) -> str:
        return session_in({"metadata": self.metadata, "prompt_cache_key": self.prompt_cache_key})

    def has_tools(self) -> bool:
        return self.tools is not UNSET or self.functions is not UNSET

    def bounded(self) -> bool:
        elsewhere = (self.audio, self.prompt, self.conversation, self.previous_response_id, self.mcp_servers)
        if any(member is not UNSET for member in elsewhere):
            return False
        return all(_is_text(message.content) for message in self.messages)


class _Responses(msgspec.Struct):
    """A body of ``/v1/responses``."""

    input: msgspec.Raw | UnsetType = UNSET
    model: str = ""
    stream: bool | None = None
    max_output_tokens: int | None = None
    tools: msgspec.Raw | UnsetType = UNSET
    prompt: msgspec.Raw | UnsetType = UNSET
    conversation: msgspec.Raw | UnsetType = UNSET
    previous_response_id: msgspec.Raw | UnsetType = UNSET
    prompt_cache_key: str | None = None
    metadata: Any = None

    @property
    def requested(self) -> int | None:
        return self.max_output_tokens

    @property
    def session(self) -> str:
        return session_in({"metadata": self.metadata, "prompt_cache_key": self.prompt_cache_key})

    def has_tools(self) -> bool:
        return self.tools is not UNSET

    def bounded(self) -> bool:
        elsewhere = (self.prompt, self.conversation, self.previous_response_id)
        if any(member is not UNSET for member in elsewhere):
            return False
        if self.tools is not UNSET and HOSTED in bytes(self.tools):
            return False
        return self.input is UNSET or _is_text(self.input)


class _Reader:
    """Reads the heads of one API. *deciding* finds the members that must not occur twice."""

    def __init__(self, kind: type[_Chat] | type[_Responses], deciding: bytes) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._deciding = re.compile(deciding)

    def read(self, body: bytes) -> Head | None:
        try:
            head = self._decoder.decode(body)
        except UNREADABLE:
            return None
        # Where these words occur more often, the exact scanner tells where.
        sole = len(self._deciding.findall(body)) <= 2 and not ESCAPED_LETTER.search(body)
        return head if sole else None


_MESSAGES: Final = _Reader(_Chat, rb'"m(?:odel|essages)"')
_READERS: Final[Mapping[str, _Reader]] = MappingProxyType(
    {"chat": _MESSAGES, "messages": _MESSAGES, "responses": _Reader(_Responses, rb'"(?:model|input)"')}
)


def read_head(api: str, body: bytes) -> Head | None:
    """The head of *body*; ``None`` where it is large, or takes the exact scanner to say what it is."""
    return _READERS[api].read(body) if len(body) <= HEAD_BYTES else None


def bound(body: bytes, head: Head, low: int) -> int:
    """Tokens that bound the body's input, if that alone shows it is under the *low* mark; else zero.

    A token is at least one byte of text, and JSON is never shorter than the text it stands for.
    """
    tokens = len(body) + (TOOLS_ALLOWANCE if head.has_tools() else 0)
    return tokens if tokens <= low and head.bounded() else 0


def _is_text(content: msgspec.Raw) -> bool:
    view = memoryview(content)
    return not (view.nbytes and view[0] == _LIST and MEDIA.search(view))
