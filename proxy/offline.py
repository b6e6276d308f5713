"""An engine for commands that plan requests and send none: no upstream, and a store in memory."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from proxy.core.models import Catalogue
from proxy.engine.engine import Engine
from proxy.settings import Settings
from proxy.store import open_store
from proxy.tasks import Tasks, ignore_failure
from proxy.tokenizers import Tokenizers
from proxy.wiring import Offline, open_engine


@asynccontextmanager
async def offline_engine(settings: Settings, catalogue: Catalogue, tokenizers: Tokenizers) -> AsyncIterator[Engine]:
    """An engine that can plan what *settings* make of requests; nothing is stored beyond the context."""
    tasks = Tasks(ignore_failure)
    unused = Path(tempfile.gettempdir())  # a store in memory writes nothing
    store = await open_store("memory", directory=unused, key=bytes(32), spawn=tasks.spawn, warn=ignore_warning)
    try:
        yield open_engine(settings, catalogue, tokenizers, store, Offline())
    finally:
        await store.close()
        await tasks.finish(1.0)


def ignore_warning(event: str, facts: Mapping[str, object]) -> None:
    """Drop a warning of the store: a command has no log, and shows what can be read."""
    del event, facts
