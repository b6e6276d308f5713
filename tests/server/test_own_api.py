"""What routes below ``/ullage/api/`` share: the parameters of a target. Callers and bodies: the tests of the routes."""

from __future__ import annotations

import pytest

from proxy.server.own_api import query


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        ("/ullage/api/archive/x", {}),
        ("/ullage/api/archive/x?offset=3&limit=2", {"offset": "3", "limit": "2"}),
        ("/x?q=a%20b&q=last", {"q": "last"}),
        ("/x?q=", {}),
    ],
)
def test_each_parameter_has_its_last_value(target: str, parameters: dict[str, str]) -> None:
    """Decoded; an empty one is none."""
    assert query(target) == parameters
