"""Engines of real parts for tests, and what must be true of every plan they make."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import Phase
from msgspec import structs

from proxy.core.apis.base import ApiFormat
from proxy.core.compaction.prune import DedupRules, PrunePassRules, PruneRules
from proxy.core.compaction.record import CompactionRecord, load
from proxy.core.compaction.schedule import CompactionTarget
from proxy.core.compaction.stages import CompactionRules, EnabledStages
from proxy.core.compaction.truncate import MARKER, MIDDLE, OMITTED, SHORT_MARKER
from proxy.core.conversation import Item
from proxy.core.decisions import CountedView, FinalDecision, KnownRoute, Policy, Reject, TooLossy
from proxy.core.errors import UllageError
from proxy.core.models import Catalogue, ModelRule, Route
from proxy.core.overflow.classify import Classifier
from proxy.core.report import Report
from proxy.core.request import Mode, Options, Request
from proxy.core.tokens.budget import Marks, Shares
from proxy.core.tokens.counting import InjectedRules
from proxy.core.tool_table import ToolMap
from proxy.engine.engine import Engine
from proxy.engine.features import Feature, Features
from proxy.engine.learned_routes import KnownRoutes, LearnedRoutes
from proxy.engine.measuring import Measurer
from proxy.engine.ports import Clock, Records, Reply, Summaries, Upgradable, Upstream
from proxy.engine.quick_check import QuickCheck
from proxy.engine.reading import Reader, with_facts
from proxy.engine.records import CompactionRecords
from proxy.engine.retries import Retries
from proxy.engine.run import report_of
from proxy.engine.token_counts import CountedBy, TokenCounts
from proxy.engine.upstream_calls import CallSettings, UpstreamCalls
from proxy.settings import injected_rules, overflow_rules, tool_map
from proxy.settings.injected import InjectedTexts
from proxy.settings.tools import Tools
from proxy.tasks import Faults, Tasks, ignore_failure
from proxy.tokenizers import Tokenizers
from tests.stub.tokens import IMAGE_HIGH, request_tokens
from tests.support.tool_pair_checks import pair_violations

Message = dict[str, Any]

TENANT = b"t" * 32
WINDOW = 4096
POLICY = Policy(CompactionRules(Marks(), Shares(), EnabledStages()))
SPARING_RULES = replace(
    POLICY.rules, prune_pass=PrunePassRules(DedupRules(), PruneRules(protect_tokens=5_000, min_saving=5_000))
)
SYSTEMS = ("system", "developer")
CHANGEABLE = ("messages", "input", "tools", "functions", "max_tokens", "max_completion_tokens", "max_output_tokens")
CHANGEABLE += ("contents", "generationConfig")
"""The members of a body that a plan may change."""
IDENTITIES = ("role", "type", "id", "tool_call_id", "tool_use_id", "call_id", "name", "image_url", "thinking")
IDENTITIES += ("signature", "encrypted_content", "thoughtSignature", "inlineData")
"""Members of a message that no clip may change."""
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""For properties of whole conversations: shrinking one takes minutes, what was drawn is shown as it is."""
_DECODER = json.JSONDecoder()
SHORT = 60
"""Characters of a text that is always small enough to stay whole."""


@functools.cache
def tokenizers() -> Tokenizers:
    """The real tokenizers, loaded once."""
    return Tokenizers()


@functools.cache
def classifier() -> Classifier:
    """The classifier with the packaged rules."""
    return Classifier(overflow_rules(()))


def count_tokens(text: str) -> int:
    """Tokens of *text* in o200k_base."""
    return tokenizers().count("o200k_base", text)


@functools.cache
def tool_map_of_package() -> ToolMap:
    """The packaged table of tools."""
    return tool_map(Tools())


@functools.cache
def packaged_marks() -> InjectedRules:
    """The packaged marks of injected texts."""
    return injected_rules(InjectedTexts())


