"""Builds the parts that call upstreams: connections, the model catalogue, probes and summary jobs."""

from __future__ import annotations

import hmac
import random
import time
from collections.abc import Mapping
from functools import cache
from typing import Final, Literal

import cachebox
from cachetools import LRUCache
from pydantic import SecretStr

from proxy import caches
from proxy import settings as configuration
from proxy.core.http_headers import HeadersOf, no_headers
from proxy.core.models import (
    COMPRESS,
    Catalogue,
    Failure,
    ModelLimits,
    ModelRule,
    WindowLookup,
    read_published_table,
)
from proxy.engine.ports import Records
from proxy.server import NameOf, same_name, tenants_of
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
    is_subscription_key,
    load_prompts,
)
from proxy.tasks import Tasks
from proxy.tokenizers import Tokenizers
from proxy.upstream import (
    Bridge,
    Bridged,
    OnWindows,
    OptionsOf,
    Probes,
    Target,
    Timeouts,
    Upstreams,
    no_options,
)

NO_UPSTREAM: Final = "-"
"""The upstream of every model if none is configured: nothing can be served then, but models can be listed."""

ANTHROPIC: Final = "anthropic"
OWN_ADDRESSES: Final = {ANTHROPIC: "https://api.anthropic.com/v1"}
"""Base URLs of providers that speak one of our other APIs: requests in that API are sent there without LiteLLM.

https://platform.claude.com/docs/en/api/overview
"""

SUMMARISER: Final = Patience(failures=3, within=None, first_pause=60.0, longest_pause=1800.0, lost=300.0)
"""After three failures in a row a summariser rests: for a minute at first, for half an hour at most."""

CACHED_TENANTS: Final = 10_000
CACHED_STRETCHES: Final = 50_000
"""Entries of the caches for summary jobs, by tenant and by stretch of a conversation."""


def open_catalogue(settings: Settings, reported: WindowLookup | None = None) -> Catalogue:
    """Return the catalogue of *settings* and of the published table; *reported* looks up windows that servers state.

    It reads 3 MB: call it in a thread.
    """
    default = NO_UPSTREAM
    if settings.upstreams:
        default = settings.default_upstream().name
    return Catalogue([_model_rule(rule) for rule in settings.models], _published_table(), default, reported)


@cache
def _published_table() -> Mapping[str, ModelLimits]:
    """Return the published table. Its 3 MB are read once and not again at each reload."""
    return read_published_table(configuration.model_table())


def _model_rule(rule: configuration.Model) -> ModelRule:
    """Return the catalogue's form of a configured *rule*."""
    steps: tuple[str, ...] = (COMPRESS,)
    if "overflow" in rule.fallback_on:
        own_names = {"compress": COMPRESS}
        steps = tuple(own_names.get(step, step) for step in rule.steps)
    failures: frozenset[Failure] = frozenset(reason for reason in rule.fallback_on if reason != "overflow")
    failovers: tuple[str, ...] = ()
    if failures:
        failovers = rule.fallbacks
    unknown_window: int | None = None
    if rule.unknown_window != "learn":
        unknown_window = rule.unknown_window
    return ModelRule(
        rule.name,
        rule.upstream,
        window=rule.window,
        max_output=rule.max_output_tokens,
        encoding=rule.tokenizer,
        unknown_window=unknown_window,
        max_input=rule.max_input_tokens,
        steps=steps,
        failovers=failovers,
        fail_over_on=failures,
        model=rule.model,
        task_size=rule.task_size or "",
        conversation_budget=rule.conversation_budget or 0,
    )


def open_upstream(settings: Settings, bridge: Bridge | None = None) -> Upstreams:
    """Build the upstreams that speak our APIs, and those behind *bridge*. Call it in a running loop."""
    targets = [
        Target(
            upstream.name,
            upstream.base_url or OWN_ADDRESSES[upstream.provider],
            _revealed(upstream.api_key),
            api_key_header=upstream.key_header,
            headers=_headers(upstream),
            timeouts=Timeouts(**dict(upstream.timeouts)),
            proxy=_revealed(upstream.proxy),
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
            _revealed(upstream.api_key),
            ambient=upstream.has_ambient_credentials,
            headers=_headers(upstream),
            options=upstream.options,
            timeouts=Timeouts(**dict(upstream.timeouts)),
            options_of=_options_of(settings, upstream),
        )
        for upstream in settings.upstreams
        if upstream.bridged
    ]
    return Bridge(targets, tasks.spawn)


def _options_of(settings: Settings, upstream: configuration.Upstream) -> OptionsOf:
    """Return the function that gives LiteLLM's further options of a model, by *upstream*'s name of it."""
    rules = [rule for rule in settings.models if rule.num_ctx and settings.upstream(rule.upstream) is upstream]

    def options_of(model: str) -> Mapping[str, object]:
        for rule in rules:
            if rule.serves(model):
                return {"num_ctx": rule.num_ctx}
        return {}

    if not rules:
        return no_options
    return options_of


