"""Writes a verified summary: in one call if the text fits the model's window, else in one call for each chunk.

A call for a chunk gets the summary of the chunks before it, and its answer is the summary of all so far.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from proxy.core.conversation import Count, ItemText
from proxy.core.request import Origin
from proxy.engine.ports import Counter, Summary, SummaryRequest, Upstream
from proxy.summaries.apis import SUMMARY_APIS, append_to_prompt, encode_json, output_allowance
from proxy.summaries.model_call import CallFailed, Summariser, TokensUsed, call_model
from proxy.summaries.prompts import Prompts, most_words, split_transcript
from proxy.summaries.source import Source
from proxy.summaries.verify import verify
from proxy.tasks import in_background

FRAME: Final = 700
"""Most tokens of the instructions and the tags of one call."""

PROMPT: Final = 500
"""Tokens that the instructions of one call take on average."""

FILL: Final = 0.7
"""Share of a window that a transcript may take, since another model's count may be higher than ours."""

DETAILS: Final = (1.0, 0.25)
"""Shares of the usual lengths of results, arguments and answers: the second one if the first is too expensive."""

MIN_ROOM: Final = 500
"""Tokens of a transcript at least: with less room a call is not worth making."""

_CACHED_MARGIN: Final = 1.1
"""Factor by which the provider's count of a prompt, known from its last usage, may exceed ours."""


class Draft(msgspec.Struct, frozen=True):
    """A verified text, and the calls and tokens that it took."""

    text: str
    calls: int
    tokens_used: TokensUsed


