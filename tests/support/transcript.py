"""Transcripts: what a client, the engine and the upstreams say to each other, written down and played.

A transcript is a text of rows, read from top to bottom. `>>` is what the engine gets, `<<` what it says:

    client   >> session                          the client sends the value called "session"
    upstream << stub, session                    the engine sends exactly that to the upstream "stub"
    upstream >> overflow                         which is more than the upstream's window
    upstream << stub, smaller, view of session   so the engine sends a smaller, faithful view
    upstream >> ok
    client   << 200 ok                           and the client gets the second reply, whole
    report   : outcome=compacted retries=1

Rows must come exactly in this order, and no call may be made that has no row. Each `client >>` begins another exchange
with the same engine. Behind `#` stands a remark. Items of a row are parted by commas:

client >>    a value's name, then any of `api=…`, `mode=…`, `path_model=…`, `count` (asks for a count of tokens)
upstream <<  the upstream's name, then what must hold of the body: a value's name (these bytes), `smaller` (fewer tokens
             than the call before, other bytes), `tokens<=0.75` (of the call before), `view of NAME` (faithful to it),
             `extends` (begins with the messages of the newest call of the exchange before), `same messages`,
             `other messages` (than the call before), `max_tokens=5` or `max_tokens in 1000..3499` (any member),
             `without TEXT`, `with TEXT`, `keyless` (no credential of the client's), `with key`
upstream >>  `overflow` and `ok`: the strict judge must come to that verdict, and words the answer; a status and the
             name of its body; `unreachable` (no connection), `breaks STATUS` (the connection ends before the body)
client <<    a status and `ok`, a value's name or `reply N` (status, headers and bytes of the Nth reply of this
             exchange); `reply N unread` (the very object); `refused CODE`; `raises NAME`
report :     fields of the report as `name=value`, `-` for None, `a+b` for a tuple, `name~part` for "contains"
replies :    for each reply of the exchange in turn, `closed` or `open`
learned :    `nothing`, or the windows that were learned
records :    the number of compaction records
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.core.errors import UpstreamUnreachable
from proxy.core.request import Options, Origin, Request
from proxy.engine.ports import Reply, Upgradable
from tests.stub import Rules, judge
from tests.stub.rules import overflow_error
from tests.stub.tokens import request_tokens
from tests.support.engine_fixtures import TENANT, message_slices
from tests.support.plan_checks import message_problems, outline_problems
from tests.support.scripted_upstream import (
    DONE,
    JSON,
    ROLE,
    SSE,
    WORD,
    EngineFixture,
    Exchanged,
    ScriptedReply,
    read_whole,
)

KEY, OTHER = ("authorization", "Bearer own"), ("accept", "*/*")
OK = b'{"ok":true}'
Value = bytes | Sequence[bytes]
"""A body; in pieces it comes in chunks, and is a stream of events if it begins with ``data:``."""


@dataclass(frozen=True)
class Row:
    """One row: who (``client``, ``upstream``, ``report`` …), the direction, the items, and where it stands."""

    who: str
    direction: str
    items: tuple[str, ...]
    line: str

    @property
    def kind(self) -> str:
        return f"{self.who} {self.direction}".strip()


@dataclass
class Call:
    """One call of the engine's, and the reply to it."""

    upstream: str
    body: bytes
    headers: Sequence[tuple[str, str]]
    reply: ScriptedReply | None = None
    whole: bytes = b""


@dataclass
class Played:
    """One exchange as it went."""

    calls: list[Call] = field(default_factory=list)
    exchanged: Exchanged | None = None
    error: Exception | None = None

    @property
    def answer(self) -> Exchanged:
        assert self.exchanged is not None, self.error
        return self.exchanged

    @property
    def bodies(self) -> list[bytes]:
        return [call.body for call in self.calls]


