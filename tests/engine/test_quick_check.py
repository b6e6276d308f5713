"""The first look at a body: what its bytes bound, and when they do not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from proxy.core.models import Catalogue, ModelRule
from proxy.core.request import Options, Request
from proxy.engine.learned_routes import KnownRoutes, LearnedRoutes, prepare_nothing
from proxy.engine.quick_check import DECODERS, FIRST_MODEL, MOST_BYTES, TOOLS_ALLOWANCE, QuickCheck, TextualBodies
from proxy.tasks import ignore_warning
from tests.support.engine_fixtures import POLICY, TENANT, DictRecords

WORDS = [{"role": "user", "content": "hi"}]


def bounded(api: str, **members: Any) -> bool:
    """True if the bytes of a request with *members* bound its tokens."""
    textual = DECODERS[api].decode(json.dumps(members).encode())
    return textual is not None and textual.allowance is not None


@pytest.mark.parametrize(
    ("api", "members"),
    [
        ("chat", {"messages": WORDS}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}),
        ("messages", {"messages": WORDS, "system": [{"type": "text", "text": "x"}]}),
        ("responses", {"input": "hi"}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]}),
        ("responses", {"model": "m"}),
        ("responses", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": '"image"'}]}),
        ("chat", {"messages": [{"role": "tool", "tool_call_id": "c", "content": '{"type": "image"}'}]}),
        ("responses", {"input": "hi", "tools": [{"type": "function", "name": "f"}]}),
        ("gemini", {"contents": [{"parts": [{"text": "hi"}]}], "systemInstruction": {"parts": [{"text": "x"}]}}),
        (
            "gemini",
            {"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f"}, "thoughtSignature": "x"}]}]},
        ),
        ("gemini", {"contents": [{"parts": [{"functionResponse": {"name": "f", "response": {"inlineData": 1}}}]}]}),
        ("gemini", {"contents": [], "tools": [{"functionDeclarations": []}], "generationConfig": {"topK": 1}}),
    ],
)
def test_text_is_bounded_by_its_bytes(api: str, members: dict[str, Any]) -> None:
    """A request of words needs no count while its bytes are few."""
    assert bounded(api, **members)


@pytest.mark.parametrize(
    ("api", "members"),
    [
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "not_yet_known"}]}]}),
        ("messages", {"messages": WORDS, "system": [{"type": "image"}]}),
        ("chat", {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}),
        ("chat", {"messages": WORDS, "audio": {"voice": "alloy"}}),
        ("messages", {"messages": [{"content": [{"type": "tool_result", "content": [{"type": "document"}]}]}]}),
        ("messages", {"messages": WORDS, "mcp_servers": [{}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("responses", {"input": [{"type": "image_generation_call", "result": "A"}]}),
        ("responses", {"input": "hi", "previous_response_id": "r"}),
        ("responses", {"input": "hi", "conversation": "c"}),
        ("responses", {"input": "hi", "prompt": {"id": "p"}}),
        ("responses", {"input": "hi", "tools": [{"type": "mcp", "server_url": "u"}]}),
        ("gemini", {"contents": [{"parts": [{"inlineData": {}}]}]}),
        ("gemini", {"contents": [{"parts": [{"nobodyKnows": {}}]}]}),
        ("gemini", {"contents": [{"parts": [{"functionResponse": {"response": {}, "parts": [{}]}}]}]}),
        ("gemini", {"contents": [], "cachedContent": "cachedContents/x"}),
        ("gemini", {"contents": [], "tools": [{"googleSearch": {}}]}),
        ("gemini", {"contents": [], "generation_config": {"max_output_tokens": 9}}),
        ("gemini", {"generateContentRequest": {"contents": []}}),
    ],
)
def test_what_bytes_do_not_bound(api: str, members: dict[str, Any]) -> None:
    """Media, and whatever the provider adds by itself, take a closer look."""
    assert not bounded(api, **members)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("responses", b'{"model":"a","input":"x","input":"y"}'),
        ("responses", b'{"model":"a","input":[{"type":"custom_tool_call","input":"x"}]}'),
        ("messages", b'{"messages":[],"model":"a","model":"b"}'),
        ("messages", b'{"messages":[],"messages":[]}'),
        ("chat", b'{"messages":[{"content":[{"type":"image_url"}]}],"messages":[]}'),
        ("chat", b'{"messages":[],"mess\\u0061ges":[]}'),
        ("chat", b'{"model":"a","messages":[],"mod\\u0065l":"b"}'),
        ("responses", b'{"model":"a","model":"b"}'),
        ("responses", b'{"input":"a","inp\\u0075t":"b"}'),
        ("gemini", b'{"contents":[],"contents":[]}'),
        ("gemini", b'{"contents":[],"c\\u006fntents":[]}'),
        ("messages", b'{"messages":"x"}'),
        ("messages", b"{"),
        ("chat", b'{"messages":[]}' + b" " * MOST_BYTES),
    ],
)
def test_what_takes_the_exact_scanner(api: str, body: bytes) -> None:
    """What occurs twice, is no JSON or is large is not judged by its bytes."""
    assert DECODERS[api].decode(body) is None


def test_figures_and_names() -> None:
    """The output figure, tools and the session are read where each API has them."""
    chat = DECODERS["chat"].decode(b'{"messages":[],"max_tokens":5,"max_completion_tokens":7,"functions":[]}')
    claude = DECODERS["messages"].decode(b'{"messages":[],"max_tokens":5,"metadata":{"session_id":"s-1"}}')
    codex = DECODERS["responses"].decode(b'{"input":"x","max_output_tokens":9,"tools":[],"prompt_cache_key":"k"}')
    assert chat is not None
    assert claude is not None
    assert codex is not None
    assert [body.requested_output for body in (chat, claude, codex)] == [7, 5, 9]
    assert [body.allowance for body in (chat, claude, codex)] == [TOOLS_ALLOWANCE, 0, TOOLS_ALLOWANCE]
    assert [body.prompt_cache_key for body in (chat, claude, codex)] == [None, None, "k"]
    assert claude.metadata == {"session_id": "s-1"}


@pytest.mark.parametrize(
    ("head", "model"),
    [
        (b'{"model":"gpt-5","messages":[', b"gpt-5"),
        (b' \n{ "model" : "vendor/name:tag" , "max_tokens":5', b"vendor/name:tag"),
        (b'{"messages":[{"model":"other"}],"model":"m"}', None),
        (b'{"model":"a\\u0062"', None),
        ('{"model":"größe"'.encode(), None),
        (b'{"model":""', None),
        (b'{"model":5', None),
        (b'[{"model":"m"', None),
    ],
)
def test_the_model_at_the_beginning(head: bytes, model: bytes | None) -> None:
    """A first member that names the model plainly is read without a decode; nothing else is taken for it."""
    match = FIRST_MODEL.match(head)
    assert (match and match[1]) == model


WINDOW = 65_536


@pytest.mark.parametrize("output", [None, 9, 8_192, 40_000])
@pytest.mark.parametrize("task_size", ["", "small"])
@pytest.mark.parametrize("words", [9_000, 20_000, 24_000, 25_000, 26_000, 28_000, 60_000])
async def test_the_order_of_members_changes_nothing(output: int | None, task_size: str, words: int) -> None:
    """A body that begins with its model is measured, or passed, as one that begins with its messages."""
    catalogue = Catalogue([ModelRule("m", "stub", WINDOW)], {}, "stub")
    learned = LearnedRoutes(DictRecords(), {}, {}, time.monotonic, ignore_warning)
    check = QuickCheck(KnownRoutes(catalogue, learned, time.monotonic, prepare_nothing), POLICY, "on")
    messages = [{"role": "user", "content": "x" * words}]
    options = Options(task_size=task_size)
    views = []
    for members in ({"model": "m", "messages": messages}, {"messages": messages, "model": "m"}):
        if output is not None:
            members["max_tokens"] = output
        views.append(await check.view(Request("chat", json.dumps(members).encode(), TENANT, "r", options)))
    assert (views[0] is None) == (views[1] is None)
    assert views[0] is not None or words > 9_000
    assert views[0] is None or words < 60_000


LISTS = {"chat": "messages", "messages": "messages", "responses": "input", "gemini": "contents"}


def session_members(api: str, rounds: int, **members: Any) -> dict[str, Any]:
    """The members of a body with a session of so many rounds, some 1,000 bytes each; *members* come last."""
    key, role = LISTS[api], "input_text" if api == "responses" else "text"
    items: list[dict[str, Any]] = []
    for number in range(rounds):
        text = f'{number}: {{"role": "user"}} [{{"model":1}}], ' + 'x"\\y ' * 100
        if api == "gemini":
            items.append({"role": "user", "parts": [{"text": text}]})
            items.append({"role": "model", "parts": [{"text": text}]})
            continue
        items.append({"role": "user", "content": [{"type": role, "text": text}]})
        items.append({"content": text, "role": "assistant"})
        if api == "responses":
            items.append({"type": "function_call_output", "call_id": f"c{number}", "output": text})
    return {"model": "m", key: items, **members}


def items_of(members: dict[str, Any]) -> list[dict[str, Any]]:
    """The list of items in *members*."""
    found: list[dict[str, Any]] = next(members[key] for key in LISTS.values() if key in members)
    return found


def encoded(members: dict[str, Any], spaced: bool) -> bytes:
    """JSON of *members*, as Python's clients write it, or as others do."""
    return json.dumps(members, separators=None if spaced else (",", ":")).encode()


