"""The values of a decision: the measured request, what has been looked up since, and what the planner returns.

All are frozen. Tokens are by our own count unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Final, Literal

import msgspec
from msgspec import structs

from proxy.core.apis import chat, gemini, messages, responses
from proxy.core.apis.base import ApiFormat
from proxy.core.apis.envelope import Envelope
from proxy.core.apis.json_scan import Scan
from proxy.core.compaction.record import Compaction, CompactionRecord
from proxy.core.compaction.schedule import CompactionTarget, LowerOutput, MaxLoss, Schedule
from proxy.core.compaction.stages import CompactionRules
from proxy.core.compaction.view import NO_TEXTS, OriginalItems
from proxy.core.conversation import Item, ItemText, Layout
from proxy.core.errors import ContextTooLong
from proxy.core.models import COMPRESS, Route
from proxy.core.request import Request
from proxy.core.tokens.budget import (
    NO_BUFFERS,
    Buffers,
    Members,
    RoleTotals,
    TokenBudget,
    answer_reserve,
    economy_cap,
    to_our_tokens,
    token_budget,
)
from proxy.core.tokens.counting import Meter
from proxy.core.tool_table import NO_TOOLS, ToolMap

API_FORMATS: Mapping[str, ApiFormat] = MappingProxyType(
    {"chat": chat, "messages": messages, "responses": responses, "gemini": gemini}
)


class Policy(msgspec.Struct, frozen=True):
    """The configured rules of planning: the schedule's rules, and when an output figure may be lowered.

    ``stored``: after an overflow of a history that only the provider has, ``truncate`` lets the provider cut it,
    ``error`` passes the error on. ``economy`` compacts at the provider's price tier and not only when the window is
    full. ``tools`` is the table of clients' tools. ``sizes`` are the most tokens (the provider's) that the history of
    a task of each size may take; empty if sizes are labels only. ``reads_calls``: the calls of every counted request
    are read, for the report.
    """

    rules: CompactionRules
    lower_output: LowerOutput = "last"
    stored: Literal["truncate", "error"] = "truncate"
    economy: bool = False
    buffers: Buffers = NO_BUFFERS
    tools: ToolMap = NO_TOOLS
    sizes: Mapping[str, int] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    reads_calls: bool = False

    def budget(
        self,
        route: Route,
        window: int,
        requested: int | None,
        fixed: int,
        token_ratio: float,
        task_size: str = "",
    ) -> TokenBudget:
        """Return the token budget of a request; *fixed* is in our tokens, all other arguments in the provider's.

        *task_size* limits the history, or the route's own size if it is empty.
        """
        # Past boundaries are judged by the default reserve, so that a changing ``max_tokens`` moves none of them.
        default = answer_reserve(None, route.max_output, window)
        reserved = answer_reserve(requested, route.max_output, window)
        max_input: int | None = None
        price_cap: int | None = None
        if route.max_input is not None:
            max_input = to_our_tokens(route.max_input, token_ratio)
        if self.economy:
            price_cap = to_our_tokens(economy_cap(window, route.price_tier), token_ratio)
        history_cap = self.sizes.get(task_size or route.task_size)
        if history_cap is not None:
            history_cap = to_our_tokens(history_cap, token_ratio)
        return token_budget(
            to_our_tokens(window, token_ratio),
            to_our_tokens(reserved, token_ratio),
            fixed,
            to_our_tokens(default, token_ratio),
            max_input,
            price_cap,
            self.buffers,
            history_cap,
        )


class KnownRoute(msgspec.Struct, frozen=True):
    """A route with its window and token ratio, for one tenant at one moment.

    ``window`` is in the provider's tokens, None if it is unknown. ``stated_window`` is the window that a person, a
    server or an error stated, in tokens of our count or the provider's, whichever are more; None if it was only
    inferred. ``token_ratio``: provider tokens per token of our count.
    """

    route: Route
    window: int | None
    window_source: str
    stated_window: int | None
    token_ratio: float

    @property
    def first_max_loss(self) -> MaxLoss:
        """The most that a view for the requested model may lose before the next step of its overflow policy."""
        if self.route.steps == (COMPRESS,):
            return "any"
        if self.route.steps[0] == COMPRESS:
            return "no_drop"
        return "none"


class ParsedBody(msgspec.Struct, frozen=True):
    """A body with its items read: ``scan`` has their spans in the body, ``envelope`` the members around them."""

    body: bytes
    scan: Scan
    items: tuple[Item, ...]
    envelope: Envelope

    def __repr__(self) -> str:
        """Leave out the texts."""
        return f"ParsedBody({len(self.items)} items)"

    def item(self, index: int) -> bytes:
        """The client's own bytes of one item."""
        start, end = self.scan.spans[index]
        return self.body[start:end]


