"""Records facts about answered views for the page, and logs once that a conversation is nearly full."""

from __future__ import annotations

import time
from typing import Final

from cachetools import LRUCache

from proxy.core.advice import NEARLY_FULL, Advice, advise
from proxy.core.breakdown import ViewFacts
from proxy.core.decisions import CountedView, View
from proxy.core.report import Report
from proxy.core.tool_table import ToolMap
from proxy.engine.features import Feature
from proxy.page.board import AdviceEntry, Board, ViewNote
from proxy.tasks import Warn

MOST_ADVISED: Final = 10_000
"""Conversations remembered as nearly full, so that each gets one line until it has room again."""


class ViewRecorder(Feature):
    """Adds answered views to *board*, if there is one, and calls *warn* once for each conversation nearly full.

    With *text* advice names the targets of calls. Without *warn* nothing is logged.
    """

    def __init__(self, board: Board | None, tools: ToolMap, warn: Warn | None, *, text: bool) -> None:
        self._board = board
        self._tools = tools
        self._warn = warn
        self._text = text
        self._advised: LRUCache[str, bool] = LRUCache(MOST_ADVISED)

    def answered(self, view: CountedView, report: Report, status: int) -> None:
        """Record *view*, which was sent and answered with *status*."""
        del status
        name = report.conversation
        if not name:
            return
        advice = None
        if (report.pressure or 0.0) <= NEARLY_FULL:
            self._advised.pop(name, None)
        elif name not in self._advised:
            advice = self._advise(view, report)
        if self._board is None:
            return
        entry = None
        if advice is not None:
            entry = AdviceEntry(self._sentence(advice), advice.remedy, round(advice.share, 3))
        measured = view.measured
        parsed, tools_saved = measured.parsed, measured.counts.fixed + measured.addition.tokens - measured.budget.fixed
        record = view.edits.record
        facts = ViewFacts(parsed.items, parsed.scan.spans, record, tools_saved, measured.known.token_ratio)
        self._board.views.append(ViewNote(time.time(), report, facts, entry))

    def refused(self, view: View, report: Report) -> None:
        """Record *view*, which did not fit and was not sent: its user needs the advice most."""
        if isinstance(view, CountedView):
            self.answered(view, report, 0)

    def _advise(self, view: CountedView, report: Report) -> Advice | None:
        """Return advice on *view*, whose conversation has become nearly full, and log it."""
        self._advised[report.conversation] = True
        advice = advise(view, report, self._tools)
        if advice is not None and self._warn is not None:
            self._warn("conversation.nearly_full", self._facts(report, advice))
        return advice

    def _facts(self, report: Report, advice: Advice) -> dict[str, object]:
        """Return the fields of the log line."""
        return {
            "request_id": report.request_id,
            "model": report.model,
            "conversation": report.conversation,
            "pressure": round(report.pressure or 0.0, 3),
            "share": round(advice.share, 2),
            "kind": advice.kind,
            "advice": self._sentence(advice),
            "remedy": advice.remedy,
        }

    def _sentence(self, advice: Advice) -> str:
        return advice.sentence(targets=self._text)
