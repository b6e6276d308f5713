"""An engine for callers that plan requests and send none: no upstream, and a store in memory."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from proxy.core.errors import UpstreamUnreachable
from proxy.core.models import Catalogue
from proxy.engine.engine import Engine
from proxy.engine.ports import Reply, Upgradable
from proxy.settings import Settings
from proxy.store import open_store
from proxy.tasks import Tasks, ignore_failure, ignore_warning
from proxy.tokenizers import Tokenizers
from proxy.wiring import open_engine


@functools.cache
def offline_tokenizers() -> Tokenizers:
    """The tokenizers of all such engines of this process: with gigatoken, loading a vocabulary takes 0.7 s of CPU."""
    return Tokenizers()


@asynccontextmanager
async def offline_engine(settings: Settings, catalogue: Catalogue) -> AsyncIterator[Engine]:
    """Open an engine that plans requests by *settings*; nothing is stored beyond the context."""
    tasks = Tasks(ignore_failure)
    unused = Path(tempfile.gettempdir())  # a store in memory writes nothing
    store = await open_store("memory", directory=unused, key=bytes(32), spawn=tasks.spawn, warn=ignore_warning)
    try:
        yield open_engine(settings, catalogue, offline_tokenizers(), store, NoUpstream())
    finally:
        await store.close()
        await tasks.finish(1.0)


class NoUpstream:
    """An upstream that cannot be reached."""

    async def send(self, target: str, *rest: object) -> Reply:
        """Raise ``UpstreamUnreachable``."""
        del rest
        raise UpstreamUnreachable(target, "nothing is sent here")

    async def upgrade(self, target: str, path_qs: str, headers: object) -> Upgradable:
        """Raise ``UpstreamUnreachable``."""
        del path_qs, headers
        raise UpstreamUnreachable(target, "nothing is sent here")
