"""Where requests may go, built from the settings: upstreams, what they tell, the model catalogue, summarisers."""

from __future__ import annotations

import hashlib
import hmac
import random
import time
from collections.abc import Mapping
from typing import Final

from cachetools import LRUCache

from proxy import caches
from proxy import settings as configuration
from proxy.core.models import COMPRESS, Catalogue, ModelLimits, ModelRule, WindowLookup, published
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
from proxy.upstream import Bridge, Bridged, OnTold, Probes, Target, Timeouts, Upstreams

NO_UPSTREAM: Final = "-"
"""The upstream of every model where none is configured: then nothing is served, but models can be listed."""

ANTHROPIC: Final = "anthropic"
OWN_ADDRESSES: Final = {ANTHROPIC: "https://api.anthropic.com/v1"}
"""Providers that speak one of our other APIs themselves, and where: those requests need no translation."""


SUMMARISER: Final = Patience(failures=3, within=None, first_pause=60.0, longest_pause=1800.0, lost=300.0)
"""When a summariser is left alone: after three failures in a row, for a minute at first."""

TENANTS, STRETCHES = 10_000, 50_000
"""Bounds of what a process remembers of summaries beside their texts: clients, stretches of conversations."""


def open_catalogue(settings: Settings, told: WindowLookup | None = None) -> Catalogue:
    """The catalogue of *settings* and of the published table, 3 MB that are read here: call it in a thread."""
    table = published(
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
    """The upstreams of *settings*: those that speak our APIs, and those behind *bridge*. Call it in a running loop."""
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
    """What reaches the upstreams of *settings* that LiteLLM speaks for."""
    targets = [
        Bridged(
            upstream.name,
            upstream.provider,
            _bridged_address(upstream),
            _key(upstream),
            upstream.ambient,
            _headers(upstream),
            upstream.options,
            _timeouts(upstream),
        )
        for upstream in settings.upstreams
        if upstream.bridged
    ]
    return Bridge(targets, tasks.spawn)


def _bridged_address(upstream: configuration.Upstream) -> str | None:
    # LiteLLM would look for an address it is not given in the environment, where this proxy's own may stand.
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


class SharedProbeCache:
    """Where processes that share a store leave for each other what servers said of their windows: no tenant's words."""

    def __init__(self, recorder: Records) -> None:
        self._recorder = recorder
        self._nobody = hashlib.sha256(b"what servers say of themselves").digest()

    async def recall(self, name: str) -> bytes | None:
        """What was last left under *name*, if anything."""
        return await self._recorder.read_route(self._nobody, name)

    def remember(self, name: str, value: bytes) -> None:
        """Leave *value* under *name*, in the background."""
        self._recorder.save_route(self._nobody, name, value)


def open_model_names(settings: Settings) -> NameOf:
    """What its upstream calls a model, by the name it was asked for."""
    if not any(rule.model for rule in settings.models):
        return same_name
    return lambda model: settings.model(model).model or model


def open_model_headers(settings: Settings) -> HeadersOf:
    """What *settings* add to requests for a model, by the name it was asked for."""
    if not any(rule.headers for rule in settings.models):
        return no_headers

    def headers_of(model: str) -> Mapping[str, str]:
        if not model:
            return {}
        rule = settings.model(model)
        own = settings.model(rule.model).headers if rule.model else {}
        said = {name.lower() for name in rule.headers}
        left = {name: value for name, value in own.items() if name.lower() not in said}
        return {name: value.get_secret_value() for name, value in {**left, **rule.headers}.items()}

    return headers_of


def open_probes(
    settings: Settings,
    upstream: Upstreams,
    tasks: Tasks,
    told: OnTold | None = None,
    recorder: Records | None = None,
) -> Probes:
    """What asks the upstreams of *settings* that may be asked for their windows; *told* hears of news.

    With a *recorder*, what one process was told the others know without asking again.
    """
    asked = {each.name: each.base_url for each in settings.upstreams if each.probe and not each.bridged}
    agent = f"ullage/{configuration.version()}"
    return Probes(
        asked,
        upstream.send,
        tasks.spawn,
        time.perf_counter,
        agent,
        told,
        SharedProbeCache(recorder) if recorder else None,
    )


def open_summaries(
    settings: Settings,
    catalogue: Catalogue,
    tokenizers: Tokenizers,
    store: Store,
    upstream: Upstreams,
    tasks: Tasks,
    observe: OnReport,
    tell: OnNote = ignore_note,
) -> Jobs | None:
    """What writes summaries as *settings* have it; ``None`` where no model is to be asked."""
    wanted = settings.summaries
    if wanted.mode == "off" or settings.compression.mode != "on":
        return None
    terms = SummaryConfig(
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
    memory = JobCaches(
        caches.texts(),
        LRUCache(STRETCHES),
        LRUCache(STRETCHES),
        LRUCache(STRETCHES),
        LRUCache(TENANTS),
        LRUCache(TENANTS),
    )
    return Jobs(
        store.summaries,
        writer,
        SpendingLimits(store.summaries, wanted.spend, LRUCache(TENANTS), time.monotonic, time.time),
        terms,
        memory,
        resolve=catalogue.resolve,
        breaker=lambda: Breaker(time.monotonic, random.random, SUMMARISER),
        label=lambda tenant: hmac.digest(store.records.prefix_key(tenant), b"label", "sha256")[:4].hex(),
        spawn=tasks.spawn,
        observe=observe,
        clock=time.monotonic,
        tell=tell,
    )
