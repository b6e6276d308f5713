"""How much a tenant's summaries may cost: a part of what it sent in the last hour, over all replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

from proxy.summaries.contracts import Shelf

PAUSE = 60.0
"""Seconds nothing is asked on behalf of a tenant that was told to slow down."""

FLUSH_TOKENS = 50_000
"""Tokens sent that are told to the store at once; fewer wait until somebody asks."""

FRESH = 5.0
"""Seconds for which the store's figures hold; what this process adds meanwhile is added to them."""


@dataclass(slots=True)
class _Account:
    """One tenant's figures as this process knows them. ``waiting``: sent, and not yet told to the store."""

    sent: int = 0
    spent: int = 0
    waiting: int = 0
    asked: float = float("-inf")
    paused: float = 0.0


class Ledger:
    """Spending by tenant. *share* is the part of the tokens sent; *accounts* a bounded mapping.

    *clock* gives monotonic seconds, *now* those of the wall clock.
    """

    def __init__(
        self,
        shelf: Shelf,
        share: float,
        accounts: MutableMapping[bytes, _Account],
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._shelf = shelf
        self._share = share
        self._accounts = accounts
        self._clock = clock
        self._now = now

    def sent(self, tenant: bytes, tokens: int) -> None:
        """Note a prompt of so many tokens."""
        account = self._account(tenant)
        account.waiting += tokens
        account.sent += tokens
        if account.waiting >= FLUSH_TOKENS:
            self._flush(tenant, account)

    def spent(self, tenant: bytes, tokens: int) -> None:
        """Note that summaries took so many tokens, or fewer than was thought where negative."""
        if tokens:
            self._account(tenant).spent += tokens
            self._shelf.count(tenant, "out", tokens, self._now())

    def pause(self, tenant: bytes) -> None:
        """Ask nothing on behalf of *tenant* for a while, on no replica."""
        account = self._account(tenant)
        if not self._rests(account):
            self._shelf.pause(tenant, PAUSE)
        account.paused = self._clock() + PAUSE

    def is_paused(self, tenant: bytes) -> bool:
        """Whether this process knows of a pause."""
        account = self._accounts.get(tenant)
        return account is not None and self._rests(account)

    def affords(self, tenant: bytes, tokens: int) -> bool:
        """Whether *tenant* may spend so many *tokens* as far as this process knows."""
        account = self._account(tenant)
        return account.spent + tokens <= self._share * account.sent

    def figures(self, most: int) -> list[tuple[bytes, dict[str, int]]]:
        """What this process knows of the *most* tenants that sent the most: tokens, and seconds of a pause to come."""
        known = sorted(self._accounts.items(), key=lambda entry: -entry[1].sent)[:most]
        return [
            (
                tenant,
                {
                    "sent_tokens": account.sent,
                    "spent_tokens": account.spent,
                    "allowed_tokens": int(self._share * account.sent),
                    "paused_seconds": max(0, math.ceil(account.paused - self._clock())),
                },
            )
            for tenant, account in known
        ]

    async def why_not(self, tenant: bytes, tokens: int) -> str:
        """Why *tenant* may not spend so many *tokens* now, as a fixed word; empty where it may."""
        account = self._account(tenant)
        if self._clock() - account.asked >= FRESH:
            account.asked = self._clock()
            sent, spent, paused = await self._shelf.spending(tenant, self._now())
            # Where the store lost its figures, or cannot be asked, what this process saw holds.
            account.sent = max(account.sent if not sent else 0, sent + account.waiting)
            account.spent = max(account.spent if not spent else 0, spent)
            self._flush(tenant, account)
            if paused:
                account.paused = max(account.paused, self._clock() + FRESH)
        if self._rests(account):
            return "paused"
        return "" if self.affords(tenant, tokens) else "budget"

    def _rests(self, account: _Account) -> bool:
        return self._clock() < account.paused

    def _flush(self, tenant: bytes, account: _Account) -> None:
        if account.waiting:
            self._shelf.count(tenant, "in", account.waiting, self._now())
            account.waiting = 0

    def _account(self, tenant: bytes) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
        return account
