"""The room that declared tools take, and how much of it they are left."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

from proxy.core.compression.tools import shrink
from proxy.core.conversation.outline import TOOLS
from proxy.walk.plans import Policy, Subject
from proxy.walk.reading import Reader


class ToolRoom:
    """Makes tools arrays smaller where they leave hardly any room. ``tools`` remembers how: a bounded mapping."""

    def __init__(
        self, reader: Reader, policy: Policy, tools: MutableMapping[tuple[bytes, str, str, int], tuple[str, int]]
    ) -> None:
        self._reader = reader
        self._policy = policy
        self._tools = tools

    def shrunk(self, subject: Subject) -> tuple[Subject, str | None]:
        """*subject* with a smaller tools array where the tools leave hardly any room; the same on every call."""
        figures, sizes = subject.figures, subject.reading.sizes
        name = next((key for key in TOOLS if key in sizes), None)
        if not self._policy.rules.rungs.tools or name is None:
            return subject, None
        others = figures.fixed - sizes[name]
        target = self._target(subject, others)
        if target is None or target >= sizes[name]:
            return subject, None
        text = subject.reading.outline.value(name)
        count = self._reader.count_tools(subject.route.encoding, subject.route.model)
        name_of = (subject.request.tenant, subject.route.name, text, target)  # nothing of one tenant times another
        if name_of not in self._tools:
            smaller = shrink(text.encode(), target, count).decode()
            self._tools[name_of] = (smaller, count(smaller))
        smaller, tokens = self._tools[name_of]
        if tokens >= sizes[name]:
            return subject, None
        return replace(subject, figures=replace(figures, fixed=others + tokens)), smaller

    def _target(self, subject: Subject, others: int) -> int | None:
        """What the tools should come down to beside *others* that are fixed, if they should."""
        figures, rules = subject.figures, self._policy.rules
        targets = []
        if (figures.lasting - figures.fixed) * 4 < figures.lasting:
            targets.append(max(0, figures.lasting * 3 // 4 - others))
        over = figures.stepped + subject.reading.history > figures.mark(rules.marks.high, figures.lasting)
        if rules.allocation is not None and over:
            # In steps, as the fixed part is: a clock in the system text must not word the tools anew.
            step = max(1, figures.window // 64)
            targets.append(rules.allocation.for_tools(figures.window, -(-others // step) * step))
        return min(targets, default=None)
