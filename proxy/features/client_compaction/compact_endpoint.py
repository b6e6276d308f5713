"""Compactions answered by Ullage where a server has none: ``/responses/compact`` and ``compaction_trigger`` items.

No model is asked: what stands for the conversation is the block that stands for folded rounds in a view.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from proxy.core.apis import responses
from proxy.core.apis.json_steps import decode
from proxy.core.client_compaction import OTHER, TRIGGER
from proxy.core.compaction.block import FoldedItems, render_block
from proxy.core.compaction.schedule import NOTE
from proxy.core.compaction.truncate import clip
from proxy.core.decisions import MeasuredRequest
from proxy.core.models import Route
from proxy.core.request import Request
from proxy.core.tokens.budget import Shares
from proxy.engine.features import Feature, Planning
from proxy.engine.ports import Answer, Outcome, Records
from proxy.engine.reading import Located, Reader
from proxy.engine.replies import LocalReply
from proxy.engine.reports import report_of_local
from proxy.features.client_compaction.compaction_item import PREFIX, open_items, pack
from proxy.features.client_compaction.local_response import response_head
from proxy.offload import load_of, offload

Kind = Literal["endpoint", "trigger"]
"""How a compaction is asked for: on a path of its own, or by the last item of an ordinary request."""

AnsweredBy = Literal["auto", "relay", "own"]
"""Who answers it: the server if it can, the server, or Ullage."""

UNSUPPORTED = frozenset({404, 405, 501})
"""How servers without the path answer."""

REFUSED = frozenset({400, 422})
"""How servers answer an item they do not know."""

ASSUMED_WINDOW = 131_072
"""The window by which a block is sized where none is known."""

TAIL = 262_144
"""Bytes at a body's end in which the item that asks for a compaction is looked for: tools may follow it."""

EARLIER_SHARE = 0.5
"""Of the block, what an earlier compaction's text may take: the rest is for what came after it."""


@dataclass(frozen=True, slots=True)
class UpstreamCompaction:
    """What is wanted of one server: ``who`` answers; ``known``: it is one that makes compaction items.

    Others may take the item for an ordinary request, and answer it at full price with what no client can use.
    """

    who: AnsweredBy = "auto"
    known: bool = False

    def asks(self, kind: Kind) -> bool:
        """Whether the server is asked at all."""
        return self.who == "relay" or (self.who == "auto" and (kind == "endpoint" or self.known))


@dataclass(frozen=True, slots=True)
class OwnCompaction:
    """A compaction: the user's items that stay, as their bytes, the block's text, and what both sides weigh."""

    kept: tuple[bytes, ...]
    text: str
    taken: int
    given: int


