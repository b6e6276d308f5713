"""Answering the tool with which a model reads what left its view, and asking the model again.

Nothing is stored: what the tool shows is the request's own history, which is held until its answer has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeVar

from proxy.core.apis.json_scan import scan
from proxy.core.conversation import Entry
from proxy.core.decisions import DIALECTS, CountedView
from proxy.core.report import NO_USAGE, Report
from proxy.engine.features import Resend
from proxy.engine.ports import Reply
from proxy.engine.reading import Reader
from proxy.features.recall import chat, messages, responses
from proxy.features.recall.events import dumped
from proxy.features.recall.merger import Call, RecallApi
from proxy.features.recall.search import LAST, Piece, answer
from proxy.offload import offload

RECALL_APIS: Mapping[str, RecallApi] = MappingProxyType({"chat": chat, "messages": messages, "responses": responses})

GENERATIONS: Final = 3
"""How often a model is asked for one answer at most, the first time included."""

CALLS: Final = 8
"""Calls of one generation that are answered with what they ask for: each is a walk over the history."""

TOO_MANY: Final = f"[Not answered: at most {CALLS} calls at once.]"

MARGIN: Final = 64
"""One token in so many of the window stays free: no provider counts quite as we do."""

BELIEVED: Final = 0.7
"""Of our count, what a provider's own count of a prompt must come to to be believed."""

SEAM: Final = 4
"""Tokens that a text may take more inside an element than it does alone."""

LABEL: Final = 120
"""Characters of a call that are shown as the heading of its result."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call of the tool shows: *results* unless it asks for more or fewer, in at most so many *tokens*."""

    results: int = 3
    tokens: int = 4_000


T = TypeVar("T")


