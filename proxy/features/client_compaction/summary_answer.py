"""A client's own compaction, answered from the summary that is ready instead of by the model it asks.

Only where the operator allows it, and only where a model's verified summary covers nearly all that was said. What came
after it is told as a block tells folded rounds; the user's words stand in it as they were.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Final

from proxy.core.apis.envelope import Envelope
from proxy.core.client_compaction import without_prompt
from proxy.core.compaction.block import FoldedItems, render_block
from proxy.core.compaction.stages import BLOCK_FRAME
from proxy.core.compaction.truncate import clip
from proxy.core.compaction.view import OriginalItems
from proxy.core.decisions import CountedView, MeasuredRequest
from proxy.core.report import SERVED, Report
from proxy.core.request import Request
from proxy.core.tokens.budget import Shares
from proxy.engine.features import Feature
from proxy.engine.ports import Answer, Summary
from proxy.engine.reading import Reader
from proxy.engine.records import CompactionRecords
from proxy.engine.replies import LocalReply
from proxy.features.client_compaction import local_response
from proxy.offload import load_of, offload

NEARLY: Final = 0.75
"""The part of a conversation's tokens that a summary must cover to stand for all of it."""

WORDS: Final = 0.5
"""Of what the user's words may take, what the first and the last of them may take each."""

STREAM, JSON = "text/event-stream; charset=utf-8", "application/json"

Count = Callable[[str], int]


class SummaryAnswers(Feature):
    """Answers clients' own compactions. *now* gives seconds since 1970."""

    def __init__(self, records: CompactionRecords, reader: Reader, shares: Shares, now: Callable[[], float]) -> None:
        self._records = records
        self._reader = reader
        self._shares = shares
        self._now = now

    async def answer_planned(self, request: Request, view: CountedView, report: Report) -> Answer | None:
        """An answer of our own to *request*, which would be sent as *view*.

        None if it is no compaction of a client's, asks for more than a text, or no summary is ready for it.
        """
        measured = view.measured
        envelope = measured.parsed.envelope
        if not measured.client_compaction or view.observation or not measured.prefix_hashes:
            return None
        if envelope.unseen or not _wants_text(envelope):
            return None
        ready = await self._records.summed_up(measured)
        if ready is None:
            return None
        summary, original = ready
        sums = original.layout.sums
        if sums[summary.length] < NEARLY * sums[-1]:
            return None
        size = load_of(len(measured.parsed.body), len(measured.parsed.items))
        text = await offload(size, self._text, measured, original, summary)
        count = self._reader.count(measured.route.encoding, measured.route.model)
        tokens = int(count(text) * measured.token_ratio)
        if envelope.requested is not None and tokens > envelope.requested:
            return None
        name = hashlib.sha256(request.request_id.encode() + text.encode()).hexdigest()[:24]
        model = request.path_model or envelope.model
        said = local_response.TextAnswer(text, tokens, name, model, int(self._now()), _wants_usage(envelope))
        facts = {
            "outcome": "compacted",
            "reason": SERVED,
            "tokens_after": tokens,
            "summary_tokens": summary.tokens_spent,
        }
        report = report.but(stages=(), regions={}, borrowed={}, event=False, **facts)
        if envelope.stream:
            return Answer(report, LocalReply(local_response.stream_events(request.api, said), STREAM))
        return Answer(report, LocalReply(local_response.whole_response(request.api, said), JSON))

    def _text(self, measured: MeasuredRequest, raw: OriginalItems, summary: Summary) -> str:
        """The summary, and what it does not tell: the user's words, and what came after it."""
        count = self._reader.count(measured.route.encoding, measured.route.model)
        figures, shares, items = measured.budget, self._shares, raw.items
        budget = max(figures.budget, figures.window // 4)
        text = max(int((shares.digest + shares.steps) * budget), 2 * count(summary.text))
        words = int(shares.pins * budget)
        told = [i for i in range(len(items)) if items[i].role != "system"]
        entries = {i: raw.entry(i) for i in told[:-1]}
        if told and (rest := without_prompt(raw.item(told[-1]))):
            entries[told[-1]] = raw.dialect.read_entry(rest)
        users = [i for i, entry in entries.items() if items[i].role == "user" or entry.said]
        said = [entries[i].said or entries[i].text for i in users]
        ends = [clip(each, int(words * WORDS), count) for each in (*said[:1], *said[1:][-1:])]
        later = tuple(entry for i, entry in entries.items() if i >= summary.length)
        folded = FoldedItems(later, tuple(said[1:-1]), *ends)
        return _encodable(render_block(folded, words + text + BLOCK_FRAME, text, count, summary.text))


def _wants_text(outline: Envelope) -> bool:
    """Whether one plain text is all that the request can mean: no second choice, no form, no call it insists on."""
    if _member(outline, "n") not in (None, 1) or _member(outline, "logprobs"):
        return False
    forms = (
        *(_member(outline, key) for key in ("response_format", "output_format")),
        *(_format(_member(outline, key)) for key in ("text", "output_config")),
    )
    if any(isinstance(form, dict) and form.get("type", "text") != "text" for form in forms):
        return False
    choice = _member(outline, "tool_choice")
    named = choice.get("type") if isinstance(choice, dict) else choice
    return named in (None, "auto", "none")


def _wants_usage(outline: Envelope) -> bool:
    options = _member(outline, "stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _format(text: object) -> object:
    return text.get("format") if isinstance(text, dict) else None


def _member(outline: Envelope, key: str) -> object:
    found: object = json.loads(outline.value(key)) if key in outline.fields else None
    return found


def _encodable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
