"""Who may call: access keys, web origins, the admin key, and the tenant a request belongs to."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Final

from proxy.core.errors import Forbidden, Unauthorized
from proxy.server.config import ServerConfig
from proxy.server.intake import CREDENTIALS, Intake

_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")


class Access:
    """Decides from a request's headers alone."""

    def __init__(self, config: ServerConfig) -> None:
        self._keys = tuple(_digest(key) for key in config.access_keys)
        self._admin = _digest(config.admin_key) if config.admin_key else None
        self._origins = config.origins

    def admit(self, intake: Intake) -> bytes:
        """The caller's tenant (32 bytes). A proxy key is taken out of what is forwarded. Raises ``Unauthorized``."""
        if self._keys:
            return self._by_proxy_key(intake)
        return client_tenant(intake.seen)

    def check_origin(self, intake: Intake) -> str:
        """The listed foreign origin this request comes from, or an empty string. Raises ``Forbidden`` for others."""
        origin = intake.seen.get("origin")
        if origin is None:
            if intake.seen.get("sec-fetch-site", "") == "cross-site" and "*" not in self._origins:
                raise Forbidden("Requests from other web sites are not accepted (server.origins).")
            return ""
        if origin in self._origins or "*" in self._origins:
            return origin
        if "sec-fetch-site" in intake.seen and intake.seen["sec-fetch-site"] == "cross-site":
            raise Forbidden("Requests from other web sites are not accepted (server.origins).")
        if origin.partition("://")[2] != intake.seen.get("host", "") or not origin.startswith("http"):
            raise Forbidden("Requests from this web origin are not accepted; list it in server.origins to allow it.")
        return ""

    def check_admin(self, intake: Intake, names: Iterable[str], *, loopback: bool) -> None:
        """Raise unless the admin key came, or there is none and the caller is surely on this machine."""
        if self._admin is not None:
            if not hmac.compare_digest(_digest(_bearer(intake.seen.get("authorization", ""))), self._admin):
                raise Unauthorized("The admin API needs 'Authorization: Bearer <server.admin_key>'.")
            return
        forwarded = any(name.lower() in _FORWARDED for name in names)
        if not loopback or forwarded:
            raise Forbidden("The admin API is closed: set server.admin_key to use it from another machine.")

    def _by_proxy_key(self, intake: Intake) -> bytes:
        own = intake.own.get("key")
        if own is not None:
            return self._tenant_of(own)
        held = {name: _bearer(intake.seen[name]) for name in CREDENTIALS if name in intake.seen}
        matching = {name: key for name, key in held.items() if self._known(key)}
        if not matching:
            raise Unauthorized("Send one of the proxy's access keys as bearer token, x-api-key or x-ullage-key.")
        intake.drop(matching)
        return self._tenant_of(next(iter(matching.values())))

    def _tenant_of(self, key: str) -> bytes:
        if not self._known(key):
            raise Unauthorized("The key in x-ullage-key is not one of the proxy's access keys.")
        return proxy_tenant(key)

    def _known(self, key: str) -> bool:
        digest = _digest(key)
        found = False
        for known in self._keys:
            found |= hmac.compare_digest(digest, known)
        return found


def tenants_of(keys: Iterable[str]) -> frozenset[bytes]:
    """The tenants that callers with one of *keys* are: by an access key, or by a key of their own in any header."""
    found: set[bytes] = set()
    for key in keys:
        found.add(proxy_tenant(key))
        found.update(client_tenant({name: value}) for name in CREDENTIALS for value in (key, f"Bearer {key}"))
    return frozenset(found)


def client_tenant(seen: Mapping[str, str]) -> bytes:
    """The tenant of a caller who sends its own credentials, by the headers that carry them (lower case)."""
    parts = [f"{name}\0{seen[name]}" for name in ("authorization", "x-api-key", "api-key") if seen.get(name)]
    return sha256(("ullage tenant\0client\0" + "\0".join(parts)).encode("utf-8", "surrogateescape")).digest()


def proxy_tenant(key: str) -> bytes:
    """The tenant of whoever holds the access *key*."""
    return sha256(b"ullage tenant\0proxy\0" + key.encode("utf-8", "surrogateescape")).digest()


def _digest(key: str) -> bytes:
    return sha256(b"ullage key\0" + key.encode("utf-8", "surrogateescape")).digest()


def _bearer(value: str) -> str:
    scheme, _, token = value.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else value
