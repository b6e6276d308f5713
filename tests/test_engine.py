"""The engine: one call where it fits, something smaller where the provider says no, everything else verbatim."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.budget.catalogue import Catalogue, Route, Rule
from proxy.core.compression.truncate import Truncate
from proxy.core.errors import InvalidRequest, UpstreamUnreachable
from proxy.core.report import Usage
from proxy.engine import HOLD_SECONDS, Answer, Counting, Engine
from proxy.fitting import Policy
from proxy.ports import Mode, Options, Reply, Request, Send
from tests import forms
from tests.fits import POLICY, TENANT, Book, Desk, Message, body_of, classifier, message_problems, outline_problems, slices
from tests.material import AGENT_TOOLS, agent_round, agent_session, prose
from tests.stub import Rules, judge
from tests.stub.rules import Wording, overflow_error
from tests.stub.tokens import request_tokens

WINDOW = 8192
ROUTE = Route("stub", "gpt-4o-mini", WINDOW, None, "o200k_base", "configured")
WORDINGS: tuple[Wording, ...] = ("openai", "anthropic", "vllm", "llamacpp")
JSON = (("Content-Type", "application/json"), ("x-request-id", "up-1"), ("retry-after", "7"))
SSE = (("content-type", "text/event-stream"),)
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"Hello"},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Given:
    """An upstream's answer of which everything is given: status, headers, and the chunks in which the body comes."""

    def __init__(self, status: int, chunks: Sequence[bytes | float], headers: Sequence[tuple[str, str]] = JSON) -> None:
        self.status = status
        self.headers = headers
        self.closed = False
        self.taken = 0
        self._chunks = list(chunks)

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")

    async def next_chunk(self) -> bytes:
        while self._chunks and isinstance(self._chunks[0], float):
            await asyncio.sleep(self._chunks[0])
            self._chunks.pop(0)
        self.taken += 1
        chunk = self._chunks.pop(0) if self._chunks else b""
        assert isinstance(chunk, bytes)
        return chunk

    def close(self) -> None:
        self.closed = True


class Upstream:
    """Keeps what it was sent and answers by *script*: a reply for each body."""

    def __init__(self, script: Callable[[bytes], Given]) -> None:
        self.bodies: list[bytes] = []
        self.names: list[str] = []
        self.replies: list[Given] = []
        self._script = script

    async def send(self, upstream: str, body: bytes, **named: Any) -> Reply:
        self.names.append(upstream)
        self.bodies.append(body)
        self.replies.append(self._script(body))
        return self.replies[-1]


def strict(stream: bool = False, **rules: Any) -> Upstream:
    """An upstream that judges as the strict stub does."""
    asked = Rules(**rules)

    def script(body: bytes) -> Given:
        verdict = judge(json.loads(body), asked)
        if verdict.kind == "ok":
            return Given(200, [ROLE, WORD, DONE], SSE) if stream else Given(200, [b'{"ok":true}'])
        assert verdict.kind == "overflow", verdict.message
        status, error = overflow_error(verdict, asked)
        return (
            Given(200, [b"data: " + error + b"\n\n", DONE], SSE) if asked.overflow_in_stream else Given(status, [error])
        )

    return Upstream(script)


def always(*replies: Given) -> Upstream:
    """An upstream that gives *replies* in turn, the last one for ever."""
    left = list(replies)

    def script(_: bytes) -> Given:
        return left.pop(0) if len(left) > 1 else left[0]

    return Upstream(script)


