"""Decides who may call: keys, web origins, the admin key; and names the tenant of each request."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Final

import msgspec

from proxy.core.apis import gemini_path
from proxy.core.apis.envelope import continues_stored
from proxy.core.errors import Forbidden, Unauthorized
from proxy.core.http_headers import CREDENTIAL_ORDER, CREDENTIALS
from proxy.server.config import ServerConfig
from proxy.server.request import RequestHeaders, RequestPath, api_path, is_outside_apis, plain_path

_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Headers of requests that came through a proxy: https://www.rfc-editor.org/rfc/rfc7239#section-4."""

_STATELESS_POST: Final = frozenset(
    {"chat/completions", "completions", "embeddings", "messages", "messages/count_tokens", "responses", "moderations"}
    | {"rerank", "responses/compact", "responses/input_tokens"}
)
_MAY_CONTINUE: Final = frozenset({"responses/input_tokens"})
"""Relayed routes whose body may name what the provider stores: https://platform.openai.com/docs/api-reference/responses"""

_STATELESS_GET: Final = frozenset({"models", "realtime", "v1beta/models", "v1alpha/models"})
_STATELESS_TREES: Final = ("audio/", "images/")
"""Routes below an API's root, by method, that neither read nor store data that another caller could reach."""

FOREIGN_HOST: Final = (
    "This listener is for its own machine: call it by an address, such as 127.0.0.1, or as localhost. "
    "Other names that lead to it are listed in server.hosts."
)
"""The refusal of a request whose ``Host`` is a name that others may have pointed at this machine."""

_NOT_REPEATED: Final = frozenset({"content-encoding", "expect", "origin", "sec-fetch-site", "upgrade"})
"""Headers of requests whose head is checked each time: a browser's, and those that change how a body is read."""


class Caller(msgspec.Struct):
    """The sender of a request: its headers, its path, and its tenant, empty until the headers are checked."""

    headers: RequestHeaders
    path: RequestPath
    tenant: bytes = b""

    @property
    def may_repeat(self) -> bool:
        """True if an equal head on the same connection is this caller's, too, and needs no further check."""
        return self.path.api != "relay" and _NOT_REPEATED.isdisjoint(self.headers.by_name)


