"""Measures requests: resolves the route and the window, counts the tokens, and builds a ``MeasuredRequest``."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial

from msgspec import structs

from proxy.core.apis.envelope import TOOLS, Envelope
from proxy.core.client_compaction import compacting_client
from proxy.core.compaction.schedule import CompactionTarget, MaxLoss
from proxy.core.compaction.tool_definitions import shrink_tools
from proxy.core.conversation import UNREAD
from proxy.core.decisions import (
    API_FORMATS,
    LIGHT_ITEM,
    NO_ADDITION,
    FinalDecision,
    Forward,
    KnownRoute,
    MeasuredRequest,
    Policy,
    TokenCounts,
    TooLossy,
    UncountedView,
)
from proxy.core.models import Route
from proxy.core.request import Mode, Request
from proxy.core.tokens.budget import TokenBudget
from proxy.engine.features import Features
from proxy.engine.learned_routes import KnownRoutes, LearnedRoutes
from proxy.engine.ports import Cache, Records
from proxy.engine.reading import CountedBody, LocatedBody, Reader
from proxy.engine.run import OBSERVED
from proxy.tasks import load_of, offload

ShrunkTools = Cache[tuple[bytes, str, str, int], tuple[str, int]]
"""Shrunk tools arrays and their tokens, by tenant, route, original JSON and target: a bounded mapping."""


class Measurer:
    """Measures requests. *shrunk_tools* caches tools arrays, so that each is shrunk once and always in the same way."""

    def __init__(
        self,
        routes: KnownRoutes,
        reader: Reader,
        records: Records,
        learned: LearnedRoutes,
        features: Features,
        policy: Policy,
        mode: Mode,
        shrunk_tools: ShrunkTools,
    ) -> None:
        self.policy = policy
        self._routes = routes
        self._reader = reader
        self._records = records
        self._learned = learned
        self._features = features
        self._mode = mode
        self._shrunk_tools = shrunk_tools

    def mode_of(self, request: Request) -> Mode:
        """Return the mode of *request*: its own if that does less than the configured one, else the configured one."""
        if request.options.mode == "on":
            return self._mode
        return request.options.mode

    async def measure(
        self, request: Request, max_loss: MaxLoss | None, *, dry_run: bool = False
    ) -> MeasuredRequest | UncountedView:
        """Measure *request* for the model it names.

        *max_loss* is the most its view may lose, None for the first step of its overflow policy. A view of the client's
        own bytes is returned if nothing has to be counted: mode off, or an unknown window.

        Raises ``InvalidRequest`` and ``NotFound``.
        """
        mode, located = self.mode_of(request), await self.located(request)
        envelope = located.envelope
        known = (await self._routes.get(request, request.path_model or envelope.model)).known
        if mode == "off" or known.window is None:
            return UncountedView(
                request, known, envelope.model, envelope.stream, envelope.session, request.body, is_off=mode == "off"
            )
        if mode == "observe":
            # Records of views that were only observed get hashes of their own: later views must not build on them.
            options = structs.replace(request.options, conversation=request.options.conversation + OBSERVED)
            request = structs.replace(request, options=options)
        compacts_now = request.options.compact_now
        if max_loss is None and (mode == "observe" or compacts_now):
            max_loss = "any"
        target = CompactionTarget(
            force=compacts_now,
            wait_for_summary=compacts_now,
            dry_run=dry_run,
            max_loss=max_loss or known.first_max_loss,
            lower_output=self.policy.lower_output,
            share=request.options.compact_to,
        )
        return await self.count(request, located, known, known.window, target)

    async def measure_anyway(self, request: Request, assumed_window: int) -> MeasuredRequest:
        """Measure *request*, against *assumed_window* provider tokens if its model's window is unknown.

        Raises ``InvalidRequest`` and ``NotFound``.
        """
        located = await self.located(request)
        known = (await self._routes.get(request, request.path_model or located.envelope.model)).known
        return await self.count(request, located, known, known.window or assumed_window)

    async def located(self, request: Request) -> LocatedBody:
        """Locate the items of the body, on a thread if much of it is new. Raises ``InvalidRequest``."""
        return await self._reader.located(API_FORMATS[request.api], request.tenant, request.body)

    def locate(self, request: Request) -> LocatedBody:
        """As ``located``, without a thread."""
        return self._reader.locate(API_FORMATS[request.api], request.tenant, request.body)

    async def tokens_of(self, located: LocatedBody, route: Route) -> int:
        """Return the tokens of the request as the client sent it, by our own count."""
        counted = await self._reader.read(located, route.encoding, route.model)
        return counted.counts.total

    async def count(
        self,
        request: Request,
        located: LocatedBody,
        known: KnownRoute,
        window: int,
        target: CompactionTarget | None = None,
    ) -> MeasuredRequest:
        """Count *request* against *window* (in the provider's tokens): that of *known*, or an assumed one."""
        size = self._reader.new_size(located, known.route.encoding, known.route.model)
        return await offload(size, self._measured, request, located, known, window, target)

    def _measured(
        self, request: Request, located: LocatedBody, known: KnownRoute, window: int, target: CompactionTarget | None
    ) -> MeasuredRequest:
        route, api_format = known.route, API_FORMATS[request.api]
        reading = self._reader.count_body(located, route.encoding, route.model)
        policy, token_ratio, counts = self.policy, known.token_ratio, reading.counts
        envelope, requested = reading.envelope, reading.envelope.requested_output
        client_compaction = request.client_compaction or _client_compaction(reading)
        addition, adding = NO_ADDITION, self._features.adding
        if adding is not None and not client_compaction:
            addition = adding.addition(request, envelope, route, window)
        fixed, task_size = counts.fixed + addition.tokens, request.options.task_size
        budget = policy.budget(route, window, requested, fixed, token_ratio, task_size)
        tools_json, budget = self._with_smaller_tools(request.tenant, route, envelope, counts, budget)
        hashes = reading.prefix_hashes(self._records.prefix_key(request.tenant), request.options.conversation)
        root_hash = b""
        if hashes:
            root_hash = hashes[next((index for index, item in enumerate(reading.items) if item.role == "user"), 0)]
        stated = known.stated_window
        if known.window_source != "learned":
            stated = int(budget.window * max(1.0, token_ratio))
        return MeasuredRequest(
            request=request,
            known=structs.replace(known, stated_window=stated),
            parsed=reading,
            size=load_of(len(reading.body), len(reading.items)),
            light_size=LIGHT_ITEM * len(reading.items),
            counts=counts,
            prefix_hashes=hashes,
            root_hash=root_hash,
            budget=budget,
            requested_output=requested,
            client_compaction=client_compaction,
            tools_json=tools_json,
            addition=addition,
            anchor=self._learned.find_anchor(route, hashes),
            target=target or CompactionTarget(lower_output=policy.lower_output),
            count=reading.count,
            read_item=partial(self._reader.view_item, api_format, route, request.tenant, reading.count),
            lay_out=reading.layout,
            read_facts=partial(self._reader.read_facts, api_format, reading),
        )

    # The room that declared tools take.

    def _with_smaller_tools(
        self, tenant: bytes, route: Route, envelope: Envelope, counts: TokenCounts, budget: TokenBudget
    ) -> tuple[str, TokenBudget]:
        """Return the shrunk tools array and *budget* for it; an empty array if the tools leave enough room.

        The result depends on tools, route and target only, so that it is the same in every request.
        """
        member = next((key for key in TOOLS if key in counts.members), None)
        if member is None or not self.policy.rules.enabled_stages.tools:
            return "", budget
        size = counts.members[member]
        others = budget.fixed - size
        target = self._tools_target(counts, budget, others)
        if target is None or target >= size:
            return "", budget
        text = envelope.value(member)
        name = (tenant, route.name, text, target)  # with the tenant: a hit must not show what another one sent
        shrunk = self._shrunk_tools.get(name)
        if shrunk is None:
            count = functools.cache(self._reader.count_tools(route.encoding, route.model))
            smaller = shrink_tools(text.encode(), target, count).decode()
            shrunk = self._shrunk_tools[name] = (smaller, count(smaller))
        smaller, tokens = shrunk
        if tokens >= size:
            return "", budget
        return smaller, replace(budget, fixed=others + tokens)

    def _tools_target(self, counts: TokenCounts, budget: TokenBudget, others: int) -> int | None:
        """Return the tokens to which the tools have to shrink beside *others* that are fixed; None if they need not.

        They have to if the fixed part leaves less than a quarter of the budget to the history, or, above the high mark,
        if they exceed their configured share.
        """
        rules = self.policy.rules
        targets = []
        if (budget.baseline - budget.fixed) * 4 < budget.baseline:
            targets.append(max(0, budget.baseline * 3 // 4 - others))
        if rules.allocation is not None:
            # Rounded up to steps: a clock in the system text must not change how the tools are shrunk.
            step = max(1, budget.window // 64)
            if budget.quantised_fixed + counts.history > budget.mark(rules.marks.high, budget.baseline):
                targets.append(rules.allocation.for_tools(budget.window, -(-others // step) * step))
        return min(targets, default=None)


def _client_compaction(reading: CountedBody) -> str:
    """Return the client whose own compaction a request is, by its words; empty if it is none.

    A request that ends with tool results and no words of the user is none: most requests are skipped by that.
    """
    spans, body, items = reading.scan.spans, reading.body, reading.items
    if not items or (items[-1].answers and not items[-1].user_tokens):
        return ""
    roles = reading.counts.roles
    first, last = body[slice(*spans[0])], body[slice(*spans[-1])]
    return compacting_client(reading.envelope, first, last, roles.assistant > 0, has_results=roles.tool > 0)


async def with_calls_read(decision: FinalDecision) -> FinalDecision:
    """Return *decision* with the facts of all calls and results of its request, for the report.

    Most are cached since an earlier request, so only the unread ones count for the size of the work.
    """
    if isinstance(decision, TooLossy) or isinstance(decision.view, UncountedView) or decision.view.measured.has_facts:
        return decision
    view = decision.view
    parsed = view.measured.parsed
    unread = [span for item, span in zip(parsed.items, parsed.scan.spans, strict=True) if item.facts is UNREAD]
    size = load_of(sum(end - start for start, end in unread), len(unread))
    read = structs.replace(view, measured=await offload(size, view.measured.with_facts))
    if isinstance(decision, Forward):
        return Forward(read)
    return structs.replace(decision, view=read)
