"""One request under way: what has been sent and received, how sending can end, and the report of it.

``Run`` is the only mutable object of a request. One task changes it at a time: the engine's, and once the answer is
passed on, the one that writes it to the client. A report has figures in the provider's tokens, never text.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Any, Final

import msgspec
from msgspec import structs

from proxy.core.attempts import Attempts
from proxy.core.compaction.record import NO_COMPACTION
from proxy.core.conversation import unread_from
from proxy.core.decisions import (
    CountedView,
    FinalDecision,
    Forward,
    KnownRoute,
    MeasuredRequest,
    Policy,
    Reject,
    TooLossy,
    UncountedView,
    View,
)
from proxy.core.errors import UllageError
from proxy.core.overflow.kinds import Overflow
from proxy.core.report import ADDED_STAGES, BUDGET_UNREACHABLE, SERVED, OutcomeName, Report
from proxy.core.request import ALL_ITEMS, Request, public_session_name
from proxy.core.tokens.allocation import Allocation, borrowed
from proxy.core.tokens.budget import regions, to_provider_tokens
from proxy.core.tool_calls import Pair, pairs_of
from proxy.core.waste import LARGE, files_read, needless_items
from proxy.engine.ports import Clock, Reply
from proxy.engine.replies import DrainedReply


class Unreachable(Exception):
    """The engine is in a state that cannot be: a fault of ours."""


def never_too_lossy(decision: FinalDecision) -> Forward | Reject:
    """Return *decision*, which is about a view that may lose anything, so that it is not ``TooLossy``."""
    if isinstance(decision, TooLossy):
        raise Unreachable("a view that may lose anything is never too lossy")
    return decision


class GiveUp(msgspec.Struct, frozen=True):
    """Nothing is left to send: the client sees the provider's own first error."""


GIVE_UP: Final = GiveUp()


class FirstRefusal(msgspec.Struct, frozen=True):
    """The first refusal of a request: the view that was refused, and every byte of the provider's own error."""

    view: View
    reply: Reply
    head: bytes
    is_overflow: bool


class Run(msgspec.Struct, eq=False):
    """One request under way.

    ``sent`` counts the bodies that were sent, ``overflows`` the refusals among them. ``overhead`` are the seconds of
    planning that are over; the current one began when the clock showed ``planning_since``. ``reply`` is the newest
    reply, ``chunks`` are the bytes read from it so far. ``earlier_reply`` is what the client gets if there is no
    ``reply``: the first one that was refused, or the generation before this one. ``began`` is true once bytes of the
    answer may have gone to the client. ``unsure`` is a view and an unsure refusal of it: it counts once a smaller view
    is answered.
    """

    # A Struct and no dataclass: every request makes one, and msgspec builds it in C.

    request: Request
    clock: Clock
    sent: int = 0
    overflows: int = 0
    overhead: float = 0.0
    attempts: Attempts | None = None
    first_refusal: FirstRefusal | None = None
    first_error: UllageError | None = None
    began: bool = False
    unsure: tuple[View, Overflow] | None = None
    upstream: str = ""
    reply: Reply | None = None
    chunks: list[bytes] = []
    earlier_reply: tuple[Reply, bytes] | None = None
    planning_since: float = 0.0

    def __post_init__(self) -> None:
        self.planning_since = self.clock()

    def __repr__(self) -> str:
        """Leave out what was read."""
        return f"Run({self.request!r})"

    def resume_planning(self) -> None:
        """Count the time from now on as overhead."""
        self.planning_since = self.clock()

    def pause_planning(self) -> None:
        """Stop counting time as overhead."""
        self.overhead += self.clock() - self.planning_since

    def overhead_so_far(self) -> float:
        """Return the seconds that planning has taken, while it goes on."""
        return self.overhead + self.clock() - self.planning_since

    def begin_generation(self) -> None:
        """Reset the counts of sent and refused bodies, before the next generation of the same answer."""
        self.sent = 0
        self.overflows = 0
        self.first_refusal = None
        self.began = True
        self.unsure = None

    def sending(self, upstream: str) -> None:
        """Note that a body goes to *upstream*; the client gets the last reply only if no other follows."""
        if self.reply is not None:
            self.earlier_reply = self.reply, b"".join(self.chunks)
        self.upstream, self.reply, self.chunks = upstream, None, []

    def set_aside(self) -> None:
        """Close the last reply, whose bytes were read. It is passed on only if a fault leaves no other."""
        if self.reply is not None:
            self.reply.close()
            self.reply = DrainedReply(self.reply)

    def overflowed(self, view: View) -> None:
        """Set the last reply aside: it refuses *view* as too long, and all of it was read."""
        self.overflows += 1
        self._refused(view, is_overflow=True)

    def failed(self, view: View, error: UllageError | None) -> None:
        """Note that the upstream of *view* failed: with *error*, or with the last reply, all of which was read."""
        if error is None:
            self._refused(view, is_overflow=False)
        elif not self.was_refused:
            self.first_error = error

    @property
    def was_refused(self) -> bool:
        """True if an upstream refused the request, or failed so that others were asked."""
        return self.first_refusal is not None or self.first_error is not None

    def stated_refusal(self) -> FirstRefusal:
        """Return the first refusal, which the client gets. Raises the error if that upstream gave no answer."""
        if self.first_error is not None:
            raise self.first_error
        if self.first_refusal is None:
            raise Unreachable("sending is only given up after a refusal")
        return self.first_refusal

    def _refused(self, view: View, *, is_overflow: bool) -> None:
        self.set_aside()
        if self.reply is None:
            return
        head = b"".join(self.chunks)
        if self.first_refusal is None:
            self.first_refusal = FirstRefusal(view, self.reply, head, is_overflow)
        if self.earlier_reply is None:
            self.earlier_reply = self.reply, head
        self.reply = None

    def report(self, view: View, policy: Policy) -> Report:
        """The report of *view*, with what is known of its sending."""
        retries = max(0, self.sent - 1)
        return report_of(view, policy, retries=retries, overflows=self.overflows, overhead_seconds=self.overhead)

    def drop(self) -> None:
        """Close the last reply: it does not go to the client."""
        if self.reply is not None:
            self.reply.close()
        self.reply = None


