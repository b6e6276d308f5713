"""``ullage doctor``: asks a live server for its window, its usage figures and how it reports an overflow."""

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

from proxy.cli import diagnosis
from proxy.cli.diagnosis import Finding, Tried, Window
from proxy.core.apis.usage import UsageTap
from proxy.core.errors import NotFound, UllageError
from proxy.core.learned_window import prior_calibration
from proxy.core.models import Route, ServerWindow
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
"""Tokens of the short requests: enough for a count factor, and almost nothing on a bill."""

OVERSIZE_FACTOR: Final = 1.25
"""Size of the long request relative to the window: beyond the error of any count."""

LONG_SIZES: Final = (10_000, 40_000, 160_000)
"""Tokens of the long requests that are sent in turn if the window is unknown."""

MAX_TOKENS: Final = 1_500_000
"""Most tokens of a request: servers refuse longer bodies for their bytes."""

PER_MESSAGE, PER_REPLY = 4, 3
"""Tokens that a message and an answer add to their texts.

https://github.com/openai/openai-cookbook/blob/main/examples/How_to_count_tokens_with_tiktoken.ipynb
"""

SHOWN_CHARACTERS: Final = 200
"""Characters shown of an unknown error."""

ERROR_BYTES: Final = 2**20

FILLER: Final = "the harbour master keeps a careful ledger of each vessel that passes under the old stone bridge"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings on one model at one server; ``sent`` is our count of all input tokens sent."""

    upstream: str
    base_url: str
    model: str
    findings: tuple[Finding, ...]
    sent: int

    @property
    def healthy(self) -> bool:
        """True if conversations can be kept inside the window."""
        return all(finding.level != "error" for finding in self.findings)


@dataclass(slots=True)
class _Examination:
    """The examination of one server: how it is asked, and the findings so far."""

    upstream: Upstreams
    name: str
    seconds: float
    classifier: Classifier
    model: str = ""
    figure: str = "max_tokens"
    sent: int = 0
    findings: list[Finding] = field(default_factory=list)


class CannotContinue(Exception):
    """The examination cannot go on; the findings say why."""


async def examine(
    settings: Settings, model: str | None, *, key: str = "", oversize: bool = False, seconds: float = 120.0
) -> Diagnosis:
    """Examine *model* at its upstream; if none is named, the first one that the server lists.

    *key* replaces the upstream's own. *oversize* allows the long request even if it may be billed; a server on this
    machine or network is always sent it. Each request may take *seconds*.
    """
    target = settings.default_upstream()
    if model:
        try:
            catalogue = await asyncio.to_thread(open_catalogue, settings)
            route = catalogue.resolve(model)
            target, model = settings.upstream(route.upstream), route.model
        except (NotFound, KeyError):
            pass  # the default upstream is request, and answers what it makes of the name
    settings = _with_key(settings, target, key)
    async with _connected(settings, target.name, seconds) as exam:
        exam.model = model or ""
        try:
            await _examine(exam, settings, oversize or is_near(target.base_url))
        except CannotContinue:
            pass
        except (UllageError, TimeoutError) as error:
            text = str(error) or f"no answer within {seconds:g} s"
            exam.findings.append(Finding("reachable", "error", text, "Check the URL, and that the server is running."))
        return Diagnosis(target.name, target.base_url, exam.model, tuple(exam.findings), exam.sent)


def _with_key(settings: Settings, target: Upstream, key: str) -> Settings:
    """Return *settings* with *target* as the first upstream, and with *key* for it if there is one."""
    if key:
        target = target.model_copy(update={"api_key": SecretStr(key)})
    others = (each for each in settings.upstreams if each.name != target.name)
    return settings.model_copy(update={"upstreams": (target, *others)})


@asynccontextmanager
async def _connected(settings: Settings, name: str, seconds: float) -> AsyncIterator[_Examination]:
    classifier = Classifier(await asyncio.to_thread(overflow_rules, settings))
    failures: list[BaseException] = []
    tasks = Tasks(lambda _, error: failures.append(error))
    upstream = open_upstream(settings, open_bridge(settings, tasks))
    try:
        yield _Examination(upstream, name, seconds, classifier)
    finally:
        await upstream.close()
        await tasks.finish(0.0)


async def _examine(exam: _Examination, settings: Settings, oversize: bool) -> None:
    await _choose_model(exam)
    route, stated = await _resolve(exam, settings)
    source = f"{route.source}: {route.window_origin}" if route.window_origin else route.source
    known = Window(route.window, source, remedy(route))
    exam.findings.append(diagnosis.window(known))
    if stated and route.source == "configured" and route.window and stated.context_window < route.window:
        figures = f"{stated.context_window:,} ({stated.origin}), less than the {route.window:,} configured"
        text = f"the server itself says {figures}"
        advice = f"Set context_window: {stated.context_window}, or leave it out."
        exam.findings.append(Finding("window", "warning", text, advice))
    counter = await asyncio.to_thread(Tokenizers().counter, route.encoding)
    expected = prior_calibration(route.model, configured_encoding=route.configured_encoding).factor
    small = await _send_short(exam, counter)
    exam.findings.extend(diagnosis.count(small, expected))
    streamed = await _ask(exam, *_prompt(SMALL, counter), stream=True)
    exam.findings.append(diagnosis.stream(streamed.status, streamed.prompt))
    factor = small.prompt / small.counted if small.prompt else expected
    await _send_long(exam, known, factor, counter, allowed=oversize)


async def _choose_model(exam: _Examination) -> None:
    """Ask for the list of models; if none was named, choose the first one."""
    try:
        status, body = await _exchange(exam, "GET", "/v1/models", None)
    except NotFound as error:  # a provider behind LiteLLM
        status, body = error.status, b""
    if status in (401, 403):
        advice = "Name the environment variable that holds its key: --key-env NAME, or set api_key."
        exam.findings.append(Finding("reachable", "error", f"it wants a key: {status} {_one_line(body)}", advice))
        raise CannotContinue
    names = _model_names(body) if status == 200 else []
    if not exam.model:
        if not names:
            text = f"its list of models cannot be read ({status})"
            exam.findings.append(Finding("models", "error", text, "Name one: --model NAME; check the URL's /v1."))
            raise CannotContinue
        exam.model = names[0]
    if status != 200:
        exam.findings.append(Finding("models", "info", f"it has no list of models ({status})"))
    elif names and exam.model not in names and f"{exam.model}:latest" not in names:
        text = f"{len(names)} listed, {exam.model} is not among them"
        exam.findings.append(Finding("models", "warning", text, f"It lists {', '.join(names[:5])}."))
    else:
        exam.findings.append(Finding("models", "ok", f"{len(names)} listed; asked about {exam.model}"))


async def _resolve(exam: _Examination, settings: Settings) -> tuple[Route, ServerWindow | None]:
    """Return the model's route, and its window as the server states it."""
    failures: list[BaseException] = []
    tasks = Tasks(lambda _, error: failures.append(error))
    probes = open_probes(settings, exam.upstream, tasks)
    await probes.probe_now(exam.name, [exam.model])
    stated = find(dict(probes.windows(exam.name)), exam.model)
    await tasks.finish(0.0)
    catalogue = await asyncio.to_thread(open_catalogue, settings, lambda *_: stated)
    return catalogue.resolve(exam.model), stated


