"""Builds the engine and the server's values from the settings: nothing else builds them.

Features are opened by their folders, see ``features.opening``.

The parts that call upstreams (catalogue, connections, probes, summarisers) are built in ``upstream_wiring``, which the
commands that ask a server use without an engine. Both together would be a file of more than 500 lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from cachebox import LRUCache

from proxy import caches
from proxy import settings as configuration
from proxy.core.compaction.prune import KIND_WEIGHTS, DedupRules, PrunePassRules, PruneRules
from proxy.core.compaction.stages import CompactionRules, EnabledStages
from proxy.core.compaction.truncate import TruncateLimits
from proxy.core.decisions import Policy
from proxy.core.http_headers import no_headers
from proxy.core.models import Catalogue, Route
from proxy.core.overflow.classify import Classifier
from proxy.core.tokens.allocation import Allocation
from proxy.core.tokens.budget import Buffers, Marks, Shares
from proxy.core.tool_table import is_glob
from proxy.engine.engine import Engine
from proxy.engine.features import Feature, Features
from proxy.engine.learned_routes import KnownRoutes, LearnedRoutes, prepare_nothing
from proxy.engine.measuring import Measurer, ShrunkTools
from proxy.engine.ports import Upstream
from proxy.engine.quick_check import QuickCheck
from proxy.engine.reading import Reader
from proxy.engine.records import CompactionRecords
from proxy.engine.retries import Retries
from proxy.engine.token_counts import CountTokens
from proxy.engine.upstream_calls import CallSettings, UpstreamCalls
from proxy.features.opening import FeatureParts, open_features
from proxy.server import Limits, Models, ServerConfig
from proxy.server.access import Access
from proxy.settings import Settings, Stages
from proxy.store import Store, open_store
from proxy.summaries import Jobs
from proxy.tasks import Faults, Spawn, Tasks, Warn, ignore_failure, ignore_warning
from proxy.telemetry.exports import Exports, open_budget_log, open_traces
from proxy.tokenizers import Tokenizers
from proxy.upstream import Upstreams
from proxy.upstream_wiring import open_model_headers, open_model_names

MAX_SHOWN = 100
"""Models listed at once in the operator's status."""

CACHED_SIZES = 10_000
"""Token counts of envelope members, and of texts that replace items."""

CACHED_LOOKUPS = 50_000
"""Boundaries, or routes, that were looked up in the store a moment ago."""

CACHED_TOOL_ARRAYS = 64
"""Shrunk tool arrays: tens of kilobytes each."""

CACHED_ROUTES = 10_000
"""Routes whose learned limits are cached, by tenant."""


def open_engine(
    settings: Settings,
    catalogue: Catalogue,
    tokenizers: Tokenizers,
    store: Store,
    upstream: Upstream,
    warn: Warn = ignore_warning,
    jobs: Jobs | None = None,
    observers: Sequence[Feature] = (),
    calls: CallSettings | None = None,
    faults: Faults | None = None,
    spawn: Spawn = Tasks(ignore_failure).spawn,  # noqa: B008 - it has no task of its own
    prepare: Callable[[str], None] = prepare_nothing,
) -> Engine:
    """Build the engine of *settings*, with caches of its own.

    *warn* logs what traffic teaches of servers. *jobs* write summaries, if any are configured. *observers* are
    features that only record which views were answered. *faults* reports faults of our own. *spawn* starts background
    tasks. *prepare* loads the vocabulary of an encoding that a request's model has.
    """
    policy, mode, faults = policy_of(settings), settings.compression.mode, faults or Faults()
    reader = _open_reader(settings, tokenizers, policy)
    learned = LearnedRoutes(store.records, LRUCache(CACHED_ROUTES), LRUCache(CACHED_LOOKUPS), time.monotonic, warn)
    records = CompactionRecords(reader, store.records, policy, caches.records(), LRUCache(CACHED_LOOKUPS), jobs, spawn)
    parts = FeatureParts(settings, store, reader, records, catalogue.resolve, _shares(settings), faults, spawn)
    features = Features([*open_features(parts), *observers])
    shrunk_tools: ShrunkTools = LRUCache(CACHED_TOOL_ARRAYS)
    routes = KnownRoutes(catalogue, learned, time.monotonic, prepare)
    measurer = Measurer(routes, reader, store.records, learned, features, policy, mode, shrunk_tools)
    retries = Retries(measurer, learned)
    classifier = Classifier(configuration.overflow_rules(settings.overflow_rules))
    sending = UpstreamCalls(upstream, catalogue, measurer, retries, classifier, calls or CallSettings(), faults)
    counted_by = {entry.name: entry.count_tokens for entry in settings.upstreams}
    return Engine(
        catalogue,
        quick_check=QuickCheck(routes, policy, mode),
        measurer=measurer,
        records=records,
        learned=learned,
        calls=sending,
        retries=retries,
        classifier=classifier,
        features=features,
        counts=CountTokens(measurer, learned, sending, counted_by),
        policy=policy,
        clock=time.perf_counter,
        faults=faults,
    )