@dataclass
class Judge:
    """The strict upstream's verdicts: the ``rules`` of each upstream, by name or for all; ``stream`` if it streams."""

    rules: Rules | Mapping[str, Rules] = field(default_factory=Rules)
    stream: bool = False

    def answer(self, upstream: str, body: bytes) -> tuple[str, ScriptedReply]:
        rules = self.rules if isinstance(self.rules, Rules) else self.rules[upstream]
        verdict = judge(json.loads(body), rules)
        assert verdict.kind != "invalid", verdict.message
        if verdict.kind == "ok":
            return "ok", ScriptedReply(200, [ROLE, WORD, DONE], SSE) if self.stream else ScriptedReply(200, [OK])
        status, error = overflow_error(verdict, rules)
        if rules.overflow_in_stream:
            return "overflow", ScriptedReply(200, [b"data: " + error + b"\n\n", DONE], SSE)
        return "overflow", ScriptedReply(status, [error])


class Breaking(ScriptedReply):
    """A reply whose connection breaks before its body came."""

    async def next_chunk(self) -> bytes:
        raise UpstreamUnreachable("stub", "reset")


def rows_of(text: str) -> list[Row]:
    """The rows of a transcript. Raises ``ValueError`` for a line that is none."""
    rows = []
    for line in text.splitlines():
        content = line.split("#")[0].strip()
        if not content:
            continue
        match = re.fullmatch(r"(client|upstream)\s*(>>|<<)\s*(.*)|(report|replies|learned|records)\s*:\s*(.*)", content)
        if match is None:
            raise ValueError(f"not a row: {line!r}")
        who, direction, items = match[1] or match[4], match[2] or "", match[3] or match[5] or ""
        parted = items.split() if who == "report" else [item.strip() for item in items.split(",")]
        rows.append(Row(who, direction, tuple(item for item in parted if item), content))
    return rows


async def play(
    text: str,
    engine: EngineFixture | None = None,
    judge: Judge | None = None,
    **values: Value,
) -> list[Played]:
    """Play the transcript *text* with *engine*; *values* are the bodies that it names. Return its exchanges."""
    player = Player(engine or EngineFixture(), judge or Judge(), values)
    rows = rows_of(text)
    assert rows[:1], "an empty transcript"
    starts = [at for at, row in enumerate(rows) if row.kind == "client >>"]
    assert starts[:1] == [0], "a transcript begins with what a client sends"
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        await player.exchange(rows[start:end])
    return player.played


