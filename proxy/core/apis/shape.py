"""Recognises the API of a request by its members, and the paths of APIs by their first segments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from proxy.core.apis.json_steps import objects

RESOURCES: Final = frozenset(
    {"assistants", "audio", "batches", "chat", "completions", "containers", "conversations", "embeddings", "evals"}
    | {"files", "fine_tuning", "images", "messages", "models", "moderations", "organization", "organizations"}
    | {"projects", "realtime", "rerank", "responses", "skills", "threads", "uploads", "vector_stores", "videos"}
)
"""First segments of the paths of OpenAI's and Anthropic's APIs behind the version, which clients may leave out.

https://platform.openai.com/docs/api-reference, https://platform.claude.com/docs/en/api/overview
"""


def shape_of(value: Mapping[str, Any]) -> str:
    """Return the name of the API whose request a decoded body is; empty if it has no list of items."""
    if "input" in value and "messages" not in value:
        return "responses"
    if not isinstance(value.get("messages"), list):
        return ""
    if "system" in value or "anthropic_version" in value or _has_messages_blocks(value):
        return "messages"
    return "chat"


def _has_messages_blocks(value: Mapping[str, Any]) -> bool:
    """True if tools or content blocks are written as in the Messages API."""
    if any("input_schema" in tool for tool in objects(value.get("tools"))):
        return True
    contents = [message.get("content") for message in objects(value["messages"])]
    parts = [part for content in contents for part in objects(content)]
    return any(part.get("type") in ("tool_use", "tool_result", "thinking") for part in parts)
