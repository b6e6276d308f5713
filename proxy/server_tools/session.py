"""Answers the calls of server tools within one answer, and calls the model again.

Theory of operation
===================

A ``ToolSession`` is one answer to a client. Each *generation* of it is one request to the model:

    generation 1    the view, which offers the tools
    generation 2    the view, what generation 1 wrote, the results of its calls, and the tools that these declare
    generation 3    all of that, what generation 2 wrote, and the results of its calls

``MOST_GENERATIONS`` bounds them; the results before the last one end with ``LAST``. Between two generations
``ask_again`` takes three steps:

1. Each tool executes its calls, once (``ServerTool.begin``). It returns a function for each call, which writes the
   result in a given number of tokens.
2. The next request is sent (``Planning.resend``), which calls ``extend`` with the view. ``extend`` computes the room
   that is left, has the results written in equal shares of it, and appends them to the view's items.
3. If the provider finds the request too long, ``extend`` is called again with a smaller view or fewer tokens, and the
   results are written again. Nothing else is done twice.

The room is the input budget less the view, everything appended, and a margin (``_room``). It is computed from the
provider's own count of the last prompt if that is credible, since ours may differ by some per cent.

Nothing is stored here. The request and its history stay in memory until its answer has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, TypeVar

from msgspec import structs

from proxy.core.apis.envelope import read_envelope, splice
from proxy.core.apis.json_edit import json_bytes
from proxy.core.apis.json_scan import scan
from proxy.core.apis.usage import read_usage
from proxy.core.decisions import API_FORMATS, Addition, CountedView
from proxy.core.report import NO_USAGE, Report
from proxy.engine.features import Planning
from proxy.engine.ports import Reply
from proxy.engine.reading import Reader
from proxy.server_tools import chat, messages, responses
from proxy.server_tools.merger import Call, ServerToolApi
from proxy.server_tools.tool import ServerTool, ToolResult, WriteResult
from proxy.tasks import offload

APIS: Mapping[str, ServerToolApi] = MappingProxyType({"chat": chat, "messages": messages, "responses": responses})

MOST_GENERATIONS: Final = 3
"""Generations of one answer at most, the first one included."""

MOST_CALLS: Final = 8
"""Calls of one generation that are answered: some read the whole history."""

LAST: Final = "(No such tool can be called again before your next answer.)"
TOO_MANY: Final = f"[Not answered: at most {MOST_CALLS} calls at once.]"

MARGIN_PART: Final = 64
"""Divisor of the window: tokens that stay free, because no provider counts exactly as we do."""

LEAST_REPORTED_SHARE: Final = 0.7
"""Share of our count below which a provider's count of a prompt is not used: some leave cached tokens out."""

ELEMENT_TOKENS: Final = 4
"""Tokens that a text may take more as part of an element than alone."""

T = TypeVar("T")


