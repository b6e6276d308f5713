"""One managed request as the server hands it to the engine: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["on", "observe", "off"]

Purpose = Literal["answer", "count", "compact"]
"""What a request is for: the model's answer, a count of its tokens, or a smaller conversation."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller asked of Ullage in ``x-ullage-*`` request headers.

    ``window`` (tokens) may only lower the model's window; ``conversation`` is mixed into the first prefix hash;
    ``compact_to`` is the share of the room to compact to now, None for the usual one. ``project`` and ``task_size`` are
    labels.
    """

    mode: Mode = "on"
    conversation: str = ""
    window: int | None = None
    compact_now: bool = False
    compact_to: float | None = None
    project: str = ""
    task_size: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came in and with which end-to-end headers, the caller's credentials among them.

    Kept in memory only while the request, or a job it started, is under way; never logged, never stored.
    """

    path_qs: str
    headers: tuple[tuple[str, str], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Request:
    """One managed request.

    ``body`` is what is planned for: the client's bytes, or what a feature made of them; then ``prepared`` names the
    stages that did. ``tenant`` is a 32-byte digest of the caller's credential: everything derived from this request is
    scoped by it. ``origin`` is None if the caller's credentials must not be used: for a fallback on another upstream.

    ``path_model`` is the model that the path names; it wins over the body's. ``session`` is what the client's headers
    call the conversation and ``epoch`` how often it compacted it: for names and labels only. ``window_variant`` is what
    its headers ask for that changes a model's window, such as a beta flag. ``client_compaction`` is whose own
    compaction of its conversation the headers announce.

    ``asked_model`` is the model that was asked for, if this request is for the fallback ``fallback_model``.
    """

    api: str
    body: bytes = field(repr=False)
    tenant: bytes = field(repr=False)
    request_id: str
    options: Options = Options()
    path_model: str = ""
    session: str = ""
    epoch: int = 0
    window_variant: str = ""
    client_compaction: str = ""
    origin: Origin | None = None
    purpose: Purpose = "answer"
    prepared: tuple[str, ...] = ()
    asked_model: str = ""
    fallback_model: str = ""
