"""Addresses on which a proxy listens. Imports little, as ``proxy/cli/address.py`` does."""

from __future__ import annotations

import ipaddress
from typing import Final

BACKLOG: Final = 1024
"""Connections that may wait to be accepted on each socket of a proxy."""


def bracketed(host: str) -> str:
    """Return *host* as it is written in a URL: an IPv6 address in brackets."""
    if ":" in host:
        return f"[{host}]"  # https://www.rfc-editor.org/rfc/rfc3986#section-3.2.2
    return host


def local_address(host: str, port: int | str) -> str:
    """Return the URL on this machine of a proxy that listens on *host*: the loopback address if it listens on all."""
    # The addresses for "all interfaces" are no destination: https://www.rfc-editor.org/rfc/rfc6890#section-2.2.2
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://{bracketed(host)}:{port}"


def without_version(url: str) -> str:
    """Return *url*, or the path of one, without the ``/v1`` in which the base URL of clients ends."""
    return url.rstrip("/").removesuffix("/v1")


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a listener on *host*, a name or an address."""
    name = host.strip("[]").partition("%")[0]
    if name.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    # An IPv4 address as a socket of both versions has it (https://www.rfc-editor.org/rfc/rfc4291#section-2.5.5.2).
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
