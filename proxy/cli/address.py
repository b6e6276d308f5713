"""Finds a running proxy and reads its own routes.

Imports nothing heavy: a container's health check runs every few seconds.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

from proxy.addresses import local_address, without_version

HEALTH_SECONDS: Final = 3.0
"""Seconds for one request. Docker ends the image's health check after five (``HEALTHCHECK --timeout``):
https://docs.docker.com/reference/dockerfile/#healthcheck
"""

DATA: Final = b"data: "
"""The beginning of a line of a server-sent event: https://html.spec.whatwg.org/multipage/server-sent-events.html"""


def configured_address(environ: Mapping[str, str]) -> str:
    """Return the address of the proxy that *environ* configures."""
    host = environ.get("ULLAGE_SERVER__HOST", "127.0.0.1")
    return local_address(host, environ.get("ULLAGE_SERVER__PORT", "8484"))


def readiness_status(address: str) -> int:
    """Return the status of the readiness route. Raises ``ValueError`` for no URL, ``OSError``, ``HTTPException``."""
    return get(address, "/health/ready")[0]


def get(address: str, path: str, key: str = "") -> tuple[int, bytes]:
    """Return status and body of *path* at the proxy's *address*, with the admin *key* if it is not empty.

    The address may be the base URL of clients, which ends in ``/v1``. Raises as ``readiness_status`` does.
    """
    with _opened(address, path, key) as response:
        return response.status, response.read()


def first_event(address: str, path: str, key: str) -> bytes:
    """Return the data of the first server-sent event of *path*; empty if there is no such stream for this caller.

    Raises as ``readiness_status`` does.
    """
    with _opened(address, path, key) as response:
        if response.status != http.client.OK:
            return b""
        while line := response.readline():
            if line.startswith(DATA):
                return line.removeprefix(DATA)
        return b""


@contextmanager
def _opened(address: str, path: str, key: str) -> Iterator[http.client.HTTPResponse]:
    """Yield the response to a GET; close its connection afterwards."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("give scheme and host, such as http://127.0.0.1:8484")
    kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
    if parts.scheme == "https":
        kind = http.client.HTTPSConnection
    connection = kind(parts.hostname, parts.port, timeout=HEALTH_SECONDS)
    headers = {}
    if key:
        headers["authorization"] = f"Bearer {key}"
    try:
        connection.request("GET", f"{without_version(parts.path)}{path}", headers=headers)
        yield connection.getresponse()
    finally:
        connection.close()
