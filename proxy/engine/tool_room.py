"""The room that declared tools take, and how much of it they are left."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

from proxy.core.budget.catalogue import Route
from proxy.core.budget.figures import TokenBudget
from proxy.core.compaction.truncate import shrink_tools
from proxy.core.conversation.outline import TOOLS, Envelope
from proxy.core.decisions import Policy, TokenCounts
from proxy.engine.reading import Reader


class ToolRoom:
    """Makes tools arrays smaller where they leave hardly any room. ``tools`` remembers how: a bounded mapping."""

    def __init__(
        self, reader: Reader, policy: Policy, tools: MutableMapping[tuple[bytes, str, str, int], tuple[str, int]]
    ) -> None:
        self._reader = reader
        self._policy = policy
        self._tools = tools

    def shrunk(
        self, tenant: bytes, route: Route, envelope: Envelope, counts: TokenCounts, budget: TokenBudget
    ) -> tuple[str, TokenBudget]:
        """The tools array made smaller if the tools leave hardly any room, and *budget* with it; the same every time.

        The array is empty if it stays as it is.
        """
        name = next((key for key in TOOLS if key in counts.members), None)
        if not self._policy.rules.rungs.tools or name is None:
            return "", budget
        size = counts.members[name]
        others = budget.fixed - size
        target = self._target(counts, budget, others)
        if target is None or target >= size:
            return "", budget
        text = envelope.value(name)
        name_of = (tenant, route.name, text, target)  # nothing of one tenant times another
        known = self._tools.get(name_of)
        if known is None:
            count = self._reader.count_tools(route.encoding, route.model)
            smaller = shrink_tools(text.encode(), target, count).decode()
            known = self._tools[name_of] = (smaller, count(smaller))
        smaller, tokens = known
        if tokens >= size:
            return "", budget
        return smaller, replace(budget, fixed=others + tokens)

    def _target(self, counts: TokenCounts, budget: TokenBudget, others: int) -> int | None:
        """What the tools should come down to beside *others* that are fixed, if they should."""
        rules = self._policy.rules
        targets = []
        if (budget.baseline - budget.fixed) * 4 < budget.baseline:
            targets.append(max(0, budget.baseline * 3 // 4 - others))
        over = budget.quantised_fixed + counts.history > budget.mark(rules.marks.high, budget.baseline)
        if rules.allocation is not None and over:
            # In steps, as the fixed part is: a clock in the system text must not word the tools anew.
            step = max(1, budget.window // 64)
            targets.append(rules.allocation.for_tools(budget.window, -(-others // step) * step))
        return min(targets, default=None)
