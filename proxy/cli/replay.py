"""Past conversations through the engine, with no upstream: what would have been sent, how often, and what it costs."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy import settings as configuration
from proxy.cli.session_files import Message, Session, read_sessions
from proxy.core.decisions import Reject
from proxy.core.errors import UllageError
from proxy.core.request import Request
from proxy.engine.engine import Engine
from proxy.settings import Prices, Settings
from proxy.store import open_store
from proxy.tasks import Tasks
from proxy.tokenizers import Tokenizers
from proxy.upstream_wiring import open_catalogue
from proxy.wiring import Offline, open_engine

KINDS = (".jsonl", ".json", ".md")
"""Ends of the names of files that are looked into."""

TENANT = hashlib.sha256(b"replay").digest()


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation, in tokens: as the client sent it, as it went upstream, and what was repeated.

    ``repeated`` and ``repeated_before`` are the tokens at the beginning that the request before had too, of the view
    and of the client's own; ``after`` is ``None`` where the request was refused.
    """

    before: int
    after: int | None
    budget: int | None
    repeated: int
    repeated_before: int
    event: bool
    stages: tuple[str, ...]

    @property
    def pressure(self) -> float | None:
        """How full the budget is with what is sent."""
        return self.after / self.budget if self.after is not None and self.budget else None


@dataclass(frozen=True, slots=True)
class Replayed:
    """One conversation, replayed; ``trouble`` says why it could not be."""

    name: str
    model: str
    window: int | None
    turns: tuple[Turn, ...]
    prices: Prices | None = None
    trouble: str = ""

    @property
    def answered(self) -> int:
        """Requests that would have been sent."""
        return sum(turn.after is not None for turn in self.turns)

    @property
    def answered_before(self) -> int:
        """Requests that fitted as the client sent them."""
        return sum(turn.budget is None or turn.before <= turn.budget for turn in self.turns)

    @property
    def events(self) -> int:
        """Compactions."""
        return sum(turn.event for turn in self.turns)

    @property
    def before(self) -> int:
        """Tokens of all requests as the client sent them."""
        return sum(turn.before for turn in self.turns)

    @property
    def after(self) -> int:
        """Tokens of all requests that were sent."""
        return sum(turn.after or 0 for turn in self.turns)

    @property
    def repeated(self) -> float:
        """Share of what was sent that the provider had in the request before."""
        return sum(turn.repeated for turn in self.turns) / max(1, self.after)

    @property
    def cost(self) -> float | None:
        """US dollars of the input that was sent, the repeated part at the price of cached tokens."""
        if self.prices is None:
            return None
        return sum(self.prices.cost(turn.after, turn.repeated) for turn in self.turns if turn.after is not None)

    @property
    def cost_before(self) -> float | None:
        """The same for what the client sent, as if every request had been accepted."""
        if self.prices is None:
            return None
        return sum(self.prices.cost(turn.before, turn.repeated_before) for turn in self.turns)


def find_sessions(place: Path) -> Iterator[Session]:
    """The conversations in a file, or in all files below a folder, in the order of their paths.

    Raises ``OSError`` where *place* itself cannot be read.
    """
    files = sorted(each for each in place.rglob("*") if each.suffix in KINDS) if place.is_dir() else [place]
    for file in files:
        name = file.name if file == place else str(file.relative_to(place))
        yield from read_sessions(name, file.read_text("utf-8", "replace"))


async def replay(
    settings: Settings, sessions: Sequence[Session], model: str, done: Callable[[], None] = lambda: None
) -> list[Replayed]:
    """What would have become of each of *sessions*; *done* is called after each.

    *model* is that of sessions that do not say theirs. Asks no server and keeps nothing.
    """
    failures: list[BaseException] = []
    tasks = Tasks(lambda _, error: failures.append(error))
    store = await open_store("memory", directory=settings.store.path, key=None, spawn=tasks.spawn, warn=_quiet)
    try:
        catalogue = await asyncio.to_thread(open_catalogue, settings)
        engine = open_engine(settings, catalogue, Tokenizers(), store, Offline())
        costs = await asyncio.to_thread(configuration.prices, {session.model or model for session in sessions})
        found = []
        for session in sessions:
            found.append(await _replay(engine, session, session.model or model, costs.get(session.model or model)))
            done()
        return found
    finally:
        await store.close()
        await tasks.finish(1.0)


def _quiet(event: str, facts: object) -> None:
    """A store of one process has nothing to warn of."""
    del event, facts


async def _replay(engine: Engine, session: Session, model: str, prices: Prices | None) -> Replayed:
    turns: list[Turn] = []
    window: int | None = None
    sent: tuple[bytes, int] = (b"", 0)
    raw = 0
    for body in request_bodies(session, model):
        try:
            request = Request("chat", body, TENANT, session.name)
            decision = await engine.first_plan(request, count_always=True)
        except UllageError as error:
            return Replayed(session.name, model, window, tuple(turns), prices, error.message)
        report = engine.report(decision)
        if report.window is None:
            return Replayed(session.name, model, None, (), prices, "its window is not known: give --window")
        window = report.window
        before = report.tokens_before or 0
        after = None if isinstance(decision, Reject) else report.tokens_after or 0
        view = (b"", 0) if after is None else (decision.view.body, after)
        repeated = _repeated(sent, *view)
        turns.append(Turn(before, after, report.budget, repeated, raw, report.event, report.stages))
        raw, sent = before, view
    return Replayed(session.name, model, window, tuple(turns), prices)


def request_bodies(session: Session, model: str) -> Iterator[bytes]:
    """Every request of *session*, as a client sends them: one before each thing the model said, and a last one."""
    head = {"model": model, **({"tools": session.tools} if session.tools else {})}
    start = _bytes(head)[:-1] + b',"messages":['
    pieces = [_bytes(message) for message in session.messages]
    for end in request_lengths(session.messages):
        yield start + b",".join(pieces[:end]) + b"]}"


def request_lengths(messages: Sequence[Message]) -> list[int]:
    """Lengths at which *messages* were a request: after something the model did not say, before something it said."""
    roles = [str(message.get("role")) for message in messages]
    following = [*roles[1:], "assistant"]
    silent = ("assistant", "system", "developer")
    pairs = enumerate(zip(roles, following, strict=False), 1)
    return [at for at, (role, after) in pairs if role not in silent and after == "assistant"]


def _bytes(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def _repeated(sent: tuple[bytes, int], body: bytes, tokens: int) -> int:
    """Tokens at the beginning of *body* that what was *sent* before had too, by the share of bytes."""
    before, weight = sent
    low, high = 0, min(len(before), len(body))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if before[low:middle] == body[low:middle] else (low, middle - 1)
    if low >= len(before) - len(b"]}") > 0:
        return min(weight, tokens)
    return int(tokens * low / max(1, len(body)))
