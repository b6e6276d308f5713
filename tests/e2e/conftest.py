"""Fixtures for tests of running proxies."""

from tests.store.conftest import short_path

__all__ = ["short_path"]
