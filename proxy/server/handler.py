"""Handles a request from its head to its report: admits and reads it, passes it to the engine or relays it, reports it.

Order matters: what costs little and refuses much comes first (limits, ``Host``, origin, key), and no byte of a body is
read before its sender is admitted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from msgspec import structs

from proxy.core.apis import gemini
from proxy.core.apis.gemini_path import model_in_resource, path_for, renamed_body
from proxy.core.apis.json_edit import with_model
from proxy.core.errors import Forbidden, InvalidRequest, UllageError, UpstreamError, UpstreamTimeout
from proxy.core.overflow.stream import LateOverflowDetector
from proxy.core.report import INTERNAL_ERROR, NO_USAGE, SERVED, Report, Usage, response_headers
from proxy.engine.include_usage import UsageHider
from proxy.engine.ports import Answer, Exchange, Refusal, Reply, Upstream
from proxy.server import response, websocket
from proxy.server.access import FOREIGN_HOST, Access, Caller
from proxy.server.admin import OwnRoutes
from proxy.server.admission import Drain, QuickRefusal
from proxy.server.config import Observe, Route, ServerConfig
from proxy.server.incoming import BodyReader, IncomingRequest, Progress, Upload, check_declared
from proxy.server.models import Models
from proxy.server.request import (
    RequestHeaders,
    RequestPath,
    decoded,
    is_local,
    listed_model,
    managed_path,
    named_model,
    read_headers,
    read_path,
    read_request,
    send_continue,
    unread_request,
    with_key_as_header,
)
from proxy.server.response import ClientLeft, ReplyObserver, ResponseWriter, relay_body, without
from proxy.server.responses_socket import ResponsesSocket
from proxy.server.unknown_path import known_path
from proxy.tasks import Faults

_LOG: Final = logging.getLogger(__name__)

_LEFT: Final = 499
"""The logged status if the client left, first used by nginx.

