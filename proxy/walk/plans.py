"""What a request is measured as, and what is decided for it: plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from proxy.core.budget.catalogue import Route
from proxy.core.budget.figures import NO_BUFFERS, Buffers, Figures, economy_cap, reserve, scaled
from proxy.core.compression.event import Event, Rules
from proxy.core.compression.record import Record
from proxy.core.compression.schedule import Schedule
from proxy.core.compression.truncate import Truncate
from proxy.core.compression.view import Raw
from proxy.core.conversation import chat, messages, responses
from proxy.core.conversation.dialect import Dialect
from proxy.core.conversation.items import Layout
from proxy.core.errors import UllageError
from proxy.core.overflow.policy import Lower
from proxy.core.report import Report
from proxy.ports import Request
from proxy.walk.lessons import Sent
from proxy.walk.reading import Reading

DIALECTS: Mapping[str, Dialect] = MappingProxyType({"chat": chat, "messages": messages, "responses": responses})


@dataclass(frozen=True, slots=True)
class Policy:
    """How views are kept small: the schedule's rules, and when an output figure may be lowered.

    ``stored``: whether a provider may cut a history that only it has, or its error is the answer. ``economy`` compacts
    where it gets dear and not only where it gets full. ``always`` caps every tool result before it is first sent.
    ``recall`` offers a tool that shows what left a view.
    """

    rules: Rules
    lower_output: Lower = "last"
    stored: Literal["truncate", "error"] = "truncate"
    economy: bool = False
    buffers: Buffers = NO_BUFFERS
    always: Truncate | None = None
    recall: bool = False

    def figures(self, route: Route, window: int, requested: int | None, fixed: int, factor: float) -> Figures:
        """What a request may use; *window* and *requested* are in the provider's tokens, the rest in ours."""
        usual = reserve(None, route.max_output, window)
        limit = None if route.max_input is None else scaled(route.max_input, factor)
        cap = scaled(economy_cap(window, route.tier), factor) if self.economy else None
        held = reserve(requested, route.max_output, window)
        return Figures(
            scaled(window, factor), scaled(held, factor), fixed, scaled(usual, factor), limit, cap, self.buffers
        )

    def schedule(self, subject: Subject, figures: Figures | None = None) -> Schedule:
        """What decides on the events of *subject*, under *figures* in place of its own if given."""
        rules = self.rules
        if subject.reading.outline.stored:
            # Calls whose results are here, and results whose calls are, may be what the provider keeps.
            rules = replace(rules, rungs=replace(rules.rungs, fold=False, drop=False))
        return Schedule(subject.reading.items, subject.layout, figures or subject.figures, rules)


@dataclass(frozen=True, slots=True)
class Subject:
    """One request under consideration, measured. ``factor``: provider tokens per token of our count.

    ``lower`` says when its output figure may give way, where not the policy does. ``recall`` are the tokens of the tool
    that shows what left the view, where that may be offered: room is kept for it from the start.
    """

    request: Request
    route: Route
    reading: Reading
    layout: Layout
    figures: Figures
    factor: float
    requested: int | None
    report: Report
    lower: Lower | None = None
    recall: int = 0

    def without_recall(self) -> Subject:
        """The same with no room kept for the tool."""
        if not self.recall:
            return self
        return replace(self, figures=replace(self.figures, fixed=self.figures.fixed - self.recall), recall=0)

    @property
    def total(self) -> int:
        """Tokens of the request as the client sent it."""
        return self.reading.fixed + self.reading.history

    @property
    def raw(self) -> Raw:
        """Its items as they came, to be written from."""
        reading, dialect = self.reading, DIALECTS[self.request.api]
        return Raw(reading.body, reading.scan.spans, reading.items, self.layout, dialect)

    @property
    def is_managed(self) -> bool:
        """Whether the client asked the provider to shorten the conversation itself, before it is too long."""
        managed = self.reading.outline.managed
        return managed is not None and managed <= self.figures.window * self.factor

    def root(self, links: Sequence[bytes]) -> bytes:
        """The link that names the conversation from its task on."""
        task = self.layout.task
        return links[task if task is not None else 0] if links else b""


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes upstream, or why nothing does. ``tokens`` is the view's weight in our own count, if counted.

    ``record`` is the event that the view comes from, ``subject`` what was measured; ``links`` name the conversation
    after each item. ``request`` is what it is a view of, where that is not the client's own request. ``withheld``: it
    would have gone further than was allowed; nothing was decided, and this is no view to send. ``recall``: it offers
    the tool that shows what left it. ``before`` is the event that the conversation's last view came from.
    """

    body: bytes
    report: Report
    route: Route | None = None
    tokens: int | None = None
    subject: Subject | None = None
    output: int | None = None
    sent: Sent | None = None
    error: UllageError | None = None
    record: Record | None = None
    request: Request | None = None
    withheld: bool = False
    recall: bool = False
    links: tuple[bytes, ...] = field(default=(), repr=False)
    before: Event | None = None
