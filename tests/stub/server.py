"""The strict upstream: a real HTTP server on loopback that counts, judges, answers, misbehaves and remembers."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import math
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from tests.stub import chat, gemini, messages, responses
from tests.stub.answers import Answer, Frame
from tests.stub.faults import JSON, NO_FAULT, SSE, Fault, Headers
from tests.stub.record import PromptCache, Seen
from tests.stub.rules import Rules, Verdict
from tests.stub.summariser import Behaviour, fault_of, summary_of
from tests.stub.tokens import count

FOR_EVER = 3600.0
API_FORMATS: dict[str, Any] = {api_format.PATH: api_format for api_format in (chat, messages, responses)}
Script = Callable[[Seen], Answer]


def understood(_seen: Seen) -> Answer:
    """The answer given when a test scripts nothing."""
    return Answer()


class Stub:
    """A strict OpenAI-compatible upstream; use it as an async context manager.

    ``seen`` holds every request in order, except for the proxy's own: those about windows are in ``probes``, those for
    summaries in ``summaries``, answered as ``summariser`` says, and not before ``gate`` is set.
    ``script`` makes the answers that ``queue`` does not hold; faults given to
    ``fail`` hit the next requests. ``rules`` may be exchanged while it runs.
    """

    def __init__(self, rules: Rules | None = None, *, port: int = 0, host: str = "127.0.0.1") -> None:
        self.rules = rules or Rules()
        self.script: Script = understood
        self.seen: list[Seen] = []
        self.probes: list[Seen] = []
        self.summaries: list[Seen] = []
        self.summariser: Behaviour = "honest"
        self.gate = asyncio.Event()
        self.gate.set()
        self.cache = PromptCache()
        self.stored: dict[str, list[Any]] = {}
        self.models: list[str] = []
        self._answers: deque[Answer] = deque()
        self._faults: deque[Fault] = deque()
        self._host, self._port = host, port
        self._count = 0
        self._closing = False
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1, max_field_size=65536
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def root(self) -> str:
        """The server's address without a path."""
        return f"http://{self._host}:{self._port}"

    @property
    def url(self) -> str:
        """The base URL a client or a proxy is given."""
        return f"{self.root}/v1"

    def queue(self, *answers: Answer) -> None:
        """Give the next accepted chat requests these answers, in order."""
        self._answers.extend(answers)

    def fail(self, fault: Fault, times: int = 1) -> None:
        """Let *fault* hit the next *times* requests, behind the faults already waiting."""
        self._faults.extend([fault] * times)

    def forget(self) -> None:
        """Drop the recorded requests, waiting answers and faults; the played prompt cache stays warm."""
        self.seen.clear()
        self._answers.clear()
        self._faults.clear()

    def chats(self, verdict: str = "") -> list[Seen]:
        """The requests for an answer seen, of any API, only those with *verdict* when one is given."""
        chats = [seen for seen in self.seen if seen.method == "POST" and _api_format_of(seen.path) is not None]
        return [seen for seen in chats if seen.verdict == verdict] if verdict else chats

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self._count += 1
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in request.raw_headers]
        path, _, query = request.raw_path.partition("?")
        seen = Seen(self._count, request.method, path, query, headers, await request.read(), time.monotonic())
        if "(summary)" in seen.header("user-agent"):
            self.summaries.append(seen)
            await self.gate.wait()
            return await self._disturbed(request, seen, fault_of(self.summariser))
        if seen.header("user-agent").startswith("ullage/"):
            # The proxy's own question about windows, at a moment no test chooses.
            self.probes.append(seen)
            return await self._respond(request, seen, NO_FAULT)
        self.seen.append(seen)
        return await self._disturbed(request, seen, self._faults.popleft() if self._faults else NO_FAULT)

    async def _disturbed(self, request: web.Request, seen: Seen, fault: Fault) -> web.StreamResponse:
        try:
            await _disturb_head(request, fault)
            response = await self._respond(request, seen, fault)
        except (asyncio.CancelledError, ConnectionResetError):
            if not (self._closing or fault.cut or fault.raw is not None):
                seen.aborted_at = time.monotonic()
            raise asyncio.CancelledError from None
        seen.answered_at = time.monotonic()
        return response

    async def _respond(self, request: web.Request, seen: Seen, fault: Fault) -> web.StreamResponse:
        if fault.replaces:
            seen.verdict = "fault"
            return await _send(request, fault.status or 200, fault.headers, [fault.body or b""], fault)
        path, api_format = _below_root(seen.path), _api_format_of(seen.path)
        if api_format is not None and seen.method == "POST":
            status, headers, chunks = self._chat(seen, api_format)
        elif gemini.ROUTE.fullmatch(seen.path):
            status, headers, chunks = self._tally_contents(seen)
        elif path == "/messages/count_tokens" and self.rules.counts:
            status, headers, chunks = self._tally(seen)
        else:
            seen.verdict = "relay"
            status, headers, chunks = 200, JSON, [self._relay(path, seen)]
        if fault.no_done:
            chunks = [chunk for chunk in chunks if b"[DONE]" not in chunk]
        return await _send(request, status, headers, chunks, fault)

    def _tally(self, seen: Seen) -> tuple[int, Headers, Iterable[bytes]]:
        seen.parsed = json.loads(seen.body)
        verdict = messages.judge({"max_tokens": 1, **seen.parsed}, self.rules)
        if verdict.kind == "invalid":
            return 400, JSON, [messages.invalid_body(verdict.message)]
        seen.verdict, seen.tokens = "ok", verdict.tokens
        return 200, JSON, [json.dumps({"input_tokens": seen.tokens}).encode()]

    def _tally_contents(self, seen: Seen) -> tuple[int, Headers, Iterable[bytes]]:
        body = json.loads(seen.body)
        request = gemini.counted(body)
        if request is None:
            return 400, JSON, [gemini.invalid_body("Invalid JSON payload received. Unknown name")]
        seen.parsed = dict(request)
        verdict = gemini.judge(request, self.rules)
        if verdict.kind == "invalid":
            return 400, JSON, [gemini.invalid_body(verdict.message)]
        seen.verdict, seen.tokens = "ok", verdict.tokens
        return 200, JSON, [json.dumps({"totalTokens": seen.tokens}).encode()]

    def _chat(self, seen: Seen, api_format: Any) -> tuple[int, Headers, Iterable[bytes]]:
        try:
            body = json.loads(seen.body)
        except ValueError:
            body = None
        if api_format is responses and isinstance(body, dict):
            body = responses.expanded(body, self.stored)
        route = gemini.ROUTE.fullmatch(seen.path)
        if route is not None and isinstance(body, dict):
            body = {**body, "model": route[1]}
        verdict = api_format.judge(body, self.rules)
        if api_format is messages and not seen.header("anthropic-version"):
            verdict = Verdict("invalid", "anthropic-version: header is required")
        seen.verdict, seen.why = verdict.kind, verdict.message
        seen.parsed = body if isinstance(body, dict) else {}
        seen.tokens, seen.max_tokens, seen.window = verdict.tokens, verdict.max_tokens, verdict.window
        seen.stream = bool(seen.parsed.get("stream")) or "streamGenerateContent" in seen.path
        if verdict.kind == "invalid":
            return 400, JSON, [api_format.invalid_body(verdict.message)]
        if verdict.kind == "overflow":
            return self._overflow(verdict, seen.stream, api_format)
        seen.cached = self.cache.read(seen.parsed, api_format)
        if "(summary)" in seen.header("user-agent"):
            answer = summary_of(seen, self.summariser)
        else:
            answer = self._answers.popleft() if self._answers else self.script(seen)
        frame = Frame(seen.number, seen.model, self._usage(seen, answer, api_format))
        if api_format is responses and seen.parsed.get("store", True):
            self.stored[f"resp_{seen.number}"] = [*responses.items(body), *responses.answered(answer, frame)]
        if not seen.stream:
            return 200, JSON, [api_format.whole(answer, frame)]
        if api_format is gemini and "alt=sse" not in seen.query:
            return 200, JSON, gemini.listed(answer, frame)
        with_usage = bool((seen.parsed.get("stream_options") or {}).get("include_usage"))
        return 200, SSE, api_format.streamed(answer, frame, with_usage)

    def _overflow(self, verdict: Verdict, stream: bool, api_format: Any) -> tuple[int, Headers, Iterable[bytes]]:
        status, body = api_format.overflow_error(verdict, self.rules)
        if stream and self.rules.overflow_in_stream:
            if api_format is responses:
                return 200, SSE, responses.overflow_events(body)
            event = b"event: error\n" if self.rules.wording == "anthropic" else b""
            return 200, SSE, [event + b"data: " + body + b"\n\n"]
        return status, JSON, [body]

    def _usage(self, seen: Seen, answer: Answer, api_format: Any) -> dict[str, Any]:
        sent = min(seen.tokens, seen.window - seen.max_tokens) if self.rules.truncates else seen.tokens
        input_tokens = math.ceil(sent * self.rules.usage_factor)
        output_tokens = count(answer.text) + sum(count(call.arguments) for call in answer.calls)
        usage: dict[str, Any] = api_format.usage(input_tokens, output_tokens, min(seen.cached, input_tokens))
        return usage

    def _relay(self, path: str, seen: Seen) -> bytes:
        match path:
            case "/models":
                names = self.models or sorted(self.rules.windows) or ["gpt-4o-mini"]
                data: list[dict[str, Any]] = [
                    {"id": name, "object": "model", "created": 1_760_000_000, "owned_by": "stub"} for name in names
                ]
                if self.rules.tells:
                    for entry in data:
                        entry |= {"owned_by": "vllm", "max_model_len": self.rules.window_of(entry["id"])}
                answer: dict[str, Any] = {"object": "list", "data": data}
            case "/embeddings":
                vector = {"object": "embedding", "index": 0, "embedding": [0.25, -0.5, 0.125]}
                answer = {"object": "list", "data": [vector], "model": "stub", "usage": {"prompt_tokens": 1}}
            case _:
                digest = hashlib.sha256(seen.body).hexdigest()
                answer = {"method": seen.method, "path": seen.path, "query": seen.query, "headers": seen.headers}
                answer |= {"size": len(seen.body), "sha256": digest}
        return json.dumps(answer).encode()


