"""One managed request as the server passes it to the engine; and the session and client that its headers name."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, cast, get_args

import msgspec

from proxy.core.errors import InvalidRequest

Mode = Literal["on", "observe", "off"]

TaskSize = Literal["tiny", "small", "medium", "large"]
TASK_SIZES: Final[tuple[TaskSize, ...]] = get_args(TaskSize)

Purpose = Literal["answer", "count", "compact", "compress"]
"""The purpose of a request: the model's answer, a count of its tokens, a smaller conversation, or the view itself."""

ALL_ITEMS: Final = "\0items"
"""Ends the label of a conversation whose views have as many items as the client sent (``Options.keep_items``).

Compactions of such views get names of their own: they must not be used when the same conversation is sent. No header
can hold a NUL, so no client can send it: https://www.rfc-editor.org/rfc/rfc9110#section-5.5
"""


class Options(msgspec.Struct, frozen=True):
    """The options that a caller set in ``x-ullage-*`` request headers.

    ``window`` (tokens) may only lower the model's window. ``conversation`` is mixed into the first prefix hash.
    ``compact_to`` is the share of the room to compact to now, None for the low mark. ``project`` and ``task_size`` are
    labels; the configuration may limit the history by task size. ``conversation_budget`` is the number of tokens that
    the conversation may use in all, 0 for the configured one. ``keep_items``: a view has as many items as the client
    sent.
    """

    mode: Mode = "on"
    conversation: str = ""
    window: int | None = None
    compact_now: bool = False
    compact_to: float | None = None
    project: str = ""
    task_size: str = ""
    conversation_budget: int = 0
    keep_items: bool = False


_LABEL: Final = 256
"""Characters of the longest label: labels are part of log lines and metrics."""

NO_OPTIONS: Final = Options()
_SHARE: Final = re.compile(r"0?\.\d{1,4}", re.ASCII)
"""A share in ``x-ullage-compact``."""


def options_in(own: Mapping[str, str]) -> Options:
    """Return the options in the caller's *own* headers. Raises ``InvalidRequest`` naming the header and its values."""
    return Options(
        mode=cast("Mode", _one_of(own, "mode", ("on", "observe", "off"), "on")),
        conversation=_label(own, "conversation"),
        window=_tokens(own, "window"),
        compact_now="compact" in own,
        compact_to=_share(own),
        project=_label(own, "project"),
        task_size=_one_of(own, "task-size", TASK_SIZES, ""),
        conversation_budget=_tokens(own, "conversation-budget") or 0,
    )


def _one_of(own: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = own.get(name)
    if value is None:
        return default
    if value not in allowed:
        raise InvalidRequest(f"The header x-ullage-{name} must be one of: {', '.join(allowed)}.")
    return value


def _label(own: Mapping[str, str], name: str) -> str:
    value = own.get(name, "")
    if len(value) > _LABEL or not value.isprintable():
        raise InvalidRequest(f"The header x-ullage-{name} must be at most {_LABEL} printable characters.")
    return value


def _share(own: Mapping[str, str]) -> float | None:
    """Return the share of the room to compact down to, or None if the header names none."""
    value = own.get("compact", "now")
    if value == "now":
        return None
    if not _SHARE.fullmatch(value) or float(value) == 0:
        raise InvalidRequest("The header x-ullage-compact must be now, or a share between 0 and 1, such as 0.2.")
    return float(value)


def _tokens(own: Mapping[str, str], name: str) -> int | None:
    value = own.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value) > 0):
        raise InvalidRequest(f"The header x-ullage-{name} must be a whole number of tokens between 1 and 999999999.")
    return int(value)


class Origin(msgspec.Struct, frozen=True):
    """The path and the end-to-end headers of a request, with the caller's credentials among them.

    It is in memory only as long as the request, a job that it started, or the client's connection. It is never logged
    and never stored.
    """

    path_qs: str
    headers: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        """Leave out the headers."""
        return f"Origin({self.path_qs!r})"


class Request(msgspec.Struct, frozen=True):
    """One managed request.

    ``body`` is what is planned for: the client's bytes, or the bytes that a feature made of them. In that case
    ``prepared`` names the feature's stages, and ``tokens_removed`` estimates by how many tokens (our count) they made
    it smaller. ``tenant`` is a 32-byte digest of the caller's credential: everything derived from this request is
    scoped by it. ``origin`` is None if the caller's credentials must not be used: for a fallback on another upstream.

    ``path_model`` is the model that the path names; it wins over the body's. ``session`` is the name that the client's
    headers give the conversation, ``epoch`` how often the client has compacted it: for names and labels only.
    ``window_variant`` names an option in the headers that changes a model's window, such as a beta flag.
    ``client_compaction`` is the client whose own compaction the headers announce, ``agent`` the client that they name.

    ``server_tools`` are Ullage's own tools that a feature declared in ``body``: each one's name, and the texts from
    which it is answered. ``requested_model`` is the client's model if this request is for ``fallback_model``.
    """

    # A Struct and no dataclass: each request makes several copies, and msgspec builds them in C.

    api: str
    body: bytes
    tenant: bytes
    request_id: str
    options: Options = Options()
    path_model: str = ""
    session: str = ""
    epoch: int = 0
    window_variant: str = ""
    client_compaction: str = ""
    agent: str = ""
    origin: Origin | None = None
    purpose: Purpose = "answer"
    prepared: tuple[str, ...] = ()
    tokens_removed: int = 0
    requested_model: str = ""
    fallback_model: str = ""
    server_tools: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __repr__(self) -> str:
        """Leave out everything that a client wrote, and its tenant."""
        return f"Request({self.api!r}, {self.request_id!r})"


