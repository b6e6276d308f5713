"""Budgets for thinking: where requests state them, and how they are lowered together with the output figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from proxy.core.budget.figures import stepped

LEAST = 1_024
"""The fewest tokens a budget is lowered to: less is an error at Anthropic and its resellers.
https://platform.claude.com/docs/en/build-with-claude/extended-thinking"""

PATHS: tuple[tuple[str, ...], ...] = (
    ("thinking", "budget_tokens"),
    ("reasoning", "max_tokens"),
    ("thinking_budget",),
    ("extra_body", "google", "thinking_config", "thinking_budget"),
    ("google", "thinking_config", "thinking_budget"),
)
"""Where a budget stands, by the members that lead to it. Anthropic's has to be below ``max_tokens``, and OpenRouter's
(https://openrouter.ai/docs/use-cases/reasoning-tokens). Then Qwen's
(https://www.alibabacloud.com/help/en/model-studio/deep-thinking), and Gemini's in OpenAI's API, as it is on the wire
(https://ai.google.dev/gemini-api/docs/openai) and as gateways take it. OpenAI's ``effort`` is no number of tokens."""

MEMBERS = tuple(dict.fromkeys(path[0] for path in PATHS))
"""The members of a body in which a budget may stand."""


def least_output(members: Mapping[str, Any]) -> int:
    """The smallest output figure beside the budgets in *members*, once they are lowered; zero if there is none."""
    found = [min(budget, LEAST) for path in PATHS if (budget := _budget(members, path))]
    return max(found) + 1 if found else 0


def lowered(members: Mapping[str, Any], requested: int, output: int) -> dict[str, str]:
    """The JSON of those of *members* that change when the output figure goes from *requested* to *output*.

    A budget keeps its part of the figure, in few large steps, since another budget costs the prompt cache's messages.
    It stays as it is while half of the figure is left for the answer.
    """
    changed: dict[str, Any] = {}
    for path in PATHS:
        budget = _budget(members, path)
        if budget > max(output // 2, LEAST):
            share = min(budget * output // max(1, requested), output - 1)
            value = changed.get(path[0], members[path[0]])
            changed[path[0]] = _with(value, path[1:], max(LEAST, stepped(max(1, share))))
    return {key: json.dumps(value) for key, value in changed.items()}


def _budget(members: Mapping[str, Any], path: tuple[str, ...]) -> int:
    """The budget at *path*; zero if there is none."""
    value: Any = members
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _with(value: Any, path: tuple[str, ...], budget: int) -> Any:
    """*value* with *budget* at *path*."""
    return {**value, path[0]: _with(value[path[0]], path[1:], budget)} if path else budget
