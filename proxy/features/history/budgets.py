"""A conversation's own budget: the tokens it has used, as providers report them, against those it may use.

The tokens that this process counts are added in the store every few seconds, and the sum of all replicas is read there.
So a figure is at most some seconds old, and no request waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import MutableMapping
from typing import Any, Final

import msgspec
from msgspec import structs

from proxy.core.decisions import View
from proxy.core.errors import StoreUnavailable
from proxy.core.report import Report, Usage
from proxy.engine.features import Feature
from proxy.features.history.states import NOTHING, Budget, decode, encode
from proxy.store.conversation_table import ConversationTable
from proxy.tasks import Spawn, Warn

WARN_ABOVE: Final = 0.8
"""Share of a budget above which each answer states how much of it is used."""

WRITE_SECONDS: Final = 2.0
"""Seconds after which counted tokens are written to the store."""

Key = tuple[bytes, str]
"""A tenant, and the public name of one of its conversations."""


class Spending(msgspec.Struct):
    """A conversation's tokens in this process: ``stored`` in the store when it was last read, ``unwritten`` since.

    ``total`` is its budget, 0 for none; ``stored_total`` is the one that the store has: this one's, or an imported one.
    """

    total: int = 0
    stored_total: int = 0
    stored: int = 0
    unwritten: int = 0
    was_read: bool = False
    was_warned: bool = False

    @property
    def budget(self) -> Budget:
        """The budget by the figures of this process."""
        return Budget(self.total or None, self.stored + self.unwritten)

    @property
    def is_nearly_used(self) -> bool:
        """True if more than ``WARN_ABOVE`` of the budget is used."""
        return bool(self.total) and self.stored + self.unwritten > WARN_ABOVE * self.total


class ConversationBudgets(Feature):
    """Counts the tokens that conversations use, and reports them above ``WARN_ABOVE`` of their budgets.

    *default* is the budget of a conversation whose request and model name none, 0 for none. *spendings* are those of
    the conversations that were used last. *warn* writes a log line.
    """

    def __init__(
        self,
        conversations: ConversationTable,
        default: int,
        spendings: MutableMapping[Key, Spending],
        spawn: Spawn,
        warn: Warn,
    ) -> None:
        self._conversations = conversations
        self._default = default
        self._spendings = spendings
        self._spawn = spawn
        self._warn = warn
        self._unwritten: set[Key] = set()
        self._writing: asyncio.Task[Any] | None = None
        self._is_ending = asyncio.Event()

    def amend(self, report: Report, view: View) -> Report:
        """Return *report* with the conversation's budget, if most of it is used; nothing is refused for it."""
        if not report.conversation:
            return report
        key = view.request.tenant, report.conversation
        spending = self._spendings.get(key)
        if spending is None:
            spending = self._spendings[key] = Spending()
        configured = view.known.route.conversation_budget or self._default
        spending.total = view.request.options.conversation_budget or configured or spending.stored_total
        if not spending.was_read:
            self._write_soon(key)  # other replicas, or this one before a restart, may have counted more
        if not spending.is_nearly_used:
            return report
        budget = spending.budget
        if not spending.was_warned:
            spending.was_warned = True
            facts = {"conversation": report.conversation, "budget": budget.total, "consumed": budget.consumed}
            self._warn("conversation.budget_nearly_used", facts)
        return report.with_(conversation_budget=budget.as_json())

    def used(self, tenant: bytes, conversation: str, usage: Usage) -> None:
        """Count the tokens of one answer."""
        spending = self._spendings.get((tenant, conversation))
        tokens = (usage.input_tokens or 0) + (usage.output_tokens or 0)
        if spending is None or not tokens:
            return
        spending.unwritten += tokens
        self._write_soon((tenant, conversation))

    async def finish(self, seconds: float) -> None:
        """Write the counted tokens now, and wait up to *seconds* until they are written."""
        self._is_ending.set()
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=seconds)

    def _write_soon(self, key: Key) -> None:
        self._unwritten.add(key)
        if self._writing is None or self._writing.done():
            self._writing = self._spawn(self._write_later(), "conversation budgets")

    async def _write_later(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITE_SECONDS):
                await self._is_ending.wait()
        await self._write()

    async def _write(self) -> None:
        """Add the counted tokens in the store and read the sums. After a failure a later answer tries again."""
        while self._unwritten:
            key = self._unwritten.pop()
            spending = self._spendings.get(key)
            if spending is None:
                continue
            tokens = spending.unwritten
            try:
                spending.stored = await self._conversations.add_consumed(*key, tokens)
                spending.unwritten -= tokens
                await self._share_total(key, spending)
            except StoreUnavailable:
                return
            spending.was_read = True

    async def _share_total(self, key: Key, spending: Spending) -> None:
        """Store the budget of *spending*; if it has none, use the stored one. Raises ``StoreUnavailable``."""
        if spending.was_read and spending.stored_total == spending.total:
            return
        state = decode(await self._conversations.state(*key)) or NOTHING
        if spending.total and state.budget.total != spending.total:
            state = structs.replace(state, budget=Budget(spending.total))
            await self._conversations.save_state(*key, encode(state))
        spending.stored_total = state.budget.total or 0