https://learn.microsoft.com/en-us/dotnet/api/microsoft.aspnetcore.http.statuscodes.status499clientclosedrequest
"""

_SENDING_REASONS: Final = ("unknown-window", "fallback")
"""Reasons about how a request was sent; a reason about how it ended replaces them."""


class Call(msgspec.Struct):
    """One request under way: its answer, its report, and its path. ``body`` is None until the caller is admitted."""

    # A Struct and no dataclass: every request makes one, and msgspec builds it in C.

    out: ResponseWriter
    report: Report
    path: RequestPath
    body: BodyReader | None = None
    observer: ReplyObserver | None = None
    usage: Usage | None = None
    at_end: Callable[[Report], Report] | None = None
    cors: list[tuple[str, str]] = []

    def note(self, reason: str, status: int = 0) -> None:
        """Record the reason of a bad end in the report, unless it has one."""
        report = self.report
        self.report = report.with_(reason=report.reason or reason, status=self.out.status or status)


class Handler:
    """Handles every request of one process."""

    def __init__(
        self,
        config: ServerConfig,
        engine: Exchange,
        upstream: Upstream,
        route: Route,
        observers: Sequence[Observe],
        access: Access,
        drain: Drain,
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
        self._observers = tuple(observers)
        self._access = access
        self._drain = drain
        self._quick_refusal = QuickRefusal(drain, access, config.limits, observers, faults)
        self._local = local
        self._models = models
        self._prefix = os.urandom(6).hex()
        self._count = itertools.count(1)

    async def __call__(self, request: IncomingRequest, out: ResponseWriter | None = None) -> ResponseWriter:
        """Answer *request* with *out*, or as HTTP does. The answer is written when it is returned."""
        connection: Any = request.protocol
        caller: Caller | None = connection.caller
        path = read_path(request.method, request.raw_path) if caller is None else caller.path
        drain = self._drain
        if len(drain.running) >= drain.limit and self._quick_refusal.concerns(request, path):
            return self._quick_refusal.refuse(request, path)
        out = out or ResponseWriter(request, self._limits.write)
        if drain.draining:
            out.keep_alive = False
        if path.api == "relay" and is_local(path.path) and self._access.knows_host(request.headers.get("host", "")):
            await self._local.answer(request, path.path, out)
            return out
        began = time.perf_counter()
        call = Call(out, Report(f"{self._prefix}-{next(self._count):x}", path.api), path)
        task = connection.task
        # Added without an ``await`` before, so that requests which arrive together are counted one by one.
        drain.running.add(task)
        try:
            answering = self._admit(request, call, caller)
            if answering is not None:
                await answering
        except BaseException as error:
            if not self._was_handled(request, call, error):
                raise
        finally:
            drain.running.discard(task)
            self._finish(call, began)
        return out

    def _finish(self, call: Call, began: float) -> None:
        """Release the body, and give the observers the report with status, usage and the seconds since *began*."""
        # Outside of the ``try``: bytes that stayed counted would refuse other requests for ever.
        if call.body is not None and call.body.counted:
            call.body.release()
        try:
            usage, report = call.usage, call.report
            if usage is None and call.observer is not None:
                usage = call.observer.usage
            if call.at_end is not None:
                report = call.at_end(report)
            report = structs.replace(report, status=call.out.status or report.status, usage=usage or NO_USAGE)
            seconds = time.perf_counter() - began
            for observe in self._observers:
                observe(report, seconds)
        except Exception as fault:  # noqa: BLE001 - an observer's fault must not cost the answer
            self._faults.report("after", call.report.request_id, fault)

    def _was_handled(self, request: IncomingRequest, call: Call, error: BaseException) -> bool:
        """Answer with *error*, or note that the client left. Return False if the caller has to raise it again."""
        match error:
            case asyncio.CancelledError():
                if not self._drain.cutting or request.transport is None:
                    call.note("client_left", _LEFT)
                    return False
                self._fail(request, call, response.ShuttingDown())
            case ClientLeft():
                call.note("client_left", _LEFT)
                call.out.abort()
            case UllageError():
                self._fail(request, call, error)
            case Exception():
                # The server's edge: a bug costs one request, never the process. The log keeps type and frames of an
                # exception and drops its text, which may quote the request.
                _LOG.error("request failed", exc_info=error)
                self._fail(request, call, UllageError())
            case _:
                return False
        return True

    def _admit(self, request: IncomingRequest, call: Call, caller: Caller | None) -> Coroutine[Any, Any, None] | None:
        """Return the coroutine that answers *request*, or None for a preflight, which is answered. Raises refusals.

        *caller* is its sender, if its head is a repeated one.
        """
        if caller is None:
            caller = self._read_caller(request, call)
            if caller is None:
                return None
        if self._drain.draining or len(self._drain.running) > self._drain.limit:
            raise self._drain.refusal()
        # The key of a repeated head was checked with the first one; the limit above holds for every request.
        if not caller.tenant:
            caller.tenant = self._access.admit(caller.headers)
            connection: Any = request.protocol
            connection.remember(caller)
        headers, tenant = caller.headers, caller.tenant
        path = call.path.path
        if request.method in ("CONNECT", "TRACE") or not path.startswith("/"):
            # The answer to a TRACE repeats the request, with the upstream's key in it:
            # https://www.rfc-editor.org/rfc/rfc9110#section-9.3.8
            raise InvalidRequest("This is a reverse proxy: send the path of an API route, with a method that it has.")
        if "upgrade" in headers.by_name and headers.by_name["upgrade"].lower() == "websocket":
            return self._tunnel(request, call, headers, tenant)
        reader = call.body = BodyReader(request.content, self._limits, self._drain.body_bytes, tenant)
        if call.path.api == "relay":
            return self._relay(request, call, headers, reader)
        return self._managed(request, call, headers, reader)

    def _read_caller(self, request: IncomingRequest, call: Call) -> Caller | None:
        """Return the sender of *request* without its tenant, or None for a preflight, which is answered."""
        if not self._access.knows_host(request.headers.get("host", "")):
            raise Forbidden(FOREIGN_HOST)
        headers = read_headers(request.raw_headers)
        if call.path.error_api == gemini.API and "?" in call.path.path_qs:
            call.path = with_key_as_header(call.path, headers)
        from_browser = "origin" in headers.by_name or "sec-fetch-site" in headers.by_name
        if from_browser and self._answer_preflight(request, call, headers):
            return None
        return Caller(headers, call.path)

    def _answer_preflight(self, request: IncomingRequest, call: Call, headers: RequestHeaders) -> bool:
        """Check the page that a browser's request comes from. Return True if it was a preflight, which is answered."""
        origin = self._access.check_origin(headers)
        if not origin:
            return False
        call.cors = response.cors_headers(origin)
        if not response.is_preflight(request):
            return False
        response.write_empty(call.out, 204, [*call.cors, *response.preflight_headers(request)])
        return True

    async def _managed(self, request: IncomingRequest, call: Call, headers: RequestHeaders, reader: BodyReader) -> None:
        """Read a request of a managed route, have the engine answer it, and pass the answer on."""
        if "expect" in headers.by_name:
            check_declared(request.content_length, self._limits)
            send_continue(request, headers)
        tenant = reader.tenant
        body = request.body
        if body is None:
            body = await reader.whole(request.content_length)
        else:
            reader.count(len(body))
        plain = body
        answer, request_id = self._engine.exchange, call.report.request_id
        try:
            if "content-encoding" in headers.by_name:
                plain = await decoded(body, headers, reader, self._limits)
            parsed = read_request(plain, call.path, headers, tenant, request_id)
        except UllageError:
            raise
        except Exception as fault:  # noqa: BLE001 - fail open: a fault of ours costs compression, never the request
            self._faults.report("request", request_id, fault)
            answer, parsed = self._engine.pass_through, unread_request(plain, call.path, headers, tenant, request_id)
        try:
            outcome = await answer(parsed)
        except UpstreamError as error:
            model = parsed.path_model or named_model(parsed.body, complete=True)
            call.report = call.report.with_(model=model, upstream=error.upstream)
            raise
        # A stream may last for minutes and needs nothing of its request any more.
        del body, plain, parsed
        call.report = outcome.report
        if isinstance(outcome, Refusal):
            raise self._refusal(call, outcome)
        head = outcome.head
        if outcome.reply.status >= 400:
            head = await known_path(call.path.path, outcome.reply, head)
        call.at_end = outcome.at_end
        if outcome.at_end is None:
            reader.release()
        await self._pass(call, outcome.reply, head, outcome.ending, hides_usage=outcome.hides_usage)
        self._complete(call, outcome)

    def _refusal(self, call: Call, refusal: Refusal) -> UllageError:
        """Return the error of *refusal*, and note the API of its body if the path does not show it."""
        if refusal.error_api:
            call.path = call.path._replace(error_api=refusal.error_api)
        return refusal.error

    def _complete(self, call: Call, answer: Answer) -> None:
        """Learn from the usage of an answer that came to its end."""
        if answer.report.reason == SERVED or call.observer is None:
            call.usage = NO_USAGE  # no provider answered it
            return
        call.usage = call.observer.usage
        try:
            was_cut = answer.learn(call.usage)
        except Exception as fault:  # noqa: BLE001 - a fault while learning must not cost the answer
            self._faults.report("after", call.report.request_id, fault)
            return
        if was_cut and call.report.reason in ("", *_SENDING_REASONS):
            call.report = call.report.with_(reason="silently_truncated")

    async def _relay(self, request: IncomingRequest, call: Call, headers: RequestHeaders, reader: BodyReader) -> None:
        """Relay a request of any other route to its upstream, and pass the answer on."""
        if request.method == "GET" and (listed := listed_model(call.path.path)) is not None:
            await self._list(listed, call, headers)
            return
        if "expect" in headers.by_name:
            send_continue(request, headers)
        body, model = await self._relayed_body(request, call.path, headers, reader)
        path_qs = call.path.path_qs
        if call.path.model:
            path_qs = path_for(path_qs, self._config.name_of(model))
        end_to_end = headers.end_to_end
        if isinstance(body, Upload) and request.content_length is not None:
            end_to_end = (*end_to_end, ("Content-Length", str(request.content_length)))
        upstream = self._upstream_of(call, model)
        method, path = request.method, call.path
        whole: bytes | None = None
        if isinstance(body, bytes):
            whole = body
        self._access.check_relayed(method, path.path, upstream, whole, end_to_end)
        added = self._config.headers_of(model)
        sending = self._upstream.send(upstream, method, path_qs, end_to_end, body, added)
        if isinstance(body, Upload):
            try:
                async with body.moving():
                    reply = await sending
            except TimeoutError as error:
                raise UpstreamTimeout(upstream, self._limits.idle) from error
        else:
            reply = await sending
            reader.release()
        # An answer may last for minutes and needs nothing of its request any more.
        del body, whole, sending
        await self._pass(call, reply, await known_path(path.path, reply, b""))

    async def _relayed_body(
        self, request: IncomingRequest, path: RequestPath, headers: RequestHeaders, reader: BodyReader
    ) -> tuple[bytes | Upload | None, str]:
        """Return the body to relay, as a stream if it is long or may be, and the model that *path* or it names."""
        if request.content.at_eof():
            return None, path.model
        progress = Progress(self._limits.body_pause, self._limits.upload_rate)
        if not headers.by_name.get("content-type", "").lower().startswith("application/json"):
            return Upload(b"", request.content, self._limits.idle, progress), path.model
        first, is_complete = await reader.peek()
        named = ""
        if "content-encoding" not in headers.by_name:
            named = named_model(first, complete=is_complete)
        model = path.model or named
        if path.error_api == gemini.API:
            model = model_in_resource(model)
        if not is_complete:
            return Upload(first, request.content, self._limits.idle, progress), model
        name = self._config.name_of(model)
        if not model or name == model:
            return first, model
        if named == model:
            return with_model(first, name), model
        return renamed_body(first, model, name), model

    def _upstream_of(self, call: Call, model: str) -> str:
        """Return the upstream of *model*, if that is empty the one of the path's API, and report both."""
        upstream = self._config.default_upstream
        if model:
            upstream = self._route(model)
        elif call.path.error_api == gemini.API:
            upstream = self._config.gemini_upstream or upstream
        call.report = call.report.with_(model=model, upstream=upstream)
        return upstream

    async def _list(self, model: str, call: Call, headers: RequestHeaders) -> None:
        """Answer for one model, or for all if *model* is empty."""
        self._upstream_of(call, model)
        if model:
            answer = await self._models.one(call.path.path_qs, model, headers.end_to_end, self._route)
        else:
            answer = await self._models.list(call.path.path_qs, headers.end_to_end, self._route)
        is_sized = any(name.lower() == "content-length" for name, _ in answer.headers)
        call.out.start(answer.status, [*answer.headers, *response_headers(call.report), *call.cors], sized=is_sized)
        call.out.write(answer.body)
        call.out.finish()

    async def _tunnel(self, request: IncomingRequest, call: Call, headers: RequestHeaders, tenant: bytes) -> None:
        """Answer over a WebSocket, or relay it to its upstream. Raises ``UpgradeRefused`` if the route has none."""
        path, _, query = call.path.path_qs.partition("?")
        managed = managed_path(path)
        is_responses = managed is not None and (managed.api, managed.purpose) == ("responses", "answer")
        if is_responses and self._config.websockets == "refuse":
            raise response.UpgradeRefused
        if is_responses and self._config.websockets == "manage":
            connection: Any = request.protocol
            self._drain.running.discard(connection.task)  # between two messages no request is under way
            conversation = BodyReader(request.content, self._limits, self._drain.body_bytes, tenant)
            socket = ResponsesSocket(request, headers, conversation, self._faults, call.report.request_id)
            self._drain.socket_closers.add(socket.leave)
            try:
                await socket.serve(call.out)
            finally:
                self._drain.socket_closers.discard(socket.leave)
            return
        upstream = self._upstream_of(call, parse_qs(query).get("model", [""])[0])
        call.report = call.report.with_(stream=True)
        self._access.check_stateless("GET", path, upstream)
        reply = await self._upstream.upgrade(upstream, call.path.path_qs, headers.end_to_end)
        if reply.status == websocket.SWITCHING:
            call.report = call.report.with_(status=reply.status)
            await websocket.relay(request, call.out, reply)
        elif is_responses:
            # After 426 clients of this route continue without a WebSocket; after other statuses they retry the upgrade.
            reply.close()
            raise response.UpgradeRefused
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
        """Pass *first* and the rest of *reply* on to the client, watched by an observer."""
        is_stream = reply.header("content-type").startswith("text/event-stream")
        if is_stream and not call.report.stream:
            report = call.report
            changed = partial(report.with_, stream=True)
            call.report = self._faults.attempt("answer", report.request_id, changed, report)
        encoding = reply.header("content-encoding")
        is_readable = is_stream and not encoding
        hider = None
        if hides_usage and is_readable:
            hider = self._faults.attempt("answer", call.report.request_id, UsageHider, None)
        report_fault = partial(self._faults.report, "answer", call.report.request_id)
        # A stream that ends with its connection is sent chunked, so that the client can see whether it is complete.
        needs_end = reply.close_delimited and is_readable
        observer = call.observer = ReplyObserver(
            encoding, hider, ending, report_fault, is_events=is_readable, watches_end=needs_end
        )
        try:
            own = response_headers(call.report)
        except Exception as fault:  # noqa: BLE001 - a fault in our own headers must not cost the answer
            self._faults.report("answer", call.report.request_id, fault)
            own = [("x-ullage-outcome", f"degraded;{INTERNAL_ERROR}")]
        headers = [*reply.headers, *own]
        if call.cors:
            headers = [*without(headers, "access-control-"), *call.cors]
        is_sized = bool(reply.header("content-length"))
        if hider is not None:
            headers = without(headers, "content-length")
            is_sized = False
        out = call.out
        out.keep_alive = out.keep_alive and not self._drain.draining
        try:
            out.start(
                reply.status,
                headers,
                sized=is_sized,
                close_delimited=reply.close_delimited and not needs_end,
                is_followed=first != b"",
            )
            reason = await relay_body(reply, out, observer, first, is_stream=is_stream)
        except UpstreamError:
            api = call.path.error_api
            reason = response.end_broken(out, observer, api, is_stream=is_readable, is_sized=is_sized)
        finally:
            reply.close()
        if reason:
            call.note(reason)

    def _fail(self, request: IncomingRequest, call: Call, error: UllageError) -> None:
        """Answer with *error*, or end an answer that has begun with it."""
        out = call.out
        if out.ended:
            return
        try:
            if out.status:
                call.note(error.code)
                last = b""
                if call.report.stream:
                    last = response.last_event(error, call.path.error_api)
                out.break_off(last)
                return
            # The rest of the body is not read, so that no other request can follow it on this connection.
            if not request.content.is_eof():
                out.keep_alive = False
            call.report = call.report.with_(outcome="refused", reason=call.report.reason or error.code)
            own = response.own_headers(call.report, self._faults)
            response.refuse(out, error, call.path.error_api, own, call.cors)
        except ClientLeft:
            call.note("client_left", _LEFT)
