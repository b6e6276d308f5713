"""The order in which models and sizes are tried, as data: before anything is sent, and after an upstream refused.

What ``Attempts`` tries next after each refusal, in this order and as far as it is left:

    an overflow of the input           a smaller view (at most ``SHRINKS``), then each fallback of the policy once
    the same, if the policy begins     each fallback once, then a smaller view of the first one
    with a fallback
    an output figure above the cap     a lower figure only: another model would not make the conversation shorter
    a failure with failovers           each failover once
    another refusal (``NotNews``)      the next one of what is left
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from proxy.core.compaction.schedule import CompactionTarget, LowerOutput, MaxLoss
from proxy.core.decisions import View
from proxy.core.models import COMPRESS, Failure
from proxy.core.overflow.kinds import Overflow

REQUESTED: Final = ""
"""The requested model, in place of a fallback's name."""

SHRINKS: Final = 2
"""Overflows of a request that are answered with a smaller view: first by the error's figures, then by a share."""

SHRINK_SHARE: Final = 0.75
"""The size of the next view as a share of the refused one, if the error states no figure."""

NO_NEWS: Final = frozenset({400, 413, 422})
"""Statuses that reject the body itself: about a body that the client never saw they tell it nothing."""


def plans_in_order(steps: Sequence[str]) -> Iterator[tuple[str, MaxLoss]]:
    """Yield each model to plan for and the most its view may lose, after the requested model's first plan.

    A lossy view is planned only if no model can do with a lossless one.
    """
    if tuple(steps) in ((), (COMPRESS,)):
        return
    for max_loss in ("no_drop", "any"):
        for position, step in enumerate(steps):
            if step != COMPRESS:
                yield step, max_loss
            elif max_loss == "any" or position > 0:
                yield REQUESTED, max_loss


class Shrink(msgspec.Struct, frozen=True):
    """Try a smaller view than ``view``, which was refused with ``overflow``."""

    view: View
    overflow: Overflow


class Fallback(msgspec.Struct, frozen=True):
    """Try the fallback called ``model``."""

    model: str


class Failed(msgspec.Struct, frozen=True):
    """The upstream is at its rate limit or unavailable; ``models`` may answer instead."""

    models: tuple[str, ...]


class NotNews(msgspec.Struct, frozen=True):
    """A reply after a refusal that tells the client nothing new: a failed fallback, or another refusal."""


NOT_NEWS: Final = NotNews()


class Attempts:
    """The attempts that are left for one answer after an upstream refused.

    ``fallbacks`` are the models that were not tried yet. ``postponed`` is a smaller view to try when all of them
    failed.
    """

    def __init__(self, steps: Sequence[str], view: View) -> None:
        """*steps* are those of the requested model's overflow policy; *view* is the first that is sent."""
        tried = view.request.fallback_model
        self.shrinks_left = SHRINKS
        self.fallbacks = [step for step in steps if step not in (COMPRESS, tried)]
        self.postponed: Shrink | None = None
        self._tried = {tried}
        self._fallbacks_first = bool(steps) and steps[0] != COMPRESS

    def after(self, view: View, refusal: Overflow | Failed | NotNews) -> Iterator[Shrink | Fallback]:
        """Yield what to try after *view* was refused, in order; each one yielded counts as tried."""
        if isinstance(refusal, Failed):
            self.fallbacks = self._untried(refusal.models)
        elif isinstance(refusal, Overflow) and self._prefers_fallbacks(view):
            self.postponed = Shrink(view, refusal)
        elif isinstance(refusal, Overflow):
            if self.shrinks_left:
                yield Shrink(view, refusal)
            if refusal.kind == "output_cap":
                return  # the conversation is not too long, so a model with a larger window does not help
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
        return self._fallbacks_first and bool(self.fallbacks) and not view.request.fallback_model


def retry_targets(overflow: Overflow, lower: LowerOutput, sent: int) -> tuple[CompactionTarget, ...]:
    """Return the targets to try for a view of *sent* tokens that was refused with *overflow*, in order.

    The first one fits the window as known after the refusal, the second one is a share of what was sent. A body that
    was refused for its bytes (``payload``) shows nothing about the window, so only the share is tried.
    """
    by_window = CompactionTarget(replaces=True, lower_output=lowering(overflow, lower))
    by_share = CompactionTarget(
        limit=int(SHRINK_SHARE * sent), force=True, replaces=True, lower_output=by_window.lower_output
    )
    if overflow.kind == "payload":
        return (by_share,)
    return by_window, by_share


def is_smaller(view: View, than: View, sent: int) -> bool:
    """True if *view* is strictly smaller *than* one of *sent* tokens: fewer tokens, or a smaller output figure."""
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
    """Return the failure that an answer of *status* means, if another model could answer instead; else None."""
    if status == 429:
        return "rate_limit"
    if status >= 500:
        return "unavailable"
    return None


def is_news(status: int, *, is_fallback: bool) -> bool:
    """True if an answer of *status*, sent after an overflow, goes to the client instead of the overflow's error.

    A failed fallback does not: the client did not request it. Nor does another refusal of the requested model: its
    figures are about a body that the client never saw.
    """
    if status < 400:
        return True
    return not is_fallback and status not in NO_NEWS


def retries_smaller(overflow: Overflow, lower: LowerOutput) -> bool:
    """True if a smaller view may be sent for *overflow*: the request was refused for its length.

    An output figure above the model's cap goes back to the client, unless the policy lowers figures ``first``.
    """
    return overflow.too_long or (overflow.kind == "output_cap" and lower == "first" and overflow.limit is not None)


def lowering(overflow: Overflow, lower: LowerOutput) -> LowerOutput:
    """Return when to lower the output figure after *overflow*: first, if input and output were too much together."""
    if overflow.kind == "input_plus_output" and lower != "never":
        return "first"
    return lower


def fallback_cycle(start: str, steps_of: Callable[[str], Sequence[str]], finished: set[str]) -> tuple[str, ...]:
    """Return a path by fallbacks from *start* that ends in one of its own models; empty if there is no cycle.

    *steps_of* returns the fallbacks of a model. Models that lead to no cycle are added to *finished*.
    """
    # Each model is entered once: models that have each other's fallbacks have more paths than can be walked.
    path, left = {start: None}, [iter(steps_of(start))]
    while path:
        step = next(left[-1], None)
        if step is None:
            finished.add(path.popitem()[0])
            left.pop()
        elif step in path:
            return (*path, step)
        elif step not in finished:
            path[step] = None
            left.append(iter(steps_of(step)))
    return ()