def facts(textual: Any) -> tuple[Any, ...] | None:
    """All that is read of a textual body."""
    if textual is None:
        return None
    figures = (textual.requested_output, textual.allowance)
    return (textual.model, textual.stream, textual.prompt_cache_key, textual.metadata, *figures)


def with_image(members: dict[str, Any], at: int) -> dict[str, Any]:
    """*members* with an image in the item at *at*."""
    item = items_of(members)[at]
    if "parts" in item:
        item["parts"] = [{"inlineData": {}}]
    else:
        item["content"] = [{"type": "input_image" if "input" in members else "image_url"}]
    return members


APIS = pytest.mark.parametrize("api", list(DECODERS))
SPACED = pytest.mark.parametrize("spaced", [False, True])


@APIS
@SPACED
@pytest.mark.parametrize(
    "behind", [{}, {"tools": [{"type": "function", "role": "x"}], "max_tokens": 7, "stream": True}]
)
def test_a_session_is_judged_as_each_of_its_bodies(api: str, spaced: bool, behind: dict[str, Any]) -> None:
    """What is read of a body whose beginning is known is what is read of all of it, and only little is decoded."""
    bodies = TextualBodies()
    for rounds in (4, 5, 9, 10, 11, 30, 31, 8):
        members = {**behind, "metadata": {"session_id": f"s-{rounds}"}}
        if api == "gemini":
            members = {"tools": [{"functionDeclarations": [{"role": "x"}]}], "toolConfig": {}} if behind else {}
        body = encoded(session_members(api, rounds, **members), spaced)
        whole = DECODERS[api].decode(body)
        found = bodies.decode(api, TENANT, body)
        assert facts(found) == facts(whole)
        assert found is not None
        assert len(getattr(found, LISTS[api])) < 15 or len(body) < 9_000


