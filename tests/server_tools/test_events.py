"""Events as bytes."""

from __future__ import annotations

import json

import pytest

from proxy.core.apis.json_edit import json_bytes
from proxy.core.apis.sse import data_of
from proxy.server_tools.events import value_of, written


@pytest.mark.parametrize(
    ("data", "value"),
    [(b'{"a":1}', {"a": 1}), (b'{"a":"\\ud800"}', {"a": "\ud800"}), (b"[1]", None), (b"[DONE]", None)],
)
def test_only_objects_are_values(data: bytes, value: object) -> None:
    """An object is read, lone surrogates included; anything else is none."""
    assert value_of(data) == value


def test_what_is_written_can_be_read_again() -> None:
    """An event of any value is valid UTF-8 and says that value."""
    for value in ({"a": "é\n"}, {"a": "\ud800"}):
        event = written(value, "kind")
        assert event.startswith(b"event: kind\ndata: ")
        assert json.loads(data_of(event)) == value == json.loads(json_bytes(value))
