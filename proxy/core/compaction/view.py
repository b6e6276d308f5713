"""Builds the view of a compaction: writes its texts once, and puts the same bytes in place on every later request.

``write_texts`` runs when a compaction is made, and its texts are stored in the compaction's record. ``assemble`` runs
for this request and for every one that follows, and joins the stored texts and the client's own bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MappingProxyType

from proxy.core.apis.base import ApiFormat
from proxy.core.apis.json_edit import CACHE_MARK, cache_marks, common_cap, minified, without_members
from proxy.core.apis.json_scan import Span
from proxy.core.compaction.block import FoldedItems, render_block
from proxy.core.compaction.digest import digest_of
from proxy.core.compaction.names import WINDOW
from proxy.core.compaction.prune import LINE, NAMES, placeholder_text
from proxy.core.compaction.record import Compaction, CompactionRecord, Placeholder
from proxy.core.compaction.truncate import MIDDLE, clip, line_count, truncate_to
from proxy.core.compaction.work_state import FoldedCall, outcome_words, work_state
from proxy.core.conversation import Count, Item, ItemText, Layout
from proxy.core.tokens.budget import NOTHING, RoleTotals, add_up
from proxy.core.tokens.media import is_media
from proxy.core.tool_calls import WRITTEN, Pair, failure_line, pairs_of, read_all_arguments, read_arguments
from proxy.core.tool_table import ToolMap
from proxy.core.written_calls import replace_written_result, texts_of

ReadItem = Callable[[bytes], Item]
"""Returns the item of the bytes that a view has of it."""

ReadText = Callable[[int], ItemText]
"""Returns the text of the item at an index."""

NO_TEXTS: Mapping[int, ItemText] = MappingProxyType({})
"""No item was read yet."""

ITEMS_AT_ONCE = 8
"""Items whose texts are at hand while lines are written: those with results and with their calls, and later results."""

COMPARED_RESULTS = 16
"""Most results of an item that are compared with those of another one: the cost is the square of them."""

TARGET_LENGTH = 120
"""Most characters of a call's target, and of an error, in the line that stands for a result."""

DIGESTED_LINES = 2_000
"""Lines of a result that are searched for names."""

HEADINGS = 12
"""Tokens of the headings above the names of a result."""

SEAMS, MOST_NAMED = 2, 512
"""Tokens that texts may take together beyond what each of them takes; most tokens of names of a truncated result."""

CACHE_MARKS = 4
"""Most cache marks in a request. If the key occurs more often, some of the places are text and no marks.

Four is the provider's limit: https://platform.claude.com/docs/en/build-with-claude/prompt-caching
"""

CACHE_MARK_KEY = f'"{CACHE_MARK}"'.encode()


@dataclass(frozen=True, slots=True)
class OriginalItems:
    """The items of one request as the client sent them: their bytes in ``body``, their numbers, and their structure.

    ``texts`` are those of items that were read for this request already, by index.
    """

    body: bytes
    spans: tuple[Span, ...]
    items: Sequence[Item]
    layout: Layout
    api: ApiFormat
    texts: Mapping[int, ItemText] = field(default_factory=dict, repr=False)

    def item(self, index: int) -> bytes:
        """The client's own bytes of one item."""
        start, end = self.spans[index]
        return self.body[start:end]

    def text(self, index: int) -> ItemText:
        """The text of one item."""
        return self.texts_at((index,))[index]

    def texts_at(self, indexes: Sequence[int]) -> dict[int, ItemText]:
        """The texts of the items at *indexes*, by index."""
        unread = {index: self.item(index) for index in indexes if index not in self.texts}
        read = texts_of(self.api, unread, self.items)
        return {index: self.texts.get(index) or read[index] for index in indexes}

    def with_results(self, index: int, texts: Sequence[str], *, media: bool = False) -> bytes:
        """One item with *texts* in place of its tool results; with *media*, their images stay."""
        item, raw = self.items[index], self.item(index)
        if item.role != "tool" or item.written_result is None:
            return self.api.with_results(raw, texts, media=media)
        stays = None
        if media:
            stays = is_media
        return replace_written_result(raw, "\n".join(texts), item.written_result, stays)


