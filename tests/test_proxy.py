"""The package itself."""

from __future__ import annotations

import importlib.metadata

import pytest

from proxy import version


def test_the_version_is_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version comes from the package's metadata; a checkout that is not installed has none."""
    read = version.__wrapped__  # a process reads it once
    assert read() == version() == (importlib.metadata.version("ullage") if _is_installed() else "0+source")
    monkeypatch.setattr(importlib.metadata, "version", _missing)
    assert read() == "0+source"


def _is_installed() -> bool:
    return any(found.name == "ullage" for found in importlib.metadata.distributions())


def _missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)
