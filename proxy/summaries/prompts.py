"""The prompts: templates beside this module, filled in here. Their digest is their version."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Final

WORDS_PER_TOKEN: Final = 0.5
"""Words asked for per token of the cap: identifiers and paths take several tokens each, and models overshoot."""

_MIN_WORDS: Final = 40
_NAMES: Final = ("summary", "request", "previous", "aligned")


@dataclass(frozen=True, slots=True)
class Prompts:
    """The texts sent to a summariser. ``version`` (8 bytes) changes with any of them.

    *nonce* is part of the tags around the transcript, so that no text inside it can end it.
    """

    templates: Mapping[str, Template]
    version: bytes

    def system(self, nonce: str, cap: int) -> str:
        """The instructions for a summary of at most *cap* tokens."""
        return self.templates["summary"].substitute(nonce=nonce, words=_words(cap))

    def request(self, nonce: str, transcript: str, previous: str) -> str:
        """The *transcript* as data, behind the *previous* summary if there is one."""
        before = self.templates["previous"].substitute(nonce=nonce, summary=previous) if previous else ""
        return self.templates["request"].substitute(nonce=nonce, transcript=transcript, previous=before)

    def aligned(self, cap: int) -> str:
        """The instruction put behind a conversation that is sent as it is."""
        return self.templates["aligned"].substitute(words=_words(cap))


def load_prompts() -> Prompts:
    """The prompts of this package."""
    folder = files("proxy.summaries") / "prompts"
    texts = {name: (folder / f"{name}.md").read_text("utf-8") for name in _NAMES}
    version = hashlib.sha256("\0".join(texts[name] for name in _NAMES).encode()).digest()[:8]
    return Prompts({name: Template(text) for name, text in texts.items()}, version)


def _words(cap: int) -> int:
    return max(_MIN_WORDS, int(cap * WORDS_PER_TOKEN))
