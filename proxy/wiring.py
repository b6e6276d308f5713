"""From settings to what works by them: the engine, the listings, and the plain values that the shells get."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cachetools import LRUCache, TTLCache

from proxy import caches
from proxy import settings as configuration
from proxy.core.compaction.prune import KIND_WEIGHTS, DedupRules, PrunePassRules, PruneRules
from proxy.core.compaction.schedule import CompactionRules, EnabledStages
from proxy.core.compaction.truncate import TruncateLimits
from proxy.core.decisions import Policy
from proxy.core.errors import UpstreamUnreachable
from proxy.core.models import Catalogue
from proxy.core.overflow.classify import Classifier
from proxy.core.tokens.budget import Allocation, Buffers, Marks, Shares
from proxy.engine.engine import Engine, EngineSettings
from proxy.engine.features import Feature, Features
from proxy.engine.learned_routes import LearnedRoutes, NoticeCallback, ignore_notice
from proxy.engine.measuring import Measurer, ShrunkTools
from proxy.engine.ports import Reply, Upgradable, Upstream
from proxy.engine.reading import Reader
from proxy.engine.records import CompactionRecords
from proxy.engine.retries import Retries
from proxy.engine.upstream_calls import CallSettings, UpstreamCalls
from proxy.features.cap_results.feature import CapResults
from proxy.features.client_compaction.compact_endpoint import ClientCompaction, UpstreamCompaction
from proxy.features.client_compaction.summary_answer import SummaryAnswers
from proxy.features.context_management.feature import ContextManagement
from proxy.features.history.archive import Archive, ArchiveLimits, Outcome
from proxy.features.history.history import History
from proxy.features.history.recorder import LEAST_SECONDS, HistoryRecorder
from proxy.features.recall.answer import Recall
from proxy.features.recall.session import Limits as RecallLimits
from proxy.server import Limits, ListedUpstream, Models, ServerConfig
from proxy.server.access import Access
from proxy.settings import Settings, Stages
from proxy.store import (
    Store,
)
from proxy.summaries import Jobs
from proxy.tasks import Faults, Tasks
from proxy.tokenizers import Tokenizers
from proxy.upstream import Upstreams
from proxy.upstream_wiring import open_model_headers, open_model_names

if TYPE_CHECKING:
    pass

SHOWN = 100
"""Models that are shown to people at once."""

SIZES = 10_000
ASKED, TOOL_ARRAYS, LEARNED = 50_000, 64, 10_000
"""Bounds of a process's memories: sizes of what stands around items or in their place; places asked of the store,
shrunk tool arrays, routes that overflows taught about."""


def open_engine(
    settings: Settings,
    catalogue: Catalogue,
    tokenizers: Tokenizers,
    store: Store,
    upstream: Upstream,
    notice: NoticeCallback = ignore_notice,
    jobs: Jobs | None = None,
    history: HistoryRecorder | None = None,
    calls: CallSettings | None = None,
    faults: Faults | None = None,
) -> Engine:
    """The engine of *settings*, with caches of its own.

    *notice* is told what traffic teaches of servers; *jobs* write summaries, if there are any; *history* notes what
    becomes of conversations. *faults* of ours are reported there.
    """
    policy, classifier = _policy(settings), Classifier(configuration.overflow_rules(settings))
    faults = faults or Faults()
    reader = Reader(
        tokenizers,
        caches.items(),
        caches.envelopes(),
        caches.LockedCache(SIZES),
        caches.prefixes(),
        policy.tools,
        settings.server.limits.items,
    )
    learned = LearnedRoutes(store.records, LRUCache(LEARNED), LRUCache(ASKED), time.monotonic, notice)
    records = CompactionRecords(reader, store.records, policy, caches.records(), LRUCache(ASKED), jobs)
    features = Features(_features(settings, catalogue, reader, store, records, history, faults))
    shrunk_tools: ShrunkTools = caches.LockedCache(TOOL_ARRAYS)
    mode = settings.compression.mode
    measurer = Measurer(catalogue, reader, store.records, learned, features, policy, mode, shrunk_tools)
    retries = Retries(measurer, learned)
    sending = UpstreamCalls(upstream, catalogue, measurer, retries, classifier, calls or CallSettings(), faults)
    counting = {each.name: each.count_tokens for each in settings.upstreams}
    return Engine(
        catalogue,
        measurer,
        records,
        learned,
        sending,
        retries,
        classifier,
        features,
        EngineSettings(policy, counting),
        time.perf_counter,
        faults,
    )


def windows_status(catalogue: Catalogue, learned: LearnedRoutes, now: float) -> dict[str, list[dict[str, object]]]:
    """What holds for the models that were asked for, and what overflows taught: for people, tokens and seconds.

    *now* is the monotonic second of this process.
    """
    routes = sorted(catalogue.known()[-SHOWN:], key=lambda route: route.name)
    models: list[dict[str, object]] = [
        {
            "upstream": route.upstream,
            "model": route.model,
            "context_window": route.window,
            "max_input_tokens": route.max_input,
            "max_output_tokens": route.max_output,
            "source": route.source,
            "how": route.how,
            "age_seconds": None if route.at is None else round(max(0.0, now - route.at), 1),
        }
        for route in routes
    ]
    return {"models": models, "learned": learned.learned()[:SHOWN]}


def call_settings(config: ServerConfig) -> CallSettings:
    """What is configured of calls that the engine makes."""
    return CallSettings(config.headers_of, config.usage_upstreams, Access(config).check_stored)


class Offline:
    """An upstream that cannot be reached: for commands that plan requests and send none."""

    async def send(self, target: str, *rest: object) -> Reply:
        """Raise ``UpstreamUnreachable``."""
        del rest
        raise UpstreamUnreachable(target, "nothing is sent here")

    async def upgrade(self, target: str, path_qs: str, headers: object) -> Upgradable:
        """Raise ``UpstreamUnreachable``."""
        del path_qs, headers
        raise UpstreamUnreachable(target, "nothing is sent here")


def _policy(settings: Settings) -> Policy:
    wanted = settings.compression
    stages = wanted.stages
    allocation = Allocation(**wanted.allocation.model_dump()) if wanted.allocation.given else None
    rules = CompactionRules(
        Marks(wanted.high_mark, wanted.soft_mark, wanted.lowest),
        _shares(settings),
        EnabledStages(stages.fold.enabled, stages.drop.enabled, stages.clip.enabled, stages.tools.enabled),
        allocation,
        _mild(stages),
        _truncate(stages),
    )
    return Policy(
        rules,
        wanted.lower_output,
        wanted.stored_history,
        economy=wanted.policy == "economy",
        buffers=Buffers(**wanted.buffers.model_dump()),
        tools=configuration.tool_map(settings.tools),
    )


def _shares(settings: Settings) -> Shares:
    wanted = settings.compression.shares
    return Shares(wanted.pins, wanted.digest, wanted.steps, summary=wanted.summary)


def _features(
    settings: Settings,
    catalogue: Catalogue,
    reader: Reader,
    store: Store,
    records: CompactionRecords,
    history: HistoryRecorder | None,
    faults: Faults,
) -> list[Feature]:
    """The optional features that *settings* want, in the order in which they prepare a request."""
    wanted, shares = settings.compression, _shares(settings)
    serving = {each.name: UpstreamCompaction(each.compaction, each.compacts) for each in settings.upstreams}
    features: list[Feature] = [ClientCompaction(reader, store.records, catalogue.resolve, shares, time.time, serving)]
    owned = [each.name for each in settings.upstreams if each.context_management == "own"]
    if owned:
        features.append(ContextManagement(reader, catalogue.resolve, owned))
    limits = _always(wanted.stages)
    if limits is not None:
        features.append(CapResults(reader, limits))
    if wanted.client_compaction == "answer":
        features.append(SummaryAnswers(records, reader, shares, time.time))
    if wanted.recall.enabled:
        limits_of_recall = RecallLimits(wanted.recall.results, wanted.recall.max_tokens)
        features.append(Recall(reader, limits_of_recall, faults))
    if history is not None:
        features.append(history)
    return features


def _mild(stages: Stages) -> PrunePassRules:
    dedup, prune = stages.dedup, stages.prune
    weights = {**KIND_WEIGHTS, **prune.weights}
    return PrunePassRules(
        DedupRules(dedup.exact, dedup.stale_reads, dedup.grep_subsumed, dedup.min_saving) if dedup.enabled else None,
        PruneRules(prune.protect_rounds, prune.protect_tokens, prune.min_saving, weights) if prune.enabled else None,
    )


def _truncate(stages: Stages) -> TruncateLimits | None:
    wanted = stages.truncate
    return TruncateLimits(wanted.max_lines, wanted.max_bytes, wanted.share) if wanted.enabled else None


def _always(stages: Stages) -> TruncateLimits | None:
    wanted = stages.truncate
    return TruncateLimits(wanted.max_lines, wanted.max_bytes) if wanted.enabled and wanted.always else None


def open_models(settings: Settings, catalogue: Catalogue, upstream: Upstreams) -> Models:
    """The merged lists of models, with windows by *catalogue*."""

    def figures(model: str) -> Mapping[str, int]:
        """A model's limits under the names that clients read them by."""
        route = catalogue.resolve(model)
        told = {
            "context_length": route.window,
            "max_model_len": route.window,
            "max_input_tokens": route.max_input or route.window,
            "max_output_tokens": route.max_output,
        }
        return {name: value for name, value in told.items() if value is not None}

    places = [ListedUpstream(each.name, upstream.speaks(each.name)) for each in settings.upstreams]
    named = [rule.name for rule in settings.models if not {"*", "?", "["}.intersection(rule.name)]
    return Models(upstream, places, settings.default_upstream().name, named, figures)