class Access:
    """Decides by a request's headers. ``loopback``: only this machine can reach the listener."""

    def __init__(self, config: ServerConfig) -> None:
        self._keys = tuple(_digest(key) for key in config.access_keys)
        self._admin = None
        if config.admin_key:
            self._admin = _digest(config.admin_key)
        self._origins = config.origins
        self._hosts = config.hosts
        self._shared_upstreams: frozenset[str] = frozenset()
        if config.access_keys and config.relay != "all":
            self._shared_upstreams = config.keyed_upstreams
        self._open_metrics = config.open_metrics
        self.loopback = False

    @property
    def shares_keys(self) -> bool:
        """True if callers with different keys share an upstream's key, and must not reach each other's data."""
        return len(self._keys) > 1 and bool(self._shared_upstreams)

    def knows_host(self, host: str) -> bool:
        """Return False if *host* (a ``Host`` field's value) is a name that others may have pointed at this machine.

        A page of any site can have its own name resolve to 127.0.0.1 (DNS rebinding). The browser then believes that
        this listener is that site and sends no foreign ``Origin``, but it sends the site's name as ``Host``. An address
        as ``Host`` proves that no name was resolved. Browsers always send the field, so a request without it is not
        from a page.
        """
        if not self.loopback or not host:
            return True
        name, _, port = host.rpartition(":")
        if not port.isdecimal():
            name = host
        name = name.lower().removesuffix(".")
        return name == "localhost" or name in self._hosts or _is_address(name)

    def admit(self, headers: RequestHeaders) -> bytes:
        """Return the caller's tenant (32 bytes), and remove a proxy key from *headers*. Raises ``Unauthorized``."""
        if self._keys:
            return self._by_proxy_key(headers)
        return client_tenant(headers.by_name)

    def check_origin(self, headers: RequestHeaders) -> str:
        """Return the listed foreign origin of this request, or an empty string. Raises ``Forbidden`` for others.

        ``Sec-Fetch-Site`` (https://www.w3.org/TR/fetch-metadata/#sec-fetch-site-header) covers requests for which
        browsers send no ``Origin``.
        """
        origin = headers.by_name.get("origin")
        if "*" in self._origins or origin in self._origins:
            return origin or ""
        if headers.by_name.get("sec-fetch-site") == "cross-site":
            raise Forbidden("Requests from other web sites are not accepted (server.origins).")
        if origin is None:
            return ""
        if origin.partition("://")[2] != headers.by_name.get("host", "") or not origin.startswith("http"):
            raise Forbidden("Requests from this web origin are not accepted; list it in server.origins to allow it.")
        return ""

    @property
    def session_secret(self) -> bytes | None:
        """A secret (32 bytes) that only holders of the admin key and this proxy can know; None if no key is set."""
        if self._admin is None:
            return None
        return hmac.digest(self._admin, b"ullage session", "sha256")

    def is_admin_key(self, key: str) -> bool:
        """True if *key* is the admin key. Every wrong key takes the same time, so that none is guessed by it."""
        return self._admin is not None and hmac.compare_digest(_digest(key), self._admin)

    def check_admin(self, headers: RequestHeaders, names: Iterable[str]) -> None:
        """Raise unless the request has the admin key, or none is configured and the caller is on this machine."""
        if self._admin is not None:
            if not self.is_admin_key(_bearer(headers.by_name.get("authorization", ""))):
                raise Unauthorized("This page needs 'Authorization: Bearer <server.admin_key>'.")
            return
        if not self._is_local(names):
            raise Forbidden("This page is closed: set server.admin_key to read it from another machine.")

    def check_metrics(self, headers: RequestHeaders, names: Iterable[str]) -> None:
        """Raise unless the metrics are open, the caller is on this machine, or the request has the admin key.

        Behind access keys others share the proxy, and metrics name models, upstreams, projects and tenants.
        """
        if self._keys and not self._open_metrics and not self._is_local(names):
            self.check_admin(headers, names)

    def check_stateless(self, method: str, path: str, upstream: str) -> None:
        """Raise ``Forbidden`` if *path* could reach data stored under the key that callers of *upstream* share."""
        if upstream not in self._shared_upstreams or is_stateless(method, path):
            return
        reason = (
            "Behind shared access keys only stateless routes are relayed: what others store under the upstream's "
            "key could be read on this path (server.relay: all allows it)."
        )
        if is_outside_apis(path):
            reason = f"{reason} Base URLs of the API end in one /v1."
        raise Forbidden(reason)

    def check_relayed(
        self, method: str, path: str, upstream: str, body: bytes | None, headers: Iterable[tuple[str, str]]
    ) -> None:
        """Raise ``Forbidden`` if a relayed request could reach data that *upstream* may have stored for another caller.

        *body* is None if it was not read as a whole.
        """
        self.check_stateless(method, path, upstream)
        if api_path(path) in _MAY_CONTINUE:
            self.check_stored(body, upstream, headers)

    def check_stored(self, body: bytes | None, upstream: str, headers: Iterable[tuple[str, str]]) -> None:
        """Raise ``Forbidden`` if *body* continues data that *upstream* may have stored for another caller.

        A body that was not read (None) or, by its *headers*, has a content-encoding cannot be checked, and is forbidden
        too.
        """
        # With one access key all callers are one tenant, and what the upstream stores is theirs.
        if len(self._keys) <= 1 or upstream not in self._shared_upstreams:
            return
        coded = any(name.lower() == "content-encoding" for name, _ in headers)
        if body is None or coded or continues_stored(body):
            raise Forbidden(
                "Behind shared access keys a request cannot go on from a stored response, conversation or item, which "
                "may be another caller's: leave out previous_response_id, conversation and item_reference and send the "
                "whole input (server.relay: all allows them)."
            )

    def owner(self, headers: RequestHeaders, names: Iterable[str]) -> bytes:
        """Return the tenant whose conversations the caller may read: its own, by the credential of its model calls.

        With the admin key, ``x-ullage-key`` names another client's access key. Callers without any credential are one
        tenant, whose conversations are shown to the admin key, or on this machine, only.
        Raises ``Unauthorized`` and ``Forbidden``.
        """
        by_name = dict(headers.by_name)
        admin = self.is_admin_key(_bearer(by_name.get("authorization", "")))
        if admin:
            by_name.pop("authorization")
        if self._keys:
            if admin and "key" not in headers.own:
                raise Forbidden("Say whose conversations: send the client's access key in x-ullage-key.")
            return self._by_proxy_key(headers)
        if not admin and not any(by_name.get(name) for name in CREDENTIAL_ORDER):
            self.check_admin(headers, names)
        return client_tenant(by_name)

    def _is_local(self, names: Iterable[str]) -> bool:
        """True if the caller is certainly on this machine: no header among *names* shows that it was forwarded."""
        return self.loopback and not any(name.lower() in _FORWARDED for name in names)

    def _by_proxy_key(self, headers: RequestHeaders) -> bytes:
        own = headers.own.get("key")
        if own is not None:
            return self._tenant_of(own)
        sent = {name: _bearer(headers.by_name[name]) for name in CREDENTIALS if name in headers.by_name}
        matching = {name: key for name, key in sent.items() if self._is_access_key(key)}
        if not matching:
            raise Unauthorized(
                "Send one of the proxy's access keys as bearer token, x-api-key, x-goog-api-key or x-ullage-key."
            )
        # Every header with a key of the proxy: the upstream must see none, and gets its own key instead.
        headers.drop(matching)
        return self._tenant_of(next(iter(matching.values())))

    def _tenant_of(self, key: str) -> bytes:
        if not self._is_access_key(key):
            raise Unauthorized("The key in x-ullage-key is not one of the proxy's access keys.")
        return proxy_tenant(key)

    def _is_access_key(self, key: str) -> bool:
        """True if *key* is an access key. Compares all of them, so that the time shows nothing."""
        digest = _digest(key)
        matches = False
        for access_key in self._keys:
            matches |= hmac.compare_digest(digest, access_key)
        return matches


