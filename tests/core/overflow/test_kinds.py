"""What the kinds of overflow allow."""

from __future__ import annotations

from typing import get_args

import pytest

from proxy.core.overflow.kinds import Kind, Overflow

KINDS: tuple[Kind, ...] = get_args(Kind)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_refusal_for_length_calls_for_a_smaller_view(kind: Kind) -> None:
    """An output cap, a rate limit and a stop reason are never answered with a smaller view."""
    assert Overflow(kind).too_long == (kind in {"input", "input_plus_output", "payload"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_learned_from_tokens_of_the_whole_only(kind: Kind) -> None:
    """Bytes, rates and output caps say nothing of the window."""
    expected = 8192 if kind in {"input", "input_plus_output"} else None
    assert Overflow(kind, 8192).window == expected
    assert Overflow(kind).window is None