class Room:
    """An engine with real parts around it."""

    def __init__(
        self,
        window: int | None = WINDOW,
        mode: Mode = "on",
        counting: Counting = "auto",
        rules: Sequence[Rule] = (),
        owned: Sequence[str] = (),
        policy: Policy = POLICY,
    ) -> None:
        self.book = Book()
        self.desk = Desk(self.book, policy, owned=owned)
        self.time = 0.0
        catalogue = Catalogue([*rules, Rule("*", "stub", window)], {}, "stub")
        counted = {"stub": counting}
        desk = self.desk
        self.engine = Engine(
            catalogue,
            desk.fitter,
            mode,
            desk.lessons,
            self.clock,
            classifier(),
            counted,
            compacting=desk.compacting,
            managing=desk.managing,
        )

    def clock(self) -> float:
        self.time += 0.25
        return self.time

    async def ask(self, body: bytes, send: Send, api: str = "chat", **options: Any) -> Answer:
        return await self.engine.exchange(Request(api, body, TENANT, "r1", Options(**options)), send)

    async def count(self, body: bytes, send: Send) -> Answer:
        return await self.engine.count(Request("messages", body, TENANT, "r1"), send)


async def whole(answer: Answer) -> bytes:
    """Every byte of the answer, as the client gets them."""
    assert answer.reply is not None
    found = [answer.head]
    while chunk := await answer.reply.next_chunk():
        found.append(chunk)
    return b"".join(found)


def session(tokens: int, **members: Any) -> bytes:
    """An agent's request of about so many tokens."""
    return body_of(agent_session(tokens // 370, 300), **members)


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("shape", ["whole", "stream", "in stream"])
async def test_an_overflow_is_answered_with_something_smaller(wording: Wording, shape: str) -> None:
    """A provider whose window is smaller than we thought gets a smaller view; the client sees only the success."""
    upstream = strict(shape != "whole", window=5000, wording=wording, overflow_in_stream=shape == "in stream")
    body = session(6200, **({} if shape == "whole" else {"stream": True}))
    answer = await Room().ask(body, upstream.send)
    assert await whole(answer) == (b'{"ok":true}' if shape == "whole" else ROLE + WORD + DONE)
    assert answer.reply is not None
    assert answer.reply.status == 200
    assert answer.report.retries == answer.report.overflows == len(upstream.bodies) - 1 >= 1
    assert answer.report.outcome == "compacted"
    sizes = [request_tokens(json.loads(sent)) for sent in upstream.bodies]
    assert sizes == sorted(set(sizes), reverse=True)
    assert all(reply.closed for reply in upstream.replies[:-1])
    assert not upstream.replies[-1].closed


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_provider_that_never_has_enough_gets_two_retries(wording: Wording, stream: bool) -> None:
    """After two smaller attempts the first error goes to the client: its status, its headers and all its bytes."""
    verdict = judge(json.loads(session(6200)), Rules(window=2500))
    status, error = overflow_error(verdict, Rules(window=2500, wording=wording))
    first = (
        Given(200, [ROLE, b"data: " + error[:20], error[20:] + b"\n\n", DONE], SSE)
        if stream
        else Given(status, [error[:9], error[9:]], (*JSON, ("x-request-id", "again")))
    )
    said = ROLE + b"data: " + error + b"\n\n" + DONE if stream else error
    later = Given(200, [b"data: " + error + b"\n\n"], SSE) if stream else Given(status, [error])
    upstream = always(first, later, Given(later.status, list(later._chunks), later.headers))
    answer = await Room().ask(session(6200, stream=stream), upstream.send)
    sizes = [request_tokens(json.loads(sent)) for sent in upstream.bodies]
    assert 1 < len(sizes) <= 3
    assert sizes == sorted(set(sizes), reverse=True)
    assert answer.reply is not None
    assert answer.reply.status == first.status
    assert list(answer.reply.headers) == list(first.headers)
    assert await whole(answer) == said
    assert (answer.report.outcome, answer.report.reason) == ("degraded", "overflow")
    assert answer.report.overflows == len(sizes)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, b'{"error":{"message":"Invalid value for temperature","code":"invalid_value"}}'),
        (400, b'{"error":{"message":"string too long. Expected a string with maximum length 1024","code":"x"}}'),
        (400, b"not json"),
        (401, b'{"error":{"message":"Incorrect API key"}}'),
        (404, b""),
        (413, b'{"error":{"message":"no upload here"}}'),
        (
            429,
            b'{"error":{"message":"Rate limit: maximum context length tokens per min","code":"rate_limit_exceeded"}}',
        ),
        (500, b'{"error":{"message":"The server had an error"}}'),
        (503, b"busy"),
    ],
)
async def test_every_other_error_passes_verbatim(status: int, error: bytes) -> None:
    """An error that is no overflow costs one call and arrives as it was, headers included."""
    upstream = always(Given(status, [error[:4], error[4:]] if error else []))
    answer = await Room().ask(session(6200), upstream.send)
    assert len(upstream.bodies) == 1
    assert answer.reply is upstream.replies[0]
    assert await whole(answer) == error
    assert answer.report.retries == answer.report.overflows == 0
    assert not upstream.replies[0].closed


