"""What the server is handed, by shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from proxy.core.report import Report
from proxy.features.history.pages import Page


class Conversations(Protocol):
    """What is told of conversations, of one tenant's at a time. Raises ``StoreUnavailable``."""

    async def list(self, tenant: bytes) -> Mapping[str, object]:
        """The tenant's newest conversations."""

    async def show(self, tenant: bytes, conversation: str) -> Mapping[str, object] | None:
        """What became of one conversation; ``None`` where the tenant has none of that name."""

    async def compact(
        self, tenant: bytes, conversation: str, share: float | None = None
    ) -> Mapping[str, object] | None:
        """Have its next request compact it; ``None`` where the tenant has none of that name. Raises ``Conflict``."""

    async def original(self, tenant: bytes, ref: str, page: Page) -> Mapping[str, object] | None:
        """One page of what was archived as *ref*; ``None`` where the tenant has no such thing."""


Route = Callable[[str], str]
Observe = Callable[[Report, float], None]
Metrics = Callable[[], tuple[bytes, str]]
Status = Callable[[], Mapping[str, object]]
