"""A shared proxy and its secrets: who gets in, what gets out, and what the log may say."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import StartProxy, StartStub
from tests.stub import Answer, Call, Fault, Stub
from tests.stub.faults import JSON, error, events, redirect
from tests.support.loopback import loopback_client
from tests.support.process_inspection import metrics, processes_below, request_lines, total
from tests.support.sample_conversations import chat_turn

KEY, ACCESS, ADMIN, MINE = "sk-upstream-CANARYU1", "access-CANARYA1-0123456789", "admin-CANARYD1", "sk-client-CANARYC1"
STORE_KEY = "store-CANARYS1-0123456789abcdef"
SECRETS = (KEY, ACCESS, ADMIN, MINE, STORE_KEY)
WINDOW = 8192


@pytest.fixture
async def web() -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client without a cookie jar's help: what it is given to send is what it sends."""
    async with loopback_client() as client:
        yield client


def config(server: Stub, level: str = "info", **more: Any) -> dict[str, Any]:
    """A shared proxy: access keys in front, a key of its own behind."""
    return {
        "server": {"access_keys": [ACCESS], "admin_key": ADMIN},
        "store": {"key": STORE_KEY},
        "upstreams": [{"name": "up", "base_url": server.url, "api_key": KEY, **more}],
        "models": [{"name": "*", "context_window": WINDOW}],
        "telemetry": {"log": {"level": level, "format": "json"}},
    }


def long_chat(canary: str) -> list[dict[str, Any]]:
    """A conversation that must be compacted, with *canary* in every message."""
    turns = [message for turn in range(16) for message in chat_turn(turn, 320)] + chat_turn(99, 40)[:1]
    return [{**message, "content": f"{canary} {message['content']}"} for message in turns]


