"""Fixtures of the store, for tests that need a real one."""

from tests.store.conftest import opener, short_path, valkey

__all__ = ["opener", "short_path", "valkey"]
