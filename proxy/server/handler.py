"""The walk of one request through the server: admitted, read, answered by the engine or relayed, reported once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Final
from urllib.parse import parse_qs

import msgspec
from aiohttp import web

from proxy import ports
from proxy.core.conversation.compaction import announced
from proxy.core.conversation.identity import epoch_of, session_of
from proxy.core.errors import InvalidRequest, UllageError, UpstreamTimeout, UpstreamUnreachable
from proxy.core.overflow.stream import Ending
from proxy.core.report import NO_USAGE, SERVED, Report, response_headers
from proxy.core.request import Origin, Request
from proxy.server import answers, cors, websocket
from proxy.server.access import Access
from proxy.server.asked import UsageHider, ask
from proxy.server.body import BodyReader, Progress, Upload, inflated
from proxy.server.config import ServerConfig
from proxy.server.contracts import Answer, Engine, Observe, Route, Upstream
from proxy.server.gate import Gate
from proxy.server.intake import Intake, options, read_headers, window_variant, without_secrets
from proxy.server.local import Local
from proxy.server.models import Models
from proxy.server.naming import renamed
from proxy.server.outgoing import ClientLeft, Outgoing
from proxy.server.routes import COMPACTING, COUNTING, api_path, is_local, listed_model, managed, wire
from proxy.server.usage import UsageTap

_LOG: Final = logging.getLogger(__name__)
# What a client that did not wait is logged as, after a web server's custom.
_LEFT: Final = 499
# Reasons that say how a request was sent, and less than what became of it.
_OUTDONE: Final = ("unknown-window", "fallback")
_MODEL_FIRST: Final = re.compile(rb'\s*\{\s*"model"\s*:\s*"([^"\\]{1,256})"')


class _Named(msgspec.Struct):
    model: str = ""


_NAMED: Final = msgspec.json.Decoder(_Named)


class Call:
    """One request while it is under way."""

    __slots__ = ("cors", "hider", "out", "report", "tap", "told", "wire")

    def __init__(self, out: Outgoing, report: Report, api: str) -> None:
        self.out = out
        self.report = report
        self.wire = api
        self.tap: UsageTap | None = None
        self.hider: UsageHider | None = None
        self.told: Callable[[Report], Report] | None = None
        self.cors: list[tuple[str, str]] = []

    def take(self, answer: Answer, reader: BodyReader) -> None:
        """Go on with what is known of *answer*; what was held for its request is let go unless it needs that."""
        self.report, self.told = answer.report, answer.told
        if answer.told is None:
            reader.release()

    def note(self, reason: str, status: int = 0) -> None:
        """Remember why the request did not end as it should have; the first reason stands."""
        report = self.report
        self.report = report.but(reason=report.reason or reason, status=self.out.status or status)

    def final(self) -> Report:
        """The report with the status and usage that were seen."""
        usage = self.tap.usage if self.tap is not None else NO_USAGE
        report = self.report if self.told is None else self.told(self.report)
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
        gate: Gate,
        local: Local,
        models: Models,
    ) -> None:
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

    async def __call__(self, request: web.BaseRequest) -> Outgoing:
        """The answer, written."""
        out = Outgoing(request, self._limits.write)
        out.keep_alive = out.keep_alive and not self._gate.draining
        path_qs = answers.target(request.raw_path)
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
            self._observe(call.final(), time.perf_counter() - began)
        return out

    async def _guarded(self, request: web.BaseRequest, path_qs: str, call: Call) -> None:
        try:
            await self._serve(request, path_qs, call)
        except asyncio.CancelledError:
            if not self._gate.cutting or request.transport is None:
                call.note("client_left", _LEFT)
                raise
            self._fail(request, call, answers.ShuttingDown())
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
            call.cors = cors.answer_headers(origin)
            if cors.is_preflight(request):
                answers.empty(call.out, 204, [*call.cors, *cors.preflight_headers(request)])
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
        self, request: web.BaseRequest, path_qs: str, call: Call, intake: Intake, reader: BodyReader, tenant: bytes
    ) -> None:
        wishes = options(intake.own)
        reader.check_declared()
        answers.invite(request, intake)
        body = await reader.whole()
        encoding = intake.seen.get("content-encoding")
        if encoding is not None:
            body = await inflated(body, encoding, self._limits)
            reader.count(len(body))
            intake.drop(("content-encoding",))
        headers = intake.forward

        api, request_id, variant = call.report.api, call.report.request_id, window_variant(intake)

        async def send(upstream: str, body: bytes, *, keyless: bool = False, model: str = "") -> ports.Reply:
            self._access.check_stored(body, upstream)
            going = without_secrets(headers) if keyless else headers
            added = self._config.headers_of(model)
            asked = ask(body) if api == "chat" and upstream in self._config.usage_upstreams else None
            call.hider = UsageHider() if asked is not None else None
            if asked is None:
                return await self._upstream.send(upstream, "POST", path_qs, going, body, added)
            # An event can only be taken out of what can be read.
            plain = [pair for pair in going if pair[0].lower() != "accept-encoding"]
            return await self._upstream.send(
                upstream, "POST", path_qs, [*plain, ("Accept-Encoding", "identity")], asked, added
            )

        path = path_qs.partition("?")[0]
        answering = self._engine.exchange
        if path in COUNTING:
            answering = self._engine.count
        elif path in COMPACTING:
            answering = self._engine.compact
        _, model = managed(path) or ("", "")
        asking = Request(
            api,
            body,
            tenant,
            request_id,
            wishes,
            model,
            variant=variant,
            session=session_of(intake.seen),
            epoch=epoch_of(intake.seen),
            compacting=announced(intake.seen),
            origin=Origin(path_qs, tuple(headers)),
        )
        try:
            answer = await answering(asking, send)
        except (UpstreamUnreachable, UpstreamTimeout) as error:
            model = model or named_model(body, complete=True)
            call.report = call.report.but(model=model, upstream=error.upstream)
            raise
        # A stream may last for minutes and needs nothing of its request any more.
        del body, asking
        call.take(answer, reader)
        if answer.reply is None:
            raise answer.error or UllageError()
        await self._pass(call, answer.reply, answer.head, answer.ending)
        if answer.report.reason == SERVED:
            call.tap = None  # no provider told what this cost
        if call.tap is not None and answer.learn(call.tap.usage) and call.report.reason in ("", *_OUTDONE):
            call.report = call.report.but(reason="silently_truncated")

    async def _relay(
        self, request: web.BaseRequest, path_qs: str, call: Call, intake: Intake, reader: BodyReader
    ) -> None:
        answers.invite(request, intake)
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
        await self._pass(call, reply, b"")

    async def _list(self, path_qs: str, model: str, call: Call, intake: Intake) -> None:
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

    async def _tunnel(self, request: web.BaseRequest, path_qs: str, call: Call, intake: Intake) -> None:
        path, _, query = path_qs.partition("?")
        refusal = answers.UpgradeRefused() if api_path(path) == "responses" else None
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

    async def _pass(self, call: Call, reply: ports.Reply, first: bytes, ending: Ending | None = None) -> None:
        out = call.out
        streamed = reply.header("content-type").startswith("text/event-stream")
        if streamed and not call.report.stream:
            call.report = call.report.but(stream=True)
        tap = call.tap = UsageTap(reply.header("content-encoding"))
        hider = call.hider if streamed and not reply.header("content-encoding") else None
        try:
            answers.start(call.out, reply, call.report, call.cors, sized=hider is None)
            chunk = first or await reply.next_chunk()
            while chunk:
                out.write(hider.feed(chunk) if hider else chunk)
                tap.feed(chunk)
                if ending is not None:
                    ending.feed(chunk)
                if out.paused:
                    await out.drain()
                chunk = await reply.next_chunk()
            out.write(hider.rest() if hider else b"")
            out.finish()
        except (UpstreamUnreachable, UpstreamTimeout):
            call.note("upstream_stream_error")
            out.write(hider.rest() if hider else b"")
            event = streamed and not reply.header("content-encoding")
            out.break_off(answers.last_event(answers.StreamBroken(), call.wire) if event else b"")
        finally:
            reply.close()

    def _fail(self, request: web.BaseRequest, call: Call, error: UllageError) -> None:
        out = call.out
        if out.ended:
            return
        try:
            if out.status:
                call.note(error.code)
                streamed = call.report.stream
                out.break_off(answers.last_event(error, call.wire) if streamed else b"")
                return
            if not request.content.is_eof():
                out.keep_alive = False
            call.report = call.report.but(outcome="refused", reason=call.report.reason or error.code)
            answers.refuse(out, error, call.wire, call.report, call.cors)
        except ClientLeft:
            call.note("client_left", _LEFT)


def named_model(body: bytes, *, complete: bool) -> str:
    """The model a JSON body names, or an empty string; of a part of a body only a leading ``model`` is seen."""
    if not complete:
        found = _MODEL_FIRST.match(body)
        return found[1].decode("utf-8", "replace") if found else ""
    try:
        return _NAMED.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
