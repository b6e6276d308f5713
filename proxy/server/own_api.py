"""What all routes below ``/ullage/api/`` have in common by which callers read and change their own data."""

from __future__ import annotations

from typing import Final, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec.structs import replace

from proxy.core.apis.json_steps import UNREADABLE
from proxy.core.errors import InvalidRequest
from proxy.server.access import Access
from proxy.server.config import Limits
from proxy.server.incoming import BodyBytes, BodyReader, IncomingRequest
from proxy.server.rate_limit import RateLimit
from proxy.server.request import RequestHeaders, read_headers

T = TypeVar("T")

MAX_BODY: Final = 16 * 2**10
"""Bytes of a request's body at most."""

RATE: Final = 5.0
"""Requests that one caller may make in a second, in the long run."""

BURST: Final = 30.0
"""Requests that one caller may make at once."""


class OwnApi:
    """Reads requests of callers about their own data, which *about* names: ``requests about conversations``."""

    def __init__(self, access: Access, limits: Limits, about: str) -> None:
        self._access = access
        self._limits = replace(limits, body=MAX_BODY)
        self._body_bytes = BodyBytes(MAX_BODY * 64)
        self._rate_limit = RateLimit(RATE, BURST, about)

    def caller(self, request: IncomingRequest) -> tuple[bytes, RequestHeaders]:
        """Return the tenant that sent *request*, and its headers. Raises ``UllageError``."""
        headers = read_headers(request.raw_headers)
        self._access.check_origin(headers)
        tenant = self._access.owner(headers, request.headers.keys())
        self._rate_limit.admit(tenant)
        return tenant, headers

    async def body(self, request: IncomingRequest, tenant: bytes, headers: RequestHeaders) -> bytes:
        """Return the JSON body of *request*. Raises ``InvalidRequest``."""
        return await json_body(request, headers, BodyReader(request.content, self._limits, self._body_bytes, tenant))


async def json_body(request: IncomingRequest, headers: RequestHeaders, reader: BodyReader) -> bytes:
    """Return the JSON body of *request*, by *reader*. Raises ``InvalidRequest``."""
    # A page of another site cannot send JSON without a preflight request, which is refused:
    # https://developer.mozilla.org/en-US/docs/Web/HTTP/CORS
    if not headers.by_name.get("content-type", "").lower().startswith("application/json"):
        raise InvalidRequest("Send the body as application/json.")
    try:
        return await reader.whole(request.content_length)
    finally:
        reader.release()


def decoded(body: bytes, decoder: msgspec.json.Decoder[T], message: str) -> T:
    """Return *body* decoded by *decoder*. Raises ``InvalidRequest`` with *message*, which says what to send."""
    try:
        return decoder.decode(body)
    except UNREADABLE:
        raise InvalidRequest(message) from None


def query(path_qs: str) -> dict[str, str]:
    """Return the parameters of a request's target, each one's last value."""
    return {name: values[-1] for name, values in parse_qs(path_qs.partition("?")[2]).items()}
