"""Asking each API for a text, and reading what it answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.summaries.apis import (
    REASONING_TOKENS,
    SUMMARY_APIS,
    ModelAnswer,
    append_to_prompt,
    encode_json,
    output_allowance,
    parse_answer,
)

ANSWERS: dict[str, dict[str, Any]] = {
    "chat": {
        "choices": [{"message": {"content": "text"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2},
    },
    "messages": {
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "text"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 4, "cache_read_input_tokens": 3, "output_tokens": 2},
    },
    "responses": {
        "status": "completed",
        "output": [{"type": "reasoning"}, {"type": "message", "content": [{"type": "output_text", "text": "text"}]}],
        "usage": {"input_tokens": 7, "output_tokens": 2},
    },
    "gemini": {
        "candidates": [{"content": {"parts": [{"text": "hm", "thought": True}, {"text": "text"}]}}],
        "usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 1, "thoughtsTokenCount": 1},
    },
}


@pytest.mark.parametrize("api", SUMMARY_APIS)
def test_an_answer_gives_its_text_and_what_it_took(api: str) -> None:
    """The text without thoughts, and both token figures, cached input included."""
    written = parse_answer(SUMMARY_APIS[api], encode_json(ANSWERS[api]))
    assert written is not None
    assert (written.text, written.called_tools, written.cut_short) == ("text", False, False)
    assert (written.usage.input_tokens, written.usage.output_tokens) == (7, 2)


CUT = {
    "chat": ("choices", 0, "finish_reason", "length"),
    "messages": ("stop_reason", "max_tokens"),
    "responses": ("status", "incomplete"),
    "gemini": ("candidates", 0, "finishReason", "MAX_TOKENS"),
}


@pytest.mark.parametrize("api", SUMMARY_APIS)
def test_an_answer_that_was_cut_short_is_recognised(api: str) -> None:
    """An answer that ended at the output limit says so."""
    answer = json.loads(json.dumps(ANSWERS[api]))
    *path, key, value = CUT[api]
    node = answer
    for step in path:
        node = node[step]
    node[key] = value
    written = parse_answer(SUMMARY_APIS[api], encode_json(answer))
    assert written is not None
    assert written.cut_short


CALLS: dict[str, dict[str, Any]] = {
    "chat": {"choices": [{"message": {"content": None, "tool_calls": [{"id": "a"}]}, "finish_reason": "tool_calls"}]},
    "messages": {"content": [{"type": "tool_use", "name": "x"}], "stop_reason": "tool_use"},
    "responses": {"output": [{"type": "function_call", "name": "x"}]},
    "gemini": {"candidates": [{"content": {"parts": [{"functionCall": {"name": "x"}}]}}]},
}


@pytest.mark.parametrize("api", SUMMARY_APIS)
def test_a_tool_call_is_recognised(api: str) -> None:
    """A model that calls tools instead of writing is recognised."""
    assert parse_answer(SUMMARY_APIS[api], encode_json(CALLS[api])) == ModelAnswer("", called_tools=True)


@pytest.mark.parametrize("api", SUMMARY_APIS)
@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{}", b"not json", b'{"choices": [null], "content": 3, "output": 3}']
)
def test_what_is_no_answer_is_none(api: str, data: bytes) -> None:
    """Anything that is not this API's answer is nothing."""
    assert parse_answer(SUMMARY_APIS[api], data) is None


@pytest.mark.parametrize(
    ("api", "figure"), [("chat", "max_tokens"), ("messages", "max_tokens"), ("responses", "max_output_tokens")]
)
def test_a_question_names_model_rules_text_and_limit(api: str, figure: str) -> None:
    """The body has the model, the instructions apart from the data, and the most that may be written; no tools."""
    body = json.loads(encode_json(SUMMARY_APIS[api].build_body("some-model", "the rules", "the data", 500)))
    assert body["model"] == "some-model"
    assert body[figure] == 500
    assert "tools" not in body
    said = json.dumps(body)
    assert said.index("the rules") >= 0
    assert "the rules" not in json.dumps(body.get("messages", body.get("input"))[-1])
    assert "the data" in json.dumps(body.get("messages", body.get("input"))[-1])


def test_geminis_path_names_the_model() -> None:
    """The body has the rules, the data, and room for thoughts; a warm prompt keeps tools that are not to be called."""
    api = SUMMARY_APIS["gemini"]
    body = api.build_body("some-model", "the rules", "the data", 500)
    assert body == {
        "systemInstruction": {"parts": [{"text": "the rules"}]},
        "contents": [{"role": "user", "parts": [{"text": "the data"}]}],
        "generationConfig": {"maxOutputTokens": 500 + REASONING_TOKENS},
    }
    outline = {"contents": [], "system_instruction": {"parts": []}, "tools": [{}], "safetySettings": []}
    sent = b'{"parts":[ {"text":"caf\\u00e9"}]}'
    warm = append_to_prompt(api, "m", json.dumps(outline), sent, "Sum up.", 300)
    assert b'"contents":[' + sent + b"," in warm
    parsed = json.loads(warm)
    assert parsed.keys() == {"contents", "system_instruction", "tools", "toolConfig", "generationConfig"}
    assert parsed["toolConfig"] == {"functionCallingConfig": {"mode": "NONE"}}
    assert parsed["contents"][-1] == {"role": "user", "parts": [{"text": "Sum up."}]}


def test_models_that_think_get_room_for_it() -> None:
    """A thinking model is asked with the figure it takes, and thoughts do not eat the summary's room."""
    assert "max_completion_tokens" in SUMMARY_APIS["chat"].build_body("openai/gpt-5-mini", "", "", 9)
    assert output_allowance("o3-mini", 400) - output_allowance("gpt-4o", 400) == REASONING_TOKENS


@pytest.mark.parametrize(("api", "items"), [("chat", "messages"), ("messages", "messages"), ("responses", "input")])
def test_a_warm_prompt_keeps_its_bytes(api: str, items: str) -> None:
    """The items are the very bytes that were sent, tools and system stay, and what shapes an answer's stream goes."""
    sent = b'{"role":"user","content":"caf\\u00e9"} , {"x":1.0}'
    outline = json.dumps(
        {"model": "m", "tools": [{"name": "t"}], "system": "s", "instructions": "i", items: [], "stream": True,
         "stream_options": {}, "max_tokens": 9, "n": 2}
    )  # fmt: skip
    body = append_to_prompt(SUMMARY_APIS[api], "own-name", outline, sent, "Sum up.", 300)
    assert b'"' + items.encode() + b'":[' + sent + b"," in body
    parsed = json.loads(body)
    assert "Sum up." in json.dumps(parsed[items][-1])
    assert parsed["model"] == "own-name"
    assert parsed["tools"] == [{"name": "t"}]
    assert not {"stream_options", "n"} & parsed.keys()
    assert parsed.get("stream", False) is False
    assert 300 in (parsed.get("max_tokens"), parsed.get("max_output_tokens"))
