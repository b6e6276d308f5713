"""The server's settings as plain values, and the types of the callables that are passed to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from proxy.core.http_headers import HeadersOf, no_headers
from proxy.core.report import Report


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one process: bytes, counts and seconds.

    ``body`` bounds a managed body, as sent and inflated; ``inflation`` the factor by which it may inflate; ``peek`` the
    part of a relayed JSON body that is read for its model; ``in_flight_bytes`` all request bodies in memory together.
    A body that is read whole must arrive at ``body_rate`` bytes a second or faster on average, a relayed one at
    ``upload_rate``, both without a pause of more than ``body_pause`` seconds. ``header`` bounds one header field,
    ``head`` a whole request head, ``fields`` their number. A connection ends if its first request does not come within
    ``first_request`` seconds, or the next one within ``keep_alive`` seconds after an answer. ``write`` is the most
    seconds in which a client may read nothing of its answer, ``idle`` those in which an upstream may read nothing of an
    upload.
    """

    body: int = 64 * 2**20
    inflation: int = 100
    peek: int = 2**20
    in_flight_bytes: int = 512 * 2**20
    in_flight: int = 4096
    body_pause: float = 10.0
    body_rate: int = 64 * 2**10
    upload_rate: int = 2**10
    first_request: float = 15.0
    keep_alive: float = 75.0
    header: int = 32 * 2**10
    head: int = 128 * 2**10
    fields: int = 100
    connections: int = 2048
    write: float = 60.0
    idle: float = 300.0


Route = Callable[[str], str]
"""Returns the upstream of a model. Raises ``NotFound``."""

Observe = Callable[[Report, float], None]
"""Takes each request's report and its seconds, once."""

Metrics = Callable[[], tuple[bytes, str]]
"""The metrics as text, and its content type; called in a thread."""

Status = Callable[[], Mapping[str, object]]
"""The process's state, as the admin API shows it."""

NameOf = Callable[[str], str]
"""Returns the upstream's name for a model, by the client's name of it."""


def same_name(model: str) -> str:
    """Return *model*."""
    return model


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The server's settings: who may call, the upstream of models without a rule, and the limits.

    ``keyed_upstreams`` are those with an API key of their own: with ``access_keys`` only stateless routes reach
    them, unless ``relay`` is ``all``. ``websockets`` applies to the Responses route. ``origins`` are web origins
    (``https://host``) whose pages may call, ``*`` for any. ``hosts`` are names (lower case) by which a loopback
    listener may be called, besides addresses and localhost. ``open_metrics``: ``/metrics`` needs no admin key although
    there are access keys. ``usage_upstreams`` are asked for usage in every stream; it is hidden from clients that did
    not request it. ``headers_of`` returns the headers added for a model, ``name_of`` the upstream's name for it.
    ``gemini_upstream`` gets the paths of Gemini's API that name no model; empty for the default upstream.
    """

    default_upstream: str
    version: str = ""
    access_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    keyed_upstreams: frozenset[str] = frozenset()
    relay: Literal["stateless", "all"] = "stateless"
    origins: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    open_metrics: bool = False
    websockets: Literal["manage", "relay", "refuse"] = "manage"
    limits: Limits = field(default_factory=Limits)
    usage_upstreams: frozenset[str] = frozenset()
    headers_of: HeadersOf = field(default=no_headers, repr=False)
    name_of: NameOf = same_name
    gemini_upstream: str = ""
