"""The whole configuration, and the rules between its sections. Values are frozen; no repr shows a secret."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from proxy.addresses import is_loopback
from proxy.core.attempts import fallback_cycle
from proxy.settings.compression import Compression, Summaries
from proxy.settings.field_types import (
    MIB,
    Bytes,
    FieldProblem,
    FilePath,
    Section,
    raise_problems,
)
from proxy.settings.injected import InjectedTexts
from proxy.settings.packaged_data import litellm_providers
from proxy.settings.server import Server, Store
from proxy.settings.tools import Tools
from proxy.settings.upstreams import OLLAMA, Model, OverflowRule, Upstream


class Log(Section):
    """The log on standard output."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least severe level.")
    format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto: console if a terminal, else json."
    )


class Page(Section):
    """The page at ``/ullage/``."""

    enabled: bool = Field(default=True, description="Serve the page.")
    text: bool = Field(
        default=False, description="Show texts of conversations on the page: blocks, and targets of tool calls."
    )
    conversations: int = Field(default=1000, ge=1, le=10_000, description="Most live conversations on it.")


class BudgetLog(Section):
    """A file with the figures of each request's context, as JSON Lines."""

    path: FilePath | None = Field(default=None, description="The budget log's file; none: it is not written.")
    max_bytes: Bytes = Field(default=10 * MIB, description="Size from which the file is renamed and a new one begun.")
    files: Annotated[int, Field(ge=1, le=1000)] = Field(default=5, description="Older files that stay beside it.")


class Telemetry(Section):
    """The log, the metrics, the page and other reports of requests."""

    log: Log = Log.defaults()
    metrics: bool = Field(default=True, description="Serve /metrics.")
    traces: bool = Field(default=False, description="Send OpenTelemetry traces, as OTEL_* variables configure them.")
    budget_log: BudgetLog = BudgetLog.defaults()
    advice: bool = Field(default=True, description="Log once what fills a conversation that is nearly full.")
    page: Page = Page.defaults()


_SHOWN_MODELS: Final = 5
"""Models of a circle of fallbacks that a problem names."""

NO_RULE: Final = Model(name="*")
"""The rule for models that no configured rule matches."""


