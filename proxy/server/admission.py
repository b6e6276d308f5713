"""Bounds the number of requests under way, ends them when the process ends, and refuses at little cost."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from proxy.core.errors import Overloaded
from proxy.core.report import Report
from proxy.server import response
from proxy.server.access import Access
from proxy.server.config import Limits, Observe
from proxy.server.incoming import BodyBytes, IncomingRequest
from proxy.server.request import RequestPath, is_local
from proxy.server.response import ResponseWriter
from proxy.tasks import Faults

_CUT_SECONDS: Final = 2.0
"""Seconds that a cut request may take to end its answer."""


class Drain:
    """The requests of one process under way; when it ends, they are waited for and then cancelled.

    ``running`` are their tasks, which the handler adds and removes; at most ``limit`` are admitted. ``socket_closers``
    are called when the process closes its connections: each ends a WebSocket on which no request is under way.
    """

    FULL: Final = "The proxy handles as many requests as it may (server.limits.in_flight). Try again soon."

    def __init__(self, limits: Limits) -> None:
        self.limit = limits.in_flight
        self.running: set[asyncio.Task[Any]] = set()
        self.socket_closers: set[Callable[[], None]] = set()
        self.body_bytes = BodyBytes(limits.in_flight_bytes)
        self.draining = False
        self.cutting = False

    def refusal(self) -> Overloaded:
        """Return the error for a request that came during the shut-down, or above the limit."""
        if self.draining:
            return Overloaded("The proxy is shutting down. Try again: another one will answer.")
        return Overloaded(self.FULL)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, give running ones *seconds*, then end them."""
        self.draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        # Refused requests are tasks here, too, until their answers are written: new ones come while others end.
        while self.running and (left := end - loop.time()) > 0:
            await asyncio.wait(self.running, timeout=left)
        self.cutting = True
        late = list(self.running)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=_CUT_SECONDS)


class QuickRefusal:
    """Refuses requests while the proxy is full, at little cost.

    At three times the capacity there are two refusals for each answer, and they take time from it: some 60 µs each
    here, twice that in the handler. Only a program's plain POST is refused here; browsers' requests, other methods and
    requests during the shut-down are left to the handler.
    """

    def __init__(
        self, drain: Drain, access: Access, limits: Limits, observers: Sequence[Observe], faults: Faults
    ) -> None:
        self._drain = drain
        self._access = access
        self._limits = limits
        self._observers = observers
        self._faults = faults
        self._prefix = os.urandom(6).hex()
        self._count = itertools.count(1)

    def concerns(self, request: IncomingRequest, path: RequestPath) -> bool:
        """True if this request, which came while the proxy was full, is to be refused here."""
        headers, transport = request.headers, request.transport
        return (
            request.method == "POST"
            and not self._drain.draining
            and "origin" not in headers
            and transport is not None
            and not transport.is_closing()
            and not is_local(path.path)
            and self._access.knows_host(headers.get("host", ""))
        )

    def refuse(self, request: IncomingRequest, path: RequestPath) -> ResponseWriter:
        """Write the refusal."""
        began = time.perf_counter()
        out = ResponseWriter(request, self._limits.write)
        out.keep_alive = out.keep_alive and request.content.is_eof()
        error = Overloaded(Drain.FULL)
        identity = f"{self._prefix}-{next(self._count):x}"
        report = Report(identity, path.api, outcome="refused", reason=error.code, status=error.status)
        response.refuse(out, error, path.error_api, response.own_headers(report, self._faults), ())
        seconds = time.perf_counter() - began
        for observe in self._observers:
            self._faults.attempt("after", identity, partial(observe, report, seconds), None)
        return out
