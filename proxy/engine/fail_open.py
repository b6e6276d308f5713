"""Fail open: after a fault of our own a request is still answered, at the price of its compression.

What becomes of it depends on how far it came when the fault was met:

    nothing was sent                  the client's own bytes are sent once
    a reply is in hand                that reply, with the bytes already read from it
    an overflow's reply was read      that first overflow's reply, as if there were no retries

Nothing is tried again and nothing is learned. An ``UllageError`` is no fault: it is refused on purpose, or the upstream
failed. Neither is a cancellation: nobody waits for an answer any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from proxy.core.budget.catalogue import Catalogue, Route
from proxy.core.errors import UllageError
from proxy.core.report import INTERNAL_ERROR, Report
from proxy.core.request import Request
from proxy.engine.bodies import renamed
from proxy.engine.fitting import Fitter
from proxy.engine.ports import Reply, Send
from proxy.engine.replies import Answer, DrainedReply
from proxy.tasks import Faults


class _Named(msgspec.Struct):
    model: str = ""


_NAMED: Final = msgspec.json.Decoder(_Named)


class Sending:
    """Sends the bodies of one request, and holds what is in hand of the answers until one is passed on.

    ``taken`` are the bytes read from ``reply`` so far, ``upstream`` the one that was asked last.
    ``instead`` is what the client gets if none is in hand: the reply to the first body that was too long, or the
    generation before the one that is under way.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.upstream = ""
        self.reply: Reply | None = None
        self.taken: list[bytes] = []
        self.instead: tuple[Reply, bytes] | None = None

    async def __call__(self, upstream: str, body: bytes, *, keyless: bool = False, model: str = "") -> Reply:
        """See ``Send``."""
        if self.reply is not None:
            self.instead = self.reply, b"".join(self.taken)
        self.upstream, self.reply, self.taken = upstream, None, []
        self.reply = await self._send(upstream, body, keyless=keyless, model=model)
        return self.reply

    def finish(self) -> None:
        """Close the reply in hand: all that matters of it was read."""
        if self.reply is not None:
            self.reply.close()
            self.reply = DrainedReply(self.reply)

    def overflowed(self) -> None:
        """Put the reply in hand aside: it says that what was sent is too long, and all of it was read."""
        self.finish()
        if self.reply is not None and self.instead is None:
            self.instead = self.reply, b"".join(self.taken)
        self.reply = None

    def drop(self) -> None:
        """Close the reply in hand: the client is not to see it."""
        if self.reply is not None:
            self.reply.close()
        self.reply = None


class FailOpen:
    """Answers requests by work that may have faults."""

    def __init__(self, catalogue: Catalogue, fitter: Fitter, faults: Faults) -> None:
        self._catalogue = catalogue
        self._fitter = fitter
        self._faults = faults

    async def answer(
        self, request: Request, send: Send, work: Callable[[Request, Sending], Awaitable[Answer]], api: str = ""
    ) -> Answer:
        """Return the answer that *work* makes, or what is possible after a fault in it.

        *api* is what the request is reported as, if not its own. Raises what is refused on purpose, and what *send*
        raises.
        """
        sending = Sending(send)
        try:
            return await work(request, sending)
        except (UllageError, asyncio.CancelledError):
            sending.drop()  # nobody else would end the call
            raise
        except Exception as fault:  # noqa: BLE001 - fail open: a fault of ours costs compression, never the request
            self._faults.report("request", request.request_id, fault)
            return await self._pass_through(request, sending, api)

    async def untouched(self, request: Request, send: Send, api: str = "") -> Answer:
        """Return the upstream's answer to the client's own bytes. Raises what *send* raises."""
        return await self._pass_through(request, Sending(send), api)

    async def _pass_through(self, request: Request, sending: Sending, api: str) -> Answer:
        if sending.reply is not None:
            return self._answer(request, sending, sending.reply, b"".join(sending.taken), api)
        if sending.instead is not None:
            return self._answer(request, sending, *sending.instead, api)
        upstream, model, body = self._destination(request)
        reply = await sending(upstream, body, model=model)
        return self._answer(request, sending, reply, b"", api)

    def _answer(self, request: Request, sending: Sending, reply: Reply, head: bytes, api: str) -> Answer:
        facts = request.request_id, api or request.api, request.model or model_of(request.body), sending.upstream
        return Answer(Report(*facts, outcome="degraded", reason=INTERNAL_ERROR), reply, head)

    def _destination(self, request: Request) -> tuple[str, str, bytes]:
        """The upstream, the model's name and the body to send; each as plain as what still works allows."""
        attempt, name = self._faults.attempt, request.request_id
        model = request.model or attempt("request", name, lambda: model_of(request.body), "")
        route = self._route(model, name)
        if route is None:
            return self._catalogue.default_upstream, model, request.body
        if request.model or route.model == route.asked:
            return route.upstream, route.asked, request.body
        rename = lambda: renamed(request, self._fitter.locate(request), route.model)  # noqa: E731
        return route.upstream, route.asked, attempt("request", name, rename, request.body)

    def _route(self, model: str, request_id: str) -> Route | None:
        """The route of *model*; ``None`` if resolving it is what fails. Raises ``NotFound``."""
        try:
            return self._catalogue.resolve(model)
        except UllageError:
            raise
        except Exception as fault:  # noqa: BLE001 - the default upstream may still know the model
            self._faults.report("request", request_id, fault)
            return None


def model_of(body: bytes) -> str:
    """The model that *body* names, read apart from all that may just have failed; empty if it names none."""
    try:
        return _NAMED.decode(body).model
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ""