class Settings(Section):
    """Everything that can be configured."""

    server: Server = Server.defaults()
    store: Store = Field(default_factory=Store)
    upstreams: tuple[Upstream, ...] = ()
    models: tuple[Model, ...] = Field(default=(), description="First match wins; no match is as *.")
    compression: Compression = Compression.defaults()
    tools: Tools = Tools.defaults()
    injected: InjectedTexts = InjectedTexts.defaults()
    summaries: Summaries = Summaries.defaults()
    telemetry: Telemetry = Telemetry.defaults()
    overflow_rules: tuple[OverflowRule, ...] = Field(
        default=(), description="Further texts and codes of overflow errors; tried before the packaged ones."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_problems(
            [
                *self._bad_names(),
                *self._bad_references(),
                *self._unreachable_rules(),
                *self._bad_aliases(),
                *self._bad_fallbacks(),
                *self._bad_num_ctx(),
            ]
        )
        return self

    def default_upstream(self) -> Upstream:
        """Return the upstream of paths without a model. Raises ``IndexError`` if none is configured."""
        return self.upstream(self.server.default_upstream)

    def gemini_upstream(self) -> Upstream:
        """Return the upstream of those paths of Gemini's API that name no model: files, caches, batches.

        It is that of the first rule for a Gemini model, else the first that is Google's, else the default one.
        """
        by_rule = (self.upstream(rule.upstream) for rule in self.models if rule.is_for_gemini)
        by_address = (upstream for upstream in self.upstreams if upstream.is_google)
        speaking = (upstream for upstream in (*by_rule, *by_address) if not upstream.bridged)
        return next(speaking, None) or self.default_upstream()

    def upstream(self, name: str) -> Upstream:
        """Return the upstream *name*; for an empty name the default one. Raises ``KeyError``, ``IndexError``."""
        name = name or self.server.default_upstream or self.upstreams[0].name
        return {upstream.name: upstream for upstream in self.upstreams}[name]

    def model(self, name: str) -> Model:
        """Return the first rule that matches *name*; if none does, a rule without figures."""
        return next((rule for rule in self.models if rule.matches(name)), NO_RULE)

    def _bad_names(self) -> Iterator[FieldProblem]:
        names: set[str] = set()
        for index, upstream in enumerate(self.upstreams):
            if upstream.name in names:
                yield ("upstreams", index, "name"), f"a second upstream {upstream.name!r}", "Give each its own name."
            names.add(upstream.name)

    def _bad_references(self) -> Iterator[FieldProblem]:
        names = [upstream.name for upstream in self.upstreams]
        used = {index: rule.upstream for index, rule in enumerate(self.models)}
        return bad_references(names, self.server.default_upstream, used)

    def _bad_aliases(self) -> Iterator[FieldProblem]:
        for index, rule in enumerate(self.models):
            if not rule.model or "*" in rule.model:
                continue
            target = self.model(rule.model).model
            if target not in ("", rule.model):
                message = f"{rule.model!r} is itself another name, for {target!r}"
                remedy = f"Write `model: {target}`, or give {rule.model!r} a rule of its own."
                yield ("models", index, "model"), message, remedy

    def _bad_num_ctx(self) -> Iterator[FieldProblem]:
        upstreams = {upstream.name: upstream for upstream in self.upstreams}
        default = self.server.default_upstream or next(iter(upstreams), "")
        for index, rule in enumerate(self.models):
            upstream = upstreams.get(rule.upstream or default)
            if rule.num_ctx is None or upstream is None or upstream.provider in OLLAMA:
                continue
            message = f"cannot be set through {upstream.name!r}: Ollama's own API takes it, its /v1 does not"
            remedy = f"Give {upstream.name!r} `provider: {OLLAMA[0]}` and a base_url without /v1."
            yield ("models", index, "num_ctx"), message, remedy

    def _bad_fallbacks(self) -> Iterator[FieldProblem]:
        rule_of = cache(self.model)
        finished: set[str] = set()
        reported: set[str] = set()
        for index, rule in enumerate(self.models):
            path = ("models", index, "overflow")
            if len(set(rule.steps)) < len(rule.steps):
                yield path, "a step stands there twice", "Name each once."
            cycles = ((name, _cycle_of(rule, name, rule_of, finished)) for name in rule.fallbacks)
            name, cycle = next((pair for pair in cycles if pair[1]), ("", ()))
            if cycle and reported.isdisjoint(cycle):
                shown = " -> ".join(cycle[:_SHOWN_MODELS])
                remedy = f"Give {name!r} a rule of its own above this one, without a fallback that leads back."
                yield path, f"the fallbacks lead in a circle: {shown} -> ...", remedy
            reported.update(cycle)

    def _unreachable_rules(self) -> Iterator[FieldProblem]:
        for index, rule in enumerate(self.models):
            # An earlier glob that matches the name, read as text, matches everything that the name stands for.
            hiding = [earlier for earlier in self.models[:index] if earlier.matches(rule.name)]
            if hiding:
                message = (
                    f"{rule.name!r} is never reached: {hiding[0].name!r} stands before it and matches the same models"
                )
                yield ("models", index, "name"), message, "The first match wins: move it up, or take it out."


def _cycle_of(rule: Model, name: str, rule_of: Callable[[str], Model], finished: set[str]) -> tuple[str, ...]:
    """Return the models in the cycle that the fallback *name* of *rule* starts; empty if it starts none.

    *rule_of* returns a model's rule. Models that lead to no cycle are added to *finished*.
    """
    cycle: tuple[str, ...] = (name,)
    if name not in finished:
        cycle = (name, *fallback_cycle(name, lambda model: rule_of(model).fallbacks, finished)[1:])
    if rule_of(name) is not rule and len(cycle) == 1:
        return ()
    return tuple(dict.fromkeys((rule.name, *cycle)))


def bad_references(names: Sequence[str], default: str, used: Mapping[int, str]) -> Iterator[FieldProblem]:
    """Yield a problem for each reference to an upstream that is not in *names*; *used* has the models' by index."""
    remedy = "Add it under upstreams."
    if names:
        remedy = f"Use one of: {', '.join(names)}."
    if default and default not in names:
        yield ("server", "default_upstream"), f"there is no upstream {default!r}", remedy
    for index, name in used.items():
        if name and name not in names:
            yield ("models", index, "upstream"), f"there is no upstream {name!r}", remedy


def serving_problem(settings: Settings) -> str | None:
    """Return why valid settings would not be served, and the remedy; None if they would be."""
    if not settings.upstreams:
        return "no upstream is configured. Add one under upstreams, with name and base_url."
    return open_proxy_problem(settings) or unknown_provider(settings)


def unknown_provider(settings: Settings) -> str | None:
    """Return which provider LiteLLM does not know, and which of its names may be meant; None if none is alike."""
    names = {upstream.provider for upstream in settings.upstreams if upstream.bridged}
    if not names or not (known := litellm_providers()):
        return None
    for name in sorted(names - known):
        if close := difflib.get_close_matches(name, known, n=3, cutoff=0.7):
            return f"LiteLLM knows no provider {name!r}. Did you mean {' or '.join(close)}?"
    return None


def open_proxy_problem(settings: Settings) -> str | None:
    """Return why anybody could use the upstreams' keys, and the remedy; None if the settings guard them."""
    server = settings.server
    if server.open or server.access_keys or is_loopback(server.host):
        return None
    keyed = [upstream.name for upstream in settings.upstreams if upstream.carries_key]
    if not keyed:
        return None
    return (
        f"{server.host} can be reached by other machines, and anybody there could use the key of {', '.join(keyed)}. "
        "Set server.access_keys, listen on 127.0.0.1, or set server.open: true to insist."
    )