async def test_an_overflow_after_content_passes() -> None:
    """Once the model has spoken nothing is retried, whatever comes behind."""
    error = b'data: {"error":{"message":"maximum context length exceeded","code":"context_length_exceeded"}}\n\n'
    upstream = always(Given(200, [ROLE, WORD, error], SSE))
    answer = await Room().ask(session(6200, stream=True), upstream.send)
    assert await whole(answer) == ROLE + WORD + error
    assert len(upstream.bodies) == 1


@pytest.mark.parametrize("cuts", [1, 7, 40, 10_000])
async def test_the_hold_ends_with_the_first_word(cuts: int) -> None:
    """Of a stream only what comes before the first content is held, and every byte arrives in order."""
    opening = b": comment\n\n" + ROLE + b'event: ping\ndata: {"type":"ping"}\n\n' + WORD
    pieces = [opening[at : at + cuts] for at in range(0, len(opening), cuts)]
    upstream = always(Given(200, [*pieces, b"rest of it", DONE], SSE))
    answer = await Room().ask(session(6200, stream=True), upstream.send)
    assert upstream.replies[0].taken == len(pieces)
    assert answer.head == opening
    assert await whole(answer) == opening + b"rest of it" + DONE


async def test_the_hold_ends_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that begins and then says nothing is passed on with what came so far."""
    monkeypatch.setattr("proxy.engine.HOLD_SECONDS", 0.05)
    assert HOLD_SECONDS <= 5
    upstream = always(Given(200, [ROLE, 0.5, WORD], SSE))
    answer = await Room().ask(session(6200, stream=True), upstream.send)
    assert answer.head == ROLE
    assert await whole(answer) == ROLE + WORD


async def test_a_small_stream_is_not_held() -> None:
    """Where the view is under half the budget no byte is taken before the client reads."""
    upstream = always(Given(200, [ROLE, WORD], SSE))
    answer = await Room().ask(session(1500, stream=True), upstream.send)
    assert (answer.head, upstream.replies[0].taken) == (b"", 0)


@pytest.mark.parametrize("headers", [(("content-type", "application/json"),), ()])
async def test_what_is_neither_events_nor_an_object_is_not_held(headers: tuple[tuple[str, str], ...]) -> None:
    """A 200 whose first bytes are those of no event and no JSON goes straight on."""
    upstream = always(Given(200, [b"xxxxx", b"y"], headers))
    answer = await Room().ask(session(6200, stream=True), upstream.send)
    assert answer.head == b"xxxxx"
    assert await whole(answer) == b"xxxxxy"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_overflow_in_an_object_with_status_200(stream: bool) -> None:
    """An error object that comes with status 200, asked for as a stream or not, is made good like any other."""
    told = b'{"error": {"message": "maximum context length is 4000 tokens", "code": "context_length_exceeded"}}'
    answers = iter([Given(200, [told[:20], told[20:]], JSON), Given(200, [b'{"choices": []}'], JSON)])
    upstream = Upstream(lambda _: next(answers))
    answer = await Room().ask(session(6200, stream=stream), upstream.send)
    assert len(upstream.bodies) == 2
    assert await whole(answer) == b'{"choices": []}'


async def test_a_compressed_error_is_understood_and_passed_compressed() -> None:
    """A gzipped overflow is recognised; the one that is passed on keeps its bytes."""
    _, error = overflow_error(judge(json.loads(session(6200)), Rules(window=3000)), Rules(window=3000))
    packed = gzip.compress(error)
    upstream = Upstream(lambda _: Given(400, [packed], (*JSON, ("content-encoding", "gzip"))))
    answer = await Room().ask(session(6200), upstream.send)
    assert len(upstream.bodies) > 1
    assert await whole(answer) == packed


async def test_an_unknown_window_is_learned_from_the_first_overflow() -> None:
    """Nothing is compressed ahead of an unknown window; once it is told, the next request fits without an overflow."""
    room, upstream = Room(window=None), strict(window=4000)
    messages = agent_session(18, 300)
    body = body_of(messages)
    first = await room.ask(body, upstream.send)
    assert upstream.bodies[0] is body
    assert first.report.retries == 1
    grown = body_of([*messages, *agent_round(99, 100)])
    second = await room.ask(grown, upstream.send)
    assert second.report.retries == 0
    assert second.report.window == 4000
    assert slices(upstream.bodies[-1])[: len(slices(upstream.bodies[-2]))] == slices(upstream.bodies[-2])


async def test_an_overflow_that_states_nothing_is_recovered_from_and_invents_no_window() -> None:
    """Where neither we nor the error know the window, the view shrinks all the same and no window is told."""
    bare = b'{"error":{"message":"too long","code":"context_length_exceeded"}}'
    upstream = always(Given(400, [bare]), Given(200, [b'{"ok":true}']))
    answer = await Room(window=None).ask(session(6200), upstream.send)
    assert await whole(answer) == b'{"ok":true}'
    assert len(upstream.bodies[1]) < len(upstream.bodies[0])
    assert (answer.report.window, answer.report.budget, answer.report.retries) == (None, None, 1)


async def test_what_is_learned_stays_with_its_tenant() -> None:
    """One caller's overflow changes nothing for another."""
    room, upstream = Room(window=None), strict(window=4000)
    await room.ask(session(6000), upstream.send)
    assert (await room.engine.fit(Request("chat", session(6000), TENANT, "r2", Options()))).report.window == 4000
    plan = await room.engine.fit(Request("chat", session(6000), b"o" * 32, "r2", Options()))
    assert plan.report.reason == "unknown-window"


