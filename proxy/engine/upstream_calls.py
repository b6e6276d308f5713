"""Calls of upstreams: sends a view, and reads the opening of its reply until it is clear whether it is an overflow.

What a reply can be, by its opening:

    status 400 or above      an error: read whole (up to ``ERROR_BYTES``) and classified
    status 200, an error     an overflow inside a stream or a body, before any content: read on, and classified
    status 200, content      accepted; the client gets the bytes read so far, then the rest as it arrives
    200, undecided           buffered for ``HOLD_SECONDS`` at most, then accepted
    anything else            accepted

Bytes that were read are kept in ``Run.chunks`` before they are judged, so that a fault or a cancellation loses none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec import structs

from proxy.core.apis import gemini
from proxy.core.apis.gemini_path import path_for
from proxy.core.attempts import NOT_NEWS, REQUESTED, Failed, NotNews, failure_of, is_news
from proxy.core.decisions import View
from proxy.core.errors import UllageError, UpstreamTimeout, UpstreamUnreachable
from proxy.core.http_headers import NO_HEADERS, PERSONAL
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
from proxy.engine.replies import next_before, read_up_to
from proxy.engine.retries import Retries
from proxy.engine.run import Run
from proxy.tasks import Faults

HOLD_SECONDS: Final = 5.0
"""Seconds after its first byte for which a stream is buffered while it may still be an overflow.

Some servers send a role or a ping before the error. The client's own timeout must not come first.
"""

JUDGED_INLINE: Final = 16_384
"""Bytes of a request above which an overflow is judged in a thread: the error's figures are searched in the body."""

ERROR_BYTES: Final = 1_048_576
"""Bytes of an error answer that are read. A larger one is passed on unread: errors of providers take a few KB."""

NO_ORIGIN: Final = Origin("", ())
"""The origin of a request that carries no credentials."""


Headers = Sequence[tuple[str, str]]
Judge = Callable[[Prior], Overflow | None]
"""Returns the overflow that an answer reports, checked against the facts of its request; None if it cannot be true."""

CheckStored = Callable[[bytes, str, Headers], None]
"""Raises ``Forbidden`` if a body continues a response that an upstream may have stored for another caller."""


class Accepted(msgspec.Struct, frozen=True):
    """A reply to *view* that goes to the client, and the bytes already read from it."""

    view: View
    reply: Reply
    head: bytes
    hides_usage: bool


Received = Accepted | Overflow | Failed | NotNews