def _open_reader(settings: Settings, tokenizers: Tokenizers, policy: Policy) -> Reader:
    return Reader(
        tokenizers,
        items=caches.items(),
        envelopes=caches.envelopes(),
        sizes=LRUCache(CACHED_SIZES),
        prefixes=caches.prefixes(),
        tools=policy.tools,
        most=settings.server.limits.items,
        injected=configuration.injected_rules(settings.injected),
    )


def open_exports(settings: Settings, worker: int) -> Exports:
    """Open the outputs that *settings* configure beside the log and the metrics; *worker* is the number of this
    process.

    Raises ``CannotExport``.
    """
    configured = settings.telemetry
    budget_log = open_budget_log(
        configured.budget_log.path, configured.budget_log.max_bytes, configured.budget_log.files, worker
    )
    if not configured.traces:
        return Exports(budget_log)
    return Exports(budget_log, open_traces(configuration.version()))


def windows_status(catalogue: Catalogue, learned: LearnedRoutes, now: float) -> dict[str, list[dict[str, object]]]:
    """Return the windows in force, and those learned from traffic, for the operator's status.

    Windows are in tokens, ages in seconds. *now* is this process's monotonic time.
    """
    routes = sorted(catalogue.cached_routes()[-MAX_SHOWN:], key=lambda route: route.name)
    models = [_window_status(route, now) for route in routes]
    return {"models": models, "learned": learned.shown_windows()[:MAX_SHOWN]}


def _window_status(route: Route, now: float) -> dict[str, object]:
    age: float | None = None
    if route.window_since is not None:
        age = round(max(0.0, now - route.window_since), 1)
    return {
        "upstream": route.upstream,
        "model": route.model,
        "context_window": route.window,
        "max_input_tokens": route.max_input,
        "max_output_tokens": route.max_output,
        "source": route.source,
        "how": route.window_origin,
        "age_seconds": age,
    }


def call_settings(config: ServerConfig) -> CallSettings:
    """Return the settings of the calls that the engine makes."""
    access = Access(config)
    headers_of, check_stored = None, None
    if config.headers_of is not no_headers:
        headers_of = config.headers_of
    if access.shares_keys:
        check_stored = access.check_stored
    return CallSettings(headers_of, config.usage_upstreams, check_stored)


def policy_of(settings: Settings) -> Policy:
    """Return the rules of compaction. Reads the table of tools: call it once, or in a thread."""
    configured = settings.compression
    stages = configured.stages
    allocation = None
    if configured.allocation.is_configured:
        allocation = Allocation(**dict(configured.allocation))
    rules = CompactionRules(
        Marks(configured.high_mark, configured.soft_mark, configured.effective_low_mark, configured.low_mark_chats),
        _shares(settings),
        EnabledStages(
            minify=configured.minify,
            fold=stages.fold.enabled,
            drop=stages.drop.enabled,
            clip=stages.clip.enabled,
            tools=stages.tools.enabled,
        ),
        allocation,
        _prune_pass(stages),
        _truncate_limits(stages),
    )
    return Policy(
        rules,
        configured.lower_output,
        configured.stored_history,
        economy=configured.policy == "economy",
        buffers=Buffers(**dict(configured.buffers)),
        tools=configuration.tool_map(settings.tools),
        sizes={str(size): tokens for size, tokens in configured.sizes.items()},
        reads_calls=settings.telemetry.budget_log.path is not None,
    )


