"""Reads the path, the headers and the body of a request, and builds the ``Request`` for the engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

import msgspec

from proxy.core.apis import gemini, gemini_path
from proxy.core.apis.shape import RESOURCES
from proxy.core.client_compaction import METADATA_HEADER, announced_client
from proxy.core.errors import InvalidRequest, UllageError
from proxy.core.http_headers import CREDENTIALS, HOP_BY_HOP, OWN_PREFIX, REWRITTEN, EndToEnd
from proxy.core.request import (
    AGENT_HEADER,
    EPOCH_HEADER,
    NO_OPTIONS,
    SESSION_HEADERS,
    Options,
    Origin,
    Purpose,
    Request,
    agent_in_headers,
    epoch_in_headers,
    options_in,
    session_in_headers,
)
from proxy.engine.quick_check import model_of
from proxy.server.config import Limits
from proxy.server.incoming import BodyReader, IncomingRequest
from proxy.server.inflate import inflated

ROOTS: Final = ("/openai/v1/", "/anthropic/v1/", "/v1/", "/")
"""The roots of an API's routes, the longest first: clients take a base URL with or without its version."""

_MANAGED: Final[Mapping[str, tuple[str, Purpose]]] = {
    "chat/completions": ("chat", "answer"),
    "messages": ("messages", "answer"),
    "messages/count_tokens": ("messages", "count"),
    "responses": ("responses", "answer"),
    "responses/compact": ("responses", "compact"),
    "compress": ("chat", "compress"),
}
"""Managed routes below an API's root, each with its API and the purpose of its requests.

A request to ``compress`` may be of any API; its body's members show which.
"""

_DEPLOYMENT: Final = re.compile(r"/openai/deployments/((?!\.\.?/)[\w.~-]+)/(.+)", re.ASCII)
"""The route of an Azure deployment. Only plain characters: no upstream can decode such a path into another one.

https://learn.microsoft.com/en-us/azure/ai-services/openai/reference
"""

_PREFIXED: Final = re.compile(
    r"(?:/(?!v\d+\w*/)(?!\.\.?/)[\w.~-]+)*"
    r"(?:(?:/v\d+\w*)?(?:/openai)?/(chat/completions)|/v1/(messages(?:/count_tokens)?|responses(?:/compact)?))",
    re.ASCII,
)
"""The path of a managed route below a provider's own prefix, as in ``/api/v1/messages``: clients take it over.

Prefixes have one version, so that ``/v1/v1/messages`` is still a wrong base URL. Other APIs have routes that end in
``messages`` or ``responses``, but not right behind ``/v1``.
"""

_UNUSUAL: Final = re.compile(r"%|//|/\Z")
_UNRESERVED: Final = re.compile(r"%(2[DE]|3[0-9A]|4[1-9A-F]|5[0-9AF]|6[1-9A-F]|7[0-9AE])", re.IGNORECASE)
"""Escapes of characters that need none, and of the colon: https://www.rfc-editor.org/rfc/rfc3986#section-6.2.2.2"""

_ORDINARY: Final = re.compile(r"(?:/[\w.~!$&'()*+,=:@-]+)+/?", re.ASCII)
"""A path of the characters that a segment may have, except escapes and the semicolon that begins parameters.

https://www.rfc-editor.org/rfc/rfc3986#section-3.3
"""

_DECODINGS: Final = 3
"""Times that a path is decoded: once more than a server and the proxy before it do together."""

LIVE: Final = frozenset({"/health/live", "/healthz", "/health/liveliness"})
READY: Final = frozenset({"/health/ready", "/readyz", "/health/readiness"})
"""Paths of the health checks, by the names that common deployments use: alive, and ready for requests."""

RETRIEVE: Final = "/v1/retrieve/"
"""The path below which gateways read text that left a view: https://docs.litellm.ai/docs/proxy/headroom."""

LOCAL_ROOTS: Final = ("/ullage/", "/health/", RETRIEVE)
"""Beginnings of paths that are answered here."""


def is_local(path: str) -> bool:
    """True if *path* is answered here and never relayed."""
    return path in ("/", "/metrics") or path in LIVE or path in READY or path.startswith(LOCAL_ROOTS)


def api_path(path: str) -> str:
    """Return *path* below its API root: ``models`` for ``/openai/v1/models`` and for ``/models``."""
    for root in ROOTS[:-1]:
        if path.startswith(root):
            return path[len(root) :]
    deployed = _DEPLOYMENT.fullmatch(path)
    if deployed is not None:
        return deployed[2]
    return path.lstrip("/")


def is_outside_apis(path: str) -> bool:
    """True if *path* belongs to no API: below none of their roots or below two, and no path without its root."""
    if api_path(path).startswith("v1/"):
        return True
    rooted = path.startswith(ROOTS[:-1]) or _DEPLOYMENT.fullmatch(path) is not None
    return not rooted and path.lstrip("/").partition("/")[0] not in RESOURCES