@pytest.mark.parametrize("wording", ["openai", "anthropic", "llamacpp"])
async def test_stated_prompt_tokens_correct_the_count(wording: Wording) -> None:
    """A provider that counts half as much again is believed: the next requests fit at once, by its own count."""
    room, upstream = Room(), strict(window=WINDOW, wording=wording, factor=1.5)
    messages = agent_session(18, 300)
    answer = await room.ask(body_of(messages), upstream.send)
    assert answer.report.retries == 1
    assert 1.4 <= room.desk.lessons.now(ROUTE, TENANT).lesson.calibration.factor <= 1.6
    for at in range(12):
        messages += agent_round(100 + at, 300)
        again = await room.ask(body_of(messages), upstream.send)
        assert again.report.retries == 0
        assert await whole(again) == b'{"ok":true}'


async def test_an_output_figure_that_is_too_large_is_lowered_first() -> None:
    """Where input and output together are too much, the output figure gives way before any message does."""
    upstream = strict(window=5000, wording="vllm")
    body = body_of([{"role": "user", "content": prose(1, 3000)}], max_tokens=3500)
    answer = await Room().ask(body, upstream.send)
    assert answer.report.retries == 1
    first, second = map(json.loads, upstream.bodies)
    assert second["messages"] == first["messages"]
    assert 1000 <= second["max_tokens"] < first["max_tokens"]
    assert "output" in answer.report.stages


@pytest.mark.parametrize("mode", ["off", "observe"])
@pytest.mark.parametrize("asked", ["configured", "by the request"])
async def test_other_modes_change_nothing(mode: Mode, asked: str) -> None:
    """Off and observe send the client's own bytes and hand back the provider's own error, once."""
    room = Room(mode=mode if asked == "configured" else "on")
    upstream = strict(window=4000)
    body = session(12_000)
    options: dict[str, Any] = {} if asked == "configured" else {"mode": mode}
    answer = await room.ask(body, upstream.send, **options)
    assert len(upstream.bodies) == 1
    assert upstream.bodies[0] is body
    assert answer.reply is not None
    assert answer.reply.status == 400
    assert answer.report.observed is (mode == "observe")
    if mode == "observe":
        assert answer.report.tokens_after is not None
        assert answer.report.tokens_after < request_tokens(json.loads(body))


