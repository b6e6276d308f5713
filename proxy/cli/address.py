"""The address of a running proxy, and what it answers on its own routes.

Imports nothing heavy: a container's health check runs every few seconds.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

HEALTH_SECONDS: Final = 3.0
"""Time in which a proxy has to answer one of these requests."""


def configured_address(environ: Mapping[str, str]) -> str:
    """Return the address of the proxy that *environ* configures."""
    host = environ.get("ULLAGE_SERVER__HOST", "127.0.0.1")
    return local_address(host, environ.get("ULLAGE_SERVER__PORT", "8484"))


def local_address(host: str, port: int | str) -> str:
    """Return the URL on this machine of a proxy that listens on *host*: the loopback address if it listens on all."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def readiness_status(address: str) -> int:
    """Return the status of the readiness route. Raises ``ValueError`` for no URL, ``OSError``, ``HTTPException``."""
    return get(address, "/health/ready")[0]


def get(address: str, path: str, key: str = "") -> tuple[int, bytes]:
    """Return status and body of *path* at the proxy's *address*, with the admin *key* if it is not empty.

    Raises as ``readiness_status`` does.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("give scheme and host, such as http://127.0.0.1:8484")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=HEALTH_SECONDS)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}{path}", headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