@dataclass(frozen=True, slots=True)
class AssembledItems:
    """The items of a view: the bytes between the list's brackets, and their tokens, system items included.

    ``roles`` are the tokens of the client's own items by role, ``summary_tokens`` those of what stands for the others.
    """

    content: bytes
    tokens: int
    roles: RoleTotals = NOTHING
    summary_tokens: int = 0


# Writing the texts of a compaction.


def write_texts(
    original: OriginalItems,
    compaction: Compaction,
    count: Count,
    tools: ToolMap,
    last: CompactionRecord | None = None,
    summary: str = "",
) -> tuple[str, dict[int, bytes]]:
    """The block's text and the edited items of *compaction*, by index.

    Texts that are the same as after *last*, the record before this one, keep that record's bytes. *summary* is a
    verified summary of the folded items by a model, empty if there is none.
    """
    known: Mapping[int, bytes] = {}
    if last is not None:
        known = _unchanged_edits(compaction, last)
    edits: dict[int, bytes] = {}
    for index, _ in compaction.minified:
        edits[index] = known.get(index) or _minified(original, index)
    for index, tokens in compaction.clips:
        item, present = original.item(index), original.items[index].tokens
        edits[index] = original.api.clipped(item, partial(clip, count=count), count, tokens, present)
    if compaction.placeholders:
        edits |= _placeholder_items(original, compaction, count, tools, known)
    for index, tokens in compaction.truncations:
        edits[index] = known.get(index) or _truncated(original, index, tokens, count)
    if compaction.cut == 0 or not compaction.block_tokens:
        return "", edits
    if last is not None and same_block(compaction, last.compaction):
        return last.block, edits
    folded = _folded_items(original, compaction, edits, tools)
    block = render_block(folded, compaction.block_tokens, compaction.text_tokens, count, summary)
    return encodable(block), edits


def same_block(compaction: Compaction, last: Compaction) -> bool:
    """True if *compaction* has the same block as *last*."""
    return _block_source(compaction) == _block_source(last)


def _block_source(compaction: Compaction) -> tuple[object, ...]:
    """All of *compaction* that its block depends on."""
    cut, anchors = compaction.cut, compaction.anchors
    clips = tuple(each for each in compaction.clips if each[0] in anchors or each[0] < cut)
    return cut, compaction.block_tokens, compaction.text_tokens, anchors, clips


def _unchanged_edits(compaction: Compaction, last: CompactionRecord) -> dict[int, bytes]:
    """The edits after *last* of items that *compaction* replaces, truncates or minifies alike, by index."""
    before, shortened = last.compaction, _shortened(compaction)
    same = {each for each in compaction.placeholders if each.same_as not in shortened}
    indexes = {each.index for each in same.intersection(before.placeholders)}
    indexes.update(index for index, _ in set(compaction.truncations).intersection(before.truncations))
    indexes.update(index for index, _ in set(compaction.minified).intersection(before.minified))
    return {index: last.edits[index] for index in indexes if index in last.edits}


def _shortened(compaction: Compaction) -> set[int]:
    """The items of which a part is cut out: they no longer hold all of a result that they repeat."""
    return {index for index, _ in (*compaction.truncations, *compaction.clips)}


def items_in_part(compaction: Compaction) -> set[int]:
    """The items of which only a part stands in the view after *compaction*."""
    return _shortened(compaction) | {placeholder.index for placeholder in compaction.placeholders}


def _minified(original: OriginalItems, index: int) -> bytes:
    """One item with no white space in the JSON of its results."""
    texts = [minified(text) for text, _ in original.text(index).results]
    return original.with_results(index, texts, media=True)