OBSERVED = "\0observed"
"""Ends the label of a conversation that is only observed. No header can hold a NUL, so no client can send it:
https://www.rfc-editor.org/rfc/rfc9110#section-5.5"""


def report_of(view: View, policy: Policy, **facts: Any) -> Report:
    """The report of *view*, with the *facts* that are known of its sending."""
    if isinstance(view, UncountedView):
        return _uncounted(view, facts)
    measured, budget, request = view.measured, view.budget, view.request
    ratio, counts, edits = measured.known.token_ratio, measured.counts, view.edits
    envelope, by_region = measured.parsed.envelope, _by_region(view)
    # What the client sent was larger: the view's tools may be shrunk, and a feature may have removed text before.
    tokens_before = view.expected_tokens + int((counts.fixed - budget.fixed + request.tokens_removed) * ratio)
    if edits.record:
        tokens_before = int((counts.total + request.tokens_removed) * ratio)
    members = _base(request, view.known, envelope.model, envelope.session)
    if not members["conversation"] and view.layout is not None:
        members["conversation"] = base64.urlsafe_b64encode(measured.root_hash[:12]).decode()
    members["client_compaction"] = measured.client_compaction
    pairs: Sequence[Pair] = ()
    if measured.has_facts:
        pairs = pairs_of(measured.parsed.items, 0, len(measured.parsed.items))
    members |= _optional_part(view, policy.rules.allocation, by_region, pairs) | facts
    outcome: OutcomeName = "verbatim"
    reason, stages = _counted_reason(view), edits.stages
    if request.prepared:
        stages = _all_stages(request, stages)
    if not view.observation:
        outcome = _outcome(request, edited=bool(edits.stages) or not edits.is_verbatim)
        if budget.history_cap is not None and view.tokens - budget.fixed > budget.history_cap:
            outcome, reason = "degraded", BUDGET_UNREACHABLE
    return Report(
        **members,
        stream=envelope.stream,
        outcome=outcome,
        reason=reason,
        tokens_before=tokens_before,
        tokens_after=view.expected_tokens,
        stages=stages,
        regions=to_provider_tokens(by_region, ratio),
        event=edits.compacted_now,
        observed=bool(view.observation),
        **_newest_part(view, pairs),
    )


def _by_region(view: CountedView) -> dict[str, int]:
    """The tokens of *view* and its reserve by region, in our own count."""
    counts, budget = view.measured.counts, view.budget
    beside = counts.beside
    if counts.fixed != budget.fixed:
        # Only the tools can have been made smaller; the rest of the fixed part is as the client sent it.
        beside = structs.replace(beside, tools=beside.tools - (counts.fixed - budget.fixed))
    return regions(
        view.roles,
        beside,
        fixed=budget.fixed - counts.roles.system + view.roles.system,
        summary=view.summary,
        reserve=view.edits.lowered_output or budget.reserve,
    )


def report_of_local(measured: MeasuredRequest, **facts: Any) -> Report:
    """Return the report of an answer of our own to a *measured* request, with further *facts*."""
    envelope = measured.parsed.envelope
    members = _base(measured.request, measured.known, envelope.model, envelope.session)
    # No source of the window: no model was called whose window it is.
    members |= {"source": "", "client_compaction": measured.client_compaction, **facts}
    return Report(**members, stream=envelope.stream, outcome="compacted", reason=SERVED)


def conversation_of(request: Request, session: str) -> str:
    """Return the public name of the conversation of *request*; empty if neither headers nor body name it.

    *session* is the name that the body gives it.
    """
    label = request.options.conversation.removesuffix(OBSERVED).removesuffix(ALL_ITEMS)
    named = label or request.session or session
    if not named:
        return ""
    return public_session_name(request.tenant, named)