def ends_like_route(path: str) -> bool:
    """True if *path* ends like an API's route: its client probably has a base URL with a wrong path."""
    return path.endswith(tuple(f"/{name}" for name in (*_MANAGED, "completions", "embeddings", "models")))


class RequestPath(NamedTuple):
    """The target of a request: ``path_qs`` byte for byte, ``path`` without its query.

    ``api`` is ``relay`` if the request is not managed; ``error_api`` is the API whose error format the caller
    understands. ``model`` is the model in the path of an Azure deployment or of Gemini's API.
    """

    path_qs: str
    path: str
    api: str
    error_api: str
    purpose: Purpose = "answer"
    model: str = ""


MANAGED: Final = {
    root + name: RequestPath(root + name, root + name, api, api, purpose)
    for root in ROOTS
    for name, (api, purpose) in _MANAGED.items()
}
"""The managed targets in their usual spelling, so that most paths take one look-up."""

for _name in ("responses", "responses/compact"):
    # Azure's API of Responses names no deployment: https://learn.microsoft.com/en-us/azure/ai-services/openai/how-to/responses
    MANAGED[f"/openai/{_name}"] = MANAGED[f"/{_name}"]._replace(path_qs=f"/openai/{_name}", path=f"/openai/{_name}")


def read_path(method: str, target: str) -> RequestPath:
    """Return the path of a request with this *method* and *target* (of its request line)."""
    if method == "POST" and target in MANAGED:
        return MANAGED[target]
    path_qs = request_target(target)
    if method == "POST" and (managed := managed_path(path_qs)) is not None:
        return managed
    path = path_qs.partition("?")[0]
    parts = gemini_path.read_path(path)
    if parts is not None and gemini_path.names_model(path, method):
        return RequestPath(path_qs, path, "relay", gemini.API, model=parts.model)
    return RequestPath(path_qs, path, "relay", _error_api(path))


def managed_path(path_qs: str) -> RequestPath | None:
    """Return the managed path that *path_qs* spells, in its usual spelling; None if it is relayed.

    Servers decode letters that were escaped, merge slashes and cut the last one off, each as it likes. The upstream
    gets what was managed here, so it cannot take the path for another one.
    """
    path, mark, query = path_qs.partition("?")
    if _UNUSUAL.search(path):
        path = _UNRESERVED.sub(lambda escape: chr(int(escape[1], 16)), path)
        path = re.sub("/{2,}", "/", path).rstrip("/")
        path_qs = f"{path}{mark}{query}"
    if path in MANAGED:
        return MANAGED[path]._replace(path_qs=path_qs)
    deployed = _DEPLOYMENT.fullmatch(path)
    if deployed is not None and deployed[2] in _MANAGED:
        api, purpose = _MANAGED[deployed[2]]
        return RequestPath(path_qs, path, api, api, purpose, deployed[1])
    prefixed = _PREFIXED.fullmatch(path)
    if prefixed is not None:
        api, purpose = _MANAGED[prefixed[1] or prefixed[2]]
        return RequestPath(path_qs, path, api, api, purpose)
    parts = gemini_path.read_path(path)
    if parts is None or parts.method not in gemini_path.MANAGED_METHODS:
        return None
    purpose = "answer"
    if parts.method == gemini_path.COUNT_METHOD:
        purpose = "count"
    return RequestPath(path_qs, path, gemini.API, gemini.API, purpose, parts.model)


def listed_model(path: str) -> str | None:
    """Return the model that a ``GET`` of *path* is about, empty for all of them, None if it is not about models."""
    name = api_path(path)
    if plain_path(path) is None:
        return None
    if name == "models":
        return ""
    prefix, _, model = name.partition("/")
    if prefix != "models" or not model:
        return None
    return model


def _error_api(path: str) -> str:
    """Return the API whose error shape callers of *path* understand."""
    name = api_path(path).partition("/")[0]
    if name in ("messages", "responses"):
        return name
    if gemini_path.is_below_root(path):
        return gemini.API
    return "chat"


def plain_path(path: str) -> str | None:
    """Return *path* without escapes, or None if some server might take it for another path.

    Servers and the proxies before them decode once or twice, resolve ``..``, cut off ``;parameters``, merge slashes and
    treat a backslash as one, in any order. A path of ordinary characters that none of this changes is the same path for
    all of them.
    """
    for _ in range(_DECODINGS):
        path = unquote(path)
    segments = path.split("/")
    if not _ORDINARY.fullmatch(path) or "." in segments or ".." in segments:
        return None
    return path


