"""Engines of real parts for tests, and what they plan."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import Phase
from msgspec import structs

from proxy.core.apis.base import ApiFormat
from proxy.core.compaction.prune import DedupRules, PrunePassRules, PruneRules
from proxy.core.compaction.record import CompactionRecord, load
from proxy.core.compaction.schedule import CompactionTarget
from proxy.core.compaction.stages import CompactionRules, EnabledStages
from proxy.core.conversation import UNREAD, Item
from proxy.core.decisions import CountedView, FinalDecision, KnownRoute, Policy, Reject, TooLossy
from proxy.core.errors import UllageError
from proxy.core.models import Catalogue, ModelRule, Route
from proxy.core.overflow.classify import Classifier
from proxy.core.report import Report
from proxy.core.request import Mode, Options, Request
from proxy.core.tokens.budget import Marks, Shares
from proxy.core.tokens.counting import InjectedRules
from proxy.core.tool_calls import facts_of
from proxy.core.tool_table import ToolMap
from proxy.core.written_calls import as_result
from proxy.engine.engine import Engine
from proxy.engine.features import Feature, Features
from proxy.engine.learned_routes import KnownRoutes, LearnedRoutes, prepare_nothing
from proxy.engine.measuring import Measurer
from proxy.engine.ports import Clock, Records, Reply, Summaries, Upgradable, Upstream
from proxy.engine.quick_check import QuickCheck
from proxy.engine.reading import Reader, without_facts
from proxy.engine.records import CompactionRecords
from proxy.engine.retries import Retries
from proxy.engine.run import report_of
from proxy.engine.token_counts import CountedBy, CountTokens
from proxy.engine.upstream_calls import CallSettings, UpstreamCalls
from proxy.settings import injected_rules, overflow_rules, tool_map
from proxy.settings.injected import InjectedTexts
from proxy.settings.tools import Tools
from proxy.tasks import Faults, Tasks, ignore_failure, ignore_warning
from proxy.tokenizers import Tokenizers

Message = dict[str, Any]

TENANT = b"t" * 32
WINDOW = 4096
POLICY = Policy(CompactionRules(Marks(), Shares(), EnabledStages()))
SPARING_RULES = replace(
    POLICY.rules, prune_pass=PrunePassRules(DedupRules(), PruneRules(protect_tokens=5_000, min_saving=5_000))
)
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""For properties of whole conversations: shrinking one takes minutes, what was drawn is shown as it is."""
_DECODER = json.JSONDecoder()


@functools.cache
def tokenizers() -> Tokenizers:
    """The real tokenizers, loaded once."""
    return Tokenizers()


@functools.cache
def classifier() -> Classifier:
    """The classifier with the packaged rules."""
    return Classifier(overflow_rules(()))


def count_tokens(text: str) -> int:
    """Tokens of *text* in o200k_base."""
    return tokenizers().count("o200k_base", text)


@functools.cache
def tool_map_of_package() -> ToolMap:
    """The packaged table of tools."""
    return tool_map(Tools())


@functools.cache
def packaged_marks() -> InjectedRules:
    """The packaged marks of injected texts."""
    return injected_rules(InjectedTexts())


class DictRecords:
    """Records in dictionaries: the smallest store that does all that the engine needs."""

    def __init__(self) -> None:
        self.values: dict[tuple[bytes, bytes, str, bytes], bytes] = {}
        self.routes: dict[tuple[bytes, str], bytes] = {}
        self.requested: set[tuple[bytes, bytes]] = set()

    def prefix_key(self, tenant: bytes) -> bytes:
        return hashlib.sha256(b"key of " + tenant).digest()

    def item_key(self) -> bytes:
        return hashlib.sha256(b"key of items").digest()

    async def newest(
        self, tenant: bytes, root_hash: bytes, route: str, prefix_hashes: Sequence[bytes]
    ) -> tuple[int, bytes] | None:
        keys = [(tenant, root_hash, route, prefix_hash) for prefix_hash in prefix_hashes]
        return next(((i, self.values[key]) for i, key in enumerate(keys) if key in self.values), None)

    async def save(
        self, tenant: bytes, root_hash: bytes, route: str, prefix_hash: bytes, record: bytes, *, replace: bool = False
    ) -> bytes:
        key = (tenant, root_hash, route, prefix_hash)
        if replace:
            self.values[key] = record
        return self.values.setdefault(key, record)

    def reachable(self) -> bool:
        return True

    def version(self) -> None:
        return None

    async def pop_request(self, tenant: bytes, root_hash: bytes) -> str:
        is_requested = (tenant, root_hash) in self.requested
        self.requested.discard((tenant, root_hash))
        return "now" if is_requested else ""

    async def read_route(self, tenant: bytes, route: str) -> bytes | None:
        return self.routes.get((tenant, route))

    def save_route(self, tenant: bytes, route: str, value: bytes) -> None:
        self.routes[tenant, route] = value

    def records(self) -> list[CompactionRecord]:
        """Every record, that of the earliest boundary first."""
        records = [record for value in self.values.values() if (record := load(value, 10**6))]
        return sorted(records, key=lambda record: record.compaction.boundary)


class Unsent:
    """An upstream that nothing may be sent to."""

    async def send(self, target: str, *rest: object) -> Reply:
        raise AssertionError(f"something was sent to {target}")

    async def upgrade(self, target: str, path_qs: str, headers: object) -> Upgradable:
        raise AssertionError(f"a tunnel to {target} was wanted")


