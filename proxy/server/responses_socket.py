"""Answers the Responses API over a WebSocket: each message is a request, and each event of its answer a message.

Theory of operation
===================

The protocol is https://developers.openai.com/api/docs/guides/websocket-mode. A client sends only new items, and names
the response that it continues. To know the length of the conversation, the connection stores it: the input and the
output of the newest response. Each message is joined with them to a whole request, which the handler answers like a
POST, with every guarantee. The upstream needs no WebSocket.

    client                            connection                          handler
    response.create, items a b    ->  input a b                       ->  answers it as a POST
                                  <-  a message for each event        <-  events, output c of response r1
                                      stores r1: a b c
    response.create, r1, item d   ->  input a b c d                   ->  answers it as a POST
    response.create, r0, item e   ->  as it is: r0 may be the         ->  passes the upstream's answer on,
                                      upstream's                          output f of response r2
                                      stores r2: r0, then e f

A warm-up (``generate: false``) calls no model: its input is stored, and the connection invents the id of the response
that the client continues. After an error the response before it is still stored. A fault of ours is an error
message, and the socket stays open; if storing a response is what fails, the response is not stored.

One request is under way at a time. Codes are those of a close frame:

    state       event                            next
    waiting     a message                        answering; waiting if it is a warm-up or cannot be read
    waiting     no message for an hour           closed, 1000
    waiting     a binary message                 closed, 1003
    answering   a message                        answering; the message waits
    answering   the end of the answer            waiting; if the process is being shut down, closed with 1012 after
                                                 an error message for each message that waits
    both        the client's close               closed; a call of the upstream ends
    both        more bytes than the caller may   closed, 1013
    both        the end of the process           closed with 1001, after the messages that have arrived
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import EofStream, WSCloseCode, WSMsgType
from aiohttp._websocket.reader import WebSocketDataQueue  # private: ``aiohttp.http`` exports only its reader
from aiohttp.http import WebSocketError, WebSocketReader
from aiohttp.streams import EMPTY_PAYLOAD
from msgspec import structs

from proxy.core.apis.json_scan import members, reject_duplicates
from proxy.core.apis.json_steps import UNREADABLE
from proxy.core.errors import InvalidRequest, Overloaded, UllageError, error_body
from proxy.server.access import Caller
from proxy.server.incoming import BodyReader, IncomingRequest
from proxy.server.message_writer import MessageWriter, copied, error_message
from proxy.server.request import MANAGED, RequestHeaders
from proxy.server.response import ResponseWriter
from proxy.server.websocket import CLOSE, PONG, FrameHeads, frame, handshake
from proxy.tasks import Faults

PATH: Final = MANAGED["/v1/responses"]
IDLE_SECONDS: Final = 3600.0
"""Seconds without a message after which a socket is closed: the longest life of OpenAI's own.

https://developers.openai.com/api/docs/guides/websocket-mode#connection-behavior-and-limits
"""

_BUFFER: Final = 2**16
"""Bytes of messages that may wait; above twice as many, aiohttp stops reading the connection."""

_JSON: Final = ("content-type", "application/json")


class Incoming(WebSocketDataQueue):
    """The messages of a client, in order. Pings and a close are answered as soon as they arrive.

    ``is_answering``: a request is under way; a close cancels it and its call of the upstream. ``unread`` is the number
    of bytes that have arrived since the last complete message.
    """

    def __init__(self, request: IncomingRequest) -> None:
        super().__init__(request.protocol, _BUFFER, loop=asyncio.get_running_loop())
        self._request = request
        self.is_answering = False
        self.unread = 0

    @property
    def is_empty(self) -> bool:
        """True if no message waits."""
        return not self._buffer

    def feed_data(self, data: Any, size: int) -> None:
        """Add a message, or answer a control frame.

        A client that does not read gets no more answers to its pings, which would wait here without end. The protocol
        asks for one answer to many pings: https://www.rfc-editor.org/rfc/rfc6455#section-5.5.3
        """
        if data.type in (WSMsgType.TEXT, WSMsgType.BINARY):
            self.unread = 0
        transport = self._request.transport
        if data.type is WSMsgType.PONG or transport is None:
            return
        if data.type is WSMsgType.PING:
            if not self._request.protocol.writing_paused:
                transport.write(frame(PONG, data.data))
        elif data.type is WSMsgType.CLOSE:
            transport.write(frame(CLOSE, struct.pack("!H", WSCloseCode.OK)))
            self.feed_eof()
            if self.is_answering:
                transport.close()
        else:
            super().feed_data(data, size)


class CountedFrames:
    """aiohttp's parser of frames, with their bytes counted as they arrive: it joins any number of them to a message.

    *count* is called with the bytes of the incomplete message, and raises ``Overloaded``.
    """

    def __init__(self, parser: WebSocketReader, incoming: Incoming, count: Callable[[int], None]) -> None:
        self._parser = parser
        self._incoming = incoming
        self._count = count
        self._heads = FrameHeads()
        self.feed_eof: Callable[[], None] = parser.feed_eof

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Parse *data*. Return True if nothing more has to be parsed."""
        incoming = self._incoming
        if not self._heads.are_masked(data):
            incoming.set_exception(WebSocketError(WSCloseCode.PROTOCOL_ERROR, "a frame of the client is not masked"))
            return True, b""
        incoming.unread += len(data)
        # Parsed before it is counted: ``Incoming`` sets ``unread`` to 0 at the end of a message.
        ended: tuple[bool, bytes] = self._parser.feed_data(data)
        try:
            self._count(incoming.unread)
        except Overloaded as error:
            incoming.set_exception(WebSocketError(WSCloseCode.TRY_AGAIN_LATER, str(error)))
            return True, b""
        return ended