class ToolSession:
    """One answer to a client, of one or more generations. Holds the request until the answer has ended.

    ``recalls`` counts the generations after the first one. ``tokens`` is what all generations took, once there was more
    than one. ``first_usage`` is the usage of the first one.
    """

    def __init__(
        self, reader: Reader, tools: Sequence[ServerTool], view: CountedView, stream: bool, engine: Planning
    ) -> None:
        """Start with the answer to *view*, which offers *tools*; *stream* is True if the client requested a stream."""
        request = view.request
        self.api = APIS[request.api]
        self.recalls = 0
        self.tokens = 0
        self.first_usage = NO_USAGE
        self._api_format = API_FORMATS[request.api]
        self._count = reader.count(view.measured.known.route.encoding, view.measured.known.route.model)
        self._tools = {tool.name: tool for tool in tools}
        self.names = frozenset(self._tools)
        self._declared: dict[str, str] = {}
        self._request = request
        self._view = view
        self._stream = stream
        self._engine = engine
        self._appended: list[bytes] = []
        self._appended_tokens = 0
        self._retries = 0
        self._overflows = 0
        self._reported_input: int | None = None

    def complete(self, report: Report) -> Report:
        """Return *report* with the figures of later generations."""
        if not self.recalls:
            return report
        return report.with_(
            recalls=self.recalls,
            recall_tokens=self.tokens,
            retries=report.retries + self._retries,
            overflows=report.overflows + self._overflows,
        )

    def is_stream(self, content_type: str) -> bool:
        """True if a reply of this type is a stream: by its name, or because one was requested and it is no JSON."""
        return content_type.startswith("text/event-stream") or (self._stream and "json" not in content_type)

    def may_ask_again(self) -> bool:
        """True if one more generation is allowed."""
        return self.recalls + 1 < MOST_GENERATIONS

    def add_usage(self, usage: Any) -> None:
        """Add the tokens of one generation: as its *usage* reports them, else our count of its prompt."""
        reported = read_usage(usage)
        self._reported_input = reported.input_tokens
        if not self.recalls:
            self.first_usage = reported
        prompt = reported.input_tokens
        if prompt is None:
            prompt = int((self._view.counted + self._appended_tokens) * self._view.known.token_ratio)
        self.tokens += prompt + (reported.output_tokens or 0)

    async def ask_again(self, output: Any, calls: Sequence[Call]) -> tuple[Reply, bytes]:
        """Answer *calls* of an *output*; return the next generation's reply, and the bytes already read from it."""
        replayed = [json_bytes(element) for element in self.api.input_of(output, self._view.body)]
        writers = await self._begin(calls[:MOST_CALLS])
        added: list[bytes] = []
        declared: dict[str, str] = {}

        async def extend(view: CountedView, most: int | None) -> CountedView:
            results = await self._off_loop(lambda: self._results(view, most, output, replayed, writers))
            added[:] = [*replayed, *self._elements(output, [result.text for result in results])]
            declared.clear()
            for name, tool in chain.from_iterable(result.tools.items() for result in results):
                # Providers refuse two tools of one name, and calls of one generation may find the same.
                if name not in self._declared:
                    declared.setdefault(name, tool)
            return await self._off_loop(lambda: self._extended(view, added, declared))

        continued = await self._engine.resend(self._view, extend)
        self._view = continued.view
        self._appended += added
        self._declared |= declared
        self._appended_tokens = self._tokens_of(self._appended, self._declared.values())
        self.recalls += 1
        self._retries += continued.retries
        self._overflows += continued.overflows
        return continued.reply, continued.head

    async def _begin(self, calls: Sequence[Call]) -> list[tuple[Call, WriteResult]]:
        """Execute *calls* by their tools; return each call with the function that writes its result, in their order."""
        writers: dict[int, WriteResult] = {}
        for name, tool in self._tools.items():
            own = [index for index, call in enumerate(calls) if call.name == name]
            if own:
                results = await tool.begin(self._view, [calls[index].arguments for index in own])
                writers.update(zip(own, results, strict=True))
        return [(call, writers[index]) for index, call in enumerate(calls)]

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await offload(len(self._request.body), work)

    def _extended(self, view: CountedView, added: Sequence[bytes], declared: Mapping[str, str]) -> CountedView:
        """Return *view* with the elements of earlier generations and those *added* now appended to it.

        Tools that were *declared*, now or before, are appended to the others.
        """
        where = scan(view.body, self._api_format.LIST)
        end = where.spans[-1][1]
        appended = [*self._appended, *added]
        tools = [*self._declared.values(), *declared.values()]
        body = b"%b,%b%b" % (view.body[:end], b",".join(appended), view.body[end:])
        if tools:
            body = _with_tools(body, self._api_format.LIST, tools)
        return structs.replace(view, body=body, extension=self._tokens_of(appended, tools))

    def _tokens_of(self, elements: Sequence[bytes], tools: Iterable[str] = ()) -> int:
        items = sum(self._api_format.read_item(raw, self._count).tokens for raw in elements)
        return items + sum(map(self._count, tools))

    def _elements(self, output: Any, texts: Sequence[str]) -> list[bytes]:
        """Return the elements that answer all calls in *output*; calls beyond *texts* get ``TOO_MANY``."""
        server_calls = len(self.api.calls(output, self.names))
        whole = [*texts, *[TOO_MANY] * (server_calls - len(texts))]
        if self.recalls + 2 == MOST_GENERATIONS:
            # The generation that reads these results is the last one.
            whole[-1] += "\n" + LAST
        return [json_bytes(element) for element in self.api.results(output, self.names, whole)]

    def _results(
        self,
        view: CountedView,
        most: int | None,
        output: Any,
        replayed: Sequence[bytes],
        writers: Sequence[tuple[Call, WriteResult]],
    ) -> list[ToolResult]:
        """Return the results by *writers*, in the room that *view* leaves below *most* tokens."""
        empty = self._elements(output, [""] * len(writers))
        room = self._room(view, most, [*replayed, *empty])
        share = room // len(writers) - ELEMENT_TOKENS
        return [write(min(self._tools[call.name].max_tokens, share), self._count) for call, write in writers]

    def _room(self, view: CountedView, most: int | None, added: Sequence[bytes]) -> int:
        """Return the tokens that are left beside *view*, the elements appended to it, and those *added* now.

        With *most*, everything together stays below so many tokens by our count. The provider's count of this very
        prompt is used instead of ours if it is credible. A token ratio below one holds for the prompt as a whole, so
        added elements count in full.
        """
        budget, ratio = view.budget, view.known.token_ratio
        counted = view.counted + self._tokens_of(self._appended, self._declared.values())
        added_tokens = self._tokens_of(added)
        used = int(counted * ratio)
        if view is self._view and self._reported_input is not None:
            used = max(self._reported_input, int(used * LEAST_REPORTED_SHARE))
        input_tokens = int(budget.input_budget(view.lowered_output or budget.reserve) * ratio)
        input_tokens += sum(tool.reserved(view) for tool in self._tools.values())
        room = int((input_tokens - used) / max(1.0, ratio)) - added_tokens - budget.window // MARGIN_PART
        if most is None:
            return room
        return min(room, most - counted - added_tokens - 1)


def _with_tools(body: bytes, key: str, tools: Sequence[str]) -> bytes:
    """Return *body*, whose items are in the member *key*, with *tools* appended to its others."""
    where = scan(body, key)
    envelope = read_envelope(where.without_items(body).decode(), ())
    at = len(body[: where.start].decode())
    array = Addition(",".join(tools)).added_to(envelope.value_or_nothing("tools"))
    return splice(envelope, at, body[where.start : where.end], {"tools": array})
