"""Recordings that are not part of the repository: where they are, and what a test that needs them says without them.

``@pytest.mark.shared(NAME)`` marks such a test; it is skipped if the recordings are not at hand.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("ULLAGE_SHARED") or ROOT.parent / "shared")
RECORDINGS = {
    "transcripts": Path(os.environ.get("ULLAGE_TRANSCRIPTS") or SHARED / "transcripts"),
    "overflow_errors.jsonl": SHARED / "overflow_errors.jsonl",
}
"""By name: a folder of recorded conversations, and error answers of providers."""


def missing(name: str) -> str:
    """Why a test that needs the recordings called *name* cannot run; empty if it can."""
    path = RECORDINGS[name]
    if path.is_file() or any(path.glob("*.jsonl")):
        return ""
    return f"needs recordings at {path} (ULLAGE_SHARED names another folder)"
