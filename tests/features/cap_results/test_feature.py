"""Results capped before they are first sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.apis import chat, messages, responses
from proxy.core.apis.base import ApiFormat
from proxy.core.apis.json_scan import scan
from proxy.core.compaction.truncate import MIDDLE, REST
from proxy.features.cap_results.feature import CapResults, cap_results
from proxy.features.cap_results.settings import ResultLimits
from tests.support.engine_fixtures import FeaturesOf, chat_body, message_slices, tool_map_of_package, without_features
from tests.support.scripted_upstream import EngineFixture, agent_request, read_whole
from tests.support.transcript import play

LIMITS = ResultLimits(100, 5_000)


def capping(limits: ResultLimits) -> FeaturesOf:
    """The feature with *limits*."""
    return lambda replica: [CapResults(replica.reader, limits)]


def done(conversation: list[dict[str, Any]]) -> list[bytes]:
    body = chat_body(conversation)
    once = cap_results(body, scan(body, "messages"), chat, tool_map_of_package(), LIMITS)
    assert cap_results(once, scan(once, "messages"), chat, tool_map_of_package(), LIMITS) is once
    return message_slices(once)


def session(name: str, content: Any) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
    return [
        {"role": "user", "content": "long " * 3000},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": content, "x": 1},
    ]


def test_only_results_that_are_too_big_change() -> None:
    """Users' words and results within the limits keep their bytes; the same body comes back when nothing is too big."""
    small = session("Bash", "x\n" * 100)
    assert done(small) == message_slices(chat_body(small))
    big = session("Bash", "x\n" * 101)
    assert done(big)[:2] == message_slices(chat_body(big))[:2]
    capped = json.loads(done(big)[2])
    assert MIDDLE in capped["content"]
    assert capped["x"] == 1


def test_reads_keep_their_head_and_parts_stay_parts() -> None:
    """A file's rest is left out at its end; content that was a list stays one."""
    capped = json.loads(done(session("Read", "line\n" * 500))[2])["content"]
    assert capped.endswith(REST)
    parts = json.loads(done(session("Read", [{"type": "text", "text": "line\n" * 500}]))[2])["content"]
    assert parts == [{"type": "text", "text": capped}]


IMAGES = {
    "chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo"}},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo"}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo"},
}


def result_of(api: str, text: str) -> dict[str, Any]:
    """A tool result of a text and an image."""
    if api == "responses":
        return {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": text}, IMAGES[api]],
        }
    content = [{"type": "text", "text": text}, IMAGES[api]]
    if api == "chat":
        return {"role": "tool", "tool_call_id": "c", "content": content}
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": content}]}


@pytest.mark.parametrize(("api", "api_format"), [("chat", chat), ("messages", messages), ("responses", responses)])
def test_an_image_does_not_keep_the_text_beside_it_from_being_capped(api: str, api_format: ApiFormat) -> None:
    """The text is cut to the limits, and the image stays behind it as it was."""
    body = json.dumps({api_format.LIST: [result_of(api, "x\n" * 3000)]}).encode()
    once = cap_results(body, scan(body, api_format.LIST), api_format, tool_map_of_package(), LIMITS)
    item = json.loads(once)[api_format.LIST][0]
    holder = item["content"][0] if api == "messages" else item
    text, image = holder["output" if api == "responses" else "content"]
    assert MIDDLE in text["text"]
    assert text["text"].count("\n") <= LIMITS.lines
    assert image == IMAGES[api]
    assert cap_results(once, scan(once, api_format.LIST), api_format, tool_map_of_package(), LIMITS) is once


def test_later_messages_change_nothing() -> None:
    """A result becomes the same bytes in every later request."""
    begun = session("Bash", "x\n" * 3000)
    first = done(begun)
    later = done([*begun, {"role": "assistant", "content": "ok"}, *session("Bash", "y\n" * 300)[1:]])
    assert later[: len(first)] == first


@pytest.mark.parametrize("window", [None, 200_000])
@pytest.mark.slow
async def test_what_is_counted_is_what_would_be_sent(window: int | None) -> None:
    """Results that are capped before they are first sent are counted as capped, known window or not."""
    counts = []
    for limits in (None, ResultLimits(5, 50_000)):
        features = capping(limits) if limits else without_features
        engine = EngineFixture(window, counting="own", features=features)
        (played,) = await play("client >> session, count", engine, session=agent_request("messages", 6))
        counts.append(json.loads(await read_whole(played.answer))["input_tokens"])
    assert counts[1] < 0.7 * counts[0]