class TokenCounts(msgspec.Struct, frozen=True):
    """Tokens of a request as the client sent it.

    ``history`` are all items but system items, ``fixed`` is everything else. ``members`` are the counted members of the
    envelope by name, ``beside`` the same by kind of content; ``roles`` are the items by role.
    """

    fixed: int
    history: int
    members: Mapping[str, int]
    roles: RoleTotals
    beside: Members

    @property
    def total(self) -> int:
        """Tokens of the whole request."""
        return self.fixed + self.history


@dataclass(frozen=True, slots=True)
class Addition:
    """A feature's addition to compacted views; ``tokens`` is 0 if there is nothing to add.

    ``tool`` is the declaration of one more tool, as JSON; ``note`` a line at the end of the block.
    """

    tool: str = field(default="", repr=False)
    note: str = ""
    tokens: int = 0

    def added_to(self, tools: str) -> str:
        """Return the JSON array *tools* with this tool appended; the bytes of the client's own tools do not change.

        If *tools* is empty or no array, the client sent none: return an array of this tool alone.
        """
        if not self.tool:
            return tools
        elements = tools[: max(0, tools.rfind("]"))]
        if not elements.strip("[ \t\r\n"):
            return f"[{self.tool}]"
        return f"{elements},{self.tool}]"


NO_ADDITION: Final = Addition()


class UsageAnchor(msgspec.Struct, frozen=True):
    """Both counts of the newest prefix that a provider counted: ``counted`` is ours, ``reported`` the provider's.

    ``boundary`` is that of the compaction in the view, -1 if there was none.
    """

    counted: int
    reported: int
    boundary: int


LIGHT_ITEM: Final = 50
"""Size for ``offload`` of work on an item's numbers alone, in bytes of text that take as long: 2 us."""


