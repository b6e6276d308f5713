"""From an event to the view: write its texts once, then splice the same bytes on every later request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proxy.core.apis.base import ApiFormat
from proxy.core.apis.json_edit import level
from proxy.core.apis.json_scan import Span
from proxy.core.compaction.block import FoldedItems, render_block
from proxy.core.compaction.digest import command_of, digest_of
from proxy.core.compaction.record import LINE, NAMES, Compaction, CompactionRecord, Placeholder, placeholder_text
from proxy.core.compaction.truncate import TruncateLimits, clip, line_count, truncate_to
from proxy.core.conversation import Item, ItemText, Layout, WrittenResult
from proxy.core.tokens.counting import NOTHING, RoleTotals, add_up
from proxy.core.tokens.media import is_media
from proxy.core.tool_calls import WRITTEN, Pair, as_result, failure_line, pairs_of, resaid
from proxy.core.tool_table import ToolMap

Count = Callable[[str], int]

TARGET_LENGTH = 120
"""Characters of a call's target in the line that stands for its result."""

DIGESTED_LINES, HEADINGS = 2_000, 12
"""Lines of an old result that are looked through for names, and tokens of the headings over them."""


@dataclass(frozen=True, slots=True)
class OriginalItems:
    """The items of one request: their bytes in *body*, their numbers, their structure, and the API's dialect."""

    body: bytes
    spans: tuple[Span, ...]
    items: Sequence[Item]
    layout: Layout
    dialect: ApiFormat

    def item(self, index: int) -> bytes:
        """The client's own bytes of one item."""
        start, end = self.spans[index]
        return self.body[start:end]

    def entry(self, index: int) -> ItemText:
        """What one item says; a result that the client wrote as text is a result."""
        found, written = self.dialect.read_entry(self.item(index)), self.written(index)
        return found if written is None else as_result(self.item(index), found, written)

    def written(self, index: int) -> WrittenResult | None:
        """How the client wrote the item as text, if it is a tool result that was asked for; else ``None``."""
        item = self.items[index]
        return item.facts.written if item.role == "tool" and item.facts is not None else None

    def replaced(self, index: int, texts: Sequence[str], *, media: bool = False) -> bytes:
        """One item with *texts* in place of what its tool results say; with *media*, their images stay."""
        written = self.written(index)
        if written is None:
            return self.dialect.replaced(self.item(index), texts, media=media)
        return resaid(self.item(index), "\n".join(texts), written, is_media if media else None)


