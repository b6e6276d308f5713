"""What the operator reads when the proxy starts: the summary, the line to paste, and upstreams that do not answer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from proxy import settings as configuration
from proxy.core.models import Catalogue
from proxy.settings import Settings

PATIENCE: Final = 3.0
"""Seconds an upstream has to accept a connection before its operator is warned."""

Warn = Callable[[str, dict[str, object]], None]


def announce(settings: Settings, catalogue: Catalogue, port: int, store: str) -> None:
    """Print the start-up summary on standard error: standard output is for log lines."""
    facts = {"address": f"http://{bracketed(settings.server.host)}:{port}", "store": store}
    for rule in settings.models:
        route = catalogue.resolve(rule.name)
        if rule.context_window is None and route.source == "table":
            facts[f"window {rule.name}"] = f"{route.window:,} tokens, by the model table"
    text = configuration.summary(settings, facts)
    paste = f"export OPENAI_BASE_URL={_reached(settings.server.host, port)}"
    print(f"ullage {configuration.version()}\n{text}\n{paste}", file=sys.stderr, flush=True)  # noqa: T201


def bracketed(host: str) -> str:
    """Return *host* as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


async def warn_of_silent(settings: Settings, warn: Warn) -> None:
    """Warn of each upstream that accepts no connection. It may start later: nothing else follows from it."""
    named = [upstream for upstream in settings.upstreams if upstream.base_url]
    causes = await asyncio.gather(*(unreachable(upstream.base_url) for upstream in named))
    for upstream, cause in zip(named, causes, strict=True):
        if cause:
            advice = f"requests for it are answered 502 until {upstream.base_url} accepts connections"
            warn("upstream.unreachable", {"upstream": upstream.name, "cause": cause, "advice": advice})


async def unreachable(base_url: str) -> str:
    """Return why no connection to *base_url* can be made; empty if one can. Nothing is sent."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(PATIENCE):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except TimeoutError:
        return f"no connection within {PATIENCE:g} seconds"
    except OSError as error:
        # asyncio words a refused connection itself, with the address twice.
        return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    writer.close()
    return ""


def _reached(host: str, port: int) -> str:
    """Return the base URL for clients on this machine: what listens everywhere is reached on the loopback address."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://{bracketed(local)}:{port}/v1"
