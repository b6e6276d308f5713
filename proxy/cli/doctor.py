"""``ullage doctor``: sends requests to a live server to see its window, its usage and how it reports an overflow."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import SecretStr
from rich.table import Table
from rich.text import Text

from proxy.cli import diagnosis
from proxy.cli.diagnosis import Attempt, Finding, Level, Window
from proxy.cli.output import table_console, window_source
from proxy.core.apis.usage import UsageTap
from proxy.core.errors import NotFound, UllageError
from proxy.core.learned_window import prior_calibration
from proxy.core.models import Route, ServerWindow
from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.evidence import Prior
from proxy.engine.learned_routes import remedy
from proxy.engine.replies import read_up_to
from proxy.offline import offline_tokenizers
from proxy.settings import Settings, overflow_rules
from proxy.settings.upstreams import Upstream
from proxy.tasks import Tasks, ignore_failure
from proxy.upstream import Upstreams, find_window
from proxy.upstream_wiring import open_bridge, open_catalogue, open_probes, open_upstream

SHORT_REQUEST: Final = 400
"""Tokens of the short requests: enough for a count factor, and almost nothing on a bill."""

OVERSIZE_FACTOR: Final = 1.25
"""Size of the long request relative to the window: beyond the error of any count."""

LONG_SIZES: Final = (10_000, 40_000, 160_000)
"""Tokens of the long requests that are sent one after the other if the window is unknown."""

MAX_TOKENS: Final = 1_500_000
"""Most tokens of a request: servers refuse larger bodies for their bytes, which says nothing about the window."""

PER_MESSAGE, PER_REPLY = 4, 3
"""Tokens that each message, and the start of the answer, add to their texts.

https://github.com/openai/openai-cookbook/blob/main/examples/How_to_count_tokens_with_tiktoken.ipynb
"""

SHOWN_CHARACTERS: Final = 200
"""Characters shown of an error that is not recognised."""

MAX_REPLY_BYTES: Final = 2**20
"""Bytes read of a reply."""

REASONING_LIMIT: Final = 16
"""``max_completion_tokens`` of the short requests: it covers the reasoning as well, which takes more than one token.

https://platform.openai.com/docs/guides/reasoning
"""

FILLER: Final = "the harbour master keeps a careful ledger of each vessel that passes under the old stone bridge"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings on one model at one server; ``sent`` is our count of all input tokens sent."""

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
    """The examination of the upstream *name*, and the findings so far.

    ``seconds`` is the time for each request, ``limit_name`` the member that limits the answer of this model.
    """

    upstream: Upstreams
    name: str
    seconds: float
    classifier: Classifier
    model: str = ""
    limit_name: str = "max_tokens"
    sent: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, topic: str, level: Level, text: str, remedy: str = "") -> None:
        """Add one finding."""
        self.findings.append(Finding(topic, level, text, remedy))


class CannotContinue(Exception):
    """The examination cannot continue; the findings have the reason."""


async def examine(settings: Settings, model: str | None, *, key: str, oversize: bool, seconds: float) -> Diagnosis:
    """Examine *model* at its upstream; without a name, the first model that the default upstream lists.

    *key* replaces the upstream's own. *oversize* allows the long request even if it may be billed; a server on this
    machine or network always gets it. Each request may take *seconds*.
    """
    target = settings.default_upstream()
    if model:
        target, model = await asyncio.to_thread(_resolve_name, settings, model)
    settings = _with_key(settings, target, key)
    async with _connected(settings, target.name, seconds) as exam:
        exam.model = model or ""
        try:
            await _examine(exam, settings, oversize or is_local_server(target.base_url))
        except CannotContinue:
            pass
        except (UllageError, TimeoutError) as error:
            text = str(error) or f"no answer within {seconds:g} s"
            exam.add("reachable", "error", text, "Check the URL, and that the server is running.")
        return Diagnosis(target.name, target.base_url, exam.model, tuple(exam.findings), exam.sent)


def _resolve_name(settings: Settings, model: str) -> tuple[Upstream, str]:
    """Return the upstream of *model*, and its name there; the default upstream if no rule matches the name."""
    try:
        route = open_catalogue(settings).resolve(model)
        return settings.upstream(route.upstream), route.model
    except (NotFound, KeyError):
        return settings.default_upstream(), model


def _with_key(settings: Settings, target: Upstream, key: str) -> Settings:
    """Return *settings* with *target* as the first upstream, and with *key* as its key if it is not empty."""
    if key:
        target = target.model_copy(update={"api_key": SecretStr(key)})
    others = (upstream for upstream in settings.upstreams if upstream.name != target.name)
    return settings.model_copy(update={"upstreams": (target, *others)})