class RecallSession:
    """One answer to a client, of one or more generations. Keeps the request while it is under way.

    ``recalls`` are the generations but the first, ``tokens`` what all of them took, once there was more than one;
    ``first`` is the first one's usage.
    """

    def __init__(self, reader: Reader, limits: Limits, view: CountedView, stream: bool, resend: Resend) -> None:
        """*view* is what the first generation answers; *stream*: the client asked for a stream."""
        request = view.request
        self.wire = RECALL_APIS[request.api]
        self.recalls = 0
        self.tokens = 0
        self.first = NO_USAGE
        self._dialect = DIALECTS[request.api]
        self._count = reader.count(view.measured.route.encoding, view.measured.route.model)
        self._limits = limits
        self._request = request
        self._view = view
        self._stream = stream
        self._resend = resend
        self._behind: list[bytes] = []
        self._retries = 0
        self._overflows = 0
        self._added = 0
        self._measured: int | None = None

    def told(self, report: Report) -> Report:
        """*report* with what happened since it was made."""
        if not self.recalls:
            return report
        return report.but(
            recalls=self.recalls,
            recall_tokens=self.tokens,
            retries=report.retries + self._retries,
            overflows=report.overflows + self._overflows,
        )

    def is_stream(self, content_type: str) -> bool:
        """Whether a reply of this type is a stream: by its name, or because one was asked for and it is no JSON."""
        return content_type.startswith("text/event-stream") or (self._stream and "json" not in content_type)

    def may_go_on(self) -> bool:
        """Whether the model may be asked once more."""
        return self.recalls + 1 < GENERATIONS

    def note(self, usage: Any) -> None:
        """Add up what a generation took: as its *usage* says, else our count of its prompt."""
        counted = int((self._view.counted + self._added) * self._view.known.token_ratio)
        told = self.wire.used(usage)
        self._measured = told.input_tokens
        if not self.recalls:
            self.first = told
        self.tokens += (counted if told.input_tokens is None else told.input_tokens) + (told.output_tokens or 0)

    async def go_on(self, said: Any, calls: Sequence[Call]) -> tuple[Reply, bytes]:
        """The reply to the next generation's request, in which *calls* are answered, and the bytes taken from it."""
        body = self._view.body
        asked = [dumped(element) for element in self.wire.asked(said, body)]
        pieces = await self._off(self._pieces)
        made: list[bytes] = []

        async def extend(view: CountedView, most: int | None) -> CountedView:
            made[:] = await self._off(lambda: [*asked, *self._answered(view, said, asked, calls, pieces, most)])
            return await self._off(lambda: self._extended(view, made))

        continued = await self._resend.send(self._view, extend)
        self._view = continued.view
        self._behind += made
        self._added = self._weight(self._behind)
        self.recalls += 1
        self._retries += continued.retries
        self._overflows += continued.overflows
        return continued.reply, continued.head

    async def _off(self, work: Callable[[], T]) -> T:
        return await offload(len(self._request.body), work)

    def _extended(self, view: CountedView, made: Sequence[bytes]) -> CountedView:
        where = scan(view.body, self._dialect.LIST)
        end = where.spans[-1][1]
        behind = [*self._behind, *made]
        body = b"%b,%b%b" % (view.body[:end], b",".join(behind), view.body[end:])
        return replace(view, body=body, extension=self._weight(behind))

    def _weight(self, elements: Sequence[bytes]) -> int:
        return sum(self._dialect.read_item(raw, self._count).tokens for raw in elements)

    def _answered(
        self,
        view: CountedView,
        said: Any,
        asked: Sequence[bytes],
        calls: Sequence[Call],
        pieces: Sequence[Piece],
        most: int | None,
    ) -> Iterator[bytes]:
        """The elements that answer what was *said*, its *calls* in what *view* leaves free below *most* tokens."""
        last = "\n" + LAST if self.recalls + 2 == GENERATIONS else ""
        heard, beyond = calls[:CALLS], [TOO_MANY] * len(calls[CALLS:])
        room = self._room(view, most, [*asked, *map(dumped, self.wire.answered(said, [""] * len(heard) + beyond))])
        usual, count = self._limits.results, self._count
        share = min(self._limits.tokens, (room - count(last)) // len(heard) - SEAM)
        texts = [answer(call.arguments, pieces, usual, share, count) for call in heard] + beyond
        texts[-1] += last
        return map(dumped, self.wire.answered(said, texts))

    def _room(self, view: CountedView, most: int | None, new: Sequence[bytes]) -> int:
        """Tokens that are left beside *view*, what is behind it by now, and *new* elements; below *most*, if given.

        What the provider counted for just this prompt is better than our count. A factor below one is the prompt's as a
        whole: what is new may well count in full.
        """
        budget, ratio = view.budget, view.known.token_ratio
        counted, added = view.counted + self._weight(self._behind), self._weight(new)
        taken = int(counted * ratio)
        if view is self._view and self._measured is not None:
            taken = max(self._measured, int(taken * BELIEVED))
        inside = int(budget.beside(view.lowered_output or budget.reserve) * ratio)
        room = int((inside - taken) / max(1.0, ratio)) - added - budget.window // MARGIN
        return room if most is None else min(room, most - counted - added - 1)

    def _pieces(self) -> list[Piece]:
        """Every item of the client's history as it is shown."""
        parsed, record = self._view.measured.parsed, self._view.edits.record
        body = self._view.request.body
        body = body if (listed := self._dialect.listed(body)) is None else listed
        raws = [body[start:end] for start, end in scan(body, self._dialect.LIST).spans]
        items = parsed.items
        sent = [parsed.body[start:end] for start, end in parsed.scan.spans]
        same = len(sent) == len(raws)
        hidden = {i for i, raw in enumerate(raws) if not same or sent[i] != raw}
        if record is not None:
            hidden |= {
                i for i in range(record.compaction.cut) if i not in record.compaction.anchors
            } | record.edits.keys()
        callers: dict[str, str] = {}
        pieces: list[Piece] = []
        for at, raw in enumerate(raws):
            entry = self._dialect.read_entry(raw)
            if same and len(items[at].calls) == len(entry.calls):
                shown = (_shown(name, arguments) for name, arguments in entry.calls)
                callers |= dict(zip(items[at].calls, shown, strict=True))
            answers = [callers[name] for name in (items[at].answers if same else ()) if name in callers]
            label = f"result of {', '.join(answers)}" if answers else (items[at].role if same else entry.role)
            if entry.role != "system":
                pieces.append(Piece(at + 1, label, _text(entry), at in hidden))
        return pieces


def _shown(name: str, arguments: str) -> str:
    text = f"{name}({' '.join(arguments.split())})"
    return text if len(text) <= LABEL else text[: LABEL - 4] + "...)"


def _text(entry: Entry) -> str:
    calls = (f"{name}({arguments})" for name, arguments in entry.calls)
    media = (f"[{kind}, not shown]" for kind in entry.media)
    return "\n".join(part for part in (entry.text, *calls, *media) if part)
