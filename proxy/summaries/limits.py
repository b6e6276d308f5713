"""Limits of summaries: their cost as a share of a tenant's own traffic, and the models and keys that may be used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from proxy.core.http_headers import HeadersOf, no_headers
from proxy.core.models import Route
from proxy.engine.ports import Cache, SummaryRequest
from proxy.store import Breaker, SummaryTable
from proxy.summaries.model_call import Summariser, credentials, is_subscription_key

PAUSE: Final = 60.0
"""Seconds that summaries pause for a tenant after an upstream rate-limited it: the rest of its rate is for the client.

Providers count requests and tokens by the minute: https://platform.openai.com/docs/guides/rate-limits
"""

FLUSH_TOKENS: Final = 50_000
"""Sent tokens from which they are written to the store; fewer are written when the store's figures are read."""

FLUSH_SECONDS: Final = 5.0
"""Seconds between two such writes of one tenant's tokens: a busy one would write with every third request."""

FRESH: Final = 5.0
"""Seconds for which the store's figures are used before they are read again; tokens of this process are added."""

LEASE: Final = 15.0
"""Seconds that a lease lasts."""

UNKNOWN_WINDOW: Final = 16_384
"""The window assumed of a configured summariser whose window is unknown, in provider tokens."""

_COUNT_RATIO: Final = 1.5
"""Factor by which another model's count may exceed ours."""


class _Account(msgspec.Struct):
    """One tenant's tokens of the last hour, as far as this process knows.

    ``unsaved`` tokens were sent and are not in the store yet. ``read_at`` is the time at which the store's figures were
    read, ``flushed_at`` that of the last write, ``paused_until`` the end of a pause (monotonic seconds).
    """

    sent: int = 0
    spent: int = 0
    unsaved: int = 0
    read_at: float = float("-inf")
    flushed_at: float = float("-inf")
    paused_until: float = 0.0


