"""Builds what reaches upstreams from the settings: connections, the model catalogue, probes and summarisers."""

from __future__ import annotations

import hmac
import random
import time
from collections.abc import Mapping
from typing import Final

from cachetools import LRUCache

from proxy import caches
from proxy import settings as configuration
from proxy.core.models import COMPRESS, Catalogue, ModelLimits, ModelRule, WindowLookup, read_published_table
from proxy.engine.ports import Records
from proxy.server import HeadersOf, NameOf, no_headers, same_name, tenants_of
from proxy.settings import Settings
from proxy.store import Breaker, Patience, Store
from proxy.summaries import (
    JobCaches,
    Jobs,
    OnNote,
    OnReport,
    SpendingLimits,
    SummaryConfig,
    Writer,
    credentials,
    ignore_note,
    is_subscription_key,
    load_prompts,
)
from proxy.tasks import Tasks
from proxy.tokenizers import Tokenizers
from proxy.upstream import Bridge, Bridged, OnWindows, Probes, SharedProbeCache, Target, Timeouts, Upstreams

NO_UPSTREAM: Final = "-"
"""The upstream of every model if none is configured: then nothing is served, but models can be listed."""

ANTHROPIC: Final = "anthropic"
OWN_ADDRESSES: Final = {ANTHROPIC: "https://api.anthropic.com/v1"}
"""Base URLs of providers that speak one of our other APIs: such requests are sent there without LiteLLM.

https://docs.claude.com/en/api/overview
"""


SUMMARISER: Final = Patience(failures=3, within=None, first_pause=60.0, longest_pause=1800.0, lost=300.0)
"""After three failures in a row a summariser is not asked for a minute at first."""

CACHED_TENANTS, CACHED_PASSAGES = 10_000, 50_000
"""Bounds of the caches for summary jobs, by tenant and by passage of a conversation."""


def open_catalogue(settings: Settings, told: WindowLookup | None = None) -> Catalogue:
    """The catalogue of *settings* and of the published table, 3 MB that are read here: call it in a thread."""
    table = read_published_table(
        {
            name: ModelLimits(None, facts.max_input_tokens, facts.max_output_tokens, facts.price_tier)
            for name, facts in configuration.model_table().items()
        }
    )
    default = settings.default_upstream().name if settings.upstreams else NO_UPSTREAM
    rules = [
        ModelRule(
            rule.name,
            rule.upstream,
            rule.context_window,
            rule.max_output_tokens,
            rule.tokenizer,
            rule.unknown_window if isinstance(rule.unknown_window, int) else None,
            rule.max_input_tokens,
            tuple(COMPRESS if step == "compress" else step.fallback for step in rule.overflow),
            rule.model,
        )
        for rule in settings.models
    ]
    return Catalogue(rules, table, default, told)


def open_upstream(settings: Settings, bridge: Bridge | None = None) -> Upstreams:
    """Build the upstreams that speak our APIs, and those behind *bridge*. Call it in a running loop."""
    targets = [
        Target(
            upstream.name,
            upstream.base_url or OWN_ADDRESSES[upstream.provider],
            _key(upstream),
            api_key_header=upstream.key_header,
            headers=_headers(upstream),
            timeouts=_timeouts(upstream),
        )
        for upstream in settings.upstreams
        if not upstream.bridged or upstream.provider in OWN_ADDRESSES
    ]
    return Upstreams(targets, bridge)


def open_bridge(settings: Settings, tasks: Tasks) -> Bridge:
    """Build the bridge to the upstreams that are reached through LiteLLM."""
    targets = [
        Bridged(
            upstream.name,
            upstream.provider,
            _bridged_address(upstream),
            _key(upstream),
            upstream.has_ambient_credentials,
            _headers(upstream),
            upstream.options,
            _timeouts(upstream),
        )
        for upstream in settings.upstreams
        if upstream.bridged
    ]
    return Bridge(targets, tasks.spawn)


def _bridged_address(upstream: configuration.Upstream) -> str | None:
    # Without an address LiteLLM takes one from the environment, and that may be the address of this proxy.
    base_url = upstream.base_url or OWN_ADDRESSES.get(upstream.provider)
    return base_url.removesuffix("/v1") if base_url and upstream.provider == ANTHROPIC else base_url