@dataclass(frozen=True, slots=True)
class AssembledItems:
    """The items to send: the bytes between the list's brackets, and their weight in tokens (system items included).

    ``roles`` are the client's own items among them, ``summary_tokens`` the tokens of what stands for the others.
    """

    content: bytes
    tokens: int
    roles: RoleTotals = NOTHING
    summary_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What texts are written with: the counter and the table of tools."""

    count: Count
    tools: ToolMap


def write_texts(
    raw: OriginalItems, event: Compaction, pen: RenderOptions, before: CompactionRecord | None = None, summary: str = ""
) -> tuple[str, dict[int, bytes]]:
    """The block's text and the edited items of *event*: written once, then a matter of record.

    What stands as it did after *before*, the event before this one, keeps that record's bytes. *summary* is what a
    model wrote of the folded items, verified.
    """
    count = pen.count
    shorten: Callable[[str, int], str] = lambda text, tokens: clip(text, tokens, count)  # noqa: E731
    edits = {i: raw.dialect.clipped(raw.item(i), shorten, count, tokens) for i, tokens in event.clips}
    edits |= _results(raw, event, pen, before)
    if event.cut == 0 or not event.block_tokens:
        return "", edits
    if before is not None and same_block(event, before.compaction):
        return before.block, edits
    folded = [i for i in range(event.cut) if raw.items[i].role != "system"]
    entries = _entries(raw, folded)  # what a clip took out is digested too
    shown = {i: raw.dialect.read_entry(edits[i]) for i in event.anchors if i in edits}
    anchors = [i for i in event.anchors if i != _carrier(raw, event)]
    task = next(((shown.get(i) or entries[i]).text for i in anchors if i == raw.layout.task), "")
    newest = next(((shown.get(i) or entries[i]).text for i in anchors if i != raw.layout.task), "")
    carrier = _carrier(raw, event)
    carried = shown.get(carrier) or entries.get(carrier)
    users = [i for i in folded if i not in event.anchors and (raw.items[i].role == "user" or entries[i].said)]
    pins = tuple(entries[i].said or entries[i].text for i in users)
    said = FoldedItems(tuple(entries.values()), pins, task, newest, carried.text if carried else "")
    return _encodable(render_block(said, event.block_tokens, event.text_tokens, count, summary)), edits


def _entries(raw: OriginalItems, indexes: Sequence[int]) -> dict[int, ItemText]:
    """What the items say, by index. Equal ones are read once."""
    known: dict[tuple[bytes, WrittenResult | None], ItemText] = {}
    found: dict[int, ItemText] = {}
    for index in indexes:
        name = raw.item(index), raw.written(index)
        entry = known.get(name)
        if entry is None:
            entry = known[name] = raw.entry(index)
        found[index] = entry
    return found


def same_block(event: Compaction, before: Compaction) -> bool:
    """Whether the block of *event* says what that of *before* does."""
    clips = [tuple(clip for clip in e.clips if clip[0] in e.anchors or clip[0] < e.cut) for e in (event, before)]
    shape = [(e.cut, e.block_tokens, e.text_tokens, e.anchors) for e in (event, before)]
    return shape[0] == shape[1] and clips[0] == clips[1]


def _results(
    raw: OriginalItems, event: Compaction, pen: RenderOptions, before: CompactionRecord | None
) -> dict[int, bytes]:
    """The items whose results gave way to a line or were truncated."""
    lines, trims = {swap.index: swap for swap in event.placeholders}, dict(event.truncations)
    if not lines and not trims:
        return {}
    cut_short = {*trims, *(index for index, _ in event.clips)}
    held = frozenset(before.compaction.placeholders) if before else frozenset()
    found: dict[int, bytes] = {}
    texts: dict[int, list[str]] = {}
    for pair in pairs_of(raw.items, event.cut, event.boundary):
        swap = lines.get(pair.index)
        if (
            swap is not None
            and swap in held
            and swap.same_as not in cut_short
            and before
            and pair.index in before.edits
        ):
            found[pair.index] = before.edits[pair.index]
        elif swap is not None:
            # What was cut short itself no longer says all that this result said.
            said = Placeholder(swap.index, "old") if swap.same_as in cut_short else swap
            texts.setdefault(pair.index, []).append(_line(raw, pair, said, pen))
    made = {i: raw.replaced(i, said) for i, said in texts.items()}
    cut = dict(before.compaction.truncations) if before else {}
    for index, tokens in trims.items():
        if before and cut.get(index) == tokens and index in before.edits:
            found[index] = before.edits[index]
        else:
            made[index] = raw.replaced(index, _truncated(raw, index, tokens, pen), media=True)
    return {**made, **found}


def _truncated(raw: OriginalItems, index: int, tokens: int, pen: RenderOptions) -> list[str]:
    """The results of one item, truncated so that it takes at most *tokens*."""
    said = [text for text, _ in raw.entry(index).results]
    sizes = [pen.count(text) for text in said]
    room = tokens - (raw.items[index].tokens - sum(sizes))
    cap = level(sizes, max(len(said), room))
    return [
        truncate_to(text, _limits(text, size, cap), cap, pen.count, tail=True)
        for text, size in zip(said, sizes, strict=True)
    ]


def _limits(text: str, size: int, cap: int) -> TruncateLimits:
    """Limits that leave of *text*, which takes *size* tokens, somewhat more than *cap*: then tokens alone decide."""
    length = len(text.encode("utf-8", "surrogatepass"))
    lines = line_count(text) + 2  # the marker takes one, and a text of one line is cut inside it
    return TruncateLimits(lines, length if size <= cap else length * cap * 17 // (size * 16))


def _line(raw: OriginalItems, pair: Pair, swap: Placeholder, pen: RenderOptions) -> str:
    """The line that stands for one result."""
    name, arguments = _called(raw, pair, pen.tools)
    targets = pen.tools.targets(name, arguments)
    target = targets[0] if targets else command_of(arguments) or pen.tools.about(arguments)
    why = (
        "again"
        if swap.reason == "included" and not _includes(raw, swap.same_as, _result_text(raw, pair))
        else swap.reason
    )
    target = target if len(target) <= TARGET_LENGTH else ""
    line = "" if pair.result.ok else _brief(failure_line(_result_text(raw, pair)))
    for about, cause in ((target, line), (target, ""), ("", "")):
        text = placeholder_text(why, name, about, ok=pair.result.ok, line=cause)
        if pen.count(text) <= LINE:
            break
    names = _names(raw, pair, pen.count) if swap.reason == "old" else []
    return _encodable("\n".join([text, *names]))


def _called(raw: OriginalItems, pair: Pair, tools: ToolMap) -> tuple[str, str]:
    """The name and the arguments of a result's call."""
    entry = raw.dialect.read_entry(raw.item(pair.call_index))
    if pair.call_at != WRITTEN:
        return entry.calls[pair.call_at]
    calls = tools.forms.called(entry.text)
    return calls[0] if len(calls) == 1 and calls[0][0] else ("tool", "{}")