@asynccontextmanager
async def _connected(settings: Settings, name: str, seconds: float) -> AsyncIterator[_Examination]:
    classifier = Classifier(await asyncio.to_thread(overflow_rules, settings.overflow_rules))
    tasks = Tasks(ignore_failure)
    upstream = open_upstream(settings, open_bridge(settings, tasks))
    try:
        yield _Examination(upstream, name, seconds, classifier)
    finally:
        await upstream.close()
        await tasks.finish(0.0)


async def _examine(exam: _Examination, settings: Settings, oversize: bool) -> None:
    """Send the requests one after the other, and add their findings. Raises ``CannotContinue``."""
    await _choose_model(exam)
    route, stated = await _resolve(exam, settings)
    usable = Window(route.window, window_source(route), remedy(route))
    exam.findings.append(diagnosis.window_finding(usable))
    if stated is not None and route.source == "configured" and usable.tokens:
        exam.findings.extend(diagnosis.smaller_window_findings(usable.tokens, stated.context_window, stated.origin))
    counter = await asyncio.to_thread(offline_tokenizers().counter, route.encoding)
    expected = prior_calibration(route.model, configured_encoding=route.configured_encoding).factor
    short = await _send_short(exam, counter)
    exam.findings.extend(diagnosis.usage_findings(short, expected))
    streamed = await _send(exam, *_prompt(SHORT_REQUEST, counter), stream=True)
    exam.findings.append(diagnosis.stream_finding(streamed.status, streamed.prompt))
    factor = expected
    if short.prompt:
        factor = short.prompt / short.counted
    await _send_long(exam, usable, factor, counter, allowed=oversize)


async def _choose_model(exam: _Examination) -> None:
    """Look the model up in the server's list; if none was named, choose the first one."""
    try:
        status, body = await _exchange(exam, "GET", "/v1/models", None)
    except NotFound as error:  # a provider behind LiteLLM has no list
        status, body = error.status, b""
    if status in (401, 403):
        advice = "Name the environment variable that holds its key: --key-env NAME, or set api_key."
        exam.add("reachable", "error", f"it requires a key: {status} {_one_line(body)}", advice)
        raise CannotContinue
    names: list[str] = []
    if status == 200:
        names = _model_names(body)
    if not exam.model and not names:
        text = f"its list of models cannot be read ({status})"
        exam.add("models", "error", text, "Name one: --model NAME; check the URL's /v1.")
        raise CannotContinue
    exam.model = exam.model or names[0]
    if status != 200:
        exam.add("models", "info", f"it has no list of models ({status})")
    elif names and exam.model not in names and f"{exam.model}:latest" not in names:
        text = f"{len(names)} listed, {exam.model} is not among them"
        exam.add("models", "warning", text, f"It lists {', '.join(names[:5])}.")
    else:
        exam.add("models", "ok", f"{len(names)} listed; examining {exam.model}")


async def _resolve(exam: _Examination, settings: Settings) -> tuple[Route, ServerWindow | None]:
    """Return the model's route, and its window as the server states it; None if it states none."""
    tasks = Tasks(ignore_failure)
    probes = open_probes(settings, exam.upstream, tasks)
    await probes.probe_now(exam.name, [exam.model])
    stated = find_window(dict(probes.windows(exam.name)), exam.model)
    await tasks.finish(0.0)
    catalogue = await asyncio.to_thread(open_catalogue, settings, lambda *_: stated)
    return catalogue.resolve(exam.model), stated


async def _send_short(exam: _Examination, counter: Any) -> Attempt:
    """Send a short request. Raises ``CannotContinue`` if it is not answered."""
    text, counted = _prompt(SHORT_REQUEST, counter)
    attempt = await _send(exam, text, counted)
    if attempt.status == 400 and "max_completion_tokens" in attempt.error:
        exam.limit_name = "max_completion_tokens"
        attempt = await _send(exam, text, counted)
    if attempt.status != 200:
        advice = "Check the model's name and the key."
        if attempt.overflow is not None:
            advice = f"The window must be under {SHORT_REQUEST} tokens: raise the server's context."
        text = f"a short request is answered {attempt.status}: {attempt.error or '(empty)'}"
        exam.add("answers", "error", text, advice)
        raise CannotContinue
    exam.add("answers", "ok", "a short request is answered")
    return attempt