def _placeholder_items(
    original: OriginalItems, compaction: Compaction, count: Count, tools: ToolMap, known: Mapping[int, bytes]
) -> dict[int, bytes]:
    """The items whose results gave way to a line each, by index; *known* ones stay as they are."""
    shortened = _shortened(compaction)
    placeholders = {each.index: each for each in compaction.placeholders}
    # The results of an item stand together, and so do their calls: each item is read once.
    read = lru_cache(ITEMS_AT_ONCE)(original.text)
    lines: dict[int, list[str]] = {}
    for pair in pairs_of(original.items, compaction.cut, compaction.boundary):
        placeholder = placeholders.get(pair.index)
        if placeholder is None or pair.index in known:
            continue
        if placeholder.same_as in shortened:
            placeholder = Placeholder(pair.index, "old")
        line = _placeholder_line(read, pair, placeholder, count, tools)
        if placeholder.reason == "old":
            item = original.items[pair.index]
            room = item.tokens // NAMES // len(item.answers) - HEADINGS
            line = "\n".join([line, *_names(_result_text(read, pair), room, count)])
        lines.setdefault(pair.index, []).append(encodable(line))
    written = {index: original.with_results(index, texts) for index, texts in lines.items()}
    return written | {index: known[index] for index in placeholders if index in known}


def _truncated(original: OriginalItems, index: int, tokens: int, count: Count) -> bytes:
    """One item with its results truncated, so that it takes at most *tokens*."""
    texts = [text for text, _ in original.text(index).results]
    sizes = [count(text) for text in texts]
    room = tokens - (original.items[index].tokens - sum(sizes))
    cap = common_cap(sizes, max(len(texts), room))
    truncated = [_truncated_result(text, size, cap, count) for text, size in zip(texts, sizes, strict=True)]
    return original.with_results(index, truncated, media=True)


