"""The engine's border: protocols for what it needs of the rooms around it, and the plain values that cross.

Tests put fakes behind these protocols: a scripted upstream, records in a dict. Elsewhere a class with one
implementation needs no protocol.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import msgspec

from proxy.core.conversation import ItemText
from proxy.core.errors import UllageError
from proxy.core.models import Route
from proxy.core.overflow.stream import LateOverflowDetector
from proxy.core.report import Report, Usage
from proxy.core.request import Request

Sink = Callable[[bytes], bool]
"""Takes a chunk; returns True if no more can be taken for now."""

Pour = Callable[[Sink], Awaitable[None]]
"""Passes each chunk to a sink as it arrives, in the callback that received it: no task is woken for a chunk.

It returns when the sink has returned True, and at the end of the body or an error, which ``next_chunk`` then reports.
Raises what the sink raises.
"""

Clock = Callable[[], float]
"""Returns monotonic seconds since an arbitrary point; never less than before."""


class Reply(Protocol):
    """An upstream's answer whose head has arrived; its body is read once, in order."""

    @property
    def status(self) -> int:
        """The HTTP status."""

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """The end-to-end response headers as they came, repeated ones included."""

    @property
    def close_delimited(self) -> bool:
        """True if only the end of the connection says where the body ends (RFC 9112, section 6.3)."""

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""

    @property
    def pour(self) -> Pour | None:
        """A cheaper way to read chunks than ``next_chunk``, which continues after it; None if there is none."""

    async def next_chunk(self) -> bytes:
        """The next bytes as they arrived, undecoded; empty at the end.

        Safe to cancel: a cancelled call loses no bytes. Raises ``UpstreamUnreachable`` when the connection breaks.
        """

    def close(self) -> None:
        """Abort the transfer; does nothing if the body was read to its end."""


class Tunnel(Protocol):
    """An upgraded connection to an upstream."""

    async def next_chunk(self) -> bytes:
        """The next bytes; empty at the end."""

    async def write(self, data: bytes) -> None:
        """Send *data*. Raises ``ConnectionError`` when the other side is gone."""

    def close(self) -> None:
        """End the connection."""


class Upgradable(Reply, Protocol):
    """An answer that may have left HTTP."""

    def tunnel(self) -> Tunnel:
        """The connection, if ``status`` is 101."""


class Upstream(Protocol):
    """Sends requests to named upstreams."""

    async def send(
        self,
        target: str,
        method: str,
        path_qs: str,
        headers: Sequence[tuple[str, str]],
        body: bytes | AsyncIterator[bytes] | None,
        added: Mapping[str, str] = ...,
    ) -> Reply:
        """The reply once its head is here; *added* headers win over all others.

        Raises ``UpstreamUnreachable``, ``UpstreamTimeout`` and ``NotFound``.
        """

    async def upgrade(self, target: str, path_qs: str, headers: Sequence[tuple[str, str]]) -> Upgradable:
        """The reply to a request to leave HTTP. Raises as ``send`` does."""


def learn_nothing(usage: Usage) -> bool:
    """Learn nothing: the answer is our own."""
    del usage
    return False


class Answer(msgspec.Struct, frozen=True):
    """An answer for the client: ``head`` are the bytes already read from ``reply``, the rest follows in it.

    ``learn`` is called with the usage of an answer that came to its end. It returns True if the usage shows that the
    provider silently cut the prompt instead of refusing it. ``ending`` watches for an overflow behind the first
    content. ``hides_usage``: Ullage requested the stream's usage event, not the client. ``at_end`` completes the report
    when the answer has ended; an answer with it keeps its request in memory until then.
    """

    report: Report
    reply: Reply
    head: bytes = b""
    learn: Callable[[Usage], bool] = learn_nothing
    ending: LateOverflowDetector | None = None
    hides_usage: bool = False
    at_end: Callable[[Report], Report] | None = None


class Refusal(msgspec.Struct, frozen=True):
    """Why nothing went upstream. ``error_api`` names the API whose error format is used, if the path does not."""

    report: Report
    error: UllageError
    error_api: str = ""


Outcome = Answer | Refusal


class Exchange(Protocol):
    """Answers requests: the engine, or something around it."""

    async def exchange(self, request: Request) -> Outcome:
        """Answer *request*. Raises ``InvalidRequest``, and what the upstream raises."""

    async def pass_through(self, request: Request) -> Outcome:
        """Send the client's own bytes, after a fault of our own. Raises what the upstream raises."""


K = TypeVar("K")
V = TypeVar("V")


class Cache(Protocol[K, V]):
    """A bounded mapping that is safe to share between threads: it may evict a value at any time."""

    def get(self, key: K, /) -> V | None:
        """The value of *key*, None if there is none."""

    def __setitem__(self, key: K, value: V, /) -> None: ...

    def update(self, values: Mapping[K, V], /) -> None:
        """Store all of *values*."""

    def items(self) -> Iterable[tuple[K, V]]:
        """The keys with their values."""


class Counter(Protocol):
    """Counts tokens of text."""

    def counter(self, encoding: str) -> Callable[[str], int]:
        """The function that counts in *encoding*; special-token text counts as text. CPU-bound and thread-safe."""

    @property
    def loaded(self) -> Collection[str]:
        """The encodings whose vocabulary is in memory; loading another one takes half a second."""


Version = tuple[int, ...]
"""The state of a store: equal as long as no other process wrote to it."""


