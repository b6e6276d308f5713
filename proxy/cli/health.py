"""Asking a running proxy whether it is ready, by the standard library alone: probes do it every few seconds."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from urllib.parse import urlsplit

HEALTH_SECONDS = 3.0
"""How long the proxy has to answer."""


def configured_address(environ: Mapping[str, str]) -> str:
    """Where the proxy that *environ* configures is asked."""
    host = environ.get("ULLAGE_SERVER__HOST", "127.0.0.1")
    # What listens everywhere is asked on this machine's own address.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{environ.get('ULLAGE_SERVER__PORT', '8484')}"


def ready(address: str) -> int:
    """The status of its readiness route. Raises ``ValueError`` for no URL, ``OSError``, ``HTTPException``."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("give scheme and host, such as http://127.0.0.1:8484")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=HEALTH_SECONDS)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health/ready")
        return connection.getresponse().status
    finally:
        connection.close()
