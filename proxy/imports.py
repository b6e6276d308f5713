"""What a starting server imports, without the work that imports do for nothing: a fifth of a start.

* Collecting garbage: what an import makes stays (``proxy.garbage``).
* Reading the certificates of authorities: aiohttp does that twice while it is imported, also if no upstream uses TLS
  (https://github.com/aio-libs/aiohttp/blob/3.14/aiohttp/connector.py). They are read before the first connection that
  needs them. A context that lacks them trusts no server.
* Rich: structlog imports it if it is installed, to colour tracebacks
  (https://www.structlog.org/en/stable/console-output.html).

Imports little, because it is there before all that a process imports.
"""

from __future__ import annotations

import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

from proxy.garbage import without_collections

_waiting: Final[list[ssl.SSLContext]] = []
"""Contexts that lack the certificates of authorities."""

_READING: Final = threading.Lock()


@contextmanager
def lean_imports() -> Iterator[None]:
    """Import without that work meanwhile."""
    with without_collections(), _certificates_postponed(), _without_rich():
        yield


def lacks_certificates() -> bool:
    """Return True until ``read_certificates`` has returned, if contexts were made without certificates."""
    return bool(_waiting)


def read_certificates() -> None:
    """Read the certificates that were postponed. That takes some 50 ms for each context, so call it in a thread."""
    with _READING:
        for context in _waiting:
            context.set_default_verify_paths()
        _waiting.clear()


@contextmanager
def _certificates_postponed() -> Iterator[None]:
    """Have contexts that are made meanwhile wait for their certificates."""
    # It hides the method of the base class, which is written in C.
    cast("Any", ssl.SSLContext).set_default_verify_paths = lambda context: _waiting.append(context)
    try:
        yield
    finally:
        del ssl.SSLContext.set_default_verify_paths


@contextmanager
def _without_rich() -> Iterator[None]:
    """Have rich count as missing meanwhile, unless it is imported already."""
    if "rich" in sys.modules:
        yield
        return
    # https://docs.python.org/3/reference/import.html#the-module-cache
    cast("Any", sys.modules)["rich"] = None
    try:
        yield
    finally:
        del sys.modules["rich"]