CLAUDE_CODE_SESSION: Final = "x-claude-code-session-id"
"""Claude Code's session. Its probes have an invented user agent, so this header also identifies the client:
https://github.com/obot-platform/obot/pull/7205
"""

SESSION_HEADERS: Final = (
    CLAUDE_CODE_SESSION,
    "thread-id",
    "session-id",
    "x-session-id",
    "x-session-affinity",
)
"""Headers in which agents name their session, the most trusted first: Claude Code, Codex, opencode."""

EPOCH_HEADER: Final = "x-codex-window-id"
"""Codex: a session and, behind a colon, how often the client has compacted it (tests/recorded has examples)."""

_LONGEST_NAME: Final = 256
"""Characters of a session's name that are read; the rest could be of any length."""

_SESSION: Final = re.compile(r"session[_-]([0-9A-Za-z-]{8,})")
"""A session at the end of Claude Code's ``user_id``."""

AGENT_HEADER: Final = "user-agent"

AGENTS: Final[Mapping[str, str]] = {
    "claude-cli": "claude-code",
    "claude-code": "claude-code",
    "qwencode": "qwen-code",
    "geminicli": "gemini-cli",
    "geminicli-tui": "gemini-cli",
    "openai": "openai",
    "asyncopenai": "openai",
    "anthropic": "anthropic",
    "asyncanthropic": "anthropic",
}
"""Names of clients by the product that their user agent begins with, in lower case; tests/recorded has examples.

A product that is not listed is the client's name itself.
"""

CODEX: Final = ("codex_", "codex-")
"""Beginnings of Codex's product, which names the program that it runs in, such as ``codex_exec`` or ``codex-tui``:
https://github.com/openai/codex/blob/main/codex-rs/core/src/default_client.rs
"""

_PRODUCT: Final = re.compile(r"[\w.-]{1,32}(?=/|\s|$)", re.ASCII)
"""The first product of a user agent: https://www.rfc-editor.org/rfc/rfc9110#section-10.1.5"""


def session_in_headers(headers: Mapping[str, str]) -> str:
    """Return the session in request *headers* (names in lower case); empty if there is none."""
    for name in SESSION_HEADERS:
        if headers.get(name):
            return headers[name][:_LONGEST_NAME]
    return headers.get(EPOCH_HEADER, "").rpartition(":")[0][:_LONGEST_NAME]


def epoch_in_headers(headers: Mapping[str, str]) -> int:
    """Return how often the client has compacted its own history, by its headers; 0 if they do not state it."""
    number = headers.get(EPOCH_HEADER, "").rpartition(":")[2]
    if number.isascii() and number.isdigit() and len(number) < 9:
        return int(number)
    return 0


def agent_in_headers(headers: Mapping[str, str]) -> str:
    """Return the client that request *headers* (names in lower case) name; empty if they name none."""
    if headers.get(CLAUDE_CODE_SESSION):
        return "claude-code"
    product = _PRODUCT.match(headers.get(AGENT_HEADER, ""))
    if product is None:
        return ""
    name = product[0].lower()
    if name.startswith(CODEX):
        return "codex"
    return AGENTS.get(name, name)


def session_in_body(members: Mapping[str, Any]) -> str:
    """Return the session in decoded *members* of a body; empty if there is none."""
    conversation, metadata = members.get("conversation"), members.get("metadata")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    if not isinstance(metadata, dict):
        metadata = {}
    user = metadata.get("user_id")
    if isinstance(user, str):
        user = _session_in_user_id(user)
    for name in (conversation, user, metadata.get("session_id"), members.get("prompt_cache_key")):
        if isinstance(name, str) and name:
            return name[:_LONGEST_NAME]
    return ""


def _session_in_user_id(text: str) -> str:
    """Return the session in Claude Code's ``user_id``: a JSON object, or in older versions a name that ends in it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        match = _SESSION.search(text)
        if match is None:
            return ""
        return match[1]
    if isinstance(value, dict) and isinstance(value.get("session_id"), str):
        return str(value["session_id"])
    return ""


def public_session_name(tenant: bytes, session: str) -> str:
    """Return the public name of a tenant's session: a digest that reveals neither. No view depends on it."""
    digest = hashlib.sha256(b"ullage session\0" + tenant + session.encode("utf-8", "surrogatepass")).digest()
    return base64.urlsafe_b64encode(digest[:12]).decode()
