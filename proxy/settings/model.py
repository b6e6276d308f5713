"""The configuration's shape, defaults and rules. Values are frozen; secrets never show in a repr."""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from proxy.core.overflow.policy import loop
from proxy.core.overflow.rules import BadRule, code_name, phrase_regex
from proxy.settings.fields import (
    MIB,
    AccessKey,
    BaseUrl,
    Bytes,
    FilePath,
    HeaderValue,
    MasterKey,
    OtherKey,
    OptionalSecret,
    Seconds,
    Section,
    Share,
    StoreUrl,
    Switch,
    Tokens,
    Trouble,
    UnknownWindow,
    Words,
    refuse,
)
from proxy.settings.tooltable import Tools

_TOKEN = re.compile(r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_HOP_BY_HOP = frozenset(
    {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
_KEY_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie"})

# Providers that are paid by the proxy's own surroundings (a role, a service account), never by a client's key.
_AMBIENT = frozenset({"bedrock", "bedrock_converse", "sagemaker", "sagemaker_chat", "vertex_ai", "vertex_ai_beta"})
_COMPACTING_HOSTS = ("api.openai.com", "chatgpt.com", ".openai.azure.com")
_KEY_HEADERS_BY_HOST = (("anthropic.com", "x-api-key"), ("azure.com", "api-key"))

Encoding = Literal["o200k_base", "cl100k_base"]


class Limits(Section):
    """What one worker process accepts at most."""

    body: Bytes = Field(default=64 * MIB, description="Bytes of a managed body; relayed ones stream without limit.")
    in_flight: int = Field(default=512, gt=0, description="Requests under way at once; more are answered 503.")
    in_flight_bytes: Bytes = Field(default=512 * MIB, description="Bytes of all managed bodies held at once.")
    headers: Bytes = Field(default=32 * 1024, description="Bytes of one header field, in both directions.")


class Server(Section):
    """The listener and who may use it."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=8484, ge=0, le=65535, description="TCP port; 0 takes any free one.")
    workers: int = Field(default=1, ge=1, le=256, description="Worker processes sharing the port.")
    access_keys: Annotated[tuple[AccessKey, ...], Words] = Field(
        default=(), description="Keys of which clients must send one; empty: no check."
    )
    access_keys_file: FilePath | None = Field(default=None, description="File with one access key per line.")
    admin_key: OptionalSecret = Field(default=None, description="Key of the admin routes; none: loopback only.")
    admin_key_file: FilePath | None = Field(default=None, description="File that holds admin_key.")
    open: bool = Field(default=False, description="Allow upstream keys on a non-loopback address without access keys.")
    origins: Annotated[tuple[str, ...], Words] = Field(
        default=(), description="Browser origins that may call, such as https://chat.example.org."
    )
    default_upstream: str = Field(default="", description="Upstream of paths without a model; empty: the first.")
    relay: Literal["stateless", "all"] = Field(
        default="stateless", description="Routes relayed when access_keys guard a shared upstream key."
    )
    websockets: Literal["relay", "refuse"] = Field(
        default="relay", description="relay: byte for byte, unmanaged; refuse: clients of /v1/responses use HTTP."
    )
    limits: Limits = Limits()
    drain: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=300.0, description="Seconds that running requests get to end after SIGTERM."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        troubles: list[Trouble] = []
        for index, origin in enumerate(self.origins):
            parts = urlsplit(origin)
            if parts.scheme not in ("http", "https") or f"{parts.scheme}://{parts.netloc}" != origin:
                remedy = "Write scheme, host and port only: https://chat.example.org."
                troubles.append((("origins", index), "is no origin", remedy))
        if self.limits.body > self.limits.in_flight_bytes:
            remedy = "Raise in_flight_bytes to at least limits.body."
            troubles.append((("limits", "in_flight_bytes"), "is less than one body (server.limits.body)", remedy))
        refuse(troubles)
        return self


class Store(Section):
    """Where event records live."""

    url: StoreUrl = Field(
        default="embedded",
        description="embedded, memory, redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.",
    )
    path: FilePath = Field(
        default_factory=lambda: Path("~/.local/share/ullage").expanduser(), description="Data directory of embedded."
    )
    key: MasterKey = Field(default=None, description="Master key that seals records; none: made once and kept.")
    key_file: FilePath | None = Field(default=None, description="File that holds key.")
    other_keys: Annotated[tuple[OtherKey, ...], Words] = Field(
        default=(), description="Master keys that open what is stored as well: former ones, and the next one."
    )
    other_keys_file: FilePath | None = Field(default=None, description="File with one such key per line.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.other_keys and self.key is None:
            remedy = "Set key to the master key that seals from now on."
            refuse([(("other_keys",), "stand beside no key", remedy)])
        return self


class Timeouts(Section):
    """Seconds to wait for an upstream."""

    connect: Seconds = Field(default=10.0, description="For a connection, TLS included.")
    first_byte: Seconds = Field(default=600.0, description="From the request's last byte to the answer's first.")
    idle: Seconds = Field(default=300.0, description="Between two pieces of an answer.")


def _bad_headers(headers: Iterable[str]) -> Iterator[Trouble]:
    for name in headers:
        if not _TOKEN.match(name):
            yield ("headers", name), "is no header name", "Use letters, digits and dashes."
        elif name.lower() in _HOP_BY_HOP or name.lower().startswith("x-ullage-"):
            yield ("headers", name), "is a header that Ullage sets itself", "Take it out."


class Upstream(Section):
    """One server that answers."""

    name: str = Field(description="How models and logs refer to it.")
    base_url: BaseUrl = Field(default="", description="http(s) URL, usually ending in /v1; a provider has its own.")
    provider: str = Field(
        default="openai",
        pattern=r"^[a-z][a-z0-9_]*$",
        description="openai: it speaks OpenAI's API. Anything else: LiteLLM's name for what is behind it.",
    )
    options: dict[str, str] = Field(default={}, description="LiteLLM's own settings: regions, projects, API versions.")
    api_key: OptionalSecret = Field(default=None, description="Sent for the client's key; none: the client's goes on.")
    api_key_file: FilePath | None = Field(default=None, description="File that holds api_key.")
    api_key_header: str = Field(
        default="", description="Header that carries api_key; empty: by host, else authorization."
    )
    headers: dict[str, HeaderValue] = Field(default={}, description="Header fields added to every request.")
    timeouts: Timeouts = Timeouts()
    probe: bool = Field(default=True, description="Ask it in the background how large its windows are.")
    include_usage: bool = Field(
        default=False,
        description="Ask for usage in every chat stream, and keep the event that tells it from clients that did not.",
    )

    count_tokens: Literal["auto", "relay", "own"] = Field(
        default="auto", description="Who answers /v1/messages/count_tokens: it if it can, it, or our own count."
    )

    compaction: Literal["auto", "relay", "own"] = Field(
        default="auto",
        description="Who answers /v1/responses/compact and compaction_trigger items: it if it can, it, or Ullage.",
    )

    context_management: Literal["pass", "own"] = Field(
        default="pass",
        description="Who does the context edits that /v1/messages asks for: it (pass), or Ullage.",
    )

    @property
    def compacts(self) -> bool:
        """Whether it is known to make compaction items."""
        host = urlsplit(self.base_url).hostname or ""
        return host.endswith(_COMPACTING_HOSTS)

    @property
    def key_header(self) -> str:
        """The header in which this server looks for its key."""
        if self.provider == "anthropic":
            return self.api_key_header or "x-api-key"
        host = urlsplit(self.base_url).hostname or ""
        known = next((header for suffix, header in _KEY_HEADERS_BY_HOST if host.endswith(suffix)), "authorization")
        return self.api_key_header or known

    @property
    def bridged(self) -> bool:
        """Whether chat completions reach it through LiteLLM."""
        return self.provider != "openai"

    @property
    def ambient(self) -> bool:
        """Whether the proxy's own surroundings pay for it."""
        return self.provider in _AMBIENT

    @property
    def carries_key(self) -> bool:
        """Whether requests to it are sent with a key that is not the client's own."""
        return (
            self.ambient
            or self.api_key is not None
            or not _KEY_HEADERS.isdisjoint(name.lower() for name in self.headers)
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        troubles: list[Trouble] = []
        if not _NAME.match(self.name):
            remedy = "Use letters, digits, dots, dashes and underscores, beginning with a letter or digit."
            troubles.append((("name",), f"{self.name!r} cannot be a name", remedy))
        if not self.base_url and not self.bridged:
            troubles.append((("base_url",), "is required", "Add `base_url: http://127.0.0.1:8000/v1` or the like."))
        if self.options and not self.bridged:
            troubles.append((("options",), "mean nothing without a provider", "Name the provider, or take them out."))
        if self.api_key_header and not _TOKEN.match(self.api_key_header):
            troubles.append((("api_key_header",), "is no header name", "Use letters, digits and dashes."))
        refuse([*troubles, *_bad_headers(self.headers)])
        return self


class Fallback(Section):
    """Another model that is asked instead."""

    fallback: str = Field(pattern=r"^[!-~]+$", description="Its name, as a client would give it; shown in a header.")


class Model(Section):
    """What is known of the models a name or glob matches; the first match in the list counts."""

    name: str = Field(min_length=1, description="Model name or glob (*, ?, [abc]).")
    upstream: str = Field(default="", description="Upstream that serves it; empty: the default one.")
    model: str = Field(default="", description="What the upstream calls it, where this is another name; empty: so.")
    headers: dict[str, HeaderValue] = Field(default={}, description="Header fields added to its requests.")
    context_window: Tokens | None = Field(
        default=None, description="Input and output together, tokens; none: find out."
    )
    max_input_tokens: Tokens | None = Field(
        default=None, description="Most tokens of the input, where it is limited beside the window; none: find out."
    )
    max_output_tokens: Tokens | None = Field(default=None, description="Most tokens of an answer; none: find out.")
    tokenizer: Encoding | None = Field(default=None, description="Encoding; none: by family.")
    unknown_window: UnknownWindow = Field(
        default="learn",
        description="If not found: learn it from the first overflow, or assume a number.",
    )
    overflow: Annotated[tuple[Literal["compress"] | Fallback, ...], Field(min_length=1)] = Field(
        default=("compress",), description="What to try, in order, when it does not fit: compress, {fallback: MODEL}."
    )

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The fallback models, in order."""
        return tuple(step.fallback for step in self.overflow if isinstance(step, Fallback))

    @model_validator(mode="after")
    def _check(self) -> Self:
        remedy = "Name a second upstream that has it, and send these models there."
        keys = [name for name in self.headers if name.lower() in _KEY_HEADERS]
        carries = [(("headers", name), "carries a key, which belongs to an upstream", remedy) for name in keys]
        refuse([*_bad_headers(self.headers), *carries])
        return self

    def matches(self, model: str) -> bool:
        """Whether this rule is about *model* (case counts)."""
        return self.name == model or fnmatch.fnmatchcase(model, self.name)


class Stage(Section):
    """One rung of the ladder."""

    enabled: bool = True


class DedupStage(Stage):
    """Results that a later one makes superfluous give way to a line."""

    exact: bool = Field(default=True, description="The same call with the same result.")
    stale_reads: bool = Field(default=True, description="A file that was read again, all the lines or more.")
    grep_subsumed: bool = Field(default=True, description="A search in a file that was read whole later.")
    min_saving: int = Field(default=50, ge=0, description="Tokens that one line must save.")


class PruneStage(Stage):
    """Old results give way to a line."""

    protect_rounds: int = Field(default=6, ge=0, description="Newest rounds that stay; fewer in windows below 200K.")
    protect_tokens: int = Field(default=40_000, ge=0, description="Newest tokens of results that stay; scaled alike.")
    min_saving: int = Field(default=20_000, ge=0, description="Tokens it must save in all; scaled alike.")
    weights: dict[str, Annotated[int, Field(ge=0, le=1000)]] = Field(
        default={}, description="How easily results of a kind are done without, where not as usual."
    )


class TruncateStage(Stage):
    """The biggest kept results lose what is beyond a limit."""

    always: bool = Field(default=False, description="Cap every result before it is first sent, whatever the room.")
    max_lines: int = Field(default=2_000, gt=1, description="Lines a result keeps at most.")
    max_bytes: int = Field(default=50_000, ge=1_000, description="Bytes a result keeps at most.")
    share: Annotated[Share, Field(gt=0)] = Field(default=0.10, description="Share of the room it keeps at most.")


class Stages(Section):
    """Which rungs may be used; the order is fixed."""

    dedup: DedupStage = DedupStage()
    prune: PruneStage = PruneStage()
    truncate: TruncateStage = TruncateStage()
    fold: Stage = Stage()
    drop: Stage = Stage()
    clip: Stage = Stage()
    tools: Stage = Stage()


class Shares(Section):
    """Parts of the budget that a fold's block may take at most."""

    pins: Share = Field(default=0.20, description="User instructions, verbatim.")
    digest: Share = Field(default=0.10, description="Identifiers, paths, errors.")
    steps: Share = Field(default=0.03, description="One line per folded round.")
    summary: Share = Field(
        default=0.05, description="A summary by a model, where there is one; taken out of steps and digest."
    )


class Buffers(Section):
    """Thresholds in tokens from the window's end, beside the marks; of the two the smaller threshold wins."""

    reserve: Tokens | None = Field(default=None, description="Kept for the answer; 16000 is usual.")
    warning: Tokens | None = Field(default=None, description="Free at the soft mark; 24000 is usual.")
    auto_compact: Tokens | None = Field(default=None, description="Free where a compaction starts; 12000 is usual.")
    blocking: Tokens | None = Field(default=None, description="Free in every view that is sent; 3000 is usual.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        order = "Keep blocking < auto_compact < warning; 3000, 12000 and 24000 are usual."
        steps = [(name, getattr(self, name)) for name in ("blocking", "auto_compact", "warning")]
        known = [(name, tokens) for name, tokens in steps if tokens is not None]
        refuse(
            [
                ((name,), f"{tokens} is not above {below} ({least})", order)
                for (below, least), (name, tokens) in pairwise(known)
                if tokens <= least
            ]
        )
        return self


ECONOMY_LOW_MARK = 0.35
"""Deeper than for fitting: the cheapest depth for long sessions at today's prices of cached tokens."""


class Allocation(Section):
    """Soft shares of the window; what a part does not use is lent to the others. All zero: no allocation."""

    system: Share = Field(default=0.0, description="System text and response format.")
    tools: Share = Field(default=0.0, description="Tool definitions; above it they are shrunk before messages go.")
    memory: Share = Field(default=0.0, description="Memories that an agent injects.")
    summary: Share = Field(default=0.0, description="What stands for folded rounds; caps it at an event.")
    recent: Share = Field(default=0.0, description="The newest messages.")
    older: Share = Field(default=0.0, description="Messages before those; with recent, what an event leaves of them.")
    reserve: Share = Field(default=0.0, description="The answer; not lent to what an event leaves of messages.")

    @property
    def given(self) -> bool:
        """Whether there is an allocation at all."""
        return any(self.model_dump().values())

    @model_validator(mode="after")
    def _check(self) -> Self:
        shares = self.model_dump()
        total = sum(shares.values())
        if total > 1 + 1e-9:
            parts = " + ".join(name for name, share in shares.items() if share)
            message = f"the shares add up to {total:.2f} of the window"
            refuse([((), message, f"Keep {parts} at 1 or less together; what is left over is lent.")])
        return self


class Compression(Section):
    """When a view is made smaller, and how."""

    mode: Annotated[Literal["on", "observe", "off"], Switch] = Field(
        default="on", description="on; observe: decide and report, change nothing; off: relay."
    )
    policy: Literal["fit", "economy"] = Field(
        default="fit",
        description="fit: compact only to fit the window; economy: where going on gets dearer than compacting.",
    )
    high_mark: Annotated[Share, Field(gt=0)] = Field(default=0.90, description="A compaction starts above this share.")
    soft_mark: Annotated[Share, Field(gt=0)] = Field(default=0.60, description="Preparing may start above this share.")
    low_mark: Annotated[Share, Field(gt=0)] = Field(default=0.40, description="A compaction goes down to this share.")
    lower_output: Literal["last", "first", "never"] = Field(
        default="last", description="When the request's own output figure may be lowered to make room."
    )
    buffers: Buffers = Buffers()
    stored_history: Literal["truncate", "error"] = Field(
        default="truncate",
        description="When a history that only the provider keeps is too long: let it cut that, or pass its error on.",
    )
    stages: Stages = Stages()
    shares: Shares = Shares()
    allocation: Allocation = Allocation()

    @property
    def lowest(self) -> float:
        """The low mark that holds: the configured one, else the policy's own."""
        own = self.policy == "economy" and "low_mark" not in self.model_fields_set
        return min(ECONOMY_LOW_MARK, self.low_mark) if own else self.low_mark

    @model_validator(mode="after")
    def _check(self) -> Self:
        troubles: list[Trouble] = []
        order = "Keep low_mark < soft_mark < high_mark; the defaults are 0.40, 0.60 and 0.90."
        if self.low_mark >= self.high_mark:
            message = f"{self.low_mark} is not below high_mark {self.high_mark}"
            troubles.append((("low_mark",), message, order))
        elif not self.low_mark < self.soft_mark < self.high_mark:
            message = f"{self.soft_mark} is not between low_mark {self.low_mark} and high_mark {self.high_mark}"
            troubles.append((("soft_mark",), message, order))
        total = self.shares.pins + self.shares.digest + self.shares.steps
        if total > 0.40 + 1e-9:
            remedy = "Keep pins + digest + steps at 0.40 or less."
            troubles.append((("shares",), f"the shares add up to {total:.2f} of the budget", remedy))
        if self.shares.summary > self.shares.digest + self.shares.steps:
            remedy = "Keep it at digest + steps or less: that is what it is taken out of."
            troubles.append((("shares", "summary"), f"{self.shares.summary} is more than digest and steps", remedy))
        refuse(troubles)
        return self


class Summaries(Section):
    """Summaries written by a model."""

    mode: Annotated[Literal["background", "inline", "off"], Switch] = Field(
        default="background",
        description="background: written ahead, used when ready; inline: a compaction waits for it; off: none.",
    )
    model: str = Field(
        default="", description="Model that writes them, served as models says; empty: the request's own model."
    )
    allow: Annotated[tuple[AccessKey, ...], Words] = Field(
        default=(), description="Client keys whose conversations may go to model; empty: everybody's."
    )
    allow_file: FilePath | None = Field(default=None, description="File with one such key per line.")
    aligned: bool = Field(
        default=False,
        description="Send the request's own prompt with the instruction behind it, for the provider's prompt cache.",
    )
    timeout: Seconds = Field(default=60.0, description="Seconds one call may take, and a compaction waits if inline.")
    spend: Share = Field(default=0.10, description="Part of the tokens a client sent in the last hour they may cost.")
    jobs: int = Field(default=4, ge=1, le=64, description="Written at once, by each worker process.")
    subscription_tokens: bool = Field(
        default=False, description="Allow them with OAuth and subscription tokens, which providers restrict."
    )


class Log(Section):
    """What is written to standard output."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least severe level.")
    format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto: console if a terminal, else json."
    )


class Telemetry(Section):
    """What operators see."""

    log: Log = Log()
    metrics: bool = Field(default=True, description="Serve /metrics.")


class OverflowRule(Section):
    """How an upstream says that a request is too long, where Ullage does not know it yet."""

    means: Literal["input", "input_plus_output", "payload", "output_cap", "rate_limit", "other"] = Field(
        default="input", description="What was too much; other: the error has nothing to do with length."
    )
    phrase: str | None = Field(
        default=None,
        description="Words of the error: {limit}, {prompt}, {output}, {requested}, {cap} are figures, * is anything.",
    )
    code: str | None = Field(default=None, min_length=1, description="A code, type or reason, however it is written.")
    source: str = Field(default="configured", min_length=1, description="Who says so.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.phrase is None) == (self.code is None):
            refuse([((), "needs a phrase or a code, and not both", 'Write, say: phrase: "over {limit} tokens".')])
        if self.code is not None and not code_name(self.code):
            refuse([(("code",), f"{self.code!r} holds no letter or digit", "Write it as the error does.")])
        try:
            phrase_regex(self.phrase or "x")
        except BadRule as error:
            refuse([(("phrase",), str(error), "See config/ullage.yaml for what a phrase may hold.")])
        return self


ANY = Model(name="*")


class Settings(Section):
    """Everything that can be configured."""

    server: Server = Server()
    store: Store = Field(default_factory=lambda: Store())
    upstreams: tuple[Upstream, ...] = ()
    models: tuple[Model, ...] = Field(default=(), description="First match wins; no match is as *.")
    compression: Compression = Compression()
    tools: Tools = Tools()
    summaries: Summaries = Summaries()
    telemetry: Telemetry = Telemetry()
    overflow_rules: tuple[OverflowRule, ...] = Field(
        default=(), description="More ways of saying that a request is too long; tried before the packaged ones."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(
            [
                *self._bad_names(),
                *self._bad_references(),
                *self._unreachable(),
                *self._bad_aliases(),
                *self._bad_fallbacks(),
            ]
        )
        return self

    def default_upstream(self) -> Upstream:
        """The upstream of paths without a model. Raises ``IndexError`` when none is configured."""
        return self.upstream(self.server.default_upstream)

    def upstream(self, name: str) -> Upstream:
        """The upstream called *name*; an empty name means the default one. Raises ``KeyError``, ``IndexError``."""
        name = name or self.server.default_upstream or self.upstreams[0].name
        return {upstream.name: upstream for upstream in self.upstreams}[name]

    def model(self, name: str) -> Model:
        """The first rule that matches *name*; a rule without figures when none does."""
        return next((rule for rule in self.models if rule.matches(name)), ANY)

    def _bad_names(self) -> Iterator[Trouble]:
        seen: set[str] = set()
        for index, upstream in enumerate(self.upstreams):
            if upstream.name in seen:
                yield ("upstreams", index, "name"), f"a second upstream {upstream.name!r}", "Give each its own name."
            seen.add(upstream.name)

    def _bad_references(self) -> Iterator[Trouble]:
        names = [upstream.name for upstream in self.upstreams]
        remedy = f"Use one of: {', '.join(names)}." if names else "Add it under upstreams."
        if self.server.default_upstream and self.server.default_upstream not in names:
            message = f"there is no upstream {self.server.default_upstream!r}"
            yield ("server", "default_upstream"), message, remedy
        for index, rule in enumerate(self.models):
            if rule.upstream and rule.upstream not in names:
                yield ("models", index, "upstream"), f"there is no upstream {rule.upstream!r}", remedy

    def _bad_aliases(self) -> Iterator[Trouble]:
        for index, rule in enumerate(self.models):
            named = self.model(rule.model).model if rule.model else ""
            if named not in ("", rule.model):
                message = f"{rule.model!r} is itself another name, for {named!r}"
                remedy = f"Write `model: {named}`, or give {rule.model!r} a rule of its own."
                yield ("models", index, "model"), message, remedy

    def _bad_fallbacks(self) -> Iterator[Trouble]:
        for index, rule in enumerate(self.models):
            steps = [step.fallback if isinstance(step, Fallback) else "compress" for step in rule.overflow]
            where = ("models", index, "overflow")
            if len(set(steps)) < len(steps):
                yield where, "a step stands there twice", "Name each once."
            for name in rule.fallbacks:
                way = (name, *loop(name, lambda model: self.model(model).fallbacks)[1:])
                if self.model(name) is rule or len(way) > 1:
                    told = " -> ".join(dict.fromkeys((rule.name, *way)))
                    remedy = f"Give {name!r} a rule of its own above this one, without a fallback that leads back."
                    yield where, f"the fallbacks lead in a circle: {told} -> ...", remedy
                    break

    def _unreachable(self) -> Iterator[Trouble]:
        for index, rule in enumerate(self.models):
            # A glob is matched as text: whatever a rule's own text matches before it hides it.
            hider = next((earlier for earlier in self.models[:index] if earlier.matches(rule.name)), None)
            if hider is not None:
                message = f"{rule.name!r} is never reached: {hider.name!r} stands before it and matches the same models"
                yield ("models", index, "name"), message, "The first match wins: move it up, or take it out."


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on *host*."""
    name = host.strip("[]").partition("%")[0]
    if name.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def refuse_open(settings: Settings) -> str | None:
    """Why serving would hand the upstream keys to strangers, and what to do; ``None`` when it would not."""
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
