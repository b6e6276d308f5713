"""What workers start with: the store that the parent found usable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from proxy import fleet
from proxy.process import StartOptions
from proxy.reload import ConfigState, Loaded
from proxy.settings import Settings
from proxy.store import StoreMisconfigured
from tests.test_process import Part, settings


async def prepared(folder: Path, configured: Settings) -> tuple[StartOptions, str, str]:
    """Return the options that workers of *configured* start with, the store in words, and the events logged."""
    part = Part(folder)
    given, store = await fleet._shared_store(configured, part.logs, part.tasks)
    return given, store, await part.close()


def damaged(folder: Path) -> None:
    folder.mkdir()
    (folder / "master.key").write_bytes(b"short")


def in_the_way(folder: Path) -> None:
    folder.write_text("a file, not a directory")


@pytest.mark.parametrize("spoil", [damaged, in_the_way])
async def test_workers_get_memory_where_the_embedded_store_cannot_be(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """An unusable data directory or key file is a warning, and every worker has its store in memory."""
    data = tmp_path / "data"
    spoil(data)
    given, store, log = await prepared(tmp_path, settings(store={"url": "embedded", "path": str(data)}))
    assert given.settings.store.url == "memory"
    assert store.startswith("memory")
    assert '"event":"store.memory_instead"' in log
    assert '"event":"store.memory_per_worker"' in log


async def test_workers_share_the_embedded_store(tmp_path: Path) -> None:
    """Each worker opens the same file, which the parent has closed again, with the key that lies beside it."""
    data = tmp_path / "d"
    given, store, _ = await prepared(tmp_path, settings(store={"url": "embedded", "path": str(data)}))
    assert given.settings.store.url == "embedded"
    assert not given.is_fallback
    assert (data / "master.key").exists()
    assert not (data / "store.db-wal").exists(), "the parent still has it open"
    assert store == f"embedded  ({data})"


async def test_a_store_that_cannot_be_is_refused_before_any_worker_starts(tmp_path: Path) -> None:
    """The parent finds out what every worker would find out."""
    part = Part(tmp_path)
    with pytest.raises(StoreMisconfigured):
        await fleet._shared_store(settings(store={"url": "redis+sentinel://h"}), part.logs, part.tasks)
    await part.close()


def test_workers_keep_their_port_and_their_store(tmp_path: Path) -> None:
    """A changed configuration is sent to them with the port and the store that they have."""
    before = StartOptions(settings(server={"port": 5000}, store={"url": "memory"}), is_fallback=True)
    wanted = settings(server={"port": 0}, store={"url": "embedded", "path": str(tmp_path)}, tools={})
    sent = fleet._with_loaded(before, Loaded(ConfigState(generation=2), wanted))
    assert (sent.settings.server.port, sent.settings.store.url) == (5000, "memory")
    assert (sent.is_fallback, sent.state.generation) == (True, 2)
    unchanged = fleet._with_loaded(before, Loaded(ConfigState(problems=("x",))))
    assert (unchanged.settings, unchanged.state.problems) == (before.settings, ("x",))