class MeasuredRequest(msgspec.Struct, frozen=True):
    """A request measured once for one model.

    ``size`` and ``light_size`` are sizes for ``offload``: of work on all texts, and of work on the items' numbers only.
    ``budget`` counts the tools array as it will be sent (``tools_json``, empty if it is not shrunk) and the addition.
    ``prefix_hashes`` name the conversation after each item. ``root_hash`` is the one after the first user item, or
    after the first item if there is none: it names the conversation as a whole, and is empty if there are no items.
    ``count`` counts text for this route, ``read_item`` reads an item that is in the view only. ``lay_out`` returns the
    structure of the items, continued from a known prefix; ``read_facts`` returns the items with the facts of their
    calls and results, and adds what it reads to the texts.
    """

    request: Request
    known: KnownRoute
    parsed: ParsedBody
    size: int
    light_size: int
    counts: TokenCounts
    prefix_hashes: tuple[bytes, ...]
    root_hash: bytes
    budget: TokenBudget
    requested_output: int | None
    client_compaction: str
    tools_json: str
    addition: Addition
    anchor: UsageAnchor | None
    target: CompactionTarget
    count: Meter
    read_item: Callable[[bytes], Item]
    lay_out: Callable[[], Layout]
    read_facts: Callable[[dict[int, ItemText]], tuple[Item, ...]]
    has_facts: bool = False

    def __repr__(self) -> str:
        """Leave out the texts."""
        return f"MeasuredRequest({self.request!r}, {self.known!r}, {self.budget!r})"

    @property
    def api_format(self) -> ApiFormat:
        """The functions and figures of the request's API."""
        return API_FORMATS[self.request.api]

    def with_facts(self, texts: dict[int, ItemText] | None = None) -> MeasuredRequest:
        """Return this request with the facts of all calls and results.

        Items whose facts are not known yet are read; their texts are added to *texts*, by index.
        """
        if texts is None:
            texts = {}
        parsed = structs.replace(self.parsed, items=self.read_facts(texts))
        return structs.replace(self, parsed=parsed, has_facts=True)

    def original(self, layout: Layout, texts: Mapping[int, ItemText] = NO_TEXTS) -> OriginalItems:
        """Return the items as the client sent them, the stages' source of texts; *texts* were read already."""
        parsed = self.parsed
        return OriginalItems(parsed.body, parsed.scan.spans, parsed.items, layout, API_FORMATS[self.request.api], texts)

    def budget_for(self, target: CompactionTarget) -> TokenBudget:
        """Return the budget for *target*: with its smaller reserve, or without room for the addition."""
        budget = self.budget
        if target.reserve is not None:
            budget = replace(budget, reserve=target.reserve)
        if self.addition.tokens and not target.keep_addition:
            budget = self.without_addition_room(budget)
        return budget

    def without_addition_room(self, budget: TokenBudget) -> TokenBudget:
        """*budget* without the room for the addition."""
        return replace(budget, fixed=budget.fixed - self.addition.tokens)

    def expected_tokens(self, boundary: int, tokens: int) -> int:
        """Return the provider's expected count for *tokens*; *boundary* is that of the compaction, -1 if none.

        It is exact up to the anchor's prefix and estimated beyond. An anchor before another compaction is not used: it
        counted another view.
        """
        anchor, ratio = self.anchor, self.known.token_ratio
        if anchor is None or anchor.boundary != boundary or anchor.counted > tokens:
            return int(tokens * ratio)
        return anchor.reported + int((tokens - anchor.counted) * ratio)

    def schedule(self, policy: Policy, layout: Layout, budget: TokenBudget) -> Schedule:
        """The schedule of this conversation's compactions under *budget*."""
        rules = policy.rules
        if self.parsed.envelope.stored or self.request.options.keep_items:
            # Fold and drop would split pairs: a stored history can hold the other half of a call or result sent here.
            rules = replace(rules, enabled_stages=replace(rules.enabled_stages, fold=False, drop=False))
        return Schedule(self.parsed.items, layout, budget, rules)


class Start(msgspec.Struct, frozen=True):
    """Nothing was looked up yet."""


START: Final = Start()


class LookedUp(msgspec.Struct, frozen=True):
    """The layout, and the newest compaction record on the conversation's prefix hashes.

    ``requested``: an operator requested a compaction, to ``share`` of the room if that is not None. ``first`` is the
    compaction in the conversation's last view, before this request wrote any; ``wrote``: it wrote a record.
    """

    layout: Layout
    record: CompactionRecord | None
    requested: bool = False
    first: Compaction | None = None
    wrote: bool = False
    share: float | None = None


class Written(msgspec.Struct, frozen=True):
    """A record for ``target``: ours, or another replica's; None if the view needs no compaction.

    ``lookup.record`` is the record before this one.
    """

    lookup: LookedUp
    target: CompactionTarget
    record: CompactionRecord | None
    lowered_output: int | None


Progress = Start | LookedUp | Written


class Edits(msgspec.Struct, frozen=True):
    """The differences between a view and the client's request; each may be absent.

    ``previous`` is the compaction of the conversation's last view. ``nothing_to_fold``: a compaction was requested, but
    would have saved hardly anything.
    """

    record: CompactionRecord | None = None
    previous: Compaction | None = None
    compacted_now: bool = False
    lowered_output: int | None = None
    tools_shrunk: bool = False
    addition: bool = False
    nothing_to_fold: bool = False
    stages: tuple[str, ...] = ()

    @property
    def is_verbatim(self) -> bool:
        """True if the view is what the client sent, byte for byte."""
        return self.record is None and self.lowered_output is None and not self.tools_shrunk


