"""The walk of one request through the server: admitted, read, answered by the engine or relayed, reported once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final, TypeVar
from urllib.parse import parse_qs

from aiohttp import web

from proxy.core.errors import InvalidRequest, UllageError, UpstreamTimeout, UpstreamUnreachable
from proxy.core.overflow.stream import LateOverflowDetector
from proxy.core.report import INTERNAL_ERROR, NO_USAGE, SERVED, Report, response_headers
from proxy.core.request import Origin, Request
from proxy.engine.engine import Engine
from proxy.engine.include_usage import UsageHider
from proxy.engine.ports import Answer, Outcome, Refusal, Reply, Upstream
from proxy.server import response, websocket
from proxy.server.access import Access
from proxy.server.admin import OwnRoutes
from proxy.server.admission import Drain
from proxy.server.asking import named_model, read_request
from proxy.server.body import BodyReader, Progress, Upload
from proxy.server.config import ServerConfig
from proxy.server.contracts import Observe, Route
from proxy.server.models import Models
from proxy.server.naming import renamed
from proxy.server.observer import ReplyObserver
from proxy.server.request import (
    RequestHeaders,
    api_path,
    is_local,
    listed_model,
    managed,
    purpose_of,
    read_headers,
    request_target,
    send_continue,
    wire,
)
from proxy.server.response import BodyRelay, ClientLeft, ResponseWriter
from proxy.tasks import Faults, Where

_LOG: Final = logging.getLogger(__name__)
# What a client that did not wait is logged as, after a web server's custom.
_LEFT: Final = 499
# Reasons that say how a request was sent, and less than what became of it.
_OUTDONE: Final = ("unknown-window", "fallback")


T = TypeVar("T")


class Call:
    """One request while it is under way."""

    __slots__ = ("at_end", "cors", "observer", "out", "report", "wire")

    def __init__(self, out: ResponseWriter, report: Report, api: str) -> None:
        self.out = out
        self.report = report
        self.wire = api
        self.observer: ReplyObserver | None = None
        self.at_end: Callable[[Report], Report] | None = None
        self.cors: list[tuple[str, str]] = []

    def note(self, reason: str, status: int = 0) -> None:
        """Remember why the request did not end as it should have; the first reason stands."""
        report = self.report
        self.report = report.but(reason=report.reason or reason, status=self.out.status or status)

    def final(self) -> Report:
        """The report with the status and usage that were seen."""
        usage = self.observer.usage if self.observer is not None else NO_USAGE
        report = self.report if self.at_end is None else self.at_end(self.report)
        return report.but(status=self.out.status or report.status, usage=usage)


class Handler:
    """Handles every request of one process."""

    def __init__(
        self,
        config: ServerConfig,
        engine: Engine,
        upstream: Upstream,
        route: Route,
        observe: Observe,
        access: Access,
        gate: Drain,
        local: OwnRoutes,
        models: Models,
        faults: Faults,
    ) -> None:
        self._faults = faults
        self._config = config
        self._limits = config.limits
        self._engine = engine
        self._upstream = upstream
        self._route = route
        self._observe = observe
        self._access = access
        self._gate = gate
        self._local = local
        self._models = models
        self._prefix = os.urandom(6).hex()
        self._count = itertools.count(1)

    async def __call__(self, request: web.BaseRequest) -> ResponseWriter:
        """The answer, written."""
        out = ResponseWriter(request, self._limits.write)
        out.keep_alive = out.keep_alive and not self._gate.draining
        path_qs = request_target(request.raw_path)
        path = path_qs.partition("?")[0]
        if is_local(path) and self._access.knows_host(request.headers.get("host", "")):
            await self._local.answer(request, path, out)
            return out
        began = time.perf_counter()
        found = managed(path) if request.method == "POST" else None
        api = found[0] if found else "relay"
        call = Call(out, Report(f"{self._prefix}-{next(self._count):x}", api), wire(path))
        task = self._gate.enter()
        try:
            await self._guarded(request, path_qs, call)
        finally:
            self._gate.leave(task)
            if self._gate.draining:
                out.keep_alive = False
            seconds = time.perf_counter() - began
            self._attempt("after", call, lambda: self._observe(call.final(), seconds), None)
        return out

    def _attempt(self, where: Where, call: Call, work: Callable[[], T], instead: T) -> T:
        return self._faults.attempt(where, call.report.request_id, work, instead)

    async def _guarded(self, request: web.BaseRequest, path_qs: str, call: Call) -> None:
        try:
            await self._serve(request, path_qs, call)
        except asyncio.CancelledError:
            if not self._gate.cutting or request.transport is None:
                call.note("client_left", _LEFT)
                raise
            self._fail(request, call, response.ShuttingDown())
        except ClientLeft:
            call.note("client_left", _LEFT)
            call.out.abort()
        except UllageError as error:
            self._fail(request, call, error)
        except Exception as error:  # noqa: BLE001 - the server's edge: a bug costs one request, never the process
            # The log keeps type and frames of an exception and drops its text, which may quote the request.
            _LOG.error("request failed", exc_info=error)
            self._fail(request, call, UllageError())

    async def _serve(self, request: web.BaseRequest, path_qs: str, call: Call) -> None:
        self._access.check_host(request.headers.get("host", ""))
        intake = read_headers(request.raw_headers)
        origin = self._access.check_origin(intake)
        if origin:
            call.cors = response.answer_headers(origin)
            if response.is_preflight(request):
                response.empty(call.out, 204, [*call.cors, *response.preflight_headers(request)])
                return
        self._gate.check()
        tenant = self._access.admit(intake)
        path = path_qs.partition("?")[0]
        if request.method == "CONNECT" or not path.startswith("/"):
            raise InvalidRequest("This is a reverse proxy: send the path of an API route.")
        if intake.seen.get("upgrade", "").lower() == "websocket":
            await self._tunnel(request, path_qs, call, intake)
            return
        if request.method == "GET" and (listed := listed_model(path)) is not None:
            await self._list(path_qs, listed, call, intake)
            return
        reader = BodyReader(request.content, request.content_length, self._limits, self._gate.body_bytes, tenant)
        try:
            if call.report.api == "relay":
                await self._relay(request, path_qs, call, intake, reader)
            else:
                await self._managed(request, path_qs, call, intake, reader, tenant)
        finally:
            reader.release()

    async def _managed(
        self,
        request: web.BaseRequest,
        path_qs: str,
        call: Call,
        intake: RequestHeaders,
        reader: BodyReader,
        tenant: bytes,
    ) -> None:
        reader.check_declared()
        send_continue(request, intake)
        body = await reader.whole()
        received = Request(
            call.report.api,
            body,
            tenant,
            call.report.request_id,
            purpose=purpose_of(path_qs.partition("?")[0]),
            origin=Origin(path_qs, tuple(intake.forward)),
        )
        outcome = await self._exchanged(received, path_qs, call, intake, reader)
        # A stream may last for minutes and needs nothing of its request any more.
        del body, received
        call.report = outcome.report
        if isinstance(outcome, Refusal):
            raise outcome.error
        call.at_end = outcome.at_end
        if outcome.at_end is None:
            reader.release()
        await self._pass(call, outcome.reply, outcome.head, outcome.ending, hides_usage=outcome.hides_usage)
        self._complete(call, outcome)

    async def _exchanged(
        self, received: Request, path_qs: str, call: Call, intake: RequestHeaders, reader: BodyReader
    ) -> Outcome:
        """What the engine makes of a request; *received* has its body as it came, and nothing read of its headers."""
        request = received
        try:
            request = await read_request(received, path_qs, intake, reader, self._limits)
        except UllageError:
            raise
        except Exception as fault:  # noqa: BLE001 - fail open: a fault of ours costs compression, never the request
            self._faults.report("request", received.request_id, fault)
            return await self._engine.untouched(received)
        try:
            return await self._engine.exchange(request)
        except (UpstreamUnreachable, UpstreamTimeout) as error:
            model = request.path_model or named_model(request.body, complete=True)
            call.report = call.report.but(model=model, upstream=error.upstream)
            raise

    def _complete(self, call: Call, answer: Answer) -> None:
        """Learn from the usage of an answer that came to its end."""
        if answer.report.reason == SERVED:
            call.observer = None  # no provider told what this cost
        if call.observer is None:
            return
        usage = call.observer.usage
        was_cut = self._attempt("after", call, lambda: answer.learn(usage), instead=False)
        if was_cut and call.report.reason in ("", *_OUTDONE):
            call.report = call.report.but(reason="silently_truncated")

    async def _relay(
        self, request: web.BaseRequest, path_qs: str, call: Call, intake: RequestHeaders, reader: BodyReader
    ) -> None:
        send_continue(request, intake)
        headers = intake.forward
        body: bytes | AsyncIterator[bytes] | None = None
        model, first, complete = "", b"", False
        if request.can_read_body:
            if intake.seen.get("content-type", "").lower().startswith("application/json"):
                first, complete = await reader.peek()
                model = "" if "content-encoding" in intake.seen else named_model(first, complete=complete)
                if complete and model and (name := self._config.name_of(model)) != model:
                    first = renamed(first, name)
            body = first
            if not complete:
                progress = Progress(self._limits.body_pause, self._limits.upload_rate)
                body = Upload(first, request.content, self._limits.idle, progress)
                if request.content_length is not None:
                    headers.append(("Content-Length", str(request.content_length)))
        upstream = self._route(model) if model else self._config.default_upstream
        call.report = call.report.but(model=model, upstream=upstream)
        self._access.check_stateless(request.method, path_qs.partition("?")[0], upstream)
        added = self._config.headers_of(model)
        sending = self._upstream.send(upstream, request.method, path_qs, headers, body, added)
        if isinstance(body, Upload):
            try:
                async with body.moving():
                    reply = await sending
            except TimeoutError as error:
                raise UpstreamTimeout(upstream, self._limits.idle) from error
        else:
            reply = await sending
            del first
            reader.release()
        del body, sending
        response.check_known(path_qs.partition("?")[0], reply)
        await self._pass(call, reply, b"")

    async def _list(self, path_qs: str, model: str, call: Call, intake: RequestHeaders) -> None:
        """Answer for one model, or for all where *model* is empty."""
        upstream = self._route(model) if model else self._config.default_upstream
        call.report = call.report.but(model=model, upstream=upstream)
        if model:
            heard = await self._models.one(path_qs, model, intake.forward, self._route)
        else:
            heard = await self._models.list(path_qs, intake.forward, self._route)
        headers = [*heard.headers, *response_headers(call.report), *call.cors]
        call.out.start(heard.status, headers, sized=any(name.lower() == "content-length" for name, _ in heard.headers))
        call.out.write(heard.body)
        call.out.finish()

    async def _tunnel(self, request: web.BaseRequest, path_qs: str, call: Call, intake: RequestHeaders) -> None:
        path, _, query = path_qs.partition("?")
        refusal = response.UpgradeRefused() if api_path(path) == "responses" else None
        if refusal and not self._config.websockets:
            raise refusal
        model = parse_qs(query).get("model", [""])[0]
        upstream = self._route(model) if model else self._config.default_upstream
        call.report = call.report.but(model=model, upstream=upstream, stream=True)
        self._access.check_stateless("GET", path, upstream)
        reply = await self._upstream.upgrade(upstream, path_qs, intake.forward)
        if reply.status == websocket.SWITCHING:
            call.report = call.report.but(status=reply.status)
            await websocket.relay(request, call.out, reply)
        elif refusal:
            # Clients of this route that are told 426 go on without a WebSocket at once; other answers they try again.
            reply.close()
            raise refusal
        else:
            await self._pass(call, reply, b"")

    async def _pass(
        self,
        call: Call,
        reply: Reply,
        first: bytes,
        ending: LateOverflowDetector | None = None,
        *,
        hides_usage: bool = False,
    ) -> None:
        out = call.out
        streamed = reply.header("content-type").startswith("text/event-stream")
        if streamed and not call.report.stream:
            call.report = self._attempt("answer", call, lambda: call.report.but(stream=True), call.report)
        encoding = reply.header("content-encoding")
        hider = UsageHider() if hides_usage and streamed and not encoding else None
        noticed = partial(self._faults.report, "answer", call.report.request_id)
        observer = call.observer = ReplyObserver(encoding, hider, ending, noticed)
        body = BodyRelay(out, reply, observer)
        try:
            framing = {"sized": hider is None, "close_delimited": body.close_delimited}
            response.start(out, reply, self._headers(call), call.cors, **framing)
            if not await body.run(first):
                call.note("upstream_truncated")
        except (UpstreamUnreachable, UpstreamTimeout):
            call.note("upstream_stream_error")
            body.break_off(call.wire)
        finally:
            reply.close()

    def _headers(self, call: Call) -> list[tuple[str, str]]:
        """The headers of our own, or as much of them as a fault leaves."""
        least = [("x-ullage-outcome", f"degraded;{INTERNAL_ERROR}")]
        return self._attempt("answer", call, lambda: response_headers(call.report), least)

    def _fail(self, request: web.BaseRequest, call: Call, error: UllageError) -> None:
        out = call.out
        if out.ended:
            return
        try:
            if out.status:
                call.note(error.code)
                streamed = call.report.stream
                out.break_off(response.last_event(error, call.wire) if streamed else b"")
                return
            if not request.content.is_eof():
                out.keep_alive = False
            call.report = call.report.but(outcome="refused", reason=call.report.reason or error.code)
            response.refuse(out, error, call.wire, call.report, call.cors)
        except ClientLeft:
            call.note("client_left", _LEFT)
