"""Answers requests for a compaction, by which clients shorten their own history, if their upstream does not.

https://developers.openai.com/api/docs/guides/compaction describes them. A compaction item of ours is replaced by its
text before its conversation is planned, so that the upstream reads a message and never an item of an unknown type.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal

import msgspec
from msgspec import structs

from proxy.core.apis import responses
from proxy.core.client_compaction import OTHER, TRIGGER
from proxy.core.models import Route
from proxy.core.request import Request
from proxy.core.tokens.budget import Shares
from proxy.engine.features import Feature, Planning
from proxy.engine.ports import Answer, Outcome, Records, Summary
from proxy.engine.reading import Reader
from proxy.engine.records import CompactionRecords
from proxy.engine.replies import LocalReply
from proxy.engine.run import report_of_local
from proxy.features.client_compaction.compact_endpoint import Kind, compact, compaction_item, is_trigger, response
from proxy.features.client_compaction.compaction_item import PREFIX, OpenedBody, open_items
from proxy.features.client_compaction.settings import UpstreamWithCompaction, answers_from_summaries
from proxy.features.client_compaction.summary_answer import SummaryAnswers
from proxy.features.opening import FeatureParts
from proxy.tasks import load_of, offload

AnsweredBy = Literal["auto", "relay", "own"]
"""``auto``: the upstream answers a request for a compaction if it supports it, else Ullage; ``relay``; ``own``."""

UNSUPPORTED: Final = frozenset({404, 405, 501})
"""Statuses of upstreams without ``/responses/compact``. Few other than OpenAI's have it."""

REFUSED: Final = frozenset({400, 422})
"""Statuses by which upstreams refuse an item of a type that they do not know."""

ASSUMED_WINDOW: Final = 131_072
"""The window, in provider tokens, by which the size of a block is chosen if the model's window is unknown."""

NO_SUMMARY: Final = Summary("", 0, 0)

TAIL: Final = 262_144
"""Bytes at a body's end that are searched for a trigger: tools may follow the items."""


class UpstreamCompaction(msgspec.Struct, frozen=True):
    """The answers to requests for a compaction at one upstream; ``is_supported``: it is known to answer them itself.

    Another upstream may read a trigger as an ordinary request. Its answer costs the full price, and no client can use
    it.
    """

    answered_by: AnsweredBy = "auto"
    is_supported: bool = False

    def is_first_choice(self, kind: Kind) -> bool:
        """True if the request goes to the upstream first."""
        if self.answered_by == "auto":
            return kind == "endpoint" or self.is_supported
        return self.answered_by == "relay"