async def test_observing_leaves_no_trace_in_what_is_sent_later() -> None:
    """A conversation that was only observed, even asked to compact, is compacted later as if nobody had looked."""
    room, messages = Room(), agent_session(34, 300)
    upstream, other = strict(window=10**9), strict(window=WINDOW)
    events = []
    for end in range(24, len(messages) + 1, 2):
        answer = await room.ask(body_of(messages[:end]), upstream.send, mode="observe", compact_now=end == 24)
        events.append(answer.report.event)
        assert answer.report.reason == "would_compact"
    assert 1 <= sum(events) <= 3
    await room.ask(body_of(messages), other.send)
    assert other.bodies[0] == (await Room().engine.fit(Request("chat", body_of(messages), TENANT, "r"))).body
    assert all(json.loads(body)["messages"] == messages[: 24 + 2 * at] for at, body in enumerate(upstream.bodies))


async def test_observing_says_what_would_be_refused() -> None:
    """What could not be brought inside the window passes, and the report says that it would not."""
    upstream = strict(window=10**9)
    body = body_of([{"role": "system", "content": prose(1, 9000)}, {"role": "user", "content": "hi"}])
    answer = await Room(mode="observe").ask(body, upstream.send)
    assert upstream.bodies == [body]
    assert answer.report.reason == "would_refuse"
    assert answer.error is None


@pytest.mark.parametrize(("asked", "held"), [(4000, 4000), (50_000, WINDOW)])
async def test_the_window_header_only_lowers(asked: int, held: int) -> None:
    """A caller may ask for less than the model's window, never for more."""
    upstream = strict(window=held)
    answer = await Room().ask(session(12_000), upstream.send, window=asked)
    assert answer.report.window == held
    assert answer.report.source == ("request" if asked < WINDOW else "configured")
    assert answer.report.retries == 0
    assert await whole(answer) == b'{"ok":true}'


async def test_compact_now_compacts_what_would_fit() -> None:
    """With the header a conversation above the low mark is compacted under the high one, once, and stays so."""
    room, upstream = Room(), strict(window=WINDOW)
    messages = agent_session(14, 300)
    plain = await Room().ask(body_of(messages), upstream.send)
    assert plain.report.outcome == "verbatim"
    answer = await room.ask(body_of(messages), upstream.send, compact_now=True)
    assert answer.report.outcome == "compacted"
    assert answer.report.event
    later = await room.ask(body_of([*messages, *agent_round(99, 20)]), upstream.send)
    assert slices(upstream.bodies[-1])[: len(slices(upstream.bodies[-2]))] == slices(upstream.bodies[-2])
    assert not later.report.event


async def test_a_refusal_is_never_sent() -> None:
    """What cannot be brought inside the window is answered here, with nothing paid for."""
    upstream = strict(window=WINDOW)
    body = body_of([{"role": "system", "content": prose(1, 9000)}, {"role": "user", "content": "hi"}])
    answer = await Room().ask(body, upstream.send)
    assert upstream.bodies == []
    assert answer.reply is None
    assert answer.error is not None
    assert answer.error.status == 400
    assert (answer.report.outcome, answer.report.reason) == ("refused", "context_length_exceeded")