def request_target(raw: str) -> str:
    """Return path and query of a request line's target; of an absolute URL the part after the authority.

    https://www.rfc-editor.org/rfc/rfc9112#section-3.2.2
    """
    if raw.startswith("/") or "://" not in raw:
        return raw
    return "/" + raw.partition("://")[2].partition("/")[2]


def send_continue(request: IncomingRequest, headers: RequestHeaders) -> None:
    """Invite a client that waits for permission (``Expect``) to send its body. Raises ``ExpectationFailed``.

    https://www.rfc-editor.org/rfc/rfc9110#section-10.1.1
    """
    if headers.by_name["expect"].lower() != "100-continue":
        raise ExpectationFailed("Only 'Expect: 100-continue' is understood.")
    if not request.content.is_eof() and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


_NOT_FORWARDED: Final = HOP_BY_HOP | REWRITTEN | {"expect", "http2-settings"}
"""``expect`` is answered here, ``http2-settings`` belongs to an upgrade.

https://www.rfc-editor.org/rfc/rfc7540#section-3.2.1
"""

_READ_HERE: Final = CREDENTIALS | {
    AGENT_HEADER,
    "anthropic-beta",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "origin",
    "sec-fetch-site",
    "transfer-encoding",
    "upgrade",
    *SESSION_HEADERS,
    EPOCH_HEADER,
    METADATA_HEADER,
}
_PLAIN: Final = frozenset({"", "keep-alive", "close"})
"""Values of ``Connection`` that name no other header."""

_LONGEST_CACHED_NAME: Final = 64
"""Bytes of the longest header name that is cached: clients choose names, and the cache must stay small."""

_FORWARD, _READ, _OWN = 1, 2, 4
"""Bits for the use of a header: forwarded to the upstream, read here, or one of Ullage's own."""

_CLIENT_NAMES: Final = frozenset({AGENT_HEADER, *SESSION_HEADERS, EPOCH_HEADER, METADATA_HEADER})
"""Headers in which clients name themselves or their session, or announce a compaction of it."""


class ExpectationFailed(UllageError):
    """An ``Expect`` header names an unknown expectation."""

    status = 417
    code = "expectation_failed"
    kind = "invalid_request_error"


class HeaderFacts(NamedTuple):
    """The members of ``Request`` that are read from a managed request's headers."""

    options: Options
    session: str
    epoch: int
    client_compaction: str
    window_variant: str
    agent: str


class RequestHeaders(msgspec.Struct):
    """A request's headers, sorted by use.

    ``end_to_end`` are forwarded to the upstream, in order and spelling; ``by_name`` are read here, by lower-case name;
    ``own`` are Ullage's own, by the part of the name behind ``x-ullage-``. ``facts`` is None until they are read for a
    managed request.
    """

    end_to_end: tuple[tuple[str, str], ...] = ()
    by_name: dict[str, str] = msgspec.field(default_factory=dict)
    own: dict[str, str] = msgspec.field(default_factory=dict)
    facts: HeaderFacts | None = None

    def add_own(self, name: str, value: str) -> None:
        """Add a header for Ullage by the rest of its *name*. Raises ``InvalidRequest`` for a second key."""
        if name == "key" and name in self.own:
            raise InvalidRequest(f"The header {OWN_PREFIX}key was sent more than once.")
        self.own[name] = value

    def drop(self, names: Iterable[str]) -> None:
        """Do not forward the headers called *names* (lower case)."""
        dropped = frozenset(names)
        self.end_to_end = EndToEnd(pair for pair in self.end_to_end if pair[0].lower() not in dropped)


def read_headers(raw_headers: Iterable[tuple[bytes, bytes]]) -> RequestHeaders:
    """Sort *raw_headers*. Raises ``InvalidRequest`` for a credential sent twice: readers could take either."""
    headers = RequestHeaders()
    end_to_end, by_name = [], headers.by_name
    for raw_name, raw_value in raw_headers:
        sort = _sort
        if len(raw_name) <= _LONGEST_CACHED_NAME:
            sort = _sort_cached
        spelled, name, kind = sort(raw_name)
        value = raw_value.decode("utf-8", "surrogateescape")
        if kind & _FORWARD:
            end_to_end.append((spelled, value))
        if kind & _READ:
            if name in by_name:
                value = _repeated(name, by_name[name], value)
            by_name[name] = value
        elif kind & _OWN:
            headers.add_own(name[len(OWN_PREFIX) :], value)
    headers.end_to_end = EndToEnd(end_to_end)
    connection = by_name.get("connection", "")
    if connection.lower() not in _PLAIN:
        # ``Connection: authorization`` must not remove the credential that names the tenant.
        named = {token.strip().lower() for token in connection.split(",")} - CREDENTIALS
        headers.drop(named)
    return headers