NO_EDITS: Final = Edits()


class UncountedView(msgspec.Struct, frozen=True):
    """The client's own bytes, sent without a count. All tokens are the provider's.

    ``model`` is the one that the path or the body names; ``session`` is the body's name of the conversation. ``bound``
    is the most tokens that the bytes can be; 0 if there is no bound: mode off, or the window is unknown. ``budget`` is
    the figure that the bound was compared with. ``lowered_output`` and ``stages`` are set by edits after a refusal.
    """

    request: Request
    known: KnownRoute
    model: str
    stream: bool
    session: str
    body: bytes
    bound: int = 0
    budget: int | None = None
    is_off: bool = False
    lowered_output: int | None = None
    stages: tuple[str, ...] = ()

    tokens: ClassVar[None] = None

    def __repr__(self) -> str:
        """Leave out the body."""
        return f"UncountedView({self.request!r}, bound={self.bound})"


Observation = Literal["", "fits", "would_compact", "would_refuse"]
"""In mode observe: what would have happened to the request whose own bytes are sent. Empty in every other mode."""


class CountedView(msgspec.Struct, frozen=True):
    """The bytes that go upstream for a measured request.

    ``budget`` is the one it was made for; ``layout`` is None if no record was looked up. ``counted`` is our own count,
    ``expected_tokens`` the provider's, estimated from its last count. ``roles`` are the client's own items in the view,
    ``summary`` the tokens of the block, ``extension`` those of elements appended while an answer is continued.
    """

    request: Request
    known: KnownRoute
    measured: MeasuredRequest
    budget: TokenBudget
    layout: Layout | None
    body: bytes
    counted: int
    expected_tokens: int
    roles: RoleTotals
    summary: int = 0
    edits: Edits = NO_EDITS
    extension: int = 0
    observation: Observation = ""

    def __repr__(self) -> str:
        """Leave out the body."""
        return f"CountedView({self.measured!r}, {self.edits!r})"

    @property
    def lowered_output(self) -> int | None:
        """The lowered output figure in tokens of our count; None if it was not lowered."""
        if self.observation:
            return None
        return self.edits.lowered_output

    @property
    def tokens(self) -> int:
        """Tokens of what is sent, by our own count."""
        if self.observation:
            return self.measured.counts.total
        return self.counted + self.extension


View = UncountedView | CountedView


def verbatim(
    measured: MeasuredRequest, layout: Layout | None, budget: TokenBudget | None = None, edits: Edits = NO_EDITS
) -> CountedView:
    """Return the view of the client's own bytes, which have to fit *budget* (the request's own by default)."""
    counts, budget = measured.counts, budget or measured.budget
    if measured.addition.tokens:
        budget = measured.without_addition_room(budget)
    return CountedView(
        request=measured.request,
        known=measured.known,
        measured=measured,
        budget=budget,
        layout=layout,
        body=measured.request.body,
        counted=counts.total,
        expected_tokens=measured.expected_tokens(-1, counts.total),
        roles=counts.roles,
        edits=edits,
    )


class NeedRecord(msgspec.Struct, frozen=True):
    """The engine has to lay the items out and look up the newest record."""


class NeedFacts(msgspec.Struct, frozen=True):
    """The engine has to read the facts of all calls and results: a compaction may be due."""


class NeedBlock(msgspec.Struct, frozen=True):
    """The engine has to write the texts of a compaction and store its record."""

    lookup: LookedUp
    target: CompactionTarget
    compaction: Compaction
    lowered_output: int | None


class Forward(msgspec.Struct, frozen=True):
    """Send the view."""

    view: View


class TooLossy(msgspec.Struct, frozen=True):
    """The view would lose more than the target allows; nothing was stored."""


class Reject(msgspec.Struct, frozen=True):
    """Refuse the request; ``view`` is the smallest one, for the report."""

    error: ContextTooLong
    view: CountedView


FinalDecision = Forward | TooLossy | Reject
Decision = NeedRecord | NeedFacts | NeedBlock | FinalDecision