def _base(request: Request, known: KnownRoute, model: str, session: str) -> dict[str, Any]:
    """Return the members of a report that do not depend on a token count.

    *model* and *session* are the names of the model and of the conversation in the body.
    """
    return {
        "request_id": request.request_id,
        "api": request.api,
        "model": request.requested_model or request.path_model or model,
        "upstream": known.route.upstream,
        "window": known.window,
        "source": known.window_source,
        "project": request.options.project,
        "task_size": request.options.task_size or known.route.task_size,
        "conversation": conversation_of(request, session),
        "agent": request.agent,
        "epoch": request.epoch,
        "client_compaction": request.client_compaction,
        "fallback": request.fallback_model,
    }


def _outcome(request: Request, *, edited: bool) -> OutcomeName:
    if edited or not ADDED_STAGES.issuperset(request.prepared):
        return "compacted"
    if request.fallback_model:
        return "degraded"
    return "verbatim"


def _all_stages(request: Request, stages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the stages that features applied before planning, then *stages*, each once."""
    return tuple(dict.fromkeys((*request.prepared, *stages)))


def _uncounted(view: UncountedView, facts: dict[str, Any]) -> Report:
    request = view.request
    members = _base(request, view.known, view.model, view.session)
    members |= facts
    if view.is_off:
        members["window"] = None
    if view.bound:
        before = view.bound + request.tokens_removed
        members |= {"tokens_before": before, "tokens_after": view.bound, "bounded": True}
    stages = view.stages
    if request.prepared:
        stages = _all_stages(request, stages)
    return Report(
        **members,
        stream=view.stream,
        outcome=_outcome(request, edited=bool(view.stages)),
        reason=_uncounted_reason(view),
        budget=view.budget,
        stages=stages,
    )


def _uncounted_reason(view: UncountedView) -> str:
    if view.request.fallback_model:
        return "fallback"
    if view.is_off:
        return "off"
    if view.bound:
        return ""
    return "unknown-window"


def _counted_reason(view: CountedView) -> str:
    if view.observation == "fits":
        return ""
    if view.observation:
        return view.observation
    if view.request.fallback_model:
        return "fallback"
    if view.edits.nothing_to_fold:
        return "nothing_to_fold"
    return ""


def _optional_part(
    view: CountedView, allocation: Allocation | None, by_region: Mapping[str, int], pairs: Sequence[Pair]
) -> dict[str, Any]:
    """Return the members of a report that only some counted views have; *pairs* as for ``_newest_part``."""
    budget, record, ratio = view.budget, view.edits.record, view.measured.known.token_ratio
    members: dict[str, Any] = {}
    if view.known.window is not None:
        room = budget.input
        if view.edits.lowered_output:
            room = max(0, budget.input_budget(view.edits.lowered_output))
        members["budget"] = int(room * ratio)
    if allocation is not None:
        members["borrowed"] = to_provider_tokens(borrowed(by_region, allocation, budget.window), ratio)
    compaction = NO_COMPACTION
    if record is not None:
        members["summary_tokens"] = record.summary_spent
        if not view.observation:
            compaction = record.compaction
    if view.measured.has_facts:
        members["files_read"] = files_read(pairs, compaction)
    return members


_ANSWERS: Final = attrgetter("answers")


def _newest_part(view: CountedView, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the members of a report about items that no earlier request had.

    *pairs* are all results with their calls; none if their facts were not read.
    ``large_result`` is the share of the room left that the largest fresh result takes, if it is worth a warning: the
    client can still request less. ``repeated_prefix`` is the share of the view that is equal to the beginning of the
    request before, which a provider's prompt cache may hold: only system text and tools after a compaction.
    """
    measured, layout = view.measured, view.layout
    items, counts, ratio = measured.parsed.items, measured.counts, measured.known.token_ratio
    results = [item.tokens for item in takewhile(_ANSWERS, reversed(items))]
    fresh, largest = sum(results), max(results, default=0)
    large = LARGE * (view.budget.input - counts.total + fresh)
    waste: dict[str, int] = {}
    if view.edits.compacted_now:
        waste = needless_items(items, pairs, counts.beside.injected)
    newest = sum(item.tokens for item in items[unread_from(items, len(items)) :] if item.role != "system")
    members: dict[str, Any] = {"newest_tokens": int(newest * ratio)}
    if 0 < large < fresh:
        waste["fresh_results"] = fresh
    if 0 < large < largest:
        waste["fresh_result"] = largest
        members["large_result"] = round(LARGE * largest / large, 2)
    if waste:
        members["waste"] = to_provider_tokens(waste, ratio)
    if not counts.roles.assistant + counts.roles.tool and view.known.window:
        members["first_fill"] = counts.total * ratio / view.known.window
    elif layout is not None:
        # The request before ended at the last boundary but one, if there is such a boundary.
        before = layout.sums[sum(layout.boundaries[-2:-1])]
        repeated = view.counted - layout.sums[-1] + before
        if view.edits.compacted_now:
            repeated = view.budget.fixed
        members["repeated_prefix"] = max(0.0, repeated / max(1, view.counted))
    return members
