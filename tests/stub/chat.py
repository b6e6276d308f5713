"""The API ``/v1/chat/completions`` of the strict upstream: its rules, its count of tokens, and its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.stub.answers import streamed, whole
from tests.stub.rules import invalid_body, judge, overflow_error
from tests.stub.tokens import fixed_tokens as fixed
from tests.stub.tokens import message_tokens as weigh

__all__ = ["LIST", "PATH", "fixed", "head", "invalid_body", "items", "judge", "overflow_error", "streamed", "usage"]
__all__ += ["weigh", "whole"]

PATH, LIST = "/chat/completions", "messages"


def items(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What the conversation consists of."""
    return body.get("messages") or ()


def head(body: Mapping[str, Any]) -> object:
    """What the provider's prompt cache reads before the items."""
    return {key: body.get(key) for key in ("model", "tools", "functions", "response_format")}


def usage(input_tokens: int, output_tokens: int, cached: int) -> dict[str, Any]:
    """The figures of an answer, as this API spells them."""
    return {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
