"""Gemini's own API: Google's client, the routes and credentials that only it has, a strict upstream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types

from tests.conftest import StartProxy, StartStub
from tests.stub import Answer, Rules, Stub, gemini
from tests.stub.faults import error
from tests.support.api_formats import request_body
from tests.support.loopback import loopback_client
from tests.support.proxy_process import Proxy, until
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, chat_turn, log, prose
from tests.support.view_checks import view_problems

WINDOW = 8192
KEY = "AIza-test-0123456789abcdef"
MODEL = "gemini-2.5-pro"
HEADERS = {"x-goog-api-key": KEY}
SHORT = chat_turn(1, 40)[:1]
LONG = [message for turn in range(20) for message in chat_turn(turn, 280)] + chat_turn(99, 60)[:1]
AGENT = agent_session(40, 300)
SIGNED = [{**message, "reasoning": "hm"} if message["role"] == "assistant" else message for message in AGENT]


@pytest.fixture
async def web() -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client with a key."""
    async with loopback_client(headers=HEADERS) as client:
        yield client


def url_of(front: Proxy, method: str = "generateContent", model: str = MODEL) -> str:
    return f"{front.root}/v1beta/models/{model}:{method}"


def body_of(chat: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
    return request_body("gemini", chat, AGENT_TOOLS, **members)


async def test_what_fits_passes_byte_for_byte(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """Odd spelling, underscores, unknown members and queries reach the upstream as they are; usage is read."""
    server = await stub(window=WINDOW)
    front = await proxy(server.root, window=WINDOW)
    spelled = {"system_instruction": {"parts": [{"text": "Be short."}]}, "generation_config": {"temperature": 1.0}}
    for chat in (SHORT, LONG[:8], SIGNED[:8]):
        for more in ({}, spelled):
            body = json.dumps(body_of(chat) | more, indent=1).encode()
            for method, query in (("generateContent", ""), ("streamGenerateContent", "?alt=sse&x=1%20")):
                answer = await web.post(url_of(front, method) + query, content=body)
                assert answer.status_code == 200, answer.text
                seen = server.seen[-1]
                assert (seen.body, seen.query) == (body, query.removeprefix("?"))
                assert seen.header("x-goog-api-key") == KEY
                assert answer.headers["x-ullage-outcome"] == "verbatim"
    await until(lambda: front.log.read_text().count("request_done") == len(server.seen))
    line = [json.loads(text) for text in front.log.read_text().splitlines() if "request_done" in text][-1]
    assert (line["api"], line["model"], line["stream"]) == ("gemini", MODEL, True)
    assert line["input_tokens"] == server.seen[-1].tokens
    assert line["output_tokens"] > 0


@pytest.mark.parametrize("model", [MODEL, "gemini-3-pro-preview"])
async def test_what_is_too_long_is_compacted(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient, model: str
) -> None:
    """A view is accepted by a strict upstream, whole, as events and as an array; calls keep their signatures."""
    server = await stub(window=WINDOW)
    front = await proxy(server.root, window=WINDOW)
    for chat in (LONG, AGENT if model == MODEL else SIGNED, SIGNED):
        body = json.dumps(body_of(chat)).encode()
        for method in ("generateContent", "streamGenerateContent?alt=sse", "streamGenerateContent"):
            answer = await web.post(url_of(front, method, model), content=body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ullage-outcome"] == "compacted"
            assert (server.seen[-1].verdict, server.seen[-1].why) == ("ok", "")
            assert view_problems(body, server.seen[-1]) == []
            assert "Understood" in answer.text
        assert isinstance(json.loads(answer.content), list)


async def test_an_overflow_is_answered_with_something_smaller(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """The window that was believed too large is learned from Google's words, and the request is sent again."""
    server = await stub(window=WINDOW)
    front = await proxy(server.root, window=4 * WINDOW)
    for method in ("generateContent", "streamGenerateContent?alt=sse"):
        server.forget()
        key = {"x-goog-api-key": method}  # a caller of whom nothing was learned
        answer = await web.post(url_of(front, method), json=body_of(LONG), headers=key)
        assert answer.status_code == 200, answer.text
        assert [seen.verdict for seen in server.chats()] == ["overflow", "ok"]
        assert answer.headers["x-ullage-outcome"] == "compacted"


async def test_refusals_have_the_shape_of_the_api(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """What cannot fit, cannot be read or cannot be answered is an error as Google spells it."""
    server = await stub(window=WINDOW)
    front = await proxy(server.root, window=WINDOW)
    system = {"role": "system", "content": prose(1, WINDOW + 500)}
    refused = await web.post(url_of(front), json=body_of([system, *SHORT]))
    said = refused.json()["error"]
    assert (refused.status_code, said["code"], said["status"]) == (400, 400, "INVALID_ARGUMENT")
    assert f"exceeds the maximum number of tokens allowed ({WINDOW})" in said["message"]
    for broken in (b"{", b"{}", b'{"contents":[1]}', b'{"contents":{}}'):
        answer = await web.post(url_of(front), content=broken)
        assert (answer.status_code, answer.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert server.chats() == []
    server.fail(error(500))
    assert (await web.post(url_of(front), json=body_of(SHORT))).status_code == 500


async def test_models_are_renamed_in_the_path(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """An alias, and a fallback, change the model in the path and nothing else; no model gets another's signature."""
    server = await stub(window=WINDOW, windows={"small": 2048})
    rules = [
        {"name": "alias", "model": MODEL},
        {"name": "small", "context_window": 2048, "overflow": [{"fallback": MODEL}, "compress"]},
        {"name": "*", "context_window": WINDOW},
    ]
    front = await proxy(server.root, config={"models": rules})
    for method in ("generateContent", "countTokens"):
        body = body_of(SHORT) if method == "generateContent" else {"contents": body_of(SHORT)["contents"]}
        answer = await web.post(url_of(front, method, "alias"), json=body)
        assert answer.status_code == 200, answer.text
        assert server.seen[-1].path == f"/v1beta/models/{MODEL}:{method}"
        assert json.loads(server.seen[-1].body) == body
    middling = SIGNED[:22]
    answer = await web.post(url_of(front, "streamGenerateContent?alt=sse", "small"), json=body_of(middling))
    assert answer.status_code == 200, answer.text
    seen = server.seen[-1]
    assert (seen.path, seen.query) == (f"/v1beta/models/{MODEL}:streamGenerateContent", "alt=sse")
    assert answer.headers["x-ullage-fallback"] == MODEL
    parts = [part for content in seen.messages for part in content["parts"]]
    signatures = {part["thoughtSignature"] for part in parts if "thoughtSignature" in part}
    assert signatures == {gemini.ANY_SIGNATURE}


async def test_a_key_in_the_query_is_a_credential(stub: StartStub, proxy: StartProxy) -> None:
    """It goes on as a header, names the same tenant as one, is in no log, and is not taken twice."""
    server = await stub(window=WINDOW)
    front = await proxy(server.root, window=WINDOW)
    names = []
    async with loopback_client() as web:
        for query, headers in ((f"?key={KEY}&alt=sse", {}), (f"?alt=sse&k%65y={KEY}", {}), ("?alt=sse", HEADERS)):
            answer = await web.post(url_of(front, "streamGenerateContent") + query, json=body_of(LONG), headers=headers)
            assert answer.status_code == 200, answer.text
            assert (server.seen[-1].query, server.seen[-1].header("x-goog-api-key")) == ("alt=sse", KEY)
            names.append(answer.headers["x-ullage-conversation"])
        other = await web.post(url_of(front) + "?key=other", json=body_of(LONG))
        names.append(other.headers["x-ullage-conversation"])
        assert (names[0] == names[1] == names[2], names[3] != names[0]) == (True, True)
        listed = await web.get(f"{front.root}/v1beta/models?key={KEY}&pageSize=5")
        assert listed.status_code == 200
        assert (server.seen[-1].query, server.seen[-1].header("x-goog-api-key")) == ("pageSize=5", KEY)
        twice = await web.post(url_of(front) + f"?key={KEY}", json=body_of(SHORT), headers=HEADERS)
        assert (twice.status_code, twice.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert KEY not in front.log.read_text()


async def test_access_keys_and_an_upstream_key(stub: StartStub, proxy: StartProxy) -> None:
    """An access key in Google's header or in the query admits, and goes no further."""
    server = await stub(window=WINDOW)
    upstream = {"name": "google", "base_url": server.root, "api_key": "own", "api_key_header": "x-goog-api-key"}
    config = {"upstreams": [upstream], "server": {"access_keys": ["access-key-0123456789"]}}
    front = await proxy(server.root, config={**config, "models": [{"name": "*", "context_window": WINDOW}]})
    async with loopback_client() as web:
        for query, headers in (("", {"x-goog-api-key": "access-key-0123456789"}), ("?key=access-key-0123456789", {})):
            answer = await web.post(url_of(front) + query, json=body_of(SHORT), headers=headers)
            assert answer.status_code == 200, answer.text
            assert server.seen[-1].query == ""
            assert [value for name, value in server.seen[-1].headers if name.lower() == "x-goog-api-key"] == ["own"]
        refused = await web.post(url_of(front) + "?key=wrong", json=body_of(SHORT))
        assert (refused.status_code, refused.json()["error"]["status"]) == (401, "UNAUTHENTICATED")


async def test_tokens_are_counted_of_what_would_be_sent(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """Contents alone, or a whole request; by the upstream, or by us if it cannot."""
    server = await stub(window=WINDOW)
    front = await proxy(server.root, window=WINDOW)
    url = url_of(front, "countTokens")
    for chat in (SHORT, agent_session(4, 300), AGENT):
        whole = body_of(chat)
        wrapped = {"generateContentRequest": {"model": f"models/{MODEL}", **whole}}
        for body in ({"contents": whole["contents"]}, wrapped):
            answer = await web.post(url, json=body)
            assert answer.status_code == 200, answer.text
            told = answer.json()["totalTokens"]
            assert told == server.seen[-1].tokens < WINDOW
            server.fail(error(404))
            ours = (await web.post(url, json=body)).json()["totalTokens"]
            assert abs(ours - told) <= 0.1 * told + 20
    assert gemini.request_tokens(whole) > WINDOW


async def test_googles_own_client(stub: StartStub, proxy: StartProxy) -> None:
    """Its chats, streams, counts and errors work as they do without the proxy."""
    server = await stub(window=WINDOW)
    front = await proxy(server.root, window=WINDOW)
    server.script = lambda seen: Answer(prose(seen.number, 400))
    web = loopback_client()
    options = types.HttpOptions(base_url=front.root, httpx_async_client=web)
    async with web, genai.Client(api_key=KEY, http_options=options).aio as client:
        chat = client.chats.create(model=MODEL, config={"system_instruction": "Be short."})
        for turn in range(24):
            words = chat_turn(turn, 300)[0]["content"]
            if turn % 2:
                async for _ in await chat.send_message_stream(words):
                    pass
            else:
                await chat.send_message(words)
            assert server.chats()[-1].verdict == "ok"
        history = chat.get_history()
        counted = await client.models.count_tokens(model=MODEL, contents=history)
        assert counted.total_tokens < WINDOW < sum(map(gemini.weigh, _plain(history)))
        with pytest.raises(errors.ClientError) as refusal:
            await client.models.generate_content(
                model=MODEL, contents="Hi", config={"system_instruction": prose(1, 9000)}
            )
        assert (refusal.value.code, refusal.value.status) == (400, "INVALID_ARGUMENT")


async def test_a_signature_that_stands_for_none(stub: StartStub, proxy: StartProxy) -> None:
    """Frameworks sign a call that is not from Gemini with a fixed text, which Google's client sends in base64."""
    server = await stub(window=WINDOW)
    front = await proxy(server.root, window=WINDOW)
    contents = [types.Content(role="user", parts=[types.Part(text="Find what is lost.")])]
    for at in range(24):
        call = types.FunctionCall(name="read_file", args={"path": f"src/part_{at}.py"})
        part = types.Part(function_call=call, thought_signature=gemini.ANY_SIGNATURE.encode())
        contents.append(types.Content(role="model", parts=[part]))
        read = types.Part.from_function_response(name="read_file", response={"output": log(at, 500)})
        contents.append(types.Content(role="user", parts=[read]))
    web = loopback_client()
    options = types.HttpOptions(base_url=front.root, httpx_async_client=web)
    async with web, genai.Client(api_key=KEY, http_options=options).aio as client:
        answer = await client.models.generate_content(model=MODEL, contents=contents)
    assert answer.text == "Understood."
    assert [seen.verdict for seen in server.chats()] == ["ok"]
    kept = [part for content in server.chats()[0].messages for part in content["parts"] if "thoughtSignature" in part]
    assert kept, "no call was left in the view"


def _plain(history: list[types.Content]) -> list[dict[str, Any]]:
    return [content.model_dump(mode="json", by_alias=True, exclude_none=True) for content in history]


async def test_mode_off_passes_the_clients_bytes(stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient) -> None:
    """They go to the model in the path, however long they are."""
    server: Stub = await stub(window=WINDOW)
    front = await proxy(server.root, window=WINDOW)
    server.rules = Rules(window=100 * WINDOW)
    body = json.dumps(body_of(LONG)).encode()
    answer = await web.post(url_of(front), content=body, headers={"x-ullage-mode": "off"})
    assert answer.status_code == 200
    assert server.seen[-1].body == body


def two_upstreams(openai: Stub, google: Stub, **of_google: Any) -> dict[str, Any]:
    """OpenAI's server, the default, with a key of its own, and Google's, which has an alias."""
    return {
        "upstreams": [
            {"name": "openai", "base_url": f"{openai.root}/v1", "api_key": "sk-openai"},
            {"name": "google", "base_url": google.root, **of_google},
        ],
        "models": [
            {"name": "gemini-*", "upstream": "google", "context_window": WINDOW},
            {"name": "embed", "upstream": "google", "model": "gemini-embedding-001"},
        ],
    }


SIBLINGS = [
    ("POST", "/v1beta/models/gemini-embedding-001:embedContent", {"model": "models/gemini-embedding-001"}),
    ("POST", "/v1/models/gemini-embedding-001:batchEmbedContents", {"requests": []}),
    ("POST", f"/v1beta/models/{MODEL}:batchGenerateContent", {"batch": {}}),
    ("POST", f"/v1beta/models/{MODEL}:generateContent", None),
    ("POST", f"/v1beta/models/{MODEL}:streamGenerateContent?alt=sse", None),
    ("POST", f"/v1beta/models/{MODEL}:countTokens", None),
    ("GET", "/v1beta/models", None),
    ("GET", f"/v1beta/models/{MODEL}", None),
    ("GET", f"/v1beta/models/{MODEL}/operations/o-1", None),
    ("POST", "/upload/v1beta/files?uploadType=multipart", {"file": {"displayName": "x"}}),
    ("GET", "/v1beta/files/f-1:download?alt=media", None),
    ("DELETE", "/v1beta/files/f-1", None),
    ("POST", "/v1beta/cachedContents", {"model": f"models/{MODEL}", "contents": []}),
    ("GET", "/v1beta/batches/b-1", None),
    ("GET", "/v1/projects/p/locations/l/batchPredictionJobs", None),
]


@pytest.mark.parametrize("own", [True, False], ids=["own key", "client's key"])
async def test_other_gemini_paths_go_to_the_server_of_their_model(
    stub: StartStub, proxy: StartProxy, own: bool
) -> None:
    """Whatever of the API is managed or not goes where the model's rule says, with that server's credential alone."""
    openai, google = await stub(), await stub(window=WINDOW)
    key = {"api_key": "g-own", "api_key_header": "x-goog-api-key"} if own else {}
    front = await proxy(google.root, config=two_upstreams(openai, google, **key))
    async with loopback_client(timeout=30, headers=HEADERS) as web:
        for method, path, body in SIBLINGS:
            managed = body is None and method == "POST"
            content = body_of(SHORT) if managed else body
            if managed and "countTokens" in path:
                content = {"contents": body_of(SHORT)["contents"]}
            before = len(google.seen)
            await web.request(method, f"{front.root}{path}", json=content)
            assert len(google.seen) == before + 1, path
            seen = google.seen[-1]
            assert (seen.method, seen.path) == (method, path.partition("?")[0])
            assert seen.header("x-goog-api-key") == ("g-own" if own else KEY)
            assert seen.header("authorization") == ""
    assert openai.seen == []


async def test_an_alias_is_renamed_in_other_gemini_paths(
    stub: StartStub, proxy: StartProxy, web: httpx.AsyncClient
) -> None:
    """In the path, and where a body repeats the model, in each request of a batch."""
    openai, google = await stub(), await stub()
    front = await proxy(google.root, config=two_upstreams(openai, google))
    requests = [{"model": "models/embed", "content": {"parts": [{"text": '"model":"models/embed"'}]}}] * 2
    await web.post(url_of(front, "batchEmbedContents", "embed"), json={"requests": requests})
    seen = google.seen[-1]
    assert seen.path == "/v1beta/models/gemini-embedding-001:batchEmbedContents"
    renamed = [{**each, "model": "models/gemini-embedding-001"} for each in requests]
    assert json.loads(seen.body) == {"requests": renamed}
    assert openai.seen == []


async def test_gemini_paths_that_store_are_refused_behind_a_shared_key(stub: StartStub, proxy: StartProxy) -> None:
    """Embeddings and lists pass; files, caches and batches are what others with the same upstream key could read."""
    openai, google = await stub(), await stub()
    config = two_upstreams(openai, google, api_key="g-own", api_key_header="x-goog-api-key")
    front = await proxy(google.root, config={**config, "server": {"access_keys": ["access-key-0123456789"]}})
    headers = {"x-goog-api-key": "access-key-0123456789"}
    open_to_all = ("embedContent", "batchEmbedContents")
    async with loopback_client(timeout=30, headers=headers) as web:
        for method, path, body in SIBLINGS:
            if body is None and method == "POST":
                continue
            answer = await web.request(method, f"{front.root}{path}", json=body)
            passes = path.endswith(open_to_all) or (method == "GET" and path.endswith(("/models", MODEL)))
            assert (answer.status_code != 403) is passes, path
            assert "error" not in answer.json() or passes or answer.json()["error"]["status"] == "PERMISSION_DENIED"
    assert {seen.header("x-goog-api-key") for seen in google.seen} == {"g-own"}
