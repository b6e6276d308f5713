"""One pass over a request's headers: what goes on, what is meant for the proxy, who is asking."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, cast

from proxy.core.client_compaction import METADATA_HEADER
from proxy.core.errors import InvalidRequest
from proxy.core.http_headers import CREDENTIALS, HOP_BY_HOP, OWN_PREFIX, PERSONAL, WRITTEN_ANEW
from proxy.core.request import Mode, Options
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


@dataclass(slots=True)
class Intake:
    """A request's headers, sorted: ``own`` holds ``x-ullage-*`` by the rest of the name, ``seen`` the singles."""

    forward: list[tuple[str, str]] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)

    def drop(self, names: Iterable[str]) -> None:
        """Keep the headers called *names* (lower case) from being forwarded."""
        gone = frozenset(names)
        self.forward = [pair for pair in self.forward if pair[0].lower() not in gone]


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> Intake:
    """The sorted raw headers; a credential given twice is refused, because two readers could take different ones."""
    intake = Intake()
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


def without_secrets(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """*headers* without what tells who the client is: for a server that it does not know of."""
    return [pair for pair in headers if pair[0].lower() not in PERSONAL]


def window_variant(intake: Intake) -> str:
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