class SpendingLimits:
    """Limits each tenant's summaries to *share* of the tokens it sent in the last hour, over all replicas.

    *accounts* is a bounded mapping, *clock* gives monotonic seconds, *now* Unix time.
    """

    def __init__(
        self,
        table: SummaryTable,
        share: float,
        accounts: Cache[bytes, _Account],
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._table = table
        self._share = share
        self._accounts = accounts
        self._clock = clock
        self._now = now

    def add_sent(self, tenant: bytes, tokens: int) -> None:
        """Add the *tokens* of a prompt that *tenant* sent."""
        account = self._account(tenant)
        account.unsaved += tokens
        account.sent += tokens
        if account.unsaved >= FLUSH_TOKENS and self._clock() - account.flushed_at >= FLUSH_SECONDS:
            self._flush(tenant, account)

    def add_spent(self, tenant: bytes, tokens: int) -> None:
        """Add *tokens* that summaries took; a negative number corrects an estimate."""
        if tokens:
            self._account(tenant).spent += tokens
            self._table.count(tenant, "out", tokens, self._now())

    def pause(self, tenant: bytes) -> None:
        """Pause summaries for *tenant*, on every replica."""
        account = self._account(tenant)
        if not self._is_paused(account):
            self._table.pause(tenant, PAUSE)
        account.paused_until = self._clock() + PAUSE

    def is_paused(self, tenant: bytes) -> bool:
        """True if this process knows of a pause."""
        account = self._accounts.get(tenant)
        return account is not None and self._is_paused(account)

    def can_afford(self, tenant: bytes, tokens: int) -> bool:
        """True if *tenant* may spend *tokens*, as far as this process knows."""
        account = self._account(tenant)
        return account.spent + tokens <= self._share * account.sent

    async def refusal_reason(self, tenant: bytes, tokens: int) -> str:
        """Return the reason why *tenant* may not spend *tokens* now: ``paused`` or ``budget``; empty if it may."""
        account = self._account(tenant)
        if self._clock() - account.read_at >= FRESH:
            account.read_at = self._clock()
            await self._read(tenant, account)
        if self._is_paused(account):
            return "paused"
        if not self.can_afford(tenant, tokens):
            return "budget"
        return ""

    def status(self, limit: int) -> list[tuple[bytes, dict[str, int]]]:
        """Return the *limit* tenants that sent the most: their tokens, and the seconds left of a pause."""
        most = sorted(self._accounts.items(), key=lambda entry: -entry[1].sent)[:limit]
        return [(tenant, self._figures(account)) for tenant, account in most]

    def _figures(self, account: _Account) -> dict[str, int]:
        return {
            "sent_tokens": account.sent,
            "spent_tokens": account.spent,
            "allowed_tokens": int(self._share * account.sent),
            "paused_seconds": max(0, math.ceil(account.paused_until - self._clock())),
        }

    async def _read(self, tenant: bytes, account: _Account) -> None:
        """Replace the account by the store's figures; it stays as it is if the store lost them or does not answer."""
        sent, spent, paused = await self._table.spending(tenant, self._now())
        if sent:
            account.sent = sent + account.unsaved
        if spent:
            account.spent = spent
        account.spent = max(0, account.spent)  # corrections may be larger than the spending of the hour
        self._flush(tenant, account)
        if paused:
            account.paused_until = max(account.paused_until, self._clock() + FRESH)

    def _is_paused(self, account: _Account) -> bool:
        return self._clock() < account.paused_until

    def _flush(self, tenant: bytes, account: _Account) -> None:
        if account.unsaved:
            self._table.count(tenant, "in", account.unsaved, self._now())
            account.unsaved = 0
            account.flushed_at = self._clock()

    def _account(self, tenant: bytes) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
        return account


class SummaryConfig(msgspec.Struct, frozen=True):
    """The configuration of summaries.

    ``model`` is the configured summariser, empty for the request's own model. Only conversations of the tenants in
    ``allowed_tenants`` go to it; None allows every tenant. ``allow_subscriptions`` permits OAuth tokens.
    ``subscription_upstreams`` have such a token as their configured key, ``keyed_upstreams`` any key. At most
    ``max_jobs`` jobs run at once. ``timeout`` and ``lease_seconds`` are seconds: how long a request waits, and how long
    a lease lasts.
    """

    mode: Literal["background", "inline"] = "background"
    model: str = ""
    allowed_tenants: frozenset[bytes] | None = None
    allow_subscriptions: bool = False
    keyed_upstreams: frozenset[str] = frozenset()
    subscription_upstreams: frozenset[str] = frozenset()
    max_jobs: int = 4
    timeout: float = 60.0
    lease_seconds: float = LEASE
    headers_of: HeadersOf = no_headers

    def choose_summariser(self, request: SummaryRequest, resolve: Callable[[str], Route]) -> Summariser:
        """Return the configured summariser if the tenant's conversations may go there, else the request's own model."""
        route, window = request.route, request.window
        if self._may_use_model(request.client_request.tenant):
            route = resolve(self.model)
        is_request_model = route.name == request.route.name
        if is_request_model:
            route = request.route
        else:
            window = int((route.window or UNKNOWN_WINDOW) / _COUNT_RATIO)
        same_upstream = route.upstream == request.route.upstream
        return Summariser(
            upstream=route.upstream,
            model=route.model,
            api=request.client_request.api if same_upstream else "chat",
            window=window,
            is_request_model=is_request_model,
            uses_client_headers=same_upstream,
            encoding=route.encoding,
            configured_headers=self.headers_of(route.requested_model or route.model),
        )

    def _may_use_model(self, tenant: bytes) -> bool:
        return bool(self.model) and (self.allowed_tenants is None or tenant in self.allowed_tenants)

    def forbids(self, request: SummaryRequest, summariser: Summariser) -> bool:
        """True if the call would be made with a subscription's key and those are not allowed."""
        if self.allow_subscriptions:
            return False
        if summariser.upstream in self.subscription_upstreams:
            return True
        return any(map(is_subscription_key, self._call_keys(request, summariser)))

    def _call_keys(self, request: SummaryRequest, summariser: Summariser) -> list[str]:
        """Return the keys that a call would carry, without the upstream's configured one."""
        configured = credentials(summariser.configured_headers)
        if configured or summariser.upstream in self.keyed_upstreams or not summariser.uses_client_headers:
            return configured
        if request.client_request.origin is None:
            return []
        return credentials(request.client_request.origin.headers)


class Reservation:
    """Tokens that are reserved before a call, and replaced by the tokens that it used when these are known."""

    def __init__(self, limits: SpendingLimits, breaker: Breaker, request: SummaryRequest) -> None:
        self._limits = limits
        self._breaker = breaker
        self._tenant = request.client_request.tenant
        self._may_exceed_budget = request.requested
        self._reserved = 0

    async def refusal_reason(self, tokens: int) -> str:
        """Return the limit that forbids to spend *tokens*: ``paused`` or ``budget``; empty if none does."""
        reason = await self._limits.refusal_reason(self._tenant, tokens)
        if reason == "budget" and self._may_exceed_budget:
            return ""
        return reason

    async def check(self, tokens: int) -> str:
        """Reserve *tokens* and return an empty string; else a fixed word for the reason why they may not be spent."""
        reason = await self.refusal_reason(tokens)
        if reason:
            return reason
        if not self._breaker.admit():
            return "breaker"
        self._reserved = tokens
        self._limits.add_spent(self._tenant, tokens)
        return ""

    def correct(self, used: int) -> None:
        """Replace the reserved tokens by those *used*."""
        self._limits.add_spent(self._tenant, used - self._reserved)