async def _send_short(exam: _Examination, counter: Any) -> Tried:
    text, counted = _prompt(SMALL, counter)
    tried = await _ask(exam, text, counted)
    if tried.status == 400 and "max_completion_tokens" in tried.said:
        exam.figure = "max_completion_tokens"
        tried = await _ask(exam, text, counted)
    if tried.status != 200:
        advice = "Check the model's name and the key."
        if tried.overflow is not None:
            advice = f"The window must be under {SMALL} tokens: raise the server's context."
        text = f"a short request is answered {tried.status}: {tried.said or '(empty)'}"
        exam.findings.append(Finding("answers", "error", text, advice))
        raise CannotContinue
    exam.findings.append(Finding("answers", "ok", "a short request is answered"))
    return tried


async def _send_long(exam: _Examination, known: Window, factor: float, counter: Any, *, allowed: bool) -> None:
    """Send a request that is too long for the window; if that is unknown, longer and longer ones."""
    sizes: Sequence[int] = (int(OVERSIZE_FACTOR * known.tokens / factor) + SMALL,) if known.tokens else LONG_SIZES
    sizes = [min(size, MAX_TOKENS) for size in sizes]
    if not allowed:
        total = f"up to {sum(sizes):,}" if len(sizes) > 1 else f"about {sizes[0]:,}"
        text = f"not tried: it takes a request of {total} tokens, which a provider that accepts it bills"
        exam.findings.append(Finding("overflow", "info", text, "Repeat with --yes to try it."))
        return
    for size in sizes:
        tried = await _ask(exam, *await asyncio.to_thread(_prompt, size, counter))
        if tried.status != 200 or diagnosis.was_cut(tried, known, factor):
            break
    exam.findings.extend(diagnosis.overflow(tried, known, factor))