def _shares(settings: Settings) -> Shares:
    configured = settings.compression.shares
    return Shares(configured.pins, configured.digest, configured.steps, summary=configured.summary)


def _prune_pass(stages: Stages) -> PrunePassRules:
    dedup, prune = stages.dedup, stages.prune
    dedup_rules, prune_rules = None, None
    if dedup.enabled:
        dedup_rules = DedupRules(dedup.exact, dedup.stale_reads, dedup.grep_subsumed, dedup.min_saving)
    if prune.enabled:
        weights = {**KIND_WEIGHTS, **prune.weights}
        prune_rules = PruneRules(prune.protect_rounds, prune.protect_tokens, prune.min_saving, weights)
    return PrunePassRules(dedup_rules, prune_rules)


def _truncate_limits(stages: Stages) -> TruncateLimits | None:
    if not stages.truncate.enabled:
        return None
    return TruncateLimits(max_bytes=stages.truncate.max_bytes, share=stages.truncate.share)


async def open_configured_store(settings: Settings, tasks: Tasks, warn: Warn, *, is_fallback: bool) -> Store:
    """Return the configured store; *is_fallback* if it replaces one that cannot be used.

    Raises the errors of ``open_store``.
    """
    store = settings.store
    other_keys = [key.get_secret_value().encode() for key in store.other_keys]
    key = None
    if store.key is not None:
        key = store.key.get_secret_value().encode()
    return await open_store(
        store.url,
        directory=store.path,
        key=key,
        others=other_keys,
        instead=is_fallback,
        spawn=tasks.spawn,
        warn=warn,
    )


def open_models(settings: Settings, catalogue: Catalogue, upstream: Upstreams) -> Models:
    """Build the merged list of all upstreams' models, with windows from *catalogue*."""

    def limits(model: str) -> Mapping[str, int]:
        """Return a model's limits under the names that clients look for: OpenRouter's, vLLM's and LiteLLM's."""
        route = catalogue.resolve(model)
        by_name = {
            "context_length": route.window,
            "max_model_len": route.window,
            "max_input_tokens": route.max_input or route.window,
            "max_output_tokens": route.max_output,
        }
        return {name: value for name, value in by_name.items() if value is not None}

    listed = {entry.name: upstream.speaks(entry.name) for entry in settings.upstreams}
    configured = [rule.name for rule in settings.models if not is_glob(rule.name)]
    return Models(upstream, listed, settings.default_upstream().name, configured, limits)


def server_config(settings: Settings) -> ServerConfig:
    """Return the server's settings as plain values."""
    server, limits, admin_key = settings.server, settings.server.limits, None
    # Not by ``model_dump``, for which pydantic would build a serializer.
    server_limits = {name: value for name, value in limits if name not in ("headers", "items")}
    if server.admin_key is not None:
        admin_key = server.admin_key.get_secret_value()
    return ServerConfig(
        default_upstream=settings.default_upstream().name,
        gemini_upstream=settings.gemini_upstream().name,
        version=configuration.version(),
        access_keys=tuple(key.get_secret_value() for key in server.access_keys),
        admin_key=admin_key,
        websockets=settings.server.websockets,
        keyed_upstreams=frozenset(upstream.name for upstream in settings.upstreams if upstream.carries_key),
        usage_upstreams=frozenset(upstream.name for upstream in settings.upstreams if upstream.include_usage),
        relay=server.relay,
        origins=frozenset(server.origins),
        open_metrics=server.open_metrics,
        hosts=frozenset(name.lower() for name in (server.host, *server.hosts)),
        headers_of=open_model_headers(settings),
        name_of=open_model_names(settings),
        limits=Limits(header=limits.headers, **server_limits),
    )