class CallSettings(msgspec.Struct, frozen=True):
    """The configuration of calls.

    ``headers_of`` returns the headers added for a model, by the client's name of it; None if none are configured.
    Usage is requested in all streams of ``usage_upstreams``. ``check_stored`` is called before each call; None if
    every caller has a key of its own at the upstream.
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
        """Send *view* and judge the reply. Raises ``UpstreamUnreachable`` and ``UpstreamTimeout``.

        Before the first refusal every reply but an overflow is accepted, unless the model's rule names fallbacks for
        this failure. After it, another refusal or a fallback's failure is ``NotNews``: the client gets the first one.
        """
        is_fallback = bool(view.request.fallback_model)
        # As they are before this call, which may change them: earlier refusals decide what is accepted.
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
            return refusal
        if after_refusal and not is_news(refusal, is_fallback=is_fallback):
            # The smaller view was refused as well, for whatever reason. A fallback's failure says nothing about it.
            run.overflows += not is_fallback
            run.drop()
            return NOT_NEWS
        failed = None
        if refusal >= 400:
            failed = await self._failed(run, view, failure_of(refusal), None)
        return failed or Accepted(view, reply, b"".join(run.chunks), hides_usage)

    async def _failed(self, run: Run, view: View, failure: Failure | None, error: UllageError | None) -> Failed | None:
        """Set *failure* aside and return the models to ask next; None if the client gets it as it is.

        The client gets it if it is no *failure* that the rule names, if bytes of an answer may have gone to the client
        already, or if the error is too long to have been read.
        """
        if failure is None:
            return None
        route = view.known.route
        if view.request.fallback_model:
            route = self._catalogue.resolve(view.request.requested_model)
        if failure not in route.fail_over_on or run.began or self._measurer.mode_of(run.request) != "on":
            return None
        if error is None and run.reply is not None and run.reply.status < 400:
            # An error inside a stream: only the stream's opening has been read.
            await _read_rest(run.reply, run.chunks)
        if sum(map(len, run.chunks)) > ERROR_BYTES:
            return None
        run.failed(view, error)
        return Failed((*route.failovers, REQUESTED))

    async def send_unwatched(self, run: Run, view: View) -> Reply:
        """Send *view* and return any reply unjudged. Raises ``UpstreamUnreachable`` and ``UpstreamTimeout``."""
        await self._call(run, view)
        assert run.reply is not None
        return run.reply

    async def send_bytes(self, run: Run, upstream: str, body: bytes, requested_model: str, path_qs: str) -> Reply:
        """Send *body* to *path_qs* of *upstream* with the caller's own headers, and return any reply unjudged."""
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
        """Send *view*. Return True if its stream will bring usage that Ullage requested and the client did not."""
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
        """Return the body of *view* with the name that its upstream has for the model."""
        located = await self._measurer.located(structs.replace(view.request, body=view.body))
        return renamed(view.body, located, view.known.route.model)

    def _is_foreign(self, fallback: Request, upstream: str) -> bool:
        """True if a fallback's *upstream* is not the one that the caller chose and sent its credentials for."""
        return upstream != self._catalogue.resolve(fallback.requested_model).upstream

    async def _refusal_in(self, reply: Reply, view: View, chunks: list[bytes], *, is_believed: bool) -> Overflow | int:
        """Return the overflow that *reply* reports about *view*; if there is none that can be true, its status.

        The status of an error inside an answer with status 200 is the one that the error states.

        Bytes that are read are added to *chunks*, all of them for an overflow. A claimed overflow is compared with the
        request, which costs a token count; if *is_believed*, an earlier claim held, and this one is not compared.
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
        """Return the overflow that *reply* claims, the function that judges the claim, and the status as stated."""
        status = reply.status
        if status >= 400:
            try:
                is_whole = await read_up_to(reply, chunks, ERROR_BYTES)
            except (UpstreamUnreachable, UpstreamTimeout):
                is_whole = False  # the client still gets the status and what came, and sees that the body is cut
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
    """Return *headers* without those that identify the client: for a server that it did not choose."""
    return [pair for pair in headers if pair[0].lower() not in PERSONAL]


def _uncompressed(headers: Headers) -> Headers:
    """Return *headers* that accept no content coding: the usage event is cut from the stream, so it must be plain."""
    return [*(pair for pair in headers if pair[0].lower() != "accept-encoding"), ("Accept-Encoding", "identity")]


async def _watch(reply: Reply, chunks: list[bytes], opening: EarlyOverflowDetector) -> Overflow | None:
    """Read the opening of an answer until it is clear whether it is an overflow; read all of an overflow.

    Small requests are watched too: if the assumed window is too large, every request looks small.
    """
    # No deadline for the first bytes: while there are none, the client would wait for the upstream in any case.
    first = await reply.next_chunk()
    chunks.append(first)
    if first and opening.feed(first) == "content":
        return None
    deadline = asyncio.get_running_loop().time() + HOLD_SECONDS
    while chunks[-1] and opening.verdict == "undecided":
        chunk = await next_before(reply, deadline)
        if chunk is None:
            return None
        chunks.append(chunk)
        opening.feed(chunk)
    if opening.verdict == "content" or opening.finish() != "overflow":
        return None
    if not await read_up_to(reply, chunks, ERROR_BYTES, deadline):
        return None
    return opening.overflow


async def _read_rest(reply: Reply, chunks: list[bytes]) -> None:
    """Add the rest of a stream that began with an error to *chunks*, as far as it comes in ``HOLD_SECONDS``."""
    deadline = asyncio.get_running_loop().time() + HOLD_SECONDS
    try:
        await read_up_to(reply, chunks, ERROR_BYTES, deadline)
    except (UpstreamUnreachable, UpstreamTimeout):
        return  # the error itself was read; nothing after it matters
