"""The proxy's words on the wire: heads of relayed answers, refusals, and the last event of a broken stream."""

from __future__ import annotations

import json
from collections.abc import Sequence

from aiohttp import web

from proxy.core.errors import NotFound, Overloaded, UllageError, error_body
from proxy.core.report import Report, response_headers
from proxy.engine import ports
from proxy.server.intake import Intake
from proxy.server.outgoing import Outgoing
from proxy.server.routes import is_stranger, misses_root


class UpgradeRefused(UllageError):
    """A WebSocket was asked for where only plain requests are served."""

    status = 426
    code = "upgrade_refused"
    kind = "invalid_request_error"

    @property
    def message(self) -> str:
        """What to do instead."""
        return "This proxy does not speak WebSocket here; send POST /v1/responses with stream: true."


class ExpectationFailed(UllageError):
    """An ``Expect`` header asks for something unknown."""

    status = 417
    code = "expectation_failed"
    kind = "invalid_request_error"


class ShuttingDown(UllageError):
    """The process ends and this request took longer than it could wait."""

    status = 503
    code = "server_shutting_down"

    @property
    def message(self) -> str:
        """What happened."""
        return "The proxy was shut down before this answer was complete. Try again."


class StreamBroken(UllageError):
    """The upstream went away in the middle of its answer."""

    status = 502
    code = "upstream_stream_error"

    @property
    def message(self) -> str:
        """What happened."""
        return "The upstream's stream broke before it was complete."


def target(raw: str) -> str:
    """Path and query of a request line's target, byte for byte; of an absolute URL the part after the authority."""
    if raw.startswith("/") or "://" not in raw:
        return raw
    slash = raw.find("/", raw.index("://") + 3)
    return raw[slash:] if slash >= 0 else "/"


def invite(request: web.BaseRequest, intake: Intake) -> None:
    """Tell a client that waits for permission to send its body."""
    expect = intake.seen.get("expect")
    if expect is None:
        return
    if expect.lower() != "100-continue":
        raise ExpectationFailed("Only 'Expect: 100-continue' is understood.")
    if not request.content.is_eof() and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def check_known(path: str, reply: ports.Reply) -> None:
    """Raise ``NotFound`` if the upstream does not know *path* either and says so in no JSON a client could read.

    Paths outside the APIs are relayed, since servers have routes of their own (``/tokenize``, ``/api/show``). What a
    newcomer most often meets is a base URL without ``/v1``, or with another path before it.
    """
    if reply.status not in (404, 405) or not is_stranger(path):
        return
    if "json" in reply.header("content-type").lower() and not misses_root(path):
        return
    reply.close()
    raise NotFound("Neither this proxy nor the upstream knows this path: base URLs end in /v1.")


def start(
    out: Outgoing,
    reply: ports.Reply,
    own: Sequence[tuple[str, str]],
    cors: Sequence[tuple[str, str]],
    *,
    sized: bool = True,
    close_delimited: bool = False,
) -> None:
    """Write the head of a relayed answer: the upstream's headers, then our *own*; its length only if *sized*."""
    headers = [*reply.headers, *own]
    if not sized:
        headers = [pair for pair in headers if pair[0].lower() != "content-length"]
    if cors:
        headers = [pair for pair in headers if not pair[0].lower().startswith("access-control-")]
        headers += cors
    length = sized and bool(reply.header("content-length"))
    out.start(reply.status, headers, sized=length, close_delimited=close_delimited)


def refuse(out: Outgoing, error: UllageError, api: str, report: Report, cors: Sequence[tuple[str, str]]) -> None:
    """Write a whole answer of our own that says what is wrong."""
    body = error_body(error, api)
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), *response_headers(report)]
    if isinstance(error, Overloaded):
        headers.append(("retry-after", str(error.retry_after)))
    if error.status == 401:
        headers.append(("www-authenticate", "Bearer"))
    if error.status == 426:
        headers.append(("upgrade", "HTTP/1.1"))
    out.start(error.status, [*headers, *cors], sized=True)
    out.write(body)
    out.finish()


def empty(out: Outgoing, status: int, headers: Sequence[tuple[str, str]]) -> None:
    """Write an answer without a body."""
    out.start(status, headers, sized=True)
    out.finish()


def last_event(error: UllageError, api: str) -> bytes:
    """The server-sent event that ends a stream which cannot be completed."""
    # The blank line first ends an event that was cut in its middle.
    name = b"event: error\n" if api != "chat" else b""
    if api == "responses":
        body = json.dumps({"type": "error", "code": error.code, "message": error.message, "param": None}).encode()
    else:
        body = error_body(error, api)
    return b"\n\n" + name + b"data: " + body + b"\n\n"
