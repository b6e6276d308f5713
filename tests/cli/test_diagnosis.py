"""The findings that follow from requests to a server."""

from __future__ import annotations

import pytest

from proxy.cli import diagnosis
from proxy.cli.diagnosis import Attempt, Finding, Window
from proxy.core.overflow.kinds import Overflow

KNOWN = Window(8_192, "server: /props n_ctx", "Raise --ctx-size.")
UNKNOWN = Window()


def levels(*findings: Finding) -> list[tuple[str, str]]:
    return [(finding.topic, finding.level) for finding in findings]


@pytest.mark.parametrize(
    ("long", "known", "expected"),
    [
        (Attempt(10_000, 400, None, Overflow("input", 8_192)), KNOWN, [("overflow", "ok"), ("limit", "ok")]),
        (Attempt(10_000, 400, None, Overflow("input", 8_100)), KNOWN, [("overflow", "ok"), ("limit", "ok")]),
        (Attempt(10_000, 400, None, Overflow("input", 4_096)), KNOWN, [("overflow", "ok"), ("limit", "warning")]),
        (Attempt(10_000, 400, None, Overflow("input", 16_384)), KNOWN, [("overflow", "ok"), ("limit", "warning")]),
        (Attempt(10_000, 400, None, Overflow("input", 16_384)), UNKNOWN, [("overflow", "ok"), ("limit", "ok")]),
        (Attempt(10_000, 400, None, Overflow("input")), KNOWN, [("overflow", "ok"), ("limit", "info")]),
        (Attempt(10_000, 400, None, Overflow("input")), UNKNOWN, [("overflow", "ok"), ("limit", "warning")]),
        (Attempt(10_000, 413, None, Overflow("payload")), KNOWN, [("overflow", "warning")]),
        (Attempt(10_000, 429, None, Overflow("rate_limit")), KNOWN, [("overflow", "warning")]),
        (Attempt(10_000, 429), KNOWN, [("overflow", "warning")]),
        (Attempt(10_000, 400, None, None, "odd"), KNOWN, [("overflow", "error")]),
        (Attempt(10_000, 502), KNOWN, [("overflow", "error")]),
        (Attempt(10_000, 200, 4_096), KNOWN, [("overflow", "error")]),
        (Attempt(10_000, 200, 8_000), KNOWN, [("overflow", "error")]),
        (Attempt(10_000, 200, 10_100), KNOWN, [("overflow", "warning")]),
        (Attempt(10_000, 200, 10_100), UNKNOWN, [("overflow", "info")]),
        (Attempt(10_000, 200, None), KNOWN, [("overflow", "warning")]),
    ],
)
def test_what_the_long_request_shows(long: Attempt, known: Window, expected: list[tuple[str, str]]) -> None:
    """A recognised refusal is well, a silent cut and an unknown error are not; each that is not well has a remedy."""
    findings = list(diagnosis.overflow_findings(long, known, 1.0))
    assert levels(*findings) == expected
    assert all(finding.remedy for finding in findings if finding.level in ("warning", "error"))


def test_a_cut_is_measured_in_the_providers_tokens() -> None:
    """A server that counts less than we do is not taken for one that cuts."""
    assert levels(*diagnosis.overflow_findings(Attempt(10_000, 200, 5_500), UNKNOWN, 0.55)) == [("overflow", "info")]


@pytest.mark.parametrize(
    ("prompt", "expected", "level"),
    [(400, 1.0, "ok"), (435, 1.0, "ok"), (600, 1.5, "ok"), (600, 1.0, "info"), (40, 1.0, "warning")],
)
def test_what_usage_shows(prompt: int, expected: float, level: str) -> None:
    """A factor at most the assumed one is well, another one is learned, an absurd one is a warning."""
    assert levels(*diagnosis.usage_findings(Attempt(400, 200, prompt), expected)) == [("usage", level)]


def test_what_is_missing_is_a_finding() -> None:
    """No window, no usage, no usage in streams: each is a warning with its remedy."""
    assert diagnosis.window_finding(KNOWN).level == "ok"
    findings = [
        diagnosis.window_finding(UNKNOWN),
        *diagnosis.usage_findings(Attempt(400, 200), 1.0),
        diagnosis.stream_finding(200, None),
    ]
    assert [finding.level for finding in findings] == ["warning"] * 3
    assert all(finding.remedy for finding in findings)
    assert diagnosis.stream_finding(200, 7).level == "ok"
    assert diagnosis.stream_finding(400, None).level == "error"