async def test_a_small_body_is_bounded_and_not_counted() -> None:
    """A body whose bytes are under the low mark is sent as it is, with bounds for figures."""
    upstream = strict(window=WINDOW)
    body = body_of([{"role": "user", "content": "hi"}], tools=AGENT_TOOLS)
    answer = await Room().ask(body, upstream.send)
    assert upstream.bodies[0] is body
    assert answer.report.bounded
    assert answer.report.tokens_after is not None
    assert answer.report.tokens_after >= request_tokens(json.loads(body))
    assert upstream.names == ["stub"]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "https://e.org/a.png"}}],
        [{"type": "file", "file": {"file_id": "f-1"}}],
        [{"type": "input_audio", "input_audio": {"data": "QUFB", "format": "wav"}}],
    ],
)
async def test_media_is_never_bounded_by_its_bytes(content: list[Message]) -> None:
    """A part that weighs more than its bytes say is counted."""
    answer = await Room().ask(body_of([{"role": "user", "content": content}]), strict(window=WINDOW).send)
    assert not answer.report.bounded


async def test_a_body_that_is_no_request_is_invalid() -> None:
    """What cannot be read is an error of the caller, before anything is sent."""
    upstream = strict()
    for body in (b"", b"[]", b'{"model":"m"}', b'{"model":"m","model":"n","messages":[]}', b'{"messages":7}'):
        with pytest.raises(InvalidRequest):
            await Room().ask(body, upstream.send)
    assert upstream.bodies == []


async def test_a_connection_that_fails_is_the_callers_to_know() -> None:
    """What sending raises goes through, after one call; a reply that breaks while it is judged is closed."""

    class Broken(Given):
        async def next_chunk(self) -> bytes:
            raise UpstreamUnreachable("stub", "reset")

    upstream = always(Broken(400, []))
    with pytest.raises(UpstreamUnreachable):
        await Room().ask(session(6200), upstream.send)
    assert len(upstream.bodies) == 1
    assert upstream.replies[0].closed


async def test_a_huge_error_is_passed_unread() -> None:
    """An error answer above a megabyte is relayed whole and taken for no overflow."""
    piece = b"maximum context length is 10 tokens " * 3000
    upstream = always(Given(400, [piece] * 20))
    answer = await Room().ask(session(6200), upstream.send)
    assert len(upstream.bodies) == 1
    assert await whole(answer) == piece * 20


async def test_only_our_own_time_is_overhead() -> None:
    """The clock runs while a request is fitted and while a smaller one is found, not while the provider answers."""
    room, upstream = Room(), strict(window=5000)
    answer = await room.ask(session(6200), upstream.send)
    assert answer.report.retries == 1
    assert answer.report.overhead_seconds == pytest.approx(0.5)


async def test_every_attempt_is_a_faithful_view() -> None:
    """Retries too keep pairs, systems and bytes."""
    upstream = strict(window=3000)
    body = session(6200, tools=AGENT_TOOLS)
    answer = await Room().ask(body, upstream.send)
    assert answer.report.retries >= 1
    for sent in upstream.bodies[1:]:
        assert message_problems(body, sent) == []
        assert outline_problems(body, sent) == []


def test_the_engine_tells_who_serves_a_model() -> None:
    """The upstream of a model is what the catalogue says."""
    assert Room().engine.upstream_of("anything") == "stub"


async def test_no_more_than_three_calls() -> None:
    """However small the views become, a provider that says no to everything is asked three times."""
    refusal = b'{"error":{"message":"exceeds the context window","code":"context_length_exceeded"}}'
    upstream = Upstream(lambda _: Given(400, [refusal]))
    answer = await Room(window=32_768).ask(session(25_000), upstream.send)
    assert len(upstream.bodies) == 3
    assert await whole(answer) == refusal
    assert (answer.report.retries, answer.report.overflows) == (2, 3)


def asked(api: str, rounds: int, **members: Any) -> bytes:
    """An agent's request of another API."""
    return json.dumps(forms.body_of(api, agent_session(rounds, 300), AGENT_TOOLS, **members)).encode()


async def test_a_count_is_the_upstreams_where_it_has_one() -> None:
    """The view goes up to be counted, and the answer comes back as it is; nothing is recorded."""
    room, upstream = Room(), always(Given(200, [b'{"input_tokens":77}']))
    body = asked("messages", 40)
    answer = await room.count(body, upstream.send)
    assert await whole(answer) == b'{"input_tokens":77}'
    assert answer.report.api == "count_tokens"
    assert len(upstream.bodies[0]) < len(body)
    assert room.book.records() == []


