"""Error answers as providers really gave them, in files beside the repository."""

from __future__ import annotations

import gzip
import json
from typing import Any

from tests.support.shared_recordings import RECORDINGS

FILE = RECORDINGS["overflow_errors.jsonl"]

KINDS = {
    "input_too_long": "input",
    "input_plus_output_too_long": "input_plus_output",
    "payload_too_large": "payload",
    "output_cap_too_large": "output_cap",
    "rate_limit": "rate_limit",
}
"""The recordings' names of kinds, and ours."""

BROKEN_OFF = {"llama_cpp-005", "llama_cpp-007", "openrouter-008", "anthropic-014", "zai-001", "anthropic-013"}
"""Answers that end in an overflow after something of them was given: too late to send anything smaller."""

BEYOND = {"llama_cpp_python-001"}
"""Its prompt alone is beyond the limit, which everywhere else is called input."""

Row = dict[str, Any]


def rows() -> list[Row]:
    """Every recorded answer."""
    return [json.loads(line) for line in FILE.read_text("utf-8").splitlines() if line]


def headers(row: Row) -> tuple[tuple[str, str], ...]:
    """The headers a row names."""
    return tuple(row.get("headers", {}).items())


def described(headers: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """Content type and encoding of an answer by its *headers*; empty if they do not name it."""
    named = {name.lower(): value for name, value in headers}
    return named.get("content-type", ""), named.get("content-encoding", "")


def body_of(row: Row) -> bytes:
    """A row's body, as bytes."""
    body: bytes = row["body"].encode()
    return gzip.compress(body) if "gzip" in row.get("headers", {}).get("content-encoding", "") else body