async def _ask(exam: _Examination, text: str, counted: int, *, stream: bool = False) -> Tried:
    """Send a chat request that asks for one token of answer."""
    request: dict[str, Any] = {"model": exam.model, "messages": [{"role": "user", "content": text}], exam.figure: 1}
    if exam.figure == "max_completion_tokens":
        request[exam.figure] = 16  # the fewest that such models accept
    if stream:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    exam.sent += counted
    status, body = await _exchange(exam, "POST", "/v1/chat/completions", json.dumps(request).encode())
    tap = UsageTap()
    tap.feed(body)
    found = exam.classifier.answer(status if status != 200 else 400, (), body, Prior(counted))
    if status == 200 and (found is None or b'"choices"' in body[:4096]):
        return Tried(counted, status, tap.usage.input_tokens)
    return Tried(counted, 400 if status == 200 else status, None, found, _one_line(body))


async def _exchange(exam: _Examination, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    headers = [("accept", "application/json"), ("accept-encoding", "identity"), ("user-agent", "ullage-doctor")]
    if body is not None:
        headers.append(("content-type", "application/json"))
    async with asyncio.timeout(exam.seconds):
        reply = await exam.upstream.send(exam.name, method, path, headers, body)
        taken = bytearray()
        try:
            while len(taken) < ERROR_BYTES and (chunk := await reply.next_chunk()):
                taken += chunk
        finally:
            reply.close()
    return reply.status, bytes(taken)


def _prompt(tokens: int, counter: Any) -> tuple[str, int]:
    """Return a text of about *tokens* tokens, and the count of a request with this one message."""
    line = f"{FILLER}. "
    each = counter(line)
    text = line * max(1, (tokens - PER_MESSAGE - PER_REPLY) // each)
    return text, counter(text) + PER_MESSAGE + PER_REPLY


def is_near(base_url: str) -> bool:
    """True if the server is on this machine or a private network, where tokens cost nothing."""
    host = urlsplit(base_url).hostname or ""
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return bool(host) and "." not in host
    return address.is_loopback or address.is_private


def _model_names(body: bytes) -> list[str]:
    try:
        entries = json.loads(body)["data"]
        return [str(entry["id"]) for entry in entries]
    except (ValueError, KeyError, TypeError):
        return []


def _one_line(body: bytes) -> str:
    """Return the beginning of an error on one line."""
    return " ".join(body[:4096].decode("utf-8", "replace").split())[:SHOWN_CHARACTERS]


def show_findings(found: Diagnosis) -> None:
    """Print the findings on a server, with their remedies."""
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
    """Return *text* escaped, so that rich prints its brackets."""
    from rich.markup import escape

    return escape(text)