def _api_format_of(path: str) -> Any:
    """The API format of a request for an answer at *path*; None for any other path."""
    route = gemini.ROUTE.fullmatch(path)
    if route is not None:
        return None if route[2] == "countTokens" else gemini
    return API_FORMATS.get(_below_root(path))


def _below_root(path: str) -> str:
    """*path* without its API root."""
    return re.sub(r"^/(?:openai/deployments/[^/]+(?=/)|(?:openai/|anthropic/)?v1(?=/))", "", path.rstrip("/"))


async def _disturb_head(request: web.Request, fault: Fault) -> None:
    if fault.delay or fault.hang:
        await asyncio.sleep(FOR_EVER if fault.hang else fault.delay)
    if fault.cut == "before_headers":
        await _break_off(request)
    if fault.raw is not None and request.transport is not None:
        request.transport.write(fault.raw)
        request.transport.close()
        await asyncio.sleep(FOR_EVER)


async def _send(
    request: web.Request, status: int, headers: Headers, chunks: Iterable[bytes], fault: Fault
) -> web.StreamResponse:
    response = web.StreamResponse(status=status)
    for name, value in headers:
        response.headers.add(name, value)
    response.headers.setdefault("x-request-id", f"stub-{id(response):x}")
    if not any(name == "content-type" and "event-stream" in value for name, value in headers):
        chunks = [b"".join(chunks)]
        body = gzip.compress(chunks[0]) if fault.gzip else chunks[0]
        chunks = [body]
        response.content_length = len(body)
    elif fault.gzip:
        chunks = [gzip.compress(b"".join(chunks))]
    if fault.gzip:
        response.headers["content-encoding"] = "gzip"
    await response.prepare(request)
    if fault.cut == "after_headers":
        await _break_off(request)
    if request.method != "HEAD":
        async for chunk in _paced(chunks, fault, request):
            await response.write(chunk)
    await response.write_eof()
    return response


async def _paced(chunks: Iterable[bytes], fault: Fault, request: web.Request) -> AsyncIterator[bytes]:
    for number, chunk in enumerate(chunks):
        if fault.cut == "mid_body" and number >= fault.after:
            await _break_off(request)
        if fault.gap and number:
            await asyncio.sleep(fault.gap)
        if fault.gate is not None and number:
            await fault.gate.wait()
        if not fault.trickle:
            yield chunk
            continue
        for byte in chunk:
            yield bytes([byte])
            await asyncio.sleep(fault.trickle)
    if fault.cut == "mid_body":
        await _break_off(request)


async def _break_off(request: web.Request) -> None:
    """Reset the connection under the handler and wait to be cancelled."""
    with suppress(RuntimeError):
        if request.transport is not None:
            request.transport.abort()
    await asyncio.sleep(FOR_EVER)
