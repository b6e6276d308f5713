"""What is asked of a summariser: a measured conversation's prefix as a passage, with its cap and its warm prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from proxy.core.budget.catalogue import Route
from proxy.core.budget.figures import Figures, stepped
from proxy.core.compression.record import Record
from proxy.core.compression.view import Raw, View, assemble
from proxy.core.conversation.items import lay_out
from proxy.core.conversation.outline import splice
from proxy.ports import Cut, Passage, Request, Warm
from proxy.walk import offering
from proxy.walk.reading import Reading

LEAST_SUMMARY = 96
"""Tokens a model's summary must be allowed to have: below, the digest says more."""

MOST_SUMMARY = 8_192
"""Tokens it may have in the largest window: no model writes more of use in one answer."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One request's conversation, measured: its items in *raw*, its links, and the name of the conversation.

    ``recall``: once something left its view, it is offered the tool that shows that.
    """

    request: Request
    route: Route
    reading: Reading
    raw: Raw
    figures: Figures
    factor: float
    links: tuple[bytes, ...]
    root: bytes
    recall: bool = False


def passage_of(
    subject: Subject, cut: int, record: Record | None, share: float, count: Callable[[str], int]
) -> Passage | None:
    """The first *cut* items, to be summed up; ``None`` where the window leaves a summary no room.

    *record* is the newest event's, *share* the part of the budget that a summary may take.
    """
    figures, links, raw = subject.figures, subject.links, subject.raw
    step = stepped(min(MOST_SUMMARY, int(share * subject.factor * figures.lasting)))
    cap = int(step / max(1.0, subject.factor))
    if cap < LEAST_SUMMARY or not cut:
        return None
    sums = raw.layout.sums
    return Passage(
        request=subject.request,
        route=subject.route,
        root=subject.root,
        since=links[record.event.place - 1] if record else subject.root,
        cuts=tuple(Cut(at, links[at - 1], sums[at]) for at in raw.layout.cuts if 0 < at <= cut),
        covered=record.event.cut if record else 0,
        cap=cap,
        step=step,
        head=_head(subject),
        window=figures.window,
        factor=subject.factor,
        read=lambda start, stop: [raw.dialect.read_entry(raw.item(i)) for i in range(start, stop)],
        warm=lambda length: _warm(subject, record, length, count),
    )


def _head(subject: Subject) -> bytes:
    """A digest of what stands before the conversation: system items and every counted member."""
    reading = subject.reading
    parts = [reading.items[i].digest for i in subject.raw.layout.systems]
    parts += [value.encode("utf-8", "surrogatepass") for _, value in sorted(reading.outline.counted().items())]
    return hashlib.sha256(b"\0".join(parts)).digest()[:8]


def _warm(subject: Subject, record: Record | None, length: int, count: Callable[[str], int]) -> Warm:
    """The prompt of the first *length* items as they last went upstream, which the provider's cache may have."""
    whole, spans = subject.raw, subject.raw.spans[:length]
    items, outline = whole.items[:length], subject.reading.outline
    raw, recall = Raw(whole.body, spans, items, lay_out(items), whole.dialect), subject.recall and record is not None
    if record is None:
        view = View(whole.body[spans[0][0] : spans[-1][1]], sum(item.tokens for item in items))
    else:
        edits = {i: value for i, value in record.edits.items() if i < length}
        view = assemble(raw, record.event, offering.told(record.block, recall=recall), edits, count)
    text = splice(outline, 0, b"", offering.tools(subject.request.api, outline)).decode() if recall else outline.text
    return Warm(text, view.content, subject.figures.fixed + view.tokens)