class Records(Protocol):
    """Compaction records, shared by every replica. No method raises or waits longer than the store's deadlines."""

    def prefix_key(self, tenant: bytes) -> bytes:
        """The secret (32 bytes) that keys this tenant's prefix hashes."""

    def item_key(self) -> bytes:
        """The secret (32 bytes) that proves which items in a request are ours; the same for every tenant."""

    def reachable(self) -> bool:
        """True if records can be read now; if not, an empty result does not prove that there is no record."""

    def version(self) -> Version | None:
        """A value that changes when another process or an operator may have stored something; None if unknown."""

    async def newest(
        self, tenant: bytes, root_hash: bytes, route: str, prefix_hashes: Sequence[bytes]
    ) -> tuple[int, bytes] | None:
        """The record under the first of *prefix_hashes* that has one, as ``(index, record)``.

        *root_hash* (16 bytes) names the conversation, *route* the upstream and model, each prefix hash (16 bytes) a
        boundary. Return None if there is none or the store does not answer.
        """

    async def save(
        self, tenant: bytes, root_hash: bytes, route: str, prefix_hash: bytes, record: bytes, *, replace: bool = False
    ) -> bytes:
        """Store *record* unless the boundary has one; return the record that is valid from now on.

        With *replace* the new record wins: a provider's overflow proved the earlier view too large.
        """

    async def pop_request(self, tenant: bytes, root_hash: bytes) -> str:
        """The extent of an operator's request to compact this conversation, as ``newest`` read it, which is removed.

        The extent is ``now``, or a share such as 0.2; empty if there is no request. Only one caller gets it.
        """

    async def read_route(self, tenant: bytes, route: str) -> bytes | None:
        """Return the value last saved for *route* and *tenant*; None if there is none, or the store does not answer."""

    def save_route(self, tenant: bytes, route: str, value: bytes) -> None:
        """Save *value* for *route* and *tenant* in the background; it replaces an earlier one."""


class CachedPrompt(msgspec.Struct, frozen=True):
    """A prompt that the provider's prompt cache may hold: the members around the items, and a prefix of the items.

    ``envelope_json`` is the JSON object of the body with an empty list, ``items`` is the JSON that goes between the
    list's brackets, ``tokens`` is our count of both.
    """

    envelope_json: str
    items: bytes
    tokens: int


class SummaryPrefix(msgspec.Struct, frozen=True):
    """A prefix that may have a summary: its ``length`` in items, its hash (16 bytes), and its tokens by our count."""

    length: int
    prefix_hash: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class SummaryRequest:
    """A prefix of a conversation to be summarised, which ``client_request`` continues.

    ``root_hash`` names the conversation. ``last_compaction`` is the prefix hash at its newest compaction, or the root
    hash (16 bytes each). ``prefixes`` are those that may have a summary, oldest first; the last is the one to
    summarise. ``folded`` is the number of items that are in a block already. ``cap`` is the most a summary may take,
    ``window`` the window of the request's own model, both in tokens of our count. ``quantised_cap`` is the cap rounded
    down to a step in provider tokens, so that it stays equal while the learned ratio moves. ``fixed_digest`` is a
    digest of system text and tools. ``token_ratio``: provider tokens per token of our count. ``read_entries`` returns
    the items between two indexes, ``cached_prompt`` the prompt of a prefix of that length; both may be called in a
    thread. ``requested``: a caller asked for it, so it may cost more than others.
    """

    client_request: Request
    route: Route
    root_hash: bytes
    last_compaction: bytes
    prefixes: tuple[SummaryPrefix, ...]
    folded: int
    cap: int
    quantised_cap: int
    fixed_digest: bytes
    window: int
    token_ratio: float
    read_entries: Callable[[int, int], Sequence[ItemText]] = field(repr=False)
    cached_prompt: Callable[[int], CachedPrompt | None] = field(repr=False)
    requested: bool = False

    @property
    def prefix(self) -> SummaryPrefix:
        """The prefix to summarise: the longest."""
        return self.prefixes[-1]

    def up_to(self, length: int) -> SummaryRequest:
        """The same for a prefix of at most *length* items, if there is one; else the request itself."""
        prefixes = tuple(prefix for prefix in self.prefixes if prefix.length <= length)
        if not prefixes:
            return self
        return replace(self, prefixes=prefixes)


@dataclass(frozen=True, slots=True)
class Summary:
    """A verified summary of the first ``length`` items by ``model``.

    ``tokens_spent`` includes the tokens of the earlier summaries that it continues.
    """

    text: str = field(repr=False)
    length: int
    tokens_spent: int
    model: str = ""


class Summaries(Protocol):
    """Summaries by a model, prepared before they are needed. No method raises."""

    @property
    def inline(self) -> bool:
        """True if a compaction waits for its summary."""

    async def ready(self, request: SummaryRequest) -> Summary | None:
        """The summary of *request*, or the newest one of a shorter prefix; reads the store at most once."""

    async def write(self, request: SummaryRequest) -> Summary | None:
        """As ``ready``, but write the summary of *request* if there is none, within the timeout."""

    def is_due(self, request: Request, route: Route, last_compaction: bytes) -> bool:
        """True if a job for what follows that compaction may start now. Cheap: it looks at counters only."""

    def prepare(self, request: SummaryRequest) -> None:
        """Start a job in the background, unless a job or a summary exists, here or on another replica."""

    def sent(self, tenant: bytes, tokens: int) -> None:
        """Add *tokens* of a prompt that *tenant* sent: the budget for summaries is a share of their sum."""

    def limited(self, tenant: bytes) -> None:
        """Pause summaries for *tenant*, which an upstream rate-limited."""
