"""From an event to the view: write its texts once, then splice the same bytes on every later request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proxy.core.budget.regions import NOTHING, Totals, add_up
from proxy.core.compression.clip import clip
from proxy.core.compression.fold import Folded, render
from proxy.core.compression.schedule import Event
from proxy.core.conversation.dialect import Dialect
from proxy.core.conversation.items import Item, Layout
from proxy.core.conversation.scan import Span

Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Raw:
    """The items of one request: their bytes in *body*, their numbers, their structure, and the API's dialect."""

    body: bytes
    spans: tuple[Span, ...]
    items: Sequence[Item]
    layout: Layout
    dialect: Dialect

    def item(self, index: int) -> bytes:
        """The client's own bytes of one item."""
        start, end = self.spans[index]
        return self.body[start:end]


@dataclass(frozen=True, slots=True)
class View:
    """The items to send: the bytes between the list's brackets, and their weight in tokens (system items included).

    ``kept`` are the client's own items among them, ``summary`` the tokens of what stands for the others.
    """

    content: bytes
    tokens: int
    kept: Totals = NOTHING
    summary: int = 0


def write(raw: Raw, event: Event, count: Count) -> tuple[str, dict[int, bytes]]:
    """The block's text and the clipped items of *event*: written once, then a matter of record."""
    shorten: Callable[[str, int], str] = lambda text, tokens: clip(text, tokens, count)  # noqa: E731
    edits = {i: raw.dialect.clipped(raw.item(i), shorten, count, tokens) for i, tokens in event.clips}
    if event.cut == 0 or not event.block:
        return "", edits
    folded = [i for i in range(event.cut) if raw.items[i].role != "system"]
    entries = {i: raw.dialect.read_entry(raw.item(i)) for i in folded}  # what a clip took out is digested too
    shown = {i: raw.dialect.read_entry(edits[i]) for i in event.anchors if i in edits}
    anchors = [i for i in event.anchors if i != _carrier(raw, event)]
    task = next(((shown.get(i) or entries[i]).text for i in anchors if i == raw.layout.task), "")
    newest = next(((shown.get(i) or entries[i]).text for i in anchors if i != raw.layout.task), "")
    carrier = _carrier(raw, event)
    carried = shown.get(carrier) or entries.get(carrier)
    users = [i for i in folded if i not in event.anchors and (raw.items[i].role == "user" or entries[i].said)]
    pins = tuple(entries[i].said or entries[i].text for i in users)
    said = Folded(tuple(entries.values()), pins, task, newest, carried.text if carried else "")
    return _encodable(render(said, event.block, event.text, count)), edits


def _encodable(text: str) -> str:
    """*text* with lone surrogates, which JSON escapes can spell but UTF-8 cannot hold, as replacement characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def assemble(raw: Raw, event: Event, block: str, edits: Mapping[int, bytes], count: Count) -> View:
    """The view after *event*: system items, the carrier with the block, then the client's own bytes from the cut on."""
    systems = [index for index in raw.layout.systems if index < event.cut]
    pieces = [raw.item(index) for index in systems]
    kept = [raw.items[index] for index in systems]
    summary, start = 0, event.cut
    if block:
        carrier = _carrier(raw, event)
        before = carrier == event.cut
        own = edits.get(carrier) or raw.item(carrier) if carrier >= 0 else b""
        media = [part for i in event.anchors if i != carrier for part in raw.dialect.media_parts(raw.item(i))]
        marker = _moved_marker(raw, event, carrier)
        message = (
            raw.dialect.with_text(own, block, before=before, media=media, marker=marker)
            if own
            else raw.dialect.user_message(block)
        )
        pieces.append(message)
        summary = raw.dialect.read_item(message, count).tokens
        if own:
            kept.append(raw.dialect.read_item(own, count) if carrier in edits else raw.items[carrier])
            summary -= kept[-1].tokens
        start += before
    tail = [i for i in edits if i >= start]
    pieces += _slices(raw, start, sorted(tail), edits)
    kept += [raw.items[i] for i in range(start, len(raw.items)) if i not in edits]
    kept += [raw.dialect.read_item(edits[i], count) for i in tail]
    totals = add_up(kept)
    return View(b",".join(pieces), totals.system + totals.history + summary, totals, summary)


MARKERS = 4
"""Cache marks a request may hold; where the key occurs more often, nothing tells which of them are marks."""


def _moved_marker(raw: Raw, event: Event, carrier: int) -> bytes:
    """The last cache mark among the items that go, for the block that stands for them: else their prefix is lost."""
    key, marker = raw.dialect.MARKER, b""
    at, end = raw.spans[0][0], raw.spans[event.cut - 1][1]
    while key and (at := raw.body.find(key, at, end)) >= 0:
        index = bisect_right(raw.spans, at, key=lambda span: span[0]) - 1
        if index != carrier and raw.items[index].role != "system" and index not in event.anchors:
            marker = raw.dialect.marker(raw.item(index)) or marker
        at = raw.spans[index][1]
    return marker if marker and raw.body.count(key) <= MARKERS else b""


def _slices(raw: Raw, start: int, edited: Sequence[int], edits: Mapping[int, bytes]) -> list[bytes]:
    """The items from *start* on: runs of untouched ones as one slice of the body, edited ones on their own."""
    found: list[bytes] = []
    for index in (*edited, len(raw.spans)):
        if start < index:
            found.append(raw.body[raw.spans[start][0] : raw.spans[index - 1][1]])
        if index < len(raw.spans):
            found.append(edits[index])
        start = index + 1
    return found


def _carrier(raw: Raw, event: Event) -> int:
    """The user item that carries the block: the tail's first item, else the task; -1 where there is neither."""
    if event.cut < len(raw.items) and raw.items[event.cut].role == "user":
        return event.cut
    task = raw.layout.task
    return task if task is not None and task < event.cut else -1