def server_config(settings: Settings) -> ServerConfig:
    """What the server needs to know, as plain values."""
    server, limits = settings.server, settings.server.limits
    return ServerConfig(
        default_upstream=settings.default_upstream().name,
        version=configuration.version(),
        access_keys=tuple(key.get_secret_value() for key in server.access_keys),
        admin_key=server.admin_key.get_secret_value() if server.admin_key else None,
        websockets=settings.server.websockets == "relay",
        keyed_upstreams=frozenset(upstream.name for upstream in settings.upstreams if upstream.carries_key),
        usage_upstreams=frozenset(upstream.name for upstream in settings.upstreams if upstream.include_usage),
        relay=server.relay,
        origins=frozenset(server.origins),
        open_metrics=server.open_metrics,
        hosts=frozenset(name.lower() for name in (server.host, *server.hosts)),
        headers_of=open_model_headers(settings),
        name_of=open_model_names(settings),
        limits=replace(
            Limits(),
            body=limits.body,
            inflation=limits.inflation,
            in_flight_bytes=limits.in_flight_bytes,
            in_flight=limits.in_flight,
            header=limits.headers,
            head=limits.head,
            fields=limits.fields,
            connections=limits.connections,
        ),
    )


NOTED: Final = 10_000
"""Conversations that were noted a moment ago, of which a process remembers that."""