def _bridged_address(upstream: configuration.Upstream) -> str | None:
    """Return the base URL for LiteLLM; None for its own default.

    Without one LiteLLM reads the environment (``OPENAI_BASE_URL`` and the like), which may hold the address of this
    proxy: so the provider's own address is passed if it is known here.
    """
    base_url = upstream.base_url or OWN_ADDRESSES.get(upstream.provider)
    if base_url and upstream.provider == ANTHROPIC:
        return base_url.removesuffix("/v1")  # LiteLLM appends the version itself
    return base_url


def _revealed(secret: SecretStr | None) -> str | None:
    if secret is None:
        return None
    return secret.get_secret_value()


def _keys(upstream: configuration.Upstream) -> list[str]:
    """Return every credential that *upstream* is configured with: its key, and those in its headers."""
    keys = credentials(_headers(upstream))
    if key := _revealed(upstream.api_key):
        return [key, *keys]
    return [*keys]


def _headers(upstream: configuration.Upstream) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in upstream.headers.items()}


def open_model_names(settings: Settings) -> NameOf:
    """Return the function that gives a model's name at its upstream."""
    if not any(rule.model for rule in settings.models):
        return same_name
    return lambda model: settings.model(model).name_at_upstream(model)


def open_model_headers(settings: Settings) -> HeadersOf:
    """Return the function that gives the header fields added to requests for a model."""
    if not any(rule.headers for rule in settings.models):
        return no_headers

    def headers_of(model: str) -> Mapping[str, str]:
        if not model:
            return {}
        headers = _configured_headers(settings, model)
        return {name: value.get_secret_value() for name, value in headers.items()}

    return headers_of


def _configured_headers(settings: Settings, model: str) -> Mapping[str, SecretStr]:
    """Return the headers of the rule for *model*; if that is another name, also those of the model's own rule."""
    rule = settings.model(model)
    if not rule.model:
        return rule.headers
    inherited = settings.model(rule.name_at_upstream(model)).headers
    replaced = {name.lower() for name in rule.headers}
    return {**{name: value for name, value in inherited.items() if name.lower() not in replaced}, **rule.headers}


def open_probes(
    settings: Settings,
    upstream: Upstreams,
    tasks: Tasks,
    on_windows: OnWindows | None = None,
    records: Records | None = None,
) -> Probes:
    """Build the probes that ask upstreams for their windows; *on_windows* is called when windows change.

    With *records*, processes share the answers.
    """
    probed = {entry.name: entry.base_url for entry in settings.upstreams if entry.probe and not entry.bridged}
    agent = f"ullage/{configuration.version()}"
    return Probes(probed, upstream.send, tasks.spawn, time.perf_counter, agent, on_windows, records)


def open_summaries(
    settings: Settings,
    catalogue: Catalogue,
    tokenizers: Tokenizers,
    store: Store,
    upstream: Upstreams,
    tasks: Tasks,
    on_report: OnReport,
    on_note: OnNote,
) -> Jobs | None:
    """Build the jobs that write summaries; None if no summaries are written."""
    configured = settings.summaries
    if configured.mode == "off" or settings.compression.mode != "on":
        return None
    agent = f"ullage/{configuration.version()} (summary)"
    return Jobs(
        store.summaries,
        Writer(upstream, tokenizers, load_prompts(), agent, configured.timeout, aligned=configured.aligned),
        SpendingLimits(
            store.summaries,
            configured.spend,
            cachebox.LRUCache(CACHED_TENANTS),  # each request asks it, and one of cachetools is written in Python
            time.monotonic,
            time.time,
        ),
        _summary_config(settings, configured.mode),
        _job_caches(),
        resolve=catalogue.resolve,
        breaker=lambda: Breaker(time.monotonic, random.random, SUMMARISER),
        label=lambda tenant: hmac.digest(store.records.prefix_key(tenant), b"label", "sha256")[:4].hex(),
        spawn=tasks.spawn,
        on_report=on_report,
        clock=time.monotonic,
        on_note=on_note,
    )


def _summary_config(settings: Settings, mode: Literal["background", "inline"]) -> SummaryConfig:
    configured, upstreams = settings.summaries, settings.upstreams
    allowed_tenants: frozenset[bytes] | None = None
    if configured.allow:
        allowed_tenants = tenants_of(key.get_secret_value() for key in configured.allow)
    return SummaryConfig(
        mode=mode,
        model=configured.model,
        allowed_tenants=allowed_tenants,
        allow_subscriptions=configured.subscription_tokens,
        keyed_upstreams=frozenset(up.name for up in upstreams if up.carries_key),
        subscription_upstreams=frozenset(up.name for up in upstreams if any(map(is_subscription_key, _keys(up)))),
        max_jobs=configured.jobs,
        timeout=configured.timeout,
        headers_of=open_model_headers(settings),
    )


def _job_caches() -> JobCaches:
    return JobCaches(
        summaries=caches.texts(),
        not_before=LRUCache(CACHED_STRETCHES),
        too_expensive=LRUCache(CACHED_STRETCHES),
        failures=LRUCache(CACHED_STRETCHES),
        breakers=LRUCache(CACHED_TENANTS),
        waiting_until=LRUCache(CACHED_TENANTS),
    )
