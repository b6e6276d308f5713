"""Admits the holder of the admin key to the page, by a cookie that a login with the key sets.

The cookie is the time of its end and a keyed hash (HMAC) of that time, so that every worker can check it and nothing is
stored. The key of the hash is derived from the admin key: a new admin key ends all sessions. The admin key itself is
not in the cookie.
"""

from __future__ import annotations

import hmac
import time
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from typing import Final, Literal

from proxy.core.errors import Forbidden, Unauthorized
from proxy.server.access import Access
from proxy.server.incoming import IncomingRequest
from proxy.server.rate_limit import RateLimit
from proxy.server.request import RequestHeaders

COOKIE: Final = "ullage_page"

SESSION_SECONDS: Final = 12 * 3600
"""Seconds that a login is valid: a working day. A session cannot be ended earlier, except by a new admin key."""

ATTEMPTS: Final = 8.0
"""Logins that one address may try in a row."""

ATTEMPTS_EACH_SECOND: Final = 0.1
"""Logins that one address may try in a second, in the long run."""


class Sessions:
    """Admits requests for the page, as ``access`` admits them to the status, and logs people in."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._attempts = RateLimit(ATTEMPTS_EACH_SECOND, ATTEMPTS, "logins")

    def admit(self, request: IncomingRequest, headers: RequestHeaders) -> None:
        """Raise ``Forbidden`` or ``Unauthorized`` unless *request* may see the figures."""
        self._access.check_origin(headers)
        if not self._has_session(request):
            self._access.check_admin(headers, request.headers.keys())

    def access(
        self, request: IncomingRequest, headers: RequestHeaders
    ) -> Literal["open", "session", "login", "closed"]:
        """Return the state of the page for this caller: its figures (open, session), a login, or closed to all."""
        if self._has_session(request):
            return "session"
        try:
            self.admit(request, headers)
        except Unauthorized:
            return "login"
        except Forbidden:
            return "closed"
        return "open"

    def log_in(self, request: IncomingRequest, headers: RequestHeaders, key: str) -> str:
        """Return the ``Set-Cookie`` value of a new session. An address that guesses is slowed down.

        Raises ``TooManyRequests``, ``Unauthorized`` and ``Forbidden``.
        """
        self._access.check_origin(headers)
        self._attempts.admit(_address_of(request))
        secret = self._access.session_secret
        if secret is None or not self._access.is_admin_key(key):
            raise Unauthorized("This is not the admin key (server.admin_key).")
        until = int(time.time()) + SESSION_SECONDS
        return self._cookie(f"{until}.{_proof(secret, until)}", SESSION_SECONDS, headers)

    def log_out(self, headers: RequestHeaders) -> str:
        """Return the ``Set-Cookie`` value that ends a session in its browser."""
        self._access.check_origin(headers)
        return self._cookie("", 0, headers)

    def _has_session(self, request: IncomingRequest) -> bool:
        """True if a cookie of *request* proves a session that has not ended."""
        secret = self._access.session_secret
        until, _, proof = _cookie_of(request).partition(".")
        if secret is None or not (until.isascii() and until.isdigit() and len(until) < 12):
            return False
        # In constant time, so that the time of an answer does not help to guess the hash.
        is_proved = hmac.compare_digest(proof.encode(), _proof(secret, int(until)).encode())
        return is_proved and int(until) > time.time()

    def _cookie(self, value: str, seconds: int, headers: RequestHeaders) -> str:
        """Return a cookie for the page alone, which no script can read and no other site can have sent.

        https://developer.mozilla.org/en-US/docs/Web/HTTP/Reference/Headers/Set-Cookie
        """
        cookie = f"{COOKIE}={value}; Path=/ullage/; Max-Age={seconds}; HttpOnly; SameSite=Strict"
        # The page came over HTTPS, through a proxy in front that ends TLS. Over plain HTTP it has no Secure attribute,
        # because the browser would not store the cookie.
        if headers.by_name.get("origin", "").startswith("https://"):
            return f"{cookie}; Secure"
        return cookie


def _cookie_of(request: IncomingRequest) -> str:
    """Return the value of the page's cookie, empty if *request* has none that can be read."""
    try:
        cookies = SimpleCookie(request.headers.get("cookie", ""))
    except CookieError:
        return ""
    if COOKIE not in cookies:
        return ""
    return cookies[COOKIE].value


def _address_of(request: IncomingRequest) -> bytes:
    """Return the address that *request* came from."""
    if request.transport is None:
        return b""
    address: tuple[str, int] = request.transport.get_extra_info("peername") or ("", 0)
    return address[0].encode()


def _proof(secret: bytes, until: int) -> str:
    return hmac.new(secret, f"ullage page\0{until}".encode(), sha256).hexdigest()
