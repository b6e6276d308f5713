"""What goes upstream for a request, or why nothing does, with its report: a plain value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from proxy.core.decisions import CountedView
from proxy.core.errors import UllageError
from proxy.core.models import Route
from proxy.core.report import Report
from proxy.core.request import Request
from proxy.engine.learned_routes import Sent


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes upstream, or why nothing does.

    ``view`` is what was decided, if the request was counted; ``tokens`` is its weight in our own count. ``sent`` is
    what its answer can teach. ``request`` is what it is a view of, if that is not the client's own request.
    ``withheld``: the view would have lost more than was allowed, and this is none to send. ``extended`` are the tokens
    of what stands behind the view while an answer is continued.
    """

    body: bytes
    report: Report
    route: Route | None = None
    view: CountedView | None = None
    output: int | None = None
    sent: Sent | None = None
    error: UllageError | None = None
    request: Request | None = None
    withheld: bool = False
    extended: int = 0

    @property
    def tokens(self) -> int | None:
        """Tokens of what goes upstream by our own count; None if it was not counted."""
        return self.view.tokens + self.extended if self.view else None

    def instead_of(self, other: Plan) -> Plan:
        """The same plan, sent after *other* was refused: the conversation's last view is the one before both."""
        if self.view is None or other.view is None:
            return self
        edits = replace(self.view.edits, previous=other.view.edits.previous)
        return replace(self, view=replace(self.view, edits=edits))