COMPACT = {"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 4000}}]}


@pytest.mark.parametrize(("system", "said"), [(6000, 10), (10, 6000)])
async def test_a_size_to_compact_from_refuses_and_clips_nothing(system: int, said: int) -> None:
    """What fits the window but not the size from which a client wants compaction goes up with every word of it."""
    room, upstream = Room(20_000, owned=["stub"]), always(Given(200, [b"{}"]))
    body: dict[str, Any] = {"model": "m", "max_tokens": 500, "system": prose(1, system)}
    body["messages"] = [{"role": "user", "content": prose(2, said)}]
    answer = await room.ask(json.dumps({**body, "context_management": COMPACT}).encode(), upstream.send, "messages")
    assert answer.report.outcome == "verbatim"
    assert json.loads(upstream.bodies[0]) == body
    assert room.book.records() == []


async def test_a_count_for_a_fallback_takes_no_key_along_and_records_nothing() -> None:
    """Where another model would answer, its upstream is asked without the client's key, and nothing is recorded."""
    small = Rule("small", "stub", 2048, steps=("", "big"))
    room = Room(rules=[Rule("big", "other", WINDOW), small])
    keyless: list[tuple[str, bool]] = []
    upstream = always(Given(200, [b'{"input_tokens":77}']))

    async def send(name: str, body: bytes, **named: Any) -> Reply:
        keyless.append((name, named.get("keyless", False)))
        return await upstream.send(name, body, **named)

    body = json.dumps({**json.loads(asked("messages", 40, model="small")), "system": prose(1, 3_000)}).encode()
    answer = await room.count(body, send)
    assert answer.report.fallback == "big"
    assert keyless == [("other", True)]
    assert room.book.records() == []


@pytest.mark.parametrize(("counting", "status", "sent"), [("auto", 404, 1), ("auto", 405, 1), ("own", 200, 0)])
async def test_a_count_is_ours_where_the_upstream_has_none(counting: Counting, status: int, sent: int) -> None:
    """An upstream that cannot count, or is not to be asked, leaves it to us; so does an unknown window."""
    for room in (Room(counting=counting), Room(None, counting=counting)):
        upstream = always(Given(status, [b"{}"]))
        for rounds in (1, 8, 40):
            answer = await room.count(asked("messages", rounds), upstream.send)
            tokens = json.loads(await whole(answer))["input_tokens"]
            assert answer.reply is not None
            assert answer.reply.status == 200
            assert answer.reply.header("Content-Type") == "application/json"
            assert 100 * rounds < tokens or tokens < WINDOW
        assert len(upstream.bodies) == 3 * sent
        assert all(reply.closed for reply in upstream.replies)


@pytest.mark.parametrize(("counting", "status"), [("relay", 404), ("auto", 401), ("auto", 500)])
async def test_every_other_answer_to_a_count_passes(counting: Counting, status: int) -> None:
    """Errors that do not say that there is no such route are the upstream's answer."""
    answer = await Room(counting=counting).count(asked("messages", 2), always(Given(status, [b"no"])).send)
    assert answer.reply is not None
    assert (answer.reply.status, await whole(answer)) == (status, b"no")


STORED = {"previous_response_id": "resp_1"}
TOO_LONG = (
    b'{"error":{"message":"Your input exceeds the context window of this model.","code":"context_length_exceeded"}}'
)


async def test_a_stored_history_is_left_to_the_provider() -> None:
    """An overflow of what only the provider has is answered with leave to truncate, once, and teaches nothing."""
    room, body = Room(), json.dumps({"model": "m", "input": "Go on.", **STORED}).encode()
    upstream = always(Given(400, [TOO_LONG]), Given(200, [b"{}"]))
    answer = await room.ask(body, upstream.send, "responses")
    assert await whole(answer) == b"{}"
    assert answer.report.stages == ("truncation",)
    assert [json.loads(sent).get("truncation") for sent in upstream.bodies] == [None, "auto"]
    assert {**json.loads(upstream.bodies[1]), "truncation": 0} == {**json.loads(body), "truncation": 0}
    assert room.book.lessons == {}
    never = always(Given(400, [TOO_LONG]), Given(400, [TOO_LONG]))
    assert await whole(await room.ask(body, never.send, "responses")) == TOO_LONG
    assert len(never.bodies) == 2


async def test_a_client_that_wants_no_truncation_gets_the_error() -> None:
    """Whatever the client said of truncation stands."""
    for said in ("disabled", "auto", None):
        body = json.dumps({"model": "m", "input": "Go on.", "truncation": said, **STORED}).encode()
        upstream = always(Given(400, [TOO_LONG]))
        assert await whole(await Room().ask(body, upstream.send, "responses")) == TOO_LONG
        assert upstream.bodies == [body]


async def test_what_the_provider_adds_teaches_nothing() -> None:
    """Usage that counts what hosted tools found, or a stored prompt, says nothing of our count."""
    hosted = {**json.loads(asked("responses", 14)), "tools": [{"type": "web_search"}]}
    for body in (json.dumps(hosted).encode(), asked("responses", 14, prompt={"id": "p"})):
        room = Room()
        answer = await room.ask(body, strict_responses().send, "responses")
        assert not answer.learn(Usage(40_000, 5, None))
        assert room.desk.lessons.now(ROUTE, TENANT).lesson.calibration.factor == 1.0


def strict_responses() -> Upstream:
    """An upstream that takes everything."""
    return always(Given(200, [b"{}"]))


async def test_the_client_names_its_conversation() -> None:
    """The own header wins over the client's session, that over the body's, that over the chain; views do not follow."""
    room, upstream = Room(), strict_responses()
    body = asked("messages", 40, metadata={"user_id": '{"session_id":"s-9"}'})

    async def named(session: str = "", own: str = "") -> str:
        request = Request("messages", body, TENANT, "r1", Options(conversation=own), session=session, epoch=2)
        answer = await room.engine.exchange(request, upstream.send)
        assert answer.report.epoch == 2
        return answer.report.conversation

    names = [await named("s-1", "mine"), await named("s-1"), await named(), await named("s-9"), await named("s-1")]
    assert names[2] == names[3]
    assert names[1] == names[4]
    assert len(set(names)) == 3
    assert len(set(upstream.bodies[1:])) == 1


async def test_a_learned_window_is_said_to_be_learned() -> None:
    """Once an overflow stated the window of a route, reports and what people are shown name that as its source."""
    room, upstream = Room(window=None), strict(window=4000)
    first = await room.ask(session(6200), upstream.send, project="apollo", task_size="small")
    assert (first.report.window, first.report.source) == (4000, "learned")
    assert (first.report.project, first.report.task_size) == ("apollo", "small")
    shown = room.engine.windows()
    assert [(each["route"], each["context_window"]) for each in shown["learned"]] == [("stub,gpt-4o-mini", 4000)]
    assert [(each["model"], each["source"]) for each in shown["models"]] == [("gpt-4o-mini", "unknown")]


async def test_what_goes_wrong_beside_an_answer_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in what is done after an answer is reported to the loop; the client gets its answer whole."""
    room, failed = Room(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["exception"]))

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(room.desk.fitter, "answered", broken)
    answer = await room.ask(session(600), always(Given(200, [b'{"choices": []}'], JSON)).send)
    assert await whole(answer) == b'{"choices": []}'
    await asyncio.sleep(0)
    assert [type(error) for error in failed] == [ZeroDivisionError]


@pytest.mark.parametrize("window", [None, 200_000])
async def test_what_is_counted_is_what_would_be_sent(window: int | None) -> None:
    """Results that are capped before they are first sent are counted as capped, known window or not."""
    body = asked("messages", 6)
    policy = replace(POLICY, always=Truncate(5, 50_000))
    told = []
    for room in (Room(window, counting="own"), Room(window, counting="own", policy=policy)):
        answer = await room.count(body, always(Given(500, [])).send)
        told.append(json.loads(await whole(answer))["input_tokens"])
    assert told[1] < 0.7 * told[0]