class DictRecords:
    """Records in dictionaries: the smallest store that does all that the engine needs."""

    def __init__(self) -> None:
        self.values: dict[tuple[bytes, bytes, str, bytes], bytes] = {}
        self.routes: dict[tuple[bytes, str], bytes] = {}
        self.requested: set[tuple[bytes, bytes]] = set()

    def prefix_key(self, tenant: bytes) -> bytes:
        return hashlib.sha256(b"key of " + tenant).digest()

    def item_key(self) -> bytes:
        return hashlib.sha256(b"key of items").digest()

    async def newest(
        self, tenant: bytes, root_hash: bytes, route: str, prefix_hashes: Sequence[bytes]
    ) -> tuple[int, bytes] | None:
        keys = [(tenant, root_hash, route, prefix_hash) for prefix_hash in prefix_hashes]
        return next(((i, self.values[key]) for i, key in enumerate(keys) if key in self.values), None)

    async def save(
        self, tenant: bytes, root_hash: bytes, route: str, prefix_hash: bytes, record: bytes, *, replace: bool = False
    ) -> bytes:
        key = (tenant, root_hash, route, prefix_hash)
        if replace:
            self.values[key] = record
        return self.values.setdefault(key, record)

    def reachable(self) -> bool:
        return True

    def version(self) -> None:
        return None

    async def pop_request(self, tenant: bytes, root_hash: bytes) -> str:
        is_requested = (tenant, root_hash) in self.requested
        self.requested.discard((tenant, root_hash))
        return "now" if is_requested else ""

    async def read_route(self, tenant: bytes, route: str) -> bytes | None:
        return self.routes.get((tenant, route))

    def save_route(self, tenant: bytes, route: str, value: bytes) -> None:
        self.routes[tenant, route] = value

    def records(self) -> list[CompactionRecord]:
        """Every record, that of the earliest boundary first."""
        records = [record for value in self.values.values() if (record := load(value, 10**6))]
        return sorted(records, key=lambda record: record.compaction.boundary)


class Unsent:
    """An upstream that nothing may be sent to."""

    async def send(self, target: str, *rest: object) -> Reply:
        raise AssertionError(f"something was sent to {target}")

    async def upgrade(self, target: str, path_qs: str, headers: object) -> Upgradable:
        raise AssertionError(f"a tunnel to {target} was wanted")


@dataclass(frozen=True)
class Planned:
    """A decision of the planner, for tests to look at: what would be sent, its report, or why it is refused."""

    decision: FinalDecision
    report: Report

    @property
    def view(self) -> CountedView:
        assert not isinstance(self.decision, TooLossy)
        assert isinstance(self.decision.view, CountedView)
        return self.decision.view

    @property
    def body(self) -> bytes:
        return self.view.body

    @property
    def tokens(self) -> int:
        return self.view.tokens

    @property
    def output(self) -> int | None:
        return self.view.lowered_output

    @property
    def error(self) -> UllageError | None:
        return self.decision.error if isinstance(self.decision, Reject) else None


FeaturesOf = Callable[["Replica"], Sequence[Feature]]
"""Makes the features of a replica, out of its reader, records, catalogue and faults."""


def without_features(replica: Replica) -> Sequence[Feature]:
    """No feature at all: what the engine does by itself."""
    del replica
    return ()


class Replica:
    """One replica: an engine with caches of its own over records that it may share."""

    def __init__(
        self,
        records: Records | None = None,
        policy: Policy = POLICY,
        summaries: Summaries | None = None,
        upstream: Upstream | None = None,
        catalogue: Catalogue | None = None,
        mode: Mode = "on",
        counting: Mapping[str, CountedBy] | None = None,
        clock: Clock = time.perf_counter,
        calls: CallSettings | None = None,
        features: FeaturesOf = without_features,
        faults: Faults | None = None,
    ) -> None:
        self.book = records or DictRecords()
        self.records: MutableMapping[tuple[str, bytes], CompactionRecord] = {}
        self.policy = policy = replace(policy, tools=tool_map_of_package())
        self.reader = reader = Reader(tokenizers(), {}, {}, {}, {}, tool_map_of_package(), injected=packaged_marks())
        self.learned = LearnedRoutes(self.book, {}, {}, time.monotonic)
        self.catalogue = catalogue = catalogue or Catalogue([ModelRule("*", "stub")], {}, "stub")
        self.faults = faults = faults or Faults()
        self.hooks = hooks = Features(features(self))
        routes = KnownRoutes(catalogue, self.learned, time.monotonic)
        self.measurer = Measurer(catalogue, routes, reader, self.book, self.learned, hooks, policy, mode, {})
        self.compactions = CompactionRecords(
            reader, self.book, policy, self.records, {}, summaries, Tasks(ignore_failure).spawn
        )
        retries = Retries(self.measurer, self.learned)
        settings = calls or CallSettings()
        self.calls = UpstreamCalls(
            upstream or Unsent(), catalogue, self.measurer, retries, classifier(), settings, faults
        )
        self.engine = Engine(
            catalogue,
            QuickCheck(routes, policy, mode),
            self.measurer,
            self.compactions,
            self.learned,
            self.calls,
            retries,
            classifier(),
            hooks,
            TokenCounts(self.measurer, self.learned, self.calls, counting or {}),
            policy,
            clock,
            faults,
        )

    async def plan(
        self,
        body: bytes,
        window: int,
        target: CompactionTarget = CompactionTarget(),  # noqa: B008 - frozen
        *,
        tenant: bytes = TENANT,
        options: Options = Options(),  # noqa: B008 - frozen
        factor: float = 1.0,
        max_input: int | None = None,
        model: str = "house-model",
        api: str = "chat",
    ) -> Planned:
        """The plan for *body* in a *window* of so many tokens."""
        request = Request(api, body, tenant, "r", options)
        route = Route("stub", model, window, None, "o200k_base", "configured", max_input=max_input)
        known = KnownRoute(route, window, "configured", None, factor)
        located = self.measurer.locate(request)
        target = structs.replace(target, lower_output=self.policy.lower_output)
        measured = await self.measurer.count(request, located, known, window, target)
        decision = await self.engine._decide(measured)
        if isinstance(decision, TooLossy):
            return Planned(decision, Report("r", api))
        return Planned(decision, report_of(decision.view, self.policy))

    async def view(self, messages: Sequence[Message], window: int, **members: Any) -> list[bytes]:
        """The messages that go upstream for *messages*, as their bytes."""
        plan = await self.plan(chat_body(messages, **members), window)
        assert plan.error is None, plan.error
        return message_slices(plan.body)