async def _send_long(exam: _Examination, usable: Window, factor: float, counter: Any, *, allowed: bool) -> None:
    """Send a request that is too long for the window; if that is unknown, longer and longer ones."""
    sizes = _long_sizes(usable, factor)
    if not allowed:
        total = f"about {sizes[0]:,}"
        if len(sizes) > 1:
            total = f"up to {sum(sizes):,}"
        text = f"not tried: it takes a request of {total} tokens, which a provider that accepts it bills"
        exam.add("overflow", "info", text, "Repeat with --yes to try it.")
        return
    # From the shortest on: a longer request than needed costs money, and may be refused for its bytes.
    for size in sizes:
        attempt = await _send(exam, *await asyncio.to_thread(_prompt, size, counter))
        if attempt.status != 200 or diagnosis.was_truncated(attempt, usable, factor):
            break
    exam.findings.extend(diagnosis.overflow_findings(attempt, usable, factor))


def _long_sizes(usable: Window, factor: float) -> Sequence[int]:
    """Return the sizes of the long requests to try, by our own count."""
    if not usable.tokens:
        return LONG_SIZES
    return [min(MAX_TOKENS, int(OVERSIZE_FACTOR * usable.tokens / factor) + SHORT_REQUEST)]


async def _send(exam: _Examination, text: str, counted: int, *, stream: bool = False) -> Attempt:
    """Send a chat request whose answer is limited to as few tokens as the model allows."""
    limit = 1
    if exam.limit_name == "max_completion_tokens":
        limit = REASONING_LIMIT
    messages = [{"role": "user", "content": text}]
    request: dict[str, Any] = {"model": exam.model, "messages": messages, exam.limit_name: limit}
    if stream:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    exam.sent += counted
    status, body = await _exchange(exam, "POST", "/v1/chat/completions", json.dumps(request).encode())
    error_status = status
    if status == 200:
        error_status = 400  # some servers answer 200 with an error in the body
    overflow = exam.classifier.answer(error_status, (), body, Prior(counted))
    if status == 200 and (overflow is None or b'"choices"' in body[:4096]):
        tap = UsageTap()
        tap.feed(body)
        return Attempt(counted, status, tap.usage.input_tokens)
    return Attempt(counted, error_status, None, overflow, _one_line(body))


async def _exchange(exam: _Examination, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    """Send one request; return the status and the body of the reply."""
    # ``identity``: the body is read as it comes, without a decoder.
    headers = [("accept", "application/json"), ("accept-encoding", "identity"), ("user-agent", "ullage-doctor")]
    if body is not None:
        headers.append(("content-type", "application/json"))
    async with asyncio.timeout(exam.seconds):
        reply = await exam.upstream.send(exam.name, method, path, headers, body)
        received: list[bytes] = []
        try:
            await read_up_to(reply, received, MAX_REPLY_BYTES)
        finally:
            reply.close()
    return reply.status, b"".join(received)


def _prompt(tokens: int, counter: Any) -> tuple[str, int]:
    """Return a text for a request of about *tokens* tokens, and our count of that request."""
    line, frame = f"{FILLER}. ", PER_MESSAGE + PER_REPLY
    text = line * max(1, (tokens - frame) // counter(line))
    return text, counter(text) + frame


def is_local_server(base_url: str) -> bool:
    """True if the server is on this machine or a private network, where tokens cost nothing."""
    host = urlsplit(base_url).hostname or ""
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name without a dot is of the local network, such as a container's
        return bool(host) and "." not in host
    return address.is_loopback or address.is_private


def _model_names(body: bytes) -> list[str]:
    """Return the ids in a list of models; empty if *body* is no such list."""
    try:
        return [str(entry["id"]) for entry in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def _one_line(body: bytes) -> str:
    """Return the beginning of an error on one line."""
    return " ".join(body[:4096].decode("utf-8", "replace").split())[:SHOWN_CHARACTERS]


SIGNS: Final[Mapping[Level, tuple[str, str]]] = MappingProxyType(
    {"ok": ("ok", "green"), "info": ("--", "blue"), "warning": ("!!", "yellow"), "error": ("XX", "bold red")}
)
"""The sign of each level, and its style."""


def show_findings(result: Diagnosis) -> None:
    """Print the findings on a server, with their remedies."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in result.findings:
        table.add_row(Text(*SIGNS[finding.level]), finding.topic, finding.text)
        if finding.remedy:
            table.add_row("", "", Text(finding.remedy, "dim"))
    console = table_console()
    console.print(f"{result.model or '(no model)'} at {result.base_url}")
    console.print(table)
    console.print(f"{result.sent:,} tokens were sent, by our count.")
