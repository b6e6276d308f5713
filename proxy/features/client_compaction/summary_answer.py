"""Answers a client's own compaction from a summary that is ready, in place of the model that the client names.

This happens only if the operator allows it, and if a model's verified summary covers most of the conversation. Later
items are described as a block describes folded rounds. The answer quotes the user's words verbatim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

from proxy.core.apis.envelope import Envelope, tool_choice, wants_plain_text
from proxy.core.client_compaction import without_prompt
from proxy.core.compaction.block import FoldedItems, render_block
from proxy.core.compaction.stages import BLOCK_FRAME
from proxy.core.compaction.truncate import clip
from proxy.core.compaction.view import OriginalItems, encodable
from proxy.core.conversation import ItemText
from proxy.core.decisions import CountedView, MeasuredRequest
from proxy.core.report import SERVED, Report
from proxy.core.request import Request
from proxy.core.tokens.budget import Shares, to_our_tokens
from proxy.engine.features import Feature
from proxy.engine.ports import Answer, Summary
from proxy.engine.reading import Reader
from proxy.engine.records import CompactionRecords
from proxy.engine.replies import LocalReply
from proxy.features.client_compaction.compact_endpoint import is_trigger, usable_budget
from proxy.features.client_compaction.local_response import (
    APIS,
    JSON,
    STREAM,
    TextAnswer,
    stream_events,
    whole_response,
)
from proxy.tasks import load_of, offload

LEAST_COVERED_SHARE: Final = 0.75
"""The share of a conversation's tokens that a summary must cover to stand for all of it."""

WORD_SHARE: Final = 0.5
"""The share of the tokens for the user's words that the first and the newest of them may each take."""


class SummaryAnswers(Feature):
    """Answers clients' own compactions. *now* gives Unix time."""

    def __init__(self, records: CompactionRecords, reader: Reader, shares: Shares, now: Callable[[], float]) -> None:
        self._records = records
        self._reader = reader
        self._shares = shares
        self._now = now

    async def answer_planned(self, request: Request, view: CountedView, report: Report) -> Answer | None:
        """Return an answer of our own to *request*, which would be sent as *view*.

        Return None if it is no client's compaction, if it needs more than a text, or if no summary is ready for it.
        """
        measured = view.measured
        if view.observation or not _may_be_answered(request, measured):
            return None
        ready = await self._summary_of_most(measured)
        if ready is None:
            return None
        summary, original = ready
        size = load_of(len(measured.parsed.body), len(measured.parsed.items))
        text = await offload(size, self._text, measured, original, summary)
        envelope, route = measured.parsed.envelope, measured.known.route
        tokens = int(self._reader.count(route.encoding, route.model)(text) * measured.known.token_ratio)
        if envelope.requested_output is not None and tokens > envelope.requested_output:
            return None
        name = hashlib.sha256(request.request_id.encode() + text.encode()).hexdigest()[:24]
        model = request.path_model or envelope.model
        answer = TextAnswer(text, tokens, name, model, int(self._now()), _wants_usage(envelope))
        report = report.with_(
            outcome="compacted",
            reason=SERVED,
            tokens_after=tokens,
            summary_tokens=summary.tokens_spent,
            stages=(),
            regions={},
            borrowed={},
            event=False,
        )
        if envelope.stream:
            return Answer(report, LocalReply(stream_events(request.api, answer), STREAM))
        return Answer(report, LocalReply(whole_response(request.api, answer), JSON))

    async def _summary_of_most(self, measured: MeasuredRequest) -> tuple[Summary, OriginalItems] | None:
        """Return the summary that is ready, and the items it is about; None if it covers too little of them."""
        ready = await self._records.summed_up(measured)
        if ready is None:
            return None
        summary, original = ready
        sums = original.layout.sums
        if sums[summary.length] < LEAST_COVERED_SHARE * sums[-1]:
            return None
        return summary, original

    def _text(self, measured: MeasuredRequest, original: OriginalItems, summary: Summary) -> str:
        """Return the summary with the user's words, and with a digest of the items after it.

        The text takes no more than the client allows for an answer, unless the summary alone does.
        """
        count = self._reader.count(measured.known.route.encoding, measured.known.route.model)
        shares, items, budget = self._shares, original.items, usable_budget(measured)
        text_tokens = max(int((shares.digest + shares.steps) * budget), 2 * count(summary.text))
        word_tokens = int(shares.pins * budget)
        entries = _entries(original)
        user_texts = [
            entry.user_text or entry.text for i, entry in entries.items() if items[i].role == "user" or entry.user_text
        ]
        most = int(word_tokens * WORD_SHARE)
        task, newest = clip("".join(user_texts[:1]), most, count), clip("".join(user_texts[1:][-1:]), most, count)
        later = tuple(entry for i, entry in entries.items() if i >= summary.length)
        folded = FoldedItems(later, tuple(user_texts[1:-1]), task, newest)
        size = word_tokens + text_tokens + BLOCK_FRAME
        allowed = measured.parsed.envelope.requested_output
        if allowed is not None:
            room = to_our_tokens(allowed, measured.known.token_ratio) - count(task) - count(newest)
            size = max(0, min(size, room))
        return encodable(render_block(folded, size, text_tokens, count, summary.text))


def _entries(original: OriginalItems) -> dict[int, ItemText]:
    """Return the texts of the items by index, without system messages and without the client's prompt for a summary."""
    items = original.items
    indexes = [i for i in range(len(items)) if items[i].role != "system"]
    entries = {i: original.text(i) for i in indexes[:-1]}
    if indexes:
        newest = indexes[-1]
        rest = without_prompt(original.item(newest))
        if rest:
            entries[newest] = original.api.read_item_text(rest)
    return entries


def _may_be_answered(request: Request, measured: MeasuredRequest) -> bool:
    """True if *request* is a client's compaction whose whole history is in the body, and a text can be its answer."""
    if not measured.client_compaction or not measured.prefix_hashes or not _takes_text(request, measured):
        return False
    # Input that is not in the body cannot be in the summary either.
    envelope = measured.parsed.envelope
    return not envelope.has_unseen_input and _wants_text(envelope)


def _takes_text(request: Request, measured: MeasuredRequest) -> bool:
    """True if a text can be an answer in the request's API, and the client requests no compaction item."""
    if request.api not in APIS or request.purpose == "compact":
        return False
    parsed = measured.parsed
    return not is_trigger(parsed.item(len(parsed.items) - 1))


def _wants_text(envelope: Envelope) -> bool:
    """True if the request wants one plain text, requires no tool call and does not read the text's probabilities."""
    if envelope.member("logprobs") or not wants_plain_text(envelope):
        return False
    return tool_choice(envelope) in ("auto", "none")


def _wants_usage(envelope: Envelope) -> bool:
    options = envelope.member("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True
