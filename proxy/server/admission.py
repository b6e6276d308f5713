"""Who comes in while the proxy is full: a refusal that costs next to nothing, so that there is time for the rest."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from typing import Any, Final

from aiohttp import web

from proxy.core.errors import Overloaded
from proxy.core.report import Report
from proxy.server import response
from proxy.server.access import Access
from proxy.server.body import BodyBytes
from proxy.server.config import Limits
from proxy.server.connection import Handler
from proxy.server.contracts import Observe
from proxy.server.request import is_local, managed, request_target, wire
from proxy.server.response import ResponseWriter
from proxy.tasks import Faults


class Admission:
    """Stands before *handler*, which answers what is let in.

    At three times the capacity there are two refusals for each answer, and what they cost is missing there: some 60 µs
    each here, twice that in the handler. The handler refuses what is no program's plain POST: a browser's request,
    another method, and everything during the shut-down.
    """

    def __init__(
        self, handler: Handler, gate: Drain, access: Access, limits: Limits, observe: Observe, faults: Faults
    ) -> None:
        self._handler = handler
        self._gate = gate
        self._access = access
        self._limits = limits
        self._observe = observe
        self._faults = faults
        self._prefix = os.urandom(6).hex()
        self._count = itertools.count(1)

    async def __call__(self, request: web.BaseRequest) -> ResponseWriter:
        """The answer, written."""
        if self._gate.full and self._is_plain(request):
            return self._refuse(request)
        return await self._handler(request)

    def _is_plain(self, request: web.BaseRequest) -> bool:
        headers, transport = request.headers, request.transport
        return (
            request.method == "POST"
            and "origin" not in headers
            and transport is not None
            and not transport.is_closing()
            and not is_local(_path(request))
            and self._access.knows_host(headers.get("host", ""))
        )

    def _refuse(self, request: web.BaseRequest) -> ResponseWriter:
        began, path = time.perf_counter(), _path(request)
        out = ResponseWriter(request, self._limits.write)
        out.keep_alive = out.keep_alive and request.content.is_eof()
        found, error = managed(path), Overloaded(self._gate.FULL)
        identity = f"{self._prefix}-{next(self._count):x}"
        report = Report(
            identity, found[0] if found else "relay", outcome="refused", reason=error.code, status=error.status
        )
        response.refuse(out, error, wire(path), report, ())
        seconds = time.perf_counter() - began
        self._faults.attempt("after", identity, lambda: self._observe(report, seconds), None)
        return out


def _path(request: web.BaseRequest) -> str:
    return request_target(request.raw_path).partition("?")[0]


# How long a cut request may take to say goodbye.
_GOODBYE: Final = 2.0


class Drain:
    """Requests of one process: counted on the way in, waited for and then cut when it drains."""

    FULL: Final = "The proxy handles as many requests as it may (server.limits.in_flight). Try again soon."

    def __init__(self, limits: Limits) -> None:
        self._limit = limits.in_flight
        self._running: set[asyncio.Task[Any]] = set()
        self.body_bytes = BodyBytes(limits.in_flight_bytes)
        self.ready = False
        self.draining = False
        self.cutting = False

    def __len__(self) -> int:
        """How many requests are under way."""
        return len(self._running)

    @property
    def full(self) -> bool:
        """Whether one more request would be too many."""
        return len(self._running) >= self._limit and not self.draining

    def enter(self) -> asyncio.Task[Any]:
        """The running request's task, to be handed to ``leave``. Count it first, then ask ``check``."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("requests are handled inside tasks")
        self._running.add(task)
        return task

    def leave(self, task: asyncio.Task[Any]) -> None:
        """The request of *task* is over."""
        self._running.discard(task)

    def check(self) -> None:
        """Raises ``Overloaded`` when there are too many requests or the process is going away."""
        if self.draining:
            raise Overloaded("The proxy is shutting down. Try again: another one will answer.")
        if len(self._running) > self._limit:
            raise Overloaded(self.FULL)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, give running ones *seconds*, then end them."""
        self.draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._running and (left := end - loop.time()) > 0:
            await asyncio.wait(self._running, timeout=left)
        self.cutting = True
        late = list(self._running)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=_GOODBYE)
