"""The configuration of an upstream, and the URL of a client's path on it.

Base URLs come with and without ``/v1``, and so do client paths. ``BaseUrl.join`` returns what both mean:

    base URL                 path of the client            URL of the request
    https://h                /v1/models                    https://h/v1/models
    https://h                /models                       https://h/v1/models
    https://h/v1             /models                       https://h/v1/models
    https://h/api/v1         /v1/models                    https://h/api/v1/models
    https://h/api/v1         /openai/v1/models             https://h/api/v1/models
    https://h/api/v1         /api/v1/models                https://h/api/v1/models
    https://h/v1beta/openai  /v1/models                    https://h/v1beta/openai/models
    https://h/v1             /api/show, a server's own     https://h/api/show
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from proxy.core.apis.shape import RESOURCES
from proxy.core.http_headers import NO_HEADERS

_VERSION = re.compile(r"v\d+\w*")
"""A segment of a path that is an API's version: ``v1``, ``v1beta``."""

_FLAVOURS = re.compile("/(?:openai|anthropic)(?=/v1/)")
"""Prefixes that gateways put before an API's paths; a base URL with a path of its own replaces them."""


class Timeouts(msgspec.Struct, frozen=True):
    """Timeouts in seconds.

    ``connect`` is for a connection, ``first_byte`` for the answer's head after the request is sent, ``idle`` between
    two bytes of the body, ``total`` for the whole answer. After ``keep_alive`` an idle connection is closed.
    """

    connect: float = 5.0
    # A model may think for minutes: OpenAI's SDK waits ten (https://github.com/openai/openai-python#timeouts).
    first_byte: float = 600.0
    idle: float = 300.0
    total: float = 3600.0
    # Below the 5 s after which uvicorn and Node close: https://www.uvicorn.org/settings/#timeouts
    keep_alive: float = 4.0


@dataclass(frozen=True, slots=True)
class Target:
    """One upstream. ``api_key`` replaces the client's credentials; without one these are forwarded.

    ``headers`` are added to every request and replace the client's. ``proxy`` is the URL of the forward proxy through
    which it is reached, perhaps with a user and a password; None if it is reached directly.
    """

    name: str
    base_url: str
    api_key: str | None = field(default=None, repr=False)
    api_key_header: str = "authorization"
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS, repr=False)
    timeouts: Timeouts = field(default_factory=Timeouts)
    proxy: str | None = field(default=None, repr=False)


class BaseUrl:
    """A base URL, split for ``join``. The settings admit only http(s) URLs without credentials, query and fragment."""

    __slots__ = ("_origin", "_path", "_root", "_versioned")

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/")
        segments = self._path.split("/")
        self._versioned = any(_VERSION.fullmatch(segment) for segment in segments)
        self._root = self._path
        if _VERSION.fullmatch(segments[-1]):
            self._root = "/".join(segments[:-1])

    def join(self, path_qs: str) -> str:
        """Return the absolute URL for a client's path and query, whose bytes stay as they are."""
        # A path that has the base URL's own is a whole one already: the longer prefix first, with the version.
        for prefix in (self._path, self._root):
            if prefix and path_qs.startswith(prefix) and _ends(path_qs, len(prefix)):
                return self._origin + path_qs
        if self._path and (flavour := _FLAVOURS.match(path_qs)):
            path_qs = path_qs[flavour.end() :]
        if path_qs.startswith("/v1") and _ends(path_qs, 3):
            rest = path_qs[3:]
        elif first_segment(path_qs) in RESOURCES:
            rest = path_qs
        else:
            return self._origin + self._root + path_qs
        if not self._versioned:
            rest = "/v1" + rest
        return self._origin + self._path + rest


def first_segment(path_qs: str) -> str:
    """Return the text between the path's first slash and its next ``/`` or ``?``."""
    return path_qs[1:].partition("?")[0].partition("/")[0]


def _ends(path_qs: str, at: int) -> bool:
    """True if a segment of *path_qs* ends before position *at*."""
    return len(path_qs) == at or path_qs[at] in "/?"
