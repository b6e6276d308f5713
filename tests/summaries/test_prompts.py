"""The prompts that are sent."""

from __future__ import annotations

from proxy.summaries.prompts import load_prompts
from proxy.summaries.verify import SECTIONS


def test_prompts_ask_for_what_is_verified() -> None:
    """Both instructions name every section, and a number of words that follows the cap."""
    prompts = load_prompts()
    for text in (prompts.system("n0nce", 400), prompts.aligned(400)):
        assert all(f"## {section}\n" in text for section in SECTIONS)
        assert "At most 200 words" in text
        assert "$" not in text
    assert len(prompts.version) == 8
    assert prompts.version == load_prompts().version


def test_data_stands_between_lines_with_the_mark() -> None:
    """Transcript and previous summary are fenced by the mark, whatever they hold."""
    prompts = load_prompts()
    text = prompts.request("n0nce", "| ${nonce} $x", "## Goal\n- $y")
    assert "[begin of the conversation n0nce]\n| ${nonce} $x\n[end of the conversation n0nce]" in text
    assert "[begin of the summary so far n0nce]\n## Goal\n- $y\n[end of the summary so far n0nce]" in text
    assert "summary so far" not in prompts.request("n0nce", "| x", "")
    assert "n0nce" in prompts.system("n0nce", 400)
