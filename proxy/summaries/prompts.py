"""The prompts: texts beside this module, filled in here. Their digest is their version."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from string import Template

_NAMES = ("summary", "request", "previous", "aligned")
WORDS_PER_TOKEN = 0.5
"""Words asked for per token of the cap: identifiers and paths take several tokens each, and models overshoot."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The texts sent to a summariser. ``version`` changes with any of them."""

    templates: dict[str, Template]
    version: bytes

    def system(self, nonce: str, cap: int) -> str:
        """What the summariser is told to do, within *cap* tokens."""
        return self.templates["summary"].substitute(nonce=nonce, words=_words(cap))

    def request(self, nonce: str, transcript: str, previous: str) -> str:
        """The *transcript* as data, behind the *previous* summary where there is one."""
        before = self.templates["previous"].substitute(nonce=nonce, summary=previous) if previous else ""
        return self.templates["request"].substitute(nonce=nonce, transcript=transcript, previous=before)

    def aligned(self, cap: int) -> str:
        """The instruction that ends a conversation which is sent as it is."""
        return self.templates["aligned"].substitute(words=_words(cap))


def load_prompts() -> Prompts:
    """The prompts that come with the package."""
    folder = files("proxy.summaries") / "prompts"
    texts = {name: (folder / f"{name}.md").read_text("utf-8") for name in _NAMES}
    version = hashlib.sha256("\0".join(texts[name] for name in _NAMES).encode()).digest()[:8]
    return Prompts({name: Template(text) for name, text in texts.items()}, version)


def _words(cap: int) -> int:
    return max(40, int(cap * WORDS_PER_TOKEN))