def with_key_as_header(path: RequestPath, headers: RequestHeaders) -> RequestPath:
    """Return *path* without the key in its query, which becomes a header of *headers*: a key is never part of a URL.

    Raises ``InvalidRequest`` if there is more than one.
    """
    path_qs, keys = gemini_path.split_keys(path.path_qs)
    for key in keys:
        name = gemini_path.KEY_HEADER
        if name in headers.by_name:
            raise InvalidRequest("The key was sent more than once: send it in the query, or as x-goog-api-key.")
        headers.by_name[name] = key
        headers.end_to_end = (*headers.end_to_end, (name, key))
    return path._replace(path_qs=path_qs)


def _repeated(name: str, first: str, second: str) -> str:
    """Return the value of a header that was sent twice, as a list. Raises ``InvalidRequest`` for a credential."""
    if name in CREDENTIALS:
        raise InvalidRequest(f"The header {name} was sent more than once.")
    return f"{first}, {second}"


def window_variant(betas: str) -> str:
    """Return the beta flags of an ``anthropic-beta`` header that change a model's window; empty mostly.

    Such as ``context-1m-2025-08-07``: https://docs.anthropic.com/en/docs/build-with-claude/context-windows.
    """
    flags = {flag.strip()[:64] for flag in betas.split(",")}
    return ",".join(sorted(flag for flag in flags if flag.startswith("context-")))


def _sort(raw: bytes) -> tuple[str, str, int]:
    """Return a header's name as spelled and in lower case, and its kinds: ``_FORWARD``, ``_READ``, ``_OWN``."""
    spelled = raw.decode("ascii", "replace")
    name = spelled.lower()
    if name.startswith(OWN_PREFIX):
        return spelled, name, _OWN
    kind = 0
    if name not in _NOT_FORWARDED and not name.startswith("proxy-"):
        kind |= _FORWARD
    if name in _READ_HERE:
        kind |= _READ
    return spelled, name, kind


_sort_cached: Final = lru_cache(maxsize=1024)(_sort)
"""``_sort`` for names of usual length: clients send the same dozen with every request."""

_MODEL_FIRST: Final = re.compile(rb'\s*\{\s*"model"\s*:\s*"([^"\\]{1,256})"')
"""A model as the first member of a body."""


def read_request(body: bytes, path: RequestPath, headers: RequestHeaders, tenant: bytes, request_id: str) -> Request:
    """Return the engine's request, by *body*, path and headers. Raises ``InvalidRequest``."""
    facts = headers.facts
    if facts is None:
        facts = headers.facts = _read_facts(headers)
    return Request(
        path.api,
        body,
        tenant,
        request_id,
        options=facts.options,
        path_model=path.model,
        session=facts.session,
        epoch=facts.epoch,
        window_variant=facts.window_variant,
        client_compaction=facts.client_compaction,
        agent=facts.agent,
        origin=Origin(path.path_qs, headers.end_to_end),
        purpose=path.purpose,
    )


def _read_facts(headers: RequestHeaders) -> HeaderFacts:
    """Return the facts of a managed request that *headers* state. Raises ``InvalidRequest``."""
    by_name = headers.by_name
    session, epoch, client_compaction, variant, agent = "", 0, "", "", ""
    if not _CLIENT_NAMES.isdisjoint(by_name):
        session, epoch = session_in_headers(by_name), epoch_in_headers(by_name)
        client_compaction, agent = announced_client(by_name), agent_in_headers(by_name)
    if "anthropic-beta" in by_name:
        variant = window_variant(by_name["anthropic-beta"])
    requested = NO_OPTIONS
    if headers.own:
        requested = options_in(headers.own)
    return HeaderFacts(requested, session, epoch, client_compaction, variant, agent)


def unread_request(body: bytes, path: RequestPath, headers: RequestHeaders, tenant: bytes, request_id: str) -> Request:
    """Return the engine's request if the headers could not be read: the client's own bytes and their path."""
    origin = Origin(path.path_qs, headers.end_to_end)
    return Request(path.api, body, tenant, request_id, origin=origin, purpose=path.purpose)


async def decoded(body: bytes, headers: RequestHeaders, reader: BodyReader, limits: Limits) -> bytes:
    """Return *body* without its content-encoding, and remove that header. Raises ``InvalidRequest``."""
    plain = await inflated(body, headers.by_name.get("content-encoding", ""), limits)
    reader.count(len(plain))
    headers.drop(("content-encoding",))
    return plain


def named_model(body: bytes, *, complete: bool) -> str:
    """Return the model that a JSON body names, or an empty string; of a part of a body only a leading ``model``."""
    if complete:
        return model_of(body)
    match = _MODEL_FIRST.match(body)
    if match is None:
        return ""
    return match[1].decode("utf-8", "replace")