@dataclass(frozen=True)
class Planned:
    """A decision of the planner, for tests to look at: what would be sent, its report, or why it is refused."""

    decision: FinalDecision
    report: Report

    @property
    def view(self) -> CountedView:
        assert not isinstance(self.decision, TooLossy)
        assert isinstance(self.decision.view, CountedView)
        return self.decision.view

    @property
    def body(self) -> bytes:
        return self.view.body

    @property
    def tokens(self) -> int:
        return self.view.tokens

    @property
    def output(self) -> int | None:
        return self.view.lowered_output

    @property
    def error(self) -> UllageError | None:
        return self.decision.error if isinstance(self.decision, Reject) else None


FeaturesOf = Callable[["Replica"], Sequence[Feature]]
"""Makes the features of a replica, out of its reader, records, catalogue and faults."""


def without_features(replica: Replica) -> Sequence[Feature]:
    """No feature at all: what the engine does by itself."""
    del replica
    return ()


class Replica:
    """One replica: an engine with caches of its own over records that it may share."""

    def __init__(
        self,
        records: Records | None = None,
        policy: Policy = POLICY,
        summaries: Summaries | None = None,
        upstream: Upstream | None = None,
        catalogue: Catalogue | None = None,
        mode: Mode = "on",
        counting: Mapping[str, CountedBy] | None = None,
        clock: Clock = time.perf_counter,
        calls: CallSettings | None = None,
        features: FeaturesOf = without_features,
        faults: Faults | None = None,
    ) -> None:
        self.book = records or DictRecords()
        self.records: MutableMapping[tuple[str, bytes], CompactionRecord] = {}
        self.policy = policy = structs.replace(policy, tools=tool_map_of_package())
        self.reader = reader = Reader(tokenizers(), {}, {}, {}, {}, tool_map_of_package(), injected=packaged_marks())
        self.learned = LearnedRoutes(self.book, {}, {}, time.monotonic, ignore_warning)
        self.catalogue = catalogue = catalogue or Catalogue([ModelRule("*", "stub")], {}, "stub")
        self.faults = faults = faults or Faults()
        self.hooks = hooks = Features(features(self))
        routes = KnownRoutes(catalogue, self.learned, time.monotonic, prepare_nothing)
        self.measurer = Measurer(routes, reader, self.book, self.learned, hooks, policy, mode, {})
        self.compactions = CompactionRecords(
            reader, self.book, policy, self.records, {}, summaries, Tasks(ignore_failure).spawn
        )
        retries = Retries(self.measurer, self.learned)
        settings = calls or CallSettings()
        self.calls = UpstreamCalls(
            upstream or Unsent(), catalogue, self.measurer, retries, classifier(), settings, faults
        )
        self.engine = Engine(
            catalogue,
            QuickCheck(routes, policy, mode),
            self.measurer,
            self.compactions,
            self.learned,
            self.calls,
            retries,
            classifier(),
            hooks,
            CountTokens(self.measurer, self.learned, self.calls, counting or {}),
            policy,
            clock,
            faults,
        )

    async def plan(
        self,
        body: bytes,
        window: int,
        target: CompactionTarget = CompactionTarget(),  # noqa: B008 - frozen
        *,
        tenant: bytes = TENANT,
        options: Options = Options(),  # noqa: B008 - frozen
        factor: float = 1.0,
        max_input: int | None = None,
        model: str = "house-model",
        api: str = "chat",
    ) -> Planned:
        """The plan for *body* in a *window* of so many tokens."""
        request = Request(api, body, tenant, "r", options)
        route = Route("stub", model, window, None, "o200k_base", "configured", max_input=max_input)
        known = KnownRoute(route, window, "configured", None, factor)
        located = self.measurer.locate(request)
        target = structs.replace(target, lower_output=self.policy.lower_output)
        measured = await self.measurer.count(request, located, known, window, target)
        decision = await self.engine._decide(measured)
        if isinstance(decision, TooLossy):
            return Planned(decision, Report("r", api))
        return Planned(decision, report_of(decision.view, self.policy))

    async def view(self, messages: Sequence[Message], window: int, **members: Any) -> list[bytes]:
        """The messages that go upstream for *messages*, as their bytes."""
        plan = await self.plan(chat_body(messages, **members), window)
        assert plan.error is None, plan.error
        return message_slices(plan.body)


def chat_body(messages: Sequence[Message], **members: Any) -> bytes:
    """A request's bytes as a client's JSON library writes them."""
    return json.dumps({"model": "gpt-4o-mini", "messages": messages, **members}, separators=(",", ":")).encode()


def read_one(api_format: ApiFormat, raw: bytes, count: Callable[[str], int], tools: ToolMap) -> Item:
    """The item of one slice with the facts of its calls and results. Raises ``InvalidRequest``."""
    [item] = without_facts([api_format.read_item(raw, count)], [raw], count, tools)
    if item.facts is not UNREAD:
        return item
    text = api_format.read_item_text(raw)
    if item.written_result is not None:
        text = as_result(raw, text, item.written_result)
    [facts] = facts_of([text], tools.calls, count)
    return structs.replace(item, facts=facts)


def message_slices(body: bytes) -> list[bytes]:
    """The bytes of each message of *body*."""
    text = raw_members(body)["messages"].decode()
    slices, at = [], _skip(text, 1)
    while text[at] != "]":
        _, end = _DECODER.raw_decode(text, at)
        slices.append(text[at:end].encode())
        at = _skip(text, end)
    return slices


def raw_members(body: bytes) -> dict[str, bytes]:
    """The members of a JSON object that is known to be valid, as their bytes."""
    text = body.decode()
    members, at = {}, _skip(text, _skip(text, 0) + 1)
    while text[at] != "}":
        key, end = _DECODER.raw_decode(text, at)
        start = _skip(text, end)
        _, end = _DECODER.raw_decode(text, start)
        members[key] = text[start:end].encode()
        at = _skip(text, end)
    return members


def _skip(text: str, at: int) -> int:
    """Past white space and separators."""
    while text[at] in " \t\r\n,:":
        at += 1
    return at
