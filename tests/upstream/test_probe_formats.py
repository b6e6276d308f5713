"""Figures in decoded answers: what counts, and what is no figure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.learned_window import LEAST_PLAUSIBLE, MOST_PLAUSIBLE
from proxy.core.models import ServerWindow
from proxy.upstream import probe_formats
from proxy.upstream.probe_formats import EVERY_MODEL, Unreadable, decode, find_window

WORDS = st.sampled_from(
    [
        *("data", "models", "id", "owned_by", "m", "llamacpp", "parent", "meta", "n_ctx", "max_model_len"),
        *("context_length", "top_provider", "model_info", "parameters", "default_generation_settings"),
        *("max_total_tokens", "max_input_tokens", "max_total_num_tokens", "loaded_context_length"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(VALUES)
@pytest.mark.slow
def test_no_answer_is_an_error(answer: Any) -> None:
    """Whatever JSON a server answers, each reader gives sane windows or none, and raises nothing."""
    rows = probe_formats.model_entries(answer)
    listed = probe_formats.listed_windows(rows)
    shown = probe_formats.ollama_window(answer)
    found = [
        listed,
        probe_formats.sglang_windows(answer, listed),
        probe_formats.llamacpp_window(answer),
        probe_formats.lmstudio_windows(answer) or {},
        probe_formats.ollama_running_windows(answer) or {},
        probe_formats.tgi_window(answer),
        {"shown": shown} if shown else {},
    ]
    assert probe_formats.server_kind(rows) in {"", *probe_formats.KINDS_BY_OWNER.values()}
    for each in found:
        for window in each.values():
            assert LEAST_PLAUSIBLE <= window.context_window <= MOST_PLAUSIBLE
            assert window.max_input_tokens is None or window.max_input_tokens < window.context_window
            assert window.origin


def test_decode() -> None:
    """JSON becomes a value; anything else, however deep, is ``Unreadable``."""
    assert decode(b'{"a":[1]}') == {"a": [1]}
    for body in (b"", b"<html>", b"{", b"[" * 200_000, b'"\xff"'):
        with pytest.raises(Unreadable):
            decode(body)


def test_find() -> None:
    """A model is found by its name, by its name with Ollama's default tag, or as any model of a server that has one."""
    one, two, every = ServerWindow(1000), ServerWindow(2000), ServerWindow(3000)
    assert find_window({"a": one, "b:latest": two}, "a") is one
    assert find_window({"a": one, "b:latest": two}, "b") is two
    assert find_window({"a": one}, "b") is None
    assert find_window({"a": one, EVERY_MODEL: every}, "b") is every


@pytest.mark.parametrize(
    ("parameters", "size"),
    [
        ("num_ctx 4096", 4096),
        ('stop "num_ctx 5"\nnum_ctx                        4096', 4096),
        ("num_ctx 4096\nnum_ctx 8192", 8192),
        ("num_ctx -1", None),
        ("num_ctx 99999999999999999999", None),
        ("num_ctx", None),
        ("", None),
    ],
)
def test_parameters_of_ollama(parameters: str, size: int | None) -> None:
    """The last ``num_ctx`` of a model's parameters is its window; without a sane one nothing is known."""
    window = probe_formats.ollama_window({"parameters": parameters})
    assert (window and window.context_window) == size
