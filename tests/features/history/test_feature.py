"""The parts of the history for given settings."""

from __future__ import annotations

from proxy.features.history.feature import open_archive, open_reader, open_recorder
from proxy.features.history.settings import Archive, HistorySettings
from proxy.settings import Settings
from tests.store.conftest import Opener, opener, short_path

__all__ = ["opener", "short_path"]


async def test_an_archive_is_there_only_if_it_is_switched_on(opener: Opener) -> None:
    """Off as shipped; with it on, limits are those of the settings."""
    store = await opener("memory")
    assert open_archive(Settings(), store, opener.tasks, lambda outcome, count: None) is None
    wanted = HistorySettings(archive=Archive(enabled=True, days=2, max_item=1000))
    archive = open_archive(wanted, store, opener.tasks, lambda outcome, count: None)
    assert archive is not None
    assert (archive._limits.seconds, archive._limits.max_item) == (2 * 86_400, 1000)
    assert open_recorder(store, archive)._archive is archive


async def test_callers_read_what_the_store_has(opener: Opener) -> None:
    """An empty store has no conversation."""
    history = open_reader(Settings(), await opener("memory"))
    assert await history.conversations(b"t" * 32) == {"conversations": []}
