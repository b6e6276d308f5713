"""One pass over a request's headers: what goes on, what is meant for the proxy, who is asking."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, cast
from urllib.parse import unquote

from aiohttp import web

from proxy.core.client_compaction import METADATA_HEADER
from proxy.core.errors import InvalidRequest, UllageError
from proxy.core.http_headers import CREDENTIALS, HOP_BY_HOP, OWN_PREFIX, WRITTEN_ANEW
from proxy.core.request import Mode, Options, Purpose
from proxy.core.session_names import EPOCH_HEADER, SESSION_HEADERS

# "expect" is answered here; "http2-settings" belongs to an upgrade (https://www.rfc-editor.org/rfc/rfc7540#section-3.2.1).
_STAYS: Final = HOP_BY_HOP | WRITTEN_ANEW | {"expect", "http2-settings"}
_SINGLE: Final = CREDENTIALS | {
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
_LABEL: Final = 256
_CACHED: Final = 64
_FORWARD, _SEEN, _OWN = 1, 2, 4


class ExpectationFailed(UllageError):
    """An ``Expect`` header asks for something unknown."""

    status = 417
    code = "expectation_failed"
    kind = "invalid_request_error"


@dataclass(slots=True)
class RequestHeaders:
    """A request's headers, sorted: ``own`` holds ``x-ullage-*`` by the rest of the name, ``seen`` the singles."""

    forward: list[tuple[str, str]] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)

    def drop(self, names: Iterable[str]) -> None:
        """Keep the headers called *names* (lower case) from being forwarded."""
        gone = frozenset(names)
        self.forward = [pair for pair in self.forward if pair[0].lower() not in gone]


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> RequestHeaders:
    """The sorted raw headers; a credential given twice is refused, because two readers could take different ones."""
    intake = RequestHeaders()
    forward, seen = intake.forward, intake.seen
    for raw_name, raw_value in headers:
        spelled, name, kind = _known(raw_name) if len(raw_name) <= _CACHED else _sort(raw_name)
        value = raw_value.decode("utf-8", "surrogateescape")
        if kind & _FORWARD:
            forward.append((spelled, value))
        if kind & _SEEN:
            seen[name] = _repeated(name, seen[name], value) if name in seen else value
        elif kind & _OWN:
            intake.own[name[len(OWN_PREFIX) :]] = value
    connection = seen.get("connection", "")
    if connection.lower() not in _PLAIN:
        # Never let a client use this to strip what decides who it is.
        named = {token.strip().lower() for token in connection.split(",")} - CREDENTIALS
        intake.drop(named)
    return intake


def _repeated(name: str, first: str, second: str) -> str:
    """Return the value of a header that was sent twice, as a list. Raises ``InvalidRequest`` for a credential."""
    if name in CREDENTIALS:
        raise InvalidRequest(f"The header {name} was sent more than once.")
    return f"{first}, {second}"


def window_variant(intake: RequestHeaders) -> str:
    """What the request's headers ask for that changes a model's window; empty mostly."""
    asked = intake.seen.get("anthropic-beta", "")
    return ",".join(sorted({flag for each in asked.split(",") if (flag := each.strip()[:64]).startswith("context-")}))


def options(own: Mapping[str, str]) -> Options:
    """The caller's wishes. Raises ``InvalidRequest`` naming the header and what it may hold."""
    if not own:
        return _DEFAULT
    return Options(
        mode=cast("Mode", _one_of(own, "mode", ("on", "observe", "off"), "on")),
        conversation=_label(own, "conversation"),
        window=_window(own),
        compact_now="compact" in own,
        compact_to=_share(own),
        project=_label(own, "project"),
        task_size=_one_of(own, "task-size", ("tiny", "small", "medium", "large"), ""),
    )