def _key(upstream: configuration.Upstream) -> str | None:
    return upstream.api_key.get_secret_value() if upstream.api_key else None


def _keys(upstream: configuration.Upstream) -> list[str]:
    return [*filter(None, [_key(upstream)]), *credentials(_headers(upstream))]


def _headers(upstream: configuration.Upstream) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in upstream.headers.items()}


def _timeouts(upstream: configuration.Upstream) -> Timeouts:
    given = upstream.timeouts
    return Timeouts(given.connect, given.first_byte, given.idle, given.total, given.keep_alive)


def open_model_names(settings: Settings) -> NameOf:
    """Return the function that gives a model's name at its upstream."""
    if not any(rule.model for rule in settings.models):
        return same_name
    return lambda model: settings.model(model).model or model


def open_model_headers(settings: Settings) -> HeadersOf:
    """Return the function that gives the header fields added to requests for a model."""
    if not any(rule.headers for rule in settings.models):
        return no_headers

    def headers_of(model: str) -> Mapping[str, str]:
        if not model:
            return {}
        rule = settings.model(model)
        inherited = settings.model(rule.model).headers if rule.model else {}
        replaced = {name.lower() for name in rule.headers}
        headers = {name: value for name, value in inherited.items() if name.lower() not in replaced}
        headers.update(rule.headers)
        return {name: value.get_secret_value() for name, value in headers.items()}

    return headers_of


def open_probes(
    settings: Settings,
    upstream: Upstreams,
    tasks: Tasks,
    on_windows: OnWindows | None = None,
    records: Records | None = None,
) -> Probes:
    """Build the probes that ask upstreams for their windows; *on_windows* is called with news.

    With *records*, an answer that one process received is known to the others.
    """
    probed = {each.name: each.base_url for each in settings.upstreams if each.probe and not each.bridged}
    agent = f"ullage/{configuration.version()}"
    return Probes(
        probed,
        upstream.send,
        tasks.spawn,
        time.perf_counter,
        agent,
        on_windows,
        SharedProbeCache(records) if records else None,
    )


def open_summaries(
    settings: Settings,
    catalogue: Catalogue,
    tokenizers: Tokenizers,
    store: Store,
    upstream: Upstreams,
    tasks: Tasks,
    on_report: OnReport,
    on_note: OnNote = ignore_note,
) -> Jobs | None:
    """Build the jobs that write summaries; None if no model is to be asked."""
    wanted = settings.summaries
    if wanted.mode == "off" or settings.compression.mode != "on":
        return None
    config = SummaryConfig(
        mode=wanted.mode,
        model=wanted.model,
        allowed_tenants=tenants_of(key.get_secret_value() for key in wanted.allow) if wanted.allow else None,
        allow_subscriptions=wanted.subscription_tokens,
        keyed_upstreams=frozenset(up.name for up in settings.upstreams if up.carries_key),
        subscription_upstreams=frozenset(
            up.name for up in settings.upstreams if any(map(is_subscription_key, _keys(up)))
        ),
        max_jobs=wanted.jobs,
        timeout=wanted.timeout,
        headers_of=open_model_headers(settings),
    )
    agent = f"ullage/{configuration.version()} (summary)"
    writer = Writer(upstream, tokenizers, load_prompts(), agent, wanted.timeout, aligned=wanted.aligned)
    job_caches = JobCaches(
        caches.texts(),
        LRUCache(CACHED_PASSAGES),
        LRUCache(CACHED_PASSAGES),
        LRUCache(CACHED_PASSAGES),
        LRUCache(CACHED_TENANTS),
        LRUCache(CACHED_TENANTS),
    )
    return Jobs(
        store.summaries,
        writer,
        SpendingLimits(store.summaries, wanted.spend, LRUCache(CACHED_TENANTS), time.monotonic, time.time),
        config,
        job_caches,
        resolve=catalogue.resolve,
        breaker=lambda: Breaker(time.monotonic, random.random, SUMMARISER),
        label=lambda tenant: hmac.digest(store.records.prefix_key(tenant), b"label", "sha256")[:4].hex(),
        spawn=tasks.spawn,
        on_report=on_report,
        clock=time.monotonic,
        on_note=on_note,
    )
