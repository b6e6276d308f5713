"""What the engine needs from outside, as protocols, and the plain values that cross the border."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from proxy.core.conversation import Entry
from proxy.core.models import Route
from proxy.core.request import Request

Kind = Literal["event", "summary", "lease", "refused", "mark"]
"""What the store may have of a place in a conversation."""


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

    async def next_chunk(self) -> bytes:
        """The next bytes as they arrived, undecoded; empty at the end.

        Safe to cancel: a cancelled call loses no bytes. Raises ``UpstreamUnreachable`` when the connection breaks.
        """

    def close(self) -> None:
        """Abort what is still under way; harmless when the body was read to its end."""


class Send(Protocol):
    """Sends a body to the named upstream, on this request's own path and headers."""

    def __call__(self, upstream: str, body: bytes, *, keyless: bool = False, model: str = "") -> Awaitable[Reply]:
        """The answer once its head is here; *keyless*: without the client's own credentials, meant for another server.

        *model* is the name that was asked for: headers configured for it are added.

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

    async def take(self, tenant: bytes, root: bytes) -> bool:
        """Whether somebody wished that conversation *root* be compacted, as ``newest`` saw; told to one caller only."""

    async def recall(self, tenant: bytes, route: str) -> bytes | None:
        """What was last remembered about *route* for *tenant*; ``None`` where there is nothing or nobody to ask."""

    def remember(self, tenant: bytes, route: str, value: bytes) -> None:
        """Keep *value* about *route* for *tenant*, in the background; the last one remembered holds."""


@dataclass(frozen=True, slots=True)
class Warm:
    """A prompt that the provider has in its cache: the members around the items, and the items sent of a prefix.

    ``outline`` is a JSON object without its items, ``items`` are those between the list's brackets, ``tokens`` what
    both weigh by our count.
    """

    outline: str
    items: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A prefix of a conversation: its ``length`` in items, its name (16 bytes), and what it weighs."""

    length: int
    chain: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class SummaryRequest:
    """A prefix of a conversation of which a summary is wanted.

    ``root`` names the conversation, ``since`` the stretch of it that began with its newest event (16 bytes each).
    ``cuts`` are the prefixes of which a summary may exist, oldest first; the last is the wanted one. ``covered`` items
    are folded already. ``cap`` is the most a summary may take, ``window`` the window of the request's own model, both
    in tokens of our count; ``step`` is the cap in steps that no learned factor moves. ``head`` is a digest of system
    text and tools. ``factor``: provider tokens per token of our count.
    ``read`` gives the items between two indexes, ``warm`` the prompt of a prefix; both may be called in a thread.
    ``asked``: the caller asked for it, so that it may cost more than what nobody asked for.
    """

    request: Request
    route: Route
    root: bytes
    since: bytes
    cuts: tuple[Cut, ...]
    covered: int
    cap: int
    step: int
    head: bytes
    window: int
    factor: float
    read: Callable[[int, int], Sequence[Entry]] = field(repr=False)
    warm: Callable[[int], Warm | None] = field(repr=False)
    asked: bool = False

    @property
    def wanted(self) -> Cut:
        """The prefix of which a summary is wanted."""
        return self.cuts[-1]

    def until(self, length: int) -> SummaryRequest:
        """The same of a prefix of at most *length* items, where there is one."""
        cuts = tuple(cut for cut in self.cuts if cut.length <= length)
        return replace(self, cuts=cuts) if cuts else self


@dataclass(frozen=True, slots=True)
class Summary:
    """What the model ``by`` wrote of the first ``cut`` items, verified; ``spent`` tokens went into it and its bases."""

    text: str = field(repr=False)
    cut: int
    spent: int
    by: str = ""


class Summaries(Protocol):
    """Summaries by a model, ready before they are needed. No method raises."""

    @property
    def inline(self) -> bool:
        """Whether an event waits for its summary."""

    async def ready(self, passage: SummaryRequest) -> Summary | None:
        """The summary of *passage*, or the newest one of a shorter prefix; asks the store at most once."""

    async def write(self, passage: SummaryRequest) -> Summary | None:
        """As ``ready``, but where there is no summary of just this prefix one is written, within the timeout."""

    def is_due(self, request: Request, route: Route, since: bytes) -> bool:
        """Whether a job for this stretch of the conversation may be worth starting; costs nothing."""

    def prepare(self, passage: SummaryRequest) -> None:
        """Start a job in the background, unless there is one, or a summary, here or on another replica."""

    def sent(self, tenant: bytes, tokens: int) -> None:
        """Note that *tenant* sent a prompt of so many tokens: summaries may cost a part of that."""

    def limited(self, tenant: bytes) -> None:
        """Note that *tenant* was told to slow down: nothing is asked on its behalf for a while."""


class Register(Protocol):
    """What is told of conversations, each tenant its own. Writing never raises or waits.

    Reading raises ``StoreUnavailable`` where the store cannot say. *lasting*: as long as records live.
    """

    def seen(self, tenant: bytes, conversation: str, root: bytes, now: float, *, lasting: bool) -> None:
        """Note that a request of the conversation called *conversation* began at *root*; *now* is Unix time."""

    def note(self, tenant: bytes, root: bytes, field: str, value: bytes, *, lasting: bool) -> None:
        """Keep *value* as the note called *field*; of too many the one whose name sorts first goes."""

    async def conversations(self, tenant: bytes) -> Sequence[tuple[str, float]]:
        """The names of the tenant's newest conversations and when each was last heard of (Unix time), newest first."""

    async def roots(self, tenant: bytes, conversation: str) -> Sequence[bytes]:
        """The roots of the conversation called *conversation*, the one heard of last first."""

    async def notes(self, tenant: bytes, root: bytes) -> Mapping[str, bytes]:
        """The notes on *root* by their names."""

    async def there(self, root: bytes, wanted: Sequence[tuple[Kind, str | bytes, bytes]]) -> Sequence[bool]:
        """Which of *wanted* are there: an event by route and place, the others by text policy and place."""

    async def mark(self, tenant: bytes, root: bytes, seconds: float) -> None:
        """Wish that *root* be compacted at its next request, if that comes within *seconds*."""


class Originals(Protocol):
    """Archived originals, under names that only their tenant can form."""

    def name(self, tenant: bytes, content: bytes) -> bytes:
        """What an original with this *content*, or a digest of it, is called (16 bytes): equal content, equal name."""

    async def keep(self, tenant: bytes, root: bytes, name: bytes, plain: bytes, seconds: float) -> bool:
        """Keep *plain* for *seconds* from now; whether the store took it. Never raises."""

    async def read(self, tenant: bytes, root: bytes, names: Sequence[bytes]) -> Sequence[bytes | None]:
        """The originals called *names*; ``None`` for what is not there. Raises ``StoreUnavailable``."""


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float:
        """Seconds since an arbitrary point; never goes backwards."""
