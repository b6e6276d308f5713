"""Fixtures for tests of running proxies, all of which are slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.conftest import Valkey, short_path
from tests.support.process_inspection import kill_all

__all__ = ["short_path"]


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave the files unread if their tests would be deselected: to import the providers' clients takes seconds."""
    if config.getoption("markexpr") == "not slow":
        return True
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test of this folder as slow."""
    item.add_marker(pytest.mark.slow)


@pytest.fixture
def home(short_path: Path) -> Iterator[Path]:
    """A home that outlives a proxy, and in which nothing lives on after the test."""
    yield short_path
    kill_all(short_path)


@pytest.fixture
def remote(short_path: Path) -> Iterator[Valkey]:
    """A store server of the operator's own."""
    directory = short_path / "remote"
    directory.mkdir()
    server = Valkey(directory)
    server.start()
    yield server
    server.kill()