class Conversation(msgspec.Struct):
    """The items of the newest response, each as JSON: its input, then its output. ``name`` is empty without one.

    ``before`` names the upstream's response that the items continue; empty if they are the whole conversation. ``size``
    is the bytes of the items.
    """

    name: str = ""
    items: list[msgspec.Raw] = []
    before: str = ""
    size: int = 0


class Message(msgspec.Struct):
    """The members of a client's message that are read here. All others are passed on unchanged."""

    type: str
    previous_response_id: str | None = None
    input: str | list[msgspec.Raw] = []
    generate: bool = True
    store: bool | None = True
    model: str = ""


class _Item(msgspec.Struct):
    type: str = ""
    encrypted_content: str | None = None


_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_message: Final = msgspec.json.Decoder(Message)
_item: Final = msgspec.json.Decoder(_Item)


class ResponsesSocket:
    """One WebSocket of a client, after its upgrade was admitted; *headers* are those of its handshake."""

    def __init__(
        self, request: IncomingRequest, headers: RequestHeaders, reader: BodyReader, faults: Faults, request_id: str
    ) -> None:
        """*reader* counts the bytes of the conversation as those of the caller.

        *faults* reports faults of our own, under *request_id*.
        """
        self._faults = faults
        self._request_id = request_id
        self._connection: Any = request.protocol
        self._request = structs.replace(request, method="POST", raw_path=PATH.path, content=EMPTY_PAYLOAD)
        self._incoming = Incoming(request)
        self._reader = reader
        # Each message becomes a POST: without the fields of the handshake, with the type of its own body.
        end_to_end = [pair for pair in headers.end_to_end if not pair[0].lower().startswith("sec-websocket-")]
        by_name = {name: value for name, value in headers.by_name.items() if name not in ("upgrade", "connection")}
        self._headers = RequestHeaders((*end_to_end, _JSON), by_name, headers.own)
        self._conversation = Conversation()

    async def serve(self, out: ResponseWriter) -> None:
        """Accept the upgrade with *out*, and answer messages until the client closes. Raises ``InvalidRequest``."""
        out.switch(handshake(self._request.headers))
        parser = WebSocketReader(self._incoming, self._reader.limits.body, False, False)
        self._connection.set_parser(CountedFrames(parser, self._incoming, self._count))
        code: int = WSCloseCode.GOING_AWAY
        try:
            code = await self._answer_messages()
        except EofStream:
            code = 0
        except TimeoutError:
            code = WSCloseCode.OK
        except WebSocketError as error:
            code = error.code
        finally:
            self._reader.release()
            self._end(out, code)

    def leave(self) -> None:
        """Close the socket once the messages that have arrived are answered: the process ends."""
        self._incoming.set_exception(WebSocketError(WSCloseCode.GOING_AWAY, "the process ends"))

    async def _answer_messages(self) -> int:
        """Answer one message after the other. Return the code to close with.

        Raises ``EofStream`` when the client has closed, ``TimeoutError`` and ``WebSocketError``.
        """
        is_restarting = False
        # Messages that wait are refused before the close, each with an error that says that it can be sent again.
        while not (is_restarting and self._incoming.is_empty):
            async with asyncio.timeout(IDLE_SECONDS):
                message = await self._incoming.read()
            if message.type is not WSMsgType.TEXT:
                return WSCloseCode.UNSUPPORTED_DATA
            is_restarting |= not await self._answered(bytes(message.data))
            self._count_anew()
        return WSCloseCode.SERVICE_RESTART

    def _end(self, out: ResponseWriter, code: int) -> None:
        """Close the socket with *code*; 0 if the client has closed it."""
        transport = self._request.transport
        if code and transport is not None and not transport.is_closing():
            transport.write(frame(CLOSE, struct.pack("!H", code)))
        out.break_off()

    async def _answered(self, data: bytes) -> bool:
        """Answer one message. Return False if it was the last one: the process is being shut down."""
        report_fault = partial(self._faults.report, "answer", self._request_id)
        out = MessageWriter(
            self._request, self._reader.limits, lambda size: self._count(self._incoming.unread + size), report_fault
        )
        try:
            message = _read(data)
            items = self._items_of(message)
            body = self._body_of(data, message, items)
        except InvalidRequest as error:
            out.send(error_message(error.status, error_body(error, "responses")))
            return True
        except Exception as fault:  # noqa: BLE001 - it costs this message an answer, and never the conversation
            self._faults.report("request", self._request_id, fault)
            out.send(error_message(UllageError.status, error_body(UllageError(), "responses")))
            return True
        if not message.generate:
            self._warm_up(out, message, items)
            return True
        request = structs.replace(self._request, body=body, content_length=len(body))
        self._connection.caller = Caller(self._headers, PATH)
        self._incoming.is_answering = True
        await self._connection.handle(request, out)  # looked up each time: a reload replaces the handler
        self._incoming.is_answering = False
        if out.name:
            self._remember(out, items, message)
        return out.keep_alive

    def _remember(self, out: MessageWriter, items: list[msgspec.Raw], message: Message) -> None:
        """Store the conversation up to the response that *out* wrote; forget it after a fault of ours."""
        try:
            self._store(out.name, [*items, *_lasting(out.output, message)], message)
        except Exception as fault:  # noqa: BLE001 - the client has its answer, and can send the whole conversation
            self._conversation = Conversation()
            self._faults.report("after", self._request_id, fault)

    def _items_of(self, message: Message) -> list[msgspec.Raw]:
        """Return the items of the whole input that *message* stands for."""
        added = message.input
        if isinstance(added, str):
            added = [msgspec.Raw(msgspec.json.encode({"role": "user", "content": added}))]
        if self._continues(message):
            return [*self._conversation.items, *copied(added)]
        return copied(added)

    def _continues(self, message: Message) -> bool:
        """True if *message* continues the response that is stored here."""
        return bool(message.previous_response_id) and message.previous_response_id == self._conversation.name

    def _body_of(self, data: bytes, message: Message, items: list[msgspec.Raw]) -> bytes:
        """Return the body of the equivalent POST. Members that are not the protocol's own pass byte for byte."""
        fields = _members.decode(data)
        for name in ("type", "generate", "background"):
            fields.pop(name, None)
        if self._continues(message):
            del fields["previous_response_id"]
            if self._conversation.before:
                fields["previous_response_id"] = msgspec.Raw(msgspec.json.encode(self._conversation.before))
        fields["stream"] = msgspec.Raw(b"true")
        fields["input"] = msgspec.Raw(b"[" + b",".join(map(bytes, items)) + b"]")
        return msgspec.json.encode(fields)

    def _warm_up(self, out: MessageWriter, message: Message, items: list[msgspec.Raw]) -> None:
        """Store the input of a request that wants no answer yet, and send the id of an empty response to it."""
        response: dict[str, Any] = {
            "id": f"resp_{os.urandom(16).hex()}",
            "object": "response",
            "created_at": int(time.time()),
            "model": message.model,
            "output": [],
        }
        steps = (("response.created", "in_progress"), ("response.completed", "completed"))
        for number, (kind, status) in enumerate(steps):
            event = {"type": kind, "sequence_number": number, "response": {**response, "status": status}}
            out.send(msgspec.json.encode(event))
        self._store(response["id"], items, message)

    def _store(self, name: str, items: list[msgspec.Raw], message: Message) -> None:
        """Store the conversation up to *name*, the response to *message*."""
        before = message.previous_response_id or ""
        if self._continues(message):
            before = self._conversation.before
        self._conversation = Conversation(name, items, before, sum(map(len, items)))

    def _count_anew(self) -> None:
        """Count what is still in memory, from zero: ``BodyReader.count`` only adds. Without room nothing is stored."""
        self._reader.release()
        try:
            self._count(self._incoming.unread)
        except Overloaded:
            self._conversation = Conversation()

    def _count(self, unread: int) -> None:
        """Count the conversation and *unread* bytes as the caller's. Raises ``Overloaded``."""
        self._reader.count(self._conversation.size + unread)


def _read(data: bytes) -> Message:
    """Return the message *data*. Raises ``InvalidRequest``."""
    try:
        message = _message.decode(data)
        reject_duplicates(members(data.decode()))  # the body is written anew from members, each of them once
    except UNREADABLE as error:
        raise InvalidRequest(f"The message is no response.create: {error}.") from None
    if message.type != "response.create":
        raise InvalidRequest("Only messages of the type response.create are understood.")
    return message


def _lasting(output: list[msgspec.Raw], message: Message) -> list[msgspec.Raw]:
    """Return the items of *output* that can be sent again; without ``store``, reasoning only with encrypted content.

    https://platform.openai.com/docs/guides/reasoning#encrypted-reasoning-items
    """
    if message.store is not False:
        return output
    return [item for item in output if not _is_bare_reasoning(item)]


def _is_bare_reasoning(item: msgspec.Raw) -> bool:
    """True if *item* is reasoning without its encrypted content. Anything unreadable is left to the upstream."""
    try:
        read = _item.decode(item)
    except UNREADABLE:
        return False
    return read.type == "reasoning" and not read.encrypted_content
