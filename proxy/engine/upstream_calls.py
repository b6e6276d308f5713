"""Calls of upstreams: what is sent for a view, and whether the reply is an overflow, known from its opening."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import structs

from proxy.core.apis import gemini
from proxy.core.apis.gemini_path import path_for
from proxy.core.attempts import NOT_NEWS, REQUESTED, Failed, NotNews, failure_of, is_news
from proxy.core.decisions import View
from proxy.core.errors import UllageError, UpstreamTimeout, UpstreamUnreachable
from proxy.core.http_headers import PERSONAL
from proxy.core.models import Catalogue, Failure
from proxy.core.overflow.classify import Classifier
from proxy.core.overflow.evidence import NOT_COUNTED_YET, Prior
from proxy.core.overflow.kinds import Overflow
from proxy.core.overflow.stream import EarlyOverflowDetector
from proxy.core.request import Origin, Request
from proxy.engine.body_edits import renamed
from proxy.engine.include_usage import requesting_usage
from proxy.engine.measuring import Measurer
from proxy.engine.ports import Reply, Upstream
from proxy.engine.retries import Retries
from proxy.engine.run import Run
from proxy.tasks import Faults

HOLD_SECONDS: Final = 5.0
"""How long the head of a stream is buffered after its first byte while it is unclear whether it is an overflow."""

JUDGED_INLINE: Final = 16_384
"""Bytes of a request above which a claim about it is judged in a thread: its words are searched."""

ERROR_BYTES: Final = 1_048_576
"""An error answer larger than this is passed on without being looked at."""

NO_ORIGIN: Final = Origin("", ())
"""Stands for the origin of a request that carries no credentials."""

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

Headers = Sequence[tuple[str, str]]
Judge = Callable[[Prior], Overflow | None]
"""Returns the overflow that an answer reports, given what is known of its request."""

CheckStored = Callable[[bytes, str, Headers], None]
"""Raises ``Forbidden`` if a body goes on from what an upstream may have stored for another caller."""


class Accepted(msgspec.Struct, frozen=True):
    """A reply that goes to the client, and the bytes already read from it."""

    reply: Reply
    head: bytes
    hides_usage: bool


@dataclass(frozen=True, slots=True)
class Overflowed:
    """The view is too long for its model."""

    overflow: Overflow


Received = Accepted | Overflowed | Failed | NotNews


@dataclass(frozen=True, slots=True)
class CallSettings:
    """The configuration of calls.

    ``headers_of`` gives the headers added for a model, by the client's name of it, if any are configured. Usage is
    requested in all streams of ``usage_upstreams``. ``check_stored`` is called before each call if callers share a key.
    """

    headers_of: Callable[[str], Mapping[str, str]] | None = None
    usage_upstreams: frozenset[str] = frozenset()
    check_stored: CheckStored | None = None


class UpstreamCalls:
    """Sends views, and reads the opening of each reply until it is known whether it is an overflow."""

    def __init__(
        self,
        upstream: Upstream,
        catalogue: Catalogue,
        measurer: Measurer,
        retries: Retries,
        classifier: Classifier,
        settings: CallSettings,
        faults: Faults,
    ) -> None:
        self._upstream = upstream
        self._catalogue = catalogue
        self._measurer = measurer
        self._retries = retries
        self._classifier = classifier
        self._settings = settings
        self._faults = faults

    async def send(self, run: Run, view: View) -> Received:
        """Send *view*. Raises ``UpstreamUnreachable`` and ``UpstreamTimeout``.

        Before the first refusal every other reply is accepted, unless the model's rule names others for this failure.
        After it a fallback's failure is not news, nor is another refusal.
        """
        is_fallback = bool(view.request.fallback_model)
        after_overflow = run.overflows > 0
        after_refusal = run.was_refused
        run.sent += 1
        try:
            hides_usage = await self._call(run, view)
            reply = run.reply
            assert reply is not None
            refusal = await self._refusal_in(reply, view, run.chunks, is_believed=after_overflow)
        except (UpstreamUnreachable, UpstreamTimeout) as error:
            run.drop()
            if is_fallback and after_refusal:
                return NOT_NEWS
            failed = await self._failed(run, view, "unavailable", error)
            if failed is None:
                raise
            return failed
        if isinstance(refusal, Overflow):
            run.overflowed(view)
            return Overflowed(refusal)
        if after_refusal and not is_news(refusal, is_fallback=is_fallback):
            run.overflows += not is_fallback
            run.drop()
            return NOT_NEWS
        failed = None
        if refusal >= 400:
            failed = await self._failed(run, view, failure_of(refusal), None)
        return failed or Accepted(reply, b"".join(run.chunks), hides_usage)

    async def _failed(self, run: Run, view: View, failure: Failure | None, error: UllageError | None) -> Failed | None:
        """The models to ask after *failure*, which is put aside; None if the client is to see it.

        No other model answers what is no *failure*, or if the client may have bytes of an answer already, or the error
        is too long to have been read.
        """
        if failure is None:
            return None
        route = view.known.route
        if view.request.fallback_model:
            route = self._catalogue.resolve(view.request.requested_model)
        if failure not in route.fail_over_on or run.began or self._measurer.mode_of(run.request) != "on":
            return None
        if error is None and run.reply is not None and run.reply.status < 400:
            await _read_rest(run.reply, run.chunks)
        if sum(map(len, run.chunks)) > ERROR_BYTES:
            return None
        run.failed(view, error)
        return Failed((*route.failovers, REQUESTED))

    async def send_unwatched(self, run: Run, view: View) -> Reply:
        """Send *view* and return whatever is replied. Raises ``UpstreamUnreachable`` and ``UpstreamTimeout``."""
        await self._call(run, view)
        assert run.reply is not None
        return run.reply

    async def send_bytes(self, run: Run, upstream: str, body: bytes, requested_model: str, path_qs: str) -> Reply:
        """Send *body* to *path_qs* of *upstream* with the caller's own headers, unread and unwatched."""
        origin = run.request.origin or NO_ORIGIN
        run.sending(upstream)
        settings, added = self._settings, NO_HEADERS
        if settings.headers_of is not None:
            added = settings.headers_of(requested_model)
        if settings.check_stored is not None:
            settings.check_stored(body, upstream, origin.headers)
        run.reply = await self._upstream.send(upstream, "POST", path_qs, origin.headers, body, added)
        return run.reply

    async def _call(self, run: Run, view: View) -> bool:
        """Send *view*. Return True if usage, which the client did not request, is requested in its stream."""
        request, route, settings = view.request, view.known.route, self._settings
        origin = run.request.origin or NO_ORIGIN
        headers: Headers = origin.headers
        if request.fallback_model and self._is_foreign(request, route.upstream):
            headers = _without_credentials(headers)
        body, path_qs = view.body, origin.path_qs
        if request.api == gemini.API:
            path_qs = path_for(path_qs, route.model)
        elif route.model != route.requested_model and not request.path_model:
            body = await self._renamed(view)
        run.sending(route.upstream)
        if settings.check_stored is not None:
            settings.check_stored(body, route.upstream, headers)
        with_usage, added = None, NO_HEADERS
        if request.api == "chat" and route.upstream in settings.usage_upstreams:
            with_usage = self._faults.attempt("answer", request.request_id, partial(requesting_usage, body), None)
        if with_usage is not None:
            body, headers = with_usage, _uncompressed(headers)
        if settings.headers_of is not None:
            added = settings.headers_of(route.requested_model)
        run.reply = await self._upstream.send(route.upstream, "POST", path_qs, headers, body, added)
        return with_usage is not None

    async def _renamed(self, view: View) -> bytes:
        """The body of *view* under the name that its upstream has for the model."""
        located = await self._measurer.located(structs.replace(view.request, body=view.body))
        return renamed(view.body, located, view.known.route.model)

    def _is_foreign(self, fallback: Request, upstream: str) -> bool:
        """True if a fallback's *upstream* is not the one that the caller chose, and has a key for."""
        return upstream != self._catalogue.resolve(fallback.requested_model).upstream

    async def _refusal_in(self, reply: Reply, view: View, chunks: list[bytes], *, is_believed: bool) -> Overflow | int:
        """The overflow that *reply* to *view* is; if it is none, or one that cannot be true, its status.

        That is what an error inside an answer with status 200 states, if it came before any content.

        What is read to find out is added to *chunks* as it comes, so that none is lost if this fails; of an overflow it
        is everything. A claim is compared with what is known of the request, which costs a count; a provider that was
        believed once *is_believed* again.
        """
        claim, judge, status = await self._claim_in(reply, chunks)
        if claim is None or judge is None or not self._retries.may_retry(claim):
            return status
        if claim.unlikely or not is_believed:
            prior = await self._retries.prior(view)
            if len(view.body) > JUDGED_INLINE:
                claim = await asyncio.to_thread(judge, prior)
            else:
                claim = judge(prior)
        if claim is None or not self._retries.may_retry(claim):
            return status
        return claim

    async def _claim_in(self, reply: Reply, chunks: list[bytes]) -> tuple[Overflow | None, Judge | None, int]:
        """The overflow that *reply* claims to be, what judges the claim, and the status that it has or states."""
        status = reply.status
        if status >= 400:
            try:
                is_whole = await _read(reply, chunks, ERROR_BYTES)
            except (UpstreamUnreachable, UpstreamTimeout):
                is_whole = False  # the client needs the status, and sees by itself that the body is cut
            if not is_whole:
                return None, None, status
            judge = partial(self._classifier.answer, status, reply.headers, b"".join(chunks))
            return judge(NOT_COUNTED_YET), judge, status
        if status == 200:
            content_type, encoding = reply.header("content-type"), reply.header("content-encoding")
            opening = EarlyOverflowDetector(self._classifier, content_type, encoding, NOT_COUNTED_YET)
            claim = await _watch(reply, chunks, opening)
            return claim, opening.overflow_for, opening.stated_status
        return None, None, status


