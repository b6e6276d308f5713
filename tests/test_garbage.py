"""When garbage is collected."""

from __future__ import annotations

import gc

import pytest

from proxy.garbage import without_collections


def test_collections_pause_and_go_on():
    """Garbage is collected again after a pause, also after one that an exception ended."""
    with without_collections():
        assert not gc.isenabled()
    with pytest.raises(LookupError), without_collections():
        raise LookupError
    assert gc.isenabled()
