"""Error answers as providers really gave them, kept beside the repository."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("ULLAGE_SHARED") or Path(__file__).parents[4] / "shared")
FILE = FOLDER / "overflow_errors.jsonl"

SPOKEN = {"openai", "azure_openai", "anthropic", "vllm", "llama_cpp"}
"""Providers whose wordings are known by heart."""

AFTER_CONTENT = {"llama_cpp-005", "llama_cpp-007"}
"""Streams that break off after words of the answer: too late to send anything smaller."""

Row = dict[str, Any]


def rows() -> list[Row]:
    """Every recorded answer; skips the test where the recordings are not at hand."""
    if not FILE.is_file():
        pytest.skip(f"no recorded error answers in {FOLDER} (ULLAGE_SHARED names another folder)")
    return [json.loads(line) for line in FILE.read_text("utf-8").splitlines() if line]


KINDS = {
    "input_too_long": "input",
    "input_plus_output_too_long": "input_plus_output",
    "payload_too_large": "payload",
    "output_cap_too_large": "output_cap",
    "rate_limit": "rate_limit",
}
"""The recordings' names of kinds, and ours."""