def _names(raw: OriginalItems, pair: Pair, count: Count) -> list[str]:
    """What an old result mentioned, in a tenth of its size."""
    item = raw.items[pair.index]
    lines = _result_text(raw, pair).splitlines()[:DIGESTED_LINES]
    room = item.tokens // NAMES // len(item.answers) - HEADINGS
    return digest_of([ItemText("tool", line) for line in lines], room, count).lines() if room > 0 else []


def _brief(line: str) -> str:
    return line if len(line) <= TARGET_LENGTH else ""


def _result_text(raw: OriginalItems, pair: Pair) -> str:
    return raw.entry(pair.index).results[pair.at][0]


def _includes(raw: OriginalItems, index: int, text: str) -> bool:
    """Whether a result of item *index* holds *text*: equal line numbers do not say that the lines are the same."""
    return any(text.strip() in later for later, _ in raw.entry(index).results)


def _encodable(text: str) -> str:
    """*text* with lone surrogates, which JSON escapes can spell but UTF-8 cannot hold, as replacement characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def assemble(
    raw: OriginalItems, event: Compaction, block: str, edits: Mapping[int, bytes], count: Count
) -> AssembledItems:
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
    return AssembledItems(b",".join(pieces), totals.system + totals.history + summary, totals, summary)


MARKERS = 4
"""Cache marks a request may hold; where the key occurs more often, nothing tells which of them are marks."""


def _moved_marker(raw: OriginalItems, event: Compaction, carrier: int) -> bytes:
    """The last cache mark among the items that go, for the block that stands for them: else their prefix is lost."""
    key, marker = raw.dialect.MARKER, b""
    at, end = raw.spans[0][0], raw.spans[event.cut - 1][1]
    while key and (at := raw.body.find(key, at, end)) >= 0:
        index = bisect_right(raw.spans, at, key=lambda span: span[0]) - 1
        if index != carrier and raw.items[index].role != "system" and index not in event.anchors:
            marker = raw.dialect.marker(raw.item(index)) or marker
        at = raw.spans[index][1]
    return marker if marker and raw.body.count(key) <= MARKERS else b""


def _slices(raw: OriginalItems, start: int, edited: Sequence[int], edits: Mapping[int, bytes]) -> list[bytes]:
    """The items from *start* on: runs of untouched ones as one slice of the body, edited ones on their own."""
    found: list[bytes] = []
    for index in (*edited, len(raw.spans)):
        if start < index:
            found.append(raw.body[raw.spans[start][0] : raw.spans[index - 1][1]])
        if index < len(raw.spans):
            found.append(edits[index])
        start = index + 1
    return found


def _carrier(raw: OriginalItems, event: Compaction) -> int:
    """The user item that carries the block: the tail's first item, else the task; -1 where there is neither."""
    if event.cut < len(raw.items) and raw.items[event.cut].role == "user":
        return event.cut
    task = raw.layout.task
    return task if task is not None and task < event.cut else -1