def chat_body(messages: Sequence[Message], **members: Any) -> bytes:
    """A request's bytes as a client's JSON library writes them."""
    return json.dumps({"model": "gpt-4o-mini", "messages": messages, **members}, separators=(",", ":")).encode()


def read_one(api_format: ApiFormat, raw: bytes, count: Callable[[str], int], tools: ToolMap) -> Item:
    """The item of one slice with the facts of its calls and results. Raises ``InvalidRequest``."""
    return with_facts(api_format, api_format.read_item(raw, count), raw, count, tools)


def message_slices(body: bytes) -> list[bytes]:
    """The bytes of each message of *body*."""
    text = _raw_members(body)["messages"].decode()
    slices, at = [], _skip(text, 1)
    while text[at] != "]":
        _, end = _DECODER.raw_decode(text, at)
        slices.append(text[at:end].encode())
        at = _skip(text, end)
    return slices


def _raw_members(body: bytes) -> dict[str, bytes]:
    """The members of a JSON object that is known to be valid, as their bytes."""
    text = body.decode()
    members, at = {}, _skip(text, _skip(text, 0) + 1)
    while text[at] != "}":
        key, end = _DECODER.raw_decode(text, at)
        start = _skip(text, end)
        _, end = _DECODER.raw_decode(text, start)
        members[key] = text[start:end].encode()
        at = _skip(text, end)
    return members


def _skip(text: str, at: int) -> int:
    """Past white space and separators."""
    while text[at] in " \t\r\n,:":
        at += 1
    return at


def text_of(message: Mapping[str, Any]) -> str:
    """All text a message's content shows."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def plan_problems(body: bytes, plan: Planned, window: int) -> list[str]:
    """One sentence for each promise that *plan* breaks against the client's *body*; none if it refuses."""
    if plan.error is not None:
        return [] if plan.error.code == "context_length_exceeded" else [f"refused with {plan.error.code}"]
    sent = json.loads(plan.body)
    problems = size_problems(json.loads(body), sent, window)
    if plan.report.outcome == "verbatim":
        return problems + ([] if plan.body == body else ["called verbatim and was changed"])
    return problems + outline_problems(body, plan.body) + message_problems(body, plan.body)


def size_problems(raw: Mapping[str, Any], sent: Mapping[str, Any], window: int) -> list[str]:
    """What is wrong with the size of *sent*, counted by the strict upstream's own counter."""
    requested = sent.get("max_completion_tokens") or sent.get("max_tokens")
    wanted = raw.get("max_completion_tokens") or raw.get("max_tokens")
    problems = [f"the output figure rose from {wanted} to {requested}"] if (requested or 0) > (wanted or 0) else []
    reserved = requested or window // 32
    # An image whose size cannot be read is a guess on both sides: where only guesses are too much, the provider judges.
    tokens = request_tokens(sent) - IMAGE_HIGH * sum(map(_unreadable_images, sent["messages"]))
    return problems + ([f"{tokens} + {reserved} > {window}"] if tokens + reserved > window else [])