class NotWritten(Exception):
    """No text was written; ``reason`` is a fixed word.

    ``called_model``: a call was made. ``limited``: the upstream rate-limited it. ``tokens_needed`` is an estimate of
    the tokens that the text would have used.
    """

    def __init__(
        self,
        reason: str,
        *,
        called_model: bool,
        limited: bool = False,
        calls: int = 0,
        tokens_used: TokensUsed = (0, 0),
        tokens_needed: int = 0,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.called_model = called_model
        self.limited = limited
        self.calls = calls
        self.tokens_used = tokens_used
        self.tokens_needed = tokens_needed


CheckBudget = Callable[[int], Awaitable[str]]
"""Takes tokens; returns a fixed word for the reason why they may not be spent, empty if they may."""


class Writer:
    """Writes summaries through *upstream*, each call within *seconds*; *agent* is our User-Agent.

    ``aligned``: if the request's own model writes, the request's own prompt is sent again, followed by the instruction.
    Most of it is then in the provider's prompt cache.
    """

    def __init__(
        self, upstream: Upstream, counter: Counter, prompts: Prompts, agent: str, seconds: float, *, aligned: bool
    ) -> None:
        self._upstream = upstream
        self._counter = counter
        self._prompts = prompts
        self._agent = agent
        self._seconds = seconds
        self.aligned = aligned

    @property
    def version(self) -> bytes:
        """A digest of the prompts and the mode."""
        if self.aligned:
            return self._prompts.version + b"+"
        return self._prompts.version

    async def write(
        self, request: SummaryRequest, summariser: Summariser, base: Summary | None, check: CheckBudget
    ) -> Draft:
        """Write the summary that *request* names, on top of *base* if there is one. Raises ``NotWritten``."""
        run = _Run(request, summariser)
        texts = await in_background(request.read_entries, 0, request.prefix.length)
        count = self._counter.counter(summariser.encoding)
        run.words = await in_background(most_words, texts, request.cap, count)
        aligned = self._aligned_body(run)
        if aligned is not None:
            body, tokens = aligned
            needed = int(tokens * request.token_ratio)
            if reason := await check(needed):
                raise NotWritten(reason, called_model=False, tokens_needed=needed)
            return await self._fold(run, texts, [body])
        new = texts
        if base is not None:
            run.text, new = base.text, texts[base.length :]
        return await self._fold(run, texts, await self._affordable_chunks(run, new, check))

    async def _affordable_chunks(self, run: _Run, new: Sequence[ItemText], check: CheckBudget) -> list[str]:
        """Return the transcript in chunks, in as much detail as the budget allows. Raises ``NotWritten`` if in none."""
        reason, needed = "", 0
        count = functools.cache(self._counter.counter(run.summariser.encoding))  # most texts are short in any detail
        for detail in DETAILS:
            chunks, tokens = await in_background(self._chunks, run, new, detail, count)
            if not chunks:
                raise NotWritten("too_small", called_model=False)
            needed = int(tokens * run.request.token_ratio)
            reason = await check(needed)
            if not reason:
                return chunks
            if reason != "budget":
                break
        raise NotWritten(reason, called_model=False, tokens_needed=needed)

    def _chunks(self, run: _Run, new: Sequence[ItemText], detail: float, count: Count) -> tuple[list[str], int]:
        """Return the transcript of *new* in chunks, and the tokens that all calls take, about.

        Each chunk leaves enough of the window that its call fits even if our count is too low.
        """
        request, summariser = run.request, run.summariser
        output = output_allowance(summariser.model, request.cap)
        room = min(int(summariser.window * FILL), summariser.window - output - 2 * request.cap - FRAME)
        if room < MIN_ROOM:
            return [], 0
        chunks, tokens = split_transcript(new, room, count, detail)
        summaries_before = len(chunks) - 1 + bool(run.text)
        return chunks, tokens + (PROMPT + request.cap) * len(chunks) + request.cap * summaries_before

    def _aligned_body(self, run: _Run) -> tuple[bytes, int] | None:
        """Return the request's own prompt followed by the instruction, and its tokens; None if it may not fit."""
        request, summariser = run.request, run.summariser
        if not self.aligned or not summariser.is_request_model:
            return None
        cached = request.cached_prompt(request.prefix.length)
        output = output_allowance(summariser.model, request.cap)
        if cached is None or cached.tokens * _CACHED_MARGIN + output + FRAME > summariser.window:
            return None
        body = append_to_prompt(
            SUMMARY_APIS[summariser.api],
            summariser.model,
            cached.envelope_json,
            cached.items,
            self._prompts.aligned(run.words),
            output,
        )
        return body, cached.tokens + FRAME + output

    async def _fold(self, run: _Run, texts: Sequence[ItemText], chunks: Sequence[str | bytes]) -> Draft:
        """Fold each of *chunks* into the summary of those before it, which is verified against *texts*."""
        source = await in_background(Source, texts, run.request.prefix.tokens)
        origin = run.request.client_request.origin
        assert origin is not None  # ``Jobs`` starts no job for a request that no client sent
        for chunk in chunks:
            body = chunk
            if isinstance(body, str):
                body = self._body(run, body)
            run.text = await self._verified(run, source, origin, body)
        return Draft(run.text, run.calls, run.tokens_used)

    async def _verified(self, run: _Run, source: Source, origin: Origin, body: bytes) -> str:
        """Return the verified answer to *body*. Raises ``NotWritten``."""
        count = self._counter.counter(run.summariser.encoding)
        run.calls += 1
        try:
            answer = await call_model(self._upstream, run.summariser, origin, self._agent, body, self._seconds)
        except CallFailed as error:
            run.add(*error.tokens_used)
            raise NotWritten(
                error.reason, called_model=True, limited=error.limited, calls=run.calls, tokens_used=run.tokens_used
            ) from None
        input_tokens, output_tokens = answer.usage.input_tokens, answer.usage.output_tokens
        if input_tokens is None:
            input_tokens = len(body) // 4
        if output_tokens is None:
            output_tokens = count(answer.text)
        run.add(input_tokens, output_tokens)
        verdict = await in_background(verify, answer.text, source, run.request.cap, count)
        if verdict.reason:
            raise NotWritten(verdict.reason, called_model=True, calls=run.calls, tokens_used=run.tokens_used)
        return verdict.text

    def _body(self, run: _Run, chunk: str) -> bytes:
        # A part of the tags around the transcript. Nobody who wrote a text in it could know it and close the tag.
        nonce, cap, summariser = secrets.token_hex(8), run.request.cap, run.summariser
        system = self._prompts.system(nonce, run.words)
        text = self._prompts.request(nonce, chunk, run.text)
        output = output_allowance(summariser.model, cap)
        return encode_json(SUMMARY_APIS[summariser.api].build_body(summariser.model, system, text, output))


class _Run(msgspec.Struct):
    """A summary being written: its text so far, the words it may have, the calls made and the tokens they took."""

    request: SummaryRequest
    summariser: Summariser
    words: int = 0
    text: str = ""
    calls: int = 0
    tokens_used: TokensUsed = (0, 0)

    def add(self, input_tokens: int, output_tokens: int) -> None:
        """Add the tokens of one call."""
        self.tokens_used = (self.tokens_used[0] + input_tokens, self.tokens_used[1] + output_tokens)