def _without_credentials(headers: Headers) -> Headers:
    """*headers* without what says who the client is: for a server that it did not choose."""
    return [pair for pair in headers if pair[0].lower() not in PERSONAL]


def _uncompressed(headers: Headers) -> Headers:
    """*headers* that accept no content coding: an event can only be taken out of a stream that can be read."""
    return [*(pair for pair in headers if pair[0].lower() != "accept-encoding"), ("Accept-Encoding", "identity")]


async def _watch(reply: Reply, chunks: list[bytes], opening: EarlyOverflowDetector) -> Overflow | None:
    """Hold the opening of an answer until it is clear what it is; all of it, if it is an overflow.

    However small the request is by our count: a window that is believed too large makes every request look small.
    """
    first = await reply.next_chunk()
    chunks.append(first)
    if first and opening.feed(first) == "content":
        return None
    deadline = asyncio.get_running_loop().time() + HOLD_SECONDS
    while chunks[-1] and opening.verdict == "undecided":
        chunk = await _before(deadline, reply.next_chunk())
        if chunk is None:
            return None
        chunks.append(chunk)
        opening.feed(chunk)
    if opening.verdict == "content" or opening.finish() != "overflow":
        return None
    if not await _read(reply, chunks, ERROR_BYTES, deadline):
        return None
    return opening.overflow


async def _read(reply: Reply, chunks: list[bytes], limit: int, deadline: float | None = None) -> bool:
    """Add the rest of a reply to *chunks*, up to *limit* bytes; True if that was all of it."""
    size = 0
    while size <= limit:
        chunk = await _before(deadline, reply.next_chunk())
        if not chunk:
            return chunk is not None
        chunks.append(chunk)
        size += len(chunk)
    return False


async def _read_rest(reply: Reply, chunks: list[bytes]) -> None:
    """Add what still comes of a stream that began with an error to *chunks*, as far as it comes soon."""
    deadline = asyncio.get_running_loop().time() + HOLD_SECONDS
    try:
        await _read(reply, chunks, ERROR_BYTES, deadline)
    except (UpstreamUnreachable, UpstreamTimeout):
        return  # the error is here, and nothing of worth follows it


async def _before(deadline: float | None, chunk: Awaitable[bytes]) -> bytes | None:
    """The chunk, or None if it does not come before *deadline* (the loop's clock; None: it may take any time)."""
    try:
        async with asyncio.timeout_at(deadline):
            return await chunk
    except TimeoutError:
        return None