def _sort(raw: bytes) -> tuple[str, str, int]:
    """A header name as spelled and in lower case, and what is done with it."""
    spelled = raw.decode("ascii", "replace")
    name = spelled.lower()
    if name.startswith(OWN_PREFIX):
        return spelled, name, _OWN
    stays = name in _STAYS or name.startswith("proxy-")
    return spelled, name, (0 if stays else _FORWARD) | (_SEEN if name in _SINGLE else 0)


# Clients send the same dozen names all day; long ones are not worth the memory.
_known: Final = lru_cache(maxsize=1024)(_sort)
_DEFAULT: Final = Options()
_SHARE: Final = re.compile(r"0?\.\d{1,4}", re.ASCII)


def _one_of(own: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = own.get(name)
    if value is None:
        return default
    if value not in allowed:
        raise InvalidRequest(f"The header x-ullage-{name} must be one of: {', '.join(allowed)}.")
    return value


def _label(own: Mapping[str, str], name: str) -> str:
    value = own.get(name, "")
    if len(value) > _LABEL or not value.isprintable():
        raise InvalidRequest(f"The header x-ullage-{name} must be at most {_LABEL} printable characters.")
    return value


def _share(own: Mapping[str, str]) -> float | None:
    """The share of the room that a compaction asked for goes down to; ``None`` if it names none."""
    value = own.get("compact", "now")
    if value == "now":
        return None
    if not _SHARE.fullmatch(value) or float(value) == 0:
        raise InvalidRequest("The header x-ullage-compact must be now, or a share between 0 and 1, such as 0.2.")
    return float(value)


def _window(own: Mapping[str, str]) -> int | None:
    value = own.get("window")
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value) > 0):
        raise InvalidRequest("The header x-ullage-window must be a whole number of tokens between 1 and 999999999.")
    return int(value)


ROOTS: Final = ("/openai/v1/", "/anthropic/v1/", "/v1/", "/")
"""Where an API's routes begin, the longest first: clients take a base URL with or without its version."""

_APIS: Final = {
    "chat/completions": "chat",
    "messages": "messages",
    "messages/count_tokens": "messages",
    "responses": "responses",
    "responses/compact": "responses",
}

MANAGED: Final = {root + name: api for root in ROOTS for name, api in _APIS.items()}

COUNTING: Final = frozenset(path for path in MANAGED if path.endswith("/count_tokens"))
"""Managed routes that ask what a conversation weighs instead of going on with it."""

COMPACTING: Final = frozenset(path for path in MANAGED if path.endswith("/compact"))
"""Managed routes that ask for a smaller conversation instead of going on with it."""

# Plain names only: what an upstream could decode into another path is none.
_DEPLOYMENT: Final = re.compile(r"/openai/deployments/((?!\.\.?/)[\w.~-]+)/(.+)", re.ASCII)

# What RFC 3986 (section 3.3) lets stand in a segment, but for escapes and the semicolon that begins parameters.
_ORDINARY: Final = re.compile(r"(?:/[\w.~!$&'()*+,=:@-]+)+/?", re.ASCII)
_DECODINGS: Final = 3

LIVE: Final = frozenset({"/health/live", "/healthz", "/health/liveliness"})
READY: Final = frozenset({"/health/ready", "/readyz", "/health/readiness"})

_STATELESS_POST: Final = frozenset(
    {"chat/completions", "completions", "embeddings", "messages", "messages/count_tokens", "responses", "moderations"}
    | {"rerank", "responses/compact", "responses/input_tokens"}
)
# First parts of the paths of OpenAI's and Anthropic's APIs, which clients also send without a version before them.
_RESOURCES: Final = frozenset(
    {"assistants", "audio", "batches", "chat", "completions", "containers", "conversations", "embeddings", "evals"}
    | {"files", "fine_tuning", "images", "messages", "models", "moderations", "organization", "organizations"}
    | {"projects", "realtime", "rerank", "responses", "skills", "threads", "uploads", "vector_stores", "videos"}
)
_STATELESS_TREES: Final = ("audio/", "images/")