def is_stateless(method: str, path: str) -> bool:
    """True if a call of *path* neither reads nor stores data that another caller with the same key can reach."""
    plain = plain_path(path)
    if plain is None:
        return False
    model_path = gemini_path.read_path(path)
    if model_path is not None and gemini_path.names_model(path, method):
        return _is_stateless_of_model(method, model_path)
    if method == "POST":
        # An escaped spelling of a managed route is relayed, so only the plain spelling may count as stateless.
        return api_path(path) in _STATELESS_POST or api_path(plain).startswith(_STATELESS_TREES)
    name = api_path(plain)
    return method in ("GET", "HEAD") and (name in _STATELESS_GET or name.startswith("models/"))


def _is_stateless_of_model(method: str, path: gemini_path.ModelPath) -> bool:
    """True if a call of Gemini's API for the model in *path* stores nothing and reads nothing stored."""
    if method == "POST":
        return path.method in gemini_path.STATELESS_METHODS
    return method in ("GET", "HEAD") and not path.rest


def tenants_of(keys: Iterable[str]) -> frozenset[bytes]:
    """Return the tenants of callers with one of *keys*, as an access key or as their own key in any header."""
    tenants: set[bytes] = set()
    for key in keys:
        tenants.add(proxy_tenant(key))
        tenants.update(client_tenant({name: value}) for name in CREDENTIALS for value in (key, f"Bearer {key}"))
    return frozenset(tenants)


def client_tenant(headers: Mapping[str, str]) -> bytes:
    """Return the tenant of a caller who sends its own credentials in *headers* (names in lower case)."""
    parts = [f"{name}\0{headers[name]}" for name in CREDENTIAL_ORDER if headers.get(name)]
    return sha256(("ullage tenant\0client\0" + "\0".join(parts)).encode("utf-8", "surrogateescape")).digest()


def proxy_tenant(key: str) -> bytes:
    """Return the tenant of callers with the access *key*."""
    return sha256(b"ullage tenant\0proxy\0" + key.encode("utf-8", "surrogateescape")).digest()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    return sha256(b"ullage key\0" + key.encode("utf-8", "surrogateescape")).digest()


def _bearer(value: str) -> str:
    """Return the token of a header's *value*, with or without the scheme."""
    scheme, _, token = value.partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return value