class Player:
    """Plays exchanges in turn; stands as the upstream of the engine that it drives."""

    def __init__(self, engine: EngineFixture, judge: Judge, values: Mapping[str, Value]) -> None:
        self.engine = engine
        self.played: list[Played] = []
        self._judge = judge
        self._values = values
        self._script: list[Row] = []
        self._problems: list[str] = []

    async def exchange(self, rows: Sequence[Row]) -> None:
        """Send what the first row says, answer as the upstream's rows say, and check all others."""
        self._script = [row for row in rows if row.who == "upstream"]
        self.played.append(Played())
        self._problems.clear()
        played = self.played[-1]
        try:
            played.exchanged = await self.engine.exchange(self._request(rows[0]), self)
        except Exception as error:
            played.error = error
        assert not self._problems, "\n".join(self._problems)
        assert not self._script, f"the engine never did this: {self._script[0].line}"
        for row in rows:
            if row.kind == "client <<":
                await self._check_answer(row, played)
            elif row.who not in ("client", "upstream"):
                self._check_after(row, played)
        assert played.error is None or rows_raise(rows), played.error

    def _request(self, row: Row) -> Request:
        name, *rest = row.items
        given = dict(item.partition("=")[::2] for item in rest)
        count = given.pop("count", None) is not None
        api = given.pop("api", "messages" if count else "chat")
        path_model = given.pop("path_model", "")
        return Request(
            api,
            self._bytes(name),
            TENANT,
            "r1",
            Options(**given),  # type: ignore[arg-type]
            path_model,
            origin=Origin("/v1/chat/completions", (KEY, OTHER)),
            purpose="count" if count else "answer",
        )

    def _bytes(self, name: str) -> bytes:
        value = self._values[name]
        return value if isinstance(value, bytes) else b"".join(value)

    # The upstream that the engine sends to.

    async def send(
        self, target: str, method: str, path_qs: str, headers: Sequence[tuple[str, str]], body: Any, added: Any = ()
    ) -> Reply:
        """Check the call against its row and answer as the row behind it says.

        The engine survives faults of its own: a call that breaks the transcript is written down, not raised.
        """
        call = Call(target, body, headers)
        calls = self.played[-1].calls
        calls.append(call)
        if not self._script or self._script[0].kind != "upstream <<":
            self._problems.append(f"a call to {target} that the transcript does not have, {len(body)} bytes")
            return ScriptedReply(500, [b"not in the transcript"])
        row = self._script.pop(0)
        for problem in self._call_problems(row, call):
            self._problems.append(f"{row.line}: {problem}")
        reply = self._script.pop(0) if self._script and self._script[0].kind == "upstream >>" else None
        if reply is None:
            self._problems.append(f"{row.line}: no row says what the upstream answers")
            return ScriptedReply(500, [b"not in the transcript"])
        if reply.items == ("unreachable",):
            raise UpstreamUnreachable(target, "refused")
        call.reply = self._reply(reply, call)
        call.whole = b"".join(chunk for chunk in call.reply._chunks if isinstance(chunk, bytes))
        return call.reply

    async def upgrade(self, target: str, path_qs: str, headers: object) -> Upgradable:
        raise AssertionError(f"a tunnel to {target} was wanted")

    def _reply(self, row: Row, call: Call) -> ScriptedReply:
        (kind,) = row.items
        if kind in ("overflow", "ok"):
            verdict, reply = self._judge.answer(call.upstream, call.body)
            if verdict != kind:
                self._problems.append(f"{row.line}: the strict judge says {verdict}")
            return reply
        first, name = kind.split(maxsplit=1)
        if first == "breaks":
            return Breaking(int(name), [])
        value = self._values[name]
        chunks = [value] if isinstance(value, bytes) else list(value)
        return ScriptedReply(int(first), [c for c in chunks if c], SSE if b"".join(chunks)[:5] == b"data:" else JSON)

    def _call_problems(self, row: Row, call: Call) -> list[str]:
        target, *wanted = row.items
        problems = [] if target == call.upstream else [f"it was sent to {call.upstream}"]
        return problems + [f"not so: {item}" for item in wanted if not self._holds(item, call)]

    def _holds(self, item: str, call: Call) -> bool:
        """True if *item* holds of *call*."""
        if item in self._values:
            return call.body == self._bytes(item)
        for pattern, check in CHECKS:
            match = re.fullmatch(pattern, item)
            if match is not None:
                return check(self, call, *match.groups())
        raise ValueError(f"neither a value nor a check: {item}")

    def _before(self) -> bytes:
        """The body of the call before the newest one."""
        return self.played[-1].calls[-2].body

    # What the client gets.

    async def _check_answer(self, row: Row, played: Played) -> None:
        first, *rest = row.items[0].split()
        if first == "raises":
            assert type(played.error).__name__ == rest[0], (row.line, played.error)
            return
        assert played.error is None, (row.line, played.error)
        if first == "refused":
            assert played.answer.error is not None, row.line
            assert played.answer.error.code == rest[0], row.line
            return
        assert played.answer.error is None, (row.line, played.answer.error)
        if first == "reply":
            await self._check_reply(row, played, played.calls[int(rest[0]) - 1], as_it_came=rest[1:] == ["unread"])
            return
        wanted = ROLE + WORD + DONE if rest == ["ok"] and self._judge.stream else OK
        wanted = wanted if rest == ["ok"] else self._bytes(rest[0])
        assert played.answer.reply.status == int(first), row.line
        assert await read_whole(played.answer) == wanted, row.line

    async def _check_reply(self, row: Row, played: Played, call: Call, *, as_it_came: bool) -> None:
        assert call.reply is not None
        if as_it_came:
            assert played.answer.reply is call.reply, row.line
        assert played.answer.reply.status == call.reply.status, row.line
        assert list(played.answer.reply.headers) == list(call.reply.headers), row.line
        assert await read_whole(played.answer) == call.whole, row.line

    # What is left afterwards.

    def _check_after(self, row: Row, played: Played) -> None:
        if row.who == "report":
            problems = [p for item in row.items if (p := _field_problem(played.answer.report, item))]
            assert not problems, f"{row.line}: {problems}"
        elif row.who == "replies":
            states = ["closed" if call.reply and call.reply.closed else "open" for call in played.calls]
            assert states == list(row.items), row.line
        elif row.who == "records":
            assert len(self.engine.book.records()) == int(row.items[0]), row.line
        else:
            windows = [str(fact["context_window"]) for fact in self.engine.replica.learned.shown_windows()]
            assert windows == ([] if row.items == ("nothing",) else list(row.items)), row.line


