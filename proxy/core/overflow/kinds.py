"""The meaning of an error answer: one frozen value for all providers and all formats of errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["input", "input_plus_output", "payload", "output_cap", "rate_limit", "stop"]
"""The limit that a request exceeds.

- ``input``: the conversation by itself is longer than the window, or than the provider's cap of the input
- ``input_plus_output``: the conversation fits, but not together with the output that was requested or generated so far
- ``payload``: too many bytes, or characters of one message; it shows nothing about the window
- ``output_cap``: the request wants more output than the model can ever generate; the input is not at fault
- ``rate_limit``: more tokens than this credential may use in a period; it shows nothing about the window
- ``stop``: generation reached the window and was billed; the window can be learned from it, but it is never retried
"""


@dataclass(frozen=True, slots=True)
class Overflow:
    """The facts that an answer states, in the provider's tokens; None for one that it does not state.

    ``limit`` is the window or the cap of the input; for ``output_cap`` the most output, for ``rate_limit`` the tokens
    of a span; never set for ``payload``. ``prompt`` are the tokens of the input, ``output`` those of the output that
    the request wants, ``requested`` both together. ``decisive``: a machine-readable code says so. ``rule`` is the
    source of the rule that matched, or the code. ``names_media``: it complains of an image or a file, perhaps only of
    its size. ``sure``: its limit may be learned before a smaller view succeeds. ``unlikely``: it counts only if its
    figures agree with our count; ``plausible``: or if no window is known, since its text names tokens or the prompt,
    and its figures look like a count and a limit. ``stated`` are all figures of the text, whatever their role; ``size``
    are the most bytes that a ``payload`` names. ``names_body``: it says that they are those of the request's body.
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
    unlikely: bool = False
    plausible: bool = False
    stated: tuple[int, ...] = ()
    size: int | None = None
    names_body: bool = False

    @property
    def too_long(self) -> bool:
        """True if a smaller view may succeed: the request was refused before anything was generated."""
        return self.kind in ("input", "input_plus_output", "payload")

    @property
    def window(self) -> int | None:
        """The window that the answer states, in the provider's tokens; None if it states none."""
        if self.kind not in ("input", "input_plus_output"):
            return None
        return self.limit
