"""What an error answer turned out to mean: one frozen value, whoever spoke and however it was wrapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["input", "input_plus_output", "payload", "output_cap", "rate_limit", "stop"]
"""What was too much.

- ``input``: the conversation by itself is longer than the window (or than the provider's cap of the input)
- ``input_plus_output``: it fits, but not together with the output that was asked for or had been generated
- ``payload``: bytes, or characters of one message; says nothing of the window
- ``output_cap``: more output was asked for than the model may ever give; the input is innocent
- ``rate_limit``: more tokens than this credential may spend in a span of time; says nothing of the window
- ``stop``: generation ran into the window and was billed: something to learn from, never to retry
"""


@dataclass(frozen=True, slots=True)
class Overflow:
    """What an answer states, in the provider's tokens; ``None`` where it says nothing.

    ``limit`` is the window or the cap of the input; for ``output_cap`` the most output, for ``rate_limit`` the tokens
    of a span; never set for ``payload``. ``prompt`` and ``output`` are what the request had and asked for,
    ``requested`` both together. ``decisive``: a machine-readable code said so. ``rule``: who speaks so, or the code.
    ``names_media``: it complains of an image or a
    file, perhaps of its size alone. ``sure``: what it states may be learned before
    a smaller view was answered.
    """

    kind: Kind
    limit: int | None = None
    prompt: int | None = None
    output: int | None = None
    decisive: bool = False
    requested: int | None = None
    rule: str = ""
    names_media: bool = False
    sure: bool = True

    @property
    def too_long(self) -> bool:
        """Whether a smaller view may succeed where this one was refused before anything was generated."""
        return self.kind in ("input", "input_plus_output", "payload")

    @property
    def window(self) -> int | None:
        """What this teaches about the window, in the provider's tokens; ``None`` where it teaches nothing."""
        return self.limit if self.kind in ("input", "input_plus_output") else None
