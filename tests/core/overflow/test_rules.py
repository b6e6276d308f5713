"""The wordings themselves: each finds its own sentence, and its figures."""

from __future__ import annotations

import re

import pytest

from proxy.core.overflow.classify import classify_error
from proxy.core.overflow.rules import CODES, FIELDS, VETO, WORDINGS

FIGURES = {"limit", "prompt", "output", "total"}

# A sentence for each wording, in the order of the table, with (limit, prompt, output).
SAID: list[tuple[str, tuple[int | None, int | None, int | None]]] = [
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 9000. This model's maximum context length is 8192 "
        "tokens and your request has 100 input tokens (9000 > 8192 - 100).",
        (8192, 100, 9000),
    ),
    (
        "You passed 8001 input tokens and requested 200 output tokens. However, the model's context length is only "
        "8192 tokens, resulting in a maximum input length of 7992 tokens.",
        (8192, 8001, 200),
    ),
    (
        "This model's maximum context length is 8192 tokens. However, you requested 8300 tokens (8000 in the messages, "
        "300 in the completion). Please reduce the length of the messages or completion.",
        (8192, 8000, 300),
    ),
    (
        "This model's maximum context length is 8,192 tokens. However, your messages resulted in 9,001 tokens.",
        (8192, 9001, None),
    ),
    (
        "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 300123 tokens.",
        (272000, 300123, None),
    ),
    ("This model has a maximum context length of 4096 tokens.", (4096, None, None)),
    ("Your input exceeds the context window of this model.", (None, None, None)),
    (
        "The decoder prompt (total length 9000) is too long to fit into the model (context length 8192).",
        (8192, 9000, None),
    ),
    ("prompt is too long: 215000 tokens > 204800 maximum", (204800, 215000, None)),
    ("Prompt is too long", (None, None, None)),
    (
        "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease input length",
        (200000, 190000, 20000),
    ),
    ("max_tokens: 20000 > context_window: 200000 - input_tokens: 190000", (200000, 190000, 20000)),
    (
        "request (34031 tokens) exceeds the available context size (8192 tokens), try increasing it",
        (8192, 34031, None),
    ),
    ("Invalid 'messages[0].content': string too long. Expected a string with maximum length 10.", (None, None, None)),
    ("the request exceeds the available context size. try increasing the context size", (None, None, None)),
    ("Context size has been exceeded.", (None, None, None)),
]


def test_every_wording_has_a_sentence() -> None:
    """The list above and the table have the same length, so that no wording goes untried."""
    assert len(SAID) == len(WORDINGS)


@pytest.mark.parametrize("at", range(len(SAID)))
def test_a_wording_is_the_first_that_finds_its_sentence(at: int) -> None:
    """No earlier, looser wording takes a sentence away from the one that reads its figures."""
    said, figures = SAID[at]
    first = next(i for i, wording in enumerate(WORDINGS) if wording.pattern.search(said))
    assert WORDINGS[first] is WORDINGS[at]
    found = classify_error({"error": {"message": said}})
    assert found is not None
    assert (found.limit, found.prompt, found.output) == figures
    assert not found.decisive


def test_wordings_state_known_figures_only() -> None:
    """Every named group is a figure that someone reads, and every wording says who speaks so."""
    for wording in WORDINGS:
        assert set(wording.pattern.groupindex) <= FIGURES
        assert wording.source
        assert wording.pattern.flags & re.IGNORECASE
    assert set(FIELDS.values()) <= FIGURES


@pytest.mark.parametrize("code", sorted(CODES))
def test_codes_decide(code: str) -> None:
    """A code means what the table says, wherever it stands in the error."""
    for shape in ({"error": {"code": code}}, {"type": code}, {"error": {"details": [{"reason": code}]}}):
        found = classify_error(shape)
        assert found is not None
        assert (found.kind, found.decisive) == (CODES[code], True)


@pytest.mark.parametrize("said", [said for said, _ in SAID])
def test_no_wording_is_vetoed(said: str) -> None:
    """What means length is never mistaken for pace."""
    assert not VETO.search(said)
