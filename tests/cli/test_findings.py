"""What a measured request holds without need, through the engine, in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.cli.explain import breakdown, fit_request
from proxy.cli.findings import MOST_SHOWN, FreshResult, call_label, largest
from proxy.settings import Settings
from tests.support.engine_fixtures import tool_map_of_package
from tests.support.sample_conversations import prose

RULE = "Name the file and the line of what you changed, and run the tests before you say that it works. " * 4
READ = json.dumps({"path": "dist/bundle.js", "limit": 2000})


def chat() -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": READ}}
    return {
        "model": "gpt-4o",
        "messages": [
            {"role": "system", "content": RULE},
            {"role": "user", "content": f"Look at the bundle.\n\n{RULE}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": prose(1, 900)},
        ],
    }


def messages() -> dict[str, Any]:
    return {
        "model": "gpt-4o",
        "max_tokens": 500,
        "system": RULE,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": f"Look at the bundle.\n\n{RULE}"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "read_file", "input": json.loads(READ)}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": prose(1, 900)}]},
        ],
    }


def responses() -> dict[str, Any]:
    return {
        "model": "gpt-4o",
        "instructions": RULE,
        "input": [
            {"role": "user", "content": f"Look at the bundle.\n\n{RULE}"},
            {"type": "function_call", "call_id": "c1", "name": "read_file", "arguments": READ},
            {"type": "function_call_output", "call_id": "c1", "output": prose(1, 900)},
        ],
    }


@pytest.mark.parametrize("body", [chat(), messages(), responses()], ids=["chat", "messages", "responses"])
@pytest.mark.slow
async def test_the_findings_are_the_same_in_every_api(body: dict[str, Any]) -> None:
    """The rule stands twice, and the fresh result is named by its call and weighed by the room that was left."""
    fitted = await fit_request(Settings(), json.dumps(body).encode(), window=8192)
    findings = breakdown(fitted).findings
    assert [(each.times, each.excerpt[:13]) for each in findings.paragraphs] == [(2, "Name the file")]
    assert 80 <= findings.paragraphs[0].wasted <= 100
    (result,) = findings.results
    assert result.call == "read_file dist/bundle.js"
    assert 800 < result.tokens < 1300
    budget = fitted.report.budget or 0
    assert result.share == pytest.approx(
        result.tokens / (budget - (fitted.report.tokens_before or 0) + result.tokens), abs=0.01
    )


async def test_a_result_without_its_call_is_named_so() -> None:
    """A conversation whose call was cut off by its client is looked at all the same."""
    body = chat()
    del body["messages"][2]
    findings = breakdown(await fit_request(Settings(), json.dumps(body).encode(), window=8192)).findings
    assert [each.call for each in findings.results] == ["(a result without its call)"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (READ, "read dist/bundle.js"),
        ('{"command": "view", "path": "src/app.py"}', "read src/app.py"),
        ('{"limit": 5, "deep": {"path": "x"}}', "read"),
        ("{", "read"),
        ("[1]", "read"),
        (json.dumps({"command": "grep -r\n x " * 40}), None),
    ],
)
def test_a_call_is_named_by_what_it_is_about(arguments: str, expected: str | None) -> None:
    """Whatever the arguments are, the label is one short line."""
    label = call_label("read", arguments, tool_map_of_package())
    assert expected is None or label == expected
    assert len(label) <= 70
    assert "\n" not in label


def test_only_the_largest_are_listed() -> None:
    """The order is that of their tokens."""
    results = [FreshResult(str(at), at, 0.0) for at in range(20)]
    assert [each.tokens for each in largest(results)] == [19, 18, 17, 16, 15][:MOST_SHOWN]
