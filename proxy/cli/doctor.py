"""Asks a live server what matters for its window: the few questions, what they cost, and what the answers mean."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from proxy.core import diagnosis
from proxy.core.apis.usage import UsageTap
from proxy.core.diagnosis import Finding, Tried, Window
from proxy.core.errors import NotFound, UllageError
from proxy.core.learned_window import prior
from proxy.core.models import Route
from proxy.core.models import ServerWindow as Told
from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.evidence import Prior
from proxy.engine.learned_routes import remedy
from proxy.settings import Settings, overflow_rules
from proxy.settings.upstreams import Upstream
from proxy.tasks import Tasks
from proxy.tokenizers import Tokenizers
from proxy.upstream import Upstreams, find
from proxy.upstream_wiring import open_bridge, open_catalogue, open_probes, open_upstream

SMALL: Final = 400
"""Tokens of the short requests: enough for a factor, and next to nothing on a bill."""

ABOVE: Final = 1.25
"""How far above the window the long request goes: further than any count is off."""

LADDER: Final = (10_000, 40_000, 160_000)
"""Tokens that are tried in turn where nobody knows the window."""

MOST: Final = 1_500_000
"""Tokens of the longest request: with more, the body itself is what a server refuses."""

PER_MESSAGE, PER_REPLY = 4, 3
"""What a message and an answer add to the count of their texts."""

SHOWN: Final = 200
"""Characters of an unknown error that are shown."""

ERROR_BYTES: Final = 2**20

WORDS: Final = "the harbour master keeps a careful ledger of each vessel that passes under the old stone bridge"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found of one model at one server; ``sent`` is our count of all input tokens that were sent."""

    upstream: str
    base_url: str
    model: str
    findings: tuple[Finding, ...]
    sent: int

    @property
    def healthy(self) -> bool:
        """Whether nothing stands in the way of keeping conversations inside the window."""
        return all(finding.level != "error" for finding in self.findings)


@dataclass(slots=True)
class _Visit:
    """One server while it is examined."""

    upstream: Upstreams
    name: str
    seconds: float
    classifier: Classifier
    model: str = ""
    figure: str = "max_tokens"
    sent: int = 0
    findings: list[Finding] = field(default_factory=list)


class Stopped(Exception):
    """Nothing more can be found out; the findings say why."""


async def examine(
    settings: Settings, model: str | None, *, key: str = "", oversize: bool = False, seconds: float = 120.0
) -> Diagnosis:
    """What is found of *model* (the first one the server lists, if none is named) at its upstream.

    *key* replaces the upstream's own. *oversize* allows the long request where it may cost money; a server on this
    machine or network gets it anyway. Each request may take so many *seconds*.
    """
    target = settings.default_upstream()
    if model:
        try:
            catalogue = await asyncio.to_thread(open_catalogue, settings)
            route = catalogue.resolve(model)
            target, model = settings.upstream(route.upstream), route.model
        except (NotFound, KeyError):
            pass  # then the default one is asked, and says what it thinks of the name
    settings = _with_key(settings, target, key)
    async with _visiting(settings, target.name, seconds) as visit:
        visit.model = model or ""
        try:
            await _examine(visit, settings, oversize or is_near(target.base_url))
        except Stopped:
            pass
        except (UllageError, TimeoutError) as error:
            text = str(error) or f"no answer within {seconds:g} s"
            visit.findings.append(Finding("reachable", "error", text, "Check the URL, and that the server is running."))
        return Diagnosis(target.name, target.base_url, visit.model, tuple(visit.findings), visit.sent)


def _with_key(settings: Settings, target: Upstream, key: str) -> Settings:
    """*settings* with *target* for the first upstream, which gets *key* if there is one."""
    if key:
        target = target.model_copy(update={"api_key": SecretStr(key)})
    others = (each for each in settings.upstreams if each.name != target.name)
    return settings.model_copy(update={"upstreams": (target, *others)})


