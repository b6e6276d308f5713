"""What the engine needs from outside, as protocols, and the plain values that cross the border."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Mode = Literal["on", "observe", "off"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller asked of Ullage in ``x-ullage-*`` request headers.

    ``window`` (tokens) may only lower the model's window; ``conversation`` is mixed into the chain's first link;
    ``project`` and ``task_size`` are labels.
    """

    mode: Mode = "on"
    conversation: str = ""
    window: int | None = None
    compact_now: bool = False
    project: str = ""
    task_size: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One managed request as the server hands it to the engine.

    ``tenant`` is a 32-byte digest of the caller's credential: everything derived from this request is scoped by it.
    ``model`` is the one the path names, where it does; it wins over the body's. ``session`` is what the client's
    headers call the conversation and ``epoch`` how often it compacted it: for names and labels only. ``compacting``
    is whose own compaction of its conversation the headers say this is.
    ``variant`` is what its headers ask for that changes a model's window, such as a beta flag.
    """

    api: str
    body: bytes
    tenant: bytes
    request_id: str
    options: Options = Options()
    model: str = ""
    session: str = ""
    epoch: int = 0
    variant: str = ""
    compacting: str = ""


class Reply(Protocol):
    """An upstream's answer whose head has arrived; its body is read once, in order."""

    @property
    def status(self) -> int:
        """The HTTP status."""

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """The end-to-end response headers as they came, repeated ones included."""

    def header(self, name: str) -> str:
        """The first header called *name* (any case), or an empty string."""

    async def next_chunk(self) -> bytes:
        """The next bytes as they arrived, undecoded; empty at the end.

        Safe to cancel: a cancelled call loses no bytes. Raises ``UpstreamUnreachable`` when the connection breaks.
        """

    def close(self) -> None:
        """Abort what is still under way; harmless when the body was read to its end."""


class Send(Protocol):
    """Sends a body to the named upstream, on this request's own path and headers."""

    def __call__(self, upstream: str, body: bytes, *, keyless: bool = False) -> Awaitable[Reply]:
        """The answer once its head is here; *keyless*: without the client's own credentials, meant for another server.

        Raises ``UpstreamUnreachable`` and ``UpstreamTimeout``.
        """


class Counter(Protocol):
    """Counts tokens of text."""

    def count(self, encoding: str, text: str) -> int:
        """Tokens of *text* in *encoding*; special-token text counts as text. CPU-bound and thread-safe."""


class Recorder(Protocol):
    """Event records shared by every replica. No method raises or waits longer than the store's deadlines."""

    def chain_key(self, tenant: bytes) -> bytes:
        """The secret (32 bytes) that keys this tenant's chains."""

    def item_key(self) -> bytes:
        """The secret (32 bytes) that tells items of ours which clients carry; the same for every tenant."""

    def reachable(self) -> bool:
        """Whether records can be had at all right now: if not, that none was found says nothing."""

    async def newest(self, tenant: bytes, root: bytes, route: str, chains: Sequence[bytes]) -> tuple[int, bytes] | None:
        """The record under the first of *chains* that has one, as ``(index into chains, record)``.

        *root* (16 bytes) names the conversation, *route* the upstream and model, each chain (16 bytes) a place.
        ``None`` when there is none or the store cannot say.
        """

    async def fix(
        self, tenant: bytes, root: bytes, route: str, chain: bytes, record: bytes, *, supersede: bool = False
    ) -> bytes:
        """Store *record* unless the place has one already; returns the one that holds from now on.

        With *supersede* the record replaces what is there: a provider's overflow proved the earlier view too large.
        """

    async def recall(self, tenant: bytes, route: str) -> bytes | None:
        """What was last remembered about *route* for *tenant*; ``None`` where there is nothing or nobody to ask."""

    def remember(self, tenant: bytes, route: str, value: bytes) -> None:
        """Keep *value* about *route* for *tenant*, in the background; the last one remembered holds."""


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float:
        """Seconds since an arbitrary point; never goes backwards."""
