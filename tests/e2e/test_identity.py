"""Which conversation a request belongs to, for people: what clients say of it, by trust, and never across tenants."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.conftest import StartProxy, StartStub
from tests.e2e.test_recorded import FILES, Recorded, recorded
from tests.stub import Stub
from tests.support.api_formats import request_body
from tests.support.loopback import loopback_client
from tests.support.process_inspection import request_lines
from tests.support.proxy_process import until
from tests.support.sample_conversations import chat_turn

SHORT = chat_turn(1, 40)[:1]
OTHER = chat_turn(2, 40)[:1]
OWN = {"x-ullage-conversation": "mine"}
CLAIMS: list[dict[str, Any]] = [
    {"headers": {"x-claude-code-session-id": "s-1"}},
    {"headers": {"thread-id": "s-2", "session-id": "s-9"}},
    {"headers": {"session-id": "s-3"}},
    {"headers": {"x-session-id": "s-4", "x-session-affinity": "s-9"}},
    {"headers": {"x-session-affinity": "s-5"}},
    {"headers": {"x-codex-window-id": "s-6:3"}},
    {"members": {"metadata": {"user_id": json.dumps({"session_id": "s-7"})}, "prompt_cache_key": "s-9"}},
    {"members": {"metadata": {"session_id": "s-8"}}},
    {"members": {"prompt_cache_key": "s-10"}},
]
"""What clients say, each with what weighs less beside it."""


async def test_who_says_it_and_who_is_believed(stub: StartStub, proxy: StartProxy) -> None:
    """Own header, then clients' headers by trust, then the body; each passes on but ours; tenants share none."""
    server = await stub(window=10**6)
    front = await proxy(server.url, window=10**6)
    async with loopback_client(base_url=front.url) as web:
        names: list[str] = []
        for claim in CLAIMS:
            headers, members = claim.get("headers", {}), claim.get("members", {})
            first = await _name(web, server, SHORT, headers, members)
            assert first == await _name(web, server, OTHER, headers, members), claim
            assert first != await _name(web, server, SHORT, headers, members, key="sk-other"), claim
            names.append(first)
            names.append(await _name(web, server, SHORT, {**headers, **OWN}, members))
        assert len(set(names[::2])) == len(CLAIMS), "two sessions have one name"
        assert len(set(names[1::2])) == 1, "the own header was not believed"
        beside = await _name(web, server, SHORT, {"x-session-id": "s-4"}, {"prompt_cache_key": "s-10"})
        assert beside == names[2 * 3], "a header weighs more than the body"


async def _name(
    web: httpx.AsyncClient,
    server: Stub,
    talk: list[dict[str, Any]],
    headers: dict[str, str],
    members: dict[str, Any],
    key: str = "sk-one",
) -> str:
    """What the conversation is called; what told is seen to have gone on."""
    body = request_body("chat", talk, **members)
    answer = await web.post("/chat/completions", json=body, headers={**headers, "authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    seen = server.seen[-1]
    assert {name: seen.header(name) for name in headers if name not in OWN} == {
        name: value for name, value in headers.items() if name not in OWN
    }
    assert not any(name.lower().startswith("x-ullage") for name, _ in seen.headers)
    return answer.headers["x-ullage-conversation"]


async def test_programs_keep_their_name_through_their_own_compaction(stub: StartStub, proxy: StartProxy) -> None:
    """Before, in and after it, and in its title call, a program's session has one name; Codex tells its epoch."""
    server = await stub(window=10**6)
    front = await proxy(server.url, window=10**6)
    names: dict[str, set[str]] = {}
    async with loopback_client(base_url=front.root) as web:
        for file in FILES:
            program, requests = recorded(file)
            if program in ("codex", "claude-code", "opencode"):
                assert any(request.compacting for request in requests)
                names[program] = {await _conversation(web, request) for request in requests}
    assert {program: len(found) for program, found in names.items()} == dict.fromkeys(names, 1)
    assert len(set.union(*names.values())) == 3
    await until(lambda: len(request_lines(front)) == 9)
    codex = [line["epoch"] for line in request_lines(front) if line["api"] == "responses"]
    assert codex == sorted(codex)
    assert (codex[0], codex[-1]) == (0, 1)


async def _conversation(web: httpx.AsyncClient, request: Recorded) -> str:
    answer = await web.post(request.path, content=request.body, headers=request.headers)
    assert answer.status_code == 200
    return answer.headers["x-ullage-conversation"]
