"""What the page's tests share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: a socket's path has 107 characters at most."""
    path = Path(mkdtemp(prefix="ulg-"))
    yield path
    shutil.rmtree(path)
