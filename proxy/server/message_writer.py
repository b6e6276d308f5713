"""Writes answers as messages of a WebSocket, and takes the items of a response out of its events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from proxy.core.apis.json_steps import UNREADABLE
from proxy.core.apis.sse import EventCutter, data_of
from proxy.core.errors import Overloaded, UpstreamUnreachable, error_body
from proxy.server.config import Limits
from proxy.server.incoming import IncomingRequest
from proxy.server.response import ResponseWriter, StreamBroken
from proxy.server.websocket import TEXT, frame

_STORED_EVENTS: Final = (b'"response.completed"', b'"response.incomplete"', b'"response.output_item.done"')
"""Types of the events with items of an answer."""

_LAST: Final = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
"""Types of the events that end an answer. https://platform.openai.com/docs/api-reference/responses-streaming"""


class _Error(msgspec.Struct):
    error: dict[str, Any]


class _Response(msgspec.Struct):
    id: str = ""
    output: list[msgspec.Raw] = []


class _Event(msgspec.Struct):
    type: str = ""
    item: msgspec.Raw = msgspec.Raw(b"")
    response: _Response | None = None


_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_event: Final = msgspec.json.Decoder(_Event)
_error: Final = msgspec.json.Decoder(_Error)


class MessageWriter(ResponseWriter):
    """Writes one answer as messages: one for each event of a stream, or one for an answer that is no stream.

    ``name`` and ``output`` are those of the response, once the model has finished it. A message is in memory until it
    is complete, so none may have more bytes than a body (``limits.body``). *count* is given the bytes of ``output`` as
    they come; if it raises ``Overloaded`` the response is not stored, nor after a fault of ours, which *report_fault*
    is given.
    """

    __slots__ = (
        *("_body", "_count", "_cutter", "_is_over", "_is_stored", "_is_stream", "_last", "_most", "_report_fault"),
        "_size",
        *("name", "output"),
    )

    def __init__(
        self,
        request: IncomingRequest,
        limits: Limits,
        count: Callable[[int], None],
        report_fault: Callable[[Exception], None],
    ) -> None:
        super().__init__(request, limits.write)
        self._report_fault = report_fault
        self._count = count
        self._is_stored = True
        self._size = 0
        self._most = limits.body
        self._cutter = EventCutter()
        self._is_stream = False
        self._is_over = False
        self._last = b""
        self._body = bytearray()
        self.name = ""
        self.output: list[msgspec.Raw] = []

    def start(
        self,
        status: int,
        headers: Iterable[tuple[str, str]],
        *,
        sized: bool,
        close_delimited: bool = False,
        is_followed: bool = False,
    ) -> None:
        """Note *status* and the kind of the body: messages have no head."""
        del sized, close_delimited, is_followed
        self.status = status
        kinds = [value for name, value in headers if name.lower() == "content-type"]
        self._is_stream = any(kind.startswith("text/event-stream") for kind in kinds)

    def write(self, chunk: bytes) -> bool:
        """Write the events that *chunk* completes. Return True if the client reads more slowly than they come.

        Raises ``UpstreamUnreachable`` if an incomplete event is too long for one message.
        """
        if self._is_stream:
            for event in self._cutter.feed(chunk):
                self._write_event(event)
        else:
            self._body += chunk
        if len(self._body) > self._most or self._cutter.pending_size > self._most:
            self._body.clear()
            self._cutter.flush()
            raise UpstreamUnreachable("", "its answer is too long for one message")
        return self._protocol.writing_paused

    def finish(self) -> None:
        """Write what is left of the answer."""
        self._ended = True
        if self._is_stream:
            self._write_event(self._cutter.flush())
            if not self._is_over and _type_of(self._last) not in _LAST:
                # The end of a stream tells an HTTP client that it was cut. A socket stays open and shows nothing.
                self.send(error_message(StreamBroken.status, error_body(StreamBroken(), "responses")))
        else:
            self.send(self._whole())

    def send(self, message: bytes) -> None:
        """Send *message*. Raises ``ClientLeft``."""
        self._send(frame(TEXT, message))

    def break_off(self, last: bytes = b"") -> None:
        """Write *last*, or an error of our own: the socket stays open, and the client sees that the answer is cut."""
        self._ended = True
        if not last:
            last = b"data: " + error_message(502, b"") + b"\n\n"
        self._cutter.flush()
        for event in self._cutter.feed(last):
            self._write_event(event)

    def _write_event(self, event: bytes) -> None:
        data = data_of(event).strip()
        if not data or data == b"[DONE]":
            return
        self._last = data
        self._note(data)
        self.send(data)

    def _whole(self) -> bytes:
        """Return the message for an answer that is no stream: an error, or a response that came at once."""
        body = bytes(self._body)
        if self.status >= 400 or not _is_object(body):
            return error_message(self.status, body)
        data = b'{"type":"response.completed","response":' + body + b"}"
        self._note(data)
        return data

    def _note(self, data: bytes) -> None:
        """Store the items that the event *data* adds, if the response is still stored."""
        if not self._is_stored or not any(kind in data for kind in _STORED_EVENTS):
            return
        try:
            self._add(data)
        except Overloaded:
            self._forget()
        except Exception as fault:  # noqa: BLE001 - a fault while storing must not cost the answer
            self._forget()
            self._report_fault(fault)

    def _forget(self) -> None:
        self._is_stored, self.name, self.output = False, "", []

    def _add(self, data: bytes) -> None:
        """Add the items of an event: single ones, too, as some servers omit them in the last event.

        Raises ``Overloaded``.
        """
        try:
            event = _event.decode(data)
        except UNREADABLE:
            return  # the client gets the event anyway; without it the conversation is not stored
        if event.type == "response.output_item.done":
            self.output += copied([event.item])
            self._size += len(event.item)
        elif event.response is not None and event.type in ("response.completed", "response.incomplete"):
            self._is_over = True
            self.name = event.response.id
            self.output = copied(event.response.output) or self.output
            self._size = sum(map(len, self.output))
        self._count(self._size)


def _type_of(data: bytes) -> str:
    """Return the type of the event *data*; empty if it cannot be read."""
    try:
        return _event.decode(data).type
    except UNREADABLE:
        return ""


def copied(items: list[msgspec.Raw]) -> list[msgspec.Raw]:
    """Return *items* without the message that they are slices of."""
    return [msgspec.Raw(bytes(item)) for item in items]


def error_message(status: int, body: bytes) -> bytes:
    """Return the message for an answer with *status*, an error, and this *body*."""
    try:
        error = _error.decode(body).error
    except UNREADABLE:
        error = {"type": "server_error", "code": "upstream_error", "message": f"The upstream answered {status}."}
    return msgspec.json.encode({"type": "error", "status": status, "error": error})


def _is_object(body: bytes) -> bool:
    """True if *body* is an object in JSON, which a page of a gateway is not."""
    try:
        _members.decode(body)
    except UNREADABLE:
        return False
    return True
