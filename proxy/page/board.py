"""The figures of one process that the page shows: its live conversations and totals by model, in bounded memory.

Reports of finished requests wait in ``Board.reports``, notes on some of their views in ``Board.views``: most requests
cost one append. ``update`` reads both once a second. The only texts of conversations here are the blocks of
compactions, if the settings show them.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from proxy.core.advice import NEARLY_FULL
from proxy.core.breakdown import BlockPart, StageSaving, ViewFacts, block_parts, stage_savings
from proxy.core.report import Report
from proxy.engine.fail_open import COUNT_TOKENS

Reports = deque[tuple[float, Report]]
"""Finished requests, each with its Unix time in seconds. ``Telemetry`` appends them."""

MOST_REPORTS: Final = 8192
"""Reports that wait for ``update``; at a higher rate the oldest are dropped, and counted as missed."""

MOST_POINTS: Final = 240
"""Most requests of one conversation whose share of the window is shown; each takes 32 bytes."""

MOST_COMPACTIONS: Final = 32
"""Compactions of one conversation that are shown."""

TREND: Final = 48
"""Points of a conversation in the list."""

LIVE_SECONDS: Final = 3600.0
"""Seconds without a request after which a conversation is not live any more."""

LONGEST_BLOCK: Final = 65_536
"""Characters of a block's text that are shown; up to ``MOST_COMPACTIONS`` such texts are in memory."""

MOST_MODELS: Final = 100
"""Models with totals of their own. Clients may name any model: all others are counted together."""

OTHER: Final = "other"

_NUMBERS: Final = 4
"""Numbers of one request in ``Conversation.points``: time in ms, tokens before, tokens after, flags."""

# The flags.
_COMPACTED: Final = 1
_BOUNDED: Final = 2


class CompactionEntry(msgspec.Struct, frozen=True):
    """One compaction: tokens before and after, tokens that each stage saved, and the parts of the block.

    ``block`` is the block's text, empty unless the settings show it. ``at`` is Unix time in seconds.
    """

    at: float
    before: int
    after: int
    folded: int
    stages: tuple[StageSaving, ...]
    parts: tuple[BlockPart, ...]
    summary_by: str
    block: str


class AdviceEntry(msgspec.Struct, frozen=True):
    """The largest part of a conversation's view, and a remedy."""

    text: str
    remedy: str
    share: float


class ViewNote(msgspec.Struct, frozen=True):
    """Facts about a view that are not in its report. They hold no body, and are read within a second.

    ``at`` is Unix time in seconds. ``advice`` is new; advice for an earlier request holds until there is room again.
    """

    at: float
    report: Report
    facts: ViewFacts
    advice: AdviceEntry | None

    def compaction(self, *, text: bool) -> CompactionEntry | None:
        """Return the compaction if the view is the first with it, else None; with *text* the block's text is in it."""
        report, record = self.report, self.facts.record
        if not report.event or report.observed or record is None:
            return None
        block = ""
        if text:
            block = record.block[:LONGEST_BLOCK]
        return CompactionEntry(
            at=self.at,
            before=report.tokens_before or 0,
            after=report.tokens_after or 0,
            folded=record.compaction.cut,
            stages=stage_savings(self.facts, report.stages, report.tokens_removed),
            parts=block_parts(record.block, report.regions.get("summary", 0)),
            summary_by=record.summary_by,
            block=block,
        )


