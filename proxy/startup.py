"""Messages for the operator at the start: a summary of the settings, and warnings of unreachable upstreams."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from proxy import settings as configuration
from proxy.addresses import bracketed, is_loopback, local_address
from proxy.core.models import Catalogue
from proxy.features.settings import summary_lines
from proxy.settings import Model, Settings, Upstream
from proxy.tasks import Warn
from proxy.terminal import fold_lines

CONNECT_SECONDS: Final = 3.0
"""Time in which an upstream has to accept a connection before the operator is warned."""

SUMMARY_INDENT: Final = 13
"""Columns of the names before the texts of the summary."""

DEFAULT_PORTS: Final = {"http": 80, "https": 443}
"""Ports of URLs that name none: https://www.rfc-editor.org/rfc/rfc9110#section-4.2"""


def print_summary(settings: Settings, catalogue: Catalogue, port: int, store: str) -> None:
    """Print the start-up summary to standard error, because standard output is for log lines."""
    facts = {"address": f"http://{bracketed(settings.server.host)}:{port}", "store": store}
    for rule in settings.models:
        route = catalogue.resolve(rule.name)
        if rule.window is None and route.source == "table":
            facts[f"window {rule.name}"] = f"{route.window:,} tokens, by the model table"
    text = fold_lines(settings_summary(settings, facts), sys.stderr, SUMMARY_INDENT)
    export = f"export OPENAI_BASE_URL={local_address(settings.server.host, port)}/v1"
    print(f"ullage {configuration.version()}\n{text}\n{export}", file=sys.stderr, flush=True)  # noqa: T201


class CannotListen(Exception):
    """The configured address cannot be listened on; the text has the address, the reason and a remedy."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        remedy = ""
        if error.errno == errno.EADDRINUSE:
            remedy = " Give another --port, or 0 for any free one."
        super().__init__(f"{bracketed(host)}:{port}: {_reason(error).lower()}.{remedy}")


def _reason(error: OSError) -> str:
    """Return the system's text for *error*."""
    if error.errno and error.errno > 0:  # the resolver's numbers are negative and have none
        return os.strerror(error.errno)
    return error.strerror or type(error).__name__


async def warn_of_unreachable(settings: Settings, warn: Warn) -> None:
    """Warn of each upstream that accepts no connection. It is only a warning: the upstream may start later."""
    addressed = [upstream for upstream in settings.upstreams if upstream.base_url]
    causes = await asyncio.gather(*(_upstream_problem(upstream) for upstream in addressed))
    for upstream, cause in zip(addressed, causes, strict=True):
        if cause:
            advice = f"requests for it are answered 502 until {upstream.base_url} accepts connections"
            warn("upstream.unreachable", {"upstream": upstream.name, "cause": cause, "advice": advice})


async def _upstream_problem(upstream: Upstream) -> str:
    """Return why *upstream*, or the forward proxy that leads to it, accepts no connection; empty if it does."""
    if upstream.proxy is None:
        return await connection_problem(upstream.base_url)
    cause = await connection_problem(upstream.proxy.get_secret_value())
    if cause:
        return f"its forward proxy: {cause}"
    return ""


async def connection_problem(base_url: str) -> str:
    """Return why no connection to *base_url* can be made; empty if one can. Nothing is sent."""
    parts = urlsplit(base_url)
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except TimeoutError:
        return f"no connection within {CONNECT_SECONDS:g} seconds"
    except OSError as error:
        if error.errno and error.errno > 0:
            return os.strerror(error.errno)  # asyncio's own text has the address twice
        return str(error)
    writer.close()
    return ""


def settings_summary(settings: Settings, facts: Mapping[str, str]) -> str:
    """Return a few lines on address, upstreams, windows, store, access and marks, without a secret.

    *facts* are known to a running proxy only and replace configured values: ``address``, ``store``, and
    ``window <rule>`` for a rule whose window is in the model table.
    """
    lines = [("listening", _listening(settings, facts))]
    if settings.telemetry.page.enabled:
        lines.append(("page", f"{_address(settings, facts)}/ullage/"))
    lines.extend(("upstream", _upstream(upstream, settings)) for upstream in settings.upstreams)
    lines.extend(("model", _rule(rule, facts)) for rule in settings.models or (Model(name="*"),))
    lines.append(("store", facts.get("store") or _store(settings)))
    lines.append(("access", _access(settings)))
    lines.append(("compression", _compression(settings)))
    if settings.compression.mode == "on":
        lines.append(("summaries", _summaries(settings)))
    lines.extend(summary_lines(settings))
    return "\n".join(f"  {name:<12} {text}" for name, text in lines)


def _listening(settings: Settings, facts: Mapping[str, str]) -> str:
    address, workers = _address(settings, facts), settings.server.workers
    if workers > 1:
        return f"{address}/v1  ({workers} workers)"
    return f"{address}/v1"


def _address(settings: Settings, facts: Mapping[str, str]) -> str:
    """Return the URL of the listener, without a path."""
    server = settings.server
    return facts.get("address") or f"http://{bracketed(server.host)}:{server.port}"


def _upstream(upstream: Upstream, settings: Settings) -> str:
    address = upstream.base_url
    if upstream.bridged:
        address = f"{upstream.provider} through LiteLLM  {upstream.base_url}".rstrip()
    key = "the client's key"
    if upstream.has_ambient_credentials:
        key = "its environment's credentials"
    elif upstream.api_key:
        key = "its own key"
    if upstream == settings.default_upstream():
        key += ", default"
    return f"{upstream.name}  {address}  ({key})"


def _compression(settings: Settings) -> str:
    compression = settings.compression
    if compression.mode == "off":
        return "off"
    return f"{compression.mode}: above {compression.high_mark:.0%} of the room, down to {compression.low_mark:.0%}"


def _rule(rule: Model, facts: Mapping[str, str]) -> str:
    name = rule.name
    if rule.model:
        name = f"{name}  = {rule.model}"
    text = f"{name}  window: {facts.get(f'window {rule.name}') or _window(rule)}"
    if rule.upstream:
        text += f"  -> {rule.upstream}"
    if rule.fallbacks:
        text += f"  on {', '.join(rule.fallback_on)}: {', '.join(rule.steps)}"
    return text


def _window(rule: Model) -> str:
    if rule.window is not None:
        return f"{rule.window:,} tokens"
    last = "learned from the first overflow"
    if rule.unknown_window != "learn":
        last = f"{rule.unknown_window:,} tokens"
    return f"stated by the server, else by the model table, else {last}"


def _store(settings: Settings) -> str:
    url = settings.store.url
    if url == "embedded":
        return f"embedded  ({settings.store.path})"
    if "://" not in url:
        return url
    # The URL may hold a password, in its user part or its query.
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _summaries(settings: Settings) -> str:
    summaries = settings.summaries
    if summaries.mode == "off":
        return "off, no model is called"
    writer = summaries.model or "the request's own model, with its own key"
    return f"{summaries.mode}, by {writer}; at most {summaries.spend:.0%} of the tokens a client sends in an hour"


def _access(settings: Settings) -> str:
    count = len(settings.server.access_keys)
    if count > 1:
        return f"{count} access keys"
    if count == 1:
        return "1 access key"
    if is_loopback(settings.server.host):
        return "this machine only, no key"
    return "anybody who reaches the address"


def cannot_start(reason: Exception | str) -> int:
    """Print why the proxy does not start; return the exit code."""
    print(f"ullage: cannot start: {reason}", file=sys.stderr, flush=True)  # noqa: T201 - the operator's terminal
    return 1