@APIS
@SPACED
@pytest.mark.parametrize(
    "end",
    [
        lambda members: with_image(members, -1),
        lambda members: with_image(members, -3),
        lambda members: {**members, "audio": {}, "mcp_servers": [{}], "conversation": "c", "cachedContent": "c"},
        lambda members: {"audio": {}, "container": "c", "prompt": {"id": "p"}, "cachedContent": "c", **members},
    ],
)
def test_what_is_new_in_a_known_session_is_looked_at(api: str, spaced: bool, end: Any) -> None:
    """An image behind a known prefix, or a member around it that brings input, is never passed by its bytes."""
    bodies = TextualBodies()
    assert bodies.decode(api, TENANT, encoded(session_members(api, 20), spaced)) is not None
    assert bodies.decode(api, TENANT, encoded(end(session_members(api, 21)), spaced)) is None
    assert bodies.decode(api, TENANT, encoded(end(session_members(api, 40)), spaced)) is None
    assert bodies.decode(api, TENANT, encoded(session_members(api, 41), spaced)) is not None


@APIS
def test_a_member_twice_or_broken_json_behind_a_known_prefix(api: str) -> None:
    """A second model or list, or what is no JSON, is left to the exact scanner in a known session, too."""
    bodies = TextualBodies()
    body = encoded(session_members(api, 20), spaced=False)
    key = LISTS[api].encode()
    assert bodies.decode(api, TENANT, body) is not None
    for end in (b',"model":"n"}', b',"mod\\u0065l":"n"}', b',"%b":[]}' % key, b"", b"}}", b"]}", b',{"role":"user"}]}'):
        assert bodies.decode(api, TENANT, body[:-1] + end) is None
    assert bodies.decode(api, TENANT, body[:-2] + b',{"role":"user","content":"","parts":[]}]}') is not None


def test_a_list_of_the_same_name_in_another_member() -> None:
    """Items that were found to be textual in another place do not make other items textual."""
    bodies = TextualBodies()
    turns = [{"role": "user", "content": "x" * 900}] * 20
    image = {"role": "user", "content": [{"type": "image_url"}]}
    assert bodies.decode("chat", TENANT, encoded({"messages": turns}, spaced=False)) is not None
    for members in (
        {"metadata": {"messages": turns}, "messages": [*WORDS]},
        {"metadata": {"messages": [*turns, *turns]}, "messages": [image]},
        {"metadata": {"messages": turns}, "messages": [*turns, image]},
    ):
        body = encoded(members, spaced=False)
        assert DECODERS["chat"].decode(body) is None
        assert bodies.decode("chat", TENANT, body) is None


def test_only_the_own_tenant_knows_a_prefix() -> None:
    """Nothing that one tenant sent shortens the way of another's request."""
    bodies, body = TextualBodies(), encoded(session_members("chat", 20), spaced=True)
    bodies.decode("chat", TENANT, body)
    fewer = bodies.decode("chat", TENANT, body[:-2] + b' ,{"content":"", "role":"user"}]}')
    other = bodies.decode("chat", b"o" * 32, body[:-2] + b' ,{"content":"", "role":"user"}]}')
    assert fewer is not None
    assert other is not None
    assert len(bodies._prefixes) == 2
