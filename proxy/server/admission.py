"""Who comes in while the proxy is full: a refusal that costs next to nothing, so that there is time for the rest."""

from __future__ import annotations

import itertools
import os
import time

from aiohttp import web

from proxy.core.errors import Overloaded
from proxy.core.report import Report
from proxy.server import answers
from proxy.server.access import Access
from proxy.server.config import Limits
from proxy.server.connection import Handler
from proxy.server.contracts import Observe
from proxy.server.gate import Gate
from proxy.server.outgoing import Outgoing
from proxy.server.routes import is_local, managed, wire
from proxy.tasks import Faults


class Admission:
    """Stands before *handler*, which answers what is let in.

    At three times the capacity there are two refusals for each answer, and what they cost is missing there: some 60 µs
    each here, twice that in the handler. The handler refuses what is no program's plain POST: a browser's request,
    another method, and everything during the shut-down.
    """

    def __init__(
        self, handler: Handler, gate: Gate, access: Access, limits: Limits, observe: Observe, faults: Faults
    ) -> None:
        self._handler = handler
        self._gate = gate
        self._access = access
        self._limits = limits
        self._observe = observe
        self._faults = faults
        self._prefix = os.urandom(6).hex()
        self._count = itertools.count(1)

    async def __call__(self, request: web.BaseRequest) -> Outgoing:
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

    def _refuse(self, request: web.BaseRequest) -> Outgoing:
        began, path = time.perf_counter(), _path(request)
        out = Outgoing(request, self._limits.write)
        out.keep_alive = out.keep_alive and request.content.is_eof()
        found, error = managed(path), Overloaded(self._gate.FULL)
        identity = f"{self._prefix}-{next(self._count):x}"
        report = Report(
            identity, found[0] if found else "relay", outcome="refused", reason=error.code, status=error.status
        )
        answers.refuse(out, error, wire(path), report, ())
        seconds = time.perf_counter() - began
        self._faults.attempt("after", identity, lambda: self._observe(report, seconds), None)
        return out


def _path(request: web.BaseRequest) -> str:
    return answers.target(request.raw_path).partition("?")[0]
