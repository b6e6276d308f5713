"""The items of a conversation as the recall tool shows them: numbered, with a heading, in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from proxy.core.apis.json_scan import scan
from proxy.core.conversation import ItemText
from proxy.core.decisions import CountedView
from proxy.features.opening import EarlierItem

LABEL_CHARACTERS: Final = 120
"""Characters of a call that are shown as the heading of its result."""


class Piece(msgspec.Struct, frozen=True):
    """One item as it is shown: its ``number``, a ``label``, and all its ``text``. ``hidden``: the view lacks it.

    ``session`` names its conversation if that is an earlier one, else it is empty.
    """

    number: int
    label: str
    text: str
    hidden: bool = True
    session: str = ""


def pieces_of(view: CountedView) -> list[Piece]:
    """Return every item of the request behind *view* as the tool shows it, without system items."""
    parsed = view.measured.parsed
    originals = _original_items(view)
    entries = view.measured.api_format.read_item_texts(originals)
    sent = [parsed.body[start:end] for start, end in parsed.scan.spans]
    if len(sent) == len(originals):
        labels = _labels(view, entries)
        hidden = _hidden(view, {index for index, raw in enumerate(originals) if sent[index] != raw})
    else:
        labels = [entry.role for entry in entries]
        hidden = _hidden(view, set(range(len(originals))))
    pieces: list[Piece] = []
    for index, entry in enumerate(entries):
        if entry.role != "system":
            pieces.append(Piece(index + 1, labels[index], _text(entry), index in hidden))
    return pieces


def earlier_pieces(items: Sequence[EarlierItem]) -> list[Piece]:
    """Return *items* of earlier conversations as the tool shows them, each with its conversation and its date."""
    pieces: list[Piece] = []
    for item in items:
        role: str = item.text.role
        if item.is_summary:
            role = "summary of the items up to this one"
        label = f"{role}, {item.day}, session {item.session}"
        pieces.append(Piece(item.number, label, _text(item.text), session=item.session))
    return pieces


def _original_items(view: CountedView) -> list[bytes]:
    """Return the items of the request behind *view*, as bytes."""
    body = view.request.body
    listed = view.measured.api_format.with_item_list(body)
    if listed is not None:
        body = listed
    return [body[start:end] for start, end in scan(body, view.measured.api_format.LIST).spans]


def _hidden(view: CountedView, changed: set[int]) -> set[int]:
    """Return the indexes of items that the view lacks or has shortened, and the *changed* ones, edited before it."""
    record = view.edits.record
    if record is None:
        return changed
    folded = set(range(record.compaction.cut)).difference(record.compaction.anchors)
    return changed | folded | record.edits.keys()


def _labels(view: CountedView, entries: Sequence[ItemText]) -> list[str]:
    """Return the heading of each item: its role, or the calls whose results it has."""
    items = view.measured.parsed.items
    call_texts: dict[str, str] = {}
    labels: list[str] = []
    for item, entry in zip(items, entries, strict=True):
        if len(item.calls) == len(entry.calls):
            texts = [_call_text(name, arguments) for name, arguments in entry.calls]
            call_texts |= dict(zip(item.calls, texts, strict=True))
        answered = [call_texts[name] for name in item.answers if name in call_texts]
        label: str = item.role
        if answered:
            label = f"result of {', '.join(answered)}"
        labels.append(label)
    return labels


def _call_text(name: str, arguments: str) -> str:
    text = f"{name}({' '.join(arguments.split())})"
    if len(text) > LABEL_CHARACTERS:
        return text[: LABEL_CHARACTERS - 4] + "...)"
    return text


def _text(entry: ItemText) -> str:
    calls = [f"{name}({arguments})" for name, arguments in entry.calls]
    media = [f"[{kind}, not shown]" for kind in entry.media]
    return "\n".join([part for part in (entry.text, *calls, *media) if part])
