"""From settings to what works by them: the engine, the listings, and the plain values that the shells get."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cachetools import LRUCache, TTLCache

from proxy import caches
from proxy import settings as configuration
from proxy.core.budget.catalogue import Catalogue
from proxy.core.budget.figures import Buffers, Marks, Shares
from proxy.core.budget.shares import Allocation
from proxy.core.compaction.prune import KIND_WEIGHTS, DedupRules, PrunePassRules, PruneRules
from proxy.core.compaction.schedule import CompactionRules, EnabledStages
from proxy.core.compaction.truncate import TruncateLimits
from proxy.core.decisions import Policy
from proxy.core.overflow.classify import Classifier
from proxy.engine.engine import Engine
from proxy.engine.fitting import Fitter
from proxy.engine.learned_routes import LearnedRoutes, Notice, unnoticed
from proxy.engine.reading import Reader
from proxy.features.client_compaction.compact_endpoint import CompactEndpoint, UpstreamCompaction
from proxy.features.client_compaction.summary_answer import SummaryAnswer
from proxy.features.context_management.feature import ContextManagement
from proxy.features.history.archive import Archive, ArchiveLimits, Outcome
from proxy.features.history.history import History
from proxy.features.history.recorder import LEAST_SECONDS, HistoryRecorder
from proxy.features.recall.session import Limits as RecallLimits
from proxy.features.recall.session import Recalling
from proxy.server import Limits, ListedUpstream, Models, ServerConfig
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

SIZES = 10_000
ASKED, TOOL_ARRAYS, LEARNED = 50_000, 64, 10_000
"""Bounds of a process's memories: sizes of what stands around items or in their place; places asked of the store,
shrunk tool arrays, routes that overflows taught about."""


def open_engine(
    settings: Settings,
    catalogue: Catalogue,
    tokenizers: Tokenizers,
    store: Store,
    notice: Notice = unnoticed,
    jobs: Jobs | None = None,
    chronicle: HistoryRecorder | None = None,
    faults: Faults | None = None,
) -> Engine:
    """The conductor of *settings*, with memories of its own.

    *notice* is told what traffic teaches of servers; *jobs* write summaries, where there are any; *chronicle* notes
    what becomes of conversations. *faults* of ours are reported there.
    """
    wanted = settings.compression
    marks = Marks(wanted.high_mark, wanted.soft_mark, wanted.lowest)
    buffers = Buffers(**wanted.buffers.model_dump())
    shares = Shares(wanted.shares.pins, wanted.shares.digest, wanted.shares.steps, summary=wanted.shares.summary)
    stages = wanted.stages
    rungs = EnabledStages(stages.fold.enabled, stages.drop.enabled, stages.clip.enabled, stages.tools.enabled)
    tools = configuration.tool_map(settings.tools)
    outlines, prefixes = caches.envelopes(), caches.prefixes()
    most = settings.server.limits.items
    reader = Reader(tokenizers, caches.items(), outlines, caches.LockedCache(SIZES), prefixes, tools, most)
    allocation = Allocation(**wanted.allocation.model_dump()) if wanted.allocation.given else None
    rules = CompactionRules(marks, shares, rungs, allocation, _mild(stages), _truncate(stages))
    economy, always = wanted.policy == "economy", _always(stages)
    recall = wanted.recall
    policy = Policy(
        rules, wanted.lower_output, wanted.stored_history, economy, buffers, always, recall.enabled, reader.tools
    )
    lessons = LearnedRoutes(store, LRUCache(LEARNED), LRUCache(ASKED), time.monotonic, notice)
    classifier = Classifier(configuration.overflow_rules(settings))
    fitter = Fitter(
        reader, store, policy, caches.records(), LRUCache(ASKED), caches.LockedCache(TOOL_ARRAYS), lessons, jobs
    )
    counting = {upstream.name: upstream.count_tokens for upstream in settings.upstreams}
    serving = {each.name: UpstreamCompaction(each.compaction, each.compacts) for each in settings.upstreams}
    owned = [each.name for each in settings.upstreams if each.context_management == "own"]
    compacting = CompactEndpoint(reader, store, shares, time.time, serving)
    own = SummaryAnswer(fitter.events, reader, shares, time.time)
    return Engine(
        catalogue,
        fitter,
        wanted.mode,
        lessons,
        time.perf_counter,
        classifier,
        counting,
        compacting=compacting,
        managing=ContextManagement(reader, owned),
        own=own if wanted.client_compaction == "answer" else None,
        recalling=Recalling(reader, RecallLimits(recall.results, recall.max_tokens)) if recall.enabled else None,
        answered=chronicle.answered if chronicle else None,
        faults=faults,
    )


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
    return Archive(store.originals, terms, TTLCache(ARCHIVED, 3600.0), tasks.spawn, observe, time.monotonic)


def open_history_recorder(store: Store, archive: Archive | None) -> HistoryRecorder:
    """What notes what becomes of conversations."""
    recent: TTLCache[tuple[str, bytes], bool] = TTLCache(NOTED, LEAST_SECONDS)
    return HistoryRecorder(store.register, recent, time.time, archive)


def open_history(settings: Settings, store: Store) -> History:
    """What tells callers of their conversations."""
    compacts, summaries = settings.compression.mode == "on", settings.summaries.mode
    return History(store.register, store.originals, time.time, compacts=compacts, summaries=summaries)