def rows_raise(rows: Sequence[Row]) -> bool:
    """True if the client is told of an exception."""
    return any(row.kind == "client <<" and row.items[0].startswith("raises ") for row in rows)


def _field_problem(report: Any, item: str) -> str:
    match = re.fullmatch(r"(\w+)([=~])(.*)", item)
    assert match is not None, f"not a field: {item}"
    value = getattr(report, match[1])
    if match[2] == "~":
        return "" if match[3] in value else f"{match[1]} is {value!r}"
    shown = "+".join(value) if isinstance(value, tuple) else "-" if value is None else str(value)
    return "" if shown == match[3] else f"{match[1]} is {shown}"


def _messages(body: bytes) -> list[bytes]:
    return message_slices(body)


def _member(player: Player, call: Call, name: str, wanted: str) -> bool:
    value = json.loads(call.body).get(name)
    return ("-" if value is None else str(value)) == wanted


def _extends(player: Player, call: Call) -> bool:
    before = _messages(player.played[-2].calls[-1].body)
    return _messages(call.body)[: len(before)] == before


def _smaller(player: Player, call: Call) -> bool:
    before = player._before()
    return call.body != before and request_tokens(json.loads(call.body)) < request_tokens(json.loads(before))


def _at_most(player: Player, call: Call, share: str) -> bool:
    return request_tokens(json.loads(call.body)) <= float(share) * request_tokens(json.loads(player._before()))


def _is_view(player: Player, call: Call, name: str) -> bool:
    body = player._bytes(name)
    return not message_problems(body, call.body) and not outline_problems(body, call.body)


def _headers(call: Call) -> list[tuple[str, str]]:
    """Those of the client's header fields that were sent on."""
    return [(name, value) for name, value in call.headers if (name, value) in (KEY, OTHER)]


CHECKS: Sequence[tuple[str, Callable[..., bool]]] = [
    ("smaller", _smaller),
    (r"tokens<=([\d.]+)", _at_most),
    (r"view of (\w+)", _is_view),
    ("extends", _extends),
    ("same messages", lambda player, call: _messages(call.body) == _messages(player._before())),
    ("other messages", lambda player, call: _messages(call.body) != _messages(player._before())),
    (r"messages of (\w+)", lambda player, call, name: _messages(call.body) == _messages(player._bytes(name))),
    ("keyless", lambda player, call: _headers(call) == [OTHER]),
    ("with key", lambda player, call: _headers(call) == [KEY, OTHER]),
    (r"without (\S+)", lambda player, call, text: text.encode() not in call.body),
    (r"with (\S+)", lambda player, call, text: text.encode() in call.body),
    (r"(\w+)=(\S+)", _member),
    (r"(\w+) in (\d+)\.\.(\d+)", lambda player, call, n, low, high: int(low) <= json.loads(call.body)[n] <= int(high)),
]
"""What a row may say of a call, each with what finds out whether it is so; the first that fits is taken."""