async def test_who_gets_in_and_what_goes_on(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """Only an access key opens a shared proxy, in either header; the upstream gets its own key and no other."""
    server = await stub()
    front = await proxy(server.url, config=config(server))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"x-api-key": ACCESS[:-1]},
        {"authorization": f"Bearer {KEY}"},
    ):
        for path in ("/v1/chat/completions", "/v1/models", "/v1/embeddings"):
            answer = await web.post(front.root + path, json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert server.seen == []
    for headers in ({"authorization": f"Bearer {ACCESS}"}, {"x-api-key": ACCESS}):
        assert (await web.post(f"{front.url}/chat/completions", json=body, headers=headers)).status_code == 200
        seen = server.seen.pop()
        assert seen.header("authorization") == f"Bearer {KEY}"
        assert ACCESS not in str(seen.headers)
    beside = {"x-ullage-key": ACCESS, "authorization": f"Bearer {MINE}"}
    assert (await web.post(f"{front.url}/chat/completions", json=body, headers=beside)).status_code == 200
    seen = server.seen.pop()
    assert ACCESS not in str(seen.headers)
    assert seen.header("authorization") in (f"Bearer {MINE}", f"Bearer {KEY}")
    assert (await web.get(f"{front.url}/files", headers={"x-api-key": ACCESS})).status_code == 403


async def test_no_secret_and_no_content_in_any_answer_header_or_log(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """With everything that can go wrong going wrong at debug level, no log, metric or header holds what is secret."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, config=config(server, "debug"), window=WINDOW)
    mine = {"authorization": f"Bearer {ACCESS}", "cookie": "c=CANARYK1"}
    said: list[str] = []

    async def ask(body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {**mine, "content-type": "application/json", **headers}
        answer = await web.post(front.root + path, content=data, headers=named)
        said.append(f"{answer.status_code} {answer.headers} {answer.text}")
        return answer

    short: list[dict[str, Any]] = [{"role": "user", "content": "CANARYT1"}]
    server.queue(Answer("CANARYT2", (Call("look", '{"a": "CANARYT3"}'),)))
    assert (await ask({"model": "m", "messages": short})).status_code == 200
    assert (await ask({"model": "m", "messages": long_chat("CANARYT4")})).headers["x-ullage-outcome"] == "compacted"
    assert (await ask({"model": "m", "messages": long_chat("CANARYT5"), "stream": True})).status_code == 200
    for fault in (
        error(500, "CANARYF1"), error(429, "CANARYF2"), redirect("http://127.0.0.1:9/CANARYF3"),
        Fault(cut="before_headers"), Fault(cut="mid_body"), Fault(raw=b"CANARYF4 nonsense\r\n\r\n"),
        Fault(raw=b"HTTP/1.1 200 OK\r\nbad header CANARYF5\r\n\r\n"), events(b'data: {"error": "CANARYF6"}\n\n'),
        Fault(raw=b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nCANARYF7\r\n"),
    ):  # fmt: skip
        server.fail(fault)
        try:
            await ask({"model": "m", "messages": short, "stream": "events" in str(fault.headers)})
        except httpx.TransportError:
            said.append("broken off")
    bad_tools = [{"type": "function", "function": {"name": "CANARYT6" + "n" * 40, "parameters": {}}}] * 900
    assert (await ask({"model": "m", "messages": short, "tools": bad_tools})).status_code == 400
    for broken in (
        b'{"model": "m", "messages": "CANARYB1',
        b'{"CANARYB2": ',
        b'["CANARYB3"]',
        b'{"model":{"CANARYB4":1}}',
    ):
        assert (await ask(broken)).status_code == 400
    assert (await ask(b"CANARYB5", **{"content-encoding": "gzip"})).status_code == 400
    assert (await ask(b"{}", **{"x-ullage-window": "CANARYB6"})).status_code == 400
    assert (await ask(b"{}", "/v1/files?CANARYQ1=1")).status_code == 403
    await ask({"model": "m", "input": "CANARYT7"}, "/v1/embeddings?q=CANARYQ2")
    await web.get(f"{front.root}/ullage/api/status", headers={"authorization": f"Bearer {ADMIN}"})
    await web.get(f"{front.root}/ullage/api/status", headers={"authorization": f"Bearer {ADMIN}x"})
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nCANARYH1 broken\r\n\r\nCANARYH2")
    await writer.drain()
    await asyncio.wait_for(reader.read(), 60)
    writer.close()

    figures = str(await metrics(front))
    assert front.end() == 0
    log = front.log.read_text(errors="replace")
    assert len(request_lines(front)) > 15
    assert re.findall(r"\w*CANARY\w*", log) == []
    assert re.findall(r"\w*CANARY\w*", figures) == []
    assert "Traceback" not in log
    for answer in said:
        assert not [secret for secret in SECRETS if secret in answer]
    own = [line for text in said for line in re.findall(r"x-ullage-[a-z-]+': '[^']*", text)]
    assert own
    assert not [line for line in own if "CANARY" in line]


async def test_what_is_stored_can_be_read_by_nobody_else(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """No file below the data directory holds a piece of a prompt, a block or a key in the clear."""
    server = await stub(window=WINDOW)
    front = await proxy(server.url, config=config(server), window=WINDOW)
    body = {"model": "m", "messages": long_chat("CANARYT4")}
    answer = await web.post(f"{front.url}/chat/completions", json=body, headers={"x-api-key": ACCESS})
    assert answer.headers["x-ullage-outcome"] == "compacted"
    assert front.end() == 0
    files = _files(f"{front.home}/data")
    assert any(b"ullage1:" in file.read_bytes() for file in files), "nothing was stored: nothing was tested"
    for file in files:
        assert not re.search(rb"CANARY|Question|parser", file.read_bytes()), file
        assert file.stat().st_mode & 0o077 == 0, f"{file} may be read by others"


def _files(folder: str) -> list[Path]:
    return [file for file in Path(folder).rglob("*") if file.is_file()]


async def test_a_redirect_is_not_followed(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """A redirect reaches the client; the host it names gets neither the request nor the key."""
    server, thief = await stub(), await stub()
    front = await proxy(server.url, config=config(server))
    for status in (301, 302, 303, 307, 308):
        for path in ("/chat/completions", "/models"):
            server.fail(redirect(f"{thief.url}/steal", status))
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
            method = "POST" if path == "/chat/completions" else "GET"
            answer = await web.request(method, front.url + path, json=body, headers={"x-api-key": ACCESS})
            assert (answer.status_code, answer.headers["location"]) == (status, f"{thief.url}/steal")
    assert thief.seen == []


async def test_a_path_cannot_carry_the_key_to_another_host(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """Whatever a request line holds, the configured key goes to the configured host or nowhere."""
    server, thief = await stub(), await stub()
    front = await proxy(server.url, config={**config(server), "server": {"access_keys": [ACCESS], "relay": "all"}})
    host = thief.root.removeprefix("http://")
    for target in (f"//{host}/v1/models", f"http://{host}/v1/models", f"/v1/..//{host}", f"@{host}/", f"/\\{host}/x"):
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(
            f"GET {target} HTTP/1.1\r\nHost: {host}\r\nX-Api-Key: {ACCESS}\r\nConnection: close\r\n\r\n".encode()
        )
        await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert thief.seen == []


async def test_web_pages_of_others_are_refused(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """A foreign Origin or a cross-site fetch is 403 on every route; a listed origin may call."""
    server = await stub()
    settings = {
        "models": [{"name": "*", "context_window": WINDOW}],
        "server": {"origins": ["https://chat.example.org"]},
        "upstreams": [{"name": "up", "base_url": server.url}],
    }
    front = await proxy(server.url, config=settings)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
    foreign = {"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}
    for headers in foreign:
        for path in ("/v1/chat/completions", "/v1/embeddings", "/chat/completions"):
            assert (await web.post(front.root + path, json=body, headers=headers)).status_code == 403
        assert (await web.get(f"{front.root}/ullage/api/status", headers=headers)).status_code == 403
    assert server.seen == []
    answer = await web.post(f"{front.url}/chat/completions", json=body, headers={"origin": "https://chat.example.org"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"


async def test_an_open_address_with_a_key_is_refused(stub: StartStub, proxy: StartProxy) -> None:
    """serve will not offer an upstream's key to whoever reaches the address, unless it is told to."""
    server = await stub()
    open_wide = config(server)
    open_wide["server"] = {}
    with pytest.raises(RuntimeError, match=r"server\.access_keys"):
        await proxy(server.url, config=open_wide, arguments=["--host", "0.0.0.0"])
    open_wide["server"] = {"open": True}
    front = await proxy(server.url, config=open_wide, arguments=["--host", "0.0.0.0"])
    assert "anybody who reaches the address" in front.log.read_text()


async def test_callers_share_nothing(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """One caller's cookies never reach another, and the same conversation of two callers has two names."""
    server = await stub(window=WINDOW)
    # By name and not by number: cookie jars keep nothing for addresses.
    front = await proxy(server.url.replace("127.0.0.1", "localhost"), window=WINDOW)
    server.fail(Fault(status=200, headers=(*JSON, ("set-cookie", "who=first; Path=/")), body=b"{}"))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
    first = await web.post(f"{front.url}/chat/completions", json=body, headers={"authorization": "Bearer one"})
    assert first.headers["set-cookie"] == "who=first; Path=/"
    web.cookies.clear()
    for key in ("one", "two"):
        await web.post(f"{front.url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert server.seen[-1].header("cookie") == ""
        assert server.seen[-1].header("authorization") == f"Bearer {key}"
    names = []
    for key in ("one", "two", "one"):
        long = {"model": "m", "messages": long_chat("x")}
        answer = await web.post(f"{front.url}/chat/completions", json=long, headers={"authorization": f"Bearer {key}"})
        names.append(answer.headers["x-ullage-conversation"])
    assert names[0] == names[2] != names[1]


async def test_one_callers_flood_does_not_stop_another(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """A hundred and fifty hanging calls of one caller leave room for another's; no connection limit is shared."""
    server = await stub()
    server.fail(Fault(hang=True), 150)
    front = await proxy(server.url, window=WINDOW)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
    limits = httpx.Limits(max_connections=None)
    async with loopback_client(limits=limits) as flood:
        calls = [asyncio.ensure_future(flood.post(f"{front.url}/chat/completions", json=body)) for _ in range(150)]
        async with asyncio.timeout(60):
            while len(server.seen) < 150:  # noqa: ASYNC110 - the stub's own record
                await asyncio.sleep(0.02)
        answer = await web.post(f"{front.url}/chat/completions", json=body, headers={"authorization": "Bearer two"})
        assert answer.status_code == 200
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks at processes through /proc")
async def test_secrets_do_not_show_in_the_process_list(stub: StartStub, proxy: StartProxy) -> None:
    """No process of the proxy carries a key in its command line: neither parent nor workers."""
    server = await stub()
    front = await proxy(server.url, config=config(server), arguments=["--workers", "2"])
    shown = processes_below(front.home).values()
    assert len(shown) == 3
    assert not [command for command in shown if "CANARY" in command]


async def test_endless_heads_take_no_memory_and_are_counted(proxy: StartProxy) -> None:
    """Heads without an end are refused before they cost what they send; the metrics tell how many."""
    front = await proxy("http://127.0.0.1:9/v1")
    field = b": " + b"a" * 32_000 + b"\r\n"
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"x%d" % n + field for n in range(90))
    before = resident(front.pid)
    for _ in range(5):
        connections = []
        for _ in range(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(front.root.rpartition(":")[2]))
            writer.write(head)
            connections.append((reader, writer))
        for reader, _ in connections:
            with contextlib.suppress(ConnectionError):  # what was not read any more makes the end a reset
                assert (await asyncio.wait_for(reader.read(64), 60)).split(b" ")[1:2] in ([b"431"], [])
        for _, writer in connections:
            writer.transport.abort()
    # A vocabulary of 40 MiB may be loaded meanwhile; what is kept of five rounds is less than two of them sent.
    assert resident(front.pid) - before < 2 * 40 * len(head) / 2**20
    await asyncio.sleep(2)  # metrics are brought up to date every second
    found = await metrics(front)
    assert total(found, "ullage_refused_connections_total", reason="head_too_large") == 200


def resident(pid: int) -> float:
    """Resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"^VmRSS:\s+(\d+)", status, re.MULTILINE)[0]) / 1024


async def test_a_small_bomb_is_refused_and_costs_nobody_else(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """A few kilobytes that unfold to a million empty messages are refused; so are too many that come as they are."""
    server = await stub()
    front = await proxy(server.url, config={**config(server), "server": {"limits": {"items": 500}}})
    many = b'{"model":"m","messages":[' + b"{}," * 1_300_000 + b"{}]}"
    answer = await web.post(
        f"{front.url}/chat/completions",
        content=gzip.compress(many),
        headers={"content-type": "application/json", "content-encoding": "gzip"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_inflates_too_far")
    for path, member in (("chat/completions", "messages"), ("messages", "messages"), ("responses", "input")):
        item = {"role": "user", "content": "Hi."}
        body = {"model": "m", "max_tokens": 16, member: [item] * 501}
        answer = await web.post(f"{front.url}/{path}", json=body)
        assert answer.status_code == 413
        assert "server.limits.items" in answer.text
        assert "too_many_items" in answer.headers["x-ullage-outcome"]
    assert server.seen == []
    assert total(await metrics(front), "ullage_loop_lag_seconds_count") > 0
