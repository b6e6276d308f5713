"""The order in which models and sizes are tried, as data: before anything is sent, and after an upstream refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from proxy.core.compaction.schedule import CompactionTarget, LowerOutput, MaxLoss
from proxy.core.decisions import View
from proxy.core.models import COMPRESS, Failure
from proxy.core.overflow.kinds import Overflow

REQUESTED: Final = ""
"""Stands for the requested model where a fallback's name could stand."""

SHRINKS: Final = 2
"""How often an overflow is answered with something smaller; then the provider's first error goes to the client."""

SHRINK_SHARE: Final = 0.75
"""Of the view that was refused, the part that is sent next if the error states no figure to go by."""

NO_NEWS: Final = frozenset({400, 413, 422})
"""Statuses by which a server says again that it does not like what it was sent."""


def plans_in_order(steps: Sequence[str]) -> Iterator[tuple[str, MaxLoss]]:
    """The models and the most each may lose, once the requested model lost too much at first.

    No model drops or clips while another one need not.
    """
    if tuple(steps) in ((), (COMPRESS,)):
        return
    for max_loss in ("no_drop", "any"):
        for position, step in enumerate(steps):
            if step != COMPRESS:
                yield step, max_loss
            elif max_loss == "any" or position > 0:
                yield REQUESTED, max_loss


@dataclass(frozen=True, slots=True)
class Shrink:
    """Try something smaller than *view*, which was refused with *overflow*."""

    view: View
    overflow: Overflow


@dataclass(frozen=True, slots=True)
class Fallback:
    """Try the model called *model*."""

    model: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The upstream is at its rate limit or unavailable; *models* may answer instead."""

    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotNews:
    """After a refusal: a fallback that failed, or one more "no" about a body that the client never saw."""


NOT_NEWS: Final = NotNews()


class Attempts:
    """The attempts that are left after an upstream refused. One for each answer.

    ``fallbacks`` are the models that were not tried yet, ``postponed`` what is made smaller once all of them failed.
    """

    def __init__(self, steps: Sequence[str], view: View) -> None:
        """*steps* are those of the requested model's overflow policy; *view* is the first that is sent."""
        tried = view.request.fallback_model
        self.shrinks_left = SHRINKS
        self.fallbacks = [step for step in steps if step not in (COMPRESS, tried)]
        self.postponed: Shrink | None = None
        self._tried = {tried}
        self._begins_elsewhere = bool(steps) and steps[0] != COMPRESS

    def after(self, view: View, refusal: Overflow | Failed | NotNews) -> Iterator[Shrink | Fallback]:
        """The moves to try after *view* was refused, in order."""
        if isinstance(refusal, Failed):
            self.fallbacks = self._untried(refusal.models)
        elif isinstance(refusal, Overflow) and self._prefers_fallbacks(view):
            self.postponed = Shrink(view, refusal)
        elif isinstance(refusal, Overflow):
            if self.shrinks_left:
                yield Shrink(view, refusal)
            if refusal.kind == "output_cap":
                return  # the conversation's length is no reason to leave this model
        while self.fallbacks:
            model = self.fallbacks.pop(0)
            self._tried.add(model)
            yield Fallback(model)
        if self.postponed and self.shrinks_left:
            shrink, self.postponed = self.postponed, None
            yield shrink

    def _untried(self, models: Sequence[str]) -> list[str]:
        return [model for model in models if model not in self._tried]

    def _prefers_fallbacks(self, view: View) -> bool:
        return self._begins_elsewhere and bool(self.fallbacks) and not view.request.fallback_model


def retry_targets(overflow: Overflow, lower: LowerOutput, sent: int) -> tuple[CompactionTarget, ...]:
    """The targets to try for a view of *sent* tokens that was refused with *overflow*, in order.

    The first goes by what is known by now, the second takes off a part of what was sent. A body that was refused for
    its bytes says nothing of the window.
    """
    by_window = CompactionTarget(replaces=True, lower_output=lowering(overflow, lower))
    by_share = CompactionTarget(
        limit=int(SHRINK_SHARE * sent), force=True, replaces=True, lower_output=by_window.lower_output
    )
    if overflow.kind == "payload":
        return (by_share,)
    return by_window, by_share


def is_smaller(view: View, than: View, sent: int) -> bool:
    """True if *view* needs strictly less *than* one of *sent* tokens: fewer tokens, or a smaller output figure."""
    if view.body == than.body:
        return False
    tokens = view.tokens or 0
    if tokens < sent:
        return True
    lowered = view.lowered_output
    if tokens > sent or lowered is None:
        return False
    return than.lowered_output is None or lowered < than.lowered_output


def failure_of(status: int) -> Failure | None:
    """The failure that an answer of *status* is, if another model could answer instead; None for every other answer."""
    if status == 429:
        return "rate_limit"
    if status >= 500:
        return "unavailable"
    return None


def is_news(status: int, *, is_fallback: bool) -> bool:
    """True if an answer of *status*, to what was sent after an overflow, is for the client to see instead of that.

    A fallback that fails never is: the client did not request it. Nor is one more "no" from the requested model, whose
    figures are about a body that the client never saw.
    """
    if status < 400:
        return True
    return not is_fallback and status not in NO_NEWS


def retries_smaller(overflow: Overflow, lower: LowerOutput) -> bool:
    """True if something smaller may be sent for *overflow*: it was refused for its length before anything was made.

    An answer longer than the model ever gives is the client's to correct, unless figures may be lowered ``first``.
    """
    return overflow.too_long or (overflow.kind == "output_cap" and lower == "first" and overflow.limit is not None)


def lowering(overflow: Overflow, lower: LowerOutput) -> LowerOutput:
    """Return when to lower the output figure after *overflow*: first, if input and output were too much together."""
    if overflow.kind == "input_plus_output" and lower != "never":
        return "first"
    return lower


def fallback_cycle(start: str, steps_of: Callable[[str], Sequence[str]]) -> tuple[str, ...]:
    """Return the models on the way by fallbacks from *start* back to one of them; empty if there is no such way.

    *steps_of* gives the fallbacks of a model.
    """
    paths: list[tuple[str, ...]] = [(start,)]
    while paths:
        path = paths.pop()
        for step in steps_of(path[-1]):
            if step in path:
                return (*path, step)
            paths.append((*path, step))
    return ()