class ClientCompaction(Feature):
    """Opens compaction items of ours, and answers requests for a compaction if their server does not.

    *resolve* gives the route of a model, *now* seconds since 1970, *serving* says by upstream what servers are asked.
    """

    markers = MappingProxyType({responses.API: (PREFIX.encode(), TRIGGER.encode())})
    purposes = frozenset({"compact"})

    def __init__(
        self,
        reader: Reader,
        records: Records,
        resolve: Callable[[str], Route],
        shares: Shares,
        now: Callable[[], float],
        serving: Mapping[str, UpstreamCompaction],
    ) -> None:
        self._reader = reader
        self._records = records
        self._resolve = resolve
        self._shares = shares
        self._now = now
        self._serving = serving

    async def prepare(self, request: Request, engine: Planning) -> Request:
        """*request* without compaction items of ours: their text stands in their place. Raises ``InvalidRequest``."""
        del engine
        if request.purpose == "compact":
            request = replace(request, client_compaction=request.client_compaction or OTHER)
        opened, _ = await self._opened(request)
        return opened

    async def answer(self, request: Request, engine: Planning) -> Outcome | None:
        """The server's answer to a request for a compaction, or our own; None if it asks for none."""
        kind = await self._kind(request)
        if kind is None:
            return None
        located = await self._reader.located(responses, request.tenant, request.body)
        envelope = located.outline
        route = self._resolve(request.path_model or envelope.model)
        serving = self._serving.get(route.upstream, UpstreamCompaction())
        relayed = envelope.stored or engine.mode_of(request) == "off"
        if relayed or serving.asks(kind):
            outcome = await engine.proceed(request)
            if relayed or serving.who == "relay" or not _is_unable(kind, outcome):
                return outcome
            engine.set_aside()
        return await self._own(request, kind, engine)

    async def _kind(self, request: Request) -> Kind | None:
        """How *request* asks for a compaction; None if it asks for none."""
        if request.purpose == "compact":
            return "endpoint"
        if request.api != responses.API or request.body.rfind(TRIGGER.encode(), -TAIL) < 0:
            return None
        located = await self._reader.located(responses, request.tenant, request.body)
        return "trigger" if ends_with_trigger(located) else None

    async def _opened(self, request: Request) -> tuple[Request, tuple[int, ...]]:
        """*request* without items of ours, and the indexes where they stood."""
        if request.api != responses.API or PREFIX.encode() not in request.body:
            return request, ()
        size, key = len(request.body), self._records.item_key()
        found = await offload(size, open_items, request.body, key, self._reader.most)
        return replace(request, body=found.body), found.ours

    async def _own(self, request: Request, kind: Kind, engine: Planning) -> Answer:
        """A compaction made here."""
        measured = await engine.measure(request, ASSUMED_WINDOW)
        _, ours = await self._opened(engine.received)
        made = await self.make(measured, kind, ours)
        envelope = measured.parsed.envelope
        model = request.path_model or envelope.model
        body, content_type = self.body(made, kind, model, stream=envelope.stream)
        report = report_of_local(measured, tokens_before=made.taken, overhead_seconds=engine.overhead)
        return Answer(report.but(window=measured.known.window or ASSUMED_WINDOW), LocalReply(body, content_type))

    async def make(self, measured: MeasuredRequest, kind: Kind, ours: Sequence[int]) -> OwnCompaction:
        """The compaction of a measured request; *ours* are the items that hold an earlier one."""
        size = load_of(len(measured.parsed.body), len(measured.parsed.items))
        return await offload(size, self._make, measured, kind, frozenset(ours))

    def _make(self, measured: MeasuredRequest, kind: Kind, ours: frozenset[int]) -> OwnCompaction:
        parsed, counts, figures, shares = measured.parsed, measured.counts, measured.budget, self._shares
        count = self._reader.count(measured.route.encoding, measured.route.model)
        raw = [parsed.item(i) for i in range(len(parsed.items))]
        told = [i for i, item in enumerate(parsed.items) if item.role != "system" and not is_trigger(raw[i])]
        entries = {i: responses.read_entry(raw[i]) for i in told}
        budget = max(figures.budget, figures.window // 4)
        most = int(shares.block * max(0, budget - figures.fixed)) or budget // 4
        text = min(int((shares.digest + shares.steps) * budget), max(NOTE, counts.history // 2), most)
        users = [i for i in told if parsed.items[i].role == "user" and i not in ours]
        kept = self._kept(users, parsed.items, int(shares.pins * budget)) if kind == "endpoint" else []
        pins = tuple(entries[i].text for i in users if i not in kept)
        block = min(int(shares.pins * budget) + text, most) + NOTE
        said = "\n".join(entries[i].text for i in kept)
        before = [clip(entries[i].text, int(block * EARLIER_SHARE) // len(ours), count) for i in sorted(ours)]
        folded = FoldedItems(tuple(entry for i, entry in entries.items() if i not in ours), pins, carrier_text=said)
        written = render_block(folded, block, text, count)
        whole = "\n\n".join([*before, written]).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        tokens = sum(parsed.items[i].tokens for i in kept) + count(whole)
        factor = measured.token_ratio
        taken = int(counts.total * factor)
        return OwnCompaction(tuple(_message(raw[i]) for i in kept), whole, taken, math.ceil(tokens * factor))

    @staticmethod
    def _kept(users: Sequence[int], items: Sequence[Any], tokens: int) -> list[int]:
        """The newest of the user's items that fit *tokens* together, in order."""
        kept: list[int] = []
        for index in reversed(users):
            tokens -= items[index].tokens
            if tokens < 0:
                break
            kept.append(index)
        return kept[::-1]

    def item(self, made: OwnCompaction) -> dict[str, str]:
        """The compaction item that holds *made*."""
        sealed = pack(made.text, self._records.item_key())
        name = hashlib.sha256(sealed.encode()).hexdigest()[:32]
        return {"type": "compaction", "id": f"cmp_{name}", "encrypted_content": sealed}

    def body(self, made: OwnCompaction, kind: Kind, model: str, *, stream: bool) -> tuple[bytes, str]:
        """The answer that holds *made*, and its content type."""
        item, created = self.item(made), int(self._now())
        if kind == "endpoint":
            named = {"id": "resp_" + item["id"][4:], "object": "response.compaction", "created_at": created}
            head = json.dumps(named)[:-1].encode()
            output = b",".join([*made.kept, json.dumps(item).encode()])
            usage = json.dumps(_usage(made)).encode()
            return head + b', "output": [' + output + b'], "usage": ' + usage + b"}", "application/json"
        done = _response(item, made, model, created)
        if not stream:
            return json.dumps(done).encode(), "application/json"
        return b"".join(_events(done, item)), "text/event-stream; charset=utf-8"


def _is_unable(kind: Kind, outcome: Outcome) -> bool:
    """True if *outcome* says that its server has no compactions."""
    if not isinstance(outcome, Answer):
        return False
    status = outcome.reply.status
    if status in UNSUPPORTED:
        return True
    return kind == "trigger" and status in REFUSED and b"compaction" in outcome.head


def _message(raw: bytes) -> bytes:
    """A user's item in the form of output items: as it is, with its content as a list of parts."""
    value = decode(raw)
    content = value.get("content")
    if value.get("type") == "message" and isinstance(content, list):
        return raw
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return json.dumps({"type": "message", **value, "content": parts}).encode()


def is_trigger(raw: bytes) -> bool:
    """Whether an item asks for a compaction."""
    return len(raw) < 256 and TRIGGER.encode() in raw and json.loads(raw).get("type") == TRIGGER


def ends_with_trigger(located: Located) -> bool:
    """Whether the last item of a located body asks for a compaction."""
    spans = located.scan.spans
    return bool(spans) and is_trigger(located.body[slice(*spans[-1])])


def _usage(made: OwnCompaction) -> dict[str, Any]:
    return {
        "input_tokens": made.taken,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": made.given,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": made.taken + made.given,
    }


def _response(item: Mapping[str, str], made: OwnCompaction, model: str, created: int) -> dict[str, Any]:
    return {**response_head(item["id"][4:], model, created), "output": [item], "usage": _usage(made)}


def _events(done: Mapping[str, Any], item: Mapping[str, str]) -> Iterator[bytes]:
    """The answer as the events clients wait for: they take the item from its own event, the usage from the last."""
    begun = {**done, "status": "in_progress", "output": [], "usage": None}
    told: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": {**item, "encrypted_content": ""}}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": done}),
    ]
    for number, (kind, members) in enumerate(told):
        data = json.dumps({"type": kind, "sequence_number": number, **members})
        yield f"event: {kind}\ndata: {data}\n\n".encode()