@asynccontextmanager
async def _visiting(settings: Settings, name: str, seconds: float) -> AsyncIterator[_Visit]:
    classifier = Classifier(await asyncio.to_thread(overflow_rules, settings))
    failures: list[BaseException] = []
    tasks = Tasks(lambda _, error: failures.append(error))
    upstream = open_upstream(settings, open_bridge(settings, tasks))
    try:
        yield _Visit(upstream, name, seconds, classifier)
    finally:
        await upstream.close()
        await tasks.finish(0.0)


async def _examine(visit: _Visit, settings: Settings, oversize: bool) -> None:
    await _models(visit)
    route, told = await _route(visit, settings)
    source = f"{route.source}: {route.how}" if route.how else route.source
    known = Window(route.window, source, remedy(route))
    visit.findings.append(diagnosis.window(known))
    if told and route.source == "configured" and route.window and told.context_window < route.window:
        text = f"the server itself says {told.context_window:,} ({told.how}), less than the {route.window:,} configured"
        advice = f"Set context_window: {told.context_window}, or leave it out."
        visit.findings.append(Finding("window", "warning", text, advice))
    counter = await asyncio.to_thread(Tokenizers().counter, route.encoding)
    expected = prior(route.model, exact=route.exact).factor
    small = await _small(visit, counter)
    visit.findings.extend(diagnosis.count(small, expected))
    streamed = await _ask(visit, *_prompt(SMALL, counter), stream=True)
    visit.findings.append(diagnosis.stream(streamed.status, streamed.prompt))
    factor = small.prompt / small.counted if small.prompt else expected
    await _oversize(visit, known, factor, counter, allowed=oversize)


async def _models(visit: _Visit) -> None:
    """Ask for the list of models; take the first one where none was named."""
    try:
        status, body = await _exchange(visit, "GET", "/v1/models", None)
    except NotFound as error:  # a provider that LiteLLM speaks for
        status, body = error.status, b""
    if status in (401, 403):
        advice = "Name the environment variable that holds its key: --key-env NAME, or set api_key."
        visit.findings.append(Finding("reachable", "error", f"it wants a key: {status} {_text(body)}", advice))
        raise Stopped
    names = _names(body) if status == 200 else []
    if not visit.model:
        if not names:
            text = f"its list of models cannot be read ({status})"
            visit.findings.append(Finding("models", "error", text, "Name one: --model NAME; check the URL's /v1."))
            raise Stopped
        visit.model = names[0]
    if status != 200:
        visit.findings.append(Finding("models", "info", f"it has no list of models ({status})"))
    elif names and visit.model not in names and f"{visit.model}:latest" not in names:
        text = f"{len(names)} listed, {visit.model} is not among them"
        visit.findings.append(Finding("models", "warning", text, f"It lists {', '.join(names[:5])}."))
    else:
        visit.findings.append(Finding("models", "ok", f"{len(names)} listed; asked about {visit.model}"))


async def _route(visit: _Visit, settings: Settings) -> tuple[Route, Told | None]:
    """What is known of the model ahead, and what the server told of it."""
    failures: list[BaseException] = []
    tasks = Tasks(lambda _, error: failures.append(error))
    probes = open_probes(settings, visit.upstream, tasks)
    await probes.survey(visit.name, [visit.model])
    told = find(dict(probes.windows(visit.name)), visit.model)
    await tasks.finish(0.0)
    catalogue = await asyncio.to_thread(open_catalogue, settings, lambda *_: told)
    return catalogue.resolve(visit.model), told


async def _small(visit: _Visit, counter: Any) -> Tried:
    text, counted = _prompt(SMALL, counter)
    tried = await _ask(visit, text, counted)
    if tried.status == 400 and "max_completion_tokens" in tried.said:
        visit.figure = "max_completion_tokens"
        tried = await _ask(visit, text, counted)
    if tried.status != 200:
        advice = "Check the model's name and the key."
        if tried.overflow is not None:
            advice = f"The window must be under {SMALL} tokens: raise the server's context."
        text = f"a short request is answered {tried.status}: {tried.said or '(empty)'}"
        visit.findings.append(Finding("answers", "error", text, advice))
        raise Stopped
    visit.findings.append(Finding("answers", "ok", "a short request is answered"))
    return tried


