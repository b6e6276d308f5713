"""What to try when a conversation does not fit, and in which order: make it smaller, or ask another model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.core.budget.catalogue import COMPRESS
from proxy.core.compaction.schedule import LowerOutput, MaxLoss
from proxy.core.overflow.kinds import Overflow


def first_max_loss(steps: Sequence[str]) -> MaxLoss:
    """How much the model that was asked for may lose before another step of its policy is looked at."""
    if tuple(steps) == (COMPRESS,):
        return "any"
    return "no_drop" if steps[0] == COMPRESS else "none"


def retries_smaller(overflow: Overflow, lower: LowerOutput) -> bool:
    """Whether something smaller may be sent for *overflow*: it was refused for its length before anything was made.

    An answer longer than the model ever gives is the client's to correct, unless figures may be lowered ``first``.
    """
    return overflow.too_long or (overflow.kind == "output_cap" and lower == "first" and overflow.limit is not None)


def is_news(status: int, *, rescue: bool) -> bool:
    """Whether an answer of *status*, to what was sent after an overflow, is for the client to see instead of that.

    A fallback that fails never is: nobody asked for it. Nor is one more "no" from the model itself, whose figures are
    about a body that the client never saw.
    """
    return status < 400 or not (rescue or status in (400, 413, 422))


def lowering(overflow: Overflow, lower: LowerOutput) -> LowerOutput:
    """When the output figure gives way in what is sent for *overflow*: first, if input and output were too much."""
    return "first" if overflow.kind == "input_plus_output" and lower != "never" else lower


def fallback_cycle(start: str, steps_of: Callable[[str], Sequence[str]]) -> tuple[str, ...]:
    """The way by fallbacks from the model *start* back to a model on it; empty where there is none.

    *steps_of* gives the fallbacks of a model.
    """
    trail: list[tuple[str, ...]] = [(start,)]
    while trail:
        way = trail.pop()
        for step in steps_of(way[-1]):
            if step in way:
                return (*way, step)
            trail.append((*way, step))
    return ()
