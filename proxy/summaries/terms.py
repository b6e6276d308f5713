"""Who writes a summary, and on which terms: the model, its upstream, whose key, and whether that key may be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from proxy.core.models import Route
from proxy.engine.ports import SummaryRequest
from proxy.summaries.calling import Summariser, credentials, is_subscription

LEASE = 15.0
"""Seconds a lease lasts."""

UNKNOWN_WINDOW = 16_384
"""The window assumed of a configured summariser of which nobody knows one."""

HeadersOf = Callable[[str], Mapping[str, str]]


def no_headers(model: str) -> Mapping[str, str]:
    """Nothing, whatever the *model*."""
    del model
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms summaries are written.

    ``model`` is the configured summariser, empty for the request's own; only conversations of the tenants in
    ``allowed`` go to it (``None``: everybody's). ``subscriptions``: OAuth tokens may be used. ``guarded`` are the
    upstreams whose configured key is one, ``keyed`` those with a key of their own. ``most`` jobs run at once;
    ``timeout`` is how long a request waits at most. ``headers_of`` tells what is configured to be sent with a model.
    """

    mode: Literal["background", "inline"] = "background"
    model: str = ""
    allowed: frozenset[bytes] | None = None
    subscriptions: bool = False
    keyed: frozenset[str] = frozenset()
    guarded: frozenset[str] = frozenset()
    most: int = 4
    timeout: float = 60.0
    lease: float = LEASE
    headers_of: HeadersOf = no_headers

    def summariser(self, passage: SummaryRequest, resolve: Callable[[str], Route]) -> Summariser:
        """Who writes: the configured summariser where this tenant's words may go there, else the request's model."""
        route, api = passage.route, passage.request.api
        configured = self.model and (self.allowed is None or passage.request.tenant in self.allowed)
        chosen = resolve(self.model) if configured else route
        if chosen.name == route.name:
            added = self.headers_of(route.requested_model or route.model)
            return Summariser(route.upstream, route.model, api, passage.window, True, True, route.encoding, added)
        lent = chosen.upstream == route.upstream
        window = int((chosen.window or UNKNOWN_WINDOW) / 1.5)  # its count may be larger than ours by half
        api, added = api if lent else "chat", self.headers_of(chosen.requested_model or chosen.model)
        return Summariser(chosen.upstream, chosen.model, api, window, False, lent, chosen.encoding, added)

    def forbid(self, passage: SummaryRequest, summariser: Summariser) -> bool:
        """Whether the key that a call would be made with is a subscription's, and those are not to be used."""
        if self.subscriptions:
            return False
        used = credentials(summariser.added)
        if not used and summariser.upstream not in self.keyed and summariser.lent and passage.request.origin:
            used = credentials(passage.request.origin.headers)
        return summariser.upstream in self.guarded or any(map(is_subscription, used))