class ClientCompaction(Feature):
    """Opens compaction items of ours, and answers requests for a compaction if their upstream does not.

    *resolve* gives the route of a model. *now* gives Unix time. *upstreams* are known by name.
    """

    markers = MappingProxyType({responses.API: (PREFIX.encode(), TRIGGER.encode())})
    purposes = frozenset({"compact"})

    def __init__(
        self,
        reader: Reader,
        records: Records,
        compactions: CompactionRecords,
        resolve: Callable[[str], Route],
        shares: Shares,
        now: Callable[[], float],
        upstreams: Mapping[str, UpstreamCompaction],
    ) -> None:
        self._reader = reader
        self._records = records
        self._compactions = compactions
        self._resolve = resolve
        self._shares = shares
        self._now = now
        self._upstreams = upstreams

    async def prepare(self, request: Request, engine: Planning) -> Request:
        """Return *request* with messages in place of compaction items of ours. Raises ``InvalidRequest``."""
        del engine
        if request.purpose == "compact":
            request = structs.replace(request, client_compaction=request.client_compaction or OTHER)
        opened = await self._opened(request)
        if opened.body is request.body:
            return request
        return structs.replace(request, body=opened.body)

    async def answer(self, request: Request, engine: Planning) -> Outcome | None:
        """Return the upstream's answer to a request for a compaction, or our own; None for any other request."""
        kind = await self._kind(request)
        if kind is None:
            return None
        located = await self._reader.located(responses, request.tenant, request.body)
        envelope = located.envelope
        route = self._resolve(request.path_model or envelope.model)
        upstream = self._upstreams.get(route.upstream, UpstreamCompaction())
        # A stored conversation is at the provider, which alone has all of its items.
        must_relay = envelope.stored or engine.mode_of(request) == "off"
        if must_relay or upstream.is_first_choice(kind):
            outcome = await engine.proceed(request)
            if must_relay or upstream.answered_by == "relay" or not is_unable(kind, outcome):
                return outcome
            engine.run.set_aside()
        return await self._own_answer(request, kind, engine)

    async def _kind(self, request: Request) -> Kind | None:
        """Return how *request* names a compaction; None if it is no request for one."""
        if request.purpose == "compact":
            return "endpoint"
        if request.api != responses.API or request.body.rfind(TRIGGER.encode(), -TAIL) < 0:
            return None
        located = await self._reader.located(responses, request.tenant, request.body)
        spans = located.scan.spans
        if not spans or not is_trigger(located.body[slice(*spans[-1])]):
            return None
        return "trigger"

    async def _opened(self, request: Request) -> OpenedBody:
        """Return the body of *request* without items of ours, and their indexes."""
        if request.api != responses.API or PREFIX.encode() not in request.body:
            return OpenedBody(request.body)
        key = self._records.item_key()
        return await offload(len(request.body), open_items, request.body, key, self._reader.most)

    async def _own_answer(self, request: Request, kind: Kind, engine: Planning) -> Answer:
        """Return a compaction of our own, with a model's summary if one is ready."""
        measured = await engine.measure(request, ASSUMED_WINDOW)
        opened = await self._opened(engine.run.request)
        parsed, envelope = measured.parsed, measured.parsed.envelope
        count = self._reader.count(measured.known.route.encoding, measured.known.route.model)
        size = load_of(len(parsed.body), len(parsed.items))
        summary = NO_SUMMARY
        if measured.prefix_hashes:
            ready = await self._compactions.summed_up(measured)
            if ready is not None:
                summary, _ = ready
        ours = frozenset(opened.ours)
        compaction = await offload(size, compact, measured, kind, ours, self._shares, count, summary.text)
        item = compaction_item(compaction, self._records.item_key())
        model = request.path_model or envelope.model
        body, content_type = response(
            compaction, item, kind, parsed.body, model, int(self._now()), stream=envelope.stream
        )
        overhead = engine.run.overhead_so_far()
        report = report_of_local(
            measured,
            window=measured.known.window or ASSUMED_WINDOW,
            tokens_before=compaction.input_tokens,
            summary_tokens=summary.tokens_spent,
            overhead_seconds=overhead,
        )
        return Answer(report, LocalReply(body, content_type))


def is_unable(kind: Kind, outcome: Outcome) -> bool:
    """True if *outcome* shows that its upstream makes no compactions."""
    if not isinstance(outcome, Answer):
        return False
    status = outcome.reply.status
    if status in UNSUPPORTED:
        return True
    return kind == "trigger" and status in REFUSED and b"compaction" in outcome.head


def open_features(parts: FeatureParts) -> list[Feature]:
    """Return the feature for requests for a compaction, and the one that answers from summaries if it is configured."""
    upstreams = {
        upstream.name: UpstreamCompaction(upstream.compaction, upstream.compacts)
        for upstream in parts.settings.upstreams
        if isinstance(upstream, UpstreamWithCompaction)
    }
    features: list[Feature] = [
        ClientCompaction(
            parts.reader, parts.store.records, parts.records, parts.resolve, parts.shares, time.time, upstreams
        )
    ]
    if answers_from_summaries(parts.settings):
        features.append(SummaryAnswers(parts.records, parts.reader, parts.shares, time.time))
    return features
