"""Which API a body is of, by its members."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.apis.shape import shape_of

RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}


@pytest.mark.parametrize(
    ("value", "api"),
    [
        ({"input": "hello"}, "responses"),
        ({"input": [], "messages": []}, "chat"),
        ({"messages": []}, "chat"),
        ({"messages": [], "system": "s"}, "messages"),
        ({"messages": [RESULT]}, "messages"),
        ({"messages": ["odd", {"content": ["odd"]}], "tools": "odd"}, "chat"),
        ({"messages": "odd"}, ""),
        ({}, ""),
    ],
)
def test_members_show_the_api(value: dict[str, Any], api: str) -> None:
    """Odd members are skipped; without a list of items there is no API."""
    assert shape_of(value) == api