def _unreadable_images(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    parts = [part for part in content if part.get("type") == "image_url"] if isinstance(content, list) else []
    return sum(part["image_url"].get("detail") != "low" for part in parts)


def outline_problems(body: bytes, sent: bytes) -> list[str]:
    """Members beside those a plan may change that are not the client's own bytes in the client's order."""
    was, now = _raw_members(body), _raw_members(sent)
    problems = [] if list(was) == list(now) else [f"members {list(was)} became {list(now)}"]
    return problems + [f"{key} was changed" for key in was if key not in CHANGEABLE and was[key] != now.get(key)]


def message_problems(body: bytes, sent: bytes) -> list[str]:
    """What is wrong with the messages of *sent* as a view of *body*'s."""
    raw, view = message_slices(body), message_slices(sent)
    was, now = [list(map(json.loads, pieces)) for pieces in (raw, view)]
    new = Counter(map(_unplaced, pair_violations(now))) - Counter(map(_unplaced, pair_violations(was)))
    problems = [f"new violation: {sentence}" for sentence in new]
    reasons = [_misfit(raw, was, view, now, cut) for cut in range(len(raw) + 1)]
    if all(reasons):
        problems.append("not a view at any cut: " + next((r for r in reasons if r and r != "length"), "length"))
    shown = _encodable("\n".join(map(text_of, now)))
    users = [
        _encodable(text_of(message))
        for message in was
        if message["role"] not in (*SYSTEMS, "assistant", "tool", "function")
    ]
    for label, text in (("first task", users[0]), ("newest user text", users[-1])) if users else ():
        if text not in shown and not (len(text) > SHORT and text[:4] in shown):
            problems.append(f"the {label} is neither there nor clipped")
    if sum(m["role"] in SYSTEMS for m in now) != sum(m["role"] in SYSTEMS for m in was):
        problems.append("another number of system messages")
    return problems


def _encodable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unplaced(sentence: str) -> str:
    return re.sub(r"^messages\[\d+\]: ", "", sentence)


def _misfit(raw: list[bytes], was: list[Message], view: list[bytes], now: list[Message], cut: int) -> str:
    """Why *view* is not *raw* with everything before *cut* folded; empty when it is."""
    head = [raw[i] for i in range(cut) if was[i]["role"] in SYSTEMS]
    carried = cut < len(raw) and was[cut]["role"] not in (*SYSTEMS, "assistant", "tool", "function")
    start = cut + carried if cut else 0
    frame = len(head) + 1 if cut else 0
    if frame + len(raw) - start != len(view):
        return "length"
    if view[: len(head)] != head:
        return "a folded system message was changed"
    for i in range(start, len(raw)):
        at = frame + i - start
        if view[at] != raw[i] and not is_clip(was[i], now[at]) and not is_replaced(was[i], now[at]):
            return f"messages[{at}] is neither the client's nor a clip of it"
    if not cut:
        return ""
    users = [i for i in range(cut) if was[i]["role"] not in (*SYSTEMS, "assistant", "tool", "function")]
    own = cut if carried else users[0] if users else None
    return _carrier_misfit(raw[own] if own is not None else b"", view[len(head)])


def _carrier_misfit(own: bytes, carrier: bytes) -> str:
    if not own:
        return "" if set(json.loads(carrier)) == {"role", "content"} else "an invented carrier with odd members"
    was, now = _raw_members(own), _raw_members(carrier)
    if {k: v for k, v in was.items() if k != "content"} != {k: v for k, v in now.items() if k != "content"}:
        before, after = json.loads(own), json.loads(carrier)
        if {**before, "content": 0} != {**after, "content": 0} or not text_of(after):
            return "the carrier's other members were changed"
    run = was.get("content", b'""')[1:-1].strip()
    before, shown = text_of(json.loads(own)), text_of(json.loads(carrier))
    if run in now["content"] or (len(before) > SHORT and before[:4] in shown):
        return ""
    return "the carrier's own content is not one unchanged run"


def is_clip(was: Any, now: Any) -> bool:
    """True if *now* is *was* with some texts shortened."""
    if isinstance(was, dict) and isinstance(now, dict):
        if was.keys() != now.keys() or any(was[key] != now[key] for key in IDENTITIES if key in was):
            return False
        return all(is_clip(was[key], now[key]) for key in was)
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(map(is_clip, was, now))
    if isinstance(was, str) and isinstance(now, str) and was != now:
        return _is_clipped_text(was, now) or _is_clipped_json(was, now)
    return bool(was == now)


def is_replaced(was: Any, now: Any) -> bool:
    """True if *now* is the tool result *was* with a line, or head and end of it, in its place."""
    if was.get("role") not in ("tool", "function") or was.keys() | {"content"} != now.keys():
        return False
    if any(was[key] != now[key] for key in was if key != "content"):
        return False
    before, shown = text_of(was), text_of(now)
    if shown.startswith(("[Old ", "[Left out: ")):
        return True
    head, marker, tail = shown.partition(MIDDLE)
    return bool(marker) and before.startswith(head.removesuffix("\n")) and before.endswith(tail.removeprefix("\n"))


def _is_clipped_text(was: str, now: str) -> bool:
    pieces = [now.partition(marker) for marker in (MARKER, SHORT_MARKER) if marker in now]
    return (
        now == OMITTED
        or was.startswith(now)
        or any(was.startswith(head) and was.endswith(tail) for head, _, tail in pieces)
    )


def _is_clipped_json(was: str, now: str) -> bool:
    try:
        return is_clip(json.loads(was), json.loads(now))
    except ValueError:
        return False