ARCHIVED: Final = 100_000
"""Originals that a process remembers to have written: about 200 bytes each."""

DAY: Final = 86_400.0


def open_archive(
    settings: Settings, store: Store, tasks: Tasks, observe: Callable[[Outcome, int], None]
) -> Archive | None:
    """What keeps originals as *settings* have it; ``None`` where none are kept."""
    wanted = settings.archive
    if not wanted.enabled:
        return None
    terms = ArchiveLimits(wanted.days * DAY, wanted.max_item, wanted.queue)
    # Known for an hour: what the store lost meanwhile is written again, and what it has lives on.
    return Archive(store.archive, terms, TTLCache(ARCHIVED, 3600.0), tasks.spawn, observe, time.monotonic)


def open_history_recorder(store: Store, archive: Archive | None) -> HistoryRecorder:
    """What notes what becomes of conversations."""
    recent: TTLCache[tuple[str, bytes], bool] = TTLCache(NOTED, LEAST_SECONDS)
    return HistoryRecorder(store.conversations, recent, time.time, archive)


def open_history(settings: Settings, store: Store) -> History:
    """What tells callers of their conversations."""
    compacts, summaries = settings.compression.mode == "on", settings.summaries.mode
    return History(store.conversations, store.archive, time.time, compacts=compacts, summaries=summaries)
