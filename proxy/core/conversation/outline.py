"""What stands around the items of a body: model, output figure, tools. Small, and mostly equal from call to call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.core.conversation.scan import Field, members, reject_duplicates
from proxy.core.errors import InvalidRequest

TOOLS = ("tools", "functions")
COUNTED = (*TOOLS, "tool_choice", "response_format", "instructions")
"""Members beside the items that the provider counts as input."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Facts of an outline. ``text`` is its JSON, ``fields`` the spans of its members in that text."""

    text: str
    model: str
    stream: bool
    requested: int | None
    fields: Mapping[str, Field]

    def counted(self) -> dict[str, str]:
        """The JSON text of every member that a provider counts as input."""
        found = {key: self.value(key) for key in COUNTED if key in self.fields}
        return {key: value for key, value in found.items() if value not in ("null", "[]", "{}")}

    def value(self, key: str) -> str:
        """The JSON text of the member *key*. Raises ``KeyError``."""
        field = self.fields[key]
        return self.text[field.start : field.end]


def read_outline(text: str, figures: Sequence[str]) -> Outline:
    """The facts of the outline *text*; *figures* are the members that may state the output allowance.

    Raises ``InvalidRequest`` where a member that decides anything occurs twice or is of the wrong type.
    """
    try:
        found = members(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    reject_duplicates(found)
    fields = {field.key: field for field in found}
    values = {key: _value(text, fields, key) for key in ("model", "stream", *figures)}
    model = values["model"]
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("'model' must be a string.")
    return Outline(
        text=text,
        model=model or "",
        stream=values["stream"] is True,
        requested=next((v for key in figures if _is_figure(v := values[key])), None),
        fields=fields,
    )


def splice(outline: Outline, at: int, items: bytes, edits: Mapping[str, str]) -> bytes:
    """The body of *outline* with *items* put back at character *at* and the members of *edits* replaced."""
    text = outline.text
    pieces: list[tuple[int, int, bytes]] = [(at, at, items)]
    pieces += [(outline.fields[key].start, outline.fields[key].end, value.encode()) for key, value in edits.items()]
    result: list[bytes] = []
    done = 0
    for start, end, value in sorted(pieces, key=lambda piece: piece[0]):
        result += [text[done:start].encode(), value]
        done = end
    return b"".join([*result, text[done:].encode()])


def _value(text: str, fields: Mapping[str, Field], key: str) -> Any:
    field = fields.get(key)
    return json.loads(text[field.start : field.end]) if field else None


def _is_figure(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
