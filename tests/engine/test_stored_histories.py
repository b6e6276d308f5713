"""Histories that only the provider has: what was refused of them is not sent in vain again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.scripted_upstream import EngineFixture
from tests.support.transcript import play

TOO_LONG = b'{"error":{"message":"Your input exceeds the context window.","code":"context_length_exceeded"}}'
ANSWER = b'{"id": "resp_2", "object": "response", "output": []}'


def question(before: str = "resp_1", text: str = "Go on.", **members: Any) -> bytes:
    return json.dumps({"model": "m", "input": text, "previous_response_id": before, **members}).encode()


@pytest.mark.parametrize(
    "answer", [ANSWER, (b'data: {"type":"response.created","response":{"id":"resp_2"}}\n\n', b'data: {"type":"x"}\n\n')]
)
async def test_a_chain_that_was_truncated_is_truncated_at_once(answer: Any) -> None:
    """The request that continues a truncated answer has leave to truncate from the start; other chains do not."""
    await play(
        """
        client   >> first, api=responses
        upstream << stub, first
        upstream >> 400 too_long
        upstream << stub, truncation=auto
        upstream >> 200 answer
        client   << 200 answer

        client   >> second, api=responses
        upstream << stub, truncation=auto
        upstream >> 200 answer
        client   << 200 answer
        report   : stages=truncation

        client   >> other, api=responses
        upstream << stub, other
        upstream >> 200 answer
        client   << 200 answer
        """,
        first=question(),
        second=question("resp_2"),
        other=question("resp_7"),
        too_long=TOO_LONG,
        answer=answer,
    )


async def test_what_the_client_forbids_to_truncate_is_refused_here_the_next_time() -> None:
    """The first refusal is the provider's own; the same or a longer request is not sent, a shorter or other one is."""
    await play(
        """
        client   >> first, api=responses
        upstream << stub, first
        upstream >> 400 too_long
        client   << 400 too_long

        client   >> first, api=responses
        client   << raises StoredHistoryTooLong

        client   >> longer, api=responses
        client   << raises StoredHistoryTooLong

        client   >> shorter, api=responses
        upstream << stub, shorter
        upstream >> 200 answer
        client   << 200 answer

        client   >> less_output, api=responses
        upstream << stub, less_output
        upstream >> 200 answer
        client   << 200 answer

        client   >> free, api=responses
        upstream << stub, free
        upstream >> 200 answer
        client   << 200 answer

        client   >> first, api=responses, mode=observe
        upstream << stub, first
        upstream >> 400 too_long
        client   << 400 too_long
        """,
        first=question(truncation="disabled"),
        longer=question(text="Go on, and on.", truncation="disabled"),
        shorter=question(text="Go.", truncation="disabled"),
        less_output=question(text="Go on, and on.", truncation="disabled", max_output_tokens=99),
        free=question(text="Go on, and on."),
        too_long=TOO_LONG,
        answer=ANSWER,
    )


@pytest.mark.parametrize(
    ("error", "is_remembered"),
    [
        (b'{"error":{"message":"The input is too long: reduce the length of the messages."}}', False),
        (b'{"error":{"message":"The maximum context length is 8192 tokens, your input has 9000 tokens."}}', True),
    ],
)
async def test_only_a_code_or_figures_are_remembered(error: bytes, is_remembered: bool) -> None:
    """No request is refused here on a guess: words alone are not enough."""
    engine = EngineFixture()
    sent = """
        client   >> first, api=responses
        upstream << stub, first
        upstream >> 400 error
        client   << 400 error
    """
    again = "client   >> first, api=responses\nclient   << raises StoredHistoryTooLong" if is_remembered else sent
    for script in (sent, again):
        await play(script, engine, first=question(truncation="disabled"), error=error)