def is_local(path: str) -> bool:
    """Whether *path* is answered here and never relayed."""
    return path in ("/", "/metrics") or path in LIVE or path in READY or path.startswith(("/ullage/", "/health/"))


def api_path(path: str) -> str:
    """*path* below its API root: ``/openai/v1/models`` and ``/models`` are both ``models``."""
    for root in ROOTS[:-1]:
        if path.startswith(root):
            return path[len(root) :]
    deployed = _DEPLOYMENT.fullmatch(path)
    return deployed[2] if deployed else path.lstrip("/")


def is_stranger(path: str) -> bool:
    """Return True if *path* is below none of the APIs' roots and is no API's path without its root either."""
    rooted = path.startswith(ROOTS[:-1]) or _DEPLOYMENT.fullmatch(path) is not None
    return not rooted and path.lstrip("/").partition("/")[0] not in _RESOURCES


def misses_root(path: str) -> bool:
    """Return True if *path* ends as an API's route does: its client was given a base URL with another path."""
    return path.endswith(tuple(f"/{name}" for name in (*_APIS, "completions", "embeddings", "models")))


def managed(path: str) -> tuple[str, str] | None:
    """The API of a managed *path* and the model it names, if it does; ``None`` for every other path."""
    if path in MANAGED:
        return MANAGED[path], ""
    deployed = _DEPLOYMENT.fullmatch(path)
    if deployed is None or deployed[2] not in _APIS:
        return None
    return _APIS[deployed[2]], deployed[1]


def purpose_of(path: str) -> Purpose:
    """What a request on a managed *path* is for."""
    if path in COUNTING:
        return "count"
    return "compact" if path in COMPACTING else "answer"


def listed_model(path: str) -> str | None:
    """The model that a ``GET`` of *path* asks about, empty for all of them; ``None`` where it asks something else."""
    name = api_path(path)
    if _plain(path) is None:
        return None
    if name == "models":
        return ""
    model = name.removeprefix("models/")
    return model if model != name and model else None


def wire(path: str) -> str:
    """The API whose error shape callers of *path* understand."""
    name = api_path(path).partition("/")[0]
    return name if name in ("messages", "responses") else "chat"


def is_stateless(method: str, path: str) -> bool:
    """Whether a call of *path* can neither read nor leave anything that another caller of the same key could meet."""
    plain = _plain(path)
    if plain is None:
        return False
    if method == "POST":
        # By the name as it stands: managed routes are recognised by it, and an escaped one would slip past them.
        return api_path(path) in _STATELESS_POST or api_path(plain).startswith(_STATELESS_TREES)
    name = api_path(plain)
    return method in ("GET", "HEAD") and (name in ("models", "realtime") or name.startswith("models/"))


def _plain(path: str) -> str | None:
    """*path* without escapes; None if some server might take it for another path.

    Servers and what stands before them decode once or twice, resolve ``..``, cut off ``;parameters``, merge slashes and
    take a backslash for one, in any order. A path of ordinary characters in which nothing of that is left to do is the
    same path to all of them.
    """
    for _ in range(_DECODINGS):
        path = unquote(path)
    segments = path.split("/")
    if not _ORDINARY.fullmatch(path) or "." in segments or ".." in segments:
        return None
    return path


def request_target(raw: str) -> str:
    """Path and query of a request line's target, byte for byte; of an absolute URL the part after the authority."""
    if raw.startswith("/") or "://" not in raw:
        return raw
    slash = raw.find("/", raw.index("://") + 3)
    return raw[slash:] if slash >= 0 else "/"


def send_continue(request: web.BaseRequest, intake: RequestHeaders) -> None:
    """Tell a client that waits for permission to send its body."""
    expect = intake.seen.get("expect")
    if expect is None:
        return
    if expect.lower() != "100-continue":
        raise ExpectationFailed("Only 'Expect: 100-continue' is understood.")
    if not request.content.is_eof() and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