def _truncated_result(text: str, size: int, cap: int, count: Count) -> str:
    """*text*, which takes *size* tokens, in at most *cap*: its head and end, and between them names of the middle."""
    room = 0
    if size > cap:
        room = max(0, min(cap // NAMES, MOST_NAMED) - HEADINGS)
    shown = truncate_to(text, *_limits(text, size, cap - room), cap - room, count)
    if names := _names(text, room, count, shown[:WINDOW]):
        marker = "\n".join([MIDDLE, *names])
        room = count(marker) - count(MIDDLE) + SEAMS
        shown = truncate_to(text, *_limits(text, size, cap - room), cap - room, count).replace(MIDDLE, marker, 1)
    return shown


def _limits(text: str, size: int, cap: int) -> tuple[int, int]:
    """The lines and bytes of a little more than *cap* tokens of *text*, which takes *size*: the tokens decide then."""
    most = len(text.encode("utf-8", "surrogatepass"))
    if size > cap:
        most = most * cap * 17 // (size * 16)
    lines = line_count(text) + 2  # the marker takes one, and a text of one line is cut inside it
    return lines, most


def _folded_items(
    original: OriginalItems, compaction: Compaction, edits: Mapping[int, bytes], tools: ToolMap
) -> FoldedItems:
    """The material for the block of *compaction*. Items that a clip cut short are digested as they were."""
    folded = [index for index in range(compaction.cut) if original.items[index].role != "system"]
    texts = original.texts_at(folded)
    anchors = {index: texts[index] for index in compaction.anchors}
    for index in edits.keys() & anchors.keys():
        anchors[index] = original.api.read_item_text(edits[index])
    carrier, carrier_text = _carrier(original, compaction), ""
    carried = anchors.get(carrier) or texts.get(carrier)
    if carried is not None:
        carrier_text = carried.text
    task, newest = _repeated_texts(original, anchors, carrier)
    user_texts: list[str] = []
    for index, text in texts.items():
        if index not in anchors and (text.user_text or original.items[index].role == "user"):
            user_texts.append(text.user_text or text.text)
    calls, arguments = _folded_calls(original, texts, tools), read_all_arguments(texts.values())
    return FoldedItems(
        tuple(texts.values()),
        tuple(user_texts),
        task,
        newest,
        carrier_text,
        work_state(calls, tools, arguments),
        tuple(calls),
        tools.work.talk,
        arguments,
    )


def _folded_calls(original: OriginalItems, texts: Mapping[int, ItemText], tools: ToolMap) -> list[FoldedCall]:
    """The calls in *texts*, the texts of folded items by index, each with its result."""
    end = max(texts, default=-1) + 1
    pairs = {(pair.call_index, pair.call_at): pair for pair in pairs_of(original.items, 0, end)}
    folded: list[FoldedCall] = []
    for index, text in texts.items():
        for at, (name, arguments) in enumerate(text.calls):
            pair = pairs.get((index, at))
            if pair is None:
                folded.append(FoldedCall(name, arguments, tools.find(name).kind))
                continue
            result, outcome, ok = texts[pair.index].results[pair.at][0], "", pair.result.ok
            if pair.call.kind == "shell" or not ok:
                outcome = outcome_words(pair.call.kind, result, ok=ok)
            folded.append(FoldedCall(name, arguments, pair.call.kind, result, ok, outcome))
    return folded


def _repeated_texts(original: OriginalItems, anchors: Mapping[int, ItemText], carrier: int) -> tuple[str, str]:
    """The texts of *anchors* that the block repeats: the task and the newest user text, "" for one in the carrier."""
    task = newest = ""
    for index, text in anchors.items():
        if index == carrier:
            continue
        if index == original.layout.task:
            task = text.text
        else:
            newest = text.text
    return task, newest


# The line that stands for a result.


def _placeholder_line(read: ReadText, pair: Pair, placeholder: Placeholder, count: Count, tools: ToolMap) -> str:
    """The line that stands for one result."""
    name, arguments = _call_of(read(pair.call_index), pair.call_at, tools)
    target = _up_to_target_length(call_target(name, arguments, tools))
    error = ""
    if not pair.result.ok:
        error = _up_to_target_length(failure_line(_result_text(read, pair)))
    reason = placeholder.reason
    if reason == "included" and not _includes(read(placeholder.same_as), read(pair.index), pair.at):
        reason = "again"
    line = ""
    for about, cause in ((target, error), (target, ""), ("", "")):
        line = placeholder_text(reason, name, about, ok=pair.result.ok, error=cause)
        if count(line) <= LINE:
            break
    return line


def _call_of(text: ItemText, at: int, tools: ToolMap) -> tuple[str, str]:
    """The name and the arguments of the call at position *at* of the item *text*."""
    if at != WRITTEN:
        return text.calls[at]
    calls = tools.text_format.find_calls(text.text)
    if len(calls) == 1 and calls[0][0]:
        return calls[0]
    return "tool", "{}"


def call_target(name: str, arguments: str, tools: ToolMap) -> str:
    """The target of a call: a path or the like, else its command, else the argument that the table of tools names."""
    targets = tools.targets(name, arguments)
    if targets:
        return targets[0]
    return read_arguments(arguments).command or tools.subject(arguments)


def _names(result: str, room: int, count: Count, known: str = "") -> list[str]:
    """Lines with the names in *result* that *known* does not hold, in *room* tokens."""
    if room <= 0:
        return []
    lines = result.splitlines()[:DIGESTED_LINES]
    return digest_of([ItemText("tool", line) for line in lines], room, count, known).lines()


def _up_to_target_length(text: str) -> str:
    """*text*, or nothing of it if it is too long for a placeholder."""
    if len(text) > TARGET_LENGTH:
        return ""
    return text


def _result_text(read: ReadText, pair: Pair) -> str:
    return read(pair.index).results[pair.at][0]


def _includes(later: ItemText, earlier: ItemText, at: int) -> bool:
    """True if a result of *later* holds result *at* of *earlier*. Equal line numbers do not prove equal lines.

    Results of items that hold many are not compared.
    """
    if max(len(later.results), len(earlier.results)) > COMPARED_RESULTS:
        return False
    text = earlier.results[at][0].strip()
    return any(text in result for result, _ in later.results)


def encodable(text: str) -> str:
    """Return *text* with replacement characters for lone surrogates, which JSON can spell and UTF-8 cannot hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# Assembling the view.


def with_present_marks(original: OriginalItems, edits: Mapping[int, bytes]) -> dict[int, bytes]:
    """*edits* without cache marks that the client's own items no longer have.

    Clients move their marks on with every request, and providers refuse a request with more than ``CACHE_MARKS``.
    """
    present = dict(edits)
    for index, edit in edits.items():
        if edit.find(CACHE_MARK_KEY) < 0:
            continue
        marks, client_marks = cache_marks(edit), [mark for _, mark in cache_marks(original.item(index))]
        if len(marks) > len(client_marks) or any(mark not in client_marks for _, mark in marks):
            present[index] = without_members(edit, [path for path, _ in marks])
    return present


def assemble(
    original: OriginalItems,
    compaction: Compaction,
    block: str,
    edits: Mapping[int, bytes],
    read_item: ReadItem,
    note: str,
) -> AssembledItems:
    """The items of the view: system items, the carrier with the block, then the client's own bytes from the cut on.

    *note* is a line at the end of the block.
    """
    systems = [index for index in original.layout.systems if index < compaction.cut]
    pieces = [original.item(index) for index in systems]
    own = [original.items[index] for index in systems]
    summary_tokens, start = 0, compaction.cut
    if block:
        carrier, text = _carrier(original, compaction), "\n".join(filter(None, (block, note)))
        message = _carrier_message(original, compaction, carrier, text, edits)
        pieces.append(message)
        summary_tokens = read_item(message).tokens
        if carrier >= 0:
            own.append(_carrier_item(original, carrier, edits, read_item))
            summary_tokens -= own[-1].tokens
        start += carrier == compaction.cut  # the carrier is written already
    tail = sorted(index for index in edits if index >= start)
    pieces += _slices(original, start, tail, edits)
    own += [original.items[index] for index in range(start, len(original.items)) if index not in edits]
    own += [read_item(edits[index]) for index in tail]
    roles = add_up(own)
    return AssembledItems(b",".join(pieces), roles.system + roles.history + summary_tokens, roles, summary_tokens)


def _carrier(original: OriginalItems, compaction: Compaction) -> int:
    """The index of the carrier: of the item at the cut if a user wrote it, else of the task; -1 if there is neither."""
    if compaction.cut < len(original.items) and original.items[compaction.cut].role == "user":
        return compaction.cut
    task = original.layout.task
    if task is None or task >= compaction.cut:
        return -1
    return task


def _carrier_message(
    original: OriginalItems, compaction: Compaction, carrier: int, block: str, edits: Mapping[int, bytes]
) -> bytes:
    """The carrier with the block and the media of the other anchors; a new user item if *carrier* is negative."""
    if carrier < 0:
        return original.api.user_message(block)
    media: list[bytes] = []
    for index in compaction.anchors:
        if index != carrier:
            media += original.api.media_parts(original.item(index))
    marker = b""
    if original.api.MARKER:
        marker = _moved_marker(original, compaction, carrier)
    item = edits.get(carrier) or original.item(carrier)
    return original.api.with_text(item, block, before=carrier == compaction.cut, media=media, marker=marker)


def _carrier_item(original: OriginalItems, carrier: int, edits: Mapping[int, bytes], read_item: ReadItem) -> Item:
    """The figures of the client's own item in the carrier, without the block."""
    if carrier in edits:
        return read_item(edits[carrier])
    return original.items[carrier]


def _moved_marker(original: OriginalItems, compaction: Compaction, carrier: int) -> bytes:
    """The last cache mark among the folded items. It moves to their block: else the provider caches no prefix."""
    key, marker = original.api.MARKER, b""
    if original.body.count(key) > CACHE_MARKS:
        return b""
    at, end = original.spans[0][0], original.spans[compaction.cut - 1][1]
    while (at := original.body.find(key, at, end)) >= 0:
        index = bisect_right(original.spans, at, key=lambda span: span[0]) - 1
        stays = index == carrier or index in compaction.anchors or original.items[index].role == "system"
        if not stays:
            marker = original.api.marker(original.item(index)) or marker
        at = original.spans[index][1]
    return marker


def _slices(original: OriginalItems, start: int, edited: Sequence[int], edits: Mapping[int, bytes]) -> list[bytes]:
    """The items from *start* on: each run of unchanged ones as one slice of the body, each edited one on its own."""
    slices: list[bytes] = []
    for index in (*edited, len(original.spans)):
        if start < index:
            slices.append(original.body[original.spans[start][0] : original.spans[index - 1][1]])
        if index < len(original.spans):
            slices.append(edits[index])
        start = index + 1
    return slices
