"""From a wanted to a verified text: in one call where it fits, else folded chunk by chunk, never over a window."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from proxy.core.conversation import ItemText
from proxy.core.request import Origin
from proxy.engine.ports import Counter, Summary, SummaryRequest, Upstream
from proxy.summaries.api_formats import API_FORMATS, append_to_prompt, encode_json, output_allowance
from proxy.summaries.model_call import CallFailed, Summariser, call_model
from proxy.summaries.prompts import Prompts
from proxy.summaries.transcript import split_transcript
from proxy.summaries.verify import Source, verify

FRAME = 700
"""Tokens of the instructions and the fence of one call, generously."""

FILL = 0.7
"""Share of a window, as our count has it, that a call's transcript takes at most."""

DETAILS = (1.0, 0.25)
"""How much is shown of results, arguments and answers: all that has its place, else what can be paid for."""

PROMPT = 500
"""Tokens they really take, about."""

SMALLEST = 500
"""Tokens of transcript that a call must have room for to be worth making."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A verified text and what it took, in the model's own tokens where it told them."""

    text: str
    calls: int
    input_tokens: int
    output_tokens: int


class NotWritten(Exception):
    """There is no text; ``reason`` is a fixed word. ``tried``: a model was asked; ``taken`` as of ``Draft``.

    ``needed``: about how many tokens it would have taken.
    """

    def __init__(
        self,
        reason: str,
        *,
        tried: bool,
        limited: bool = False,
        calls: int = 0,
        taken: tuple[int, int] = (0, 0),
        needed: int = 0,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.tried = tried
        self.limited = limited
        self.calls = calls
        self.taken = taken
        self.needed = needed


CheckBudget = Callable[[int], Awaitable[str]]
"""Says, as a fixed word, why so many tokens may not be spent; an empty one where they may."""


class Writer:
    """Writes summaries through *upstream*, each call within *seconds*; *agent* names us to the upstream.

    *aligned*: the request's own prompt is sent again with the instruction behind it, so that the provider's cache has
    most of it.
    """

    def __init__(
        self, upstream: Upstream, counter: Counter, prompts: Prompts, agent: str, seconds: float, *, aligned: bool
    ) -> None:
        self._upstream = upstream
        self._counter = counter
        self._prompts = prompts
        self._agent = agent
        self._seconds = seconds
        self._aligned = aligned

    @property
    def version(self) -> bytes:
        """What changes with the texts sent."""
        return self._prompts.version + (b"+" if self._aligned else b"")

    @property
    def aligned(self) -> bool:
        """Whether the request's own prompt is used where its own model writes."""
        return self._aligned

    async def write(
        self, wanted: SummaryRequest, summariser: Summariser, base: Summary | None, allow: CheckBudget
    ) -> Draft:
        """The text of *wanted*, on top of *base* where there is one. Raises ``NotWritten``."""
        entries = await asyncio.to_thread(wanted.read_entries, 0, wanted.prefix.length)
        fresh = entries[base.length if base else 0 :]
        warm = self._warm(wanted, summariser)
        if warm is not None:
            await self._allowed(wanted, warm[1], allow)
            return await self._ask(_Run(wanted, summariser), entries, [warm[0]])
        for detail in DETAILS:
            chunks, tokens = await asyncio.to_thread(self._plan, wanted, summariser, base, fresh, detail)
            if not chunks:
                raise NotWritten("too_small", tried=False)
            try:
                await self._allowed(wanted, tokens, allow)
            except NotWritten as error:
                if error.reason != "budget" or detail == DETAILS[-1]:
                    raise
                continue
            return await self._ask(_Run(wanted, summariser, base.text if base else ""), entries, chunks)
        raise AssertionError("the last attempt returns or raises")

    async def _allowed(self, wanted: SummaryRequest, tokens: int, allow: CheckBudget) -> None:
        needed = int(tokens * wanted.token_ratio)
        if reason := await allow(needed):
            raise NotWritten(reason, tried=False, needed=needed)

    def _count(self, summariser: Summariser) -> Callable[[str], int]:
        return lambda text: self._counter.count(summariser.encoding, text)

    def _plan(
        self,
        wanted: SummaryRequest,
        summariser: Summariser,
        base: Summary | None,
        fresh: Sequence[ItemText],
        detail: float,
    ) -> tuple[list[str], int]:
        """What is to be sent, and about how many tokens it takes in all.

        Each chunk leaves so much of the window that no miscount makes a call too big for it.
        """
        count = self._count(summariser)
        output = output_allowance(summariser.model, wanted.cap)
        room = min(int(summariser.window * FILL), summariser.window - output - 2 * wanted.cap - FRAME)
        chunks = split_transcript(fresh, room, count, detail) if room >= SMALLEST else []
        each = PROMPT + wanted.cap  # what is asked and what is written
        before = wanted.cap * (len(chunks) - (base is None))
        return chunks, sum(map(count, chunks)) + each * len(chunks) + before

    def _warm(self, wanted: SummaryRequest, summariser: Summariser) -> tuple[bytes, int] | None:
        """The request's own prompt with the instruction behind it, and its tokens; ``None`` where it may not fit."""
        warm = wanted.cached_prompt(wanted.prefix.length) if self._aligned and summariser.is_request_model else None
        output = output_allowance(summariser.model, wanted.cap)
        if warm is None or warm.tokens * 1.1 + output + FRAME > summariser.window:
            return None
        text = self._prompts.aligned(wanted.cap)
        body = append_to_prompt(
            API_FORMATS[summariser.api], summariser.model, warm.envelope_json, warm.items, text, output
        )
        return body, warm.tokens + FRAME + output

    async def _ask(self, run: _Run, entries: Sequence[ItemText], chunks: Sequence[str | bytes]) -> Draft:
        """The text after the last of *chunks*, each folded into what the ones before gave; *entries* bear it out."""
        summariser, wanted = run.summariser, run.wanted
        source = await asyncio.to_thread(Source, entries, wanted.prefix.tokens)
        count, origin = self._count(summariser), wanted.request.origin
        assert origin is not None
        for chunk in chunks:
            body = chunk if isinstance(chunk, bytes) else self._body(run, chunk)
            run.text = await self._verified(run, source, origin, body, count)
        return Draft(run.text, run.calls, run.taken[0], run.taken[1])

    async def _verified(
        self, run: _Run, source: Source, origin: Origin, body: bytes, count: Callable[[str], int]
    ) -> str:
        run.calls += 1
        try:
            written = await call_model(self._upstream, run.summariser, origin, self._agent, body, self._seconds)
        except CallFailed as error:
            run.took(*error.taken)
            raise NotWritten(
                error.reason, tried=True, limited=error.limited, calls=run.calls, taken=run.taken
            ) from None
        asked = written.input_tokens if written.input_tokens is not None else len(body) // 4
        told = written.output_tokens if written.output_tokens is not None else count(written.text)
        run.took(asked, told)
        verdict = await asyncio.to_thread(verify, written.text, source, run.wanted.cap, count)
        if verdict.reason:
            raise NotWritten(verdict.reason, tried=True, calls=run.calls, taken=run.taken)
        return verdict.text

    def _body(self, run: _Run, chunk: str) -> bytes:
        nonce, cap, summariser = secrets.token_hex(8), run.wanted.cap, run.summariser
        system = self._prompts.system(nonce, cap)
        text = self._prompts.request(nonce, chunk, run.text)
        return encode_json(
            API_FORMATS[summariser.api].ask(summariser.model, system, text, output_allowance(summariser.model, cap))
        )


@dataclass(slots=True)
class _Run:
    """One text on its way: what it is so far, and what it took."""

    wanted: SummaryRequest
    summariser: Summariser
    text: str = ""
    calls: int = 0
    taken: tuple[int, int] = (0, 0)

    def took(self, asked: int, told: int) -> None:
        """Add what a call took."""
        self.taken = (self.taken[0] + asked, self.taken[1] + told)