class Totals(msgspec.Struct):
    """The sums of the requests for one model since the process started: three counts, then tokens.

    ``cached`` are the input tokens that the provider read from its cache.
    """

    requests: int = 0
    refused: int = 0
    compactions: int = 0
    before: int = 0
    sent: int = 0
    removed: int = 0
    input: int = 0
    cached: int = 0
    output: int = 0

    def add(self, other: Totals) -> None:
        """Add the figures of *other*."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Row(msgspec.Struct, omit_defaults=True):
    """One conversation in the list. Token figures are those of its newest request, sums say so.

    ``trend`` holds the newest requests as (Unix time, fill of the window in thousandths, 1 if compacted then).
    """

    name: str
    model: str = ""
    upstream: str = ""
    api: str = ""
    project: str = ""
    agent: str = ""
    window: int = 0
    source: str = ""
    budget: int = 0
    before: int = 0
    tokens: int = 0
    bounded: bool = False
    regions: Mapping[str, int] = {}
    newest: int = 0
    outcome: str = ""
    reason: str = ""
    status: int = 0
    first: float = 0.0
    last: float = 0.0
    requests: int = 0
    compactions: int = 0
    removed_sum: int = 0
    input_sum: int = 0
    cached_sum: int = 0
    output_sum: int = 0
    summary_tokens: int = 0
    advice: AdviceEntry | None = None
    trend: list[tuple[float, int, int]] = []


class Conversation:
    """One conversation: its row, its points and its compactions. ``version`` is the board's at its last change."""

    __slots__ = ("advised_at", "compactions", "points", "row", "version")

    def __init__(self, name: str) -> None:
        self.row = Row(name)
        self.version = 0
        self.advised_at = 0.0  # notes are read before reports, which may be older ones of the same second
        self.points = array("q")  # 8 bytes a number, where a list of integers takes four times as much
        self.compactions: deque[CompactionEntry] = deque(maxlen=MOST_COMPACTIONS)

    def add(self, at: float, report: Report) -> None:
        """Add a finished request."""
        row = self.row
        row.requests += 1
        row.first = row.first or at
        row.last = at
        row.model, row.upstream, row.api, row.project = report.model, report.upstream, report.api, report.project
        row.agent = report.agent
        row.outcome, row.reason, row.status = report.outcome, report.reason, report.status
        row.input_sum += report.usage.input_tokens or 0
        row.cached_sum += report.usage.cached_tokens or 0
        row.output_sum += report.usage.output_tokens or 0
        if report.tokens_after is None or not report.window:
            return
        row.window, row.source, row.budget = report.window, report.source, report.budget or 0
        row.before, row.tokens = report.tokens_before or 0, report.tokens_after
        row.bounded, row.regions, row.summary_tokens = report.bounded, report.regions, report.summary_tokens
        row.newest = report.newest_tokens
        if (report.pressure or 0.0) <= NEARLY_FULL and at >= self.advised_at:
            row.advice = None
        if report.applied:
            row.removed_sum += report.tokens_removed
            row.compactions += report.event
        flags = _COMPACTED * (report.event and report.applied) + _BOUNDED * report.bounded
        self.points.extend((int(at * 1000), row.before, row.tokens, flags))
        del self.points[: -MOST_POINTS * _NUMBERS]

    def rows_of_points(self) -> Iterator[tuple[float, int, int, bool, bool]]:
        """Yield for each request: Unix time, tokens before and after, True if compacted, True if only bounded."""
        points = self.points
        for at in range(0, len(points), _NUMBERS):
            time_ms, before, after, flags = points[at : at + _NUMBERS]
            yield time_ms / 1000, before, after, bool(flags & _COMPACTED), bool(flags & _BOUNDED)

    def row_with_trend(self) -> Row:
        """Return a copy of the row, with its trend."""
        window = self.row.window or 1
        points = self.points[-TREND * _NUMBERS :]
        trend = [
            (points[at] / 1000, 1000 * points[at + 2] // window, points[at + 3] & _COMPACTED)
            for at in range(0, len(points), _NUMBERS)
        ]
        return msgspec.structs.replace(self.row, trend=trend)


class Changes(msgspec.Struct):
    """The changes of a board since a version: rows that changed, and all figures that are not about one conversation.

    ``worker`` is a random name of the process. ``missed`` is the number of seconds in which more requests ended than
    the queue takes. ``lag`` is in seconds.
    """

    worker: str
    version: int
    rows: list[Row]
    names: list[str]
    models: dict[str, Totals]
    missed: int
    lag: float
    windows: list[dict[str, Any]] = []


class Detail(msgspec.Struct):
    """One conversation: its row, its points as ``Conversation.rows_of_points`` yields them, and its compactions."""

    row: Row
    points: list[tuple[float, int, int, bool, bool]]
    compactions: list[CompactionEntry]


class Board:
    """The live conversations of this process, the newest *most* of them, and the totals by model.

    With *text* the blocks of compactions are shown. ``worst_lag`` returns the longest delay of the event loop since its
    last call, in seconds; ``windows`` the windows in force, as the status shows them.
    """

    def __init__(self, most: int, now: Callable[[], float] = time.time, *, text: bool = False) -> None:
        self.reports: Reports = deque(maxlen=MOST_REPORTS)
        self.views: deque[ViewNote] = deque(maxlen=MOST_REPORTS)
        self.worst_lag: Callable[[], float] = float
        self.lag = 0.0
        self.windows: Callable[[], list[dict[str, Any]]] = list
        self.worker = os.urandom(6).hex()
        self._most = most
        self._now = now
        self._text = text
        self._version = 0
        self._missed = 0
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        self._models: dict[str, Totals] = {}

    def tick(self) -> None:
        """Read the reports, and the lag of the second that ended. Call it every second."""
        self.lag = self.worst_lag()
        self.update()

    def update(self) -> None:
        """Read the reports that came since the last call, and forget conversations that are not live any more."""
        self._version += 1
        self._missed += len(self.reports) == MOST_REPORTS  # a full deque has dropped the oldest without an error
        while self.views:
            self._add_view(self.views.popleft())
        while self.reports:
            at, report = self.reports.popleft()
            self._add_to_totals(report)
            if report.conversation and report.api != COUNT_TOKENS:
                conversation = self._conversation(report.conversation)
                conversation.add(at, report)
                conversation.version = self._version
        self._forget_idle()

    def changes(self, since: int = 0) -> Changes:
        """Return the rows that changed after version *since*, the names of all, and the totals."""
        live = [conversation for conversation in self._conversations.values() if conversation.row.requests]
        rows = [conversation.row_with_trend() for conversation in live if conversation.version > since]
        names = [conversation.row.name for conversation in live]
        return Changes(self.worker, self._version, rows, names, self._models, self._missed, self.lag, self.windows())

    def detail(self, name: str) -> Detail | None:
        """Return conversation *name* with its points and compactions; None if it is not live here."""
        conversation = self._conversations.get(name)
        if conversation is None or not conversation.row.requests:
            return None
        return Detail(
            conversation.row_with_trend(), list(conversation.rows_of_points()), list(conversation.compactions)
        )

    def _add_view(self, note: ViewNote) -> None:
        conversation = self._conversation(note.report.conversation)
        compaction = note.compaction(text=self._text)
        if compaction is not None:
            conversation.compactions.append(compaction)
        if note.advice is not None:
            conversation.row.advice, conversation.advised_at = note.advice, note.at

    def _conversation(self, name: str) -> Conversation:
        """Return conversation *name*, a new one if it is not live; it becomes the newest one."""
        conversation = self._conversations.get(name)
        if conversation is None:
            conversation = self._conversations[name] = Conversation(name)
            if len(self._conversations) > self._most:
                self._conversations.popitem(last=False)
        self._conversations.move_to_end(name)
        return conversation

    def _add_to_totals(self, report: Report) -> None:
        model = report.model
        if model not in self._models and len(self._models) >= MOST_MODELS:
            model = OTHER
        totals = self._models.get(model)
        if totals is None:
            totals = self._models[model] = Totals()
        usage = report.usage
        totals.requests += 1
        totals.refused += report.outcome == "refused"
        totals.before += report.tokens_before or 0
        totals.sent += report.tokens_sent or 0
        totals.input += usage.input_tokens or 0
        totals.cached += usage.cached_tokens or 0
        totals.output += usage.output_tokens or 0
        if report.applied and report.api != COUNT_TOKENS:
            totals.removed += report.tokens_removed
            totals.compactions += report.event

    def _forget_idle(self) -> None:
        """Forget the conversations that are not live any more: those at the beginning."""
        oldest = self._now() - LIVE_SECONDS
        for name, conversation in list(self._conversations.items()):
            if conversation.row.last >= oldest:
                break
            if conversation.row.requests:
                del self._conversations[name]