async def _oversize(visit: _Visit, known: Window, factor: float, counter: Any, *, allowed: bool) -> None:
    """Send what is too long for the window, or longer and longer requests where nobody knows it."""
    sizes: Sequence[int] = (int(ABOVE * known.tokens / factor) + SMALL,) if known.tokens else LADDER
    sizes = [min(size, MOST) for size in sizes]
    if not allowed:
        total = f"up to {sum(sizes):,}" if len(sizes) > 1 else f"about {sizes[0]:,}"
        text = f"not tried: it takes a request of {total} tokens, which a provider that accepts it bills"
        visit.findings.append(Finding("overflow", "info", text, "Repeat with --yes to try it."))
        return
    for size in sizes:
        tried = await _ask(visit, *await asyncio.to_thread(_prompt, size, counter))
        if tried.status != 200 or diagnosis.was_cut(tried, known, factor):
            break
    visit.findings.extend(diagnosis.overflow(tried, known, factor))


async def _ask(visit: _Visit, text: str, counted: int, *, stream: bool = False) -> Tried:
    """One chat request that asks for one token of answer."""
    asked: dict[str, Any] = {"model": visit.model, "messages": [{"role": "user", "content": text}], visit.figure: 1}
    if visit.figure == "max_completion_tokens":
        asked[visit.figure] = 16  # what such models accept at least
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    visit.sent += counted
    status, body = await _exchange(visit, "POST", "/v1/chat/completions", json.dumps(asked).encode())
    tap = UsageTap()
    tap.feed(body)
    found = visit.classifier.answer(status if status != 200 else 400, (), body, Prior(counted))
    if status == 200 and (found is None or b'"choices"' in body[:4096]):
        return Tried(counted, status, tap.usage.input_tokens)
    return Tried(counted, 400 if status == 200 else status, None, found, _text(body))


async def _exchange(visit: _Visit, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    headers = [("accept", "application/json"), ("accept-encoding", "identity"), ("user-agent", "ullage-doctor")]
    if body is not None:
        headers.append(("content-type", "application/json"))
    async with asyncio.timeout(visit.seconds):
        reply = await visit.upstream.send(visit.name, method, path, headers, body)
        taken = bytearray()
        try:
            while len(taken) < ERROR_BYTES and (chunk := await reply.next_chunk()):
                taken += chunk
        finally:
            reply.close()
    return reply.status, bytes(taken)


def _prompt(tokens: int, counter: Any) -> tuple[str, int]:
    """A text of about so many tokens, and the count of a request of just that."""
    line = f"{WORDS}. "
    each = counter(line)
    text = line * max(1, (tokens - PER_MESSAGE - PER_REPLY) // each)
    return text, counter(text) + PER_MESSAGE + PER_REPLY


def is_near(base_url: str) -> bool:
    """Whether a server is on this machine or a private network, where tokens cost nothing."""
    host = urlsplit(base_url).hostname or ""
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return bool(host) and "." not in host
    return address.is_loopback or address.is_private


def _names(body: bytes) -> list[str]:
    try:
        entries = json.loads(body)["data"]
        return [str(entry["id"]) for entry in entries]
    except (ValueError, KeyError, TypeError):
        return []


def _text(body: bytes) -> str:
    """The beginning of an error, on one line."""
    return " ".join(body[:4096].decode("utf-8", "replace").split())[:SHOWN]


def show_findings(found: Diagnosis) -> None:
    """Print what was found out about a server, with what to do about it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    signs = {"ok": "[green]ok[/]", "info": "[blue]--[/]", "warning": "[yellow]!![/]", "error": "[bold red]XX[/]"}
    for finding in found.findings:
        sign = signs[finding.level]
        table.add_row(sign, finding.topic, _plain(finding.text))
        if finding.remedy:
            table.add_row("", "", f"[dim]{_plain(finding.remedy)}[/]")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
    console.print(f"{_plain(found.model or '(no model)')} at {_plain(found.base_url)}", markup=True)
    console.print(table)
    console.print(f"{found.sent:,} tokens were sent, by our count.")


def _plain(text: str) -> str:
    """*text* so that rich shows its brackets."""
    from rich.markup import escape

    return escape(text)
