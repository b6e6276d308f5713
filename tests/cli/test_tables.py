"""What commands show: every figure in its column, brackets as they are, nothing folded in a pipe."""

from __future__ import annotations

import pytest

from proxy.cli.doctor import Diagnosis
from proxy.cli.tables import show_findings, show_models
from proxy.core.diagnosis import Finding

ROW: dict[str, object] = {
    "model": "a-model-with-a-name-that-is-longer-than-any-terminal-is-wide-" * 3,
    "upstream": "[here]",
    "context_window": 128_000,
    "max_input_tokens": None,
    "max_output_tokens": 4_096,
    "encoding": "o200k_base",
    "factor": 1.05,
    "window_from": "table",
    "age_seconds": 2.5,
    "output_from": "table",
    "encoding_from": "family",
    "factor_from": "table",
}


def test_a_row_of_models_is_one_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Thousands are set apart, what is unknown is a dash, an age has its unit, and nothing is folded."""
    show_models([ROW])
    title, line = capsys.readouterr().out.splitlines()
    assert title.split()[:2] == ["model", "upstream"]
    assert line.split() == [
        *(str(ROW["model"]), "[here]", "128,000", "-", "4,096", "o200k_base", "1.05", "table", "2.5", "s"),
        *("table", "family", "table"),
    ]


def test_other_names_and_flags_are_shown_with_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """An alias is told with what it is sent as, a variant with the flag that makes it."""
    show_models(
        [{**ROW, "model": "fast", "sent_as": "own"}, {**ROW, "model": "m", "sent_as": "", "variant": "context-1m"}]
    )
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("fast (own) ")
    assert second.startswith("m with context-1m ")


def test_findings_are_shown_with_their_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    """What a server calls itself may hold brackets; a remedy stands under its finding."""
    findings = (Finding("window", "ok", "8,192 tokens"), Finding("usage", "error", "none [at all]", "Turn it on."))
    show_findings(Diagnosis("up", "http://127.0.0.1:1/[v1]", "[m]", findings, 1_200))
    shown = capsys.readouterr().out
    assert shown.startswith("[m] at http://127.0.0.1:1/[v1]\n")
    assert "none [at all]" in shown
    assert shown.index("Turn it on.") > shown.index("none [at all]")
    assert shown.endswith("1,200 tokens were sent, by our count.\n")
